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
from paw.tools.evaluate.player import open_player, resolve
from paw.types import Trajectory


class Scripted(Model):
    """Answers from a list, or with a function of (prompt, answer so far). Collects its requests in
    `asked`."""

    def __init__(self, env, config, answers, asked):
        super().__init__(env, config)
        self.answers = answers
        self.asked = asked

    async def _answer(self, turn, context, continues, stop, seed):
        prompt, answer_so_far = message_and_prefix(context, continues)
        self.asked.append((prompt, answer_so_far, tuple(stop), seed))
        turn.response = (
            self.answers(context_text(prompt), answer_so_far)
            if callable(self.answers)
            else self.answers.pop(0)
        )
        return next((word for word in stop if turn.response.endswith(word)), "")


def configure(agent_type="plain", **sections):
    env_settings = {"max_turns": 12, **sections.pop("env", {})}
    if env_settings.get("name", "alfworld") == "alfworld":
        env_settings["difficulty"] = "tiny"
    agent_settings = {"type": agent_type, **sections.pop("agent", {})}
    return Config.model_validate(
        {"model": {"path": "-"}, "env": env_settings, "agent": agent_settings, **sections}
    )


def play(config, answers):
    """Play one evaluation task. Returns (the episode, the requests to the model)."""
    factory = make_factory(config)
    requests = []
    task = eval_tasks(factory, config.env.eval_split, 1, 0)[0]
    episode = Episode(Trajectory(task, 0), 0, 0, "eval", 0.4)
    rollouts = Rollouts(factory, None, None, config)
    rollouts.run_episodes([episode], lambda env: Scripted(env, config, answers, requests))
    rollouts.close()
    assert episode.trajectory.failure is None
    return episode, requests


def actions_of(episode):
    return [outcome.action for *_, outcome in episode.steps]


def valid_of(episode):
    return [outcome.valid for *_, outcome in episode.steps]


def oracle_actions(config):
    """Play a task with the oracle. Returns its actions."""
    factory = make_factory(config)
    actions = []
    is_done = False
    environment = factory.make()
    environment.reset(eval_tasks(factory, config.env.eval_split, 1, 0)[0])
    while not is_done:
        outcome = environment.step(environment.oracle())
        actions.append(outcome.action)
        is_done = outcome.done
    return actions


def test_the_limiter_spaces_requests_and_tokens_evenly(monkeypatch):
    clock = 100.0
    pauses = []

    async def sleep(seconds):
        nonlocal clock
        pauses.append(seconds)
        clock += seconds

    monkeypatch.setattr(endpoint, "sleep", sleep)
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(monotonic=lambda: clock))

    def admit(limiter_used, *tokens):
        pauses.clear()
        for token_count in tokens:
            asyncio.run(limiter_used.admit(token_count))
        return pauses.copy()

    requests = endpoint.Limiter(30, 0)
    assert admit(requests, *[1000] * 4) == [2.0] * 3
    clock += 60
    # No request for a minute: the next one does not wait, and there is no burst after it.
    assert admit(requests, 1000, 1000) == [2.0]
    limiter = endpoint.Limiter(60, 6000)
    assert admit(limiter, 100, 100, 500, 100) == [1.0, 1.0, 5.0]
    clock += 60
    assert admit(limiter, 500, 500) == [5.0]
    limiter.settle(-200)  # the second request took 300 tokens
    assert admit(limiter, 0) == [3.0]
    assert admit(endpoint.Limiter(0, 0), *[10**6] * 100) == []


@pytest.mark.slow
def test_plain_play_is_that_of_paw_eval(tiny_llm, paw_here, tmp_path):
    """The tokens are the same with --out and without it."""
    folder = str(tiny_llm(tmp_path / "model"))
    settings = {
        "env.data": "none", "env.difficulty": "tiny", "env.max_turns": 2, "eval.games": 3, "eval.attempts": 2,
        "eval.temperature": 1.0, "engine.type": "transformers", "rollout.max_response_tokens": 12,
        "model.dtype": "float32",
    }  # fmt: skip
    paw_here("eval", folder, "--env", "alfworld", settings, "--out", tmp_path / "out")
    records = [
        json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()
    ]
    responses = {}
    for record in records:
        responses[record["place"]] = [turn["response"] for turn in record["turns"]]
    overrides = {key: str(value).lower() for key, value in settings.items()} | {
        "env.name": "alfworld"
    }
    config, path = resolve(folder, None, overrides)
    with open_player(config, path) as rollouts:
        groups, _ = rollouts.evaluation()
    expected = {}
    for group in groups:
        for episode in group.trajectories:
            place = 2 * group.index + episode.member
            expected[place] = [turn.response for turn in episode.turns]
    assert responses == expected
    assert len(responses) == 6
    assert responses[0] != responses[1], "attempts at a game are drawn independently"
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["pass_at_2"] >= results["pass_at_1"] == results["success"]


# --- ReAct, Reflexion


def test_react_wins_when_the_model_plays_the_oracle():
    """Commands in ALFWorld's old wording are translated to the new one."""
    config = configure("react", env={"max_turns": 30, "kinds": ["pick"]})
    actions = oracle_actions(config)
    old_commands = [re.sub("^move (.+) to ", r"put \1 in/on ", action) for action in actions]
    answers = []
    for action in old_commands:
        answers += [f"think: I {action}.", f" {action}\nOn it, you see"]
    episode, requests = play(config, answers)
    assert old_commands != actions == actions_of(episode)
    assert len(requests) == 2 * len(actions)
    assert all(valid_of(episode))
    assert episode.trajectory.won
    assert episode.trajectory.episode_return == 10.0
    # Thoughts are turns too, but the environment does not answer them.
    thoughts = episode.trajectory.turns[::2]
    assert all(turn.outcome.valid and turn.outcome.observation == "" for turn in thoughts)


def test_the_react_prompt_literally():
    episode, requests = play(configure("react"), ["think: Where am I?", "look", *["look"] * 30])
    first_prompt, second_prompt, third_prompt = (prompt for prompt, *_ in requests[:3])
    assert first_prompt.startswith(
        "Interact with a household to solve a task. After each '>' stands a thought, 'think: ...', or an action. Write "
        "what comes after the last '>', in one line. Here are two examples.\nYou are in the middle of a room."
    )
    examples, _, shown_task = first_prompt.partition("\nHere is the task.\n")
    assert examples.count("Your task is to: ") == 2
    factory = make_factory(configure())
    opening = (
        factory.make().reset(episode.trajectory.task).partition("\n\n")[2].replace("\n\n", "\n")
    )
    assert shown_task == f"{opening}\n>"
    assert second_prompt == f"{first_prompt} think: Where am I?\nOK.\n>"
    assert third_prompt == f"{second_prompt} look\n{episode.steps[0][2].observation}\n>"
    assert requests[0][2] == ("\n>",)
    assert len(requests) == 13
    assert len(episode.steps) == 12  # env.max_turns


def test_thoughts_alone_end_too_and_no_action_is_an_invalid_turn():
    episode, requests = play(configure("react"), lambda *_: "think: hm")
    assert len(requests) == 24
    assert not episode.steps
    assert not episode.trajectory.won
    episode, requests = play(
        configure("react", env={"max_turns": 3}), ["", "<think>go on", "\n > \n"]
    )
    assert valid_of(episode) == [False] * 3
    assert requests[1][0].endswith("\n> \nNothing happens.\n>")


def test_examples_of_ones_own_are_mapped(tmp_path):
    texts = {}
    for example_kind in ("put", "examine", "clean", "heat", "cool", "puttwo"):
        for number in range(3):
            example_name = f"react_{example_kind}_{number}"
            play_text = "> put mug 1 in/on desk 2\nYou put the mug 1 in/on the desk 2.\n"
            texts[example_name] = f"Episode {example_name}.\n{play_text}"
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(texts))
    _, requests = play(
        configure("react", agent={"examples": path}, env={"kinds": ["look"]}), lambda *_: "look"
    )
    prompt = requests[0][0]
    assert (
        "Episode react_examine_1.\n> move mug 1 to desk 2\nYou move the mug 1 to the desk 2.\n"
        in prompt
    )
    assert prompt.index("react_examine_1") < prompt.index("react_examine_0")
    assert "react_put_2" not in prompt
    with pytest.raises(UserError, match=r"holds episodes of alfworld, but env\.name = 'search'"):
        play(searching("react", agent={"examples": path}), [])
    damaged = (
        ("{", "Expecting"),
        ("{}", "'react_put_1'"),
        ("[1]", "list indices"),
        ('{"cells": []}', "'prompt1'"),
    )
    for content, reason in (
        *damaged,
        ('{"cells": [{}]}', "'source'"),
        ('{"webthink_simple6": 1}', "expected string"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=f"agent.examples = '{path}'.*{reason}"):
            find_agent(configure("react", agent={"examples": path}))


def test_the_authors_examples_of_search_and_webshop(tmp_path):
    """The files have the format of prompts_naive.json and WebShop.ipynb, with fewer lines."""
    path = tmp_path / "prompts_naive.json"
    question = "\nQuestion: Why?\nThought 1: "
    text = "\nQuestion: Who?\nThought 1: Hm.\nAction 1: Search[me]\nObservation 1: You.\nI am.\nThought 2: Ah.\n"
    text += f"Action 2: Finish[you]{question}Ha.\nAction 1: Lookup[x]{question}So.\nAction 1: Finish[so]\n"
    path.write_text(json.dumps({"webthink_simple6": text}))
    _, requests = play(searching("react", agent={"examples": path}), lambda *_: "Finish[x]")
    examples = "Question: Who?\n> think: Hm.\nOK.\n> Search[me]\nYou.\nI am.\n> think: Ah.\nOK.\n> Finish[you]\n"
    assert (
        f"Here are two examples.\n{examples}\nQuestion: Why?\n> think: So.\nOK.\n> Finish[so]\n\nHere is"
        in requests[0][0]
    )

    path = tmp_path / "WebShop.ipynb"
    text = "Webshop \nInstruction:  \nbuy tea \n[Search]  \n\nAction: search[tea]\nObservation: \n[B1] \n\n"
    cell_code = (
        f'x = 1\nprompt1 = """{text}Action: think[good]\nObservation: OK.\n\nAction: click[B1]\n"""'
    )
    path.write_text(
        json.dumps(
            {"cells": [{"source": ["# a\n", "b"]}, {"source": cell_code.splitlines(keepends=True)}]}
        )
    )
    webshop_env = {"name": "webshop", "products": 20, "eval_split": "test"}
    _, requests = play(
        configure("react", agent={"examples": path}, env=webshop_env), lambda *_: "click[buy now]"
    )
    examples = (
        "Instruction: buy tea\n[Search]\n> search[tea]\n[B1]\n> think: good\nOK.\n> click[B1]\n"
    )
    assert f"Here is an example.\n{examples}\nHere is the task." in requests[0][0]


def test_examples_of_an_oracle():
    example = alfworld_examples("heat")[0]
    assert example.count("> think: ") == 5
    assert example.count("\nOK.\n") == 5
    assert (
        "> take tomato 1 from sidetable 1\nYou pick up the tomato 1 from the sidetable 1.\n"
        in example
    )
    thought = "> think: Now I have tomato 1. Next, I need to heat it with a microwave, then put it in sinkbasin.\n"
    assert thought in example
    for kind in ("pick", "look", "clean", "heat", "cool", "two"):
        for example in alfworld_examples(kind):
            assert "Your task is to: " in example
            assert "Nothing happens" not in example


@pytest.mark.parametrize(
    ("name", "beginning"), [("webshop", r"Instruction: .*\w"), ("search", r"Question: .*\w\?")]
)
def test_an_example_of_an_expert_begins_with_its_task(name, beginning):
    first_line = expert_example(name).partition("\n")[0]
    assert re.match(beginning, first_line)


def test_reflexion_plays_again_with_plans():
    config = configure("reflexion", agent={"trials": 5, "memory": 2}, env={"max_turns": 2})
    written_plans = iter(["New plan: look less.", "<think>so</think>walk more", "third", "fourth"])
    episode, requests = play(
        config, lambda prompt, _: next(written_plans) if prompt.endswith("New plan:") else "look"
    )
    assert episode.notes == ["look less.", "walk more", "third", "fourth"]
    assert episode.trials == 5
    assert len(episode.steps) == 10
    assert len(requests) == 14
    play_prompts = [prompt for prompt, *_ in requests if prompt.endswith("\n>")]
    reflected = [prompt for prompt, *_ in requests if prompt.endswith("New plan:")]
    assert "Plans that you made" not in play_prompts[0]
    memory = "Plans that you made after failed attempts at the task below:\n"
    assert f"{memory}Trial 1: look less.\nHere is the task.\n" in play_prompts[2]
    assert f"{memory}Trial 1: third\nTrial 2: fourth\nHere is the task.\n" in play_prompts[8]
    assert "> look\n" in reflected[0]
    assert "STATUS: FAIL\n\nNew plan:" in reflected[0]
    assert "two examples" not in reflected[0]
    assert "Plans from past attempts:\nTrial 1: look less.\n" in reflected[1]

    config = configure("reflexion", agent={"trials": 3}, env={"max_turns": 30})
    episode, _ = play(config, ["look"] * 30 + ["walk"] + oracle_actions(config))
    # It stops when it has won.
    assert episode.outcome.won
    assert episode.trials == 2
    assert episode.steps[-1][0] == 2


# --- search


def searching(agent_type, **sections):
    settings = {
        "name": "search",
        "eval_split": "test",
        "max_turns": 4,
        "invalid_penalty": 0.01,
        "reward": 1.0,
    }
    env_settings = settings | {"entities": 50} | sections.pop("env", {})
    return configure(agent_type, env=env_settings, **sections)


def test_search_r1_goes_on_with_one_answer():
    pytest.importorskip("bm25s")
    config = searching("search-r1")
    question = eval_tasks(make_factory(config), "test", 1, 0)[0].payload.text
    answers = [
        f"<think>Hm.</think>\n<search> {question} </search>",
        "nothing useful",
        "<search>a</search><answer>b",
    ]
    episode, requests = play(config, answers)
    prompts = {prompt for prompt, *_ in requests}
    assert len(prompts) == 1
    assert prompts.pop().endswith(f"<answer> Beijing </answer>. Question: {question}\n")
    first_start, second_start, third_start = (start for _, start, *_ in requests)
    documents = episode.steps[0][2].observation
    assert documents.startswith('<information>{"result": "Doc 1: ')
    assert first_start == ""
    assert second_start == f"<think>Hm.</think>\n<search> {question} </search>\n\n{documents}\n\n"
    assert third_start.startswith(f"{second_start}nothing useful\nMy action is invalid.")
    assert actions_of(episode) == [f"search[{question}]", "", "answer[b]"]
    assert valid_of(episode) == [True, False, True]
    assert requests[0][2] == ("</search>", "</answer>")


def test_search_r1_and_react_answer_right():
    pytest.importorskip("bm25s")
    for agent_type in ("search-r1", "react"):
        config = searching(agent_type)
        right_answer = eval_tasks(make_factory(config), "test", 1, 0)[0].payload.answers[0]
        is_tagged = agent_type == "search-r1"
        answer = f"<answer>{right_answer}" if is_tagged else f"Finish[{right_answer}]"
        episode, requests = play(config, ["<search>x" if is_tagged else "Search[x]", answer])
        assert episode.outcome.won
        assert actions_of(episode) == ["search[x]", f"answer[{right_answer}]"]
    assert "> Search[" in requests[0][0]
    assert "> Finish[" in requests[0][0]
    assert requests[1][0].endswith(f"\n> Search[x]\n{episode.steps[0][2].observation}\n>")


def test_react_shops():
    pytest.importorskip("bm25s")
    config = configure(
        "react", env={"name": "webshop", "eval_split": "test", "max_turns": 15, "products": 200}
    )
    actions = oracle_actions(config)
    episode, requests = play(config, ["I would buy something.", *actions])
    assert episode.outcome.won
    assert episode.outcome.score == 1.0
    assert valid_of(episode) == [False] + [True] * len(actions)
    assert "\n> click[buy now]\n" in requests[0][0]


def test_agents_that_answer_questions_play_no_household():
    with pytest.raises(UserError, match="not 'alfworld'"):
        find_agent(configure("search-r1"))


def test_react_plays_an_environment_of_ones_own_by_its_admissible_actions():
    example = Path(__file__).parents[2] / "examples" / "number_game.py"
    episode, requests = play(configure("react", env={"name": f"{example}:Guess"}), lambda *_: "50")
    assert (
        requests[0][0]
        .partition("\nHere is the task.\n")[2]
        .startswith("Task: I think of a number.")
    )
    assert "\n(possible: 1, 2, 3, " in requests[0][0]
    assert actions_of(episode)[0] == "50"


# --- ZeroSearch


class Librarian:
    """A chat model that always writes the same text."""

    def __init__(self, text):
        self.text = text
        self.asked = []

    async def complete(self, prompt, **_):
        self.asked.append(prompt)
        return ChatCompletion(self.text, 1, 1)


def test_a_simulated_search_engine():
    """The share of noise rises during training. Repeating a query gives the same documents."""
    model = Librarian(
        "Doc 1: Tik is\na town.\n\n**Doc 2:** It lies far away.\nDoc 3: More.\nDoc 4: Most."
    )
    settings = {"noise_start": 0.1, "noise_end": 0.9, "noise_base": 4.0}
    config = searching("plain", env={"simulator": settings}, run={"updates": 100})
    simulator = Simulator(model, config.env.simulator, config.run)
    hits = simulator.search("where is Tik", 3)
    assert [hit.contents for hit in hits] == ["Tik is a town.", "It lies far away.", "More."]
    assert {hit.id for hit in hits} == {"useful/1", "useful/2", "useful/3"}
    assert "generate 3 useful documents" in model.asked[0]
    assert "Query: where is Tik\n" in model.asked[0]
    results = [simulator.search(f"query {number}", 1, step=50) for number in range(400)]
    noisy_count = sum(hits[0].id.startswith("noisy") for hits in results)
    assert 120 <= noisy_count <= 180
    assert sum("noisy information" in prompt for prompt in model.asked) == noisy_count
    assert results == [simulator.search(f"query {number}", 1, step=50) for number in range(400)]
    shares = [simulator.share(step) for step in (None, 0, 50, 100, 200)]
    assert shares == pytest.approx([0.1, 0.1, 0.1 + (4**0.5 - 1) / 3 * 0.8, 0.9, 0.9])
    model.text = "no documents here"
    assert simulator.search("who", 3)[0].contents == "no documents here"
