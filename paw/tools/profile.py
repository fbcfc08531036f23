"""`paw profile`: time and memory of an update with and without the world model, on the same rollouts (Figure 5).

Both variants are the stages of `train.update` on the same groups, interleaved in alternating order. The learning rate
is 0: the optimizer does all its work and leaves the weights as they are, so every pass sees the same ones, and no copy
to restore them from takes memory. Times come from passes that nothing watches, memory from one more pass of each.
"""

import gc
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.profiler import record_function

from paw.config import Config
from paw.errors import UserError
from paw.files import write_file
from paw.recipe import load
from paw.rollout.scheduler import Rollouts
from paw.rollout.sync import push_weights
from paw.run import Run, open_run
from paw.state.record import code_commit
from paw.tools.experiment.results import write_csv
from paw.tools.fit import changed
from paw.tools.overhead import STAGES, Record, chart, pick, table
from paw.tools.recorded import random_groups, random_model, read_groups
from paw.train import optimize, prepare
from paw.types import Group


def profile(
    recipe: str,
    overrides: dict[str, str],
    *,
    repeats: int,
    out: Path,
    rollouts: Path | None,
    synthetic: bool,
    trace: bool,
) -> int:
    """Measure both variants `repeats` times; write profile.csv, profile.png and, with `trace`, traces of one group.

    `rollouts` (a file that `paw rollout` wrote) and `synthetic` (random tokens, random weights of the model's shape)
    need neither games nor vLLM; the step then has no rollout. Raises UserError for a mistake of the user.
    """
    if repeats < 2:
        raise UserError(f"--repeats {repeats}: a spread needs at least 2")
    if synthetic or rollouts:
        overrides = {"env.data": "none", "rollout.engine": "transformers", **overrides}
    out, config = out.absolute(), load(recipe, overrides)  # an environment may change the current folder
    if not config.wm.enabled:
        raise UserError(f"{recipe}: wm.enabled = false leaves nothing to compare; add --wm.enabled true")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    with tempfile.TemporaryDirectory(prefix="paw-profile-") as scratch:
        model = random_model(config, Path(scratch) / "model") if synthetic else config.model.path
        variants = make_variants(changed(config, {"run.dir": scratch, "run.trackers": [], "model.path": model}))
        with open_run(list(variants.values())[-1]) as run:
            played: dict[str, Record] = {}
            if synthetic:
                run, groups = random_groups(run)
            else:
                groups = read_groups(rollouts, run) if rollouts else play(run, played)
            turns = sum(len(trajectory.turns) for group in groups for trajectory in group.trajectories)
            about = {"recipe": recipe, "model": config.model.path, "turns": turns, "commit": code_commit()}
            about |= {key: run.info[key] for key in ("device", "backend", "paw", "torch")}
            records = measure(run, variants, groups, played, repeats=repeats)
            if trace:
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
        before = _held(run)
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
    cuda = run.policy.device.type == "cuda"
    for name, config in zip(("vanilla", "paw"), variants.values(), strict=True):
        if cuda:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        with torch.profiler.profile(profile_memory=True) as seen:
            one_pass(run, config, [group], record_function)
        seen.export_chrome_trace(str(out / f"trace_{name}.json.gz"))
        if cuda:
            torch.cuda.memory._dump_snapshot(str(out / f"memory_{name}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)


def _held(run: Run) -> int:
    """Bytes of the weights and of the optimizer's state."""
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    tensors = [*run.policy.parameters(), *run.reference.parameters(), *filter(torch.is_tensor, states)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
