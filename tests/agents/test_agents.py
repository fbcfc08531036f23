"""Agents against scripted models, and against our own engine."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from paw.agents import endpoint
from paw.agents.endpoint import ChatCompletion
from paw.agents.examples import alfworld_examples, expert_example
from paw.agents.zerosearch import Simulator
from paw.config.sections import Config
from paw.envs import make_factory
from paw.envs.base import eval_tasks
from paw.errors import UserError
from paw.rollouts.episode import Episode, Model, find_agent, message_and_prefix
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.text.chat import context_text
from paw.types import Trajectory


class Scripted(Model):
    """Answers from a list, or by a function of (prompt, answer so far); `asked` keeps what it was asked."""

    def __init__(self, env, config, answers, asked):
        super().__init__(env, config)
        self.answers, self.asked = answers, asked

    async def _answer(self, turn, context, continues, stop, seed):
        prompt, start = message_and_prefix(context, continues)
        self.asked.append((prompt, start, tuple(stop), seed))
        turn.response = (
            self.answers(context_text(prompt), start)
            if callable(self.answers)
            else self.answers.pop(0)
        )
        return next((word for word in stop if turn.response.endswith(word)), "")


def configure(kind="plain", **sections):
    env = {"max_turns": 12, **sections.pop("env", {})}
    env |= {"difficulty": "tiny"} if env.get("name", "alfworld") == "alfworld" else {}
    agent = {"type": kind, **sections.pop("agent", {})}
    return Config.model_validate({"model": {"path": "-"}, "env": env, "agent": agent, **sections})


def play(config, answers):
    """(the episode of one evaluation task, what the model was asked)."""
    factory, said = make_factory(config), []
    task = eval_tasks(factory, config.env.eval_split, 1, 0)[0]
    episode = Episode(Trajectory(task, 0), 0, 0, "eval", 0.4)
    rollouts = Rollouts(factory, None, None, config)
    rollouts.run_episodes([episode], lambda env: Scripted(env, config, answers, said))
    rollouts.close()
    assert episode.trajectory.failure is None
    return episode, said


def actions_of(episode):
    return [outcome.action for _, _, outcome in episode.steps]


def valid_of(episode):
    return [outcome.valid for _, _, outcome in episode.steps]


def oracle_actions(config):
    """The oracle's actions for a task, found by playing it."""
    factory, actions, done = make_factory(config), [], False
    environment = factory.make()
    environment.reset(eval_tasks(factory, config.env.eval_split, 1, 0)[0])
    while not done:
        outcome = environment.step(environment.oracle())
        actions.append(outcome.action)
        done = outcome.done
    return actions


def test_the_limiter_spaces_requests_and_tokens_evenly(monkeypatch):
    now, pauses = 100.0, []

    async def sleep(seconds):
        nonlocal now
        pauses.append(seconds)
        now += seconds

    monkeypatch.setattr(endpoint, "sleep", sleep)
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(monotonic=lambda: now))

    def admit(limit, *tokens):
        pauses.clear()
        for count in tokens:
            asyncio.run(limit.admit(count))
        return pauses.copy()

    requests = endpoint.Limiter(30, 0)
    assert admit(requests, *[1000] * 4) == [2.0] * 3
    now += 60
    # Nobody came for a minute: no wait, and no burst after it.
    assert admit(requests, 1000, 1000) == [2.0]
    limiter = endpoint.Limiter(60, 6000)
    assert admit(limiter, 100, 100, 500, 100) == [1.0, 1.0, 5.0]
    now += 60
    assert admit(limiter, 500, 500) == [5.0]
    limiter.settle(-200)  # the second took 300
    assert admit(limiter, 0) == [3.0]
    assert admit(endpoint.Limiter(0, 0), *[10**6] * 100) == []


@pytest.mark.slow
def test_plain_play_is_that_of_paw_eval(tiny_llm, paw_here, tmp_path):
    """Token for token, with and without --out."""
    from paw.tools.evaluate.player import open_player, resolve

    folder = str(tiny_llm(tmp_path / "model"))
    given = {
        "env.data": "none", "env.difficulty": "tiny", "env.max_turns": 2, "eval.games": 5, "eval.temperature": 1.0,
        "engine.type": "transformers", "rollout.max_response_tokens": 12, "model.dtype": "float32",
    }  # fmt: skip
    paw_here("eval", folder, "--env", "alfworld", given, "--out", tmp_path / "out")
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()
    ]
    found = {line["place"]: [turn["response"] for turn in line["turns"]] for line in lines}
    overrides = {key: str(value).lower() for key, value in given.items()} | {"env.name": "alfworld"}
    config, path = resolve(folder, None, overrides)
    with open_player(config, path) as rollouts:
        groups, _ = rollouts.evaluation()
    expected = {
        group.index: [turn.response for turn in group.trajectories[0].turns] for group in groups
    }
    assert found == expected and len(found) == 5


# --- ReAct, Reflexion
# ------------------------------------------------------------------------------------------------


def test_react_wins_when_the_model_plays_the_oracle():
    """And old commands are played as new ones."""
    config = configure("react", env={"max_turns": 30, "kinds": ["pick"]})
    actions = oracle_actions(config)
    old = [re.sub("^move (.+) to ", r"put \1 in/on ", action) for action in actions]
    answers = [
        text for action in old for text in (f"think: I {action}.", f" {action}\nOn it, you see")
    ]
    episode, asked = play(config, answers)
    assert old != actions == actions_of(episode) and len(asked) == 2 * len(actions)
    assert (
        all(valid_of(episode))
        and episode.trajectory.won
        and episode.trajectory.episode_return == 10.0
    )
    thoughts = episode.trajectory.turns[::2]  # turns like all others, of which nothing comes
    assert all(turn.outcome.valid and turn.outcome.observation == "" for turn in thoughts)


def test_the_react_prompt_literally():
    episode, asked = play(configure("react"), ["think: Where am I?", "look", *["look"] * 30])
    first, second, third = (prompt for prompt, *_ in asked[:3])
    assert first.startswith(
        "Interact with a household to solve a task. After each '>' stands a thought, 'think: ...', or an action. Write "
        "what comes after the last '>', in one line. Here are two examples.\nYou are in the middle of a room."
    )
    head, _, task = first.partition("\nHere is the task.\n")
    assert head.count("Your task is to: ") == 2
    factory = make_factory(configure())
    opening = (
        factory.make().reset(episode.trajectory.task).partition("\n\n")[2].replace("\n\n", "\n")
    )
    assert task == f"{opening}\n>"
    assert second == f"{first} think: Where am I?\nOK.\n>"
    assert third == f"{second} look\n{episode.steps[0][2].observation}\n>"
    assert asked[0][2] == ("\n>",)
    assert len(asked) == 13 and len(episode.steps) == 12  # env.max_turns


def test_thoughts_alone_end_too_and_no_action_is_an_invalid_turn():
    episode, asked = play(configure("react"), lambda *_: "think: hm")
    assert len(asked) == 24 and not episode.steps and not episode.trajectory.won
    episode, asked = play(configure("react", env={"max_turns": 3}), ["", "<think>go on", "\n > \n"])
    assert valid_of(episode) == [False] * 3
    assert asked[1][0].endswith("\n> \nNothing happens.\n>")


def test_examples_of_ones_own_are_mapped(tmp_path):
    keys = [
        f"react_{name}_{i}"
        for name in ("put", "examine", "clean", "heat", "cool", "puttwo")
        for i in range(3)
    ]
    texts = {
        key: f"Episode {key}.\n> put mug 1 in/on desk 2\nYou put the mug 1 in/on the desk 2.\n"
        for key in keys
    }
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(texts))
    _, asked = play(
        configure("react", agent={"examples": path}, env={"kinds": ["look"]}), lambda *_: "look"
    )
    prompt = asked[0][0]
    assert (
        "Episode react_examine_1.\n> move mug 1 to desk 2\nYou move the mug 1 to the desk 2.\n"
        in prompt
    )
    assert (
        prompt.index("react_examine_1") < prompt.index("react_examine_0")
        and "react_put_2" not in prompt
    )
    with pytest.raises(UserError, match=r"holds episodes of alfworld, but env\.name = 'search'"):
        play(searching("react", agent={"examples": path}), [])
    wrong = (
        ("{", "Expecting"),
        ("{}", "'react_put_1'"),
        ("[1]", "list indices"),
        ('{"cells": []}', "'prompt1'"),
    )
    for content, reason in (
        *wrong,
        ('{"cells": [{}]}', "'source'"),
        ('{"webthink_simple6": 1}', "expected string"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=f"agent.examples = '{path}'.*{reason}"):
            find_agent(configure("react", agent={"examples": path}))


def test_the_authors_examples_of_search_and_webshop(tmp_path):
    """A few lines in the form of prompts_naive.json and of WebShop.ipynb."""
    path, why = tmp_path / "prompts_naive.json", "\nQuestion: Why?\nThought 1: "
    text = "\nQuestion: Who?\nThought 1: Hm.\nAction 1: Search[me]\nObservation 1: You.\nI am.\nThought 2: Ah.\n"
    text += f"Action 2: Finish[you]{why}Ha.\nAction 1: Lookup[x]{why}So.\nAction 1: Finish[so]\n"
    path.write_text(json.dumps({"webthink_simple6": text}))
    _, asked = play(searching("react", agent={"examples": path}), lambda *_: "Finish[x]")
    shown = "Question: Who?\n> think: Hm.\nOK.\n> Search[me]\nYou.\nI am.\n> think: Ah.\nOK.\n> Finish[you]\n"
    assert (
        f"Here are two examples.\n{shown}\nQuestion: Why?\n> think: So.\nOK.\n> Finish[so]\n\nHere is"
        in asked[0][0]
    )

    path = tmp_path / "WebShop.ipynb"
    text = "Webshop \nInstruction:  \nbuy tea \n[Search]  \n\nAction: search[tea]\nObservation: \n[B1] \n\n"
    code = (
        f'x = 1\nprompt1 = """{text}Action: think[good]\nObservation: OK.\n\nAction: click[B1]\n"""'
    )
    path.write_text(
        json.dumps(
            {"cells": [{"source": ["# a\n", "b"]}, {"source": code.splitlines(keepends=True)}]}
        )
    )
    env = {"name": "webshop", "products": 20, "eval_split": "test"}
    _, asked = play(
        configure("react", agent={"examples": path}, env=env), lambda *_: "click[buy now]"
    )
    shown = "Instruction: buy tea\n[Search]\n> search[tea]\n[B1]\n> think: good\nOK.\n> click[B1]\n"
    assert f"Here is an example.\n{shown}\nHere is the task." in asked[0][0]


def test_examples_of_an_oracle():
    example = alfworld_examples("heat")[0]
    assert example.count("> think: ") == 5 and example.count("\nOK.\n") == 5
    assert (
        "> take tomato 1 from sidetable 1\nYou pick up the tomato 1 from the sidetable 1.\n"
        in example
    )
    thought = "> think: Now I have tomato 1. Next, I need to heat it with a microwave, then put it in sinkbasin.\n"
    assert thought in example
    for kind in ("pick", "look", "clean", "heat", "cool", "two"):
        for example in alfworld_examples(kind):
            assert "Your task is to: " in example and "Nothing happens" not in example


@pytest.mark.parametrize(
    ("name", "beginning"), [("webshop", r"Instruction: .*\w"), ("search", r"Question: .*\w\?")]
)
def test_an_example_of_an_expert_begins_with_its_task(name, beginning):
    first_line = expert_example(name).partition("\n")[0]
    assert re.match(beginning, first_line)


def test_reflexion_plays_again_with_plans():
    config = configure("reflexion", agent={"trials": 5, "memory": 2}, env={"max_turns": 2})
    plans = iter(["New plan: look less.", "<think>so</think>walk more", "third", "fourth"])
    episode, asked = play(
        config, lambda prompt, _: next(plans) if prompt.endswith("New plan:") else "look"
    )
    assert episode.notes == ["look less.", "walk more", "third", "fourth"]
    assert (episode.trials, len(episode.steps), len(asked)) == (5, 10, 14)
    plays = [prompt for prompt, *_ in asked if prompt.endswith("\n>")]
    reflected = [prompt for prompt, *_ in asked if prompt.endswith("New plan:")]
    assert "Plans that you made" not in plays[0]
    memory = "Plans that you made after failed attempts at the task below:\n"
    assert f"{memory}Trial 1: look less.\nHere is the task.\n" in plays[2]
    assert f"{memory}Trial 1: third\nTrial 2: fourth\nHere is the task.\n" in plays[8]
    assert "> look\n" in reflected[0] and "STATUS: FAIL\n\nNew plan:" in reflected[0]
    assert (
        "two examples" not in reflected[0]
        and "Plans from past attempts:\nTrial 1: look less.\n" in reflected[1]
    )

    config = configure("reflexion", agent={"trials": 3}, env={"max_turns": 30})
    episode, _ = play(config, ["look"] * 30 + ["walk"] + oracle_actions(config))
    # It stops when it has won.
    assert episode.outcome.won and episode.trials == 2 and episode.steps[-1][0] == 2


# --- search
# ----------------------------------------------------------------------------------------------------------


def searching(kind, **more):
    env = {
        "name": "search",
        "eval_split": "test",
        "max_turns": 4,
        "invalid_penalty": 0.01,
        "reward": 1.0,
    }
    return configure(kind, env=env | {"entities": 50} | more.pop("env", {}), **more)


def test_search_r1_goes_on_with_one_answer():
    pytest.importorskip("bm25s")
    config = searching("search-r1")
    question = eval_tasks(make_factory(config), "test", 1, 0)[0].payload.text
    answers = [
        f"<think>Hm.</think>\n<search> {question} </search>",
        "nothing useful",
        "<search>a</search><answer>b",
    ]
    episode, asked = play(config, answers)
    prompts = {prompt for prompt, *_ in asked}
    assert len(prompts) == 1 and prompts.pop().endswith(
        f"<answer> Beijing </answer>. Question: {question}\n"
    )
    first, second, third = (start for _, start, *_ in asked)
    found = episode.steps[0][2].observation
    assert found.startswith('<information>{"result": "Doc 1: ')
    assert first == ""
    assert second == f"<think>Hm.</think>\n<search> {question} </search>\n\n{found}\n\n"
    assert third.startswith(f"{second}nothing useful\nMy action is invalid.")
    assert actions_of(episode) == [f"search[{question}]", "", "answer[b]"]
    assert valid_of(episode) == [True, False, True]
    assert asked[0][2] == ("</search>", "</answer>")


def test_search_r1_and_react_answer_right():
    pytest.importorskip("bm25s")
    for kind in ("search-r1", "react"):
        config = searching(kind)
        gold = eval_tasks(make_factory(config), "test", 1, 0)[0].payload.answers[0]
        answer = f"<answer>{gold}" if kind == "search-r1" else f"Finish[{gold}]"
        episode, asked = play(config, ["<search>x" if kind == "search-r1" else "Search[x]", answer])
        assert episode.outcome.won and actions_of(episode) == ["search[x]", f"answer[{gold}]"]
    assert "> Search[" in asked[0][0] and "> Finish[" in asked[0][0]
    assert asked[1][0].endswith(f"\n> Search[x]\n{episode.steps[0][2].observation}\n>")


def test_react_shops():
    pytest.importorskip("bm25s")
    config = configure(
        "react", env={"name": "webshop", "eval_split": "test", "max_turns": 15, "products": 200}
    )
    actions = oracle_actions(config)
    episode, asked = play(config, ["I would buy something.", *actions])
    assert episode.outcome.won and episode.outcome.score == 1.0
    assert valid_of(episode) == [False] + [True] * len(actions)
    assert "\n> click[buy now]\n" in asked[0][0]


def test_agents_that_answer_questions_play_no_household():
    with pytest.raises(UserError, match="not 'alfworld'"):
        find_agent(configure("search-r1"))


def test_react_plays_an_environment_of_ones_own_by_its_admissible_actions():
    example = Path(__file__).parents[2] / "docs" / "example_environment.py"
    episode, asked = play(configure("react", env={"name": f"{example}:Guess"}), lambda *_: "50")
    assert (
        asked[0][0].partition("\nHere is the task.\n")[2].startswith("Task: I think of a number.")
    )
    assert "\n(possible: 1, 2, 3, " in asked[0][0] and actions_of(episode)[0] == "50"


# --- ZeroSearch
# ------------------------------------------------------------------------------------------------------


class Librarian:
    """A chat model that always writes the same."""

    def __init__(self, text):
        self.text, self.asked = text, []

    async def complete(self, prompt, **_):
        self.asked.append(prompt)
        return ChatCompletion(self.text, 1, 1)


def test_a_simulated_search_engine():
    """Its share of noise rises over training, and what a query finds stays."""
    model = Librarian(
        "Doc 1: Tik is\na town.\n\n**Doc 2:** It lies far away.\nDoc 3: More.\nDoc 4: Most."
    )
    settings = {"noise_start": 0.1, "noise_end": 0.9, "noise_base": 4.0}
    config = searching("plain", env={"simulator": settings}, run={"updates": 100})
    simulator = Simulator(model, config.env.simulator, config.run)
    hits = simulator.search("where is Tik", 3)
    assert [hit.contents for hit in hits] == ["Tik is a town.", "It lies far away.", "More."]
    assert {hit.id for hit in hits} == {"useful/1", "useful/2", "useful/3"}
    assert (
        "generate 3 useful documents" in model.asked[0]
        and "Query: where is Tik\n" in model.asked[0]
    )
    found = [simulator.search(f"query {i}", 1, step=50) for i in range(400)]
    noisy = sum(hits[0].id.startswith("noisy") for hits in found)
    assert (
        120 <= noisy <= 180
        and sum("noisy information" in prompt for prompt in model.asked) == noisy
    )
    assert found == [simulator.search(f"query {i}", 1, step=50) for i in range(400)]
    shares = [simulator.share(step) for step in (None, 0, 50, 100, 200)]
    assert shares == pytest.approx([0.1, 0.1, 0.1 + (4**0.5 - 1) / 3 * 0.8, 0.9, 0.9])
    model.text = "no documents here"
    assert simulator.search("who", 3)[0].contents == "no documents here"
