"""`paw experiment compare` and `sparse`: arms x seeds, the difference to the first arm seed by seed, with intervals.

Tables 1 to 4 and Figure 4 of PaW in form. Differences are paired: the arms of a seed share start model and games.
"""

import argparse
from statistics import fmean, median
from typing import Any

from paw.recipe import load
from paw.tools.experiment import study
from paw.tools.experiment.arms import Overrides, listing, parse_arms
from paw.tools.experiment.paper import PAPER, columns
from paw.tools.experiment.stats import Interval, area, interval, paired, verdict
from paw.tools.experiment.study import Runs
from paw.tools.experiment.tables import markdown, percent, points, write
from paw.tools.rundir import Run

REACHED = 0.1
"""Training success that counts as having taken off (Figure 4)."""


def add_arguments(parser: argparse.ArgumentParser, *, sparse: bool = False) -> None:
    arms = "grpo,paw" if sparse else "grpo,paw,ce,constant,unselected"
    study.add_arguments(parser, seeds="5", out="sparse" if sparse else "compare")
    named = "see --list; the first is the baseline (default: %(default)s)"
    parser.add_argument("--arms", default=arms, metavar="A,B", help=named)
    own = "one of your own, such as 'loud: wm.scale=10 wm.loss=mae' (repeatable)"
    parser.add_argument("--arm", action="append", default=[], metavar="'NAME: KEY=VALUE ...'", help=own)
    more = "seeds of the first two arms, if they are to have more"
    parser.add_argument("--pair-seeds", type=study.parse_seeds, default=[], metavar="N", help=more)
    parser.add_argument("--list", action="version", version=listing(), help="print the named arms")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(options: argparse.Namespace, overrides: Overrides, *, sparse: bool = False) -> int:
    """Train what is missing; write compare.{csv,png,md} and summary.json (sparse.* for `sparse`). Returns 0."""
    arms = parse_arms(options.arms, options.arm)
    seeds: dict[str, list[int]] = {
        arm: sorted({*options.seeds, *(options.pair_seeds if place < 2 else [])}) for place, arm in enumerate(arms)
    }
    runs = study.conduct(options, arms, seeds, overrides)
    from paw.tools.experiment import figures

    records = measure_all(runs)
    summary = summarise(records)
    key, label = ("success/all", "Success in training") if sparse else ("eval/success", "Success on unseen games")
    window = 10 if sparse else 1
    curves = {arm: figures.average(list(by_seed.values()), key, window=window) for arm, by_seed in runs.items()}
    base, *others = runs
    differences = {arm: found for arm in others if (found := summary[arm]["difference"])}
    name = "sparse" if sparse else "compare"
    write(
        options.out,
        name,
        text=report(options.recipe, summary, runs, columns(load(options.recipe, overrides)), sparse=sparse),
        records=records,
        figure=figures.comparison(curves, differences, base, label),
        summary={
            arm: {"overrides": arms[arm]} | {k: v._asdict() if isinstance(v, Interval) else v for k, v in found.items()}
            for arm, found in summary.items()
        },
    )
    return 0


def measure_all(runs: Runs) -> list[dict[str, Any]]:
    return [measure(arm, seed, run) for arm, by_seed in runs.items() for seed, run in by_seed.items()]


def measure(arm: str, seed: int, run: Run) -> dict[str, Any]:
    """A line of the CSV. Shares; `_last10` are means over the last ten updates, others over all updates."""
    steps, values = run.series("eval/success")
    trained, always = run.metrics.get("success/all", {}), run.updates + 1
    record = {
        "arm": arm,
        "seed": seed,
        "before": run.first("eval/success"),
        "after": run.last("eval/success"),
        "ci_low": run.last("eval/ci_low"),
        "ci_high": run.last("eval/ci_high"),
        "games": run.last("eval/games"),
        "area": area(steps, values) if steps else None,
        "train_last10": run.last("success/all", 10),
        "updates_with_success": fmean(share > 0 for share in trained.values()) if trained else None,
        "takes_off_at": next((step for step, share in trained.items() if share > REACHED), None),
        "lambda_first10": run.first("wm/lambda", 10),
        "lambda_last10": run.last("wm/lambda", 10),
        "live_frac": run.first("wm/live_frac", always),
        "masked_frac": run.first("wm/masked_frac", always),
        **{key.replace("/", "_"): run.first(key, always) for key in run.metrics if key.endswith("/grad_norm")},
        "minutes": (run.info.get("warmup_s", 0.0) + run.info.get("wall_s", 0.0)) / 60,
        **{key: run.info.get(key, "") for key in ("commit", "paw", "torch", "device")},
    }
    return record | {f"eval_{step}": value for step, value in zip(steps, values, strict=True)}


def summarise(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By arm: success before and after, area under the curve, and paired differences to the first arm, as intervals."""

    def column(arm: str, key: str) -> dict[int, float]:
        return {row["seed"]: row[key] for row in records if row["arm"] == arm and row[key] is not None}

    arms = list(dict.fromkeys(row["arm"] for row in records))
    found: dict[str, dict[str, Any]] = {}
    for arm in arms:
        columns = {key: column(arm, key) for key in ("before", "after", "area", "train_last10")}
        found[arm] = {key: interval(list(values.values())) for key, values in columns.items() if values}
        found[arm] |= {"seeds": list(columns["after"]), "difference": None, "area_difference": None}
        if arm != arms[0]:
            difference = paired(column(arms[0], "after"), columns["after"])
            found[arm] |= {"difference": difference, "verdict": verdict(difference)}
            found[arm]["area_difference"] = paired(column(arms[0], "area"), columns["area"])
        took_off = column(arm, "takes_off_at")
        found[arm]["took_off"] = len(took_off)
        found[arm]["takes_off_at"] = median(took_off.values()) if took_off else None
        shares = column(arm, "updates_with_success")
        found[arm]["updates_with_success"] = fmean(shares.values()) if shares else None
    return found


def report(
    recipe: str, summary: dict[str, dict[str, Any]], runs: Runs, paper: dict[str, dict[str, float]], *, sparse: bool
) -> str:
    """The markdown: the table, the paper's numbers (title -> arm -> per cent) beside ours, and how to read both."""
    base = next(iter(summary))
    header = ["arm", "seeds", "before", "after", "sd", "area", f"after, less {base}", "area, less", "shown"]
    if sparse:  # Figure 4
        paper = {"WebShop, Llama-3.2-3B": PAPER["webshop"]["Llama-3.2-3B"]}
    takes_off = ["updates with a success", f"above {100 * REACHED:.0f} %", "from update (median)"] if sparse else []
    rows = []
    for arm, found in summary.items():
        n = len(found["seeds"])
        row = [arm, n, points(found["before"]), points(found["after"]), percent(found["after"].sd)]
        row += [points(found["area"]), points(found["difference"], sign=True)]
        row += [points(found["area_difference"], sign=True), found.get("verdict", "baseline")]
        if sparse:
            row += [percent(found["updates_with_success"]), f"{found['took_off']} of {n}", found["takes_off_at"]]
        rows.append([*row, *(printed.get(arm) for printed in paper.values())])
    last = [run for by_seed in runs.values() for run in by_seed.values() if run.last("eval/ci_high") is not None]
    half = fmean((run.last("eval/ci_high") or 0) - (run.last("eval/ci_low") or 0) for run in last) / 2 if last else None
    return "\n".join([
        f"# {'Sparse reward' if sparse else 'Comparison'}: {recipe}\n",
        markdown([*header, *takes_off, *(f"paper: {name}" for name in paper)], rows),
        "\nPer cent of evaluation games won, mean over seeds [95 % Student interval], before and after training; area: "
        "mean height of the evaluation curve.",
        f"Differences to {base} are paired: the arms of a seed share start model and games. No interval is widened for "
        "the number of arms.",
        f"A single evaluation is known to +-{100 * half:.1f} points (95 %); the spread over seeds contains that."
        if half is not None
        else "",
        "The paper: arXiv 2606.02388, Tables 1 to 4, means over three seeds. Where model or games are not its own, "
        "compare differences, not levels.",
    ])  # fmt: skip
