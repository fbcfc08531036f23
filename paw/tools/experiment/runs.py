"""The runs of an experiment: variants x seeds, each with its own `paw train`.

A run's folder is OUT/runs/VARIANT-SEED. The seed is used for training and for the warm-up, so the
variants of a seed share its start model and games. Finished runs are not trained again. Interrupted
ones are resumed.
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

from paw.config import plugins
from paw.config.keys import flatten
from paw.config.recipe import load
from paw.config.sections import Config
from paw.errors import UserError, masked, nearest, to_stderr
from paw.io.files import writing
from paw.processes import watcher
from paw.tools.report.rundir import Run, load_run

ESTIMATORS = {
    name: f"advantage.type={name}" for name in plugins.BUILT_IN["advantages"] if name != "grpo"
}
ESTIMATORS["dr-grpo"] = "advantage.type=grpo advantage.norm_std=false"
PAW = "advantage.type=grpo wm.enabled=true"
VARIANTS = {
    "grpo": ("advantage.type=grpo wm.enabled=false", "GRPO without a world model"),
    "paw": (PAW, "GRPO + PaW, with the recipe's [wm] (the paper's, unless the recipe changes it)"),
    "ce": (f"{PAW} wm.loss=ce", "cross-entropy on observations, as in Table 4"),
    "mae": (f"{PAW} wm.loss=mae", "MAE without the mask p <= rho"),
    "gce": (f"{PAW} wm.loss=gce", "generalised cross-entropy"),
    "constant": (f"{PAW} wm.weight=1.0", "constant lambda of 1, as in Table 4"),
    "unselected": (f"{PAW} wm.alpha=1.0", "every turn is a target, without selection by entropy"),
    "echo": (
        f"{PAW} wm.loss=ce wm.weight=0.05 wm.alpha=1.0",
        "ECHO (arXiv 2605.24517), with the weight of its public code",
    ),
    "scaled": (f"{PAW} wm.scale=10", "PaW's term ten times as large"),
    "dedup": (f"{PAW} wm.dedup=true", "identical turns are predicted only once"),
    **{
        name: (f"{keys} wm.enabled=false", f"{name} without a world model")
        for name, keys in ESTIMATORS.items()
    },
    **{
        f"{name}-paw": (f"{keys} wm.enabled=true", f"{name} + PaW")
        for name, keys in ESTIMATORS.items()
    },
}
"""Variants by name, as (what it changes in the recipe, a line about it)."""
SET_HERE = {"run.dir", "run.name", "run.seed", "warmup.seed"}
"""Keys that the experiment sets."""
IGNORED = {"run.dir", "run.threads", "run.trackers", "run.save_every", "run.keep"}
IGNORED |= {"tracking.project", "tracking.name", "tracking.tags"}
"""Keys in which a finished run may differ, because they do not change what is learnt."""
Overrides = dict[str, str]
"""Dotted keys of the configuration and their values, as on the command line."""
Runs = dict[str, dict[int, Run]]
"""Finished runs by variant and seed."""


@dataclass(frozen=True)
class Job:
    """One run of the experiment."""

    variant: str
    seed: int
    directory: Path
    updates: int
    words: tuple[str, ...]
    """The arguments of `paw`."""

    @property
    def finished(self) -> Run | None:
        """Return the run if it has ended by itself after all its updates, otherwise None.

        Its report may have failed.
        """
        with suppress(UserError):  # not started
            run = load_run(self.directory)
            if run.finished and run.updates >= self.updates:
                return run

    @property
    def log(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.log")


def parse_seeds(text: str) -> list[int]:
    """Return the sorted seeds. A number such as "5" means 0 to 4; a list "0-4,7" names them."""
    seeds: set[int] = set()
    if text.isdecimal():
        seeds.update(range(int(text)))
    elif re.fullmatch(r"\d+(-\d+)?(,(\d+(-\d+)?)?)*", text):
        for part in text.split(","):
            if part:
                ends = part.split("-")
                seeds.update(range(int(ends[0]), int(ends[-1]) + 1))
    if not seeds:
        raise argparse.ArgumentTypeError(
            f"'{text}' names no seed; give how many, or which: 0-0 or 0-4,7"
        )
    return sorted(seeds)


def parse_variants(names: str, custom: Sequence[str]) -> dict[str, Overrides]:
    """Return the overrides of each variant.

    `names` are known variants, such as "grpo,paw". Each of `custom` is a user's own, such as "name:
    wm.scale=10 wm.loss=mae". Raises UserError if a variant is unknown, malformed or given twice, or
    if there is none.
    """
    definitions = []
    for word in names.split(","):
        name = word.strip()
        if not name:
            continue
        if name not in VARIANTS:
            hint = nearest(name, VARIANTS) or f"there are: {', '.join(VARIANTS)}"
            raise UserError(
                f"--variants: unknown variant '{name}': {hint} (or give your own with --variant)"
            )
        changes, _ = VARIANTS[name]
        definitions.append(f"{name}: {changes}")

    variants: dict[str, Overrides] = {}
    for definition in [*definitions, *custom]:
        name, colon, changes = definition.partition(":")
        pairs = [word.partition("=") for word in shlex.split(changes)]
        is_named = colon and re.fullmatch(r"[\w.+=-]+", name)
        if not is_named or not all(equals for _, equals, _ in pairs):
            raise UserError(
                f"--variant '{definition}': give a name and what it changes, "
                "such as 'loud: wm.scale=10'"
            )
        if name in variants:
            raise UserError(f"variant '{name}' is given twice")
        variants[name] = {key: value for key, _, value in pairs}
    if not variants:
        raise UserError("--variants names no variant")
    return variants


def conduct(
    options: argparse.Namespace,
    variants: dict[str, Overrides],
    seeds: dict[str, list[int]],
    overrides: Overrides,
) -> Runs:
    """Train missing runs, unless --report-only. Returns the finished runs, in order of variants.

    Raises UserError if a run cannot be planned or fails, or if the first variant has no finished
    run.
    """
    jobs = plan(options, variants, seeds, overrides)
    if not options.report_only:
        train(jobs, at_once=options.jobs)
    runs: Runs = {variant: {} for variant in variants}
    for job in jobs:
        run = job.finished
        if run:
            runs[job.variant][job.seed] = run

    baseline = next(iter(variants))
    if not runs[baseline]:
        raise UserError(
            f"--report-only: no finished run of variant '{baseline}' in {options.out / 'runs'}"
        )
    return {variant: by_seed for variant, by_seed in runs.items() if by_seed}


def plan(
    options: argparse.Namespace,
    variants: dict[str, Overrides],
    seeds: dict[str, list[int]],
    overrides: Overrides,
) -> list[Job]:
    """Return the runs, with all variants of a seed in a row.

    Raises UserError if `overrides` has a key that a variant or the experiment sets, or if a run
    already exists with another configuration.
    """
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: give 1 or more")
    for key in overrides:
        if key in SET_HERE:
            raise UserError(f"--{key}: the experiment sets it; see --seeds and --out")
        for variant, changes in variants.items():
            if key in changes:
                raise UserError(
                    f"--{key} is what variant '{variant}' sets; leave it out, "
                    "or write a --variant yourself"
                )

    jobs = []
    for seed in sorted(set().union(*seeds.values())):
        for variant in variants:
            if seed in seeds[variant]:
                jobs.append(_job(options, variant, seed, overrides | variants[variant]))
    return jobs


def _job(options: argparse.Namespace, variant: str, seed: int, overrides: Overrides) -> Job:
    """Return the run of one variant and seed. `overrides` are the user's and the variant's."""
    directory = options.out / "runs" / f"{variant}-{seed}"
    keys: Overrides = {}
    if options.jobs > 1:
        keys["run.threads"] = "1"
    keys |= overrides
    keys |= {"run.dir": str(directory.parent), "run.name": directory.name, "run.seed": str(seed)}
    config = load(options.recipe, keys)
    if config.model.path == "quickstart":
        keys["warmup.seed"] = str(seed)
        config = load(options.recipe, keys)

    config_file = directory / "config.toml"
    if config_file.is_file():
        changed = difference(config_file, config)
        if changed:
            raise UserError(f"{directory} has {changed}; use another --out, or remove it")

    arguments = ["train", options.recipe, "--gpus", str(options.gpus)]
    for key, value in keys.items():
        arguments += [f"--{key}", value]
    return Job(variant, seed, directory, config.run.updates, tuple(arguments))


def difference(path: Path, config: Config) -> str:
    """Return the first key that makes a configuration learn differently from that of the file
    `path`.

    Returns text with the key and both values; "" if there is no such key.
    """
    values = masked(flatten(config))
    for key, file_value in masked(flatten(load(path))).items():
        if key not in IGNORED and file_value != values.get(key):
            return f"{key} = {file_value!r}, not {values.get(key)!r}"
    return ""


def train(jobs: Sequence[Job], *, at_once: int) -> None:
    """Run everything that is not finished, `at_once` processes at a time.

    One variant of each seed comes first, because it makes the start model that the others share. If
    a run fails, raises UserError. Running ones are then asked to stop, and save a checkpoint first.
    """
    pending = [job for job in jobs if not job.finished]
    first_of_seed = {job.seed: job for job in reversed(pending)}
    first = list(reversed(first_of_seed.values()))
    others = [job for job in pending if job not in first]

    done_before = len(jobs) - len(pending)
    runs_done = done_before
    started = time.monotonic()
    to_stderr(f"{runs_done} of {len(jobs)} runs")
    processes = _Processes()
    on_sigterm = signal.signal(signal.SIGTERM, watcher.interrupt)
    pool = ThreadPoolExecutor(at_once)
    try:
        for batch in (first, others):
            for future in as_completed([pool.submit(processes.run, job) for job in batch]):
                future.result()
                runs_done += 1
                seconds_per_run = (time.monotonic() - started) / (runs_done - done_before)
                minutes = seconds_per_run * (len(jobs) - runs_done) / 60
                remaining = f", about {minutes:.0f} min left" if minutes else ""
                to_stderr(f"{runs_done} of {len(jobs)} runs{remaining}")
    finally:
        processes.stop()
        pool.shutdown()
        signal.signal(signal.SIGTERM, on_sigterm)


class _Processes:
    """The runs in progress. Each is a process that a thread waits for."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[bytes]] = set()
        self.stopping = threading.Event()

    def run(self, job: Job) -> None:
        """Run a job to its end, unless the others are being stopped.

        If it fails, raises UserError and no further job starts.
        """
        if self.stopping.is_set():
            return
        child = _start(job)
        self.running.add(child)
        if self.stopping.is_set():  # `stop` was called after the check above, and missed this child
            child.terminate()
        exit_code = child.wait()
        self.running.discard(child)
        if exit_code == 0 and job.finished:
            return

        self.stopping.set()
        for line in job.log.read_text(errors="replace").splitlines()[-10:]:
            to_stderr(line)
        ending = f"failed (exit code {exit_code})" if exit_code else "was stopped"
        raise UserError(f"run {job.directory} {ending}, see {job.log}; the same command continues")

    def stop(self) -> None:
        """Start no further job, and ask the running ones to stop."""
        self.stopping.set()
        for child in tuple(self.running):
            child.terminate()


def _start(job: Job) -> subprocess.Popen[bytes]:
    """Start a run, or resume it if it has metrics. Its output goes to the job's log."""
    metrics = job.directory / "metrics.jsonl"
    with writing(job.directory, "; set --out"):
        job.directory.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "paw", *job.words]
        if metrics.is_file() and metrics.stat().st_size:
            command += ["--resume", "auto"]
        with job.log.open("ab") as log:
            # It has its own session, so Ctrl-C reaches it once, through `train`.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
