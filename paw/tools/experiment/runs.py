"""The runs of an experiment: variants x seeds, each one `paw train` of its own in OUT/runs/<variant>-<seed>.

The seed is that of training and of the warm-up: the variants of a seed share its start model and games. What is
finished is not trained again; what was interrupted is resumed.
"""

import argparse
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paw import watcher
from paw.config import Config
from paw.errors import UserError, masked, nearest, to_stderr
from paw.files import writing
from paw.keys import flatten
from paw.recipe import load
from paw.tools.rundir import Run, load_run

ESTIMATORS = {
    "rloo": "advantage.type=rloo",
    "gigpo": "advantage.type=gigpo",
    "dr-grpo": "advantage.type=grpo advantage.norm_std=false",
    "ppo": "advantage.type=ppo",
}
PAW = "advantage.type=grpo wm.enabled=true"
VARIANTS = {
    "grpo": ("advantage.type=grpo wm.enabled=false", "GRPO without a world model"),
    "paw": (PAW, "GRPO + PaW, with the recipe's [wm] (the paper's where it says nothing else)"),
    "ce": (f"{PAW} wm.loss=ce", "cross-entropy on observations, as in Table 4"),
    "mae": (f"{PAW} wm.loss=mae", "MAE without the mask p <= rho"),
    "gce": (f"{PAW} wm.loss=gce", "generalised cross-entropy"),
    "constant": (f"{PAW} wm.weight=1.0", "lambda = 1 whatever the rewards, as in Table 4"),
    "unselected": (f"{PAW} wm.alpha=1.0", "every turn a target, no selection by entropy"),
    "echo": (f"{PAW} wm.loss=ce wm.weight=1.0 wm.alpha=1.0", "ECHO (arXiv 2605.24517)"),
    "scaled": (f"{PAW} wm.scale=10", "PaW's term ten times as large"),
    "dedup": (f"{PAW} wm.dedup=true", "identical turns predicted once"),
    **{name: (f"{keys} wm.enabled=false", f"{name} without a world model") for name, keys in ESTIMATORS.items()},
    **{f"{name}-paw": (f"{keys} wm.enabled=true", f"{name} + PaW") for name, keys in ESTIMATORS.items()},
}
"""Of a comparison: what it changes in the recipe, and a line on what it is."""
OWN = {"run.dir", "run.name", "run.seed", "warmup.seed"}
"""Keys that the experiment sets."""
IGNORED = {"run.dir", "run.threads", "run.trackers", "run.save_every", "run.keep"}
IGNORED |= {"tracking.project", "tracking.name", "tracking.tags"}
"""Keys in which a finished run may differ: what was learnt is the same."""
Overrides = dict[str, str]
"""Dotted keys of the configuration and their values, as on the command line."""
Runs = dict[str, dict[int, Run]]
"""Finished runs by variant and seed."""


@dataclass(frozen=True)
class Job:
    """One run of the experiment; `words` are those of `paw train`."""

    variant: str
    seed: int
    directory: Path
    updates: int
    words: tuple[str, ...]

    @property
    def finished(self) -> Run | None:
        """Its run, if that ended by itself; a report it may lack."""
        with suppress(UserError):  # not begun
            run = load_run(self.directory)
            return run if run.finished and run.updates >= self.updates else None

    @property
    def log(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.log")


def parse_seeds(text: str) -> list[int]:
    """ "5" is 0 to 4; a list names seeds: "0-4,7"."""
    seeds = range(int(text)) if text.isdecimal() else []
    if not text.isdecimal() and re.fullmatch(r"\d+(-\d+)?(,(\d+(-\d+)?)?)*", text):
        ends = [part.split("-") for part in text.split(",") if part]
        seeds = {seed for part in ends for seed in range(int(part[0]), int(part[-1]) + 1)}
    if not seeds:
        raise argparse.ArgumentTypeError(f"'{text}' names no seed; give how many, or which: 0-0 or 0-4,7")
    return sorted(seeds)


def parse_variants(names: str, own: Sequence[str]) -> dict[str, Overrides]:
    """Variants by name from "grpo,paw", then the user's own, each "name: wm.scale=10 wm.loss=mae". Or UserError."""
    named = []
    for name in filter(None, map(str.strip, names.split(","))):
        if name not in VARIANTS:
            hint = nearest(name, VARIANTS) or f"there are: {', '.join(VARIANTS)}"
            raise UserError(f"--variants: unknown variant '{name}': {hint} (or give your own with --variant)")
        named.append(f"{name}: {VARIANTS[name][0]}")
    found: dict[str, Overrides] = {}
    for text in [*named, *own]:
        name, colon, rest = text.partition(":")
        pairs = [word.partition("=") for word in shlex.split(rest)]
        if not colon or not re.fullmatch(r"[\w.+=-]+", name) or not all(equals for _, equals, _ in pairs):
            raise UserError(f"--variant '{text}': give a name and what it changes, such as 'loud: wm.scale=10'")
        if name in found:
            raise UserError(f"variant '{name}' is there twice")
        found[name] = {key: value for key, _, value in pairs}
    if not found:
        raise UserError("--variants names no variant")
    return found


def conduct(
    options: argparse.Namespace, variants: dict[str, Overrides], seeds: dict[str, list[int]], overrides: Overrides
) -> Runs:
    """Train what is missing, unless --report-only; returns the finished runs, variants in order. Or UserError."""
    jobs = plan(options, variants, seeds, overrides)
    if not options.report_only:
        train(jobs, at_once=options.jobs)
    runs: Runs = {variant: {} for variant in variants}
    for job in jobs:
        if run := job.finished:
            runs[job.variant][job.seed] = run
    if not runs[base := next(iter(variants))]:
        raise UserError(f"--report-only: no finished run of variant '{base}' in {options.out / 'runs'}")
    return {variant: found for variant, found in runs.items() if found}


def plan(
    options: argparse.Namespace, variants: dict[str, Overrides], seeds: dict[str, list[int]], overrides: Overrides
) -> list[Job]:
    """The runs, all variants of a seed in a row. UserError for a key that a variant or the experiment sets itself, and
    for a run that is there with another configuration."""
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: give 1 or more")
    for key in overrides:
        if key in OWN:
            raise UserError(f"--{key}: the experiment sets it; see --seeds and --out")
        if setters := [variant for variant, keys in variants.items() if key in keys]:
            raise UserError(f"--{key} is what variant '{setters[0]}' sets; leave it out, or write a --variant yourself")
    jobs = []
    common = {"run.threads": "1"} if options.jobs > 1 else {}
    for seed in sorted({seed for chosen in seeds.values() for seed in chosen}):
        for variant in (variant for variant in variants if seed in seeds[variant]):
            directory = options.out / "runs" / f"{variant}-{seed}"
            own = {"run.dir": str(directory.parent), "run.name": directory.name}
            keys = common | overrides | variants[variant] | own | {"run.seed": str(seed)}
            if (config := load(options.recipe, keys)).model.path == "quickstart":
                config = load(options.recipe, keys := keys | {"warmup.seed": str(seed)})
            if (directory / "config.toml").is_file() and (found := difference(directory / "config.toml", config)):
                raise UserError(f"{directory} has {found}: take another --out, or remove it")
            words = [word for key, value in keys.items() for word in (f"--{key}", value)]
            words = ["train", options.recipe, "--gpus", str(options.gpus), *words]
            jobs.append(Job(variant, seed, directory, config.run.updates, tuple(words)))
    return jobs


def difference(path: Path, now: Config) -> str:
    """The first key in which two configurations would learn differently, and both values."""
    wanted = masked(flatten(now))
    for key, value in masked(flatten(load(path))).items():
        if key not in IGNORED and value != wanted.get(key):
            return f"{key} = {value!r}, not {wanted.get(key)!r}"
    return ""


def train(jobs: Sequence[Job], *, at_once: int) -> None:
    """Run what is not finished, `at_once` processes at a time; first one variant of each seed, which makes its model.

    UserError where a run fails. On the way out running ones are asked to stop: they save a checkpoint first.
    """
    pending = [job for job in jobs if not job.finished]
    first = list({job.seed: job for job in reversed(pending)}.values())[::-1]
    done = before = len(jobs) - len(pending)
    started, running, stopping = time.monotonic(), set[subprocess.Popen[bytes]](), threading.Event()
    to_stderr(f"{done} of {len(jobs)} runs")

    def run(job: Job) -> None:
        if stopping.is_set():
            return
        running.add(child := _start(job))
        code = child.wait()
        running.discard(child)
        if code or not job.finished:
            stopping.set()
            for line in job.log.read_text(errors="replace").splitlines()[-10:]:
                to_stderr(line)
            how = f"failed (exit code {code})" if code else "was stopped"
            raise UserError(f"run {job.directory} {how}, see {job.log}; the same command goes on from here")

    on_sigterm = signal.signal(signal.SIGTERM, watcher.interrupt)
    pool = ThreadPoolExecutor(at_once)
    try:
        for batch in (first, [job for job in pending if job not in first]):
            for future in as_completed([pool.submit(run, job) for job in batch]):
                future.result()
                done += 1
                minutes = (time.monotonic() - started) / (done - before) * (len(jobs) - done) / 60
                to_stderr(f"{done} of {len(jobs)} runs" + (f", about {minutes:.0f} min left" if minutes else ""))
    finally:
        stopping.set()
        for child in tuple(running):
            child.terminate()
        pool.shutdown()
        signal.signal(signal.SIGTERM, on_sigterm)


def _start(job: Job) -> subprocess.Popen[bytes]:
    metrics = job.directory / "metrics.jsonl"
    with writing(job.directory, "; set --out"):
        job.directory.parent.mkdir(parents=True, exist_ok=True)
        resume = ["--resume", "auto"] if metrics.is_file() and metrics.stat().st_size else []
        command = [sys.executable, "-m", "paw", *job.words, *resume]
        with job.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches it once, through `train`.
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
