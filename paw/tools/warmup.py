"""`paw warmup`: make the quickstart model. A supervised warm-up on expert play of the environment, cached.

The demonstrations are fresh games of the warm-up stream, which shares none with RL or evaluation. Random actions are
executed now and then, so that the model sees states off the expert's path, and they stay in the labels: the policy
starts with the entropy that RL needs to explore.
"""

import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from paw.cache import cache_dir, cached
from paw.config import Config, EnvConfig
from paw.envs.base import EnvFactory, admissible_responses, warmup_tasks
from paw.errors import OURS, UserError, describe, quietly
from paw.model.optim import set_learning_rate
from paw.model.policy import Policy
from paw.rollout.chat import Chat
from paw.rollout.engines.transformers import TransformersEngine
from paw.rollout.episode import plain
from paw.rollout.guard import Guarded, make_threads
from paw.rollout.scheduler import Rollouts
from paw.rollout.success import success_metrics
from paw.tools import quickstart

CORPUS_TURNS = 12_000
CORPUS_STRAYS = 0.05
"""Share of stray actions in the tokenizer's corpus, so that it has words for what the environment says to them."""
Batch = list[tuple[list[int], int, int]]
"""Rows of (token ids, start of the response, end of the response)."""
OVERSHOOT = 0.2
"""Success beyond warmup.stop_success that is reported: little is left to learn."""
CHECK_FROM, CHECK_EVERY = 300, 50
CHECK_GAMES, CHECK_START = 256, 10_000_000
"""Warm-up games from CHECK_START on are for measuring, not for learning."""
MAX_FAILED = 100
"""Games in a row that break before any turn, more of which end the warm-up."""


def ensure_warm_model(config: Config, factory: EnvFactory, report: Callable[[str], None]) -> Path:
    """Folder of the warmed-up quickstart model for this configuration, made now unless it is cached."""
    recipe = {
        "code": [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in (__file__, quickstart.__file__)],
        "warmup": config.warmup.model_dump(mode="json"),
        "env": config.env.model_dump(mode="json"),
        "temperature": config.rollout.temperature,
        "games": factory.fingerprint(),
    }
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    name = f"quickstart-{digest}"
    if (cache_dir() / name).is_dir():
        report(f"warm-up: cached in {cache_dir() / name}")

    def fill(folder: Path) -> None:
        summary = _warm_up(config, factory, folder, report)
        (folder / "warmup.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")

    return cached(name, fill)


class Demonstration(NamedTuple):
    """One turn of expert play."""

    prompt: str
    choices: list[str]
    """Every response that was admissible."""
    response: str
    observation: str
    """What the environment answered."""


def demonstrations(
    factory: EnvFactory, env: EnvConfig, *, seed: int, random_actions: float, stray_actions: float = 0.0
) -> Iterator[Demonstration]:
    """The turns of the warm-up games, without end: the expert's actions, with shares of random and of stray ones.

    A stray action is one that the state before offered; often it does nothing any more. A game whose environment fails
    is left there. Raises UserError where nothing but that happens.
    """
    rng = random.Random(seed)
    threads, environment, failed = make_threads(factory, env), None, 0
    call = threads.call
    for task in itertools.chain.from_iterable(
        warmup_tasks(factory, start, 64, seed) for start in itertools.count(0, 64)
    ):
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
            except BaseException as error:
                with quietly():
                    if environment and not threads.given_up:  # one that hangs is not waited for again
                        call(environment.close)
                environment, failed = None, failed + 1
                if failed > MAX_FAILED:
                    raise UserError(f"warm-up: {failed} games in a row failed ({describe(error)})") from None
                break
            yield Demonstration(prompt, choices, response, outcome.observation)
            done, before, failed = outcome.done, choices, 0


def _warm_up(config: Config, factory: EnvFactory, folder: Path, report: Callable[[str], None]) -> dict[str, float]:
    settings, temperature = config.warmup, config.rollout.temperature
    started = time.monotonic()
    shares = {"random_actions": settings.random_actions, "stray_actions": CORPUS_STRAYS}
    turns = demonstrations(factory, config.env, seed=settings.seed, **shares)
    corpus = list(itertools.islice(turns, CORPUS_TURNS))
    tokenizer = quickstart.build_tokenizer(
        [turn.prompt for turn in corpus],
        {choice for turn in corpus for choice in turn.choices},
        [turn.observation for turn in corpus],
    )
    chat = Chat(tokenizer)
    lm = quickstart.build_model(tokenizer, settings)
    policy = Policy(lm)
    report(f"warm-up: {lm.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary")
    optimizer = torch.optim.AdamW(lm.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)
    engine = TransformersEngine(lm, end_ids=chat.end_ids, max_batch_tokens=config.engine.max_batch_tokens)
    rollouts = Rollouts(factory, engine, chat, config, agent=plain)
    batches = _batches(factory, chat, config)
    step, loss, success = 0, 0.0, 0.0
    for step in range(1, settings.max_steps + 1):
        lr = settings.lr * min(1.0, step / 40)
        loss = _step(policy, optimizer, next(batches), lr=lr, lm_weight=settings.lm_weight)
        if step != settings.max_steps and (step < CHECK_FROM or step % CHECK_EVERY):
            continue
        tasks = warmup_tasks(factory, CHECK_START, CHECK_GAMES, settings.seed)
        groups, stats = rollouts.play(
            tasks, group_size=1, temperature=temperature, seed=settings.seed, stream=f"warmup/{step}"
        )
        success, before = success_metrics(groups, stats.failed).get("success", 0.0), success
        report(
            f"warm-up: step {step}, loss {loss:.3f}, success {success:.2f} at temperature {temperature:g}, "
            f"{time.monotonic() - started:.0f} s"
        )
        if (success + before) / 2 >= settings.stop_success:  # one check alone is off by 2.5 points
            if success > settings.stop_success + OVERSHOOT:
                report(f"warm-up: success {success:.2f} is well above warmup.stop_success = {settings.stop_success:g}: "
                       "the games are too easy, or the steps too large (warmup.lr), to stop in time")  # fmt: skip
            break
    else:
        report(f"warm-up: success stayed below warmup.stop_success = {settings.stop_success}; going on with it")
    rollouts.close()
    quickstart.save(lm, tokenizer, folder)
    return {"steps": step, "loss": loss, "success": success, "seconds": time.monotonic() - started}


def _batches(factory: EnvFactory, chat: Chat, config: Config) -> Iterator[Batch]:
    """Batches without end, rows of like length together."""
    settings = config.warmup
    turns = demonstrations(factory, config.env, seed=settings.seed, random_actions=settings.random_actions)
    rng = random.Random(settings.seed)
    while True:
        rows = []
        for _ in range(8 * settings.batch_size):
            turn = next(turns)
            head, _ = chat.fit_prompt(turn.prompt, config.rollout.max_prompt_tokens)
            answer = chat.response_ids(turn.response)
            target = chat.observation_ids(turn.observation, config.wm.max_tokens)
            rows.append((head + answer + chat.separator_ids + target, len(head), len(head) + len(answer)))
        rows.sort(key=lambda row: len(row[0]))
        cut = [rows[i : i + settings.batch_size] for i in range(0, len(rows), settings.batch_size)]
        rng.shuffle(cut)
        yield from cut


def _step(policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, *, lr: float, lm_weight: float) -> float:
    """One AdamW step: negative log-likelihood of the answer, plus lm_weight times that of everything else."""
    longest = max(len(ids) for ids, _, _ in batch)
    input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _, _ in batch])
    place = torch.arange(1, longest)[None]
    length, start, end = torch.tensor([(len(ids), start, end) for ids, start, end in batch]).T[:, :, None]
    is_answer = (place >= start) & (place < end)
    is_rest = (place < length) & ~is_answer
    hidden = policy.hidden(input_ids.flatten(), [longest] * len(batch)).view(*input_ids.shape, -1)
    logits = hidden[:, :-1] @ policy.head_weight.T  # a toy vocabulary: full logits are small here
    logp = torch.log_softmax(logits, -1).gather(2, input_ids[:, 1:, None])[..., 0]
    answer_loss = -(logp * is_answer).sum() / len(batch)
    rest_loss = -(logp * is_rest).sum() / is_rest.sum()
    set_learning_rate(optimizer, lr)
    optimizer.zero_grad(set_to_none=True)
    (answer_loss + lm_weight * rest_loss).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return float(answer_loss.detach())
