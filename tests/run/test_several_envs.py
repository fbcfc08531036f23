"""Several environments in one run ([[envs]]): which tasks are played, what is measured for each
environment, and what resuming restores."""

import json
import sys

import pytest
import tomli_w
from jsonl import read_jsonl
from together import make_ranks, on_all
from toyworld import make_chat, make_engine, make_tokenizer, practised_model

import paw
from paw.algo.world_model import select
from paw.config import plugins
from paw.config.recipe import as_tree, dump, load
from paw.config.sections import AgentConfig, Config
from paw.envs import make_factory
from paw.envs.base import eval_tasks, further_tasks, train_tasks
from paw.envs.curriculum import Curriculum
from paw.envs.shares import TaskShares
from paw.errors import OthersCodeError, UserError
from paw.rollouts.episode import find_agent, find_own_agents
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.success import success_metrics
from paw.rundir.resume import changes
from paw.tools.evaluate.played import load_played
from paw.tools.reference import explain
from paw.tools.warmup import quickstart
from paw.tools.warmup.expert_play import demonstrations
from paw.types import Sample, Task

HOUSE = {"name": "alfworld", "difficulty": "tiny", "style": "compact", "history": 3}
PICK = {**HOUSE, "label": "pick", "kinds": ["pick"], "max_turns": 5, "reward": 1.0}
LOOK = {**HOUSE, "label": "look", "kinds": ["look", "clean"], "max_turns": 3, "reward": 4.0}


def configure(*entries, **sections):
    defaults = {
        "model": {"path": "-"},
        "envs": list(entries or (PICK, LOOK)),
        "rollout": {
            "tasks": 3,
            "group_size": 2,
            "max_prompt_tokens": 256,
            "max_response_tokens": 3,
        },
        "eval": {"games": 3, "temperature": 1.0},
    }
    return Config.model_validate({**defaults, **sections})


def labels_of(tasks):
    return [task.env for task in tasks]


def ids_of(tasks):
    return [task.id for task in tasks]


# --- shares


def test_what_rounding_takes_from_an_environment_it_gets_later():
    shares = TaskShares({"a": 0.5, "b": 0.5})
    counts = [
        {label: len(task_numbers) for label, task_numbers in shares.tasks(step, 3).items()}
        for step in range(4)
    ]
    assert counts == [{"a": 2, "b": 1}, {"a": 1, "b": 2}] * 2

    shares = TaskShares({"a": 6, "b": 3, "c": 1})
    next_number = {"a": 0, "b": 0, "c": 0}
    for step in range(50):
        for label, numbers in shares.tasks(step, 7).items():
            assert numbers.start == next_number[label]  # no task is skipped or played twice
            next_number[label] = numbers.stop
        exact_shares = {"a": 0.6, "b": 0.3, "c": 0.1}
        for label, share in exact_shares.items():
            assert abs(next_number[label] - share * 7 * (step + 1)) < 1
    assert sum(next_number.values()) == 350
    assert TaskShares({"a": 6, "b": 3, "c": 1}).tasks(49, 7) == shares.tasks(49, 7)


def test_a_saved_position_goes_on_with_the_same_tasks():
    def chosen(first_step, saved_state=None):
        shares = TaskShares({"a": 1, "b": 1})
        if saved_state is not None:
            shares.load_state(saved_state, first_step, 5)
        planned = []
        for step in range(first_step, 8):
            shares.choose(step, {"a": 1 + step, "b": 0.3})
            planned.append(shares.tasks(step, 5))
        return planned, shares

    planned, shares = chosen(0)
    saved_state = json.loads(json.dumps(shares.state(4, 5)))
    assert chosen(4, saved_state)[0] == planned[4:]


# --- the configuration


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([PICK, PICK], "envs.pick.label = 'pick': two of [[envs]] are called that"),
        ([{**PICK, "share": 0}], "envs.pick.share = 0: Input should be greater than 0"),
        ([{**PICK, "max_turn": 4}], "'envs.pick.max_turn'; did you mean 'envs.pick.max_turns'?"),
        ([{**PICK, "shares": 4}], "'envs.pick.shares'; did you mean 'envs.pick.share'?"),
        ([{**PICK, "products": 4}], "envs.pick.name = 'webshop' has it"),
        ([{**PICK, "think": False}], "it needs envs.pick.style = 'paper'"),
        ([{**PICK, "difficulty": "odd"}], "envs.pick.difficulty = 'odd': Input should be 'tiny'"),
        ([{"share": 1}], "its name is missing"),
        ([{"name": "alfworl"}], "there is no 'alfworl': did you mean 'alfworld'?"),
        ([{**PICK, "label": "a.b"}], "give it a label of at most 40 letters"),
        ([{**PICK, "label": 3}], "envs.0.label = 3: give it a label"),
        ([{**PICK, "label": "all"}], "which is not 'all' or 'mean'"),
        ([{**PICK, "label": "low_pick"}], "does not begin with the word low or high"),
        (
            [{**PICK, "agent": "react"}],
            "envs.pick.agent = 'react': it must be a table, [envs.agent]",
        ),
        (
            [{**PICK, "agent": {"type": "reac"}}],
            "envs.pick.agent.type = 'reac': there is no 'reac'",
        ),
        ([{**PICK, "agent": {"trials": 3}}], "envs.pick.agent.type = 'reflexion' has it"),
        ([{**PICK, "agent": {"typ": "react"}}], "did you mean 'envs.pick.agent.type'?"),
        ([{**PICK, "rewards": "env"}], "envs.pick.rewards = 'env': it must be tables"),
        ([{**PICK, "rewards": [{"type": "judge"}]}], "envs.pick.rewards.judge = "),
        (
            [{**PICK, "rewards": [{"type": "env", "wait": 1}]}],
            "mean 'envs.pick.rewards.env.weight'?",
        ),
        ([3], "it must be a table, [[envs]]"),
        ("alfworld", "it must be tables, [[envs]]"),
    ],
)
def test_a_mistake_in_an_entry_is_one_line_that_names_it(entries, message, tmp_path):
    recipe = tmp_path / "recipe.toml"
    tables = {"model": {"path": "-"}, "envs": entries}
    recipe.write_text(tomli_w.dumps(tables))
    with pytest.raises(UserError) as error:
        load(recipe)
    assert message in str(error.value)
    assert str(error.value).startswith(str(recipe))
    assert "\n" not in str(error.value)


def test_a_share_too_small_to_be_played_is_refused(tmp_path):
    recipe = tmp_path / "recipe.toml"
    entries = [PICK, {**PICK, "label": "rare", "share": 1e-9}]
    recipe.write_text(tomli_w.dumps({"model": {"path": "-"}, "envs": entries}))
    with pytest.raises(UserError, match=r"^envs\.rare\.share = 1e-09 is less than a millionth"):
        make_factory(load(recipe))


def test_the_command_line_changes_a_key_of_one_entry():
    config = load(configure(), {"envs.look.share": "3", "envs.look.max_turns": "2"})
    assert [entry.share for entry in config.envs] == [1.0, 3.0]
    assert [section.max_turns for section in config.environments.values()] == [5, 2]
    assert load(configure(), {}).environments["look"].max_turns == 3

    for key, message in {
        "envs.loook.share": "names no entry of the recipe: its [[envs]] are pick, look",
        "envs.look.shar": "command line: unknown key 'envs.look.shar'",
        "env.max_turns": "command line: 'env.max_turns' is a key of [env], and the recipe has",
        "envs.look.agent.tries": "command line: unknown key 'envs.look.agent.tries'",
        "envs.look.rewards.env.weight": "it has no [[envs.rewards]]",
    }.items():
        with pytest.raises(UserError) as error:
            load(configure(), {key: "2"})
        assert message in str(error.value)
    with pytest.raises(UserError, match=r"it has no \[\[envs\]\]"):
        load("quickstart", {"envs.look.share": "2"})


def test_an_entry_has_an_agent_and_rewards_of_its_own(tmp_path):
    pick_entry = {**PICK, "agent": {"type": "react"}, "rewards": [{"type": "env", "weight": 2.0}]}
    config = configure(pick_entry, LOOK)
    assert {label: agent.type for label, agent in config.own_agents.items()} == {"pick": "react"}
    assert config.reward_types("pick") == config.reward_types("look") == ["env"]

    (tmp_path / "config.toml").write_text(dump(config))
    reloaded = load(tmp_path / "config.toml")
    assert as_tree(reloaded) == as_tree(config)
    assert reloaded.envs == config.envs
    assert 'agent.type = "react"' in explain(config)
    overrides = {
        "envs.pick.agent.type": "reflexion",
        "envs.pick.agent.trials": "5",
        "envs.pick.rewards.env.weight": "0.5",
        "envs.look.agent.type": "react",
    }
    changed = load(reloaded, overrides)
    assert changed.own_agents["pick"].trials == 5
    assert changes(tmp_path, config) == []
    assert [line for line in changes(tmp_path, changed) if "memory" not in line] == [
        "changed: envs.look.agent.type none -> 'react'",
        "changed: envs.pick.agent.trials none -> 5",
        "changed: envs.pick.agent.type 'react' -> 'reflexion'",
        "changed: envs.pick.rewards.env.weight 2.0 -> 0.5",
    ]

    single = load_played(tmp_path / "config.toml", {"env.name": "pick"})
    assert (single.agent.type, single.rewards[0].weight) == ("react", 2.0)
    assert load_played(tmp_path / "config.toml", {"env.name": "look"}).agent.type == "plain"

    quiz_entry = {"name": "search", "label": "quiz", "agent": {"type": "search-r1"}}
    find_own_agents(configure(quiz_entry, PICK))
    with pytest.raises(UserError, match=r"envs\.pick\.agent\.type = 'search-r1' answers questions"):
        find_own_agents(configure(quiz_entry, {**PICK, "agent": {"type": "search-r1"}}))
    with pytest.raises(
        UserError, match=r"^agent\.type = 'search-r1' .* not 'alfworld' \(envs\.pick"
    ):
        find_agent(configure(quiz_entry, PICK, agent={"type": "search-r1"}))


def test_a_recipe_with_several_is_written_and_read_again(tmp_path):
    config = configure()
    (tmp_path / "config.toml").write_text(dump(config))
    reloaded = load(tmp_path / "config.toml")
    assert as_tree(reloaded) == as_tree(config)
    assert reloaded.environments == config.environments
    assert changes(tmp_path, config) == []
    changed = load(config, {"envs.pick.share": 2.0})
    assert changes(tmp_path, changed) == ["changed: envs.pick.share 1.0 -> 2.0"]
    other_game = configure({"name": "search", "label": "pick"}, LOOK)
    with pytest.raises(UserError, match=r"envs\.pick\.name = 'alfworld', not"):
        changes(tmp_path, other_game)
    with pytest.raises(
        UserError, match=r"trained with env\.name = '\[\[envs\]\] pick, look', not 'search'"
    ):
        changes(
            tmp_path, Config.model_validate({"model": {"path": "-"}, "env": {"name": "search"}})
        )


def test_a_recipe_with_several_replaces_the_environment_of_its_base(tmp_path):
    recipe = tmp_path / "two.toml"
    recipe.write_text(tomli_w.dumps({"base": "quickstart", "envs": [PICK, LOOK]}))
    assert list(load(recipe).environments) == ["pick", "look"]


# --- tasks


def test_each_environment_plays_the_tasks_it_would_play_alone():
    several = make_factory(configure({**PICK, "share": 2}, LOOK))
    pick_alone = make_factory(
        configure().model_copy(update={"envs": [], "env": several.parts["pick"].config})
    )
    tasks = [task for step in range(3) for task in train_tasks(several, step, 3, 7)]
    assert labels_of(tasks) == ["pick", "look", "pick"] * 3
    pick_tasks = [task.own for task in tasks if task.env == "pick"]
    assert ids_of(pick_tasks) == ids_of(train_tasks(pick_alone, 0, 6, 7))
    assert {(task.kind, task.env) for task in pick_tasks} == {("pick", "")}
    assert all(task.id.startswith(f"{task.env}/") for task in tasks)

    held_out = eval_tasks(several, "", 4, 9)
    assert labels_of(held_out) == ["pick", "look"] * 4
    pick_tasks = [task.own for task in held_out[::2]]
    assert ids_of(pick_tasks) == ids_of(eval_tasks(pick_alone, "valid_unseen", 4, 9))

    further = further_tasks(several, 0, 40, 7)
    in_two_parts = further_tasks(several, 0, 20, 7) + further_tasks(several, 20, 20, 7)
    assert ids_of(further) == ids_of(in_two_parts)
    assert {*labels_of(further)} == {"pick", "look"}
    assert not {task.id for task in further} & {task.id for task in tasks}


def test_the_experts_of_all_environments_play():
    several = make_factory(configure())
    config = configure()
    turns = demonstrations(several, config.env, seed=0, random_actions=0.0)
    prompts = [next(turns).prompt for _ in range(60)]
    assert any("examine" in prompt or "look at" in prompt for prompt in prompts)
    assert any("put" in prompt for prompt in prompts)


# --- rollouts


@pytest.fixture(scope="module")
def model():
    return practised_model()


def test_groups_keep_to_their_environment_and_its_limits(model):
    config = configure()
    rollouts = Rollouts(make_factory(config), make_engine(model), make_chat(), config)
    groups, stats = rollouts.training(0, 6)
    rollouts.close()
    assert stats.failures == []
    assert sorted(labels_of(group.task for group in groups)) == ["look"] * 3 + ["pick"] * 3
    for group in groups:
        assert {trajectory.task for trajectory in group.trajectories} == {group.task}
        max_turns = {"pick": 5, "look": 3}[group.task.env]
        assert max(len(trajectory.turns) for trajectory in group.trajectories) <= max_turns

    metrics = success_metrics(groups)
    for label in ("pick", "look"):
        episodes = [
            episode for group in groups if group.task.env == label for episode in group.trajectories
        ]
        assert metrics[f"success_{label}"] == sum(episode.won for episode in episodes) / len(
            episodes
        )
        assert metrics[f"return_{label}"] == sum(
            episode.episode_return for episode in episodes
        ) / len(episodes)
    assert metrics["success_pick/pick"] == metrics["success_pick"]


class Broken:
    """Never begins an episode."""

    tasks = [Task(f"broken {n}") for n in range(20)]

    def reset(self, task):
        raise RuntimeError("out of order")

    def context(self):
        return ""

    def step(self, response):
        raise AssertionError("an episode has begun")


def test_an_environment_that_always_breaks_costs_its_own_groups(model):
    broken = {"name": plugins.give(Broken), "label": "broken", "reward": 1.0}
    config = configure(PICK, broken)
    rollouts = Rollouts(make_factory(config), make_engine(model), make_chat(), config)
    groups, stats = rollouts.training(0, 4)
    rollouts.close()
    assert labels_of(group.task for group in groups) == ["pick"] * 2
    assert len(stats.failed) == 4
    assert {trajectory.task.env for trajectory in stats.failed} == {"broken"}
    assert all("out of order" in failure for failure in stats.failures)
    metrics = success_metrics(groups, stats.failed)
    assert metrics["success_broken"] == metrics["ci_low_broken"] == 0.0
    assert "return_broken" not in metrics


class Twice:
    """Asks the model twice in each turn, and plays one episode at a time."""

    class Config(AgentConfig):
        """No settings."""

    at_once = 1
    playing = 0

    def __init__(self, config):
        pass

    async def __call__(self, env, model):
        assert self.playing == 0
        self.playing += 1
        await env.reset()
        while not env.done:
            await model.generate("what?")
            await env.step(await model.generate(env.context()))
        self.playing -= 1


def calls(trajectory, *, per_call: float = 0.5) -> float:
    return per_call * len(trajectory.turns)


def test_each_environment_is_played_by_its_agent_and_gets_its_rewards(model):
    own_rewards = [
        {"type": "env"},
        {"type": plugins.give(calls), "label": "calls", "per_call": 2.0},
    ]
    config = configure(
        {**PICK, "agent": {"type": plugins.give(Twice)}},
        {**LOOK, "rewards": own_rewards},
        reward={"type": plugins.give(calls)},
    )

    def play(ranks=None):
        rollouts = Rollouts(make_factory(config), make_engine(model), make_chat(), config, ranks)
        groups, stats = rollouts.training(0, 4)
        rollouts.close()
        assert stats.failures == []
        return groups

    groups = play()
    for group in groups:
        for trajectory in group.trajectories:
            turns = len(trajectory.turns)
            if group.task.env == "pick":
                assert [turn.prompt for turn in trajectory.turns[::2]] == ["what?"] * (turns // 2)
                assert trajectory.episode_return == 0.5 * turns, "the run's reward"
                assert trajectory.rewards == {}
            else:
                assert "what?" not in {turn.prompt for turn in trajectory.turns}
                env_reward = 4.0 * trajectory.won
                assert trajectory.rewards == {"look/env": env_reward, "look/calls": 2.0 * turns}
                assert trajectory.episode_return == env_reward + 2.0 * turns
    metrics = success_metrics(groups)
    reward_means = {key: value for key, value in metrics.items() if key.startswith("rewards_")}
    assert reward_means.keys() == {"rewards_look/env", "rewards_look/calls"}
    for ranks_groups in on_all(make_ranks(2), play):
        assert {key: success_metrics(ranks_groups)[key] for key in reward_means} == reward_means


def test_ranks_play_the_groups_of_one(model):
    config = configure()

    def results(ranks=None):
        rollouts = Rollouts(make_factory(config), make_engine(model), make_chat(), config, ranks)
        groups, _ = rollouts.training(1, 3)
        rollouts.close()
        return [
            (group.task.id, [trajectory.summary for trajectory in group.trajectories])
            for group in groups
        ]

    on_one_rank = results()
    assert on_all(make_ranks(2), results) == [on_one_rank, on_one_rank]


def test_the_adaptive_weight_uses_the_reward_max_of_each_environment():
    samples = [
        Sample(i, i, 0, [1], [2], observation_ids=[3], episode_return=2.0, entropy=1.0)
        for i in range(2)
    ]
    weights = select(samples, alpha=1.0, weight="adaptive", reward_max=[4.0, 8.0], n_groups=2)
    assert weights.lambdas == [0.5, 0.75]


# --- a run


fails_after: set[int] = set()


def harder(step: int, success: dict[str, float]) -> dict[str, float]:
    """The second environment's share grows with each update. The first one's grows with its
    failures."""
    if step in fails_after:
        raise KeyError("nothing")
    return {"pick": 1.0 - 0.5 * success["pick"], "look": 0.5 * step}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    quickstart.save(practised_model(), make_tokenizer(), folder)
    return folder


@pytest.mark.slow
def test_a_run_with_a_curriculum_resumes_bit_for_bit(start, tmp_path, monkeypatch):
    monkeypatch.setitem(plugins.CALLBACKS, "report", "builtins:object")  # a report takes seconds

    def train(name, updates, resume=""):
        config = configure(
            run={"dir": tmp_path, "name": name, "updates": updates, "threads": 1},
            model={"path": str(start), "dtype": "float32", "device": "cpu"},
            optim={"lr": 3e-3, "minibatch_samples": 16, "micro_batch_tokens": 600},
            policy={"kl_coef": 0.0},
            eval={"games": 2, "every": 2, "temperature": 1.0},
        )
        config = load(
            config,
            {
                "rollout.curriculum": harder,
                "envs.pick.agent.type": Twice,
                "envs.look.rewards": [{"type": "env"}, {"type": calls, "label": "calls"}],
            },
        )
        run_folder = paw.train(config, resume=resume).parent
        lines = []
        for line in read_jsonl(run_folder / "metrics.jsonl"):
            lines.append({k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))})
        return run_folder, lines

    run_folder, lines = train("whole", 4)
    monkeypatch.setattr(sys.modules[__name__], "fails_after", {2})
    with pytest.raises(UserError, match=r"rollout\.curriculum = .*KeyError"):
        train("parts", 4)
    fails_after.clear()
    resumed_run, resumed_lines = train("parts", 4, resume="auto")
    assert resumed_lines == lines
    weights = "hf/model.safetensors"
    assert (resumed_run / weights).read_bytes() == (run_folder / weights).read_bytes()

    played = [(line["groups/pick"], line["groups/look"]) for line in lines[1:]]
    assert played == [(2, 1), (2, 1), (1, 2), (1, 2)]  # shares 1:1, then 2:1, 1:1 and 2:3
    assert all("rewards/look/calls" in line for line in lines[1:])
    for line in (lines[0], lines[2], lines[4]):
        assert line["eval/games"] == 4
        games_won = 2 * line["eval/success_pick"] + 2 * line["eval/success_look"]
        assert games_won == 4 * line["eval/success"]
    results = paw.evaluate(run_folder, changes={"eval.games": 2})
    assert {"pick", "look"} <= {*results["kinds"]}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (3, "returned 3, not a dict of shares by label"),
        ({"pick": 1, "loook": 1}, "returned a share of 'loook'; the [[envs]] are pick, look"),
        ({"pick": -1}, "returned -1 as the share of 'pick'"),
        ({"pick": float("nan")}, "as the share of 'pick', which is not a number from 0 to 1e+12"),
        ({"pick": 10**400}, "as the share of 'pick', which is not a number from 0 to 1e+12"),
        ({"pick": 0}, "returned no share above 0"),
    ],
)
def test_a_curriculum_that_returns_no_shares_is_named(returned, message):
    curriculum = plugins.give(lambda step, success: returned)
    with pytest.raises(UserError) as error:
        Curriculum(curriculum, ["pick", "look"]).shares(1)
    assert message in str(error.value)


def test_a_curriculum_that_fails_is_named():
    def fails(step, success):
        raise KeyError("nothing")

    with pytest.raises(OthersCodeError, match=r"rollout\.curriculum = .*KeyError"):
        Curriculum(plugins.give(fails), ["pick", "look"]).shares(1)
    with pytest.raises(UserError, match=r"rollout\.curriculum: there is no 'nope'"):
        Curriculum("nope", ["pick"])
    with pytest.raises(UserError, match="it needs envs"):
        load("quickstart", {"rollout.curriculum": "x:y"})
