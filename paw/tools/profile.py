"""`paw profile`: time and memory of an update with and without the world model (Figure 5).

Both variants run the stages of `train.update` on the same groups, in alternating order. The
learning rate is 0, so the optimizer does all its work but leaves the weights unchanged. Memory is
measured in a separate pass, because measuring it would slow down the timed passes. A record, a line
of profile.csv, is one phase of one repeat of one variant.
"""

import argparse
import gc
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from torch.profiler import record_function

from paw.config.sections import Config
from paw.errors import UserError
from paw.io.files import write_file, writing
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.sync import push_weights
from paw.run import Run, open_run
from paw.rundir.record import code_commit
from paw.tools.evaluate.played import load_played
from paw.tools.evaluate.recorded import as_sampled_by, random_groups, random_model, read_episodes
from paw.tools.experiment.results import Record, write_csv
from paw.tools.plan.fit import changed
from paw.tools.report.plots import BLUE, INK, PHASES, SKY, styled
from paw.tools.train.preparation import PREPARATION
from paw.trainer import optimize, prepare
from paw.types import Group

STAGES = ("score", "update", "sync")
"""The phases after the rollout."""
ENOUGH = 6
"""Minimum repeats for a 95 % interval of the median. The range of n covers it with 1 - 2^(1 - n).
"""


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Measure both variants --repeats times. Writes profile.csv and profile.png.

    With --trace, also writes traces of one group. --rollouts (a file of `paw rollout`) and
    --synthetic (random tokens, and random weights of the model's shape) need neither games nor
    vLLM. The step then does not include a rollout.
    """
    if options.repeats < 2:
        raise UserError(f"--repeats {options.repeats}: a spread needs at least 2")
    no_games: dict[str, str] = {}
    if options.synthetic or options.rollouts:
        overrides = {"engine.type": "transformers", **overrides}
        no_games = {"env.data": "none"}
    out = options.out.absolute()  # an environment may change the current folder
    config = load_played(options.recipe, overrides, no_games)
    if not config.wm.enabled:
        raise UserError(
            f"{options.recipe}: wm.enabled = false leaves nothing to compare; add --wm.enabled true"
        )
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)

    records, facts = _measure_recipe(options, config, out)

    turns = facts["turns"]
    device = facts["device"]
    write_csv(out / "profile.csv", [record | facts for record in records])
    figure = chart(records, f"{options.recipe}, {turns:,} turns, {device}")
    write_file(out / "profile.png", partial(figure.savefig, dpi=150))
    Console(width=max(100, Console().width)).print(table(records))
    print(f"{turns} turns, {device}: {out / 'profile.csv'}, {out / 'profile.png'}")
    return 0


def _measure_recipe(
    options: argparse.Namespace, config: Config, out: Path
) -> tuple[list[Record], Record]:
    """Return (records of both variants, facts that hold for all of them).

    With --trace, writes traces to `out`.
    """
    with tempfile.TemporaryDirectory(prefix="paw-profile-") as scratch:
        model = config.model.path
        if options.synthetic:
            model = random_model(config, Path(scratch) / "model")
        variants = make_variants(
            changed(config, {"run.dir": scratch, "run.trackers": [], "model.path": model})
        )
        with_world_model = list(variants.values())[-1]
        with open_run(with_world_model, preparation=PREPARATION) as run:
            rollout: dict[str, Record] = {}
            if options.synthetic:
                run, groups = random_groups(run)
            elif options.rollouts:
                episodes = read_episodes(options.rollouts, vocabulary=len(run.policy.head_weight))
                groups = as_sampled_by(run, episodes)
            else:
                groups = play(run, rollout)

            facts = {
                "recipe": options.recipe,
                "model": config.model.path,
                "turns": sum(
                    len(trajectory.turns) for group in groups for trajectory in group.trajectories
                ),
                "commit": code_commit(),
            }
            for key in ("device", "backend", "paw", "torch"):
                facts[key] = run.info[key]

            records = measure(run, variants, groups, rollout, repeats=options.repeats)
            if options.trace:
                write_traces(run, variants, groups, out)
    return records, facts


def make_variants(config: Config) -> dict[str, Config]:
    """Return the recipe without and with the world model, by their names in table and chart.

    Their learning rate is 0. A recipe cannot have this value, so it is set without the check of
    values.
    """
    name = config.advantage.type.upper()
    optim = config.optim.model_copy(update={"lr": 0.0})
    without = changed(config, {"wm.enabled": False}).model_copy(update={"optim": optim})
    with_world_model = changed(config, {"wm.enabled": True}).model_copy(update={"optim": optim})
    return {name: without, f"{name} + PaW": with_world_model}


def play(run: Run, times: dict[str, Record]) -> list[Group]:
    """Play the first update's episodes as in training. `times["rollout"]` gets the time."""
    push_weights(run.policy.lm, run.engine, version=run.step, dtype=run.policy.dtype)
    with (
        closing(Rollouts(run.factory, run.engine, run.chat, run.config)) as rollouts,
        timed(run, times, "rollout"),
    ):
        groups, stats = rollouts.training(
            run.step, run.config.rollout.tasks, run.progress_callback("episodes")
        )
    if not groups:
        raise UserError(f"no group has two episodes left ({stats.failures[0]})")
    return groups


def measure(
    run: Run,
    variants: dict[str, Config],
    groups: list[Group],
    rollout: dict[str, Record],
    *,
    repeats: int,
) -> list[Record]:
    """Return a record per variant, repeat and phase. All share one measurement of the rollout."""
    usage: dict[str, dict[str, Record]] = {}
    for name, config in variants.items():
        usage[name] = defaultdict(dict)
        one_pass(run, config, groups, nullcontext)  # makes the optimizer's state
        metrics = one_pass(run, config, groups, partial(memory, run, usage[name]))
        usage[name]["update"]["gradient_frac"] = metrics.get("optim/gradient_frac", 0.0)

    records: list[Record] = []
    for repeat in range(1, repeats + 1):
        names = list(variants)
        if repeat % 2 == 0:
            names.reverse()
        for name in names:
            times = dict(rollout)
            one_pass(run, variants[name], groups, partial(timed, run, times))
            for phase in times:
                record = {"variant": name, "repeat": repeat, "phase": phase}
                records.append(record | times[phase] | usage[name][phase])

        seconds = ", ".join(f"{name} {pick(records, name, STAGES)[-1]:.2f} s" for name in variants)
        run.say(f"repeat {repeat}/{repeats}: {seconds} after the rollout")
    return records


def one_pass(
    run: Run,
    config: Config,
    groups: list[Group],
    meter: Callable[[str], AbstractContextManager[Any]],
) -> dict[str, float]:
    """Do what `trainer.update` does after the rollout, each phase within its `meter`.

    Returns the metrics of `optimize`.
    """
    run = replace(run, config=config, metrics={})
    run.engine.sleep()
    gc.collect()
    with meter("score"):
        rows = prepare(run, groups)
    with meter("update"):
        metrics = optimize(run, rows)
    with meter("sync"):
        push_weights(run.policy.lm, run.engine, version=run.step, dtype=run.policy.dtype)
    return metrics


@contextmanager
def timed(run: Run, times: dict[str, Record], phase: str) -> Iterator[None]:
    """Put the seconds of a block into `times[phase]`: wall time, and CPU time of all threads.

    Other programs affect CPU time less.
    """
    run.phase = phase
    wall_start = time.perf_counter()
    cpu_start = time.process_time()
    yield
    if run.policy.device.type == "cuda":
        torch.cuda.synchronize()
    times[phase] = {
        "seconds": time.perf_counter() - wall_start,
        "cpu_seconds": time.process_time() - cpu_start,
    }


@dataclass
class MemoryUse:
    """Bytes of all tensors during a block. Filled in when the block ends."""

    peak: float = 0.0
    mean: float = 0.0
    """Averaged over time."""


@contextmanager
def memory(run: Run, usage: dict[str, Record], phase: str) -> Iterator[None]:
    """Add to `usage[phase]` the peak and mean memory of all tensors in a block, and its tokens.

    Memory is in GiB, and its mean is over time. The tokens are those that go through the policy's
    decoder, including padding.
    """
    run.phase = phase
    tokens: list[int] = []

    def count_tokens(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        tokens.append(kwargs["input_ids"].numel())

    hook = run.policy.lm.get_decoder().register_forward_pre_hook(count_tokens, with_kwargs=True)
    meter = _cuda_memory() if run.policy.device.type == "cuda" else _cpu_memory(run)
    try:
        with meter as bytes_used:
            yield
    finally:
        hook.remove()
    usage[phase] |= {
        "tokens": sum(tokens),
        "peak_gib": bytes_used.peak / 2**30,
        "mean_gib": bytes_used.mean / 2**30,
    }


@contextmanager
def _cuda_memory() -> Iterator[MemoryUse]:
    """Take the allocator's own peak, and the mean of samples every 5 ms."""
    torch.cuda.reset_peak_memory_stats()
    samples = [torch.cuda.memory_allocated()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            samples.append(torch.cuda.memory_allocated())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    memory_use = MemoryUse()
    try:
        yield memory_use
        torch.cuda.synchronize()
    finally:
        done.set()
        watcher.join()
    memory_use.peak = torch.cuda.max_memory_allocated()
    memory_use.mean = float(np.mean(samples))


@contextmanager
def _cpu_memory(run: Run) -> Iterator[MemoryUse]:
    """Take memory from every allocation and release of torch's allocator, recorded by its profiler.

    It is added to the weights and the optimizer's state. The profiler slows down the pass.
    """
    bytes_before = _bytes_held(run)
    profiler: Any = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
    memory_use = MemoryUse()
    with profiler:
        yield memory_use

    events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() if event.name() == "[memory]" else 0 for event in events]
    bytes_held = bytes_before + np.cumsum([0, *changes])
    durations = np.diff([event.start_ns() for event in events])
    memory_use.peak = float(bytes_held.max())
    memory_use.mean = float(bytes_before)
    if durations.any():
        memory_use.mean = float(np.average(bytes_held[1:-1], weights=durations))


def _bytes_held(run: Run) -> int:
    """Return bytes of the weights (including the reference's) and of the optimizer's state.

    Storage that tensors share counts once.
    """
    tensors = [*run.policy.parameters(), *run.reference.parameters()]
    for state in run.optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]

    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def write_traces(run: Run, variants: dict[str, Config], groups: list[Group], out: Path) -> None:
    """Write a Chrome trace per variant on one group. On CUDA, also the allocator's history.

    The group is the one with the most different returns.
    """

    def distinct_returns(group: Group) -> int:
        return len({trajectory.episode_return for trajectory in group.trajectories})

    group = max(groups, key=distinct_returns)
    on_cuda = run.policy.device.type == "cuda"
    for name, config in zip(("vanilla", "paw"), variants.values(), strict=True):
        if on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        with torch.profiler.profile(profile_memory=True) as profiler:
            one_pass(run, config, [group], record_function)
        profiler.export_chrome_trace(str(out / f"trace_{name}.json.gz"))
        if on_cuda:
            torch.cuda.memory._dump_snapshot(str(out / f"memory_{name}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)


def pick(
    records: list[Record], variant: str, phases: Sequence[str], key: str = "seconds"
) -> np.ndarray:
    """Return [repeats] sums of `key` over the phases of a variant."""
    sums = []
    for repeat in range(1, records[-1]["repeat"] + 1):
        values = [
            record.get(key, 0.0)
            for record in records
            if record["variant"] == variant
            and record["phase"] in phases
            and record["repeat"] == repeat
        ]
        sums.append(sum(values))
    return np.array(sums)


def memory_gib(records: list[Record], variant: str) -> tuple[float, float]:
    """Return (peak, mean over time) of the memory after the rollout, in GiB."""

    def medians(key: str) -> list[Any]:
        return [np.median(pick(records, variant, [phase], key)) for phase in STAGES]

    peak = max(medians("peak_gib"))
    mean = np.average(medians("mean_gib"), weights=medians("seconds"))
    return float(peak), float(mean)


def overhead(base: np.ndarray, other: np.ndarray) -> list[float]:
    """Return (median, low, high) over the repeats of the increase from `base` to `other`, in per
    cent.

    low and high are the 95 % bootstrap interval of the median, or the range if there are few
    repeats. The ratio is taken within a repeat, because other work on the machine slows both
    variants.
    """
    ratios = other / base
    low = ratios.min()
    high = ratios.max()
    if len(ratios) >= ENOUGH:
        draws = np.random.default_rng(0).choice(ratios, size=(10_000, len(ratios)))
        low, high = np.percentile(np.median(draws, 1), [2.5, 97.5])
    return [100 * float(ratio) - 100 for ratio in (np.median(ratios), low, high)]


def table(records: list[Record]) -> Table:
    """Return medians over the repeats, and what the second variant adds here and in the paper.

    The paper's numbers are from Figure 5, for Qwen2.5-1.5B.
    """
    variants = _distinct(records, "variant")
    phases = _distinct(records, "phase")
    total_name = "step" if "rollout" in phases else "after the rollout"
    repeats = records[-1]["repeat"]
    spread = "95 % interval" if repeats >= ENOUGH else f"range of {repeats}"
    columns = [
        Column(escape(title), no_wrap=True)
        for title in ("", *variants, f"PaW adds [{spread}]", "the paper")
    ]
    printed = Table(*columns, box=SIMPLE)

    time_rows = [(f"{phase}, s", [phase], "seconds", "") for phase in phases]
    time_rows.append((f"{total_name}, s", phases, "seconds", "+2.1 %"))
    time_rows.append(("update, CPU s", ["update"], "cpu_seconds", ""))
    time_rows.append((f"{total_name}, CPU s", phases, "cpu_seconds", ""))
    for label, row_phases, key, paper in time_rows:
        base_time, other_time = (pick(records, variant, row_phases, key) for variant in variants)
        added_text = ""
        if np.median(base_time) > 1e-3 and (base_time != other_time).any():
            added_text = "{:+.1f} % [{:+.1f}, {:+.1f}]".format(*overhead(base_time, other_time))
        printed.add_row(
            label, f"{np.median(base_time):.3f}", f"{np.median(other_time):.3f}", added_text, paper
        )

    peaks, means = zip(*(memory_gib(records, variant) for variant in variants), strict=True)
    tokens = [pick(records, variant, STAGES, "tokens")[0] for variant in variants]
    gradient_fracs = [pick(records, variant, STAGES, "gradient_frac")[0] for variant in variants]
    for label, template, (base_time, other_time), paper in (
        ("peak memory, GiB", "{:.4g}", peaks, "+2.4 %"),
        ("average memory, GiB", "{:.4g}", means, ""),
        ("tokens processed", "{:,.0f}", tokens, ""),
        ("head tokens with a gradient", "{:.3f}", gradient_fracs, ""),
    ):
        added_text = f"{100 * other_time / base_time - 100:+.1f} %" if base_time else ""
        printed.add_row(
            label, template.format(base_time), template.format(other_time), added_text, paper
        )
    return printed


def _distinct(records: list[Record], key: str) -> list[str]:
    """Return the values of `key`, in the order in which they first occur."""
    return list(dict.fromkeys(record[key] for record in records))


@styled
def chart(records: list[Record], title: str) -> Figure:
    """Draw Figure 5: median seconds of a step by phase, and memory, of both variants."""
    variants = _distinct(records, "variant")
    figure = Figure((7.2, 3.4))
    times, memory = figure.subplots(1, 2)

    bottom = np.zeros(2)
    for phase in _distinct(records, "phase"):
        heights = [np.median(pick(records, variant, [phase])) for variant in variants]
        times.bar(variants, heights, 0.55, bottom, color=PHASES[phase], label=phase)
        bottom += heights
    for position, total in enumerate(bottom):
        times.text(position, total, f"{total:.3g} s", ha="center", va="bottom", color=INK)
    times.set(ylabel="Time of a step (s)", ylim=(0, 1.12 * bottom.max()))

    peaks, means = zip(*(memory_gib(records, variant) for variant in variants), strict=True)
    for shift, label, heights, colour in (
        (-0.18, "peak", peaks, BLUE),
        (0.18, "average", means, SKY),
    ):
        bars = memory.bar(np.arange(2) + shift, heights, 0.33, color=colour, label=label)
        memory.bar_label(bars, fmt="%.3g", color=INK)
    memory.set(
        xticks=range(2), xticklabels=variants, ylabel="Memory after the rollout (GiB)", ymargin=0.12
    )

    for axes in (times, memory):
        axes.tick_params(axis="x", labelcolor=INK)
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=4,
            handlelength=1.0,
            columnspacing=0.9,
        )
    figure.suptitle(title, fontsize=9, color=INK)
    return figure
