"""A run: everything `train` needs, built from a configuration, and everything it leaves in the run directory.

runs/<name>/{config.toml, run.json, metrics.jsonl, samples.jsonl, checkpoints/step_000050/, hf/, plots/, report.html}
"""

import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paw import plugins
from paw.algo.critic import Critic, load_critic
from paw.algo.loss import score
from paw.algo.packing import minibatches
from paw.config import Config
from paw.envs import make_suite
from paw.envs.load import check_reward_max
from paw.errors import LINE_CHARS, UserError, clean
from paw.files import cause, write_file
from paw.ignored import ignored
from paw.model.attention import pick_attention
from paw.model.check import check_path
from paw.model.lora import add_adapters, check_targets, import_peft
from paw.model.optim import make_optimizer
from paw.model.parallel import PeerLostError, Ranks, lost_peer
from paw.model.patches import apply_liger, compile_layers, import_liger
from paw.model.policy import (
    DTYPES,
    Policy,
    load_policy,
    load_tokenizer,
    pick_backend,
    pick_device,
    weights_dtype,
)
from paw.recipe import dump
from paw.rollout.chat import Chat
from paw.rollout.engines import make_engine
from paw.rollout.scheduler import Rollouts
from paw.rollout.success import success_metrics, success_text
from paw.rollout.sync import full_parameters
from paw.state import training_state
from paw.state.about import about, header_lines
from paw.state.changes import changes
from paw.state.claim import claim
from paw.state.export import export, start_model
from paw.state.guards import StopSignal, TrainingStopped, UpdateGuard, memory_message, out_of_memory, what_is_saved
from paw.state.log import MetricsLog
from paw.state.record import RunRecord, now
from paw.state.training_state import Learner
from paw.tools.fit import check_machine
from paw.types import Sample

STARTING_OVER = -1


class Run:
    """The parts of a run in progress, cheap checks first; `train` reads and advances it.

    `stack` takes down in order, whatever happens, what has to be closed.
    """

    step = 0
    """Updates done; the weight version."""
    saved = 0
    """The step of the newest checkpoint."""
    phase = "start"
    """What it is doing: start, or the name of a clock."""
    progress = ""
    """How far that has come, as text: "episodes 3/16"."""
    failed = True
    """Whether it has not ended in order."""

    def __init__(self, config: Config, stack: ExitStack, *, resume: bool, numbered: bool = False):
        self.callbacks = make_callbacks(config)
        if config.lora.rank:
            import_peft()
        if config.run.threads:
            torch.set_num_threads(config.run.threads)
        self.config = config
        device = pick_device(config.model.device)
        if config.model.liger:
            import_liger(device)
        self.ranks = Ranks(device, tasks=config.rollout.tasks, peer_timeout_s=config.run.peer_timeout_s)
        stack.callback(self.ranks.close)
        self.ranks.agree(config.model_dump_json(exclude={"run": {"dir", "name"}}) + f" resume {resume}")
        name, notes = self.ranks.from_first(lambda: self._claim(stack, resume=resume, numbered=numbered))
        self.config = config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        self.directory = (config.run.dir / name).absolute()  # an environment may change the current folder
        self.suite = make_suite(config)
        if config.wm.enabled and config.wm.weight == "adaptive":
            check_reward_max(self.suite, config.env.name)
        self.suite.train_tasks(0, 1, config.run.seed)
        self.suite.eval_tasks(config.env.eval_split, 1, config.eval.seed)
        size = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None
        check_machine(config, gpus=self.ranks.world, gpu_gib=size, on_host=self.ranks.on_host)
        backend = pick_backend(config.model.head_backend, device, config.model.dtype)
        attention = pick_attention(config.model.attention, device, DTYPES[config.model.dtype])
        warmup_started = time.monotonic()
        path = self.ranks.from_first(lambda: start_model(self.directory if resume else None, config, self.say))
        warmup_s = time.monotonic() - warmup_started
        self.tokenizer = load_tokenizer(path)
        self.chat = Chat(self.tokenizer, config.model.chat_template_kwargs)
        self.encode_observation = lru_cache(maxsize=65536)(  # environments repeat themselves
            lambda text: self.chat.observation_ids(text, config.wm.max_tokens)
        )
        options: dict[str, Any] = {
            "dtype": config.model.dtype,
            "device": device,
            "weights": weights_dtype(config),
            "attention": attention,
            "head_backend": backend,
            "empty": not self.ranks.first,
        }
        kept = {"checkpointing": config.model.checkpointing, "offload_activations": config.model.offload_activations}
        self.policy = load_policy(path, place=self.ranks.world == 1, **kept, **options)
        self.reference = self.policy  # with LoRA, its adapters off
        if config.lora.rank:
            check_targets(self.policy.lm, config.lora)
        elif config.policy.kl_coef:
            here = self.ranks.world == 1 and not config.policy.offload_reference
            self.reference = load_policy(path, place=here, check=False, **options).eval().requires_grad_(False)
        models = [self.policy] if self.reference is self.policy else [self.policy, self.reference]
        if config.advantage.estimator == "ppo":
            models.append(load_critic(path, place=self.ranks.world == 1, **kept, **options))
        if config.model.liger:
            for model in models:
                apply_liger(model.lm)
        apart = {"own_weights": self.ranks.world > 1, "check": self.ranks.first}
        self.engine = make_engine(config, policy=self.policy, chat=self.chat, model_path=path, **apart)
        stack.callback(self.engine.close)
        if config.lora.rank:  # after the engine has copied what it needs
            add_adapters(self.policy.lm, config.lora, seed=config.run.seed)
        for model in models:
            if config.model.compile:
                compile_layers(model.lm)
            kept_out = config.policy.offload_reference and model is self.reference is not self.policy
            self.ranks.shard(model, model.dtype, offload=kept_out)
        check_path(self.policy, path)
        self.optimizer = make_optimizer(self.policy.parameters(), config.optim)
        self.critic = Critic(models[-1], config, self.ranks) if config.advantage.estimator == "ppo" else None
        self.guard = UpdateGuard(config.run.max_skipped)
        self.signal = stack.enter_context(StopSignal())
        # After the warm-up, which a cached model has not gone through. A run's draws derive from run.seed without these
        # generators; their states are saved all the same.
        torch.manual_seed(config.run.seed)
        random.seed(config.run.seed)
        np.random.seed(config.run.seed % 2**32)
        self.metrics: dict[str, float] = {}
        """Of the update in progress."""
        self.info = about(self, backend=backend, start=path) | {"started": now(), "warmup_s": round(warmup_s, 1)}
        if resume:
            self.restore()
        self.log: MetricsLog | None = None
        if self.ranks.first:
            try:
                write_file(self.directory / "config.toml", dump(config))
            except OSError as error:
                raise UserError(f"cannot write {self.directory / 'config.toml'}: {cause(error)}") from None
            was = {"resumed_at": self.step, "notes": notes} if resume else {}
            self.record = stack.enter_context(RunRecord(self.directory, self.info, **was))
            cut = (self.step or STARTING_OVER) if resume else None
            self.log = stack.enter_context(MetricsLog(self.directory, resume_step=cut))
            for line in (*header_lines(self), *notes, *self.log.lost, *ignored(config)):
                self.say(line)
        stack.callback(self.call, "on_end")
        self.call("on_start")

    def call(self, hook: str, *given: Any) -> None:
        """Call the hook of every callback that has it."""
        for callback in self.callbacks:
            getattr(callback, hook, lambda *_: None)(self, *given)

    def say(self, text: str) -> None:
        """One line on the first rank's terminal."""
        if self.ranks.first:
            encoding = sys.stdout.encoding or "utf-8"
            print(clean(text, LINE_CHARS).encode(encoding, "replace").decode(encoding), flush=True)

    def counting(self, phase: str) -> Callable[[int, int], None]:
        """A callback (done, total) that keeps `progress`."""

        def show(done: int, total: int) -> None:
            self.progress = f"{phase} {done}/{total}" if done < total else ""

        return show

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Adds the seconds spent inside to `time/<phase>`."""
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

    def score(self, model: Policy, samples: list[Sample]) -> list[tuple[list[float], float]]:
        """`signal.loss.score` of all samples, the batches shared among ranks."""
        temperature, budget = self.config.rollout.temperature, self.config.optim.micro_batch_tokens
        share = (self.ranks.rank, self.ranks.world)
        scored = score(model, samples, temperature=temperature, budget=budget, share=share)
        parts = self.ranks.gather(scored, dict[int, tuple[list[float], float]])
        found = {i: values for part in parts for i, values in part.items()}
        return [found[i] for i in range(len(samples))]

    @contextmanager
    def reference_at_hand(self) -> Iterator[None]:
        """The reference model on the device, where it is otherwise kept in host memory."""
        visits = self.config.policy.offload_reference and self.ranks.world == 1 and self.reference is not self.policy
        if visits:
            self.reference.to(self.policy.device)
        yield
        if visits:
            self.reference.to("cpu")

    def evaluate(self, rollouts: Rollouts) -> None:
        """Play the evaluation games once each; adds `eval/*` to the metrics and a few episodes to samples.jsonl.

        Raises TrainingStopped where every episode failed, after the update has been written down and saved.
        """
        with self.clock("eval"):
            groups, stats = rollouts.evaluation(self.counting("evaluation"))
            found = success_metrics(groups, stats.failed)
            self.metrics |= {f"eval/{name}": value for name, value in found.items()}
            self.call("on_evaluation", groups, self.metrics)
        if stats.failed and not groups:
            self._write_metrics()
            if self.saved != self.step:
                self.save()
            raise TrainingStopped(
                f"stopped at update {self.step}: evaluation: {success_text(found)}; {what_is_saved(self.saved)}"
            )

    def catch_up(self, rollouts: Rollouts) -> None:
        """Evaluate where that is due and the newest line lacks it: before the first update, and after a stop."""
        if self._evaluation_due and not self.ranks.from_first(lambda: self.log and self.log.evaluated(self.step)):
            self.evaluate(rollouts)
            self._write_metrics()

    @property
    def _evaluation_due(self) -> bool:
        every = self.config.eval.every
        return self.step in (0, self.config.run.updates) or bool(every and self.step % every == 0)

    def end_update(self, rollouts: Rollouts, *, tokens: int) -> None:
        """Evaluate where due, write the update's line, then save where due (resuming needs the line).

        A run that was told to stop leaves the evaluation to the one that resumes it.
        """
        last = self.step == self.config.run.updates
        phases = sum(value for key, value in self.metrics.items() if key.startswith("time/"))
        self.metrics["perf/tokens_per_s"] = tokens / max(phases, 1e-9)
        self.metrics["perf/peak_gib"] = peak_gib(self.policy.device)
        if last or (self._evaluation_due and not self.stop_requested()):
            self.evaluate(rollouts)
        self._write_metrics()
        if self.config.run.save_every and self.step % self.config.run.save_every == 0:
            self.save()

    def minibatches(self, samples: list[Sample]) -> Iterator[list[Sample]]:
        """Of each optimizer step of the update, all epochs; policy and critic step on the same ones."""
        for epoch in range(self.config.optim.epochs):
            seed = self.config.run.seed * 1_000_003 + self.step * 31 + epoch
            yield from minibatches(samples, size=self.config.optim.minibatch_rows, seed=seed)

    def _learners(self) -> list[Learner]:
        found = [Learner("", self.policy, self.optimizer, self.guard)]
        if self.critic:
            found.append(Learner("critic_", self.critic.model, self.critic.optimizer, self.critic.guard))
        return found

    def save(self) -> None:
        """Write a checkpoint of weights, optimizer, random states and counters; drop the oldest beyond run.keep."""
        if self.log:
            self.log.sync()
        folder = self.directory / "checkpoints"
        with self.ranks.phase("save"):
            training_state.save(folder, self.step, self._learners(), self.ranks, keep=self.config.run.keep)
        if self.ranks.first:
            self.record.write()
        self.saved = self.step

    def restore(self) -> None:
        """Continue from rank 0's newest checkpoint that verifies; a run stopped before its first one starts over."""
        folder = self.directory / "checkpoints"
        found = training_state.restore(folder, self._learners(), self.ranks, warn=self.say)
        if found is None:
            self.say(f"no checkpoint yet in {self.directory}: starting over")
            return
        self.step, path = found
        self.saved = self.step
        self.say(f"resumed from {path}")

    def _claim(self, stack: ExitStack, *, resume: bool, numbered: bool) -> tuple[str, list[str]]:
        """Take the run directory: (the run's name, what to tell of it)."""
        name, held = claim(self.config, resume=resume, numbered=numbered)
        stack.enter_context(held)
        if resume:
            return name, changes(self.config.run.dir / name, self.config)
        taken = f"{self.config.run.dir / self.config.run.name} is another run's: this one is {name}"
        return name, [taken] if name != self.config.run.name else []

    def finish(self) -> Path:
        """Save what is not saved yet and export to Hugging Face format; returns the path of the report to come."""
        if self.saved != self.step:
            self.save()
        self.optimizer.state.clear()  # room for whole weights
        gathered = self.ranks.gathered(full_parameters(self.policy.lm, once=True))
        weights = {name: tensor for name, tensor in gathered if self.ranks.first}
        report = self.directory / "report.html"
        if self.ranks.first:
            export(self.policy, self.tokenizer, self.directory / "hf", weights, config=self.config, step=self.step)
            whole = self.step == self.config.run.updates
            self.record.end("finished" if whole else "stopped", "" if whole else self.signal.name)
        self.failed = False
        return report

    def _write_metrics(self) -> None:
        if self.log:
            self.log.log(self.step, self.metrics)
        self.call("on_update", self.metrics)
        self.metrics.clear()


def make_callbacks(config: Config) -> list[Any]:
    """Those of every run, and the trackers. Raises UserError for one that is not installed."""
    return [plugins.load("callbacks", name)() for name in ("live", "samples", *config.run.trackers, "report")]


@contextmanager
def open_run(config: Config, *, resume: bool = False, numbered: bool = False) -> Iterator[Run]:
    """A run ready to train, taken down at the end. UserError where memory runs out, naming phase, peak and knob.

    `numbered` gives a new run the next free number after run.name where that is another's.
    """
    run: Run | None = None
    try:
        with ExitStack() as stack:
            run = Run(config, stack, resume=resume, numbered=numbered)
            yield run
    except Exception as error:
        if lost_peer(error):
            raise PeerLostError("another rank has ended, this one cannot go on") from None
        if not out_of_memory(error):
            raise
        at, rank = run or Run, int(os.environ.get("RANK", "0"))
        peak = peak_gib(pick_device(config.model.device))
        message = memory_message(at.phase, update=at.step + 1, rank=rank, peak_gib=peak, saved=at.saved)
        raise UserError(message) from None


def peak_gib(device: torch.device) -> float:
    """Peak memory so far: of the GPU's allocator, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
