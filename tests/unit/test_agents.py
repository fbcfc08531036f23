"""Agents without training, against scripted models and against our own engine."""

import threading
from contextlib import closing

import pytest

from paw.agents.agents import Episode, make_agent
from paw.agents.endpoint import Limiter
from paw.agents.models import ContextFull, Local, Reply
from paw.config import Config
from paw.experience.envs import make_suite


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
    suite, model = make_suite(config), Scripted(answers)
    task = suite.eval_tasks("valid_unseen", place + 1, 0)[place]
    episode = Episode(task, suite.make(), model, config, place)
    make_agent(config, suite).play(episode)
    return episode, model


def test_plain_sends_the_prompt_of_the_environment():
    suite = make_suite(configure())
    environment = suite.make()
    environment.reset(suite.eval_tasks("valid_unseen", 1, 0)[0])
    episode, model = play(configure(env={"max_turns": 2}), ["<think>a</think><action>look</action>", "nothing at all"])
    assert model.asked[0][:3] == (environment.prompt(), "", ())
    environment.step("<think>a</think><action>look</action>")
    assert model.asked[1][0] == environment.prompt()
    assert [(turn["action"], turn["valid"]) for turn in episode.turns] == [("look", True), ("nothing at all", False)]
    assert episode.done and not episode.won and episode.calls == 2


def test_the_expert_wins_by_plain_answers():
    suite, config = make_suite(configure()), configure()
    task = suite.eval_tasks("valid_unseen", 1, 0)[0]
    environment = suite.make()
    episode = Episode(task, environment, Scripted(lambda *_: environment.expert()), config, 0)
    make_agent(config, suite).play(episode)
    assert episode.won and episode.turns[-1]["reward"] == 10.0


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
    from paw.experience.chat import Chat
    from paw.experience.engines.transformers import TransformersEngine
    from paw.learner.model import load_policy, load_tokenizer, pick_device

    folder = str(tiny_llm(tmp_path_factory.mktemp("tiny")))
    chat = Chat(load_tokenizer(folder))
    policy = load_policy(folder, dtype="float32", device=pick_device("cpu"))
    return TransformersEngine(policy.lm, end_ids=chat.end_ids), chat


def test_many_threads_get_what_the_engine_gives_one(engine_and_chat):
    from paw.experience.engines.base import Request

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
    from paw.experience.engines.base import Request

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
