"""`paw experiment compare`: compares variants of a recipe with the first variant, over seeds.

The tables and the figure have the form of PaW's Tables 1 to 4 and Figure 4.
"""

import argparse
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from paw.config.recipe import load
from paw.tools.evaluate.results import markdown
from paw.tools.experiment import figures, results, runs
from paw.tools.experiment.results import Record, interval, paired, percent, points
from paw.tools.experiment.runs import Overrides
from paw.tools.report.rundir import Run

REACHED = 0.1
"""A run has taken off once its training success exceeds this share (Figure 4)."""
FACTS = ("commit", "paw", "torch", "device")
"""Keys of run.json that are columns of the CSV."""


def run(options: argparse.Namespace, overrides: Overrides) -> int:
    """Train missing runs, and write compare.{csv,png,md} and summary.json. Returns 0."""
    variants = runs.parse_variants(options.variants, options.own)
    paper = results.paper_columns(load(options.recipe, overrides))
    seeds = _seeds_of(list(variants), options.seeds, options.pair_seeds)
    finished = runs.conduct(options, variants, seeds, overrides)

    records = []
    for variant, by_seed in finished.items():
        for seed, seed_run in by_seed.items():
            records.append(measure(variant, seed, seed_run))
    summary = summarise(records)

    results.write(
        options.out,
        "compare",
        text=report(f"Comparison: {options.recipe}", summary, records, paper),
        records=records,
        figure=figures.comparison(figures.evaluations(records), summary),
        summary={
            variant: {"overrides": variants[variant]} | row for variant, row in summary.items()
        },
    )
    return 0


def _seeds_of(variants: list[str], seeds: list[int], pair_seeds: list[int]) -> dict[str, list[int]]:
    """Return the seeds of each variant. The first two variants also have the `pair_seeds`."""
    by_variant = {variant: seeds for variant in variants}
    for variant in variants[:2]:
        by_variant[variant] = sorted({*seeds, *pair_seeds})
    return by_variant


def measure(variant: str, seed: int, run: Run) -> Record:
    """Return a line of the CSV.

    Success is a share. `_last10` is a mean over the last ten updates, other means are over all
    updates.
    """
    evaluated = run.metrics.get("eval/success", {})
    trained = run.metrics.get("success/all", {})
    all_updates = run.updates + 1

    record: Record = {"variant": variant, "seed": seed}
    record["before"] = run.first("eval/success")
    record["after"] = run.last("eval/success")
    for key in ("ci_low", "ci_high", "games"):
        record[key] = run.last(f"eval/{key}")
    record["area"] = results.area(evaluated) if evaluated else None

    record["train_last10"] = run.last("success/all", 10)
    takes_off_at = [step for step, share in trained.items() if share > REACHED]
    record["updates_with_success"] = None
    if trained:
        record["updates_with_success"] = fmean(share > 0 for share in trained.values())
    record["takes_off_at"] = takes_off_at[0] if takes_off_at else None

    record["lambda_first10"] = run.first("wm/lambda", 10)
    record["lambda_last10"] = run.last("wm/lambda", 10)
    record["gradient_frac"] = run.first("optim/gradient_frac", all_updates)
    record["masked_frac"] = run.first("wm/masked_frac", all_updates)
    for key in run.metrics:
        if key.endswith("/grad_norm"):
            record[key.replace("/", "_")] = run.first(key, all_updates)

    record["minutes"] = (run.info.get("warmup_s", 0.0) + run.info.get("wall_s", 0.0)) / 60
    for key in FACTS:
        record[key] = run.info.get(key, "")
    for step, success in evaluated.items():
        record[f"eval_{step}"] = success
    return record


def summarise(records: list[Record]) -> dict[str, dict[str, Any]]:
    """Return success before and after, area under the curve, and paired differences to the first.

    They are given by variant. Each is an interval over seeds.
    """
    summary: dict[str, dict[str, Any]] = {}
    baseline: dict[str, dict[int, float]] | None = None
    for variant in dict.fromkeys(row["variant"] for row in records):
        rows = [row for row in records if row["variant"] == variant]
        after = _by_seed(rows, "after")
        areas = _by_seed(rows, "area")

        line: dict[str, Any] = {}
        for key in ("before", "after", "area", "train_last10"):
            values = list(_by_seed(rows, key).values())
            if values:
                line[key] = interval(values)

        line["seeds"] = list(after)
        line["difference"] = None
        line["area_difference"] = None
        if baseline is None:
            baseline = {"after": after, "area": areas}
        else:
            line["difference"] = paired(baseline["after"], after)
            line["area_difference"] = paired(baseline["area"], areas)
            line["verdict"] = results.verdict(line["difference"])

        took_off = list(_by_seed(rows, "takes_off_at").values())
        shares = list(_by_seed(rows, "updates_with_success").values())
        line["took_off"] = len(took_off)
        line["takes_off_at"] = median(took_off) if took_off else None
        line["updates_with_success"] = fmean(shares) if shares else None
        summary[variant] = line
    return summary


def _by_seed(rows: list[Record], key: str) -> dict[int, float]:
    """Return a column of the CSV by seed, without runs that have no value."""
    return {row["seed"]: row[key] for row in rows if row[key] is not None}


def report(
    title: str, summary: dict[str, Any], records: list[Record], paper: dict[str, dict[str, float]]
) -> str:
    """Write the results as Markdown: a table with the paper's numbers beside ours, and a guide to
    it.

    `paper` has per cent by title and variant.
    """
    baseline = next(iter(summary))
    header = [
        "variant",
        "seeds",
        "before",
        "after",
        "sd",
        "area",
        f"after, less {baseline}",
        "area, less",
        "shown",
        "updates with a success",
        f"above {100 * REACHED:.0f} %",
        "from update (median)",
    ]
    header += [f"paper: {heading}" for heading in paper]
    rows = [_table_row(variant, line, list(paper.values())) for variant, line in summary.items()]

    half_widths = [
        (row["ci_high"] - row["ci_low"]) / 2 for row in records if row["ci_low"] is not None
    ]
    precision = ""
    if half_widths:
        precision = (
            f"A single evaluation is known to +-{100 * fmean(half_widths):.1f} points (95 %); "
            "the spread over seeds contains that."
        )

    lines = [
        f"# {title}\n",
        markdown(header, rows),
        "\nPer cent of evaluation games won, mean over seeds [95 % Student interval], "
        "before and after training; area: mean height of the evaluation curve.",
        f"Differences to {baseline} are paired: "
        "the variants of a seed share start model and games. "
        "No interval is widened for the number of variants.",
        precision,
        "The paper: arXiv 2606.02388, Tables 1 to 4, means over three seeds. "
        "Where model or games are not its own, compare differences, not levels.",
    ]
    return "\n".join(lines)


def _table_row(
    variant: str, line: Mapping[str, Any], paper: Sequence[Mapping[str, float]]
) -> list[Any]:
    seeds = len(line["seeds"])
    row = [
        variant,
        seeds,
        points(line["before"]),
        points(line["after"]),
        percent(line["after"].sd),
        points(line["area"]),
        points(line["difference"], sign=True),
        points(line["area_difference"], sign=True),
        line.get("verdict", "baseline"),
        percent(line["updates_with_success"]),
        f"{line['took_off']} of {seeds}",
        line["takes_off_at"],
    ]
    return row + [printed.get(variant) for printed in paper]
