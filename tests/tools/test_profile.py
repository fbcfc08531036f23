"""`paw profile`: two variants on the same rows, weights left alone, memory counted to the byte."""

import copy
import csv
import gzip
import json
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.text import Text
from toyworld import ENV, make_tokenizer, practised_model

from paw import cli
from paw.config.recipe import dump, validate
from paw.errors import UserError
from paw.model.loading import load_policy, load_tokenizer
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.sync import push_weights
from paw.rollouts.text.chat import Chat
from paw.run import open_run
from paw.tools.evaluate.played import load_played
from paw.tools.evaluate.recorded import as_sampled_by, random_groups, random_model, read_episodes
from paw.tools.plan import shapes
from paw.tools.plan.plan import Play
from paw.tools.profile import (
    STAGES,
    _cuda_memory,
    make_variants,
    measure,
    memory,
    one_pass,
    overhead,
    pick,
    play,
    table,
    timed,
)
from paw.tools.warmup import quickstart
from paw.trainer import prepare, update


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    quickstart.save(practised_model(), make_tokenizer(), folder)
    return folder


def make_config(start, folder, **wm):
    tree = {
        "run": {"dir": str(folder), "name": "profile", "updates": 3, "threads": 1},
        "model": {"path": str(start), "dtype": "float32", "device": "cpu"},
        "env": ENV.model_dump(),
        "rollout": {
            "tasks": 3,
            "group_size": 3,
            "max_prompt_tokens": 256,
            "max_response_tokens": 3,
        },
        "optim": {"lr": 3e-3, "minibatch_samples": 1000, "micro_batch_tokens": 1024},
        "wm": wm,
    }
    return validate(tree, origin="test")


@pytest.fixture(scope="module")
def live(start, tmp_path_factory):
    with open_run(make_config(start, tmp_path_factory.mktemp("runs"), max_tokens=12)) as run:
        yield run


def turns(groups):
    return [turn for group in groups for episode in group.trajectories for turn in episode.turns]


def tokens_by_stage(records, variant):
    return {phase: pick(records, variant, [phase], "tokens")[0] for phase in STAGES}


@pytest.mark.slow
def test_both_arms_see_the_same_rows_and_leave_the_weights_as_they_are(start, tmp_path):
    variants = make_variants(make_config(start, tmp_path))
    played = {}
    with open_run(variants["GRPO + PaW"]) as run:
        weights_before = {
            name: parameter.detach().clone()
            for name, parameter in run.policy.named_parameters_once().items()
        }
        groups = play(run, played)
        as_played = copy.deepcopy(turns(groups))
        rows = {}
        for name, run.config in variants.items():
            rows[name] = prepare(run, groups)
        records = measure(run, variants, groups, played, repeats=2)
        moments = [state["exp_avg"] for state in run.optimizer.state.values()]
        assert all(
            torch.equal(parameter, weights_before[name])
            for name, parameter in run.policy.named_parameters_once().items()
        )
        assert run.step == 0
    # What only the world model reads put aside.
    for vanilla, paw in zip(*rows.values(), strict=True):
        assert (
            replace(
                paw, separator_ids=[], observation_ids=[], wm_weight=0.0, entropy=vanilla.entropy
            )
            == vanilla
        )
    # The optimizer did work.
    assert turns(groups) == as_played
    assert any(moment.any() for moment in moments)

    order = [("GRPO", 1), ("GRPO + PaW", 1), ("GRPO + PaW", 2), ("GRPO", 2)]
    assert [(record["variant"], record["repeat"]) for record in records[::4]] == order
    assert [record["phase"] for record in records] == ["rollout", *STAGES] * 4
    vanilla, paw = (tokens_by_stage(records, variant) for variant in variants)
    acting = sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in turns(groups))
    assert vanilla["score"] == acting
    assert paw["score"] == acting
    assert vanilla["update"] == acting
    assert paw["update"] > acting
    assert all(
        record["seconds"] > 0 and record["cpu_seconds"] > 0
        for record in records
        if record["phase"] != "sync"
    )
    assert len({record["seconds"] for record in records if record["phase"] == "rollout"}) == 1
    # Weights, those of the reference, two moments.
    bytes_held = 16 * sum(parameter.numel() for parameter in weights_before.values())
    assert all(
        record["peak_gib"] > record["mean_gib"] > bytes_held / 2**30
        for record in records
        if record["phase"] == "update"
    )
    assert "+2.1 %" in list(table(records).columns[-1].cells)


@pytest.mark.slow
def test_the_vanilla_arm_has_the_gradient_of_an_update_without_a_world_model(start, tmp_path):
    moments_by_run = []
    without_wm = make_config(start, tmp_path / "off", enabled=False)
    for place, config in enumerate(
        (without_wm, *make_variants(make_config(start, tmp_path / "on")).values())
    ):
        config = config.model_copy(
            update={"run": config.run.model_copy(update={"name": str(place)})}
        )
        with open_run(config) as run:
            if place == 0:
                push_weights(run.policy.lm, run.engine, version=0)
                update(run, Rollouts(run.factory, run.engine, run.chat, config))
            else:
                one_pass(run, config, play(run, {}), partial(timed, run, {}))
            # after one step: the gradient, but for a constant
            moments_by_run.append(
                [state["exp_avg"].clone() for state in run.optimizer.state.values()]
            )
    expected, vanilla, paw = moments_by_run
    assert len(expected) == len(vanilla)
    assert any(moment.any() for moment in expected)
    assert all(map(torch.equal, expected, vanilla))
    assert not all(map(torch.equal, expected, paw))


def test_memory_on_a_cpu_is_counted_to_the_byte(live):
    weights = 2 * 4 * live.policy.lm.num_parameters()  # the reference has its own
    records = {"update": {}}
    with memory(live, records, "update"):
        large = torch.zeros(3000, 1000)
        freed = torch.zeros(2000, 1000)
        del freed
        small = torch.zeros(1000, 1000)
    assert len(large) + len(small) == 4000
    assert round(records["update"]["peak_gib"] * 2**30) == weights + 4 * 5_000_000
    assert weights < records["update"]["mean_gib"] * 2**30 < weights + 4 * 5_000_000


def test_a_block_that_raises_leaves_no_hook_and_no_thread(live, monkeypatch):
    decoder = live.policy.lm.get_decoder()
    hooks = len(decoder._forward_pre_hooks)
    with pytest.raises(RuntimeError, match="out of memory"), memory(live, {"update": {}}, "update"):
        raise RuntimeError("out of memory")
    assert len(decoder._forward_pre_hooks) == hooks

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1)
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="out of memory"), _cuda_memory():
        assert threading.active_count() == threads + 1
        raise RuntimeError("out of memory")
    assert threading.active_count() == threads


def test_few_repeats_have_a_range_and_no_interval():
    """Of n values even the range holds the median with probability 1 - 2^(1 - n): 94 % of five, 97
    % of six."""
    for repeats, label in ((5, "[range of 5]"), (6, "[95 % interval]")):
        ratios = 1.0 + 0.01 * np.arange(1, repeats + 1) ** 2
        point, low, high = overhead(np.ones(repeats), ratios)
        middle = 100 * np.median(ratios) - 100
        least = 100 * ratios.min() - 100
        most = 100 * ratios.max() - 100
        assert least <= low < point < high <= most
        if repeats == 5:
            assert [point, low, high] == pytest.approx([middle, least, most])

        records = []
        for repeat, ratio in enumerate(ratios, 1):
            common = {"repeat": repeat, "phase": "update", "tokens": 1}
            records.append({"variant": "GRPO", "seconds": 1.0, **common})
            records.append({"variant": "GRPO + PaW", "seconds": ratio, **common})
        added = table(records).columns[3]
        assert Text.from_markup(str(added.header)).plain == f"PaW adds {label}"
        assert next(iter(added.cells)) == f"{point:+.1f} % [{low:+.1f}, {high:+.1f}]"


def test_recorded_episodes_come_back_as_they_were_played(start, live, tmp_path):
    recipe = tmp_path / "recipe.toml"
    file = tmp_path / "episodes.jsonl"
    recipe.write_text(dump(live.config))
    assert (
        cli.main(
            ["rollout", str(start), "--recipe", str(recipe), "--tasks", "3", "--out", str(file)]
        )
        == 0
    )
    expected = play(live, {})
    groups = as_sampled_by(live, read_episodes(file))
    assert [[t.member for t in group.trajectories] for group in groups] == [[0, 1, 2]] * 3
    for read_turn, played_turn in zip(turns(groups), turns(expected), strict=True):
        assert read_turn.sampled_logp == pytest.approx(played_turn.sampled_logp, abs=1e-5)
        assert replace(read_turn, sampled_logp=[]) == replace(played_turn, sampled_logp=[])
    no_turn = r"--rollouts .*episodes.jsonl: line 1 is not a turn that `paw rollout` wrote"
    for text in ("", "{}", "nonsense", '{"task": 1}'):
        file.write_text(text)
        with pytest.raises(UserError, match=no_turn if text else "it contains no turn"):
            read_episodes(file, vocabulary=9)
    with pytest.raises(UserError, match="No such file"):
        read_episodes(tmp_path / "none.jsonl", vocabulary=9)
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(
        UserError, match=r"--rollouts .*latin\.jsonl: cannot be read: 'utf-8' codec"
    ):
        read_episodes(tmp_path / "latin.jsonl")


def test_random_episodes_keep_the_limits(live):
    run, groups = random_groups(live)
    assert groups == random_groups(live)[1]
    assert [len(group.trajectories) for group in groups] == [3, 3, 3]
    # As ChatML's.
    assert len(run.chat.separator_ids) == 4
    assert run.chat is not live.chat
    for turn in turns(groups):
        assert 1 <= len(turn.prompt_ids) <= 256
        assert 1 <= len(turn.response_ids) == len(turn.sampled_logp) <= 3
        assert 9 <= len(run.encode_observation(turn.outcome.observation)) <= 12
    assert any(len(t.turns) == ENV.max_turns for group in groups for t in group.trajectories)
    prompts = [len(turn.prompt_ids) for turn in turns(groups)]
    # As the plan takes them.
    assert np.mean(prompts) == pytest.approx(Play.of(run.config).prompt, rel=0.1)


def test_an_environment_without_games_to_leave_out_can_be_profiled():
    example = Path(__file__).parents[2] / "examples" / "number_game.py"
    keys = {"env.name": f"{example}:Guess", "model.path": "-"}
    assert load_played("own-environment", keys, {"env.data": "none"}).env.name == keys["env.name"]
    assert load_played(
        "alfworld-grpo-paw", {"env.data": "x"}, {"env.data": "none"}
    ).env.data == Path("x")


def test_a_mistake_is_one_line(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["quickstart", "--repeats", "1"], "--repeats 1: a spread needs at least 2"),
        (
            ["alfworld-grpo"],
            "alfworld-grpo: wm.enabled = false leaves nothing to compare; add --wm.enabled true",
        ),
        (["quickstart", "--out", "/dev/null/x"], "--out /dev/null/x: Not a directory"),
    ):
        assert cli.main(["profile", *words]) == 2
        out, err = capfd.readouterr()
        assert not out
        assert err.startswith("paw: ")
        assert message in err
        assert err.count("\n") == 1


@pytest.mark.slow
def test_the_command_writes_table_chart_and_traces(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {
        "rollout.tasks": 1,
        "rollout.group_size": 2,
        "rollout.max_prompt_tokens": 64,
        "env.max_turns": 2,
    }
    sizes |= {"rollout.max_response_tokens": 8, "wm.max_tokens": 16, "warmup.layers": 1}
    sizes |= {"model.path": "quickstart", "model.dtype": "float32", "model.device": "cpu"}
    words = [word for key, value in sizes.items() for word in (f"--{key}", str(value))]
    assert (
        cli.main(
            ["profile", "alfworld-gigpo-paw", "--synthetic", "--trace", "--repeats", "2", *words]
        )
        == 0
    )
    assert "GIGPO + PaW" in capsys.readouterr().out
    with Path("profile/profile.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * 2 * len(STAGES)
    assert list(lines[0]) == [
        "variant", "repeat", "phase", "seconds", "cpu_seconds", "tokens", "peak_gib", "mean_gib",
        "recipe", "model", "turns", "commit", "device", "backend", "paw", "torch", "gradient_frac",
    ]  # fmt: skip
    assert all(float(line["seconds"]) >= 0 for line in lines)
    names = {path.name for path in Path("profile").iterdir()}
    assert names == {"profile.csv", "profile.png", "trace_vanilla.json.gz", "trace_paw.json.gz"}
    with gzip.open("profile/trace_paw.json.gz") as file:
        assert {event.get("name") for event in json.load(file)["traceEvents"]} >= set(STAGES)


def test_random_weights_have_the_shape_of_the_name(tmp_path, monkeypatch):
    name = "Qwen3-0.6B"
    small = replace(
        shapes.SHAPES[name],
        vocabulary=300,
        hidden=32,
        intermediate=48,
        layers=1,
        heads=4,
        head_size=8,
    )
    monkeypatch.setitem(shapes.SHAPES, name, replace(small, kv_heads=2))
    folder = random_model(make_config(f"Qwen/{name}-Instruct", tmp_path), tmp_path / "model")
    assert load_policy(folder).lm.num_parameters() == shapes.SHAPES[name].parameters
    Chat(load_tokenizer(folder))
