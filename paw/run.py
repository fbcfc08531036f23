"""A run in progress: its parts, its directory, and what happens between updates: evaluate, write, save, end.

runs/<name>/{config.toml, run.json, metrics.jsonl, samples.jsonl, checkpoints/step_000050/, hf/,
plots/, report.html}
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paw import hooks
from paw.algo.loss import log_probs
from paw.algo.samples import minibatches
from paw.build import (
    Parts,
    build,
    check_environment,
    check_extras,
    check_memory,
    choose_dtype,
    join_ranks,
)
from paw.config import Config
from paw.envs.base import EnvFactory
from paw.errors import UserError, progress, to_stderr, to_stdout
from paw.files import write_file, writing
from paw.model.dtype import with_dtype
from paw.model.host import peak_gib
from paw.model.policy import Policy, full_parameters, pick_device
from paw.model.ranks import PeerLostError, Ranks, lost_peer, out_of_memory
from paw.recipe import dump, warnings
from paw.rollouts.engines.weight_folders import remove_abandoned
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.success import more_context, success_metrics, success_text
from paw.rollouts.sync import StaleWeightsError
from paw.state.claim import claim
from paw.state.export import export
from paw.state.guards import TrainingStopped, UpdateGuard, memory_message, what_is_saved
from paw.state.held import HeldDirectory, held
from paw.state.log import MetricsLog
from paw.state.record import RunRecord, about, header_lines, now
from paw.state.restore import restore
from paw.state.shared import check_shared
from paw.state.signals import StopSignal
from paw.state.train_state import PendingCheckpoint, RandomStates, rng_tensors, start_saving
from paw.types import Sample

STARTING_OVER = -1


@dataclass
class Run(Parts):
    """What `train` reads and advances."""

    config: Config
    ranks: Ranks
    directory: Path
    callbacks: list[Any]
    """Objects with any of four hooks, called on every rank: on_start(run), on_update(run, metrics),
    on_evaluation(run, groups, metrics), on_end(run). The last is called however the run ends, see
    `failed`."""
    signal: StopSignal
    held: HeldDirectory
    """The run directory as it was opened."""
    step: int = 0
    """Updates done; the weight version."""
    saved: int = 0
    """The step of the newest checkpoint that is there."""
    pending: PendingCheckpoint | None = None
    """The checkpoint that is being written."""
    logged: int = 0
    """The step of the newest line of metrics: resuming a checkpoint needs that of its step."""
    random: RandomStates | None = None
    """As they were before what follows the newest update was begun: its evaluation, or the next update."""
    log: MetricsLog | None = None
    """Of rank 0, as `record` is."""
    record: RunRecord | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the update in progress."""
    phase: str = "start"
    """What it is doing: start, or the name of a clock."""
    failed: bool = True
    """Whether it has not ended in order."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.learners[0].optimizer

    @property
    def guard(self) -> UpdateGuard:
        return self.learners[0].guard

    def make_rollouts(self) -> Rollouts:
        """What plays the run's episodes: each update's when it is asked for, or `rollout.ahead` updates early."""
        encode = self.encode_observation if self.config.wm.enabled else None
        now: Any = Rollouts(
            self.factory, self.engine, self.chat, self.config, self.ranks, encode_observation=encode
        )
        if self.config.rollout.ahead:
            from paw.rollouts.ahead import AsyncRollouts

            now = AsyncRollouts(now, self.path)
        return now

    def say(self, text: str) -> None:
        say(text, self.ranks)

    def counting(self, phase: str) -> Callable[[int, int], None]:
        """A function of (done, total) that shows them on the first rank's terminal."""
        return partial(progress, phase) if self.ranks.first else lambda done, total: None

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Adds the seconds spent inside to `time/<phase>`; a checkpoint that has been written meanwhile comes first."""
        if phase != "save":
            self.settle(wait=False)
        started, self.phase = time.perf_counter(), phase
        with self.ranks.phase(phase):
            yield
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize()
        key = f"time/{phase}"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - started

    def stop_requested(self) -> bool:
        """Whether any rank was told to stop: signals reach them at different moments."""
        return any(self.ranks.gather(self.signal.requested))

    def log_probs(self, model: Policy, samples: list[Sample]) -> list[tuple[list[float], float]]:
        """`algo.loss.log_probs` of all samples, the batches shared among ranks."""
        temperature, budget = self.config.rollout.temperature, self.config.optim.micro_batch_tokens
        share = (self.ranks.rank, self.ranks.world_size)
        scored = log_probs(model, samples, temperature=temperature, budget=budget, share=share)
        entropies: dict[int, float] = {}
        for of_rank in self.ranks.gather(
            {i: entropy for i, (_, entropy) in scored.items()}, dict[int, float]
        ):
            entropies |= of_rank
        rows = self.ranks.gather_numbered({i: logp for i, (logp, _) in scored.items()})
        return [(logp, entropies[i]) for i, logp in enumerate(rows)]

    @contextmanager
    def reference_at_hand(self) -> Iterator[None]:
        """The reference model: the policy without its LoRA adapters, or one that visits the device for the while."""
        if self.config.lora.rank:
            from paw.model.lora import adapters_off

            with adapters_off(self.policy.lm):
                yield
            return
        whole = self.ranks.world_size == 1 or self.config.model.shard == "none"
        visits = self.config.policy.offload_reference and whole
        if visits:
            self.reference.to(self.policy.device)
        yield
        if visits:
            self.reference.to("cpu")

    def minibatches(self, samples: list[Sample]) -> Iterator[list[Sample]]:
        """Of each optimizer step of the update, all epochs; policy and critic step on the same ones."""
        for epoch in range(self.config.optim.epochs):
            seed = self.config.run.seed * 1_000_003 + self.step * 31 + epoch
            yield from minibatches(samples, size=self.config.optim.minibatch_samples, seed=seed)

    def play_again(self, error: StaleWeightsError) -> None:
        """Leave the servers out that have other weights, for good. Raises the error where no others
        are left, or where episodes that are played ahead have tokens of them too."""
        if self.config.rollout.ahead or not self.engine.leave_out(error.servers):
            raise error
        self.say(
            f"update {self.step + 1}: {error}; {', '.join(error.servers)} left out, its episodes are played again"
        )

    # --- between updates
    # ---------------------------------------------------------------------------------------------

    def catch_up(self, rollouts: Rollouts) -> None:
        """Evaluate where that is due and the newest line lacks it: before the first update, and after a stop."""
        if self._evaluation_due and not self.ranks.broadcast_from_rank0(
            lambda: self.log and self.log.evaluated(self.step)
        ):
            self.evaluate(rollouts)
            self._write_metrics()

    def end_update(self, rollouts: Rollouts, *, tokens: int) -> None:
        """Evaluate where due, write the update's line, then save where due (resuming needs the line).

        A run that was told to stop leaves the evaluation to the one that resumes it.
        """
        last, self.random = self.step == self.config.run.updates, rng_tensors()
        phases = sum(
            value
            for key, value in self.metrics.items()
            if key.startswith("time/") and key != "time/save"
        )
        self.metrics["perf/tokens_per_s"] = tokens / max(phases, 1e-9)
        self.metrics["perf/peak_gib"] = peak_gib(self.policy.device)
        if last or (self._evaluation_due and not self.stop_requested()):
            self.evaluate(rollouts)
        self._write_metrics()
        if self.config.run.save_every and self.step % self.config.run.save_every == 0:
            self.save(wait=False)

    def evaluate(self, rollouts: Rollouts) -> None:
        """Play the evaluation games once each; adds `eval/*` to the metrics.

        Raises TrainingStopped where every episode failed, after the update has been written down
        and saved.
        """
        self.check_directory()
        with self.clock("eval"):
            groups, stats = rollouts.evaluation(self.counting("evaluation"))
            found = success_metrics(groups, stats.failed)
            self.metrics |= {f"eval/{name}": value for name, value in found.items()}
            if groups and stats.context_full == sum(len(group.trajectories) for group in groups):
                self.say(
                    f"warning: evaluation: all episodes ran out of context: {more_context(self.config)}"
                )
            hooks.call(self, "on_evaluation", groups, self.metrics)
        if stats.failed and not groups:
            self._write_metrics()
            if self.saved != self.step:
                self.save()
            raise TrainingStopped(
                f"stopped at update {self.step}: evaluation: {success_text(found)}; {what_is_saved(self.saved)}"
            )

    @property
    def _evaluation_due(self) -> bool:
        every = self.config.eval.every
        return self.step in (0, self.config.run.updates) or bool(every and self.step % every == 0)

    def check_directory(self) -> None:
        """Raises UserError if the run directory was deleted or renamed, before anything is written
        in its place. Log files that were deleted are written anew."""
        if self.ranks.first:
            self.held.check(self.saved)
        for note in self.log.restore() if self.log else ():
            self.say(note)

    def _write_metrics(self) -> None:
        self.check_directory()
        if self.log:
            self.log.log(self.step, self.metrics)
        self.logged = self.step
        try:
            hooks.call(self, "on_update", self.metrics)
        finally:
            self.random = rng_tensors()
        self.metrics.clear()

    def save(self, *, wait: bool = True) -> None:
        """A checkpoint of weights, optimizer, random states and counters; drops the oldest beyond run.keep.

        With `wait`, it is on disk on return; otherwise it is written in the background, and
        `settle` publishes it.
        """
        is_pending = self.pending is not None and self.pending.step == self.step
        self.settle()
        if is_pending:
            return
        self.check_directory()
        if self.log:
            self.log.sync()
        with self.clock("save"):
            self.pending = start_saving(
                self.learners,
                self.ranks,
                step=self.step,
                folder=self.directory / "checkpoints",
                random_states=self.random or rng_tensors(),
                background=not wait,
            )
        if wait:
            self.settle()

    def settle(self, *, wait: bool = True) -> None:
        """Publish the pending checkpoint once all ranks have written it; with `wait`, wait for them."""
        pending = self.pending
        if not pending or not (wait or all(self.ranks.gather(pending.done))):
            return
        self.check_directory()
        with self.clock("save"):
            self.pending = None
            pending.publish(self.config.run.keep)
        self.saved = pending.step
        if self.record:
            self.record.write()

    def save_whole(self, error: BaseException) -> None:
        """Save an update that is over, when something fails before the next has begun to change anything."""
        if self.logged < self.step and self.phase in (
            "sync",
            "eval",
        ):  # its evaluation is for the resumed run
            self.random = rng_tensors() if self.phase == "sync" else self.random
            if self.log:
                line = {
                    key: value for key, value in self.metrics.items() if not key.startswith("eval/")
                }
                self.log.log(self.step, line)
            self.logged = self.step
        diverged = self.phase == "score" and isinstance(error, TrainingStopped)
        if (
            self.saved != self.step == self.logged
            and self.phase not in ("start", "update", "save")
            and not diverged
        ):
            self.save()

    def finish(self) -> Path:
        """Save, export to Hugging Face format; returns the path of the report to come."""
        if self.saved != self.step:
            self.save()
        self.check_directory()
        self.optimizer.state.clear()  # room for whole weights
        whole_ones = full_parameters(self.policy.lm, once=True)  # takes all ranks
        weights = {name: tensor.cpu() for name, tensor in whole_ones if self.ranks.first}
        if self.record:
            export(
                self.policy,
                self.tokenizer,
                self.directory / "hf",
                weights,
                config=self.config,
                step=self.step,
            )
            whole = self.step == self.config.run.updates
            self.record.end("finished" if whole else "stopped", "" if whole else self.signal.name)
            if not whole:
                goes_on = "the same command with --resume goes on"
                self.say(
                    f"stopped after update {self.step} of {self.config.run.updates}, which is saved; {goes_on}"
                )
        self.failed = False
        return self.directory / "report.html"


@contextmanager
def open_run(config: Config, *, resume: str = "", numbered: bool = False) -> Iterator[Run]:
    """A run ready to train, see `train`, taken down at the end.

    UserError where memory runs out: what to turn.
    """
    run: Run | None = None
    try:
        with ExitStack() as stack:
            run = _start(config, stack, resume=resume, numbered=numbered)
            try:
                yield run
            except (Exception, SystemExit) as error:
                if run.ranks.world_size == 1 or isinstance(
                    error, TrainingStopped
                ):  # which all ranks raise
                    with suppress(UserError):
                        run.settle()
                        run.save_whole(error)
                if run.held.where() == run.directory:  # else the error says where it went
                    at = f"update {run.step} of {config.run.updates}"
                    run.say(f"failed after {at}: {what_is_saved(run.saved)}")
                raise
    except KeyboardInterrupt:
        if run and run.ranks.first:
            to_stderr(f"stopped at once: {what_is_saved(run.saved)}")
        raise
    except Exception as error:
        if lost_peer(error):
            raise PeerLostError("another rank has ended, this one cannot go on") from None
        if not out_of_memory(error):
            raise
        phase, step, saved = (run.phase, run.step, run.saved) if run else ("start", 0, 0)
        rank, peak = int(os.environ.get("RANK", "0")), peak_gib(pick_device(config.model.device))
        message = memory_message(phase, update=step + 1, rank=rank, peak_gib=peak, saved=saved)
        raise UserError(message) from None


def _start(config: Config, stack: ExitStack, *, resume: str, numbered: bool) -> Run:
    """Meet the other ranks, take the directory, build or restore the parts; `stack` takes down what was put up."""
    began = {"started": now(), "folder": str(Path.cwd())}  # before an environment goes elsewhere
    names = ("progress", "samples", *config.run.trackers, *config.run.callbacks, "report")
    callbacks = hooks.make_callbacks(names)
    device = pick_device(config.model.device)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    episodes = config.rollout.tasks * config.rollout.group_size
    ranks = join_ranks(device, episodes=episodes, peer_timeout_s=config.run.peer_timeout_s)
    stack.callback(ranks.close)
    settings = config.model_dump_json(exclude={"run": {"dir", "name"}}) + f" resume {resume}"
    ranks.agree(
        settings,
        "rank {} was started with other settings than rank 0: use the same recipe and options",
    )
    if config.model.shard == "node":
        why = "model.shard = 'node': rank {}'s machine has another number of ranks than rank 0's; start as many on each"
        ranks.agree(str(ranks.on_host), f"{why}, or use --model.shard world")
    ranks.everywhere(lambda: check_extras(config, device))
    name, notes = ranks.broadcast_from_rank0(
        lambda: _take_directory(config, stack, resume=resume, numbered=numbered)
    )
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    directory = (config.run.dir / name).absolute()  # an environment may change the current folder
    if ranks.world_size > 1:
        check_shared(directory, ranks)

    dtype, kept = choose_dtype(config, device, ranks, past=directory if resume else None)
    notes = [*notes, *kept]
    in_dtype = with_dtype(
        config, dtype
    )  # config.toml keeps "auto": another machine may choose another
    if ranks.first:
        for line in remove_abandoned([None, config.engine.weights_dir]):
            to_stdout(line)

    def check() -> EnvFactory:
        check_memory(in_dtype, device, ranks)
        return check_environment(config)

    factory = ranks.everywhere(check)
    if ranks.world_size > 1:
        other = (
            "rank {} has other games than rank 0: its machine needs the same files for env.name = "
        )
        ranks.agree(factory.fingerprint(), f"{other}'{config.env.name}'")
    parts = build(
        in_dtype,
        factory,
        ranks,
        stack,
        run=directory if resume else None,
        message=lambda text: say(text, ranks),
    )
    signal = stack.enter_context(StopSignal())
    own = {
        "config": config,
        "ranks": ranks,
        "directory": directory,
        "callbacks": callbacks,
        "signal": signal,
    }
    run = Run(**vars(parts), **own, held=stack.enter_context(held(directory)))
    run.info = about(run) | began
    if resume:
        chosen = "" if resume == "auto" else resume
        restored = restore(
            run.learners, ranks, directory / "checkpoints", warn=run.say, chosen=chosen
        )
        if restored:
            path, run.step = restored
            run.saved = run.logged = run.step
            run.say(f"resumed from {path}")
        else:
            run.say(f"no checkpoint yet in {directory}: starting over")
    if ranks.first:
        with writing(directory / "config.toml"):
            write_file(directory / "config.toml", dump(config))
        was = {"resumed_at": run.step, "notes": notes} if resume else {}
        run.record = stack.enter_context(RunRecord(directory, run.info, held=run.held, **was))
        cut = (run.step or STARTING_OVER) if resume else None
        run.log = stack.enter_context(MetricsLog(directory, resume_step=cut))
        for line in (*header_lines(run), *notes, *run.log.lost, *warnings(config)):
            run.say(line)
    stack.callback(hooks.call_on_end, run)
    hooks.call(run, "on_start")
    return run


def say(text: str, ranks: Ranks) -> None:
    """One line on the first rank's terminal."""
    if ranks.first:
        to_stdout(text)


def _take_directory(
    config: Config, stack: ExitStack, *, resume: str, numbered: bool
) -> tuple[str, list[str]]:
    """(The run's name, what to report about it)."""
    name, held = claim(config, resume=resume, numbered=numbered)
    stack.enter_context(held)
    if resume:
        from paw.state.resume import changes

        return name, changes(config.run.dir / name, config)
    taken = f"{config.run.dir / config.run.name} is another run's: this one is {name}"
    return name, [taken] if name != config.run.name else []
