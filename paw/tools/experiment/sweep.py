"""`paw experiment sweep`: Figure 6 of PaW, one key of the world model at a time around the recipe's values."""

import argparse

from paw.errors import UserError
from paw.recipe import load
from paw.tools.experiment import study
from paw.tools.experiment.arms import Overrides
from paw.tools.experiment.compare import measure_all, summarise
from paw.tools.experiment.tables import markdown, points, write

KEYS = ("alpha", "rho")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    study.add_arguments(parser, seeds="3", out="sweep")
    for key, values, what in (
        ("alpha", "0.25,0.5,0.75,1", "shares of turns that are targets"),
        ("rho", "0.1,0.2,0.4,1", "probabilities above which a token is masked"),
    ):
        parser.add_argument(f"--{key}", default=values, metavar="X,Y", help=f"{what} (default: %(default)s)")


def run(options: argparse.Namespace, overrides: Overrides) -> int:
    """Train what is missing; write sweep.{csv,png,md}. The recipe's own values are the arm `paw` of both curves."""
    config = load(options.recipe, overrides)
    own = {key: float(getattr(config.wm, key)) for key in KEYS}
    base = {"wm.enabled": "true"} | {f"wm.{key}": f"{value:g}" for key, value in own.items()}
    arms = {"paw": base}
    names = {key: {value: "paw"} for key, value in own.items()}
    for key in KEYS:
        for value in _numbers(key, getattr(options, key)):
            if value != own[key]:
                names[key][value] = f"{key}-{value:g}"
                arms[names[key][value]] = base | {f"wm.{key}": f"{value:g}"}
    others = {key: value for key, value in overrides.items() if key not in ("wm.alpha", "wm.rho")}
    runs = study.conduct(options, arms, {arm: options.seeds for arm in arms}, others)
    from paw.tools.experiment import figures

    records = measure_all(runs)
    summary = summarise(records)
    panels = {key: {v: summary[arm]["after"] for v, arm in names[key].items() if arm in summary} for key in KEYS}
    rows = []
    for key, panel in panels.items():
        for value in sorted(panel):
            found = summary[names[key][value]]
            difference, shown = points(found["difference"], sign=True), found.get("verdict", "the recipe's")
            rows.append([key, f"{value:g}", len(found["seeds"]), points(found["after"]), difference, shown])
    text = "\n".join([
        f"# Sweep: {options.recipe}\n",
        markdown(["key", "value", "seeds", "success after training", "less the recipe's (paired)", "shown"], rows),
        "\nPer cent, mean over seeds [95 % Student interval]. The paper's Figure 6 settles on alpha 0.75 and rho 0.2; "
        "its curves are in no public text we found.",
    ])  # fmt: skip
    write(options.out, "sweep", text=text, records=records, figure=figures.sweeps(panels, own))
    return 0


def _numbers(key: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"--{key} '{text}': give numbers, such as 0.25,0.5,1") from None
