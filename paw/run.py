"""A run in progress: its parts, its directory, and the work between updates.

Between updates a run evaluates, writes its files, saves, and ends.

runs/<name>/{config.toml, run.json, metrics.jsonl, samples.jsonl, episodes.jsonl,
checkpoints/step_000050/, hf/, plots/, report.html}
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paw import hooks
from paw.algo.loss import log_probs
from paw.algo.rows import share_scalars
from paw.algo.sequences import minibatches
from paw.algo.shared_samples import SharedSamples
from paw.build import (
    WITHOUT_TOOLS,
    Parts,
    Preparation,
    build,
    check_environment,
    check_extras,
    choose_dtype,
    join_ranks,
)
from paw.checkpoint.export import export
from paw.checkpoint.files import CheckpointError
from paw.checkpoint.restore import restore
from paw.checkpoint.train_state import (
    PendingCheckpoint,
    RandomStates,
    capture_random_states,
    start_saving,
)
from paw.config.recipe import dump, warnings
from paw.config.sections import Config
from paw.distributed.ranks import PeerLostError, Ranks, lost_peer, out_of_memory
from paw.envs.base import EnvFactory
from paw.envs.several import SeveralEnvs
from paw.episode_log import EpisodeLog
from paw.errors import UserError, describe, progress, to_stderr, to_stdout
from paw.guards import TrainingStopped, UpdateGuard, memory_message, what_is_saved
from paw.io.files import write_file, writing
from paw.model.dtype import with_dtype
from paw.model.host import peak_gib
from paw.model.lora import adapters_off
from paw.model.policy import Policy, full_parameters, pick_device
from paw.progress import RunProgress
from paw.rollouts.attempts import evaluation_metrics
from paw.rollouts.background.ahead import AsyncRollouts
from paw.rollouts.base import RolloutSource
from paw.rollouts.engines import find_engine
from paw.rollouts.engines.weight_folders import remove_abandoned
from paw.rollouts.exchange import gather_turns
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.success import more_context, success_text
from paw.rollouts.sync import StaleWeightsError
from paw.rollouts.text.pieces import TokenTexts
from paw.rundir.about import describe_run, header_lines
from paw.rundir.directory import OpenDirectory, open_directory
from paw.rundir.log import MetricsLog, open_log
from paw.rundir.record import RunRecord, now, read_info
from paw.rundir.resume import changes
from paw.rundir.run_lock import take_run_directory
from paw.rundir.shared import check_shared
from paw.rundir.signals import StopSignal
from paw.types import Group, Sample, Values

STARTING_OVER = -1
"""The step of a resumed run that has no checkpoint yet: its logs start afresh."""


@dataclass(kw_only=True)
class Run(Parts, RunProgress):
    """The state that `train` reads and advances."""

    config: Config
    ranks: Ranks
    directory: Path
    callbacks: list[Any]
    """Objects with any of four hooks, called on every rank: on_start(run), on_update(run, metrics),
    on_evaluation(run, groups, metrics), on_end(run). `on_end` is called however the run ends, see
    `failed`. With several ranks, the turns of `groups` that other ranks have played are not here,
    unless a callback has an attribute `tokens` that is true (`full_groups`)."""
    signal: StopSignal
    open_directory: OpenDirectory
    """The run directory as it was opened."""
    pending: PendingCheckpoint | None = None
    """The checkpoint that is being written."""
    random_states: RandomStates | None = None
    """The random states right after the newest update, taken before its evaluation or once its line
    is written. None before the first. Only `remember_random_states` sets it."""
    log: MetricsLog | None = None
    """Set on rank 0 only."""
    record: RunRecord | None = None
    """Set on rank 0 only."""
    episode_log: EpisodeLog | None = None
    """Set on rank 0 only, if `run.log_episodes` is not 0."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the update in progress."""
    failed: bool = True
    """True until the run has ended normally."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.learners[0].optimizer

    @property
    def guard(self) -> UpdateGuard:
        return self.learners[0].guard

    def make_rollouts(self) -> RolloutSource:
        """Return the source of the run's episodes.

        It plays them when they are needed, or `rollout.ahead` updates early.
        """
        rollouts = Rollouts(self.factory, self.engine, self.chat, self.config, self.ranks)
        if self.config.rollout.ahead:
            return AsyncRollouts(rollouts, self.path)
        return rollouts

    def say(self, text: str) -> None:
        say(text, self.ranks)

    def progress_callback(self, phase: str) -> Callable[[int, int], None]:
        """Return a function of (done, total) that shows both on the first rank's terminal."""
        if self.ranks.first:
            return partial(progress, phase)
        return lambda done, total: None

    @contextmanager
    def stage(self, phase: str) -> Iterator[None]:
        """Run a phase of an update.

        First publishes the pending checkpoint if it has been written by now, then times the block.
        """
        self.settle(wait=False)
        with self.clock(phase):
            yield

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the seconds spent inside to `time/<phase>`."""
        started = time.perf_counter()
        self.phase = phase
        with self.ranks.in_phase(phase):
            yield
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        key = f"time/{phase}"
        self.metrics[key] = self.metrics.get(key, 0.0) + seconds

    def stop_requested(self) -> bool:
        """Whether any rank was told to stop. Signals reach ranks at different moments."""
        return any(self.ranks.gather(self.signal.requested))

    def share_scalars(self, samples: SharedSamples) -> None:
        """Fill the numbers of the samples of all ranks, see `algo.rows.share_scalars`."""
        share_scalars(
            samples,
            self.ranks,
            anchors=self.config.advantage.anchors,
            share_prefixes=self.packing.share_prefixes != "never",
        )

    def log_probs(
        self, model: Policy, samples: Sequence[Sample]
    ) -> dict[int, tuple[Values, float]]:
        """Return (log-probs, mean entropy) of the samples that this rank holds, by their index.

        See `algo.loss.log_probs`. The ranks share the batches.
        """
        return log_probs(
            model,
            samples,
            self.packing,
            temperature=self.config.rollout.temperature,
        )

    def full_groups(self, groups: list[Group]) -> list[Group]:
        """Return the groups with the turns of all ranks, on every rank. A call of all ranks.

        For callbacks that look at a few episodes. Every rank then holds as much as one rank alone
        would.
        """
        return gather_turns(groups, self.ranks) if self.ranks.world_size > 1 else groups

    @contextmanager
    def reference_on_device(self) -> Iterator[None]:
        """Make the reference model ready inside the block. It is the policy without its LoRA
        adapters, or a separate model. If it is offloaded, it is on the device during the block."""
        if self.config.lora.rank:
            with adapters_off(self.policy.lm):
                yield
            return
        is_sharded = self.ranks.world_size > 1 and self.config.model.shard != "none"
        # FSDP moves shards itself.
        must_move = self.config.policy.offload_reference and not is_sharded
        if must_move:
            self.reference.to(self.policy.device)
        yield
        if must_move:
            self.reference.to("cpu")

    def minibatches(self, samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
        """Yield the samples of each optimizer step of the update, over all epochs.

        Policy and critic use the same mini-batches.
        """
        for epoch in range(self.config.optim.epochs):
            seed = self.config.run.seed * 1_000_003 + self.step * 31 + epoch
            yield from minibatches(samples, size=self.config.optim.minibatch_samples, seed=seed)

    def exclude_stale_servers(self, error: StaleWeightsError) -> None:
        """Permanently exclude the servers that have different weights.

        Raises the error if no other servers are left, or if episodes are played ahead, since those
        have tokens of these servers too.
        """
        if self.config.rollout.ahead or not self.engine.exclude(error.servers):
            raise error
        servers = ", ".join(error.servers)
        self.say(f"update {self.step + 1}: {error}; {servers} excluded; the update is played again")

    # --- between updates
    # ---------------------------------------------------------------------------------------------

    def count_update(self) -> None:
        """Count an update that changed the weights. Call it before the weights are sent."""
        self.step += 1
        self.remember_random_states()

    def note_success(self) -> None:
        """Pass the success of the update to the curriculum, if there is one."""
        environments = self.factory
        if not isinstance(environments, SeveralEnvs) or environments.curriculum is None:
            return
        success: dict[str, float] = {}
        for label in environments.parts:
            if f"success/{label}" in self.metrics:
                success[label] = self.metrics[f"success/{label}"]
        environments.curriculum.note(success)

    def choose_shares(self) -> None:
        """With rollout.curriculum, choose the shares of the environments for the next update.

        The update before must be over, so that it is saved if the curriculum fails.
        """
        environments = self.factory
        if not isinstance(environments, SeveralEnvs) or environments.curriculum is None:
            return
        curriculum = environments.curriculum
        try:
            shares = self.ranks.broadcast_from_rank0(
                lambda: curriculum.shares(self.step), dict[str, float]
            )
        except UserError as error:
            raise TrainingStopped(str(error)) from error  # of all ranks, which save the update
        environments.shares.choose(self.step, shares)

    def choose_missing_shares(self) -> None:
        """Choose the shares of the next update if the curriculum failed to before the stop."""
        if isinstance(self.factory, SeveralEnvs) and self.factory.lacks_shares:
            self.factory.lacks_shares = False
            self.choose_shares()

    def remember_random_states(self) -> None:
        self.random_states = capture_random_states()

    def catch_up_on_evaluation(self, rollouts: RolloutSource) -> None:
        """Evaluate if an evaluation is due and not yet logged.

        This happens before the first update and after a stop.
        """
        if not self._evaluation_due:
            return
        if self.ranks.broadcast_from_rank0(lambda: self.log and self.log.evaluated(self.step)):
            return
        self.evaluate(rollouts)
        self._write_metrics()

    def end_update(self, rollouts: RolloutSource, *, tokens: int) -> None:
        """Evaluate if due, write the update's line, then save if due (resuming needs the line).

        A run that was told to stop leaves the evaluation to the one that resumes it.
        """
        seconds = 0.0
        for key, value in self.metrics.items():
            if key.startswith("time/") and key != "time/save":
                seconds += value
        self.metrics["perf/tokens_per_s"] = tokens / max(seconds, 1e-9)
        self.metrics["perf/peak_gib"] = peak_gib(self.policy.device)

        is_last = self.step == self.config.run.updates
        if is_last or (self._evaluation_due and not self.stop_requested()):
            self.evaluate(rollouts)
        self._write_metrics()
        if self.config.run.save_every and self.step % self.config.run.save_every == 0:
            self.save(wait=False)

    def evaluate(self, rollouts: RolloutSource) -> None:
        """Play the evaluation games and add `eval/*` to the metrics.

        Raises TrainingStopped if every episode failed, after the update has been logged and saved.
        """
        self.check_directory()
        with self.stage("eval"):
            groups, stats = rollouts.evaluation(self.progress_callback("evaluation"))
            success = evaluation_metrics(groups, stats.failed, attempts=self.config.eval.attempts)
            for name, value in success.items():
                self.metrics[f"eval/{name}"] = value
            if groups and stats.context_full == sum(len(group.trajectories) for group in groups):
                advice = more_context(self.config)
                self.say(f"warning: evaluation: all episodes ran out of context: {advice}")
            if any(hooks.needs_tokens(callback) for callback in self.callbacks):
                groups = self.full_groups(groups)
            hooks.call(self, "on_evaluation", groups, self.metrics)
        if groups or not stats.failed:
            return

        self._write_metrics()
        if self.saved != self.step:
            self.save()
        raise TrainingStopped(
            f"stopped at update {self.step}: evaluation: {success_text(success)}; "
            f"{what_is_saved(self.saved)}"
        )

    @property
    def _evaluation_due(self) -> bool:
        if self.step in (0, self.config.run.updates):
            return True
        interval = self.config.eval.every
        return bool(interval) and self.step % interval == 0

    def check_directory(self) -> None:
        """Raises UserError if the run directory was deleted or renamed, before anything is written
        in its place. Recreates log files that were deleted."""
        if self.ranks.first:
            self.open_directory.check(self.saved)
        if self.log:
            for note in self.log.restore():
                self.say(note)

    def _write_metrics(self) -> None:
        self.check_directory()
        self._log(self.metrics)
        try:
            hooks.call(self, "on_update", self.metrics)
        finally:
            self.remember_random_states()
        self.metrics.clear()

    def _log(self, metrics: dict[str, float]) -> None:
        """Write the update's episodes and then its line of metrics."""
        if self.log:
            if self.episode_log:
                self.log.episodes(self.step, self.episode_log.take())
            self.log.log(self.step, metrics)
        self.logged = self.step

    def save(self, *, wait: bool = True) -> None:
        """Save weights, optimizer, random states and counters; remove the oldest beyond run.keep.

        With `wait`, the checkpoint is on disk on return. Otherwise it is written in the background,
        and `settle` publishes it.
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
                random_states=self.random_states or capture_random_states(),
                tasks=self._task_state(),
                background=not wait,
            )
        if wait:
            self.settle()

    def _task_state(self) -> dict[str, Any] | None:
        """Return what the choice of tasks needs besides the configuration and the step, if any."""
        if not isinstance(self.factory, SeveralEnvs):
            return None
        return self.factory.state(self.step, self.config.rollout.tasks)

    def load_task_state(self, state: dict[str, Any]) -> None:
        """Load what `_task_state` returned at this step. Raises CheckpointError if malformed."""
        if isinstance(self.factory, SeveralEnvs):
            try:
                self.factory.load_state(state, self.step, self.config.rollout.tasks)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"its state of tasks is malformed: {describe(error)}"
                ) from None

    def settle(self, *, wait: bool = True) -> None:
        """Publish the pending checkpoint if all ranks have written it.

        With `wait`, wait until they have.
        """
        pending = self.pending
        if not pending or not (wait or all(self.ranks.gather(pending.done))):
            return
        self.check_directory()
        with self.clock("save"):
            try:
                pending.publish(self.config.run.keep)
            except Exception as error:
                if not lost_peer(error):  # another rank may be publishing it
                    self.pending = None
                raise
        self._note_published(pending)

    def _note_published(self, pending: PendingCheckpoint) -> None:
        self.pending = None
        self.saved = pending.step
        if self.record:
            self.record.write()

    def save_what_is_done(self, error: BaseException) -> None:
        """After a failure: publish the pending checkpoint, and save the newest update if possible.

        Saving needs all ranks. After TrainingStopped, all ranks get here. After any other error
        with several ranks, only what is already written is published.
        """
        with suppress(UserError):
            if self.ranks.world_size == 1 or isinstance(error, TrainingStopped):
                self.settle()
                self.save_finished_update(error)
            elif self.pending:
                self.check_directory()
                # A rank that ended normally has waited for this rank's files.
                wait = not lost_peer(error)
                if self.pending.publish_alone(self.config.run.keep, wait=wait):
                    self._note_published(self.pending)

    def save_finished_update(self, error: BaseException) -> None:
        """Save the newest update if it is over and `error` did not corrupt it."""
        if self.lacks_only_its_metrics:  # its evaluation is left to the resumed run
            metrics: dict[str, float] = {}
            for key, value in self.metrics.items():
                if not key.startswith("eval/"):
                    metrics[key] = value
            self._log(metrics)
        if self.can_be_saved(error):
            self.save()

    def finish(self) -> Path:
        """Save and export to Hugging Face format. Returns the path that the report will have."""
        if self.saved != self.step:
            self.save()
        self.check_directory()

        self.optimizer.state.clear()  # room for full weights
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in full_parameters(self.policy.lm, once=True):  # all ranks must call this
            if self.ranks.first:
                weights[name] = tensor.cpu()
        if self.record:
            export(
                self.policy,
                self.tokenizer,
                self.directory / "hf",
                weights,
                config=self.config,
                step=self.step,
            )
            self._record_end(self.record)
        self.failed = False
        return self.directory / "report.html"

    def _record_end(self, record: RunRecord) -> None:
        if self.step == self.config.run.updates:
            record.end("finished")
            return
        record.end("stopped", self.signal.name)
        self.say(
            f"stopped after update {self.step} of {self.config.run.updates}, which is saved; "
            "the same command with --resume continues"
        )


@contextmanager
def open_run(
    config: Config,
    *,
    resume: str = "",
    numbered: bool = False,
    preparation: Preparation = WITHOUT_TOOLS,
) -> Iterator[Run]:
    """Open a run that is ready to train, see `paw.tools.train.train.train`. Cleans up on exit.

    Raises UserError if memory runs out, naming the settings to change.
    """
    run: Run | None = None
    try:
        with ExitStack() as stack:
            run = _start(config, stack, preparation, resume=resume, numbered=numbered)
            try:
                yield run
            except (Exception, SystemExit) as error:
                run.save_what_is_done(error)
                if run.open_directory.where() == run.directory:  # else the error says where it went
                    last_update = f"update {run.step} of {config.run.updates}"
                    run.say(f"failed after {last_update}: {what_is_saved(run.saved)}")
                raise
    except KeyboardInterrupt:
        if run and run.ranks.first:
            to_stderr(f"stopped at once: {what_is_saved(run.saved)}")
        if not run and os.environ.get("RANK", "0") == "0":
            to_stderr("paw: interrupted while loading")
        raise
    except Exception as error:
        if lost_peer(error):
            raise PeerLostError("another rank has ended, so this one cannot continue") from None
        if not out_of_memory(error):
            raise
        reached = run or RunProgress()
        message = memory_message(
            reached.phase,
            update=reached.step + 1,
            rank=int(os.environ.get("RANK", "0")),
            peak_gib=peak_gib(pick_device(config.model.device)),
            saved=reached.saved,
            engine_keys=find_engine(config.engine.type).memory_keys,
        )
        raise UserError(message) from None


class _Directory(NamedTuple):
    """The directory that a run has claimed."""

    path: Path
    """Absolute, because an environment may change the current folder."""
    config: Config
    """The configuration, with the name of the run."""
    notes: list[str]
    """Messages to report about it."""


def _start(
    config: Config, stack: ExitStack, preparation: Preparation, *, resume: str, numbered: bool
) -> Run:
    """Join the other ranks, claim the directory, and build or restore the parts.

    `stack` closes everything that was opened.
    """
    # This must come before an environment changes the current folder.
    started = {"started": now(), "folder": str(Path.cwd())}
    callbacks = hooks.make_callbacks(
        ["progress", "samples", *config.run.trackers, *config.run.callbacks, "report"]
    )
    device = pick_device(config.model.device)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)

    ranks = _meet(config, device, stack, resume=resume)
    directory = _take_directory(config, ranks, stack, resume=resume, numbered=numbered)
    config = directory.config
    resumed = directory.path if resume else None

    dtype, dtype_notes = choose_dtype(config, device, ranks, resumed=resumed)
    # config.toml keeps "auto", because another machine may choose another dtype.
    config_in_dtype = with_dtype(config, dtype)
    _remove_weights_of_killed_runs(config, ranks)
    factory = _check_environment(config_in_dtype, device, ranks, preparation)
    built = build(
        config_in_dtype,
        factory,
        ranks,
        stack,
        resumed=resumed,
        preparation=preparation,
        message=lambda text: say(text, ranks),
    )
    signal = stack.enter_context(StopSignal())

    run = Run(
        **vars(built),
        config=config,
        ranks=ranks,
        directory=directory.path,
        callbacks=callbacks,
        signal=signal,
        open_directory=stack.enter_context(open_directory(directory.path)),
    )
    run.info = describe_run(config, run.policy, factory, ranks) | built.info | started
    _begin(run, stack, resume=resume, notes=[*directory.notes, *dtype_notes])
    return run


def _begin(run: Run, stack: ExitStack, *, resume: str, notes: list[str]) -> None:
    """Restore the run if it is resumed, open its files, and call `on_start`."""
    if resume:
        _restore(run, chosen="" if resume == "auto" else resume)
    if run.ranks.first:
        _open_files(run, stack, resumes=bool(resume), notes=notes)
    stack.callback(hooks.call_on_end, run)
    hooks.call(run, "on_start")


def _meet(config: Config, device: torch.device, stack: ExitStack, *, resume: str) -> Ranks:
    """Meet the other ranks.

    Raises UserError if they were started with different settings or lack a library they need.
    """
    ranks = join_ranks(
        device,
        peer_timeout_s=config.run.peer_timeout_s,
    )
    stack.callback(ranks.close)
    settings = config.model_dump_json(exclude={"run": {"dir", "name"}})
    ranks.check_agreement(
        f"{settings} resume {resume}",
        "rank {} was started with different settings from rank 0: use the same recipe and options",
    )
    if config.model.shard == "node":
        ranks.check_agreement(
            str(ranks.on_host),
            "model.shard = 'node': rank {}'s machine has a different number of ranks "
            "from rank 0's; start the same number on each, or use --model.shard world",
        )
    ranks.run_on_all(lambda: check_extras(config, device))
    return ranks


def _take_directory(
    config: Config, ranks: Ranks, stack: ExitStack, *, resume: str, numbered: bool
) -> _Directory:
    """Claim the run's directory. Rank 0 locks it until `stack` closes. All ranks must call this."""

    def take() -> tuple[str, list[str]]:
        name, lock_file = take_run_directory(config, resume=resume, numbered=numbered)
        stack.enter_context(lock_file)
        if resume:
            return name, changes(config.run.dir / name, config)
        if name != config.run.name:
            wanted = config.run.dir / config.run.name
            return name, [f"{wanted} belongs to another run: this run is {name}"]
        return name, []

    name, notes = ranks.broadcast_from_rank0(take)
    path = (config.run.dir / name).absolute()
    if ranks.world_size > 1:
        check_shared(path, ranks)
    run_config = config.run.model_copy(update={"name": name})
    named_config = config.model_copy(update={"run": run_config})
    return _Directory(path=path, config=named_config, notes=notes)


def _remove_weights_of_killed_runs(config: Config, ranks: Ranks) -> None:
    if ranks.first:
        for line in remove_abandoned([None, *config.engine.weight_folders]):
            to_stdout(line)


def _check_environment(
    config: Config, device: torch.device, ranks: Ranks, preparation: Preparation
) -> EnvFactory:
    """Return the run's environment, the same on all ranks. First checks that the model fits."""

    def check() -> EnvFactory:
        preparation.check_memory(config, device, ranks)
        return check_environment(config)

    factory = ranks.run_on_all(check)
    if ranks.world_size > 1:
        ranks.check_agreement(
            factory.fingerprint(),
            "rank {} has different games from rank 0: its machine needs the same files for "
            f"env.name = '{config.env.name}'",
        )
    return factory


def _restore(run: Run, *, chosen: str) -> None:
    """Continue from the checkpoint `chosen`, or from the newest one if it is empty."""
    restored = restore(
        run.learners, run.ranks, run.directory / "checkpoints", warn=run.say, chosen=chosen
    )
    if restored is None:
        run.say(f"no checkpoint yet in {run.directory}: starting over")
        return
    path, step, tasks = restored
    run.step = step
    run.saved = step
    run.logged = step
    if tasks is not None:
        run.load_task_state(tasks)
    run.say(f"resumed from {path}")


def _open_files(run: Run, stack: ExitStack, *, resumes: bool, notes: list[str]) -> None:
    """Write config.toml, open run.json and the logs, and print the first lines; on rank 0 only."""
    with writing(run.directory / "config.toml"):
        write_file(run.directory / "config.toml", dump(run.config))

    record = RunRecord(run.info, run.open_directory)
    if resumes:
        record.resume(read_info(run.directory), update=run.step, notes=notes)
    run.record = stack.enter_context(record)
    resume_step = (run.step or STARTING_OVER) if resumes else None
    run.log = stack.enter_context(open_log(run.directory, resume_step=resume_step))
    if run.config.run.log_episodes:
        run.episode_log = EpisodeLog(
            count=run.config.run.log_episodes,
            texts=TokenTexts(run.chat.raw_text),
            by_token=run.critic is not None,
        )

    lines = header_lines(run.directory, run.info, run.config)
    for line in (*lines, *notes, *run.log.lost, *warnings(run.config)):
        run.say(line)


def say(text: str, ranks: Ranks) -> None:
    """Print one line on the first rank's terminal."""
    if ranks.first:
        to_stdout(text)
