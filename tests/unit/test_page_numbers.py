"""README.md and docs: each number that was measured is what the files of bench/results say, rounded as it stands there.

A function a page yields pieces of its text, made from the data. Each must be on the page, whatever its line breaks; and
in a section that cites such a file no number with a decimal point or a per cent sign may be left that is in no piece.
"""

import csv
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

import pytest

from paw.tools.experiment.results import PAPER, Interval, interval, paired, points
from paw.tools.profile import memory_gib, overhead, pick

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
    prototype = read("quickstart_prototype")
    for setting in ("GRPO, head size 16", "GRPO + PaW, head size 32"):
        mine = [row for row in prototype if row["setting"] == setting]
        yield "3 seeds: " + ", ".join(
            f"{row['success_before_t04']} -> {row['success_after_t04']}".replace("0.", ".") for row in mine
        )
    warm = {row["setting"]: f"{float(row['success_after_t04']):.2f}"[1:] for row in prototype}
    qwen3, qwen2 = warm["warm-up only, Qwen3"], warm["warm-up only, Qwen2"]
    yield f"Qwen3 {qwen3}, Qwen2 {qwen2}, Llama with biases {warm['warm-up only, Llama with attention biases']}"
    for row in read("quickstart_search"):
        told = [f"{row['success_before']} -> {row['success_after']}" if row["success_after"] else ""]
        told[0] += f" after {row['after_update']}" if row["after_update"] not in ("", "80") else ""
        trained = f"{row['train_first10']} {float(row['train_last10']):.3f}"
        trained += f" after {row['updates']}" if row["updates"] != "80" else ""
        yield f"| {row['seed']} | {told[0]} | {trained} |".replace(" 0.", " .").replace("|  |", "| |")
    single = next(row for row in read("quickstart_search") if "one check" in row["setting"])
    assert round(100 * float(single["train_first10"])) == 13 and round(10 * float(single["mixed_first10"])) == 5
    yield "succeeded in 13 % of episodes with half the groups mixed"


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

    printed, llama = PAPER["alfworld"]["Qwen2.5-1.5B"], PAPER["webshop"]["Llama-3.2-3B"]
    yield f"ALFWorld: {printed['constant']} with a constant lambda of 1, {printed['paw']} with the adaptive one"
    yield f"(ALFWorld {printed['grpo']} -> {printed['paw']} with GRPO on Qwen2.5-1.5B)"
    yield f"Llama 3.2 on WebShop ({llama['grpo']} -> {llama['paw']})"
    growth = read("experiment_grad_norms")
    for group, form in (
        ("ce-clipped-0", "its gradient is {0:.1f} times the policy's in the first ten updates and {1:.1f} times in"),
        ("balanced-0", "where CMAE's is {0:.0%} and {1:.0%}"),
    ):
        yield form.format(*gradient_ratios(growth, group)).replace("%", " %")
    fresh = gradient_ratios(growth, "balanced-0")[0]
    yield f"a fraction of the policy's ({fresh:.0%} in the miniature's".replace("%", " %")

    t04 = read("experiment_t04")
    success = {variant: by_seed(t04, variant, "success") for variant in ("grpo", "paw", "ce")}
    grpo, paw = (per_cent(fmean(success[variant].values())) for variant in ("grpo", "paw"))
    gaps = {variant: points(paired(success["grpo"], success[variant]), sign=True) for variant in ("paw", "ce")}
    yield f"win {grpo} % (GRPO) and {paw} % (PaW) of games: {gaps['paw']}, {len(success['paw'])} seeds"
    yield f"on its first four seeds {gaps['ce']}"
    assert sorted(success["ce"]) == [0, 1, 2, 3]

    def shares(variant: str, key: str) -> float:
        return fmean(float(row[key]) for row in rows if row["variant"] == variant)

    masked = per_cent(shares("paw", "masked_frac"), 0)
    live = {variant: shares(variant, "gradient_frac") for variant in ("paw", "unselected", "ce", "grpo")}
    yield f"{live['paw']:.2f} with CMAE (a mean over the run; {masked} % of observation tokens are masked)"
    yield f"{live['unselected']:.2f} without selection, {live['ce']:.2f} with cross-entropy"
    yield f"{live['grpo']:.3f} of GRPO's response tokens"
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
    found = read(search)
    yield f"paired; {sum(float(row['minutes']) for row in found):.0f} minutes of a core"
    yield f"{per_cent(fmean(by_seed(found, 'paw', 'masked_frac').values()), 0)} % of observation tokens"

    noise = read("noise_gradient", **{"class": "noise"})
    low, high = (per_cent(number(noise, "token_share", loss="ce", stage=stage), 0) for stage in ("start", "trained"))
    yield f"on noise, which is {low} to {high} % of tokens"
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

    sparse = read("experiment_sparse")

    def sparsely(variant: str) -> list[str]:
        keys = ("before", "after", "updates_with_success")
        return [per_cent(fmean(by_seed(sparse, variant, key).values())) for key in keys]

    for variant, label in {
        "grpo": "GRPO",
        "paw": "GRPO + PaW",
        "drop": 'GRPO with `advantage.penalty_only = "drop"`',
    }.items():
        before, after, share = sparsely(variant)
        gap = differences("experiment_sparse", variant)
        told = "" if variant == "grpo" else f"{points(gap, sign=True)} " if gap.mean else "0.0 "
        yield f"| {label} | {before} | {after} | {told}| {share} % |"


def gradient_ratios(rows: Rows, run: str) -> tuple[float, float]:
    """Mean norm of the world model's gradient over the policy's, of the first and of the last ten updates."""
    mine = [row for row in rows if row["run"] == run and row["policy/grad_norm"]]
    policy = [float(row["policy/grad_norm"]) for row in mine]
    world = [float(row["wm/grad_norm"]) / float(row["wm/factor"] or 1) for row in mine]
    return fmean(world[:10]) / fmean(policy[:10]), fmean(world[-10:]) / fmean(policy[-10:])


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
    plays = {
        name: [r for r in read("rollout_schedulers_cpu") if r["scheduler"] == name] for name in ("before", "after")
    }
    times = [[float(row["cpu_s"]) for row in plays[name]] for name in ("before", "after")]
    (a, b), (c, d) = ((min(found), max(found)) for found in times)
    yield f"{a:.1f} to {b:.1f} s of processor time a play before and {c:.1f} to {d:.1f} s after"
    apart = max(abs(int(x["engine_steps"]) / int(y["engine_steps"]) - 1) for x, y in zip(*plays.values(), strict=True))
    yield f"engine steps within {100 * apart:.1f} % of each other"


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
    text = (RESULTS / "rwml_filter.txt").read_text(encoding="utf-8")
    keys = r"on (\d+) triplets; predicted (\d+) .*right ([\d.]+)%.*: ([\d.]+)%.*kept (\d+)"
    tuned, others, right, easy, kept = re.search(keys, text, re.DOTALL).groups()  # type: ignore[union-attr]
    yield f"{int(others):,} triplets predicted 10 times each, right {right} % of the time; {easy} % easy"
    yield f"{int(kept):,} kept"
    assert tuned == "449" and int(tuned) + int(others) == 4493


def memory() -> Iterator[str]:
    yield importlib.import_module("bench.memory").table(read("memory_plan"))


def retriever() -> Iterator[str]:
    rows = read("retriever_cpu")

    def cell(name: str, case: str, batch: str = "0", *, each: bool = False) -> str:
        (row,) = [row for row in rows if (row["retriever"], row["case"], row["batch"]) == (name, case, batch)]
        wall, cpu = (float(row[key]) / (int(row["count"]) if each else 1) for key in ("wall_s", "cpu_s"))
        unit, scale = ("ms", 1000) if wall < 0.1 else ("s", 1)
        took, spent = (f"{scale * value:#.2g}".rstrip(".") for value in (wall, cpu))
        return f"{took} {unit} ({spent} {unit})"

    bm25, dense = cell("bm25", "index"), cell("dense", "index")
    yield f"| index | {bm25.replace(' s)', ' s of a processor)')} | {dense} |"
    opened = [cell(name, "reopen").partition(" (")[0] for name in ("bm25", "dense")]
    yield f"| open again | {opened[0]} | {opened[1]} |"
    for label, batch in (("a query, alone", "1"), ("a query, 64 a call", "64")):
        yield f"| {label} | {' | '.join(cell(name, 'process', batch, each=True) for name in ('bm25', 'dense'))} |"
    rates = [number(rows, "a_second", retriever=name, case="http") for name in ("bm25", "dense")]
    yield f"| queries/s over HTTP, 16 clients | {rates[0]:.0f} | {rates[1]:.0f} |"


def profile() -> Iterator[str]:
    for name, label in (
        ("profile_cpu", "quickstart, {:,} turns"),
        ("profile_cpu_synthetic", "ALFWorld's sizes, random 0.2 M model, {} turns"),
    ):
        rows: list[dict] = [
            {**row, "repeat": int(row["repeat"])}
            | {key: float(row[key]) for key in ("seconds", "cpu_seconds", "tokens", "peak_gib", "mean_gib") if row[key]}
            for row in read(name)
        ]
        for row in rows:
            row.update({key: 0.0 for key in ("tokens", "peak_gib", "mean_gib") if not row[key]})
        base, variant = dict.fromkeys(row["variant"] for row in rows)
        phases = list(dict.fromkeys(row["phase"] for row in rows))

        def added(phases: list[str], key: str, base=base, variant=variant, rows=rows) -> str:
            point, low, high = overhead(*(pick(rows, name, phases, key) for name in (base, variant)))
            return f"{point:+.1f} % [{low:.1f}, {high:.1f}]"

        without = "" if "rollout" in phases else " (no rollout)"
        tokens = [pick(rows, name, ["update"], "tokens")[0] for name in (base, variant)]
        peaks = [memory_gib(rows, name)[0] for name in (base, variant)]
        cells = [label.format(int(rows[0]["turns"])), f"{100 * tokens[1] / tokens[0] - 100:+.1f} %"]
        cells += [added(["update"], "cpu_seconds"), added(phases, "cpu_seconds") + without]
        cells += [added(phases, "seconds") + without, f"{100 * peaks[1] / peaks[0] - 100:+.1f} %"]
        yield f"| {' | '.join(cells)} |"
        if without:
            yield f"at {cells[2].partition(' %')[0][1:]} % of the update"


PAGES = {
    "README.md": readme,
    "docs/environments.md": environments,
    "docs/experiments.md": experiments,
    "docs/memory.md": memory,
    "docs/profile.md": profile,
    "docs/quickstart.md": quickstart,
    "docs/rollout.md": rollout,
    "docs/rwml.md": rwml,
    "docs/search.md": retriever,
}


SETTINGS = [
    *(
        "torch 2.13.0",
        "95 %",
        "T 0.4",
        "temperature of 0.4",
        "paper's 0.4",
        "--eval.temperature 0.4",
        "0.2 M",
        "0.18 M",
        "2.6m",
    ),
    *("invalid_penalty = 0.1", "(to 20 % success)", "-0.1 for an invalid action", "40 % of it reached"),
    *("(2.9 GiB at 14B)", "at most 1.0 % of a step's time and 1.0 % of its peak memory", "with 30 % random actions"),
    *("in 20 % of sampled episodes", "range 0.02 instead of 0.1", "filter's 10 %", "qwen2.5-1.5b", "qwen2.5-7b"),
]
"""What stands in those sections and was not measured there: settings, versions, limits, the paper's numbers."""


def normal(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", PAGES)
def test_each_number_is_what_its_file_says(page):
    text = normal((ROOT / page).read_text(encoding="utf-8"))
    missing = [piece for piece in map(normal, PAGES[page]()) if piece not in text]
    assert not missing, f"{page} does not say:\n" + "\n".join(missing)


@pytest.mark.parametrize("page", PAGES)
def test_no_measured_number_is_left_out(page):
    """Of a section with such numbers: what has a decimal point or a per cent sign and is no setting."""
    text = re.sub(r"```.*?```|^ {4}.*?$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    pieces = list(map(normal, PAGES[page]()))
    sections = map(normal, re.split(r"^#+ ", text, flags=re.MULTILINE))
    cited = [part for part in sections if "bench/results" in part or any(piece in part for piece in pieces)]
    for known in [*pieces, *SETTINGS]:
        cited = [section.replace(known, "") for section in cited]
    left = [found for section in cited for found in re.findall(r".{,30}(?:[0-9]+[.][0-9]+|[0-9]+ ?%).{,20}", section)]
    assert not left, f"{page}: not recomputed from bench/results:\n" + "\n".join(left)
