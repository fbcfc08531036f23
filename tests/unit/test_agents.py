"""Agents without training, against scripted models and against our own engine."""

import json
import threading
from contextlib import closing
from pathlib import Path

import pytest

from paw import cli
from paw.agents.agents import make_agent
from paw.agents.endpoint import Limiter
from paw.agents.episode import Episode
from paw.agents.examples import alfworld_examples
from paw.agents.models import ContextFull, Local, Reply
from paw.agents.results import summarise, table
from paw.agents.zerosearch import Simulator
from paw.config import Config, EndpointConfig
from paw.envs import make_factory
from paw.errors import UserError
from paw.rollout.success import wilson


class Scripted:
    """A chat model whose answers are a list, or a function of (prompt, start); it keeps what it was asked."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []

    def complete(self, prompt, *, start="", stop=(), temperature, max_tokens, seed):
        self.asked.append((prompt, start, tuple(stop), seed))
        text = self.answers(prompt, start) if callable(self.answers) else self.answers.pop(0)
        if isinstance(text, Exception):
            raise text
        return Reply(text, prompt_tokens=len(prompt), completion_tokens=len(text), cut=False)

    def close(self):
        pass


def configure(kind="plain", **sections):
    env = {"difficulty": "tiny", "max_turns": 12, **sections.pop("env", {})}
    agent = {"kind": kind, **sections.pop("agent", {})}
    return Config.model_validate({"model": {"path": "-"}, "env": env, "agent": agent, **sections})


def play(config, answers, *, place=0):
    """The episode of one evaluation task, and the model that played it."""
    factory, model = make_factory(config), Scripted(answers)
    task = factory.eval_tasks("valid_unseen", place + 1, 0)[place]
    episode = Episode(task, factory.make(), model, config, place)
    make_agent(config, factory).play(episode)
    return episode, model


def test_plain_sends_the_prompt_of_the_environment():
    factory = make_factory(configure())
    environment = factory.make()
    environment.reset(factory.eval_tasks("valid_unseen", 1, 0)[0])
    episode, model = play(configure(env={"max_turns": 2}), ["<think>a</think><action>look</action>", "nothing at all"])
    assert model.asked[0][:3] == (environment.context(), "", ())
    environment.step("<think>a</think><action>look</action>")
    assert model.asked[1][0] == environment.context()
    assert [(turn["action"], turn["valid"]) for turn in episode.turns] == [("look", True), ("nothing at all", False)]
    assert episode.done and not episode.won and episode.calls == 2


def test_the_expert_wins_by_plain_answers():
    factory, config = make_factory(configure()), configure()
    task = factory.eval_tasks("valid_unseen", 1, 0)[0]
    environment = factory.make()
    episode = Episode(task, environment, Scripted(lambda *_: environment.oracle()), config, 0)
    make_agent(config, factory).play(episode)
    assert episode.won and episode.turns[-1]["reward"] == 10.0


def test_short_forms_of_the_command_line():
    words = ["eval", "--agent", "react", "--env=alfworld", "--endpoint", "http://a", "--model", "m", "--json"]
    expected = {"agent.kind": "react", "env.name": "alfworld", "endpoint.url": "http://a", "endpoint.model": "m"}
    assert cli._split_overrides(words) == (["eval", "--json"], expected)
    for command in ("plan", "rwml"):  # these have a --model of their own
        words = [command, "--model", "m", "--recipe", "r"]
        assert cli._split_overrides(words) == (words, {})


# --- the limiter -----------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now, self.pauses = 100.0, []

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


def limiter(requests, tokens):
    clock = Clock()
    return Limiter(requests, tokens, clock=lambda: clock.now, sleep=clock.sleep), clock


def test_requests_are_spaced_evenly():
    limit, clock = limiter(30, 0)
    for _ in range(4):
        limit.admit(1000)
    assert clock.pauses == [2.0, 2.0, 2.0]
    clock.now += 60
    limit.admit(1000)
    assert len(clock.pauses) == 3  # nobody came for a minute: no wait, and no burst after it
    limit.admit(1000)
    assert clock.pauses[3:] == [2.0]


def test_tokens_are_spaced_and_settled():
    limit, clock = limiter(0, 6000)
    limit.admit(500)
    limit.admit(500)
    assert clock.pauses == [5.0]
    limit.settle(-400)  # the second took 100
    limit.admit(0)
    assert clock.pauses == [5.0, 1.0]
    limit.settle(200)
    limit.admit(0)
    assert clock.pauses[2:] == [2.0]


def test_no_limit_never_waits():
    limit, clock = limiter(0, 0)
    for _ in range(100):
        limit.admit(10**6)
        limit.settle(10**6)
    assert clock.pauses == []


# --- our own engine as a chat model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_and_chat(tiny_llm, tmp_path_factory):
    from paw.model.policy import load_policy, load_tokenizer, pick_device
    from paw.rollout.chat import Chat
    from paw.rollout.engines.transformers import TransformersEngine

    folder = str(tiny_llm(tmp_path_factory.mktemp("tiny")))
    chat = Chat(load_tokenizer(folder))
    policy = load_policy(folder, dtype="float32", device=pick_device("cpu"))
    return TransformersEngine(policy.lm, end_ids=chat.end_ids), chat


def test_many_threads_get_what_the_engine_gives_one(engine_and_chat):
    from paw.rollout.engines.base import Request

    engine, chat = engine_and_chat
    engine.submit(Request(0, chat.prompt_ids("who?"), 5, 1.0, 8))
    (alone,) = engine.step()
    found = {}
    with closing(Local(engine, chat, max_prompt_tokens=64)) as model:

        def ask(i):
            found[i] = model.complete(
                "who?" if i == 3 else f"{i}?", temperature=1.0, max_tokens=8, seed=5 if i == 3 else i
            )

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found[3].text == chat.decode(alone.token_ids)
    assert found[3].prompt_tokens == len(chat.prompt_ids("who?")) and found[3].completion_tokens == len(alone.token_ids)
    assert len({reply.text for reply in found.values()}) > 8


def test_an_answer_goes_on_after_its_beginning(engine_and_chat):
    from paw.rollout.engines.base import Request

    engine, chat = engine_and_chat
    ids = chat.prompt_ids("why?") + chat.observation_ids("<think>Be", 99)
    engine.submit(Request(0, ids, 5, 1.0, 12))
    (alone,) = engine.step()
    text = chat.decode(alone.token_ids)
    with closing(Local(engine, chat, max_prompt_tokens=256)) as model:
        reply = model.complete("why?", start="<think>Be", temperature=1.0, max_tokens=12, seed=5)
        assert (reply.text, reply.prompt_tokens) == (text, len(ids))
        reply = model.complete("why?", start="<think>Be", stop=[text[4]], temperature=1.0, max_tokens=12, seed=5)
        assert (reply.text, reply.cut) == (text.partition(text[4])[0], False)
        assert reply.completion_tokens == len(alone.token_ids)


def test_long_prompts_are_cut_and_counted_but_not_begun_answers(engine_and_chat):
    engine, chat = engine_and_chat
    with closing(Local(engine, chat, max_prompt_tokens=64)) as model:
        assert model.complete("a" * 500, temperature=1.0, max_tokens=1, seed=0).prompt_tokens == 64
        assert model.truncated == 1
        with pytest.raises(ContextFull):
            model.complete("why?", start="a" * 500, temperature=1.0, max_tokens=1, seed=0)


def test_an_engine_that_fails_tells_every_thread(engine_and_chat):
    _, chat = engine_and_chat

    class Broken:
        continuous, pending = True, 0

        def submit(self, request):
            self.pending = 1

        def step(self):
            self.pending = 0
            raise MemoryError("full")

    with closing(Local(Broken(), chat, max_prompt_tokens=64)) as model:
        for _ in range(2):
            with pytest.raises(MemoryError):
                model.complete("a", temperature=1.0, max_tokens=1, seed=0)
    with pytest.raises(RuntimeError, match="closed"):
        model.complete("a", temperature=1.0, max_tokens=1, seed=0)


@pytest.mark.slow
def test_plain_play_is_that_of_paw_eval(tiny_llm, paw_here, tmp_path):
    """Token for token, though threads play it; and `paw eval` itself goes another way without --out."""
    from paw.tools.player import open_player, resolve

    folder = str(tiny_llm(tmp_path / "model"))
    given = {
        "env.data": "none", "env.difficulty": "tiny", "env.max_turns": 2, "eval.games": 5, "eval.temperature": 1.0,
        "rollout.engine": "transformers", "rollout.max_response_tokens": 12, "model.dtype": "float32",
    }  # fmt: skip
    paw_here("eval", folder, "--env", "alfworld", given, "--out", tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()]
    found = {line["place"]: [turn["response"] for turn in line["turns"]] for line in lines}
    overrides = {key: str(value).lower() for key, value in given.items()} | {"env.name": "alfworld"}
    config, path = resolve(folder, None, overrides)
    with open_player(config, path) as rollouts:
        groups, _ = rollouts.evaluation()
    expected = {group.place: [turn.response for turn in group.trajectories[0].turns] for group in groups}
    assert found == expected and len(found) == 5


# --- ReAct, Reflexion ------------------------------------------------------------------------------------------------

FACTORY = make_factory(configure())


def expert_lines(config, place=0):
    """The expert's actions for a task, found by playing it."""
    factory = make_factory(config)
    environment = factory.make()
    environment.reset(factory.eval_tasks("valid_unseen", place + 1, 0)[place])
    lines = []
    while True:
        outcome = environment.step(environment.oracle())
        lines.append(outcome.action)
        if outcome.done:
            return lines


def test_react_wins_when_the_model_plays_the_expert():
    config = configure("react", env={"max_turns": 30})
    for place in range(6):
        actions = expert_lines(config, place)
        answers = [text for action in actions for text in (f"think: I {action}.", f" {action}\nOn it, you see")]
        episode, model = play(config, answers, place=place)
        assert episode.won and len(episode.turns) == len(actions) and len(model.asked) == 2 * len(actions)
        assert all(turn["valid"] for turn in episode.turns)


def test_the_react_prompt_literally():
    config = configure("react")
    episode, model = play(config, ["think: Where am I?", "look", *["look"] * 30])
    first, second, third = (asked[0] for asked in model.asked[:3])
    assert first.startswith(
        "Interact with a household to solve a task. After each '>' stands a thought, 'think: ...', or an action. Write "
        "what comes after the last '>', in one line. Here are two examples.\nYou are in the middle of a room."
    )
    head, _, task = first.partition("\nHere is the task.\n")
    assert head.count("Your task is to: ") == 2
    opening = FACTORY.make().reset(episode.task).partition("\n\n")[2].replace("\n\n", "\n")
    assert task == f"{opening}\n>"
    assert second == f"{first} think: Where am I?\nOK.\n>"
    seen = episode.turns[0]["observation"]
    assert third == f"{second} look\n{seen}\n>"
    assert model.asked[0][2] == ("\n>",)
    assert episode.calls == 13 and len(episode.turns) == 12  # env.max_turns


def test_thoughts_alone_end_too():
    episode, _ = play(configure("react"), lambda *_: "think: hm")
    assert episode.calls == 24 and not episode.turns and not episode.won


def test_no_action_is_an_invalid_turn():
    episode, model = play(configure("react", env={"max_turns": 3}), ["", "<think>go on", "\n > \n"])
    assert [turn["valid"] for turn in episode.turns] == [False] * 3
    assert model.asked[1][0].endswith("\n> \nNothing happens.\n>")


def test_old_commands_are_played_as_new_ones():
    config = configure("react", env={"max_turns": 30, "kinds": ["pick"]})
    actions = expert_lines(config)
    assert actions[-1].startswith("move ")
    old = actions[-1].replace("move", "put").replace(" to ", " in/on ")
    episode, _ = play(config, [*actions[:-1], old])
    assert episode.won and episode.turns[-1]["action"] == actions[-1]


def old_file(tmp_path, **more):
    keys = [f"react_{name}_{i}" for name in ("put", "examine", "clean", "heat", "cool", "puttwo") for i in range(3)]
    episodes = {key: f"Episode {key}.\n> put mug 1 in/on desk 2\nYou put the mug 1 in/on the desk 2.\n" for key in keys}
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({**episodes, **more}))
    return path


def test_examples_of_ones_own_are_mapped(tmp_path):
    episode, model = play(configure("react", agent={"examples": old_file(tmp_path)}), lambda *_: "look")
    name = {"look": "examine", "pick": "put", "two": "puttwo"}.get(episode.task.kind, episode.task.kind)
    prompt = model.asked[0][0]
    assert f"Episode react_{name}_1.\n> move mug 1 to desk 2\nYou move the mug 1 to the desk 2.\n" in prompt
    assert prompt.index(f"react_{name}_1") < prompt.index(f"react_{name}_0") and "react_put_2" not in prompt


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), ("{", "Expecting"), ("{}", "'react_put_1'"), ("[1]", "list indices")],
)
def test_a_bad_file_of_examples_is_a_users_error(tmp_path, content, reason):
    path = tmp_path / "prompts.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"agent.examples = '{path}'.*{reason}"):
        make_agent(configure("react", agent={"examples": path}), FACTORY)


def test_an_example_of_an_expert_literally():
    text = alfworld_examples("heat")[0]
    assert text == EXAMPLE
    for kind in ("pick", "look", "clean", "heat", "cool", "two"):
        assert all(
            "Your task is to: " in example and "Nothing happens" not in example for example in alfworld_examples(kind)
        )


def test_reflexion_plays_again_with_plans():
    config = configure("reflexion", agent={"trials": 5, "memory": 2}, env={"max_turns": 2})
    plans = iter(["New plan: look less.", "<think>so</think>walk more", "third", "fourth"])
    episode, model = play(config, lambda prompt, _: next(plans) if prompt.endswith("New plan:") else "look")
    assert episode.plans == ["look less.", "walk more", "third", "fourth"]
    assert (episode.trials, len(episode.turns), episode.calls) == (5, 10, 14)
    plays = [prompt for prompt, *_ in model.asked if prompt.endswith("\n>")]
    asked = [prompt for prompt, *_ in model.asked if prompt.endswith("New plan:")]
    assert "Plans that you made" not in plays[0]
    memory = "Plans that you made after failed attempts at the task below:\n"
    assert f"{memory}Trial 1: look less.\nHere is the task.\n" in plays[2]
    assert f"{memory}Trial 1: third\nTrial 2: fourth\nHere is the task.\n" in plays[8]
    assert "> look\n" in asked[0] and "STATUS: FAIL\n\nNew plan:" in asked[0] and "two examples" not in asked[0]
    assert "Plans from past attempts:\nTrial 1: look less.\n" in asked[1]


def test_reflexion_stops_when_it_has_won():
    config = configure("reflexion", agent={"trials": 3}, env={"max_turns": 30})
    actions = expert_lines(config)
    episode, _ = play(config, ["look"] * 30 + ["walk"] + actions)
    assert episode.won and episode.trials == 2 and episode.turns[-1]["trial"] == 2


# --- search ----------------------------------------------------------------------------------------------------------


def searching(kind, **more):
    env = {"name": "search", "eval_split": "test", "max_turns": 4, "invalid_penalty": 0.01, "reward": 1.0}
    return Config.model_validate(
        {"model": {"path": "-"}, "env": env, "agent": {"kind": kind}, "search": {"entities": 50}, **more}
    )


def ask(config, answers):
    factory, model = make_factory(config), Scripted(answers)
    task = factory.eval_tasks("test", 1, 0)[0]
    episode = Episode(task, factory.make(), model, config, 0)
    make_agent(config, factory).play(episode)
    return episode, model


def test_search_r1_goes_on_with_one_answer():
    pytest.importorskip("bm25s")
    config = searching("search-r1")
    question = make_factory(config).eval_tasks("test", 1, 0)[0].payload.text
    answers = [f"<think>Hm.</think>\n<search> {question} ", "nothing useful", "<search>a</search><answer>b"]
    episode, model = ask(config, answers)
    prompts = {prompt for prompt, *_ in model.asked}
    assert len(prompts) == 1 and prompts.pop().endswith(f"<answer> Beijing </answer>. Question: {question}\n")
    first, second, third = (start for _, start, *_ in model.asked)
    found = episode.turns[0]["observation"]
    assert found.startswith('<information>{"result": "Doc 1: ')
    assert first == ""
    assert second == f"<think>Hm.</think>\n<search> {question} </search>\n\n{found}\n\n"
    assert third.startswith(f"{second}nothing useful\nMy action is invalid.")
    assert [turn["action"] for turn in episode.turns] == [f"search[{question}]", "", "answer[b]"]
    assert [turn["valid"] for turn in episode.turns] == [True, False, True]
    assert model.asked[0][2] == ("</search>", "</answer>")


def test_search_r1_and_react_answer_right():
    pytest.importorskip("bm25s")
    for kind in ("search-r1", "react"):
        config = searching(kind)
        factory = make_factory(config)
        gold = factory.eval_tasks("test", 1, 0)[0].payload.answers[0]
        answer = f"<answer>{gold}" if kind == "search-r1" else f"Finish[{gold}]"
        query = "<search>x" if kind == "search-r1" else "Search[x]"
        episode, model = ask(config, [query, answer])
        assert episode.won and [turn["action"] for turn in episode.turns] == ["search[x]", f"answer[{gold}]"]
    assert "> Search[" in model.asked[0][0] and "> Finish[" in model.asked[0][0]
    assert model.asked[1][0].endswith(f"\n> Search[x]\n{episode.turns[0]['observation']}\n>")


def test_react_shops():
    pytest.importorskip("bm25s")
    env = {"name": "webshop", "eval_split": "test", "max_turns": 15}
    shop = {"model": {"path": "-"}, "env": env, "agent": {"kind": "react"}, "webshop": {"products": 200}}
    config = Config.model_validate(shop)
    factory = make_factory(config)
    task = factory.eval_tasks("test", 1, 0)[0]
    environment, actions, done = factory.make(), [], False
    environment.reset(task)
    while not done:
        outcome = environment.step(environment.oracle())
        actions.append(outcome.action)
        done = outcome.done
    model = Scripted(["I would buy something.", *actions])
    episode = Episode(task, factory.make(), model, config, 0)
    make_agent(config, factory).play(episode)
    assert episode.won and episode.outcome.score == 1.0
    assert [turn["valid"] for turn in episode.turns] == [False] + [True] * len(actions)
    assert "\n> click[buy now]\n" in model.asked[0][0]


# --- ZeroSearch ------------------------------------------------------------------------------------------------------


def test_a_simulated_search_engine():
    config = searching("plain")
    model = Scripted(lambda *_: "Doc 1: Tik is\na town.\n\n**Doc 2:** It lies far away.\nDoc 3: More.\nDoc 4: Most.")
    simulator = Simulator(model, config)
    hits = simulator.search(["where is Tik", "who"], 3)
    assert [[hit.contents for hit in found] for found in hits] == [["Tik is a town.", "It lies far away.", "More."]] * 2
    assert {hit.id for hit in hits[0]} == {"useful/1", "useful/2", "useful/3"}
    assert any(
        "generate 3 useful documents" in prompt and "Query: where is Tik\n" in prompt for prompt, *_ in model.asked
    )
    assert all(hit.id.startswith("noisy/") for hit in simulator.search(["who"], 2, share=1.0)[0])
    assert "noisy information" in model.asked[-1][0]


def test_the_share_of_noise():
    model, queries = Scripted(lambda *_: "no documents here"), [f"query {i}" for i in range(400)]
    simulator = Simulator(model, searching("plain"))
    found = simulator.search(queries, 1, share=0.25)
    noisy = sum(hits[0].id.startswith("noisy") for hits in found)
    assert 70 <= noisy <= 130
    assert found == simulator.search(queries, 1, share=0.25)
    assert found[0][0].contents == "no documents here"


def test_noise_rises_over_training():
    config = searching(
        "plain", simulator={"noise_start": 0.1, "noise_end": 0.9, "noise_base": 4.0}, run={"updates": 100}
    )
    simulator = Simulator(Scripted([]), config)
    assert simulator.share(None) == simulator.share(0) == pytest.approx(0.1)
    assert simulator.share(50) == pytest.approx(0.1 + (4**0.5 - 1) / 3 * 0.8)
    assert simulator.share(100) == simulator.share(200) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("kind", "reason"), [("search-r1", "plays env.name = 'search', not 'alfworld'"), ("react", "Game.task")]
)
def test_what_an_agent_cannot_play_is_a_users_error(kind, reason):
    factory = FACTORY
    config = configure(kind)
    if kind == "react":
        example = Path(__file__).parents[2] / "docs" / "example_environment.py"
        config = configure(kind, env={"name": f"{example}:Guess"})
        factory = make_factory(config)
    with pytest.raises(UserError, match=reason):
        make_agent(config, factory)


# --- the table of results --------------------------------------------------------------------------------------------


def episode_line(kind, success, *, score=None, failure=None):
    turns = [{"valid": True}, {"valid": success}]
    spent = {"calls": 2, "prompt_tokens": 100, "completion_tokens": 10, "cost": 0.25, "seconds": 1.5}
    return {"kind": kind, "success": success, "score": score, "steps": 2, "turns": turns, "context_full": False,
            "failure": failure, **spent}  # fmt: skip


def row(environment, lines):
    about = {"env.name": environment, "agent.kind": "react", "model": "m", "games": "these", "eval.temperature": 0.4}
    summary = summarise(lines, about, EndpointConfig(input_price=1.0), 9.0)
    return table(summary).splitlines()


def test_rows_as_in_the_papers_tables():
    lines = [
        episode_line(kind, won) for kind in ("two", "pick", "look") for won in (True, False, False, kind == "pick")
    ]
    head, _, cells, _, success, rest = row("alfworld", lines)
    assert head == "| Model | Agent | Pick | Look | Pick2 | All |"
    assert cells == "| m | react | 50.0 | 25.0 | 25.0 | 33.3 |"
    low, high = wilson(4, 12)
    interval = f"(95 % interval {low:.1%} to {high:.1%})"
    assert success == f"these, temperature 0.4: success 33.3% of 12 episodes {interval}"
    assert rest == (
        "2.0 turns an episode, valid actions 66.7%; 24 calls, 1200 prompt and 120 completion tokens, $3.00; "
        "18 s of episodes, 9 s by the clock in this run"
    )
    sales = [("toys", True, 1.0), ("toys", False, 0.6), ("shoes", False, None)]  # the last one never took a step
    shop = row("webshop", [episode_line(kind, won, score=score) for kind, won, score in sales])
    assert (shop[0], shop[2]) == ("| Model | Agent | Score | Succ. |", "| m | react | 53.3 | 33.3 |")
    search = row("search", [episode_line("hotpotqa", True), episode_line("nq", False), episode_line("nq", False)])
    assert (search[0], search[2]) == ("| Model | Agent | NQ | HotpotQA | Avg. |", "| m | react | 0.0 | 100.0 | 50.0 |")


def test_what_was_not_played_counts_nowhere_but_costs():
    lines = [episode_line("pick", True), episode_line("pick", False, failure="EndpointError: down")]
    text = row("alfworld", lines)
    assert text[2] == "| m | react | 100.0 | 100.0 |" and "$0.50" in text[5]
    assert text[-1] == "1 episodes could not be played and count nowhere above"


EXAMPLE = """\
You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a countertop 1, a \
diningtable 1, a microwave 1, a shelf 2, a shelf 1, a sidetable 1, a sinkbasin 1, a stoveburner 1, and a \
toaster 1.
Your task is to: put a hot tomato in sinkbasin.
> think: To solve the task, I need to find and take a tomato, then heat it with a microwave, then put it in sinkbasin.
OK.
> think: First I need to find a tomato. I check one place after another, beginning with cabinet 1.
OK.
> go to cabinet 1
You arrive at cabinet 1. The cabinet 1 is closed.
> open cabinet 1
You open the cabinet 1. The cabinet 1 is open. In it, you see a dishsponge 1, a glassbottle 2, a kettle 1, and \
a pan 1.
> go to countertop 1
You arrive at countertop 1. On the countertop 1, you see a glassbottle 1.
> go to sidetable 1
You arrive at sidetable 1. On the sidetable 1, you see a mug 1, a plate 2, a potato 2, and a tomato 1.
> think: Now I see tomato 1. Next, I need to take it.
OK.
> take tomato 1 from sidetable 1
You pick up the tomato 1 from the sidetable 1.
> think: Now I have tomato 1. Next, I need to heat it with a microwave, then put it in sinkbasin.
OK.
> go to microwave 1
You arrive at microwave 1. The microwave 1 is closed.
> heat tomato 1 with microwave 1
You heat the tomato 1 using the microwave 1.
> think: Now tomato 1 is hot. Next, I need to put it in sinkbasin.
OK.
> go to sinkbasin 1
You arrive at sinkbasin 1. On the sinkbasin 1, you see a cup 1, and a plate 1.
> move tomato 1 to sinkbasin 1
You move the tomato 1 to the sinkbasin 1.
"""
