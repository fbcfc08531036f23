"""Statistics over seeds, the paper's numbers, and how both are written."""

import csv
import io
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from paw.config.sections import Config
from paw.io.files import write_file, writing

PAPER: dict[str, dict[str, dict[str, float]]] = tomllib.loads(
    Path(__file__).with_name("paper.toml").read_text(encoding="utf-8")
)
"""Success in per cent by env.name, start of the model's name, and variant.

The numbers are from Tables 1 to 4 of arXiv 2606.02388."""
TITLES = {"alfworld": "ALFWorld", "webshop": "WebShop", "search": "search QA"}
"""Names of environments in tables."""
Record = dict[str, Any]
"""A line of a CSV."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % interval. One seed has neither spread nor interval."""

    mean: float
    n: int
    sd: float | None = None
    low: float | None = None
    high: float | None = None


def interval(values: Sequence[float]) -> Interval:
    """Return mean, standard deviation (n - 1) and two-sided 95 % Student interval of the mean."""
    sample_size = len(values)
    mean = fmean(values)
    if sample_size < 2:
        return Interval(mean, sample_size)
    sd = stdev(values)
    half_width = student(sample_size - 1) * sd / math.sqrt(sample_size)
    return Interval(mean, sample_size, sd, low=mean - half_width, high=mean + half_width)


@cache
def student(freedom: int) -> float:
    """Return t with P(|T| <= t) = 0.95 for a Student variable T with `freedom` degrees of freedom.

    With t = sqrt(freedom) tan(a), the density of a is proportional to cos(a)^(freedom - 1). It is
    summed numerically here.

    >>> [round(student(n), 3) for n in (1, 2, 9, 120)]
    [12.706, 4.303, 2.262, 1.98]
    """
    angles, width = np.linspace(0, math.pi / 2, 20_000, endpoint=False, retstep=True)
    mass = np.cumsum(np.cos(angles + width / 2) ** (freedom - 1))
    angle = np.interp(0.95 * mass[-1], mass, angles + width)
    return math.sqrt(freedom) * math.tan(angle)


def paired(first: Mapping[int, float], other: Mapping[int, float]) -> Interval | None:
    """Return `other` minus `first`, seed by seed. Runs of a seed share start model and games.

    Returns None if they have no seed in common.
    """
    differences = [other[seed] - first[seed] for seed in first if seed in other]
    return interval(differences) if differences else None


def verdict(difference: Interval | None) -> str:
    """Say in words whether a difference in success shows an effect."""
    if difference is None or difference.n < 3 or difference.low is None or difference.high is None:
        # Two differences may be equal by chance, and then have no spread.
        return "not shown (fewer than three seeds)"
    if difference.low > 0:
        return "helps beyond the interval"
    if difference.high < 0:
        return "hurts beyond the interval"
    return "not shown"


def area(curve: Mapping[int, float]) -> float:
    """Return the mean height of the curve through the points, by trapezoids.

    It is a share if the values are shares.
    """
    if len(curve) < 2:
        return fmean(curve.values())
    areas = []
    for first_update, last_update in pairwise(curve):
        mean_height = (curve[first_update] + curve[last_update]) / 2
        areas.append((last_update - first_update) * mean_height)
    return sum(areas) / (max(curve) - min(curve))


def paper_columns(config: Config) -> dict[str, dict[str, float]]:
    """Return the paper's results for the environment and the model, in per cent by title and
    variant.

    If the paper has none for that model, returns those of each environment's smallest model.

    >>> from paw.config.recipe import load
    >>> paper_columns(load("webshop-grpo-14b"))
    {'WebShop, Qwen2.5-14B': {'grpo': 74.7, 'paw': 77.1}}
    """
    name = config.model.path.rpartition("/")[2] + "-"
    models = PAPER.get(config.env.name, {})
    settings = [(config.env.name, model) for model in models if name.startswith(f"{model}-")]
    if not settings:
        settings = [(env, next(iter(models))) for env, models in PAPER.items()]
    return {f"{TITLES[env]}, {model}": PAPER[env][model] for env, model in settings}


def percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}"


def points(share: Interval | None, *, sign: bool = False) -> str | None:
    """Write a share in per cent as "61.3 [55.0, 67.6]", without brackets if it has no interval."""
    if share is None:
        return None
    template = "{:+.1f}" if sign else "{:.1f}"
    mean = template.format(100 * (share.mean or 0))
    if share.low is None:
        return mean
    low = template.format(100 * (share.low or 0))
    high = template.format(100 * (share.high or 0))
    return f"{mean} [{low}, {high}]"


def write_csv(path: Path, records: Sequence[Record]) -> None:
    """Write a CSV with every key of the records as a column, and floats to six digits."""
    columns = dict.fromkeys(key for record in records for key in record)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    for record in records:
        writer.writerow({key: _csv_value(value) for key, value in record.items()})
    write_file(path, text.getvalue())


def _csv_value(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def write(
    out: Path, name: str, *, text: str, records: Sequence[Record], figure: Any, summary: Any = None
) -> None:
    """Write NAME.md, NAME.csv and NAME.png to `out`, and summary.json if given.

    Also prints the text and the files' names.
    """
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / f"{name}.md", text)
        write_csv(out / f"{name}.csv", records)
        write_file(out / f"{name}.png", partial(figure.savefig, dpi=150))
        if summary is not None:
            write_file(out / "summary.json", json.dumps(summary, indent=1, default=asdict))
    print(f"{text}\n{out / name}.md, .csv, .png")
