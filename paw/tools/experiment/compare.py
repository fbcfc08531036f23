"""`paw experiment compare`, `sparse` and `sweep`: variants x seeds, each less the first seed by seed, with intervals.

Tables 1 to 4, Figure 4 and Figure 6 of PaW in form.
"""

import argparse
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paw.config import Config
from paw.errors import UserError
from paw.recipe import load
from paw.tools.experiment import results, runs
from paw.tools.experiment.results import PAPER, Record, interval, markdown, paired, percent, points
from paw.tools.experiment.runs import Overrides
from paw.tools.rundir import Run

EXPERIMENTS = {
    "compare": "variants x seeds with intervals: the world model, its ablations, estimators (Tables 1 to 4)",
    "sparse": "the same from a start policy that almost never succeeds (Figure 4)",
    "sweep": "success over alpha and rho (Figure 6)",
}
REACHED = 0.1
"""Training success that counts as having taken off (Figure 4)."""
SWEPT = {"alpha": "0.25,0.5,0.75,1", "rho": "0.1,0.2,0.4,1"}
FACTS = ("commit", "paw", "torch", "device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    experiments = parser.add_subparsers(required=True, metavar="EXPERIMENT", dest="experiment")
    for name, help in EXPERIMENTS.items():
        sub = experiments.add_parser(name, help=help, description=help)
        add = sub.add_argument
        sub.epilog = "any key of the configuration can be set for all variants: --run.updates 120"
        add("recipe", help="name of a packaged recipe, or a .toml file")
        which = {"help": "how many, or which: 0-4,7 (default: %(default)s)", "type": runs.parse_seeds, "metavar": "N"}
        add("--seeds", default="3" if name == "sweep" else "5", **which)
        add("--out", type=Path, default=Path(name), help="folder to write (default: %(default)s)")
        add("--jobs", type=int, default=1, metavar="N", help="runs at once, of one thread if several")
        add("--gpus", type=int, default=1, metavar="N", help="of each run, as `paw train --gpus N`")
        add("--report-only", action="store_true", help="train nothing, use what is finished")
        if name == "sweep":
            for key, what in {"alpha": "shares of turns that are targets", "rho": "highest p not masked"}.items():
                add(f"--{key}", default=SWEPT[key], metavar="X,Y", help=f"{what} (default: %(default)s)")
            continue
        default = "grpo,paw" if name == "sparse" else "grpo,paw,ce,constant,unselected"
        named = "see --list; the first is the baseline (default: %(default)s)"
        add("--variants", "--arms", default=default, metavar="A,B", help=named)
        own = "one of your own, such as 'loud: wm.scale=10 wm.loss=mae' (repeatable)"
        add("--variant", "--arm", action="append", default=[], metavar="'NAME: KEY=VALUE ...'", help=own, dest="own")
        which["help"] = "seeds of the first two variants, if they are to have more"
        add("--pair-seeds", default=[], **which)
        listing = "\n".join(f"{name:12} {what}\n{'':12} {keys}" for name, (keys, what) in runs.VARIANTS.items())
        add("--list", action="version", version=listing, help="print the named variants")
        sub.formatter_class = argparse.RawDescriptionHelpFormatter


def run(options: argparse.Namespace, overrides: Overrides) -> int:
    """Train what is missing; write NAME.{csv,png,md}, for `compare` and `sparse` summary.json too. Returns 0."""
    name = options.experiment
    recipe, swept = options.recipe, {}
    if name == "sweep":
        variants, swept = _swept(options, config := load(recipe, overrides))
        overrides = {key: value for key, value in overrides.items() if key not in ("wm.alpha", "wm.rho")}
        pair_seeds, title, paper = [], "Sweep", {}
    else:
        variants, pair_seeds = runs.parse_variants(options.variants, options.own), options.pair_seeds
        title, paper = "Sparse reward", {"WebShop, Llama-3.2-3B": PAPER["webshop"]["Llama-3.2-3B"]}  # Figure 4
        if name == "compare":
            title, paper = "Comparison", results.paper_columns(load(recipe, overrides))
    seeds: dict[str, list[int]] = {variant: options.seeds for variant in variants}
    seeds |= {variant: sorted({*options.seeds, *pair_seeds}) for variant in list(variants)[:2]}
    found = runs.conduct(options, variants, seeds, overrides)
    from paw.tools.experiment import figures

    records = [measure(variant, seed, run) for variant, by_seed in found.items() for seed, run in by_seed.items()]
    summary = summarise(records)
    if name == "sweep":
        after = {variant: of["after"] for variant, of in summary.items()}
        panels = {key: {x: after[v] for x, v in names.items() if v in after} for key, names in swept.items()}
        figure = figures.sweeps(panels, {key: getattr(config.wm, key) for key in SWEPT})
    else:
        label, curves = "Success on unseen games", figures.evaluations(records)
        if name == "sparse":
            label = "Success in training"
            curves = {v: figures.average(list(by_seed.values()), "success/all", 10) for v, by_seed in found.items()}
        figure = figures.comparison(curves, summary, label)
    text = report(f"{title}: {recipe}", summary, records, paper, sparse=name == "sparse")
    told = None if swept else {variant: {"overrides": variants[variant]} | of for variant, of in summary.items()}
    results.write(options.out, name, text=text, records=records, figure=figure, summary=told)
    return 0


def _swept(options: argparse.Namespace, config: Config) -> tuple[dict[str, Overrides], dict[str, dict[float, str]]]:
    """The variants of a sweep, and for each key its values' variants: the recipe's own value is `paw` in both."""
    base = {"wm.enabled": "true"} | {f"wm.{key}": f"{getattr(config.wm, key):g}" for key in SWEPT}
    variants, names = {"paw": base}, {key: {float(getattr(config.wm, key)): "paw"} for key in SWEPT}
    for key, found in names.items():
        text = getattr(options, key)
        try:
            values = [float(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise UserError(f"--{key} '{text}': give numbers, such as 0.25,0.5,1") from None
        for value in values:
            name = found.setdefault(value, f"{key}-{value:g}")
            variants.setdefault(name, base | {f"wm.{key}": f"{value:g}"})
    return variants, names


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
    title: str, summary: dict[str, Any], records: list[Record], paper: dict[str, dict[str, float]], *, sparse: bool
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
