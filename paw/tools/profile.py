"""`paw profile`: time and memory of an update with and without the world model, on the same rollouts (Figure 5).

Both variants are the stages of `train.update` on the same groups, in alternating order. The learning rate is 0: the
optimizer does all its work and leaves the weights as they are. Times come from passes that nothing watches, memory from
one more pass of each. A record, a line of profile.csv, is one phase of one repeat of one variant.
"""

import argparse
import gc
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
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

from paw.config import Config
from paw.errors import UserError
from paw.files import write_file, writing
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.sync import push_weights
from paw.run import Run, open_run
from paw.state.record import code_commit
from paw.tools.experiment.results import Record, write_csv
from paw.tools.fit import changed
from paw.tools.played import load_played
from paw.tools.plots import BLUE, INK, PHASES, SKY, styled
from paw.tools.recorded import random_groups, random_model, read_episodes, with_log_probs
from paw.trainer import optimize, prepare
from paw.types import Group

STAGES = ("score", "update", "sync")
"""The phases after the rollout."""
ENOUGH = 6
"""Repeats that a 95 % interval of a median takes: even the range of n holds it with probability 1 - 2^(1 - n) only."""


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Measure both variants --repeats times; write profile.csv, profile.png and, with --trace, traces of one group.

    --rollouts (a file of `paw rollout`) and --synthetic (random tokens and weights of the model's shape) need neither
    games nor vLLM; the step then has no rollout.
    """
    recipe, repeats, rollouts, synthetic = options.recipe, options.repeats, options.rollouts, options.synthetic
    if repeats < 2:
        raise UserError(f"--repeats {repeats}: a spread needs at least 2")
    if synthetic or rollouts:
        overrides = {"engine.type": "transformers", **overrides}
    no_games = {"env.data": "none"} if synthetic or rollouts else {}
    out = options.out.absolute()  # an environment may change the current folder
    config = load_played(recipe, overrides, no_games)
    if not config.wm.enabled:
        raise UserError(f"{recipe}: wm.enabled = false leaves nothing to compare; add --wm.enabled true")
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paw-profile-") as scratch:
        model = random_model(config, Path(scratch) / "model") if synthetic else config.model.path
        variants = make_variants(changed(config, {"run.dir": scratch, "run.trackers": [], "model.path": model}))
        with open_run(list(variants.values())[-1]) as run:
            played: dict[str, Record] = {}
            if synthetic:
                run, groups = random_groups(run)
            elif rollouts:
                groups = with_log_probs(run, read_episodes(rollouts, vocabulary=len(run.policy.head_weight)))
            else:
                groups = play(run, played)
            turns = sum(len(trajectory.turns) for group in groups for trajectory in group.trajectories)
            about = {"recipe": recipe, "model": config.model.path, "turns": turns, "commit": code_commit()}
            about |= {key: run.info[key] for key in ("device", "backend", "paw", "torch")}
            records = measure(run, variants, groups, played, repeats=repeats)
            if options.trace:
                write_traces(run, variants, groups, out)
    write_csv(out / "profile.csv", [record | about for record in records])
    figure = chart(records, f"{recipe}, {turns:,} turns, {about['device']}")
    write_file(out / "profile.png", partial(figure.savefig, dpi=150))
    Console(width=max(100, Console().width)).print(table(records))
    print(f"{turns} turns, {about['device']}: {out / 'profile.csv'}, {out / 'profile.png'}")
    return 0


def make_variants(config: Config) -> dict[str, Config]:
    """The recipe without and with the world model, as table and chart name them; lr 0, which no recipe may have."""
    name, still = config.advantage.type.upper(), config.optim.model_copy(update={"lr": 0.0})
    off, on = (changed(config, {"wm.enabled": wm}).model_copy(update={"optim": still}) for wm in (False, True))
    return {name: off, f"{name} + PaW": on}


def play(run: Run, found: dict[str, Record]) -> list[Group]:
    """The episodes of the first update, as `train` plays them, and the time that took."""
    push_weights(run.policy.lm, run.engine, version=run.step)
    with closing(Rollouts(run.factory, run.engine, run.chat, run.config)) as rollouts, timed(run, found, "rollout"):
        groups, sampled = rollouts.training(run.step, run.config.rollout.tasks, run.counting("episodes"))
    if not groups:
        raise UserError(f"no group has two episodes left ({sampled.failures[0]})")
    return groups


def measure(
    run: Run, variants: dict[str, Config], groups: list[Group], played: dict[str, Record], *, repeats: int
) -> list[Record]:
    """A record for each variant, repeat and phase; the rollout, `played` once, is the same in all."""
    fixed: dict[str, dict[str, Record]] = {name: defaultdict(dict) for name in variants}
    for name, config in variants.items():
        one_pass(run, config, groups, nullcontext)  # makes the optimizer's state
        metrics = one_pass(run, config, groups, partial(memory, run, fixed[name]))
        fixed[name]["update"]["gradient_frac"] = metrics.get("optim/gradient_frac", 0.0)
    records: list[Record] = []
    for repeat in range(1, repeats + 1):
        for name in list(variants)[:: 1 if repeat % 2 else -1]:
            found = dict(played)
            one_pass(run, variants[name], groups, partial(timed, run, found))
            order = {"variant": name, "repeat": repeat}
            records += [order | {"phase": phase} | found[phase] | fixed[name][phase] for phase in found]
        spent = ", ".join(f"{name} {pick(records, name, STAGES)[-1]:.2f} s" for name in variants)
        run.say(f"repeat {repeat}/{repeats}: {spent} after the rollout")
    return records


def one_pass(
    run: Run, config: Config, groups: list[Group], meter: Callable[[str], AbstractContextManager[Any]]
) -> dict[str, float]:
    """What `train.update` does after the rollout, each phase in its `meter`; returns the metrics of learning."""
    run = replace(run, config=config, metrics={})
    run.engine.sleep()
    gc.collect()
    with meter("score"):
        rows = prepare(run, groups)
    with meter("update"):
        metrics = optimize(run, rows)
    with meter("sync"):
        push_weights(run.policy.lm, run.engine, version=run.step)
    return metrics


@contextmanager
def timed(run: Run, found: dict[str, Record], phase: str) -> Iterator[None]:
    """Seconds: by the clock, and of processor time over all threads, which other programs disturb less."""
    run.phase = phase
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    if run.policy.device.type == "cuda":
        torch.cuda.synchronize()
    found[phase] = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


@contextmanager
def memory(run: Run, found: dict[str, Record], phase: str) -> Iterator[None]:
    """Tokens through the policy's decoder, padding included; peak and time-averaged GiB of all tensors.

    On CUDA the allocator's own peak, and samples of it every 5 ms. On a CPU every allocation and release of torch's
    allocator, from torch's profiler (which slows the pass), on top of the weights and the optimizer's state.
    """
    run.phase = phase
    tokens: list[int] = []
    hook = run.policy.lm.get_decoder().register_forward_pre_hook(
        lambda _, __, options: tokens.append(options["input_ids"].numel()), with_kwargs=True
    )
    if run.policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        samples, done = [torch.cuda.memory_allocated()], threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                samples.append(torch.cuda.memory_allocated())

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        yield
        torch.cuda.synchronize()
        done.set()
        watcher.join()
        peak, mean = torch.cuda.max_memory_allocated(), np.mean(samples)
    else:
        states = [value for state in run.optimizer.state.values() for value in state.values()]
        tensors = [*run.policy.parameters(), *run.reference.parameters(), *filter(torch.is_tensor, states)]
        before = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        seen: Any = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
        with seen:
            yield
        events = sorted(seen.kineto_results.events(), key=lambda event: event.start_ns())
        held = before + np.cumsum([0, *(event.nbytes() if event.name() == "[memory]" else 0 for event in events)])
        spans = np.diff([event.start_ns() for event in events])
        peak, mean = held.max(), np.average(held[1:-1], weights=spans) if spans.any() else before
    hook.remove()
    found[phase] |= {"tokens": sum(tokens), "peak_gib": peak / 2**30, "mean_gib": mean / 2**30}


def write_traces(run: Run, variants: dict[str, Config], groups: list[Group], out: Path) -> None:
    """A Chrome trace of each variant on one group (of mixed outcomes, if any); on CUDA also its allocator's history."""
    group = max(groups, key=lambda group: len({trajectory.episode_return for trajectory in group.trajectories}))
    history = torch.cuda.memory if run.policy.device.type == "cuda" else None
    for name, config in zip(("vanilla", "paw"), variants.values(), strict=True):
        if history:
            history._record_memory_history(max_entries=1_000_000)
        with torch.profiler.profile(profile_memory=True) as seen:
            one_pass(run, config, [group], record_function)
        seen.export_chrome_trace(str(out / f"trace_{name}.json.gz"))
        if history:
            history._dump_snapshot(str(out / f"memory_{name}.pickle"))
            history._record_memory_history(enabled=None)


def pick(records: list[Record], variant: str, phases: Sequence[str], key: str = "seconds") -> np.ndarray:
    """[repeats] sums of `key` over the phases."""
    repeats = range(1, records[-1]["repeat"] + 1)
    own = [record for record in records if record["variant"] == variant and record["phase"] in phases]
    return np.array([sum(record.get(key, 0.0) for record in own if record["repeat"] == r) for r in repeats])


def memory_gib(records: list[Record], variant: str) -> tuple[float, float]:
    """Peak, and average moment, after the rollout."""
    keys = ("peak_gib", "mean_gib", "seconds")
    peaks, means, seconds = ([np.median(pick(records, variant, [phase], key)) for phase in STAGES] for key in keys)
    return float(max(peaks)), float(np.average(means, weights=seconds))


def overhead(base: np.ndarray, other: np.ndarray) -> list[float]:
    """Median over the repeats of `other` over `base`, less 1, in per cent, and its 95 % bootstrap interval, or range if
    few: a ratio within a repeat, as what else the machine does slows both."""
    ratios = other / base
    ends = np.array([ratios.min(), ratios.max()])
    if len(ratios) >= ENOUGH:
        draws = np.random.default_rng(0).choice(ratios, size=(10_000, len(ratios)))
        ends = np.percentile(np.median(draws, 1), [2.5, 97.5])
    return [100 * float(r) - 100 for r in (np.median(ratios), *ends)]


def table(records: list[Record]) -> Table:
    """Medians over the repeats, what the second variant adds in the median repeat, and in Figure 5 (Qwen2.5-1.5B)."""
    variants, phases = (list(dict.fromkeys(record[key] for record in records)) for key in ("variant", "phase"))
    step = "step" if "rollout" in phases else "after the rollout"
    repeats = records[-1]["repeat"]
    spread = "95 % interval" if repeats >= ENOUGH else f"range of {repeats}"
    columns = ("", *variants, f"PaW adds [{spread}]", "the paper")
    shown = Table(*(Column(escape(name), no_wrap=True) for name in columns), box=SIMPLE)

    rows = [(f"{phase}, s", [phase], "seconds", "") for phase in phases]
    rows += [(f"{step}, s", phases, "seconds", "+2.1 %"), ("update, CPU s", ["update"], "cpu_seconds", "")]
    for label, which, key, paper in [*rows, (f"{step}, CPU s", phases, "cpu_seconds", "")]:
        a, b = (pick(records, variant, which, key) for variant in variants)
        differs = np.median(a) > 1e-3 and (a != b).any()
        added = "{:+.1f} % [{:+.1f}, {:+.1f}]".format(*overhead(a, b)) if differs else ""
        shown.add_row(label, f"{np.median(a):.3f}", f"{np.median(b):.3f}", added, paper)
    peaks, means = zip(*(memory_gib(records, variant) for variant in variants), strict=True)
    tokens, live = ([pick(records, v, STAGES, key)[0] for v in variants] for key in ("tokens", "gradient_frac"))
    for label, form, (a, b), paper in (
        ("peak memory, GiB", "{:.4g}", peaks, "+2.4 %"),
        ("average memory, GiB", "{:.4g}", means, ""),
        ("tokens processed", "{:,.0f}", tokens, ""),
        ("head tokens with a gradient", "{:.3f}", live, ""),
    ):
        shown.add_row(label, form.format(a), form.format(b), f"{100 * b / a - 100:+.1f} %" if a else "", paper)
    return shown


@styled
def chart(records: list[Record], title: str) -> Figure:
    """Figure 5: seconds of a step by phase (medians), and memory, of both variants."""
    variants, phases = (list(dict.fromkeys(record[key] for record in records)) for key in ("variant", "phase"))
    figure = Figure((7.2, 3.4))
    times, memory = figure.subplots(1, 2)
    bottom = np.zeros(2)
    for phase in phases:
        heights = [np.median(pick(records, variant, [phase])) for variant in variants]
        times.bar(variants, heights, 0.55, bottom, color=PHASES[phase], label=phase)
        bottom += heights
    for place, total in enumerate(bottom):
        times.text(place, total, f"{total:.3g} s", ha="center", va="bottom", color=INK)
    times.set(ylabel="Time of a step (s)", ylim=(0, 1.12 * bottom.max()))
    peaks, means = zip(*(memory_gib(records, variant) for variant in variants), strict=True)
    for shift, label, heights, colour in ((-0.18, "peak", peaks, BLUE), (0.18, "average", means, SKY)):
        bars = memory.bar(np.arange(2) + shift, heights, 0.33, color=colour, label=label)
        memory.bar_label(bars, fmt="%.3g", color=INK)
    memory.set(xticks=range(2), xticklabels=variants, ylabel="Memory after the rollout (GiB)", ymargin=0.12)
    for axes in (times, memory):
        axes.tick_params(axis="x", labelcolor=INK)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=4, handlelength=1.0, columnspacing=0.9)
    figure.suptitle(title, fontsize=9, color=INK)
    return figure
