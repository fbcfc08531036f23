"""`paw sft`: supervised fine-tuning on expert play or on recorded episodes; also the steps of the warm-up and of RWML.

The loss is on the answer. `lm_weight` adds next-token prediction on the rest of the sequence: the
prompt, and the observation that follows. Checkpoints are kept in OUT/checkpoints, from which the
same command resumes.
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
from paw.rollouts.further import add_result
from paw.rollouts.guard import Guarded, make_threads
from paw.rollouts.marks import conversation
from paw.state import checkpoint
from paw.state.export import export
from paw.state.restore import load, load_optimizer, newest
from paw.state.signals import StopSignal
from paw.state.train_state import optimizer_tensors
from paw.tool_config import SftConfig
from paw.tools.player import resolve
from paw.tools.recorded import read_episodes
from paw.types import Outcome, Reply, Sample, Turn

MAX_FAILED = 100
"""Games in a row that may fail before their first turn; more of them end expert play."""
LOG_S = 10.0
"""Seconds between two lines of progress."""
LOSS = joint(ce, ce)


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
    """The turns of a split's games, without end: the expert's actions, with shares of random and of stray ones.

    A stray action is one that was admissible in the state before; often it has no effect any more.
    A game whose environment fails is abandoned. Raises UserError if too many games in a row fail,
    or if there is no expert.
    """
    rng = random.Random(seed)
    threads = make_threads(factory, env)
    call = threads.call
    environment: Guarded | None = None
    failed = 0
    games = (train_tasks(factory, n, 64, seed, split=split) for n in itertools.count())
    for task in itertools.chain.from_iterable(games):
        done = False
        previous_choices: list[str] | None = None
        while not done:
            try:
                environment = environment or Guarded(call(factory.make), env)
                if previous_choices is None:
                    call(environment.reset, task)
                prompt = call(environment.context)
                choices = call(admissible_responses, environment)
                if previous_choices and rng.random() < stray_actions:
                    response = rng.choice(previous_choices)
                elif choices and rng.random() < random_actions:
                    response = rng.choice(choices)
                else:
                    response = call(environment.oracle)
                outcome = call(environment.step, response)
            except OURS:
                raise
            except NoOracleError as error:
                raise UserError(
                    f"env.name = '{env.name}': {error}, so there is no expert play to learn from"
                ) from None
            except BaseException as error:
                with quietly():
                    if (
                        environment and not threads.given_up
                    ):  # an environment that hangs is not waited for again
                        call(environment.close)
                environment = None
                failed += 1
                if failed > MAX_FAILED:
                    raise UserError(
                        f"expert play: {failed} games in a row failed ({describe(error)})"
                    ) from None
                break
            yield Demonstration(prompt, choices, response, outcome.observation, environment.tools)
            done = outcome.done
            previous_choices = choices
            failed = 0


def example(
    chat: Chat,
    config: Config,
    prompt: Context,
    response: str,
    observation: str = "",
    tools: Sequence[Any] = (),
) -> Sample:
    """A turn to learn from. A prompt of one user message and the observation are cut to the configuration's limits.

    Raises UserError if the chat template does not accept it.
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
    separator = chat.separator_ids if turn.separator_ids is None else turn.separator_ids
    observation_ids = chat.observation_ids(turn.observation, config.wm.max_tokens)
    return Sample(
        group=0,
        trajectory=0,
        step=0,
        prompt_ids=prompt_ids,
        response_ids=turn.response_ids,
        separator_ids=separator,
        observation_ids=observation_ids,
    )


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
    """Take one optimizer step on the mean negative log-likelihood of answer tokens, and return that mean in nats.

    Args:
        lm_weight: weight of the mean negative log-likelihood of the other tokens, which is added.
        observations: whether the other tokens include separator and observation; else they are
            those of the prompt.
        by_row: divide the answers' sum by the number of rows, not by that of answer tokens.
        budget: at most so many tokens go through the fused head at a time; None: all at once, by
            full logits.
    """
    targets = _targets(
        rows,
        lm_weight=lm_weight,
        observations=observations,
        by_row=by_row,
        full=lm_weight > 0 or budget is None,
    )
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss = _backward(policy, targets, budget)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), clip)
    for optimizer in optimizers:
        set_learning_rate(optimizer, lr)
        optimizer.step()
    return loss


class _Targets(NamedTuple):
    """Rows cut into context and target tokens.

    The lists are per row; the inner ones per target token.
    """

    samples: list[Sample]
    """The target tokens are their responses."""
    weights: list[list[float]]
    is_answer: list[list[bool]]


def _targets(
    rows: Sequence[Sample], *, lm_weight: float, observations: bool, by_row: bool, full: bool
) -> _Targets:
    """The targets of a step.

    With `full` all tokens but the first are targets, else the answers alone.
    """
    followed_by = [row.separator_ids + row.observation_ids if observations else [] for row in rows]
    answers = len(rows) if by_row else sum(len(row.response_ids) for row in rows)
    others = sum(len(row.prompt_ids) - 1 for row in rows) + sum(
        map(len, followed_by)
    )  # no first token is predicted
    answer_weight = 1.0 / answers
    other_weight = float(torch.tensor(lm_weight) / max(1, others))  # divided in float32

    targets = _Targets(samples=[], weights=[], is_answer=[])
    for row, following in zip(rows, followed_by, strict=True):
        prompt = row.prompt_ids
        answer = row.response_ids
        context = 1 if full else len(prompt)
        before = len(prompt) - context
        after = following if full else []
        targets.samples.append(
            Sample(
                group=0,
                trajectory=0,
                step=0,
                prompt_ids=prompt[:context],
                response_ids=prompt[context:] + answer + after,
            )
        )
        targets.weights.append(
            [other_weight] * before + [answer_weight] * len(answer) + [other_weight] * len(after)
        )
        targets.is_answer.append([False] * before + [True] * len(answer) + [False] * len(after))
    return targets


def _backward(policy: Policy, targets: _Targets, budget: int | None) -> float:
    """Compute the gradients; returns the answers' part of the loss. `budget` as for `step`."""
    if budget is None:
        return _backward_full_logits(policy, targets)

    loss = 0.0
    batches = micro_batches(
        targets.samples,
        budget=budget,
        with_observation=False,
        device=policy.device,
        quadratic=policy.quadratic,
    )
    for batch in batches:
        weight = torch.tensor(
            [w for i in batch.indices for w in targets.weights[i]], device=policy.device
        )
        flags = [flag for i in batch.indices for flag in targets.is_answer[i]]
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
        loss += float(out.token_loss[is_answer].sum())
    return loss


def _backward_full_logits(policy: Policy, targets: _Targets) -> float:
    longest = max(map(len, targets.weights))
    weight = torch.tensor([row + [0.0] * (longest - len(row)) for row in targets.weights])
    is_answer = torch.tensor(
        [row + [False] * (longest - len(row)) for row in targets.is_answer], dtype=torch.bool
    )
    token_loss = _dense(policy, targets.samples) * weight
    token_loss.sum().backward()
    return float(token_loss.detach()[is_answer].sum())


def _dense(policy: Policy, samples: Sequence[Sample]) -> Tensor:
    """-log p of all tokens but the first, [B, longest - 1], by full logits, which a toy vocabulary allows."""
    rows = [sample.prompt_ids + sample.response_ids for sample in samples]
    longest = max(map(len, rows))
    input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in rows])
    hidden = policy.hidden(input_ids.flatten(), [longest] * len(rows)).view(*input_ids.shape, -1)
    logits = hidden[:, :-1] @ policy.head_weight.T
    return -torch.log_softmax(logits, -1).gather(2, input_ids[:, 1:, None])[..., 0]


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

    With `out`, checkpoints are kept there, and a first Ctrl-C leaves one. Raises UserError if the
    loss is not finite (`key` names the setting to lower), or if a stop was requested.
    """
    optim = config.optim.model_copy(update={"lr": settings.lr})
    if config.lora.rank:
        add_adapters(policy.lm, config.lora, seed=config.run.seed)
    optimizer = make_optimizer(policy.parameters(), optim)
    progress = _Progress(policy, optimizer, out, digest=_digest(rows, config, settings, optim))
    batches = [
        batch
        for epoch in range(settings.epochs)
        for batch in minibatches(
            rows, size=optim.minibatch_samples, seed=config.run.seed * 1_000_003 + epoch
        )
    ]
    total = len(batches)
    first = progress.resume(total)

    started = time.monotonic()
    reported = -math.inf
    done = first
    with StopSignal("step", "the same command goes on") as stop:
        for batch in batches[first:]:
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

            now = time.monotonic()
            if now - reported > LOG_S or done == total or stop.requested:
                reported = now
                seconds_left = (now - started) / (done - first) * (total - done)
                left = f", {seconds_left:.0f} s left" if done < total else ""
                to_stderr(
                    f"fine-tuning: step {done} of {total}, loss {loss:.3f} nats a token{left}"
                )
            if stop.requested and done < total:
                progress.save(done)
                kept = "the same command goes on from there" if out else "nothing was written"
                raise UserError(f"stopped by {stop.name} after step {done} of {total}: {kept}")
            if settings.save_every and done % settings.save_every == 0 and done < total:
                progress.save(done)
    return done


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
                f"--out {self.out}: {path.name} there is of other data or settings; take another folder"
            )
        self.policy.load(tensors["model"])
        load_optimizer(self.optimizer, self.parameters.items(), tensors["optimizer"])
        to_stderr(f"fine-tuning: going on from step {state['step']} of {total}")
        if state.get("dtype", self.dtype) != self.dtype:
            before = shown(state["dtype"])
            to_stderr(
                f"fine-tuning: until here in {before}, from here in {self.dtype} (--model.dtype)"
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
    """Fine-tune a model on expert play of the recipe's training games, or on recorded episodes; returns `out`.

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
    settings = config.sft
    tokenizer = load_tokenizer(path)
    chat = Chat(tokenizer, config.model.chat_template_kwargs)

    if recorded:
        rows = _recorded(recorded, chat, config)
        source = f"episodes of {recorded.name}"
    else:
        turns = demonstrations(
            make_factory(config),
            config.env,
            seed=config.run.seed,
            random_actions=settings.random_actions,
            split=config.env.train_split,
        )
        rows = [
            example(chat, config, turn.prompt, turn.response, turn.observation, turn.tools)
            for turn in itertools.islice(turns, settings.turns)
        ]
        source = f"expert play of {config.env.name}"
    tokens = sum(len(row.prompt_ids + row.response_ids + row.observation_ids) for row in rows)
    dtype = training_dtype(config, pick_device(config.model.device))
    to_stderr(
        f"fine-tuning: {len(rows):,} turns of {source}, {tokens:,} tokens, {settings.epochs} epochs, in {dtype}"
    )

    policy = load_learner(config, path)
    steps = fine_tune(policy, rows, config, settings, out=folder)
    written = export_tuned(policy, tokenizer, folder, config, steps=steps, on=source)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return written


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Fine-tune `options.model`, and print the folder that holds the result."""
    print(
        sft(
            options.model,
            options.recipe,
            out=options.out,
            rollouts=options.rollouts,
            changes=overrides,
        )
    )
    return 0


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
            rows += [
                _recorded_row(turn, chat, config) for turn in trajectory.turns if turn.outcome.valid
            ]
    if not rows:
        raise UserError(
            f"--rollouts {path}: no valid turn of a won episode in it (--sft.won false takes all)"
        )
    return rows


def _recorded_row(turn: Turn, chat: Chat, config: Config) -> Sample:
    row = example(chat, config, turn.prompt, turn.response, turn.observation)
    if any(
        chat.opened + chat.decode(turn.response_ids, calls=calls) == turn.response
        for calls in (False, True)
    ):
        row.prompt_ids = turn.prompt_ids
        row.response_ids = turn.response_ids
        row.separator_ids = chat.separator_ids if turn.separator_ids is None else turn.separator_ids
        row.observation_ids = turn.observation_ids or row.observation_ids
    return row
