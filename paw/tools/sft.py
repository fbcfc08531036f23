"""`paw sft`: supervised fine-tuning on expert play or on recorded episodes.

The warm-up (`paw warmup`) and RWML (`paw rwml`) use its training step too. The loss is on the
answer. `lm_weight` adds next-token prediction on the rest of the sequence: the prompt, and the
observation that follows. Checkpoints are kept in OUT/checkpoints, from which the same command
resumes.
"""

import argparse
import hashlib
import itertools
import math
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paw.algo.loss import TokenBatch, ce, joint, joint_loss
from paw.algo.samples import micro_batches, minibatches
from paw.config import Config, EnvConfig, OptimConfig
from paw.envs import make_factory
from paw.envs.base import EnvFactory, admissible_responses, train_tasks
from paw.errors import (
    OURS,
    EnvironmentFailure,
    NoOracleError,
    UserError,
    describe,
    quietly,
    shown,
    to_stderr,
)
from paw.model.attention import pick_attention
from paw.model.check import longest_row
from paw.model.dtype import training_dtype, with_dtype
from paw.model.loading import load_policy, load_tokenizer
from paw.model.lora import add_adapters
from paw.model.optim import learning_rate, make_optimizer, set_learning_rate
from paw.model.policy import (
    DTYPES,
    Policy,
    full_parameters,
    pick_backend,
    pick_device,
    weights_dtype,
)
from paw.rollouts.chat import Chat, Context
from paw.rollouts.continuation import add_result
from paw.rollouts.guard import CheckedEnv, make_threads
from paw.rollouts.marks import conversation
from paw.state import checkpoint
from paw.state.export import export
from paw.state.restore import load, load_optimizer, newest
from paw.state.signals import StopSignal
from paw.state.train_state import optimizer_tensors
from paw.tool_config import SftConfig
from paw.tools.player import resolve
from paw.tools.recorded import read_episodes
from paw.types import Outcome, Reply, Sample, Task, Turn

MAX_FAILED = 100
"""Games in a row that may fail before their first turn; more of them end expert play."""
LOG_S = 10.0
"""Seconds between two lines of progress."""
LOSS = joint(ce, ce)
"""Cross-entropy of answers and of observations."""


class Demonstration(NamedTuple):
    """One turn of expert play."""

    prompt: Context
    choices: list[str]
    """Every response that was admissible."""
    response: str
    observation: str
    """The environment's answer."""
    tools: list[dict[str, Any]]


def demonstrations(
    factory: EnvFactory,
    env: EnvConfig,
    *,
    seed: int,
    random_actions: float,
    stray_actions: float = 0.0,
    split: str = "warmup",
) -> Iterator[Demonstration]:
    """The turns of an expert that plays the games of a split, without end.

    `random_actions` and `stray_actions` are the shares of turns with another action than the
    expert's: any admissible one, or one that was admissible in the turn before and often has no
    effect any more. A game whose environment fails is abandoned. Raises UserError if too many games
    in a row fail, or if the environment has no expert.
    """
    player = _ExpertPlayer(factory, env, random.Random(seed), random_actions, stray_actions)
    failed_in_a_row = 0
    batches = (train_tasks(factory, n, 64, seed, split=split) for n in itertools.count())
    for task in itertools.chain.from_iterable(batches):
        done = False
        previous_choices: list[str] | None = None
        while not done:
            try:
                turn, done = player.play_turn(task, previous_choices)
            except OURS:
                raise
            except NoOracleError as error:
                raise UserError(
                    f"env.name = '{env.name}': {error}, so there is no expert play to learn from"
                ) from None
            except BaseException as error:
                failed_in_a_row += 1
                player.drop_environment()
                if failed_in_a_row > MAX_FAILED:
                    raise UserError(
                        f"expert play: {failed_in_a_row} games in a row failed ({describe(error)})"
                    ) from None
                break

            yield turn
            previous_choices = turn.choices
            failed_in_a_row = 0


class _ExpertPlayer:
    """Plays turns with an expert's actions, and with shares of random and of stray ones."""

    def __init__(
        self,
        factory: EnvFactory,
        env: EnvConfig,
        rng: random.Random,
        random_actions: float,
        stray_actions: float,
    ) -> None:
        self.factory = factory
        self.env = env
        self.rng = rng
        self.random_actions = random_actions
        self.stray_actions = stray_actions
        self.threads = make_threads(factory, env)
        self.environment: CheckedEnv | None = None

    def play_turn(
        self, task: Task, previous_choices: list[str] | None
    ) -> tuple[Demonstration, bool]:
        """(the next turn, whether the game is over after it).

        `previous_choices` are the choices of the turn before; None starts the game.
        """
        call = self.threads.call
        if self.environment is None:
            self.environment = CheckedEnv(call(self.factory.make), self.env)
        environment = self.environment
        if previous_choices is None:
            call(environment.reset, task)
        prompt = call(environment.context)
        choices = call(admissible_responses, environment)
        if previous_choices and self.rng.random() < self.stray_actions:
            response = self.rng.choice(previous_choices)
        elif choices and self.rng.random() < self.random_actions:
            response = self.rng.choice(choices)
        else:
            response = call(environment.oracle)
        outcome = call(environment.step, response)
        turn = Demonstration(prompt, choices, response, outcome.observation, environment.tools)
        return turn, outcome.done

    def drop_environment(self) -> None:
        """Close the environment; the next turn is played in another one."""
        # If it hangs, closing it would hang too.
        if self.environment and not self.threads.given_up:
            with quietly():
                self.threads.call(self.environment.close)
        self.environment = None


def example(
    chat: Chat,
    config: Config,
    prompt: Context,
    response: str,
    observation: str = "",
    tools: Sequence[Any] = (),
) -> Sample:
    """A turn to learn from, as token ids.

    The observation is cut to wm.max_tokens, and a prompt that is one user message to
    rollout.max_prompt_tokens. Raises UserError if the chat template rejects the conversation.
    """
    try:
        if isinstance(prompt, str) and not tools:
            prompt_ids, _ = chat.fit_prompt(prompt, config.rollout.max_prompt_tokens)
        else:
            prompt_ids = chat.conversation_ids(conversation(prompt), list(tools))
        outcome = Outcome(observation, 0.0, done=False, won=False)
        turn = Turn(
            prompt_ids=prompt_ids,
            response_ids=chat.response_ids(response),
            sampled_logp=[],
            entropy=None,
            prompt="",
            response=response,
            outcome=outcome,
            anchor="",
            version=0,
        )
        if isinstance(response, Reply) and response.calls:
            add_result(chat, turn, response, config.wm.max_tokens)
    except EnvironmentFailure as error:
        raise UserError(str(error)) from None
    return Sample(
        group=0,
        trajectory=0,
        step=0,
        prompt_ids=prompt_ids,
        response_ids=turn.response_ids,
        separator_ids=_separator_ids(turn, chat),
        observation_ids=chat.observation_ids(turn.observation, config.wm.max_tokens),
    )


def _separator_ids(turn: Turn, chat: Chat) -> list[int]:
    """The tokens between a turn's response and its observation: its own, or else the template's."""
    return chat.separator_ids if turn.separator_ids is None else turn.separator_ids


def step(
    policy: Policy,
    optimizers: Sequence[torch.optim.Optimizer],
    rows: Sequence[Sample],
    *,
    lr: float,
    clip: float = 1.0,
    lm_weight: float = 0.0,
    observations: bool = True,
    by_row: bool = False,
    budget: int | None,
) -> float:
    """Take one optimizer step; returns the answers' loss, in nats.

    That is the mean negative log-likelihood of answer tokens. The gradient is that of the answers'
    loss plus `lm_weight` times the mean over the other tokens.

    Args:
        clip: largest norm of the gradient.
        observations: whether the other tokens are those of prompt, separator and observation, or
            of the prompt alone.
        by_row: divide the sum over answer tokens by the number of rows, not of answer tokens.
        budget: tokens that go through the fused head at a time, at most. None: all rows at once,
            by full logits.
    """
    weighted_rows = _weighted_rows(
        rows,
        lm_weight=lm_weight,
        observations=observations,
        by_row=by_row,
        answers_only=lm_weight <= 0 and budget is not None,
    )

    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    if budget is None:
        answer_loss = _backward_full_logits(policy, weighted_rows)
    else:
        answer_loss = _backward_fused_head(policy, weighted_rows, budget)

    torch.nn.utils.clip_grad_norm_(policy.parameters(), clip)
    for optimizer in optimizers:
        set_learning_rate(optimizer, lr)
        optimizer.step()
    return answer_loss


class _WeightedRow(NamedTuple):
    """A row cut into context and target tokens. The lists have one entry for each target token."""

    sample: Sample
    """Its `prompt_ids` are the context, its `response_ids` the target tokens."""
    weights: list[float]
    """Weights of the tokens' negative log-likelihoods in the loss."""
    is_answer: list[bool]


def _weighted_rows(
    rows: Sequence[Sample],
    *,
    lm_weight: float,
    observations: bool,
    by_row: bool,
    answers_only: bool,
) -> list[_WeightedRow]:
    """Cut the rows into context and target tokens.

    With `answers_only` the targets are the answers, else all tokens but the first, which follows
    nothing and so is not predicted.
    """
    continuations = []
    for row in rows:
        continuations.append(row.separator_ids + row.observation_ids if observations else [])

    # The answers' weights sum to 1 and those of the other tokens to lm_weight, over all rows.
    answer_tokens = sum(len(row.response_ids) for row in rows)
    other_tokens = sum(len(row.prompt_ids) - 1 for row in rows)
    other_tokens += sum(len(continuation) for continuation in continuations)
    answer_weight = 1.0 / (len(rows) if by_row else answer_tokens)
    other_weight = float(torch.tensor(lm_weight) / max(1, other_tokens))  # divided in float32

    weighted_rows = []
    for row, continuation in zip(rows, continuations, strict=True):
        answer = row.response_ids
        if answers_only:
            context, before, after = row.prompt_ids, [], []
        else:
            context, before, after = row.prompt_ids[:1], row.prompt_ids[1:], continuation
        sample = Sample(
            group=0,
            trajectory=0,
            step=0,
            prompt_ids=context,
            response_ids=before + answer + after,
        )
        weights = [other_weight] * len(before)
        weights += [answer_weight] * len(answer)
        weights += [other_weight] * len(after)
        is_answer = [False] * len(before) + [True] * len(answer) + [False] * len(after)
        weighted_rows.append(_WeightedRow(sample, weights, is_answer))
    return weighted_rows


def _backward_fused_head(policy: Policy, rows: Sequence[_WeightedRow], budget: int) -> float:
    """Compute the gradients, `budget` tokens at a time; returns the answers' part of the loss."""
    answer_loss = 0.0
    batches = micro_batches(
        [row.sample for row in rows],
        budget=budget,
        with_observation=False,
        device=policy.device,
        quadratic=policy.quadratic,
    )
    for batch in batches:
        weights: list[float] = []
        flags: list[bool] = []
        for index in batch.indices:
            weights += rows[index].weights
            flags += rows[index].is_answer
        weight = torch.tensor(weights, device=policy.device)
        is_answer = torch.tensor(flags, dtype=torch.bool, device=policy.device)

        zero = torch.zeros_like(weight)
        tokens = TokenBatch(
            weight=weight,
            observation=batch.observation,
            advantage=zero,
            old_logp=zero,
            sampled_logp=zero,
        )
        out = joint_loss(policy, batch, tokens, LOSS, temperature=1.0)
        out.loss.backward()
        answer_loss += float(out.token_loss[is_answer].sum())
    return answer_loss


def _backward_full_logits(policy: Policy, rows: Sequence[_WeightedRow]) -> float:
    """Compute the gradients of all rows at once; returns the answers' part of the loss."""
    longest = max(len(row.weights) for row in rows)
    weights = []
    flags = []
    for row in rows:
        padding = longest - len(row.weights)
        weights.append(row.weights + [0.0] * padding)
        flags.append(row.is_answer + [False] * padding)
    weight = torch.tensor(weights)
    is_answer = torch.tensor(flags, dtype=torch.bool)

    token_loss = _negative_log_likelihood(policy, [row.sample for row in rows]) * weight
    token_loss.sum().backward()
    return float(token_loss.detach()[is_answer].sum())


def _negative_log_likelihood(policy: Policy, samples: Sequence[Sample]) -> Tensor:
    """-log p of all tokens but the first, [B, longest - 1], by full logits.

    Their memory is affordable for the small vocabulary of the quickstart model.
    """
    rows = [sample.prompt_ids + sample.response_ids for sample in samples]
    longest = max(len(row) for row in rows)
    input_ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    hidden = policy.hidden(input_ids.flatten(), [longest] * len(rows)).view(*input_ids.shape, -1)
    logits = hidden[:, :-1] @ policy.head_weight.T
    log_probs = torch.log_softmax(logits, -1)
    return -log_probs.gather(2, input_ids[:, 1:, None])[..., 0]


def fine_tune(
    policy: Policy,
    rows: Sequence[Sample],
    config: Config,
    settings: SftConfig,
    *,
    key: str = "sft.lr",
    out: Path | None = None,
) -> int:
    """Train for `settings.epochs` over the rows; returns the number of steps.

    With `out`, checkpoints are kept there, and one is written at the first Ctrl-C. Raises UserError
    if the loss is not finite (`key` names the setting to lower), or if a stop was requested.
    """
    optim = config.optim.model_copy(update={"lr": settings.lr})
    if config.lora.rank:
        add_adapters(policy.lm, config.lora, seed=config.run.seed)
    optimizer = make_optimizer(policy.parameters(), optim)
    progress = _Progress(policy, optimizer, out, digest=_digest(rows, config, settings, optim))
    batches = []
    for epoch in range(settings.epochs):
        seed = config.run.seed * 1_000_003 + epoch
        batches += minibatches(rows, size=optim.minibatch_samples, seed=seed)
    total = len(batches)
    done = progress.resume(total)
    log = _ProgressLog(first=done, total=total)

    with StopSignal("step", "the same command goes on") as stop:
        for batch in batches[done:]:
            loss = step(
                policy,
                [optimizer],
                batch,
                lr=learning_rate(optim, update=done, updates=total),
                clip=optim.grad_clip,
                lm_weight=settings.lm_weight,
                observations=settings.observations,
                budget=optim.micro_batch_tokens,
            )
            done += 1
            if not math.isfinite(loss):
                raise UserError(f"fine-tuning diverged at step {done} of {total}; lower {key}")

            log.step(done, loss, always=stop.requested)
            if stop.requested and done < total:
                progress.save(done)
                kept = "the same command goes on from there" if out else "nothing was written"
                raise UserError(f"stopped by {stop.name} after step {done} of {total}: {kept}")
            if settings.save_every and done % settings.save_every == 0 and done < total:
                progress.save(done)
    return done


class _ProgressLog:
    """Reports on stderr how far a fine-tuning is, at most every LOG_S seconds."""

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
        left = ""
        if done < self.total:
            seconds_per_step = (now - self.started) / (done - self.first)
            left = f", {seconds_per_step * (self.total - done):.0f} s left"
        to_stderr(f"fine-tuning: step {done} of {self.total}, loss {loss:.3f} nats a token{left}")


def _digest(rows: Sequence[Sample], config: Config, settings: SftConfig, optim: OptimConfig) -> str:
    """A hash of the data and the settings that decide the result."""
    data = repr([(row.prompt_ids, row.response_ids, row.observation_ids) for row in rows])
    choices = (
        f"{settings.model_dump(exclude={'save_every'})} {optim} {config.lora} {config.run.seed}"
        f" {config.model.path}"
    )
    return hashlib.sha256((data + choices).encode()).hexdigest()


class _Progress:
    """The checkpoints of a fine-tuning in `out`/checkpoints; nothing is saved without `out`."""

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
        """Load the newest checkpoint; returns its step out of `total`, 0 if there is none.

        Raises UserError if it belongs to other data or settings.
        """
        if not self.folder:
            return 0
        newest_checkpoint = newest(self.folder, partial(load, like={"model": self.parameters}))
        if not newest_checkpoint:
            return 0
        path, (tensors, state) = newest_checkpoint
        if state.get("sft") != self.digest:
            raise UserError(
                f"--out {self.out}: {path.name} there is of other data or settings; "
                "take another folder"
            )
        self.policy.load(tensors["model"])
        load_optimizer(self.optimizer, self.parameters.items(), tensors["optimizer"])
        to_stderr(f"fine-tuning: going on from step {state['step']} of {total}")
        if state.get("dtype", self.dtype) != self.dtype:
            to_stderr(
                f"fine-tuning: until here in {shown(state['dtype'])}, "
                f"from here in {self.dtype} (--model.dtype)"
            )
        return state["step"]

    def save(self, step: int) -> None:
        """Write a checkpoint in place of the one before."""
        if self.folder:
            optimizer = optimizer_tensors(self.optimizer, self.parameters.items())
            files = {"model": self.parameters, "optimizer": optimizer}
            checkpoint.save(self.folder, step, files, {"sft": self.digest, "dtype": self.dtype})
            checkpoint.prune(self.folder, 1)


def load_learner(config: Config, path: str) -> Policy:
    """The model at `path`, ready to be trained with the configuration's settings."""
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
    """Write the model and its card to `out`; returns the folder."""
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
    """Fine-tune a model on expert play of training games, or on recorded episodes; returns `out`.

    Args:
        model: the model to train: its folder, a Hugging Face name or a run's directory.
        recipe: environment, sizes and optimizer: a recipe's name or path, or a configuration.
            Default: the run's own.
        out: folder to write, in Hugging Face format. After a stop the same call resumes from there.
        rollouts: episodes written by `paw.rollout` or `paw rollout`, instead of expert play.
        changes: keys of the configuration to change: `{"sft.turns": 256, "sft.lr": 1e-4}`.

    Raises UserError if the model, the recipe, a key or a value cannot be used, or if a stop was
    requested.
    """
    folder = Path(out).absolute()
    recorded = Path(rollouts).absolute() if rollouts else None
    if (folder / "config.json").is_file():
        raise UserError(f"--out {out}: it holds a model already; take another folder")
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
    tokens = sum(len(row.prompt_ids + row.response_ids + row.observation_ids) for row in rows)
    dtype = training_dtype(config, pick_device(config.model.device))
    to_stderr(
        f"fine-tuning: {len(rows):,} turns of {source}, {tokens:,} tokens, "
        f"{config.sft.epochs} epochs, in {dtype}"
    )

    policy = load_learner(config, path)
    steps = fine_tune(policy, rows, config, config.sft, out=folder)
    written = export_tuned(policy, tokenizer, folder, config, steps=steps, on=source)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return written


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
    """sft.turns turns of an expert that plays the training games."""
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
    """The valid turns of a file's episodes; with sft.won only those of won episodes.

    A turn keeps its token ids if they decode to its text with this tokenizer; else its text is
    encoded. Raises UserError if there is no such turn.
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
    texts = [chat.decode(turn.response_ids, calls=calls) for calls in (False, True)]
    if turn.response in [chat.opened + text for text in texts]:
        row.prompt_ids = turn.prompt_ids
        row.response_ids = turn.response_ids
        row.separator_ids = _separator_ids(turn, chat)
        row.observation_ids = turn.observation_ids or row.observation_ids
    return row
