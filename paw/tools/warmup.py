"""`paw warmup`: make the quickstart model. A supervised warm-up on expert play of the environment, cached.

The demonstrations are fresh games of the warm-up stream, which shares none with RL or evaluation.
Random actions are executed now and then, so that the model sees states off the expert's path, and
they stay in the labels: the policy starts with the entropy that RL needs to explore.
"""

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from paw.cache import cache_dir, cached
from paw.config import Config, WarmupConfig
from paw.envs.base import EnvFactory, warmup_tasks
from paw.model.policy import Policy
from paw.rollouts.chat import Chat, context_text
from paw.rollouts.engines.transformers import TransformersEngine
from paw.rollouts.episode import plain
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.success import success_metrics
from paw.tools import quickstart, sft
from paw.tools.sft import demonstrations, example
from paw.tools.sft import step as train_step
from paw.types import Sample

MADE_BY = (quickstart.__file__, sft.__file__)
CORPUS_TURNS = 12_000
CORPUS_STRAYS = 0.05
"""Share of stray actions in the tokenizer's corpus, so that it has words for what the environment says to them."""
OVERSHOOT = 0.2
"""Success beyond warmup.stop_success that is reported: little is left to learn."""
MUON_LR = 2.0
"""Muon's learning rate over AdamW's, the sizes of whose steps it matches."""
CHECK_FROM, CHECK_EVERY = 300, 50
CHECK_GAMES, CHECK_START = 256, 10_000_000
"""Warm-up games from CHECK_START on are for measuring, not for learning."""


def ensure_warm_model(config: Config, factory: EnvFactory, report: Callable[[str], None]) -> Path:
    """Folder of the warmed-up quickstart model for this configuration, made now unless it is cached."""
    recipe = {
        "code": [
            hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in (__file__, *MADE_BY)
        ],
        "warmup": config.warmup.model_dump(mode="json"),
        "env": config.env.model_dump(mode="json", exclude={"processes"}),
        "temperature": config.rollout.temperature,
        "games": factory.fingerprint(),
    }
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    name = f"quickstart-{digest}"
    if (cache_dir() / name).is_dir():
        report(f"warm-up: cached in {cache_dir() / name}")
    return cached(name, partial(_warm_up, config, factory, report))


def _warm_up(
    config: Config, factory: EnvFactory, report: Callable[[str], None], folder: Path
) -> None:
    settings, temperature = config.warmup, config.rollout.temperature
    started = time.monotonic()
    report(f"warm-up: {CORPUS_TURNS:,} turns of expert play, whose words are the vocabulary")
    shares: dict[str, Any] = {
        "random_actions": settings.random_actions,
        "stray_actions": CORPUS_STRAYS,
    }
    turns = demonstrations(factory, config.env, seed=settings.seed, **shares)
    corpus = list(islice(turns, CORPUS_TURNS))
    tokenizer = quickstart.build_tokenizer(
        [context_text(turn.prompt) for turn in corpus],
        {choice for turn in corpus for choice in turn.choices},
        [turn.observation for turn in corpus],
    )
    chat = Chat(tokenizer)
    lm = quickstart.build_model(tokenizer, settings)
    policy = Policy(lm)
    report(
        f"warm-up: {lm.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary"
    )
    optimizers = _optimizers(lm, settings)
    engine = TransformersEngine(
        lm, end_ids=chat.end_ids, max_batch_tokens=config.engine.max_batch_tokens
    )
    rollouts = Rollouts(factory, engine, chat, config, agent=plain)
    batches = _batches(factory, chat, config)
    options: dict[str, Any] = {
        "lm_weight": settings.lm_weight,
        "observations": settings.observations,
    }
    options |= {"by_row": True, "budget": None}
    step, loss, success = 0, 0.0, 0.0
    for step in range(1, settings.max_steps + 1):
        lr = settings.lr * min(1.0, step / 40)
        loss = train_step(policy, optimizers, next(batches), lr=lr, **options)
        if step != settings.max_steps and (step < CHECK_FROM or step % CHECK_EVERY):
            if step % CHECK_EVERY == 0:
                report(f"warm-up: step {step}, loss {loss:.3f}, {time.monotonic() - started:.0f} s")
            continue
        tasks = warmup_tasks(factory, CHECK_START, CHECK_GAMES, settings.seed)
        groups, stats = rollouts.play(
            tasks,
            group_size=1,
            temperature=temperature,
            seed=settings.seed,
            stream=f"warmup/{step}",
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
        report(
            f"warm-up: success stayed below warmup.stop_success = {settings.stop_success}; going on with it"
        )
    rollouts.close()
    quickstart.save(lm, tokenizer, folder)
    summary = {
        "steps": step,
        "loss": loss,
        "success": success,
        "seconds": time.monotonic() - started,
    }
    (folder / "warmup.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")


def _optimizers(lm: nn.Module, settings: WarmupConfig) -> list[torch.optim.Optimizer]:
    named, decay = dict(lm.named_parameters()), 0.01  # a tied head comes as the embedding
    layers = [
        name
        for name in named
        if named[name].ndim == 2 and "embed" not in name and settings.optimizer == "muon"
    ]
    matrices: Any = {"params": [named.pop(name) for name in layers], "scale": MUON_LR}
    adamw = torch.optim.AdamW(named.values(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=decay)
    return [adamw, Muon([matrices], {"weight_decay": decay})][: 1 + bool(layers)]


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with adjust_lr_fn="match_rms_adamw", in float32 and all matrices of a shape at once.

    torch's own iterates in bfloat16, which many processors only emulate: nearly half of a warm-up
    step's time there.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                shapes.setdefault((min(parameter.shape), max(parameter.shape)), []).append(
                    parameter
                )
            for (_, longer), alike in shapes.items():
                wanted = []
                for parameter in alike:
                    grad = cast(Tensor, parameter.grad)
                    momentum = self.state[parameter].setdefault(
                        "momentum", torch.zeros_like(parameter)
                    )
                    direction = grad.lerp(momentum.lerp_(grad, 0.05), 0.95)
                    wanted.append(direction if direction.shape[1] == longer else direction.T)
                for parameter, change in zip(alike, _orthogonal(torch.stack(wanted)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    change = change if parameter.shape[1] == longer else change.T
                    parameter.add_(change, alpha=-0.2 * math.sqrt(longer) * group["lr"])


def _orthogonal(matrices: Tensor) -> Tensor:
    """[n, rows, columns], rows <= columns, to about the nearest ones of orthonormal rows: Newton-Schulz as Muon's."""
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(
            x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445
        )
    return x


def _batches(factory: EnvFactory, chat: Chat, config: Config) -> Iterator[list[Sample]]:
    """Batches without end, rows of like length together."""
    settings = config.warmup
    turns = demonstrations(
        factory, config.env, seed=settings.seed, random_actions=settings.random_actions
    )
    rng = random.Random(settings.seed)
    while True:
        played = islice(turns, 8 * settings.batch_size)
        rows = [example(chat, config, t.prompt, t.response, t.observation, t.tools) for t in played]
        rows.sort(
            key=lambda row: len(
                row.prompt_ids + row.response_ids + row.separator_ids + row.observation_ids
            )
        )
        cut = [rows[i : i + settings.batch_size] for i in range(0, len(rows), settings.batch_size)]
        rng.shuffle(cut)
        yield from cut
