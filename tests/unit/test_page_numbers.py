"""README.md and docs: the tables and the headline numbers that were measured are what the files of bench/results say.

A function a page yields pieces of its text, made from the data. Each must be on the page, whatever its line breaks.
"""

import csv
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

import pytest

from paw.tools.experiment.results import Interval, interval, paired, points

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT))
Rows = list[dict[str, str]]
ABOUT = ("minutes", "device", "head")
MODES = ("lock-step", "continuous")


def read(name: str, **where: str) -> Rows:
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in where.items())]


def number(rows: Rows, key: str, **where: str) -> float:
    (row,) = [row for row in rows if all(row[name] == value for name, value in where.items())]
    return float(row[key])


def exact(rows: Rows, key: str = "success", games: str = "games") -> Rows:
    """The rows with shares as the fractions of games that they are, which the file has rounded to four places."""
    return [row | {key: repr(round(float(row[key]) * float(row[games])) / float(row[games]))} for row in rows]


def per_cent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}"


def by_seed(rows: Rows, variant: str, key: str) -> dict[int, float]:
    return {int(row["seed"]): float(row[key]) for row in rows if row["variant"] == variant and row[key]}


def differences(name: str, variant: str, key: str = "after", base: str = "grpo") -> Interval:
    rows = read(name)
    found = paired(by_seed(rows, base, key), by_seed(rows, variant, key))
    assert found
    return found


def less(name: str, variant: str, key: str = "after") -> str:
    return points(differences(name, variant, key), sign=True) or ""


def mean(name: str, variant: str, key: str) -> str:
    return points(interval(list(by_seed(read(name), variant, key).values()))) or ""


def readme() -> Iterator[str]:
    curves, cooler = exact(read("quickstart")), exact(read("quickstart_t04"))
    gains = []
    for seed in "0123":
        first, last = (number(curves, "success", seed=seed, update=update) for update in ("0", "240"))
        before, after = (number(cooler, "success", seed=seed, when=when) for when in ("before", "after"))
        minutes, device, head = ({row[key] for row in curves if row["seed"] == seed} for key in ABOUT)
        threads = {"2 threads": "two threads", "1 threads": "one thread"}[device.pop()[-10:-1]]
        assert head == {"torch"}
        yield (
            f"| {seed} | {per_cent(first)} -> {per_cent(last)} % | {per_cent(before)} -> {per_cent(after)} % | "
            f"{minutes.pop()} ({threads}) |"
        )
        gains.append(after - before)
    yield f"gains less: {per_cent(min(gains), 0)} to {per_cent(max(gains), 0)} points"
    two = [float(row["minutes"]) for row in curves if "2 threads" in row["device"]]
    assert min(two) >= 7 and max(two) <= 8  # "seven to eight minutes"
    games, questions = (less(f"experiment_{name}", "paw") for name in ("compare", "search"))
    yield f"gives {games} points, and {questions} on search questions"
    over = [row for row in read("rollout_cpu") if row["envs"] == "16" and row["env_ms"] == "0.0"]
    for model in {row["model"] for row in over}:  # "half the engine steps, 1.4 times the speed"
        for key, times in (("engine_steps", 2.0), ("wall_s", 1.4)):
            lock, free = ([number(over, key, model=model, mode=mode, repeat=r) for r in "01234"] for mode in MODES)
            assert median(a / b for a, b in zip(lock, free, strict=True)) == pytest.approx(times, abs=0.05)


def quickstart() -> Iterator[str]:
    curves, cooler = exact(read("quickstart")), exact(read("quickstart_t04"))
    gains, ends = [], []
    for seed in "0123":
        mine = [f"{float(row['success']):.3f}" for row in curves if row["seed"] == seed]
        yield f"| {seed} | {' | '.join(mine)} |"
        before, after = (number(cooler, "success", seed=seed, when=when) for when in ("before", "after"))
        gains.append(per_cent(after - before, 0))
        ends.append(f"{before:.3f} -> {after:.3f}".replace("0.", "."))
    yield f"the same games give {', '.join(ends[:3])} and {ends[3]}"
    yield f"a gain of {', '.join(gains[:3])} and {gains[3]} points"
    yield f"is .20 | 0-3 | {', '.join(ends)} (240)"
    for row in read("quickstart_search"):
        told = [f"{row['success_before']} -> {row['success_after']}" if row["success_after"] else ""]
        told[0] += f" after {row['after_update']}" if row["after_update"] not in ("", "80") else ""
        trained = f"{row['train_first10']} {float(row['train_last10']):.3f}"
        trained += f" after {row['updates']}" if row["updates"] != "80" else ""
        yield f"| {row['seed']} | {told[0]} | {trained} |".replace(" 0.", " .").replace("|  |", "| |")


def experiments() -> Iterator[str]:
    name = "experiment_compare"
    rows = read(name)
    seeds = {variant: len(by_seed(rows, variant, "after")) for variant in {row["variant"] for row in rows}}
    labels = {"paw": "GRPO + PaW", "ce": "PaW with cross-entropy", "constant": "PaW, constant lambda 1"}
    labels |= {"unselected": "PaW without selection (alpha 1)"}
    yield f"| GRPO | {seeds['grpo']} | {mean(name, 'grpo', 'after')} | | | |"
    for variant, label in labels.items():
        difference = differences(name, variant)
        said = "hurts" if (difference.high or 0) < 0 else "not shown"
        cells = [
            label,
            seeds[variant],
            mean(name, variant, "after"),
            less(name, variant),
            less(name, variant, "area"),
            said,
        ]
        yield f"| {' | '.join(map(str, cells))} |"
    table = [row for row in rows if row["variant"] in ("grpo", *labels)]
    assert len(table) == 35
    yield f"All start at {per_cent(fmean(float(row['before']) for row in table), 0)} %"
    yield f"took {sum(float(row['minutes']) for row in table):.0f} minutes of a core"

    t04 = read("experiment_t04")
    success = {variant: by_seed(t04, variant, "success") for variant in ("grpo", "paw", "ce")}
    grpo, paw = (per_cent(fmean(success[variant].values())) for variant in ("grpo", "paw"))
    gaps = {variant: points(paired(success["grpo"], success[variant]), sign=True) for variant in ("paw", "ce")}
    yield f"win {grpo} % (GRPO) and {paw} % (PaW) of games: {gaps['paw']}, {len(success['paw'])} seeds"
    yield f"on its first four seeds {gaps['ce']}"
    assert sorted(success["ce"]) == [0, 1, 2, 3]

    def shares(variant: str, key: str) -> float:
        return fmean(float(row[key]) for row in rows if row["variant"] == variant)

    for variant, label in {
        "mae": "MAE without the mask",
        "gce": "generalised cross-entropy, q 0.7",
        "scaled": "CMAE ten times as large (`wm.scale = 10`)",
        "balanced": "its gradient held at 0.3 of the policy's (`wm.balance`)",
        "clipped": 'both gradients clipped apart (`optim.clip = "separate"`)',
        "ce-clipped": "the same with cross-entropy",
        "horizon": "two further turns predicted (`wm.horizon = 2`)",
    }.items():
        yield f"| {label} | {seeds[variant]} | {less(name, variant)} | {shares(variant, 'gradient_frac'):.2f} |"

    search = "experiment_search"
    yield f"| GRPO | {mean(search, 'grpo', 'before')} | {mean(search, 'grpo', 'after')} | |"
    both = [mean(search, "paw", key) for key in ("before", "after")]
    yield f"| GRPO + PaW | {both[0]} | {both[1]} | {less(search, 'paw')} |"
    noise = read("noise_gradient", **{"class": "noise"})
    for loss, label in {
        "ce": "cross-entropy",
        "gce": "generalised cross-entropy, q 0.7",
        "mae": "MAE, before the mask",
        "cmae": "CMAE, after it",
    }.items():
        cells = [
            " -> ".join(per_cent(number(noise, key, loss=loss, stage=stage)) for stage in ("start", "trained"))
            for key in ("by_logp", "by_logits")
        ]
        yield f"| {label} | {cells[0]} | {cells[1]} |"


def environments() -> Iterator[str]:
    search, shop = read("experiment_search", variant="paw"), read("experiment_webshop")
    before, after, minutes = (fmean(float(row[key]) for row in search) for key in ("before", "after", "minutes"))
    assert len(search) == 10 and 0.5 <= minutes <= 1
    yield f"{per_cent(before)} to {per_cent(after)} % of 256 questions"
    (run,) = shop
    assert run["games"] == "256" and run["seed"] == "0"
    yield f"{per_cent(float(run['before']))} to {per_cent(float(run['after']))} % of 256 purchases"
    yield f"in {float(run['minutes']):.0f} (one seed"


def rollout() -> Iterator[str]:
    module = importlib.import_module("bench.rollout_plot")
    yield module.markdown(RESULTS / "rollout_cpu.csv")
    rows = read("rollout_cpu")
    hits = [float(row["cached_frac"]) for row in rows]
    yield f"prompt tokens ({per_cent(min(hits), 0)} to {per_cent(max(hits), 0)} %)"
    assert {row["logp_difference"] for row in rows} == {"0.0"}


def rwml() -> Iterator[str]:
    found = read("rwml_quickstart")
    for kind in ("next_state", "task"):
        found = exact(found, f"{kind}_success", f"{kind}_games")
    rows = {row["model"]: row for row in found}
    for model, label in {
        "warm-up": "warm-up: plays, was never asked for next states",
        "start": "start: fine-tuned on 449 triplets",
        "rwml": "RWML: 60 updates of 16 x 8 from start, a third of an epoch of the filtered triplets",
        "wm-sft": "WM-SFT: all 4,493 training triplets, twice",
    }.items():
        row, cells = rows[model], []
        for kind in ("next_state", "task"):
            share, low, high = (float(row[f"{kind}_{key}"]) for key in ("success", "ci_low", "ci_high"))
            cells.append(f"{per_cent(share)} ({per_cent(low)} to {per_cent(high)})" if share else "0.0")
        yield f"| {label} | {cells[0]} | {cells[1]} |"
    gain = float(rows["rwml"]["next_state_success"]) - float(rows["start"]["next_state_success"])
    yield f"over its start by {per_cent(gain)} points"


def memory() -> Iterator[str]:
    yield importlib.import_module("bench.memory").table(read("memory_plan"))


PAGES = {
    "README.md": readme,
    "docs/environments.md": environments,
    "docs/experiments.md": experiments,
    "docs/memory.md": memory,
    "docs/quickstart.md": quickstart,
    "docs/rollout.md": rollout,
    "docs/rwml.md": rwml,
}


def normal(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", PAGES)
def test_each_number_is_what_its_file_says(page):
    text = normal((ROOT / page).read_text(encoding="utf-8"))
    missing = [piece for piece in map(normal, PAGES[page]()) if piece not in text]
    assert not missing, f"{page} does not say:\n" + "\n".join(missing)
