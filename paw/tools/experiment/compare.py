"""`paw experiment compare`: variants x seeds, each less the first seed by seed, with intervals.

Tables 1 to 4 and Figure 4 of PaW in form.
"""

import argparse
from statistics import fmean, median
from typing import Any

from paw.recipe import load
from paw.tools.experiment import figures, results, runs
from paw.tools.experiment.results import Record, interval, paired, percent, points
from paw.tools.experiment.runs import Overrides
from paw.tools.results import markdown
from paw.tools.rundir import Run

REACHED = 0.1
"""Training success that counts as having taken off (Figure 4)."""
FACTS = ("commit", "paw", "torch", "device")


def run(options: argparse.Namespace, overrides: Overrides) -> int:
    """Train what is missing; write compare.{csv,png,md} and summary.json. Returns 0."""
    variants = runs.parse_variants(options.variants, options.own)
    paper = results.paper_columns(load(options.recipe, overrides))
    seeds: dict[str, list[int]] = {variant: options.seeds for variant in variants}
    seeds |= {variant: sorted({*options.seeds, *options.pair_seeds}) for variant in list(variants)[:2]}
    found = runs.conduct(options, variants, seeds, overrides)
    records = [measure(variant, seed, run) for variant, by_seed in found.items() for seed, run in by_seed.items()]
    summary = summarise(records)
    figure = figures.comparison(figures.evaluations(records), summary)
    text = report(f"Comparison: {options.recipe}", summary, records, paper)
    told = {variant: {"overrides": variants[variant]} | of for variant, of in summary.items()}
    results.write(options.out, "compare", text=text, records=records, figure=figure, summary=told)
    return 0


def measure(variant: str, seed: int, run: Run) -> Record:
    """A line of the CSV. Shares; `_last10` are means over the last ten updates, others over all updates."""
    evaluated, trained = (run.metrics.get(key, {}) for key in ("eval/success", "success/all"))
    always = run.updates + 1
    return {
        "variant": variant,
        "seed": seed,
        "before": run.first("eval/success"),
        "after": run.last("eval/success"),
        **{key: run.last(f"eval/{key}") for key in ("ci_low", "ci_high", "games")},
        "area": results.area(evaluated) if evaluated else None,
        "train_last10": run.last("success/all", 10),
        "updates_with_success": fmean(share > 0 for share in trained.values()) if trained else None,
        "takes_off_at": next((step for step, share in trained.items() if share > REACHED), None),
        "lambda_first10": run.first("wm/lambda", 10),
        "lambda_last10": run.last("wm/lambda", 10),
        "gradient_frac": run.first("optim/gradient_frac", always),
        "masked_frac": run.first("wm/masked_frac", always),
        **{key.replace("/", "_"): run.first(key, always) for key in run.metrics if key.endswith("/grad_norm")},
        "minutes": (run.info.get("warmup_s", 0.0) + run.info.get("wall_s", 0.0)) / 60,
        **{key: run.info.get(key, "") for key in FACTS},
        **{f"eval_{step}": value for step, value in evaluated.items()},
    }


def summarise(records: list[Record]) -> dict[str, dict[str, Any]]:
    """By variant: success before and after, area under the curve, paired differences to the first, as intervals."""
    summary: dict[str, dict[str, Any]] = {}
    base: dict[str, dict[int, float]] = {}
    for variant in dict.fromkeys(row["variant"] for row in records):
        rows = [row for row in records if row["variant"] == variant]
        keys = ("before", "after", "area", "train_last10", "takes_off_at", "updates_with_success")
        column = {key: {row["seed"]: row[key] for row in rows if row[key] is not None} for key in keys}
        found: dict[str, Any] = {key: interval(list(column[key].values())) for key in keys[:4] if column[key]}
        found |= {"seeds": list(column["after"]), "difference": None, "area_difference": None}
        if base:
            found["difference"] = paired(base["after"], column["after"])
            found["area_difference"] = paired(base["area"], column["area"])
            found["verdict"] = results.verdict(found["difference"])
        base = base or column
        took_off, shares = column["takes_off_at"].values(), column["updates_with_success"].values()
        found |= {"took_off": len(took_off), "takes_off_at": median(took_off) if took_off else None}
        summary[variant] = found | {"updates_with_success": fmean(shares) if shares else None}
    return summary


def report(title: str, summary: dict[str, Any], records: list[Record], paper: dict[str, dict[str, float]]) -> str:
    """The markdown: the table, the paper's numbers (title -> variant -> per cent) beside ours, and how to read both."""
    base = next(iter(summary))
    header = ["variant", "seeds", "before", "after", "sd", "area", f"after, less {base}", "area, less", "shown"]
    header += ["updates with a success", f"above {100 * REACHED:.0f} %", "from update (median)"]
    rows = []
    for variant, found in summary.items():
        n = len(found["seeds"])
        row = [variant, n, points(found["before"]), points(found["after"]), percent(found["after"].sd)]
        row += [points(found["area"]), points(found["difference"], sign=True)]
        row += [points(found["area_difference"], sign=True), found.get("verdict", "baseline")]
        row += [percent(found["updates_with_success"]), f"{found['took_off']} of {n}", found["takes_off_at"]]
        rows.append([*row, *(printed.get(variant) for printed in paper.values())])
    halves = [(row["ci_high"] - row["ci_low"]) / 2 for row in records if row["ci_low"] is not None]
    alone = f"A single evaluation is known to +-{100 * fmean(halves or [0.0]):.1f} points (95 %); "
    return "\n".join([
        f"# {title}\n",
        markdown([*header, *(f"paper: {name}" for name in paper)], rows),
        "\nPer cent of evaluation games won, mean over seeds [95 % Student interval], before and after training; area: "
        "mean height of the evaluation curve.",
        f"Differences to {base} are paired: the variants of a seed share start model and games. No interval is widened "
        "for the number of variants.",
        alone + "the spread over seeds contains that." if halves else "",
        "The paper: arXiv 2606.02388, Tables 1 to 4, means over three seeds. Where model or games are not its own, "
        "compare differences, not levels.",
    ])  # fmt: skip
