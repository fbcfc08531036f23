"""What several seeds show, and how it is written: intervals, paired differences, tables, files, the paper's numbers."""

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

from paw.config import Config
from paw.files import write_file, writing

PAPER: dict[str, dict[str, dict[str, float]]] = tomllib.loads(
    Path(__file__).with_name("paper.toml").read_text(encoding="utf-8")
)
"""Success in per cent, of Tables 1 to 4 of arXiv 2606.02388: env.name -> start of the model's name -> variant."""
TITLES = {"alfworld": "ALFWorld", "webshop": "WebShop", "search": "search QA"}
Record = dict[str, Any]
"""A line of a CSV."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % interval; one seed has neither spread nor interval."""

    mean: float
    n: int
    sd: float | None = None
    low: float | None = None
    high: float | None = None


def interval(values: Sequence[float]) -> Interval:
    """Mean, standard deviation (n - 1) and the two-sided 95 % Student interval of the mean."""
    mean, n = fmean(values), len(values)
    if n < 2:
        return Interval(mean, n)
    sd = stdev(values)
    half = student(n - 1) * sd / math.sqrt(n)
    return Interval(mean, n, sd, mean - half, mean + half)


@cache
def student(freedom: int) -> float:
    """t with P(|T| <= t) = 0.95: for t = sqrt(freedom) tan(a) the density of a is cos(a)^(freedom - 1), summed here.

    >>> [round(student(n), 3) for n in (1, 2, 9, 120)]
    [12.706, 4.303, 2.262, 1.98]
    """
    ends, width = np.linspace(0, math.pi / 2, 20_000, endpoint=False, retstep=True)
    mass = np.cumsum(np.cos(ends + width / 2) ** (freedom - 1))
    return math.sqrt(freedom) * math.tan(np.interp(0.95 * mass[-1], mass, ends + width))


def paired(first: Mapping[int, float], other: Mapping[int, float]) -> Interval | None:
    """`other` less `first`, seed by seed: the same start model and the same games. None without a common seed."""
    differences = [other[seed] - first[seed] for seed in first if seed in other]
    return interval(differences) if differences else None


def verdict(difference: Interval | None) -> str:
    """What a difference in success shows, if anything."""
    if difference is None or difference.n < 3 or difference.low is None or difference.high is None:
        return "not shown (fewer than three seeds)"  # two may well differ by the same game
    helps, hurts = difference.low > 0, difference.high < 0
    return "helps beyond the interval" if helps else "hurts beyond the interval" if hurts else "not shown"


def area(curve: Mapping[int, float]) -> float:
    """Mean height of the curve through the points (trapezoids): a share if the values are."""
    if len(curve) < 2:
        return fmean(curve.values())
    parts = [(b - a) * (curve[a] + curve[b]) / 2 for a, b in pairwise(curve)]
    return sum(parts) / (max(curve) - min(curve))


def paper_columns(config: Config) -> dict[str, dict[str, float]]:
    """Title -> variant -> success: of the configuration's environment and model, or the smallest of each environment.

    >>> from paw.recipe import load
    >>> paper_columns(load("webshop-grpo-14b"))
    {'WebShop, Qwen2.5-14B': {'grpo': 74.7, 'paw': 77.1}}
    """
    name = config.model.path.rpartition("/")[2] + "-"
    models = PAPER.get(config.env.name, {})
    chosen = [(config.env.name, model) for model in models if name.startswith(f"{model}-")]
    chosen = chosen or [(env, next(iter(models))) for env, models in PAPER.items()]
    return {f"{TITLES[env]}, {model}": PAPER[env][model] for env, model in chosen}


def percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}"


def points(shown: Interval | None, *, sign: bool = False) -> str | None:
    """A share as "61.3 [55.0, 67.6]", without brackets where there is no interval."""
    if shown is None:
        return None
    form = "{:+.1f}" if sign else "{:.1f}"
    mean, low, high = (form.format(100 * (value or 0)) for value in (shown.mean, shown.low, shown.high))
    return mean if shown.low is None else f"{mean} [{low}, {high}]"


def write_csv(path: Path, records: Sequence[Record]) -> None:
    columns = dict.fromkeys(key for record in records for key in record)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()} for r in records)
    write_file(path, text.getvalue())


def write(out: Path, name: str, *, text: str, records: Sequence[Record], figure: Any, summary: Any = None) -> None:
    """NAME.md, NAME.csv and NAME.png, summary.json where there is one; prints the text and the names."""
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / f"{name}.md", text)
        write_csv(out / f"{name}.csv", records)
        write_file(out / f"{name}.png", partial(figure.savefig, dpi=150))
        if summary is not None:
            write_file(out / "summary.json", json.dumps(summary, indent=1, default=asdict))
    print(f"{text}\n{out / name}.md, .csv, .png")
