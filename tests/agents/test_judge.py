"""Several rewards for an episode ([[rewards]]), one of them from an LLM judge."""

import json

import pytest
import tomli_w
from scripted_server import completion, refusal, serve
from together import make_ranks, on_all
from toyworld import ENV, make_chat, make_engine, make_factory, practised_model

from paw.agents.judge import Judge, JudgeConfig, score_of, transcript
from paw.config import plugins
from paw.config.recipe import dump, load
from paw.config.sections import Config
from paw.errors import EnvironmentFailure, UserError
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.success import success_metrics
from paw.types import Outcome, Task, Trajectory, Turn, no_ids, no_values


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("PAW_CACHE", str(tmp_path / "cache"))
    with serve() as state:
        state.default = (200, completion("It was brief.\n**Score:** 8"), {})
        yield state


def make_judge(server, **changes):
    settings = {"url": server.url, "model": "m", "rubric": "Be brief.", "retries": 0}
    return Judge(JudgeConfig.model_validate(settings | changes))


def episode(answer="look"):
    outcome = Outcome("a shelf", 1.0, done=True, won=True)
    turn = Turn(no_ids(), no_ids(), no_values(), None, "find a mug", answer, outcome, "", 0)
    return Trajectory(Task("1"), 0, [turn])


def test_a_score_is_the_whole_last_line_and_within_the_scale():
    assert score_of("Fine.\nScore: 7.5\n", 0, 10) == 7.5
    assert score_of("**Score: 3**", 0, 10) == 3.0
    for answer in (
        "",
        "7",
        "Score: 7 of 10",
        "Score: 11",
        "Score: -1",
        "Score: nan",
        "Score: 7\nx",
    ):
        assert score_of(answer, 0, 10) is None


def test_the_judge_sees_rubric_and_episode_and_is_asked_once(server):
    judge = make_judge(server)
    assert judge(episode()) == 0.8
    (request,) = server.requests
    assert "Be brief." in request["messages"][0]["content"]
    assert transcript(episode()) in request["messages"][0]["content"]
    assert judge(episode()) == make_judge(server)(episode()) == 0.8
    assert len(server.requests) == 1
    assert judge(episode("inventory")) == 0.8
    assert make_judge(server, scale=[-2, 8])(episode()) == 1.0
    assert make_judge(server, rubric="Be long.")(episode()) == 0.8
    assert len(server.requests) == 4


def test_a_long_episode_loses_its_middle(server):
    make_judge(server, max_chars=1000)(episode("x" * 5000))
    content = server.requests[0]["messages"][0]["content"]
    assert "find a mug" in content
    assert "a shelf" in content
    assert len(content) < 1600


def test_a_judgement_that_cannot_be_had_fails_the_episode(server):
    server.script = [(200, completion("Score: 11"), {})] * 2
    assert make_judge(server)(episode()) == 0.8
    assert [request["seed"] for request in server.requests] == [0, 1, 2]
    server.script = [(200, completion("No."), {})] * 3
    with pytest.raises(EnvironmentFailure, match=r"none of 3 answers ends with a score .*'No\.'"):
        make_judge(server)(episode("a"))
    for status in (401, 404, 500):
        server.script = [(status, refusal("no"), {})]
        with pytest.raises(EnvironmentFailure, match="the judge: "):
            make_judge(server)(episode("a"))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"type": "judge"}, "the judge needs a rubric: set either rubric or rubric_file"),
        ({"type": "judge", "rubric": "x", "rubric_file": "y"}, "set either rubric or"),
        ({"type": "judge", "rubric": "x", "scale": [3, 3]}, "it must be [lowest, highest]"),
        ({"type": "judge", "rubric": "x", "trys": 2}, "did you mean 'rewards.judge.tries'?"),
        ({"type": "judg", "rubric": "x"}, "there is no 'judg'"),
        ({"rubric": "x"}, "its type is missing"),
        ({"type": "env", "weight": "much"}, "rewards.env.weight = 'much'"),
    ],
)
def test_a_mistake_in_a_reward_is_one_line(table, message, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps({"model": {"path": "-"}, "rewards": [table]}))
    with pytest.raises(UserError) as error:
        load(recipe)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_judge_named_on_the_command_line_is_not_the_recipes_mistake(paw_here):
    arguments = ("train", "miniature", "--reward.type", "judge", "--dry-run")
    error = paw_here(*arguments, code=2).stderr
    assert "command line: reward = {'type': 'judge'}: the judge needs a rubric" in error


def test_a_judge_without_a_server_or_a_rubric_is_named(server, tmp_path):
    with pytest.raises(UserError, match="no answer"):
        make_judge(server, url="http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"reward\.model is missing"):
        make_judge(server, model=None)
    with pytest.raises(UserError, match=r"rubric_file = .* cannot be read"):
        make_judge(server, rubric="", rubric_file=tmp_path / "none.txt")


def turns(trajectory: Trajectory, *, per_turn: float = 1.0) -> float:
    if trajectory.member == 3:
        raise ValueError("no reward")
    return per_turn * len(trajectory.turns)


def test_rewards_are_weighted_measured_and_lost_one_by_one(server):
    settings = {
        "model": {"path": "-"},
        "env": ENV.model_dump(exclude_none=True),
        "rollout": {"max_prompt_tokens": 256, "max_response_tokens": 3, "group_size": 4},
        "rewards": [
            {"type": "env", "weight": 2.0},
            {"type": plugins.give(turns), "label": "turns", "per_turn": 3.0, "weight": -0.1},
            {"type": "judge", "url": server.url, "model": "m", "rubric": "Be brief."},
        ],
    }
    config = Config.model_validate(settings)
    model = practised_model()

    def play(ranks=None):
        rollouts = Rollouts(make_factory(), make_engine(model), make_chat(), config, ranks)
        result = rollouts.training(0, 2)
        rollouts.close()
        return result

    groups, stats = play()
    assert stats.rewards_failed == len(stats.failed) == 2
    assert stats.metrics()["health/rewards_failed"] == 2
    for group in groups:
        for trajectory in group.trajectories:
            rewards = trajectory.rewards
            assert rewards["turns"] == 3.0 * len(trajectory.turns)
            assert rewards["env"] == float(trajectory.won)
            assert rewards["judge"] == 0.8
            weighted_sum = 2.0 * rewards["env"] - 0.1 * rewards["turns"] + rewards["judge"]
            assert trajectory.episode_return == pytest.approx(weighted_sum)
    metrics = success_metrics(groups)
    reward_means = {key: value for key, value in metrics.items() if key.startswith("rewards_")}
    assert reward_means.keys() == {"rewards_env", "rewards_turns", "rewards_judge"}
    for ranks_groups, _ in on_all(make_ranks(2), play):
        assert {key: success_metrics(ranks_groups)[key] for key in reward_means} == reward_means


def test_several_rewards_are_written_and_read_again(tmp_path):
    judge_table = {"type": "judge", "rubric": "x", "url": "http://127.0.0.1:9", "model": "m"}
    config = Config.model_validate(
        {"model": {"path": "-"}, "rewards": [{"type": "env"}, judge_table]}
    )
    (tmp_path / "config.toml").write_text(dump(config))
    reloaded = load(tmp_path / "config.toml", {"rewards.env.weight": "0.5"})
    assert [entry.weight for entry in reloaded.rewards] == [0.5, 1.0]
    assert json.loads(reloaded.model_dump_json())["rewards"][1]["rubric"] == "x"
    with pytest.raises(UserError, match=r"'reward\.type' is a key of \[reward\], and the recipe"):
        load(config, {"reward.type": "env"})
