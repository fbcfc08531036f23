"""Environments that misbehave in every way there is cost their own episodes, and nothing else."""

import threading
import time
from pathlib import Path

import pytest
import torch
from toyworld import make_chat, make_engine, practised_model

from paw.config import Config, EnvConfig, ModelConfig, RolloutConfig
from paw.envs import make_factory
from paw.envs.base import eval_tasks, train_tasks
from paw.errors import UserError, clean, describe
from paw.rollout import threads
from paw.rollout.episode import Episode
from paw.rollout.scheduler import Rollouts
from paw.tools.warmup import demonstrations
from paw.types import Trajectory

FILE = Path(__file__).parent / "environments.py"


@pytest.fixture(autouse=True)
def one_thread():
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def model():
    return practised_model()


@pytest.fixture
def rollouts(model):
    """`rollouts("Class")`: of that environment, `env` being further settings."""

    def make(name, **env):
        config = Config(
            model=ModelConfig(path="-"),
            env=EnvConfig(name=f"{FILE}:{name}", **env),
            rollout=RolloutConfig(max_prompt_tokens=256, max_response_tokens=3),
        )
        return Rollouts(make_factory(config), make_engine(model), make_chat(), config)

    return make


def play(rollouts, groups=2):
    return rollouts.play(
        train_tasks(rollouts.factory, 0, groups, 0), group_size=4, temperature=1.0, seed=0, stream="train/0"
    )


def episodes_of(groups):
    return [episode for group in groups for episode in group.trajectories]


def test_the_honest_one_loses_nothing(rollouts):
    groups, stats = play(rollouts("Honest"))
    assert [len(episode.turns) for episode in episodes_of(groups)] == [3] * 8
    assert stats.failures == [] and stats.threads_lost == stats.texts_cut == 0


RAISED = {
    "ExitsInMake": "SystemExit: 0",
    "ExitsInReset": "SystemExit: 0",
    "ExitsInPrompt": "SystemExit: 0",
    "ExitsInAnchor": "SystemExit: 0",
    "ExitsInStep": "SystemExit: 0",
    "ExitsInClose": "OSError: broken",
    "ExitsInThread": "SystemExit: 0",
    "GeneratorExits": "GeneratorExit",
    "Cancelled": "CancelledError",
    "RaisesOwnBase": "OwnBase: mine",
    "RaisesUnprintable": "Unprintable: a Unprintable that cannot be printed",
    "Stops": "StopIteration",
    "NoMemory": "MemoryError",
    "Recurses": "RecursionError: maximum recursion depth exceeded",
    "CannotBeMade": "RuntimeError: no licence",
}
RETURNED = {
    "RewardNan": "Outcome.reward is nan; it must be a number from -1e+06 to 1e+06",
    "RewardInf": "Outcome.reward is -inf;",
    "RewardHuge": "Outcome.reward is 1e+308;",
    "RewardInteger": "Outcome.reward is 1000",
    "RewardNone": "Outcome.reward is None;",
    "RewardText": "Outcome.reward is '1';",
    "RewardTensor": "Outcome.reward is tensor(1.);",
    "RewardArray": "Outcome.reward is array([1., 2.]);",
    "RewardNumpyNan": "Outcome.reward is np.float32(nan);",
    "RewardDecimal": "Outcome.reward is Decimal('1');",
    "ScoreText": "Outcome.score is 'good'; it must be a number from 0 to 1",
    "ScoreNan": "Outcome.score is nan;",
    "ScoreTwo": "Outcome.score is 2.0;",
    "DoneNumber": "Outcome.done is 1; it must be True or False",
    "WonNone": "Outcome.won is None;",
    "ValidText": "Outcome.valid is 'yes';",
    "ObservationNone": "Outcome.observation is None; it must be text",
    "ObservationBytes": "Outcome.observation is b'now';",
    "ActionNone": "Outcome.action is None;",
    "PromptNone": "context() is None;",
    "PromptBytes": "context() is b'what now?';",
    "AnchorList": "anchor() is ['at', 0];",
    "ResetNone": "reset() is None;",
    "StepNone": "step() is None; it must be an Outcome",
    "StepTuple": "step() is ('now', 1.0, True, {});",
}


@pytest.mark.parametrize("name", RAISED | RETURNED)
def test_what_it_raises_or_returns_costs_its_own_episode(rollouts, name):
    played = rollouts(name)
    groups, stats = play(played)
    reason = RAISED.get(name) or f"EnvironmentFailure: Game: {RETURNED[name]}"
    assert len(stats.failures) == 2 and all(": " + reason in failure for failure in stats.failures), stats.failures
    assert [len(group.trajectories) for group in groups] == [3, 3]
    assert all([turn.outcome.reward for turn in episode.turns] == [0.0, 0.0, 1.0] for episode in episodes_of(groups))
    groups, _ = play(played)  # the run goes on
    assert len(groups) == 2
    played.close()


def test_a_task_that_is_none_is_one_line(rollouts):
    with pytest.raises(UserError, match=r"TasksWithoutKind.*\[0\] is Task\(id='a', kind=None\); it must"):
        rollouts("TasksWithoutKind").training(0, 1)


def test_numbers_and_texts_of_numpy_become_pythons_own(rollouts):
    groups, stats = play(rollouts("NumpyAnswers"))
    assert stats.failures == []
    (odd,) = [episode for episode in groups[0].trajectories if not episode.turns[0].outcome.valid]
    outcome = vars(odd.turns[0].outcome)
    assert list(outcome.values()) == ["now", 0.5, False, True, outcome["action"], False, 0.25]
    assert [type(value) for value in outcome.values()] == [str, float, bool, bool, str, bool, float]


@pytest.mark.parametrize("name", ["OnlyTheUserCanMend", "OnlyTheUserCanMendInThread", "PressesCtrlC"])
def test_what_the_user_can_mend_and_ctrl_c_end_the_run(rollouts, name):
    with pytest.raises(KeyboardInterrupt if name == "PressesCtrlC" else UserError):
        play(rollouts(name))


@pytest.mark.parametrize(
    "name",
    ["SpinsInStep", "WaitsInStep", "WaitsInReset", "WaitsInPrompt", "WaitsInMake", "SleepsInC", "WaitsInThread"],
)
def test_one_that_hangs_costs_its_episode_and_a_thread(rollouts, name):
    started = time.monotonic()
    played = rollouts(name, step_timeout_s=0.5)
    groups, stats = play(played)
    assert stats.failures == [f"train/0/{i}: TimeoutError: no answer within 0.5 s" for i in range(2)]
    assert [len(group.trajectories) for group in groups] == [3, 3]
    assert stats.threads_lost == 2 and stats.metrics()["health/threads_lost"] == 2
    assert time.monotonic() - started < 10
    groups, stats = play(played)  # none that hangs is used again
    assert len(groups) == 2 and stats.threads_lost <= 1


def test_a_thread_that_spins_is_stopped(rollouts):
    before = threading.active_count()
    played = rollouts("SpinsInStep", step_timeout_s=0.2)
    assert play(played)[1].threads_lost == 2
    played.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_closing_waits_no_longer_than_one_call(rollouts):
    played = rollouts("WaitsInClose", step_timeout_s=0.5)
    play(played)
    started = time.monotonic()
    played.close()
    assert time.monotonic() - started < 2


def test_too_many_threads_that_hang_end_the_run_with_one_line(rollouts, monkeypatch):
    monkeypatch.setattr(threads, "MAX_LOST", 3)
    with pytest.raises(UserError, match=r"^stopped: 4 threads hang .* env\.step_timeout_s = 0\.3; give what"):
        play(rollouts("AllWait", step_timeout_s=0.3))


def test_a_call_in_this_thread_costs_no_thread():
    before = threading.active_count()
    here = threads.Threads(0)
    assert here.call(threading.get_ident) == threading.get_ident() and threading.active_count() == before


def test_an_episode_ends_after_max_turns(rollouts):
    groups, stats = play(rollouts("NeverDone", max_turns=5))
    assert stats.failures == [] and {len(episode.turns) for episode in episodes_of(groups)} == {5}
    assert [turn.outcome.done for turn in episodes_of(groups)[0].turns] == [False] * 4 + [True]


def test_long_texts_are_cut_before_they_are_tokenised(rollouts, capfd):
    seen = []
    for name in ("FloodsPrompt", "FloodsObservation"):
        played = rollouts(name, max_text=1000)
        encode = played.chat.fit_prompt
        played.chat.fit_prompt = lambda text, most, encode=encode: seen.append(len(text)) or encode(text, most)
        for _ in range(2):
            groups, stats = play(played)
        assert stats.failures == [] and stats.texts_cut == 24
        turn = episodes_of(groups)[0].turns[1]
        assert len(turn.outcome.observation) <= 1000 and len(turn.prompt) <= 1000
        if name == "FloodsPrompt":
            assert turn.prompt.endswith("x turn 1")  # the end is what counts, as for rollout.max_prompt_tokens
    assert max(seen) == 1000
    err = capfd.readouterr().err
    assert err.count("24 texts of the environment were cut to env.max_text = 1000 (said once)") == 2


def test_every_text_is_unicode(rollouts):
    groups, stats = play(rollouts("SaysFakeProgress"))
    assert stats.failures == []
    for turn in [turn for episode in episodes_of(groups) for turn in episode.turns]:
        (turn.prompt + turn.anchor + turn.outcome.observation).encode()


@pytest.mark.parametrize("name", ["ExitsInExpert", "ExitsInChoices", "ExitsInReset", "WaitsInStep", "RewardTensor"])
def test_the_warm_up_leaves_a_game_that_breaks(rollouts, name):
    factory = rollouts(name, step_timeout_s=0.5).factory
    turns = demonstrations(factory, factory.config, seed=0, random_actions=0.0)
    assert [next(turns).observation for _ in range(30)] == ["now 1", "now 2", "now 3"] * 10


def test_a_warm_up_where_all_breaks_ends_with_one_line(rollouts):
    factory = rollouts("AllExitInExpert").factory
    with pytest.raises(UserError, match=r"^warm-up: 101 games in a row failed \(SystemExit: 0\)$"):
        next(demonstrations(factory, factory.config, seed=0, random_actions=0.0))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ExitsInStep", "SystemExit: 0"),
        ("CannotBeMade", "RuntimeError: no licence"),
        ("RaisesUnprintable", RAISED["RaisesUnprintable"]),
        ("RewardNan", "EnvironmentFailure: Game: Outcome.reward is nan;"),
        ("WaitsInStep", "TimeoutError: no answer within 0.5 s"),
        ("NeverDone", None),
    ],
)
def test_agents_lose_an_episode_and_play_the_others(rollouts, name, reason):
    played = rollouts(name, step_timeout_s=0.5, max_turns=5)
    tasks, seen = eval_tasks(played.factory, "held_out", 6, 0), []
    episodes = [Episode(Trajectory(task, 0), i, 0, "eval", 1.0) for i, task in enumerate(tasks)]
    played.scheduler.run(episodes, played.agent, played.make_model, at_once=1, ended=seen.append)
    assert [episode.index for episode in seen] == [*range(6)]
    failures = [episode.trajectory.failure for episode in episodes if episode.trajectory.failure]
    assert len(failures) == (reason is not None) * 1 and all(failure.startswith(reason) for failure in failures)
    steps = {len(episode.steps) for episode in episodes if not episode.trajectory.failure}
    assert steps == {3 if reason else 5}


def test_an_environment_that_exits_on_import_is_one_line(paw_here, tmp_path):
    (tmp_path / "mine.py").write_text("import sys\nsys.exit(0)\n")
    said = paw_here("train", "quickstart", "--env.name", "mine.py:Mine", "--model.path", ".", code=2, cwd=tmp_path)
    assert said.stderr == "paw: stopped: something called sys.exit(0)\n"


@pytest.mark.slow
def test_training_goes_on_where_an_environment_exits(paw, quick, tiny_llm, read_metrics, tmp_path):
    small = {"model.path": tiny_llm(tmp_path / "model"), "env.name": f"{FILE}:ExitsInStep", "run.updates": 1}
    quick = {key: value for key, value in quick.items() if not key.startswith("warmup.")}
    paw("train", "quickstart", quick, small, {"rollout.max_response_tokens": 3, "run.name": "exits"}, cwd=tmp_path)
    last = read_metrics(tmp_path / "runs" / "exits")[-1]
    assert last["step"] == 1 and last["health/env_failures"] > 0


def test_a_failure_is_one_short_printable_line(rollouts):
    _, stats = play(rollouts("RaisesFakeProgress"))
    assert len(stats.failures) == 2
    for failure in stats.failures:
        assert failure.isprintable() and len(failure) < 600
        assert failure.startswith("train/0/") and "RuntimeError: $_{step 99/99  reward 9e9 step 100" in failure


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("plain text, 日本語 and é", "plain text, 日本語 and é"),
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b(B \x9b2Jc\x1bc", "red link c"),
        ("a\r\nb\tc\u2028d\u0085e\x00\x08f", "a  b c d ef"),
        ("\u202eabc\u2066\u200b\u200d\ufeff\u00ad", "abc"),
        ("\ud83d\ude00 \udcff", "?? ?"),
        ("x" * 3000, "x" * 500 + "..."),
    ],
)
def test_clean(text, printed):
    assert clean(text) == printed and clean(text).isprintable()


def test_clean_keeps_lines_where_asked():
    assert clean("one\n\x1b[2Jtwo\tthree\r", 100, lines=True) == "one\ntwo\tthree "


def test_describe_survives_anything():
    class Worst(Exception):
        def __str__(self):
            raise KeyError("no")

        __repr__ = __str__

    assert describe(Worst()) == "Worst: a Worst that cannot be printed"
    assert describe(SystemExit()) == "SystemExit"
