"""tau2-bench through its gymnasium interface, played with a stand-in (`tau2_stand_in`)."""

import json
import sys
import time
from pathlib import Path

import pytest
from toyworld import Scripted, make_chat

from paw import cli
from paw.config.sections import Config, ModelConfig, RolloutConfig
from paw.envs import make_factory
from paw.envs.base import eval_tasks, train_tasks
from paw.envs.next_state import NextStateConfig, ask, read_triplets, write_triplets
from paw.errors import EnvironmentFailure, UserError
from paw.rollouts.guard import CheckedEnv
from paw.rollouts.scheduler import Rollouts
from paw.tools.sft.rwml import cut
from paw.types import Reply, Task, ToolCall

STAND_IN = Path(__file__).with_name("tau2_stand_in")
THOUGHT = "<think>Let me see.</think>"


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """Put the stand-in first on sys.path. Modules named `tau2` are unloaded after the test."""
    monkeypatch.syspath_prepend(STAND_IN)
    yield monkeypatch.syspath_prepend
    for name in [name for name in sys.modules if name == "tau2" or name.startswith("tau2.")]:
        del sys.modules[name]


def config_of(**changes):
    settings = {"name": "tau2", "eval_split": "test", "max_turns": 4, **changes}
    rollout = RolloutConfig(max_prompt_tokens=4096)
    return Config.model_validate(
        {"model": ModelConfig(path="-"), "env": settings, "rollout": rollout}
    )


def start(**changes):
    factory = make_factory(config_of(**changes))
    environment = factory.make()
    environment.reset(eval_tasks(factory, "test", 0, 0)[0])
    return environment


def call(name, **arguments):
    return f"{THOUGHT}<action>{json.dumps({'name': name, 'arguments': arguments})}</action>"


def test_splits_are_apart():
    factory = make_factory(config_of())
    train = []
    for step in range(2):
        train += [task.id for task in train_tasks(factory, step, 4, seed=1)]
    assert sorted(train) == [f"retail/{number}" for number in range(8)]  # each task once per epoch
    assert [t.id for t in eval_tasks(factory, "test", 0, 0)] == [
        "retail/8",
        "retail/9",
        "retail/10",
        "retail/11",
    ]
    assert factory.may_block
    assert factory.reward_max == 10.0
    assert factory.fingerprint().startswith("tau2 1.0.1 retail ")


def test_a_conversation_is_won():
    environment = start()
    prompt = environment.context()
    assert "Cancel orders on request.\n\n# Tools" in prompt
    assert prompt.count('{"name": "') == 4 - 1
    assert prompt.partition("# Conversation\n")[2].startswith(
        "user: Hi, please cancel order 8.\n\nNow"
    )
    assert environment.task == "user: Hi, please cancel order 8."
    outcome = environment.step(call("cancel", order="8", requestor="user"))
    assert outcome.observation == 'tool: {"order": "8"}'
    assert not outcome.done
    assert outcome.valid
    assert environment.context().count("assistant: ") == 1
    outcome = environment.step(environment.format_action("It is cancelled."))
    assert outcome.action == "It is cancelled."
    assert outcome.reward == 10.0
    assert outcome.won is True
    assert outcome.score == 1.0
    assert outcome.done
    assert outcome.observation == "user: Thank you. ###STOP###"
    with pytest.raises(AssertionError):
        environment.step("")


def test_as_a_conversation_with_tools():
    config = config_of(style="chat")
    factory = make_factory(config)
    environment = CheckedEnv(factory.make(), config.env)
    environment.reset(eval_tasks(factory, "test", 0, 0)[0])
    system, question = environment.context()
    assert system["content"].endswith("# Policy\nCancel orders on request.")
    assert "<action>" not in system["content"]
    assert question == {"role": "user", "content": "Hi, please cancel order 8."}
    assert [tool["function"]["name"] for tool in environment.tools] == ["find", "cancel", "done"]
    find_call, cancel = (ToolCall(name, {"order": "8"}, "call00000") for name in ("find", "cancel"))
    for reply, problem in (
        (Reply.of("", find_call, cancel), "one tool at a time"),
        (Reply.of("", ToolCall("find", {"order": 8}, "k")), "8 is not of type 'string'"),
        (Reply('{"name": "cancel"'), "who reads no JSON"),
    ):
        outcome = environment.step(reply)
        assert not outcome.valid
        assert problem in outcome.observation
        assert not environment._environment._game._gym.actions
    outcome = environment.step(Reply.of("", cancel))
    assert outcome.valid
    assert outcome.observation == '{"order": "8"}'
    assert environment.context()[-1] == {
        "role": "tool", "name": "cancel", "tool_call_id": "call00000", "content": '{"order": "8"}'
    }  # fmt: skip
    environment.close()


def test_the_end_of_the_turns_ends_the_conversation():
    environment = start()
    simulation = environment._gym
    outcomes = [environment.step(environment.format_action("Which order?")) for number in range(4)]
    assert [outcome.done for outcome in outcomes] == [False, False, False, True]
    assert outcomes[-1].won is False
    assert outcomes[-1].reward == 0.0
    assert outcomes[-1].observation == "user: As I said,\nthe order."
    deadline = time.monotonic() + 5
    while len(simulation.actions) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread reports it
    assert len(simulation.actions) == 5
    assert json.loads(simulation.actions[-1])["name"] == "done"


def test_a_malformed_action_reaches_nobody():
    environment = start(max_turns=20)
    simulation = environment._gym
    for response, problem in (
        ("<action>Hello", "within <action>"),
        (f"{THOUGHT}<action> </action>", "within <action>"),
        ("<action>Hello</action>", "within <think>"),
        (f'{THOUGHT}<action>{{"name": "find"</action>', "in JSON"),
        (f"{THOUGHT}<action>{{{'[' * 100_000}</action>", "in JSON"),
        (f'{THOUGHT}<action>{{"name": "find"}}</action>', '"arguments"'),
        (call("drop_tables", order="8"), "no tool 'drop_tables'"),
    ):
        outcome = environment.step(response)
        assert outcome.valid is False
        assert outcome.done is False
        assert simulation.actions == []
        assert outcome.observation.startswith("Invalid action: ")
        assert problem in outcome.observation
        assert outcome.observation in environment.context()
    without_thoughts = start(think=False)
    assert "<think>" not in without_thoughts.context()
    assert without_thoughts.step("<action>Hello</action>").valid


def test_what_breaks_is_a_failure():
    for user_model, message in (
        ("raises", "RuntimeError: It is not the agent's turn"),
        ("crashes", "the simulation of tau2 broke: error"),
        ("unreachable", "broke: infrastructure_error"),
        ("slow", r"no answer within 0\.05 s"),
    ):
        environment = start(user_model=user_model, step_timeout_s=0.05)
        with pytest.raises(EnvironmentFailure, match=message):
            environment.step(environment.format_action("Hello"))
        environment.close()
    with pytest.raises(
        EnvironmentFailure, match=r"retail/8 ended before it began; its log says why"
    ):
        start(user_model="down")
    with pytest.raises(EnvironmentFailure, match="not enough values to unpack"):
        make_factory(config_of()).make().reset(Task("retail/99", payload="99"))


def test_a_domain_or_split_that_is_not_there():
    for settings, message in (
        ({"domain": "bank"}, "env.domain = 'bank': tau2-bench has mock, retail"),
        ({"eval_split": "valid_unseen"}, "no split 'valid_unseen' to play; .* can be train, test"),
        ({"domain": "mock"}, "'mock' has no split 'train' to play; .* can be base"),
    ):
        with pytest.raises(UserError, match=message):
            make_factory(config_of(**settings))
    factory = make_factory(config_of(domain="mock", train_split="base", eval_split="base"))
    assert len(eval_tasks(factory, "base", 0, 0)) == 3


def test_no_tau2_or_another(path, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [folder for folder in sys.path if folder != str(STAND_IN)])
        with pytest.raises(
            UserError, match=r"needs Sierra Research.s tau2-bench.*git clone .* && pip install -e"
        ) as error:
            make_factory(config_of())
    assert ("this is 3.11" in str(error.value)) == (sys.version_info < (3, 12))
    (tmp_path / "tau2").mkdir()
    (tmp_path / "tau2" / "__init__.py").write_text("raise RuntimeError('never to be imported')")
    path(tmp_path)
    with pytest.raises(
        UserError, match=r"unrelated chemistry program\. pip uninstall tau2, then git clone"
    ):
        make_factory(config_of())
    (tmp_path / "tau2" / "gym").mkdir()
    (tmp_path / "tau2" / "__init__.py").write_text("import gymnasium_that_is_missing")
    with pytest.raises(
        UserError, match="cannot be imported: No module named 'gymnasium_that_is_missing'"
    ):
        make_factory(config_of())


def test_it_keeps_the_rules(capsys):
    assert cli.main(["env", "check", "tau2", "--env.max_turns", "6"]) == 0
    output = capsys.readouterr().out
    assert "'train': 8, 'test': 4\n" in output
    assert "all 15 rules hold" in output


def script(prompt):
    """Look an order up, cancel it and report it. The very first turn lacks its <action>."""
    order_id = prompt.partition("cancel order ")[2].partition(".")[0]
    answers = [
        THOUGHT,
        call("find", order=order_id),
        call("cancel", order=order_id),
        f"{THOUGHT}<action>Done.</action>",
    ]
    return answers[prompt.count("\nassistant: ")]


def test_rollouts_become_triplets_of_next_states(tmp_path):
    def play(**changes):
        config = config_of(**changes)
        chat = make_chat()
        factory = make_factory(config)
        rollouts = Rollouts(factory, Scripted(chat, script), chat, config)
        return rollouts.play_tasks(
            train_tasks(factory, 0, 2, 0), group_size=2, temperature=1.0, seed=0, stream="t"
        )

    groups, statistics = play()
    assert not statistics.failures
    assert [len(group.trajectories) for group in groups] == [2, 2]
    for episode in [*groups[0].trajectories, *groups[1].trajectories]:
        assert episode.won
        assert episode.episode_return == 10.0
        assert len(episode.turns) == 4
    triplets = cut(groups, dedup=True)
    assert len(triplets) == 2 * 3  # one conversation of each task, without the malformed turn
    assert [triplet.next_state for triplet in triplets[1:3]] == [
        triplets[0].next_state,
        "user: Thank you. ###STOP###",
    ]
    write_triplets(tmp_path / "triplets.jsonl", triplets)
    assert read_triplets(tmp_path / "triplets.jsonl") == triplets
    assert triplets[2].action == "Done."
    assert "Done." in ask(triplets[2], NextStateConfig(eval_split="held_out"))
    groups, statistics = play(user_model="unreachable")  # costs only its episodes
    assert groups == []
    assert len(statistics.failures) == 4
    assert "infrastructure_error" in statistics.failures[0]
