"""README.md and docs: each number that was measured is what the files of bench/results say, rounded as it stands there.

A function a page yields pieces of its text, made from the data. Each must be on the page, whatever
its line breaks; and in a section that cites such a file no number with a decimal point or a per
cent sign may be left that is in no piece.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from paw.tools.experiment.results import PAPER, Interval, interval, paired, points
from paw.tools.profile import memory_gib, overhead, pick

ROOT = Path(__file__).parents[2]
common = importlib.import_module("bench.common")
Rows = list[dict[str, Any]]
MODES = ("lock-step", "continuous")
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def read(name: str, **where: str) -> Rows:
    """The lines of a file in which these columns have these values; numbers as float, empty cells as None."""
    lines = common.read(common.RESULTS / f"{name}.csv")
    return [
        {key: typed(value) for key, value in row.items()}
        for row in lines
        if where.items() <= row.items()
    ]


def typed(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text or None


def exact(rows: Rows, key: str = "success", games: str = "games") -> Rows:
    """The rows with shares as the fractions of games that they are, which the file has rounded to four places."""
    return [row | {key: round(row[key] * row[games]) / row[games]} for row in rows]


def one(rows: Rows, key: str, **where: Any) -> Any:
    (found,) = [row[key] for row in rows if where.items() <= row.items()]
    return found


def per_cent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}"


def short(value: float) -> str:
    """0.25 as .250"""
    return f"{value:.3f}".removeprefix("0")


def by_seed(rows: Rows, variant: str, key: str) -> dict[float, float]:
    return {
        row["seed"]: row[key] for row in rows if row["variant"] == variant and row[key] is not None
    }


def differences(name: str, variant: str, key: str = "after") -> Interval:
    rows = read(name)
    found = paired(by_seed(rows, "grpo", key), by_seed(rows, variant, key))  # type: ignore[arg-type]
    assert found
    return found


def less(name: str, variant: str, key: str = "after") -> str:
    return points(differences(name, variant, key), sign=True) or ""


def mean(name: str, variant: str, key: str) -> str:
    return points(interval(list(by_seed(read(name), variant, key).values()))) or ""


def cooler(name: str) -> list[tuple[float, float]]:
    """Success of a quickstart's seeds at temperature 0.4, before and after training."""
    rows = exact(read(f"{name}_t04"))
    return [(one(rows, "success", seed=seed, when="before"), one(rows, "success", seed=seed, when="after"))
            for seed in sorted({row["seed"] for row in rows})]  # fmt: skip


def trl_steps(
    dtype: str = "float32", style: str = "turns"
) -> tuple[str, dict[str, dict[str, float]]]:
    """The table of one optimizer step against TRL's, and its medians."""
    versus = importlib.import_module("bench.trainer.against_trl")
    rows = common.read(common.RESULTS / "trainer_vs_trl_cpu.csv")
    rows = [row for row in rows if (row["dtype"], row["style"]) == (dtype, style)]
    return versus.table(rows), versus.medians(rows)


def against_trl(found: dict[str, dict[str, float]], base: str = "GRPO") -> tuple[float, float]:
    """How many times as fast as TRL, and at what share of its memory."""
    trl = found["TRL"]
    return trl[f"seconds / {base}"], 1 / trl[f"peak_gib / {base}"]


def readme() -> Iterator[str]:
    curves, long = exact(read("quickstart")), exact(read("quickstart_long"))
    for seed, (before, after) in enumerate(cooler("quickstart")):
        first, last = (one(curves, "success", seed=seed, update=update) for update in (0, 100))
        yield f"| {seed} | {per_cent(first)} -> {per_cent(last)} % | {per_cent(before)} -> {per_cent(after)} % |"
    assert {row["head"] for row in curves} == {"cpu"}
    gains = [after - before for before, after in cooler("quickstart")]
    yield f"and gains {per_cent(min(gains), 0)} to {per_cent(max(gains), 0)} points"
    reached = [row["success"] for row in long if row["update"] == 240]
    yield f"reaches {per_cent(min(reached))} to {per_cent(max(reached))} %"
    (alone,) = read("quickstart_alone")
    yield f"it took {alone['minutes']:.1f} minutes"
    yield f"{alone['warm-up']:.1f} of them for the warm-up"
    games, questions = (less(f"experiment_{name}", "paw") for name in ("compare", "search"))
    yield f"gives {games} points, and {questions} on search questions"
    ratios = {}
    for dtype in ("bfloat16", "float32"):
        medians = trl_steps(dtype)[1]
        for side in ("TRL, completions only", "TRL"):
            ratios[dtype, side] = [
                medians[side][f"{key} / GRPO"] for key in ("seconds", "peak_gib")
            ]
    time, memory = ratios["bfloat16", "TRL, completions only"]
    yield f"TRL needs {time:.2f} times the time and {memory:.2f} times the memory of PaW in bfloat16"
    time, memory = ratios["float32", "TRL, completions only"]
    yield f"and {time:.2f} and {memory:.2f} times in float32"
    numbers = (*ratios["bfloat16", "TRL"], *ratios["float32", "TRL"])
    yield "it is {:.2f} and {:.2f} times in bfloat16, {:.2f} and {:.2f} in float32".format(*numbers)
    rows, tokens, time = profiled("profile_cpu")
    yield f"GRPO + PaW trains on {tokens} tokens in an update, and a step, its rollout included, takes {time} of GRPO's"
    about = [rows[0][key] for key in ("turns", "device", "torch", "paw")]
    yield (
        "({:,.0f} turns; {}, torch {}, PaW {}, ".format(*about) + f"{rows[-1]['repeat']} repeats; "
    )
    _, tokens, time = profiled("profile_cpu_synthetic")
    yield f"At ALFWorld's sizes it is {tokens} tokens and, without the rollout, {time} of the time"
    over = read("rollout_cpu", envs="16", env_ms="0.0")
    for model in {row["model"] for row in over}:
        steps, wall = ([[one(over, key, model=model, mode=mode, repeat=r) for r in range(5)] for mode in MODES]
                       for key in ("engine_steps", "wall_s"))  # fmt: skip
        fewer, faster = (
            median(a / b for a, b in zip(*pair, strict=True)) for pair in (steps, wall)
        )
        assert fewer == pytest.approx(2.0, abs=0.05)
        yield f"half the engine steps, {faster:.1f} times the speed"


def quickstart() -> Iterator[str]:
    for name in ("quickstart", "quickstart_long"):
        curves = exact(read(name))
        for seed in sorted({row["seed"] for row in curves}):
            mine = " | ".join(f"{row['success']:.3f}" for row in curves if row["seed"] == seed)
            yield f"| {seed:.0f} | {mine} |"
        gains = [per_cent(after - before, 0) for before, after in cooler(name)]
        ends = [f"{short(before)} -> {short(after)}" for before, after in cooler(name)]
        yield f"the same games give {', '.join(ends[:-1])} and {ends[-1]}"
        yield f"a gain of {', '.join(gains[:-1])} and {gains[-1]} points"
        if name == "quickstart":
            (alone,) = read("quickstart_alone")
            yield f"took {alone['minutes']:.1f} minutes alone on two cores"
            yield f"of which {alone['warm-up']:.1f}"
            pairs = [[row["success"] for row in curves if row["seed"] == seed and row["update"] in (0, 100)]
                      for seed in sorted({row["seed"] for row in curves})]  # fmt: skip
            yield f"a gain of {per_cent(fmean(after - before for before, after in pairs))} points in the mean"
        else:
            yield f"is .20 | 0-3 | {', '.join(ends)} (240)"
    ends = [
        (row["setting"], row["success_before_t04"], row["success_after_t04"])
        for row in read("quickstart_prototype")
    ]
    warm = {name.removeprefix("warm-up only, "): f"{after:.2f}"[1:] for name, _, after in ends}
    for setting in ("GRPO, head size 16", "GRPO + PaW, head size 32"):
        yield "3 seeds: " + ", ".join(
            f"{short(a)} -> {short(b)}" for name, a, b in ends if name == setting
        )
    yield f"Qwen3 {warm['Qwen3']}, Qwen2 {warm['Qwen2']}, Llama with biases {warm['Llama with attention biases']}"
    for row in read("quickstart_search"):
        told = (
            f"{short(row['success_before'])} -> {short(row['success_after'])}"
            if row["success_after"]
            else ""
        )
        told += f" after {row['after_update']:.0f}" if row["after_update"] not in (None, 80) else ""
        trained = f"{short(row['train_first10'])} {short(row['train_last10'])}"
        trained += f" after {row['updates']:.0f}" if row["updates"] != 80 else ""
        yield f"| {row['seed']:.0f} | {told} | {trained} |".replace("|  |", "| |")
    (single,) = [row for row in read("quickstart_search") if "one check" in row["setting"]]
    assert round(10 * single["mixed_first10"]) == 5
    yield f"succeeded in {per_cent(single['train_first10'], 0)} % of episodes with half the groups mixed"


def experiments() -> Iterator[str]:
    name = "experiment_compare"
    rows = read(name)
    seeds = {
        variant: len(by_seed(rows, variant, "after"))
        for variant in {row["variant"] for row in rows}
    }
    labels = {
        "paw": "GRPO + PaW",
        "ce": "PaW with cross-entropy",
        "constant": "PaW, constant lambda 1",
    }
    labels |= {"unselected": "PaW without selection (alpha 1)"}
    yield f"| GRPO | {seeds['grpo']} | {mean(name, 'grpo', 'after')} | | | |"
    for variant, label in labels.items():
        difference = differences(name, variant)
        cells = [
            label,
            seeds[variant],
            mean(name, variant, "after"),
            less(name, variant),
            less(name, variant, "area"),
        ]
        yield f"| {' | '.join(map(str, cells))} | {'hurts' if (difference.high or 0) < 0 else 'not shown'} |"
    table = [row for row in rows if row["variant"] in ("grpo", *labels)]
    yield f"All start at {per_cent(fmean(row['before'] for row in table), 0)} %"
    took = sum(row["minutes"] for row in table)
    yield f"The {len(table)} runs and {WORDS[seeds['grpo']]} warm-ups took {took:.0f} minutes of a core"

    printed, llama = PAPER["alfworld"]["Qwen2.5-1.5B"], PAPER["webshop"]["Llama-3.2-3B"]
    yield f"ALFWorld: {printed['constant']} with a constant lambda of 1, {printed['paw']} with the adaptive one"
    yield f"(ALFWorld {printed['grpo']} -> {printed['paw']} with GRPO on Qwen2.5-1.5B)"
    yield f"Llama 3.2 on WebShop ({llama['grpo']} -> {llama['paw']})"
    (early, late), (fresh, settled) = (
        gradient_ratios(run) for run in ("ce-clipped-0", "balanced-0")
    )
    yield f"its gradient is {early:.1f} times the policy's in the first ten updates and {late:.1f} times in the last"
    yield f"where CMAE's is {per_cent(fresh, 0)} % and {per_cent(settled, 0)} %"
    yield f"a fraction of the policy's ({per_cent(fresh, 0)} % in the miniature's"

    t04 = read("experiment_t04")
    success = {variant: by_seed(t04, variant, "success") for variant in ("grpo", "paw", "ce")}
    grpo, paw = (per_cent(fmean(success[variant].values())) for variant in ("grpo", "paw"))
    gap, few = (less("experiment_t04", variant, "success") for variant in ("paw", "ce"))
    yield f"win {grpo} % (GRPO) and {paw} % (PaW) of games: {gap}, {len(success['paw'])} seeds"
    yield f"on its first four seeds {few}"
    assert sorted(success["ce"]) == [0, 1, 2, 3]

    def shares(variant: str, key: str = "gradient_frac") -> float:
        return fmean(by_seed(rows, variant, key).values())

    masked = per_cent(shares("paw", "masked_frac"), 0)
    yield f"{shares('paw'):.2f} with CMAE (a mean over the run; {masked} % of observation tokens are masked)"
    yield f"{shares('unselected'):.2f} without selection, {shares('ce'):.2f} with cross-entropy"
    yield f"{shares('grpo'):.3f} of GRPO's response tokens"
    for variant, label in {
        "mae": "MAE without the mask",
        "gce": "generalised cross-entropy, q 0.7",
        "scaled": "CMAE ten times as large (`wm.scale = 10`)",
        "balanced": "its gradient held at 0.3 of the policy's (`wm.balance`)",
        "clipped": 'both gradients clipped apart (`optim.clip = "separate"`)',
        "ce-clipped": "the same with cross-entropy",
        "horizon": "two further turns predicted (`wm.horizon = 2`)",
    }.items():
        yield f"| {label} | {seeds[variant]} | {less(name, variant)} | {shares(variant):.2f} |"

    search = "experiment_search"
    yield from against_grpo(search, {"paw": "GRPO + PaW"})
    found = read(search)
    yield f"paired; {sum(row['minutes'] for row in found):.0f} minutes of a core"
    yield f"{per_cent(fmean(by_seed(found, 'paw', 'masked_frac').values()), 0)} % of observation tokens"

    stages = [
        read("noise_gradient", **{"class": "noise", "stage": stage})
        for stage in ("start", "trained")
    ]
    yield f"on noise, which is {' to '.join(per_cent(lines[0]['token_share'], 0) for lines in stages)} % of tokens"
    for loss, label in {
        "ce": "cross-entropy",
        "gce": "generalised cross-entropy, q 0.7",
        "mae": "MAE, before the mask",
        "cmae": "CMAE, after it",
    }.items():
        cells = [
            [per_cent(one(lines, key, loss=loss)) for lines in stages]
            for key in ("by_logp", "by_logits")
        ]
        yield f"| {label} | {' | '.join(map(' -> '.join, cells))} |"

    sparse = read("experiment_sparse")
    for variant, label in {
        "grpo": "GRPO",
        "paw": "GRPO + PaW",
        "drop": 'GRPO with `advantage.penalty_only = "drop"`',
    }.items():
        keys = ("before", "after", "updates_with_success")
        before, after, share = (
            per_cent(fmean(by_seed(sparse, variant, key).values())) for key in keys
        )
        gap = differences("experiment_sparse", variant)
        told = "" if variant == "grpo" else f"{points(gap, sign=True)} " if gap.mean else "0.0 "
        yield f"| {label} | {before} | {after} | {told}| {share} % |"
    yield from pretrained()
    labels = {"paw": "GRPO + PaW", "predict": "prediction as a reward"}
    labels |= {f"echo-{weight}": f"ECHO, weight {weight}" for weight in ("0.05", "0.1", "0.3")}
    labels["actions-only"] = "no observation loss in the warm-up, GRPO"
    yield from against_grpo("experiment_replications", labels)
    name = "experiment_replications_miniature"
    yield from against_grpo(name, {key: labels[key] for key in ("predict", "actions-only")})
    yield f"area under the evaluation curve it is {less(name, 'actions-only', 'area')} points"


def against_grpo(name: str, labels: dict[str, str]) -> Iterator[str]:
    """The lines of a table of ten seeds: before, after, less GRPO."""
    yield f"| GRPO | {mean(name, 'grpo', 'before')} | {mean(name, 'grpo', 'after')} | |"
    for variant, label in labels.items():
        assert len(by_seed(read(name), variant, "after")) == 10
        yield f"| {label} | {mean(name, variant, 'before')} | {mean(name, variant, 'after')} | {less(name, variant)} |"


def pretrained() -> Iterator[str]:
    rows = read("smollm2")
    found = {(row["stage"], row["measure"]): row for row in rows}
    stages = ("start", "fine-tuned")

    def cell(row: dict[str, Any], form: Any) -> str:
        return f"{form(row['value'])} [{form(row['low'])}, {form(row['high'])}]"

    def share(value: float) -> str:
        return per_cent(value, 0)

    for measure, label in {
        "masked": "observation tokens masked (p > rho), %",
        "live": "tokens with a gradient, f, %",
        "selected by both": "of the selected half, also selected by sampled entropy, %",
        "ce gradient on noise by log p": "gradient on noise by dL / dlog p, %: cross-entropy",
        "mae gradient on noise by log p": "MAE, before the mask",
        "cmae gradient on noise by log p": "CMAE, after it",
        "ce/cmae by head": "norm of the head's gradient: cross-entropy over CMAE",
        "ce/policy by head": "cross-entropy over the policy's",
        "cmae/policy by head": "CMAE over the policy's",
    }.items():
        form = (lambda value: f"{value:.2g}") if " by head" in measure else share
        yield f"| {label} | {' | '.join(cell(found[stage, measure], form) for stage in stages)} |"
    valid, won = (found["fine-tuned", name] for name in ("valid actions", "episodes won"))
    noise = found["start", "tokens on noise"]
    yield f"{share(valid['value'])} % of the actions that it then samples are valid"
    yield f"{round(won['value'] * won['units'])} of its {won['units']:.0f} episodes"
    yield f"{noise['observation_tokens']:,.0f} observation tokens, {share(noise['value'])} % of them noise"


def gradient_ratios(run: str) -> tuple[float, float]:
    """Mean norm of the world model's gradient over the policy's, of the first and of the last ten updates."""
    mine = [row for row in read("experiment_grad_norms", run=run) if row["policy/grad_norm"]]
    policy = [row["policy/grad_norm"] for row in mine]
    world = [row["wm/grad_norm"] / (row["wm/factor"] or 1) for row in mine]
    return fmean(world[:10]) / fmean(policy[:10]), fmean(world[-10:]) / fmean(policy[-10:])


def environments() -> Iterator[str]:
    search, (shop,) = read("experiment_search", variant="paw"), read("experiment_webshop")
    before, after = (per_cent(fmean(row[key] for row in search)) for key in ("before", "after"))
    yield f"{before} to {after} % of {search[0]['games']:.0f} questions"
    # "in a minute", "ten seeds".
    assert len(search) == 10 and 0.5 <= fmean(row["minutes"] for row in search) <= 1
    yield f"{per_cent(shop['before'])} to {per_cent(shop['after'])} % of {shop['games']:.0f} purchases"
    yield f"in {shop['minutes']:.0f} (one seed"
    assert shop["seed"] == 0 and shop["games"] == search[0]["games"] == 256


def rollout() -> Iterator[str]:
    of = {"turns": "a turn", "episodes": "an episode"}
    for name, told in (("search", "of both passes on search"), ("tau2", "on tau2's stand-in")):
        rows = read("conversations", environment=name)
        paper, merged, alone = (row["scoring"] + row["update"] for row in rows)
        for row in rows:
            counts = f"{row['episodes']:.0f}, {row['turns']:.0f} | {row['scoring']:,.0f} | {row['update']:,.0f} |"
            label = "the paper's prompts" if row["style"] == "paper" else "a conversation"
            yield f"| {name} | {label}, a row {of[row['rows']]} | {counts}"
        assert merged < paper < alone
        yield f"{per_cent(1 - merged / paper, 0)} % {told}"
        yield f"{alone / merged:.1f} times the tokens on {name}"
    for name in ("search", "tau2"):
        turns, episodes = (
            [row["cpu_s"] for row in read("conversations_time_cpu", environment=name, rows=rows)]
            for rows in of
        )
        yield f"{median(a / b for a, b in zip(turns, episodes, strict=True)):.1f} times the processor seconds on {name}"
    for row in read("shared_prefix_cpu"):
        fewer = f"{row['packed_tokens'] / row['trie_tokens']:.2f}"
        faster = f"{row['faster']:.2f}" if row["faster"] else ""
        yield f"| {row['style']} | {row['members']:.0f} | {row['same']:.1f} | {fewer} | {faster} |".replace(
            "|  |", "| |"
        )
    yield importlib.import_module("bench.rollout.plot").markdown(common.RESULTS / "rollout_cpu.csv")
    hits = [row["cached_frac"] for row in read("rollout_cpu")]
    yield f"prompt tokens ({per_cent(min(hits), 0)} to {per_cent(max(hits), 0)} %)"
    assert {row["logp_difference"] for row in read("rollout_cpu")} == {0.0}
    before, after = (read("rollout_schedulers_cpu", scheduler=name) for name in ("before", "after"))
    times = [f"{min(row['cpu_s'] for row in rows):.1f} to {max(row['cpu_s'] for row in rows):.1f} s"
             for rows in (before, after)]  # fmt: skip
    yield f"{times[0]} of processor time a play before and {times[1]} after"
    apart = max(
        abs(x["engine_steps"] / y["engine_steps"] - 1) for x, y in zip(before, after, strict=True)
    )
    yield f"engine steps within {per_cent(apart)} % of each other"


def rwml() -> Iterator[str]:
    rows = read("rwml_quickstart")
    for kind in ("next_state", "task"):
        rows = exact(rows, f"{kind}_success", f"{kind}_games")
    for model, label in {
        "warm-up": "warm-up: plays, was never asked for next states",
        "start": "start: fine-tuned on 449 triplets",
        "rwml": "RWML: 60 updates of 16 x 8 from start, a third of an epoch of the filtered triplets",
        "wm-sft": "WM-SFT: all 4,493 training triplets, twice",
    }.items():
        cells = []
        for kind in ("next_state", "task"):
            share, low, high = (
                per_cent(one(rows, f"{kind}_{key}", model=model))
                for key in ("success", "ci_low", "ci_high")
            )
            cells.append(share if share == "0.0" else f"{share} ({low} to {high})")
        yield f"| {label} | {cells[0]} | {cells[1]} |"
    gain = one(rows, "next_state_success", model="rwml") - one(
        rows, "next_state_success", model="start"
    )
    yield f"over its start by {per_cent(gain)} points"
    text = (common.RESULTS / "rwml_filter.txt").read_text(encoding="utf-8")
    keys = r"on (\d+) triplets; predicted (\d+) .*right ([\d.]+)%.*: ([\d.]+)%.*kept (\d+)"
    tuned, others, right, easy, kept = re.search(keys, text, re.DOTALL).groups()  # type: ignore[union-attr]
    yield f"{int(others):,} triplets predicted 10 times each, right {right} % of the time; {easy} % easy"
    yield f"{int(kept):,} kept"
    assert tuned == "449" and int(tuned) + int(others) == 4493


def memory() -> Iterator[str]:
    yield importlib.import_module("bench.trainer.memory").table(
        common.read(common.RESULTS / "memory_plan.csv")
    )


def reliability() -> Iterator[str]:
    rows = read("checkpoints_cpu")
    yield f"a model of {rows[0]['parameters'] / 1e6:.0f} million parameters ({rows[0]['gib']:.1f} GiB on the disk)"
    waits = {
        way: median(row["waits_s"] for row in rows if row["way"] == way)
        for way in {row["way"] for row in rows}
    }
    yield f"waits {waits['gathered']:.1f} s for a checkpoint that rank 0 gathers and writes"
    yield f"{waits['shards']:.1f} s where each rank writes its own; {waits['background']:.1f} s where that is done"


def retriever() -> Iterator[str]:
    def cells(case: str, batch: str = "0") -> list[tuple[str, str]]:
        """(Seconds by the clock, of a processor) of BM25 and dense retrieval; of one query where there is a batch."""
        found = []
        for name in ("bm25", "dense"):
            (row,) = read("retriever_cpu", retriever=name, case=case, batch=batch)
            wall, cpu = (
                row[key] / (row["count"] if batch != "0" else 1) for key in ("wall_s", "cpu_s")
            )
            unit, scale = ("ms", 1000) if wall < 0.1 else ("s", 1)
            found.append(
                tuple(f"{scale * value:#.2g}".rstrip(".") + f" {unit}" for value in (wall, cpu))
            )
        return found

    bm25, dense = cells("index")
    yield f"| index | {bm25[0]} ({bm25[1]} of a processor) | {dense[0]} ({dense[1]}) |"
    yield f"| open again | {' | '.join(wall for wall, _ in cells('reopen'))} |"
    for label, batch in (("a query, alone", "1"), ("a query, 64 a call", "64")):
        yield f"| {label} | {' | '.join(f'{wall} ({cpu})' for wall, cpu in cells('process', batch))} |"
    rates = [
        one(read("retriever_cpu"), "a_second", retriever=name, case="http")
        for name in ("bm25", "dense")
    ]
    yield f"| queries/s over HTTP, 16 clients | {rates[0]:.0f} | {rates[1]:.0f} |"


def profiled(name: str) -> tuple[Rows, str, str]:
    """(lines of `paw profile`, what PaW adds to the tokens of an update, and to the time of a step)."""
    rows = [
        {k: 0.0 if v is None else v for k, v in row.items()} | {"repeat": int(row["repeat"])}
        for row in read(name)
    ]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    grpo, paw = (pick(rows, variant, ["update"], "tokens")[0] for variant in variants)
    point, low, high = overhead(*(pick(rows, variant, phases, "seconds") for variant in variants))
    return rows, f"{100 * paw / grpo - 100:+.1f} %", f"{point:+.1f} % [{low:.1f}, {high:.1f}]"


def profile() -> Iterator[str]:
    for name, label in (
        ("profile_cpu", "quickstart, {:,.0f} turns"),
        ("profile_cpu_synthetic", "ALFWorld's sizes, random 0.2 M model, {:.0f} turns"),
    ):
        rows = [
            {k: 0.0 if v is None else v for k, v in row.items()} | {"repeat": int(row["repeat"])}
            for row in read(name)
        ]
        arms, phases = (
            list(dict.fromkeys(row[key] for row in rows)) for key in ("variant", "phase")
        )
        without = "" if "rollout" in phases else " (no rollout)"

        def added(phases: list[str], key: str, arms=arms, rows=rows) -> str:
            point, low, high = overhead(*(pick(rows, arm, phases, key) for arm in arms))
            return f"{point:+.1f} % [{low:.1f}, {high:.1f}]"

        tokens = [pick(rows, arm, ["update"], "tokens")[0] for arm in arms]
        peaks = [memory_gib(rows, arm)[0] for arm in arms]
        cells = [label.format(rows[0]["turns"]), f"{100 * tokens[1] / tokens[0] - 100:+.1f} %"]
        cells += [added(["update"], "cpu_seconds"), added(phases, "cpu_seconds") + without]
        cells += [added(phases, "seconds") + without, f"{100 * peaks[1] / peaks[0] - 100:+.1f} %"]
        yield f"| {' | '.join(cells)} |"
        if without:
            yield f"at {cells[2].partition(' %')[0][1:]} % of the update"
    for row in read("conversations"):
        style = "the paper's prompts" if row["style"] == "paper" else "a conversation"
        each = "a turn" if row["rows"] == "turns" else "an episode"
        yield f"| {row['environment']} | {style}, a row {each} | {row['paw']:+.1f} % |"
    late = read("masked_cpu")[-15:]
    masked, ruled, wrong, skipped = (
        sum(row[key] for row in late) / sum(row[of] for row in late)
        for key, of in zip(
            ("masked", "ruled", "wrong", "skipped"),
            ("selected", "selected", "ruled", "tokens"),
            strict=True,
        )
    )
    yield f"{per_cent(masked, 0)} % of the selected observations are masked as a whole"
    yield f"rule takes {per_cent(ruled, 0)} %, of which {per_cent(wrong, 0)} % should have stayed"
    yield f"{per_cent(skipped)} % of the update's tokens"
    cases = [trl_steps(), trl_steps("bfloat16"), trl_steps(style="conversations")]
    yield from (table for table, _ in cases)
    turns, bf16, conversations = (found for _, found in cases)
    for found, words in (
        (bf16, "{:.2f} times PaW's time and {:.2f} times its memory"),
        (turns, "{:.2f} and {:.2f} in float32"),
    ):
        trl = found["TRL, completions only"]
        yield words.format(trl["seconds / GRPO"], trl["peak_gib / GRPO"])
    yield "in bfloat16 {:.2f} times the speed at {:.2f}".format(*against_trl(bf16))
    yield "float32 {:.2f} times at {:.2f}, and {:.2f} times at {:.2f} with `model.compile`".format(
        *against_trl(turns), *against_trl(turns, "GRPO, compiled")
    )
    yield f"{per_cent(turns['GRPO']['body_s'] / turns['GRPO']['seconds'], 0)} % of the step are the body"
    assert turns["GRPO"]["body_s"] > turns["TRL"]["seconds"] / 2
    ratios = (
        turns["GRPO + PaW"]["seconds / GRPO"],
        turns["GRPO + PaW, compiled"]["seconds / GRPO, compiled"],
    )
    yield "float32: {:+.1f} %, compiled {:+.1f} %".format(*(100 * ratio - 100 for ratio in ratios))
    yield f"In the conversations {100 * conversations['GRPO + PaW']['seconds / GRPO'] - 100:+.1f} %"
    versus = importlib.import_module("bench.trainer.against_trl")
    samples = versus.make_samples("conversations")
    last = sum(
        len(its[-1].separator_ids + its[-1].observation_ids) for its in versus.episodes(samples)
    )
    rows = [
        sum(len(getattr(sample, key)) for sample in samples)
        for key in ("observation_ids", "response_ids")
    ]
    more = per_cent(last / sum(versus.row_lengths(samples))), per_cent(rows[0] / rows[1], 0)
    yield "{} % more tokens, and observations add {} %".format(*more)


def scale() -> Iterator[str]:
    rows = {way: read("exchange_cpu", way=way) for way in ("arrays", "json")}
    (tokens,) = {row["tokens"] for way in rows for row in rows[way]}
    yield f"{tokens / 1e6:.0f} million tokens"
    for way, told in (("arrays", "{:.1f} s, {:.1f} GiB at most and {:.1f} in the end"),
                      ("json", "{:.1f} s, {:.1f} and {:.1f} GiB")):  # fmt: skip
        sizes = (
            max(row[key] - row["base_gib"] for row in rows[way]) for key in ("peak_gib", "end_gib")
        )
        yield told.format(max(row["cpu_s"] for row in rows[way]), *sizes)
    keys = ("seconds", "rollout", "update")
    zero, ahead = (
        {key: median(row[key] for row in read("ahead_cpu", ahead=of)) for key in keys}
        for of in "01"
    )
    faster = zero["seconds"] / ahead["seconds"]
    yield f"takes {zero['seconds']:.1f} s with 0 and {ahead['seconds']:.1f} s with 1: {faster:.1f} times the speed"
    yield f"episodes take {zero['rollout']:.1f} s and the optimizer's part {zero['update']:.1f} s"
    late, now = ({row["seed"]: row["success"] for row in exact(read(name, update="240")) if row["seed"] < 3}
                 for name in ("ahead_learning", "quickstart_long"))  # fmt: skip
    for told, of in (
        ("quickstart-long`](quickstart.md) to {} % of the unseen games", late),
        ("itself to {} %", now),
    ):
        yield told.format("{}, {} and {}".format(*map(per_cent, of.values())))
    yield f"a difference of {points(paired(now, late), sign=True)} points"


PAGES = {
    "README.md": readme,
    "docs/environments.md": environments,
    "docs/experiments.md": experiments,
    "docs/memory.md": memory,
    "docs/profile.md": profile,
    "docs/quickstart.md": quickstart,
    "docs/reliability.md": reliability,
    "docs/rollout.md": rollout,
    "docs/rwml.md": rwml,
    "docs/scale.md": scale,
    "docs/search.md": retriever,
}
SETTINGS = """
torch 2.13.0; 95 %; T 0.4; temperature of 0.4; paper's 0.4; --eval.temperature 0.4; 0.2 M; 0.18 M; 2.6m;
(2.9 GiB at 14B); invalid_penalty = 0.1; (to 20 % success); -0.1 for an invalid action; 40 % of it reached;
with 30 % random actions; at most 1.0 % of a step's time and 1.0 % of its peak memory; in 20 % of sampled episodes;
range 0.02 instead of 0.1; filter's 10 %; Qwen2.5's shape; qwen2.5-1.5b; qwen2.5-7b;
arXiv 2605.24517; arXiv 2607.21273; arXiv 2609.20715; hurts at 0.05 and 0.3; TRL 1.16;
twice the speed at 0.6 of the memory; PaW within 2 % of GRPO; passes the 1.25
"""
"""What stands in those sections and was not measured there: settings, versions, limits, the paper's numbers."""


def normal(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", PAGES)
def test_each_measured_number_is_what_its_file_says(page):
    """And none is left out: of a section with such numbers, what has a decimal point or a per cent sign."""
    text, pieces = (ROOT / page).read_text(encoding="utf-8"), list(map(normal, PAGES[page]()))
    missing = [piece for piece in pieces if piece not in normal(text)]
    assert not missing, f"{page} does not say:\n" + "\n".join(missing)
    text = re.sub(r"```.*?```|^ {4}.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    sections = map(normal, re.split(r"^#+ ", text, flags=re.MULTILINE))
    cited = [
        part
        for part in sections
        if "bench/results" in part or any(piece in part for piece in pieces)
    ]
    for known in [*pieces, *normal(SETTINGS).split("; ")]:
        cited = [section.replace(known, "") for section in cited]
    left = [
        found
        for section in cited
        for found in re.findall(r".{,30}(?:[0-9]+[.][0-9]+|[0-9]+ ?%).{,20}", section)
    ]
    assert not left, f"{page}: not recomputed from bench/results:\n" + "\n".join(left)


def test_what_the_compiler_makes_of_a_tile_is_what_its_files_say():
    text, place = (
        normal((ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")),
        ("arch", "V", "D", "gradients"),
    )
    tabled = read(
        "triton_aot", table="yes", triton="3.9.0", kernel="forward_kernel", dtype="bfloat16"
    )
    now = {tuple(map(row.get, place)): row for row in tabled if not row["softcap"]}
    before = read("triton_aot_before")
    assert len(before) == 10
    for row in before:
        to, size = now[tuple(map(row.get, place))], f"{row['V']:,.0f} x {row['D']:,.0f}"
        what = (
            size
            + ", bias" * (row["bias"] == "True")
            + ", no gradients" * (row["gradients"] == "False")
        )
        tile, spills = ([f"{of[key]:,.0f}" for of in (row, to)] for key in ("tile", "spills"))
        assert f"| {row['arch']} | {what} | {' | '.join(tile + spills)} |" in text
