"""`paw sft`: supervised fine-tuning on expert play or on recorded episodes; also the steps of the warm-up and of RWML.

The loss is on the answer; `lm_weight` adds next-token prediction on what else the sequence holds: the prompt, and what
the environment said next. What is on the way lies in OUT/checkpoints, from which the same command goes on.
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
from paw.config import Config, EnvConfig
from paw.envs import make_factory
from paw.envs.base import EnvFactory, admissible_responses, train_tasks
from paw.errors import OURS, EnvironmentFailure, NoOracleError, UserError, describe, quietly, shown, to_stderr
from paw.model.attention import pick_attention
from paw.model.check import longest_row
from paw.model.dtype import training_dtype, with_dtype
from paw.model.lora import add_adapters
from paw.model.optim import learning_rate, make_optimizer, set_learning_rate
from paw.model.policy import (
    DTYPES,
    Policy,
    full_parameters,
    load_policy,
    load_tokenizer,
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
"""Games in a row that break before any turn, more of which end expert play."""
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
    """What the environment answered."""
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

    A stray action is one that the state before offered; often it does nothing any more. A game whose environment fails
    is left there. Raises UserError where nothing but that happens, and where there is no expert.
    """
    rng = random.Random(seed)
    threads, environment, failed = make_threads(factory, env), None, 0
    call = threads.call
    games = (train_tasks(factory, n, 64, seed, split=split) for n in itertools.count())
    for task in itertools.chain.from_iterable(games):
        done, before = False, None
        while not done:
            try:
                environment = environment or Guarded(call(factory.make), env)
                if before is None:
                    call(environment.reset, task)
                prompt, choices = call(environment.context), call(admissible_responses, environment)
                if before and rng.random() < stray_actions:
                    response = rng.choice(before)
                elif choices and rng.random() < random_actions:
                    response = rng.choice(choices)
                else:
                    response = call(environment.oracle)
                outcome = call(environment.step, response)
            except OURS:
                raise
            except NoOracleError as error:
                raise UserError(f"env.name = '{env.name}': {error}, so there is no expert play to learn from") from None
            except BaseException as error:
                with quietly():
                    if environment and not threads.given_up:  # one that hangs is not waited for again
                        call(environment.close)
                environment, failed = None, failed + 1
                if failed > MAX_FAILED:
                    raise UserError(f"expert play: {failed} games in a row failed ({describe(error)})") from None
                break
            yield Demonstration(prompt, choices, response, outcome.observation, environment.tools)
            done, before, failed = outcome.done, choices, 0


def example(
    chat: Chat, config: Config, prompt: Context, response: str, observation: str = "", tools: Sequence[Any] = ()
) -> Sample:
    """A turn to learn from; one user message and the observation are cut to the limits of the configuration. Raises
    UserError if the chat template does not take it."""
    try:
        if isinstance(prompt, str) and not tools:
            prompt_ids, _ = chat.fit_prompt(prompt, config.rollout.max_prompt_tokens)
        else:
            prompt_ids = chat.conversation_ids(conversation(prompt), list(tools))
        outcome = Outcome(observation, 0.0, done=False, won=False)
        turn = Turn(prompt_ids, chat.response_ids(response), [], None, "", response, outcome, "", version=0)
        if isinstance(response, Reply) and response.calls:
            add_result(chat, turn, response, config.wm.max_tokens)
    except EnvironmentFailure as error:
        raise UserError(str(error)) from None
    separator = chat.separator_ids if turn.separator_ids is None else turn.separator_ids
    observation_ids = chat.observation_ids(turn.observation, config.wm.max_tokens)
    return Sample(0, 0, 0, prompt_ids, turn.response_ids, separator, observation_ids)


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
    """One optimizer step: the mean negative log-likelihood of answer tokens, which it returns (nats; `by_row`: of whole
    answers), plus `lm_weight` times that of prompts and, with `observations`, of what follows the answers.

    At most `budget` tokens go through the fused head at a time; None: all at once, by full logits.
    """
    rest_of = (lambda row: row.separator_ids + row.observation_ids) if observations else (lambda row: [])
    texts = [(row.prompt_ids, row.response_ids, rest_of(row)) for row in rows]
    answers = len(rows) if by_row else sum(len(answer) for _, answer, _ in texts)
    rest = sum(len(prompt) - 1 + len(said) for prompt, _, said in texts)  # nothing predicts a first token
    other = -float(torch.tensor(lm_weight) / max(1, rest))  # the sign tells it from an answer's weight
    samples, weights, whole = [], list[list[float]](), lm_weight > 0 or budget is None
    for prompt, answer, said in texts:
        start, said = (1, said) if whole else (len(prompt), [])
        samples.append(Sample(0, 0, 0, prompt[:start], prompt[start:] + answer + said))
        weights.append([other] * (len(prompt) - start) + [1.0 / answers] * len(answer) + [other] * len(said))
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    if budget is None:
        longest = max(map(len, weights))
        weight = torch.tensor([of + [0.0] * (longest - len(of)) for of in weights])
        token_loss = _dense(policy, samples) * weight.abs()
        token_loss.sum().backward()
        loss = float(token_loss.detach()[weight > 0].sum())
    else:
        loss, sizes = 0.0, {"budget": budget, "device": policy.device, "quadratic": policy.quadratic}
        for batch in micro_batches(samples, with_observation=False, **sizes):
            weight = torch.tensor([w for i in batch.indices for w in weights[i]], device=policy.device)
            zero = torch.zeros_like(weight)
            tokens = TokenBatch(weight.abs(), batch.observation, zero, zero, zero)
            out = joint_loss(policy, batch, tokens, LOSS, temperature=1.0)
            out.loss.backward()
            loss += float(out.token_loss[weight > 0].sum())
    torch.nn.utils.clip_grad_norm_(policy.parameters(), clip)
    for optimizer in optimizers:
        set_learning_rate(optimizer, lr)
        optimizer.step()
    return loss


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
    """`settings.epochs` over the rows; returns the steps. With `out`, checkpoints lie there meanwhile, and a first
    Ctrl-C leaves one. UserError where the loss is no number (`key` is what to lower), or when told to stop."""
    optim = config.optim.model_copy(update={"lr": settings.lr})
    if config.lora.rank:
        add_adapters(policy.lm, config.lora, seed=config.run.seed)
    optimizer, named = make_optimizer(policy.parameters(), optim), policy.named_parameters_once()
    batches = [
        batch
        for epoch in range(settings.epochs)
        for batch in minibatches(rows, size=optim.minibatch_samples, seed=config.run.seed * 1_000_003 + epoch)
    ]
    about = repr([(row.prompt_ids, row.response_ids, row.observation_ids) for row in rows])
    about += (
        f"{settings.model_dump(exclude={'save_every'})} {optim} {config.lora} {config.run.seed} {config.model.path}"
    )
    digest = hashlib.sha256(about.encode()).hexdigest()
    dtype = str(policy.dtype).removeprefix("torch.")
    folder, done = out and out / "checkpoints", 0
    if folder and (found := newest(folder, partial(load, like={"model": named}))):
        path, (tensors, state) = found
        if state.get("sft") != digest:
            raise UserError(f"--out {out}: {path.name} there is of other data or settings; take another folder")
        policy.load(tensors["model"])
        load_optimizer(optimizer, named.items(), tensors["optimizer"])
        done = state["step"]
        to_stderr(f"fine-tuning: going on from step {done} of {len(batches)}")
        if state.get("dtype", dtype) != dtype:
            to_stderr(f"fine-tuning: until here in {shown(state['dtype'])}, from here in {dtype} (--model.dtype)")

    def save(at: int) -> None:
        if folder:
            files = {"model": named, "optimizer": optimizer_tensors(optimizer, named.items())}
            checkpoint.save(folder, at, files, {"sft": digest, "dtype": dtype})
            checkpoint.prune(folder, 1)

    options: dict[str, Any] = {"lm_weight": settings.lm_weight, "observations": settings.observations}
    options |= {"clip": optim.grad_clip, "budget": optim.micro_batch_tokens}
    started, last, told = time.monotonic(), done, -math.inf
    with StopSignal("step", "the same command goes on") as stop:
        for n, batch in enumerate(batches[done:], done):
            lr = learning_rate(optim, update=n, updates=len(batches))
            loss, last = step(policy, [optimizer], batch, lr=lr, **options), n + 1
            if not math.isfinite(loss):
                raise UserError(f"fine-tuning diverged at step {last} of {len(batches)}; lower {key}")
            now = time.monotonic()
            if now - told > LOG_S or last == len(batches) or stop.requested:
                pace, told = (now - started) / (last - done), now
                left = f", {pace * (len(batches) - last):.0f} s left" if last < len(batches) else ""
                to_stderr(f"fine-tuning: step {last} of {len(batches)}, loss {loss:.3f} nats a token{left}")
            if stop.requested and last < len(batches):
                save(last)
                kept = "the same command goes on from there" if out else "nothing was written"
                raise UserError(f"stopped by {stop.name} after step {last} of {len(batches)}: {kept}")
            if settings.save_every and last % settings.save_every == 0 and last < len(batches):
                save(last)
    return last


def load_learner(config: Config, path: str) -> Policy:
    """The model of that path, to be trained as the configuration says."""
    device = pick_device(config.model.device)
    config = with_dtype(config, training_dtype(config, device))
    model = config.model
    options: Any = {"checkpointing": model.checkpointing, "offload_activations": model.offload_activations}
    options |= {"attention": pick_attention(model.attention, device, DTYPES[model.dtype])}
    options |= {"head_backend": pick_backend(model.head_backend, device, model.dtype, path)}
    options |= {"weights": weights_dtype(config), "dtype": model.dtype, "longest": longest_row(config)}
    return load_policy(path, device=device, **options)


def export_tuned(policy: Policy, tokenizer: Any, out: Path, config: Config, *, steps: int, on: str) -> Path:
    """Write the model and its card to `out`; returns the folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    weights = dict(full_parameters(policy.lm, once=True))
    return export(policy, tokenizer, out, weights, config=config, step=steps, method=f"fine-tuning on {on}")


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
        model: what learns: a model's folder, a Hugging Face name or a run's directory.
        recipe: environment, sizes and optimizer: a recipe's name or path, or a configuration. Default: the run's own.
        out: folder to write, in Hugging Face format. After a stop the same call goes on from there.
        rollouts: episodes written by `paw.rollout` or `paw rollout`, in place of expert play.
        changes: keys of the configuration to change: `{"sft.turns": 256, "sft.lr": 1e-4}`.

    Raises UserError for a model, recipe, key or value that does not go, and if it is told to stop.
    """
    folder = Path(out).absolute()
    recorded = Path(rollouts).absolute() if rollouts else None
    if (folder / "config.json").is_file():
        raise UserError(f"--out {out}: it holds a model already; take another folder")
    own = {} if (Path(model) / "config.toml").is_file() else {"model.path": str(model)}  # or a run's
    config, path = resolve(str(model), recipe, own | dict(changes or {}))
    settings, tokenizer = config.sft, load_tokenizer(path)
    chat = Chat(tokenizer, config.model.chat_template_kwargs)
    if recorded:
        rows, source = _recorded(recorded, chat, config), f"episodes of {recorded.name}"
    else:
        play = {"seed": config.run.seed, "random_actions": settings.random_actions, "split": config.env.train_split}
        turns = itertools.islice(demonstrations(make_factory(config), config.env, **play), settings.turns)
        rows = [example(chat, config, t.prompt, t.response, t.observation, t.tools) for t in turns]
        source = f"expert play of {config.env.name}"
    tokens = sum(len(row.prompt_ids + row.response_ids + row.observation_ids) for row in rows)
    dtype = training_dtype(config, pick_device(config.model.device))
    to_stderr(f"fine-tuning: {len(rows):,} turns of {source}, {tokens:,} tokens, {settings.epochs} epochs, in {dtype}")
    policy = load_learner(config, path)
    steps = fine_tune(policy, rows, config, settings, out=folder)
    written = export_tuned(policy, tokenizer, folder, config, steps=steps, on=source)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return written


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Fine-tune `options.model`, and print the folder that holds the result."""
    print(sft(options.model, options.recipe, out=options.out, rollouts=options.rollouts, changes=overrides))
    return 0


def _recorded(path: Path, chat: Chat, config: Config) -> list[Sample]:
    """The valid turns of a file's episodes, unless sft.won is off of those that were won: by their token ids where
    these are of this tokenizer, else by their texts."""
    rows = []
    for group in read_episodes(path):
        for trajectory in group.trajectories:
            for turn in trajectory.turns if trajectory.won or not config.sft.won else ():
                if not turn.outcome.valid:
                    continue
                row = example(chat, config, turn.prompt, turn.response, turn.observation)
                texts = (chat.opened + chat.decode(turn.response_ids, calls=calls) for calls in (False, True))
                if turn.response in texts:
                    row.prompt_ids, row.response_ids = turn.prompt_ids, turn.response_ids
                    row.separator_ids = chat.separator_ids if turn.separator_ids is None else turn.separator_ids
                    row.observation_ids = turn.observation_ids or row.observation_ids
                rows.append(row)
    if not rows:
        raise UserError(f"--rollouts {path}: no valid turn of a won episode in it (--sft.won false takes all)")
    return rows
