"""`paw experiment compare`, `sparse` and `sweep`: variants x seeds, each less the first seed by seed, with intervals.

Tables 1 to 4, Figure 4 and Figure 6 of PaW in form. Differences are paired: the variants of a seed share start model
and games.
"""

import argparse
from statistics import fmean, median
from typing import Any

from paw.errors import UserError
from paw.recipe import load
from paw.tools.experiment import results, runs
from paw.tools.experiment.results import PAPER, Interval, Record, interval, markdown, paired, percent, points
from paw.tools.experiment.runs import Overrides, Runs
from paw.tools.rundir import Run

REACHED = 0.1
"""Training success that counts as having taken off (Figure 4)."""
SWEPT = {"alpha": "0.25,0.5,0.75,1", "rho": "0.1,0.2,0.4,1"}
FACTS = ("commit", "paw", "torch", "device")


def add_arguments(parser: argparse.ArgumentParser, *, sparse: bool = False) -> None:
    add, default = parser.add_argument, "grpo,paw" if sparse else "grpo,paw,ce,constant,unselected"
    runs.add_arguments(parser, seeds="5", out="sparse" if sparse else "compare")
    named = "see --list; the first is the baseline (default: %(default)s)"
    add("--variants", "--arms", default=default, metavar="A,B", help=named)
    own = "one of your own, such as 'loud: wm.scale=10 wm.loss=mae' (repeatable)"
    add("--variant", "--arm", action="append", default=[], metavar="'NAME: KEY=VALUE ...'", help=own, dest="own")
    more = "seeds of the first two variants, if they are to have more"
    add("--pair-seeds", type=runs.parse_seeds, default=[], metavar="N", help=more)
    listing = "\n".join(f"{name:12} {what}\n{'':12} {keys}" for name, (keys, what) in runs.VARIANTS.items())
    add("--list", action="version", version=listing, help="print the named variants")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(options: argparse.Namespace, overrides: Overrides, *, sparse: bool = False) -> int:
    """Train what is missing; write compare.{csv,png,md} and summary.json (sparse.* for `sparse`). Returns 0."""
    variants = runs.parse_variants(options.variants, options.own)
    seeds: dict[str, list[int]] = {variant: options.seeds for variant in variants}
    seeds |= {variant: sorted({*options.seeds, *options.pair_seeds}) for variant in list(variants)[:2]}
    found = runs.conduct(options, variants, seeds, overrides)
    from paw.tools.experiment import figures

    records = [measure(variant, seed, run) for variant, by_seed in found.items() for seed, run in by_seed.items()]
    summary = summarise(records)
    if sparse:
        name, title, label = "sparse", "Sparse reward", "Success in training"
        curves = {v: figures.average(list(by_seed.values()), "success/all", 10) for v, by_seed in found.items()}
        paper = {"WebShop, Llama-3.2-3B": PAPER["webshop"]["Llama-3.2-3B"]}  # Figure 4
    else:
        name, title, label = "compare", "Comparison", "Success on unseen games"
        curves, paper = figures.evaluations(records), results.paper_columns(load(options.recipe, overrides))
    differences = {variant: of["difference"] for variant, of in summary.items() if of["difference"]}
    text = report(f"{title}: {options.recipe}", summary, found, paper, sparse=sparse)
    figure = figures.comparison(curves, differences, label)
    plain = {
        variant: {key: value._asdict() if isinstance(value, Interval) else value for key, value in of.items()}
        for variant, of in summary.items()
    }
    plain = {variant: {"overrides": variants[variant]} | of for variant, of in plain.items()}
    results.write(options.out, name, text=text, records=records, figure=figure, summary=plain)
    return 0


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    runs.add_arguments(parser, seeds="3", out="sweep")
    for key, what in {"alpha": "shares of turns that are targets", "rho": "highest p that is not masked"}.items():
        parser.add_argument(f"--{key}", default=SWEPT[key], metavar="X,Y", help=f"{what} (default: %(default)s)")


def sweep(options: argparse.Namespace, overrides: Overrides) -> int:
    """Train what is missing; write sweep.{csv,png,md}. The recipe's own values are the variant `paw` of both curves."""
    config = load(options.recipe, overrides)
    own = {key: float(getattr(config.wm, key)) for key in SWEPT}
    base = {"wm.enabled": "true"} | {f"wm.{key}": f"{value:g}" for key, value in own.items()}
    variants, names = {"paw": base}, {key: {value: "paw"} for key, value in own.items()}
    for key, text in ((key, getattr(options, key)) for key in SWEPT):
        try:
            values = [float(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise UserError(f"--{key} '{text}': give numbers, such as 0.25,0.5,1") from None
        for value in values:
            if value != own[key]:
                names[key][value] = f"{key}-{value:g}"
                variants[names[key][value]] = base | {f"wm.{key}": f"{value:g}"}
    others = {key: value for key, value in overrides.items() if key not in ("wm.alpha", "wm.rho")}
    found = runs.conduct(options, variants, {variant: options.seeds for variant in variants}, others)
    from paw.tools.experiment import figures

    records = [measure(variant, seed, run) for variant, by_seed in found.items() for seed, run in by_seed.items()]
    summary = summarise(records)
    panels = {key: {v: summary[name]["after"] for v, name in names[key].items() if name in summary} for key in SWEPT}
    text = report(f"Sweep: {options.recipe}", summary, found, {})
    results.write(options.out, "sweep", text=text, records=records, figure=figures.sweeps(panels, own))
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


def report(
    title: str, summary: dict[str, dict[str, Any]], runs: Runs, paper: dict[str, dict[str, float]], sparse: bool = False
) -> str:
    """The markdown: the table, the paper's numbers (title -> variant -> per cent) beside ours, and how to read both."""
    base = next(iter(summary))
    header = ["variant", "seeds", "before", "after", "sd", "area", f"after, less {base}", "area, less", "shown"]
    if sparse:
        header += ["updates with a success", f"above {100 * REACHED:.0f} %", "from update (median)"]
    rows = []
    for variant, found in summary.items():
        n = len(found["seeds"])
        row = [variant, n, points(found["before"]), points(found["after"]), percent(found["after"].sd)]
        row += [points(found["area"]), points(found["difference"], sign=True)]
        row += [points(found["area_difference"], sign=True), found.get("verdict", "baseline")]
        if sparse:
            row += [percent(found["updates_with_success"]), f"{found['took_off']} of {n}", found["takes_off_at"]]
        rows.append([*row, *(printed.get(variant) for printed in paper.values())])
    finished = [run for by_seed in runs.values() for run in by_seed.values()]
    ends = [(run.last("eval/ci_low"), run.last("eval/ci_high")) for run in finished]
    halves = [(high - low) / 2 for low, high in ends if low is not None and high is not None]
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
