"""`paw sft`: supervised fine-tuning on expert play or on recorded episodes.

The warm-up (`paw warmup`) and RWML (`paw rwml`) use the same training step. The loss is on the
answer. `sft.lm_weight` adds next-token prediction on the rest of the sequence, which is the prompt
and the observation that follows. Checkpoints are kept in OUT/checkpoints, and the same command
resumes from them.
"""

import argparse
import hashlib
import itertools
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paw.algo.packing import Packing
from paw.algo.sequences import minibatches
from paw.checkpoint import files as checkpoint
from paw.checkpoint.export import export
from paw.checkpoint.restore import load, load_optimizer, read_newest
from paw.checkpoint.train_state import optimizer_tensors
from paw.config.sections import Config, OptimConfig
from paw.config.tool_sections import SftConfig
from paw.envs import make_factory
from paw.errors import UserError, short_repr, to_stderr
from paw.model.attention import pick_attention
from paw.model.check import longest_row
from paw.model.dtype import training_dtype, with_dtype
from paw.model.loading import load_policy, load_tokenizer
from paw.model.lora import add_adapters
from paw.model.optim import learning_rate, make_optimizer
from paw.model.policy import (
    DTYPES,
    Policy,
    full_parameters,
    pick_backend,
    pick_device,
    weights_dtype,
)
from paw.rollouts.text.chat import Chat
from paw.rundir.signals import StopSignal
from paw.tools.evaluate.player import resolve
from paw.tools.evaluate.recorded import read_episodes
from paw.tools.warmup.expert_play import demonstrations, example, separator_ids
from paw.tools.warmup.supervised_step import step
from paw.types import Sample, Turn

LOG_S = 10.0
"""Seconds between two lines of progress."""


def fine_tune(
    policy: Policy,
    rows: Sequence[Sample],
    config: Config,
    settings: SftConfig,
    *,
    key: str = "sft.lr",
    out: Path | None = None,
) -> int:
    """Train for `settings.epochs` over the rows. Returns the number of steps.

    With `out`, checkpoints are kept there, and one is written at the first Ctrl-C. Raises UserError
    if the loss is not finite (`key` names the setting to lower), or if a stop was requested.
    """
    optim = config.optim.model_copy(update={"lr": settings.lr})
    if config.lora.rank:
        add_adapters(policy.lm, config.lora, seed=config.run.seed)
    optimizer = make_optimizer(policy.parameters(), optim)
    progress = _Progress(policy, optimizer, out, digest=_digest(rows, config, settings, optim))
    batches = _batches(rows, optim, epochs=settings.epochs, run_seed=config.run.seed)
    total = len(batches)
    done = progress.resume(total)
    log = _ProgressLog(first=done, total=total)

    packing = Packing.of(optim, policy)
    with StopSignal("step", "the same command continues") as stop:
        for batch in batches[done:]:
            loss = step(
                policy,
                [optimizer],
                batch,
                lr=learning_rate(optim, update=done, updates=total),
                clip=optim.grad_clip,
                lm_weight=settings.lm_weight,
                observations=settings.observations,
                packing=packing,
            )
            done += 1
            if not math.isfinite(loss):
                raise UserError(f"fine-tuning diverged at step {done} of {total}; lower {key}")

            log.step(done, loss, always=stop.requested)
            if stop.requested and done < total:
                progress.save(done)
                outcome = "the same command continues" if out else "nothing was written"
                raise UserError(f"stopped by {stop.name} after step {done} of {total}: {outcome}")
            if settings.save_every and done % settings.save_every == 0 and done < total:
                progress.save(done)
    return done


def _batches(
    rows: Sequence[Sample], optim: OptimConfig, *, epochs: int, run_seed: int
) -> list[Sequence[Sample]]:
    """Return the mini-batches of all epochs. Each epoch has its own order of the rows."""
    batches: list[Sequence[Sample]] = []
    for epoch in range(epochs):
        seed = run_seed * 1_000_003 + epoch
        batches += minibatches(rows, size=optim.minibatch_samples, seed=seed)
    return batches


class _ProgressLog:
    """Reports the progress of a fine-tuning on stderr, at most every LOG_S seconds."""

    def __init__(self, *, first: int, total: int) -> None:
        self.first = first
        """Steps done before this start."""
        self.total = total
        self.started = time.monotonic()
        self.reported = -math.inf

    def step(self, done: int, loss: float, *, always: bool) -> None:
        """Report a step if LOG_S seconds have passed, if it is the last one, or with `always`."""
        now = time.monotonic()
        if now - self.reported <= LOG_S and done < self.total and not always:
            return
        self.reported = now
        remaining = ""
        if done < self.total:
            seconds_per_step = (now - self.started) / (done - self.first)
            remaining = f", {seconds_per_step * (self.total - done):.0f} s left"
        to_stderr(
            f"fine-tuning: step {done} of {self.total}, loss {loss:.3f} nats a token{remaining}"
        )


def _digest(rows: Sequence[Sample], config: Config, settings: SftConfig, optim: OptimConfig) -> str:
    """Hash the data and the settings that decide the result."""
    token_ids = [
        (row.prompt_ids.tolist(), row.response_ids.tolist(), row.observation_ids.tolist())
        for row in rows
    ]
    choices = (
        f"{settings.model_dump(exclude={'save_every'})} {optim} {config.lora} {config.run.seed}"
        f" {config.model.path}"
    )
    return hashlib.sha256((repr(token_ids) + choices).encode()).hexdigest()


class _Progress:
    """The checkpoints of a fine-tuning in `out`/checkpoints. Nothing is saved without `out`."""

    def __init__(
        self, policy: Policy, optimizer: torch.optim.Optimizer, out: Path | None, *, digest: str
    ) -> None:
        self.policy = policy
        self.parameters = policy.named_parameters_once()
        self.optimizer = optimizer
        self.out = out
        self.folder = out / "checkpoints" if out else None
        self.digest = digest
        self.dtype = str(policy.dtype).removeprefix("torch.")

    def resume(self, total: int) -> int:
        """Load the newest checkpoint. Returns its step out of `total`, 0 if there is none.

        Raises UserError if it belongs to other data or settings.
        """
        if not self.folder:
            return 0
        newest_checkpoint = read_newest(self.folder, partial(load, like={"model": self.parameters}))
        if not newest_checkpoint:
            return 0
        path, (tensors, state) = newest_checkpoint
        if state.get("sft") != self.digest:
            raise UserError(
                f"--out {self.out}: {path.name} there is from other data or settings; "
                "use another folder"
            )
        self.policy.load(tensors["model"])
        load_optimizer(self.optimizer, self.parameters.items(), tensors["optimizer"])
        to_stderr(f"fine-tuning: going on from step {state['step']} of {total}")
        if state.get("dtype", self.dtype) != self.dtype:
            to_stderr(
                f"fine-tuning: until here in {short_repr(state['dtype'])}, "
                f"from here in {self.dtype} (--model.dtype)"
            )
        return state["step"]

    def save(self, step: int) -> None:
        """Write a checkpoint that replaces the one before."""
        if self.folder:
            optimizer = optimizer_tensors(self.optimizer, self.parameters.items())
            files = {"model": self.parameters, "optimizer": optimizer}
            checkpoint.save(self.folder, step, files, {"sft": self.digest, "dtype": self.dtype})
            checkpoint.prune(self.folder, 1)


def load_learner(config: Config, path: str) -> Policy:
    """Load the model at `path`, ready to be trained with the configuration's settings."""
    device = pick_device(config.model.device)
    config = with_dtype(config, training_dtype(config, device))
    model = config.model
    return load_policy(
        path,
        device=device,
        checkpointing=model.checkpointing,
        offload_activations=model.offload_activations,
        attention=pick_attention(model.attention, device, DTYPES[model.dtype]),
        head_backend=pick_backend(model.head_backend, device, model.dtype, path),
        weights=weights_dtype(config),
        dtype=model.dtype,
        longest=longest_row(config),
    )


def export_tuned(
    policy: Policy, tokenizer: Any, out: Path, config: Config, *, steps: int, on: str
) -> Path:
    """Write the model and its card, which says what it was tuned `on`. Returns the folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    weights = dict(full_parameters(policy.lm, once=True))
    return export(
        policy, tokenizer, out, weights, config=config, step=steps, method=f"fine-tuning on {on}"
    )


def sft(
    model: str | Path,
    recipe: str | Path | Config | None = None,
    *,
    out: str | Path,
    rollouts: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Fine-tune a model on expert play of training games, or recorded episodes. Returns `out`.

    Args:
        model: the model to train: its folder, a Hugging Face name or a run's directory.
        recipe: environment, sizes and optimizer: a recipe's name or path, or a configuration.
            Default: the run's own.
        out: folder to write, in Hugging Face format. After a stop, repeating the call resumes.
        rollouts: episodes written by `paw.rollout` or `paw rollout`, instead of expert play.
        changes: keys of the configuration to change: `{"sft.turns": 256, "sft.lr": 1e-4}`.

    Raises UserError if the model, the recipe, a key or a value cannot be used, or if a stop was
    requested.
    """
    folder = Path(out).absolute()
    recorded = Path(rollouts).absolute() if rollouts else None
    if (folder / "config.json").is_file():
        raise UserError(f"--out {out}: it already contains a model; use another folder")
    overrides = dict(changes or {})
    is_run = (Path(model) / "config.toml").is_file()
    if not is_run:
        overrides = {"model.path": str(model)} | overrides
    config, path = resolve(str(model), recipe, overrides)
    tokenizer = load_tokenizer(path)
    chat = Chat(tokenizer, config.model.chat_template_kwargs)

    if recorded:
        rows = _recorded(recorded, chat, config)
        source = f"episodes of {recorded.name}"
    else:
        rows = _expert_play(chat, config)
        source = f"expert play of {config.env.name}"
    _announce(rows, source, config)

    policy = load_learner(config, path)
    steps = fine_tune(policy, rows, config, config.sft, out=folder)
    written = export_tuned(policy, tokenizer, folder, config, steps=steps, on=source)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return written


def _announce(rows: Sequence[Sample], source: str, config: Config) -> None:
    tokens = 0
    for row in rows:
        tokens += len(row.prompt_ids) + len(row.response_ids) + len(row.observation_ids)
    dtype = training_dtype(config, pick_device(config.model.device))
    to_stderr(
        f"fine-tuning: {len(rows):,} turns of {source}, {tokens:,} tokens, "
        f"{config.sft.epochs} epochs, in {dtype}"
    )


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Fine-tune `options.model`, and print the folder that holds the result."""
    folder = sft(
        options.model,
        options.recipe,
        out=options.out,
        rollouts=options.rollouts,
        changes=overrides,
    )
    print(folder)
    return 0


def _expert_play(chat: Chat, config: Config) -> list[Sample]:
    """Make sft.turns turns of an expert that plays the training games."""
    turns = demonstrations(
        make_factory(config),
        config.env,
        seed=config.run.seed,
        random_actions=config.sft.random_actions,
        split=config.env.train_split,
    )
    rows = []
    for turn in itertools.islice(turns, config.sft.turns):
        row = example(chat, config, turn.prompt, turn.response, turn.observation, turn.tools)
        rows.append(row)
    return rows


def _recorded(path: Path, chat: Chat, config: Config) -> list[Sample]:
    """Read the valid turns of a file's episodes; with sft.won only those of won episodes.

    A turn keeps its token ids if they decode to its text with this tokenizer. Otherwise its text is
    encoded again. Raises UserError if there is no such turn.
    """
    rows = []
    for group in read_episodes(path):
        for trajectory in group.trajectories:
            if config.sft.won and not trajectory.won:
                continue
            for turn in trajectory.turns:
                if turn.outcome.valid:
                    rows.append(_recorded_row(turn, chat, config))
    if not rows:
        raise UserError(
            f"--rollouts {path}: no valid turn of a won episode in it (--sft.won false takes all)"
        )
    return rows


def _recorded_row(turn: Turn, chat: Chat, config: Config) -> Sample:
    row = example(chat, config, turn.prompt, turn.response, turn.observation)
    texts = [chat.decode(turn.response_ids.tolist(), calls=calls) for calls in (False, True)]
    if turn.response in [chat.opened + text for text in texts]:
        row.prompt_ids = turn.prompt_ids
        row.response_ids = turn.response_ids
        row.separator_ids = separator_ids(turn, chat)
        if turn.observation_ids is not None and len(turn.observation_ids):
            row.observation_ids = turn.observation_ids
    return row
