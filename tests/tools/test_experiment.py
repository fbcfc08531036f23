"""Experiments: statistics by hand, variants and plans, tables and figures, and one trained by the
real command."""

import argparse
import csv
import importlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from paw import cli
from paw.config.recipe import dump, load
from paw.errors import UserError
from paw.tools.experiment import runs
from paw.tools.experiment.figures import comparison
from paw.tools.experiment.results import Interval, area, interval, paired, student, verdict
from paw.tools.experiment.runs import VARIANTS, parse_variants

dynamics = importlib.import_module("bench.studies.dynamics")


def test_intervals_by_hand():
    # 2, 4, 6: mean 4, sd 2, t(2) = 4.302653, half = 4.302653 * 2 / sqrt(3)
    by_hand = interval([2.0, 4.0, 6.0])
    assert by_hand.mean == 4.0
    assert by_hand.n == 3
    assert by_hand.sd == 2.0
    assert (by_hand.low, by_hand.high) == pytest.approx((4 - 4.968276, 4 + 4.968276), abs=1e-6)
    assert interval([0.4]) == Interval(0.4, 1)
    tabled = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 10: 2.2281, 120: 1.9799}
    assert {n: student(n) for n in tabled} == pytest.approx(tabled, abs=5e-5)
    assert area({0: 0.2, 40: 0.4, 240: 0.6}) == pytest.approx((40 * 0.3 + 200 * 0.5) / 240)
    assert area({0: 0.3}) == 0.3


def test_differences_are_paired_by_seed():
    difference = paired({0: 0.1, 1: 0.5, 2: 0.9}, {2: 1.0, 0: 0.2, 1: 0.6, 7: 0.0})
    assert difference is not None
    assert difference.n == 3
    assert difference.mean == pytest.approx(0.1)
    # The seeds' levels differ, the differences do not.
    assert difference.sd == pytest.approx(0.0, abs=1e-12)
    assert verdict(difference) == "helps beyond the interval"
    assert verdict(interval([-0.3, -0.31, -0.32])) == "hurts beyond the interval"
    assert verdict(interval([-0.3, 0.4, 0.1])) == "not shown"
    for undecided in (interval([0.03, 0.03]), interval([0.4]), paired({0: 0.1}, {1: 0.2})):
        assert verdict(undecided) == "not shown (fewer than three seeds)"


@pytest.mark.filterwarnings("error::UserWarning")
def test_one_variant_has_a_figure_of_its_curve_alone():
    curves = {"grpo": {0: Interval(0.2, 1), 4: Interval(0.5, 1)}}
    figure = comparison(curves, {"grpo": {"difference": None}})
    assert len(figure.axes) == 1
    figure.savefig(io.BytesIO())


def test_variants_and_seeds():
    assert {"rloo", "gigpo", "dr-grpo", "ppo"} <= runs.ESTIMATORS.keys()
    vanilla = {"grpo", *runs.ESTIMATORS}
    for name in VARIANTS:
        assert load("quickstart", parse_variants(name, [])[name]).wm.enabled == (
            name not in vanilla
        )
    variants = parse_variants("grpo", ["loud: wm.scale=10 wm.loss=mae", "same:"])
    assert variants["loud"] == {"wm.scale": "10", "wm.loss": "mae"}
    assert variants["same"] == {}
    for names, definitions, message in (
        ("grpo,pw", [], "unknown variant 'pw': did you mean 'paw'"),
        ("grpo,grpo", [], "'grpo' is given twice"),
        ("", [], "names no variant"),
        ("grpo", ["loud wm.scale=1"], "--variant 'loud wm.scale=1'"),
        ("grpo", ["loud: wm.scale"], "give a name"),
    ):
        with pytest.raises(UserError, match=message):
            parse_variants(names, definitions)
    for text, seeds in {"3": [0, 1, 2], "0-2,7": [0, 1, 2, 7], "7,": [7]}.items():
        assert runs.parse_seeds(text) == seeds
    for text in ("0", "x", "3-1", "-2", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="names no seed"):
            runs.parse_seeds(text)


def make_plan(
    out: Path, *, recipe="quickstart", variants="grpo,paw", seeds=(0, 1), jobs=1, **overrides
):
    chosen = parse_variants(variants, [])
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    options = argparse.Namespace(recipe=recipe, out=out, jobs=jobs, gpus=1)
    return runs.plan(options, chosen, {name: list(seeds) for name in chosen}, keys)


def test_a_plan_is_all_variants_of_a_seed_in_a_row(tmp_path):
    jobs = make_plan(tmp_path, run__updates="7")
    assert [job.directory.name for job in jobs] == ["grpo-0", "paw-0", "grpo-1", "paw-1"]
    words = jobs[3].words
    assert words[:2] == ("train", "quickstart")
    settings = dict(zip(words[2::2], words[3::2], strict=True))
    assert settings == {
        "--gpus": "1", "--run.updates": "7", "--advantage.type": "grpo", "--wm.enabled": "true",
        "--run.dir": f"{tmp_path}/runs", "--run.name": "paw-1", "--run.seed": "1", "--warmup.seed": "1",
    }  # fmt: skip
    assert "--run.threads" in make_plan(tmp_path, jobs=2)[0].words
    # No model of ours.
    assert "--warmup.seed" not in make_plan(tmp_path, recipe="webshop-grpo-14b")[0].words
    for overrides, message in (
        ({"wm__loss": "ce"}, "--wm.loss is what variant 'ce' sets"),
        ({"run__seed": "3"}, "--run.seed: the experiment sets it"),
        ({"wm__alpa": "1"}, "unknown key '--wm.alpa'"),
        ({"jobs": 0}, "--jobs 0"),
    ):
        with pytest.raises(UserError, match=message):
            make_plan(tmp_path, variants="grpo,ce", **overrides)
    assert not list(tmp_path.iterdir())


def finish(job, evals: dict[int, float], *, training: float = 0.3, **metrics: float) -> None:
    """A run directory as a finished `paw train` leaves it whose report failed."""
    job.directory.mkdir(parents=True)
    settings = {key[2:]: value for key, value in zip(job.words[4::2], job.words[5::2], strict=True)}
    (job.directory / "config.toml").write_text(dump(load(job.words[1], settings)))
    lines = [
        {"step": step, "success/all": training, **metrics} for step in range(1, job.updates + 1)
    ]
    lines += [
        {
            "step": step,
            "eval/success": success,
            "eval/ci_low": success - 0.1,
            "eval/ci_high": success + 0.1,
        }
        for step, success in evals.items()
    ]
    (job.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    info = {
        "warmup_s": 60.0,
        "wall_s": 120.0,
        "paw": "0",
        "device": "CPU",
        "ended": {"how": "finished"},
    }
    (job.directory / "run.json").write_text(json.dumps(info))


def test_what_is_finished_is_not_trained_again(tmp_path):
    for job in make_plan(tmp_path, run__updates="3"):
        finish(job, {0: 0.2, 3: 0.4})
    # Learns the same.
    jobs = make_plan(tmp_path, run__updates="3", run__threads="2", run__save_every="0")
    assert all(job.finished for job in jobs)
    # Otherwise this would start `paw train`, which refuses to write over a run.
    runs.train(jobs, at_once=1)
    stopped = jobs[0].directory / "metrics.jsonl"
    stopped.write_text(
        "\n".join(line for line in stopped.read_text().splitlines() if '"step": 3' not in line)
    )
    (jobs[1].directory / "run.json").write_text('{"ended": {"how": "stopped"}}')
    assert [bool(job.finished) for job in jobs] == [False, False, True, True]
    with pytest.raises(UserError, match=r"grpo-0 has optim.lr = 0.001, not 0.002"):
        make_plan(tmp_path, run__updates="3", optim__lr="2e-3")


@pytest.fixture
def finished(tmp_path):
    """grpo and paw, three seeds, paw better by 0.1 +- a little; ce with one seed."""
    success_after = {"grpo": (0.50, 0.60, 0.40), "paw": (0.60, 0.69, 0.51), "ce": (0.30,)}
    for seed in range(3):
        for job in make_plan(
            tmp_path,
            variants="grpo,paw,ce" if seed == 0 else "grpo,paw",
            seeds=[seed],
            run__updates="4",
        ):
            world = {} if job.variant == "grpo" else {"optim/gradient_frac": 0.3, "wm/lambda": 0.8}
            finish(
                job,
                {0: 0.2, 2: 0.3, 4: success_after[job.variant][seed]},
                training=0.05 * seed,
                **world,
            )
    return tmp_path


def command(capsys, *words) -> str:
    assert cli.main(["experiment", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_compare_writes_table_numbers_and_plot(finished, capsys):
    words = ("--variants", "grpo,paw,ce", "--seeds", 3, "--out", finished, "--report-only")
    assert cli.main(["experiment", "compare", "quickstart", *map(str, words)]) == 2
    assert "grpo-0 has run.updates = 4, not 100" in capsys.readouterr().err
    text = command(capsys, "compare", "quickstart", *words, "--run.updates", 4)
    assert (finished / "compare.md").read_text() in text
    assert "| paw | 3 | 20.0 [20.0, 20.0] | 60.0 [37.6, 82.4] | 9.0 |" in text
    assert "+10.0 [+7.5, +12.5]" in text
    assert "| ce | 1 | 20.0 | 30.0 | - |" in text
    assert "| 70.0 | 60.6 | 43.9 |" in text  # the paper's
    assert "| 66.7 | 0 of 3 | - |" in text
    with (finished / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["seed"]) for row in rows][:3] == [
        ("grpo", "0"),
        ("grpo", "1"),
        ("grpo", "2"),
    ]
    assert rows[3]["eval_2"] == "0.3"
    assert rows[3]["lambda_last10"] == "0.8"
    assert rows[0]["lambda_last10"] == ""
    assert rows[0]["minutes"] == "3"
    assert (finished / "compare.png").read_bytes()[:4] == b"\x89PNG"
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["paw"]["difference"]["n"] == 3
    assert summary["ce"]["overrides"]["wm.loss"] == "ce"


def test_dynamics_of_runs_and_of_an_experiment(finished, capsys):
    dynamics.main([str(finished), "--out", str(finished / "d")])
    text = capsys.readouterr().out
    assert "|  | ce (1) | grpo (3) | paw (3) |" in text
    assert "| lambda | 0.8 -> 0.8 | - | 0.8 -> 0.8 |" in text
    with (finished / "d" / "dynamics.csv").open() as file:
        rows = [(row["update"], row["success/all"]) for row in csv.DictReader(file)]
    # what an update did not measure is an empty cell, never 0
    assert rows[:6] == [("0", ""), ("1", "0"), ("2", "0"), ("3", "0"), ("4", "0"), ("0", "")]
    assert list(dynamics.read([finished / "runs" / "paw-1", finished / "runs" / "ce-0"])) == [
        "paw-1",
        "ce-0",
    ]


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, message in (
        ("compare quickstart --report-only", "no finished run of variant 'grpo'"),
        ("compare quickstart --seeds many", "'many' names no seed"),
    ):
        assert cli.main(["experiment", *words.split()]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_run_that_starts_while_the_others_are_stopped_is_stopped_too(tmp_path, monkeypatch):
    job = make_plan(tmp_path, run__updates="3")[0]
    job.directory.parent.mkdir(parents=True)
    job.log.write_text("")
    processes = runs._Processes()

    def start(job):
        processes.stop()
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr(runs, "_start", start)
    with pytest.raises(UserError, match=r"failed \(exit code -15\)"):
        processes.run(job)


def test_a_failing_run_ends_the_experiment(tmp_path, capfd):
    jobs = [
        runs.Job("grpo", seed, tmp_path / "runs" / f"grpo-{seed}", 1, ("train", "nope"))
        for seed in (0, 1)
    ]
    with pytest.raises(UserError, match=r"grpo-0 failed \(exit code 2\)"):
        runs.train(jobs, at_once=1)
    assert "unknown recipe 'nope'" in capfd.readouterr().err  # the run's last lines
    assert not (tmp_path / "runs" / "grpo-1.log").exists()


@pytest.mark.slow
def test_an_experiment_trains_and_reports(paw, quick, tmp_path, capsys):
    words = (
        "experiment",
        "compare",
        "quickstart",
        "--variants",
        "grpo,paw",
        "--seeds",
        1,
        "--out",
        tmp_path,
    )
    small = {
        "eval.every": 1,
        "eval.games": 2,
        "rollout.tasks": 2,
        "rollout.group_size": 2,
        "run.updates": 1,
    }
    overrides = quick | small
    result = paw(*words, "--jobs", 2, overrides)
    assert "0 of 2 runs" in result.stderr
    assert "1 of 2 runs, about" in result.stderr
    assert "2 of 2 runs" in result.stderr
    rows = list(csv.DictReader((tmp_path / "compare.csv").open()))
    assert [row["variant"] for row in rows] == ["grpo", "paw"]
    assert rows[0]["before"] == rows[1]["before"]  # the variants of a seed share its start model
    assert rows[1]["lambda_last10"]
    assert not rows[0]["lambda_last10"]
    assert rows[0]["eval_1"]
    assert rows[0]["commit"]
    assert "| paw | 1 |" in result.stdout
    assert (
        command(
            capsys,
            *words[1:],
            *(word for key, value in overrides.items() for word in (f"--{key}", value)),
        )
        == result.stdout
    )
