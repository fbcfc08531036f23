"""`paw rwml`: what RWML (arXiv 2602.05842) needs besides RL on next states (`paw train` with a next-state recipe).

Held-out triplets (envs/next_state.py) are neither fine-tuned on nor thinned out. Those that the filter's copy saw are
left out of its result: nothing is known of how easy they are.
"""

import argparse
import math
import random
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

from matplotlib.figure import Figure

from paw.config import Config
from paw.envs import make_factory
from paw.envs.base import train_tasks
from paw.envs.next_state import NextStateConfig, NextStateFactory, Triplet, answer, ask, write_triplets
from paw.errors import UserError, to_stderr
from paw.files import write_file
from paw.model.dtype import training_dtype, with_dtype
from paw.model.policy import Policy, load_tokenizer
from paw.rollouts.chat import Chat
from paw.rollouts.engines import make_engine
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.sync import push_weights
from paw.tool_config import SftConfig
from paw.tools import sft
from paw.tools.player import EPISODES, open_player, resolve, tell
from paw.types import Group, Task


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    return {"collect": collect, "filter": filter_easy, "sft": supervise}[options.stage](options, overrides)


def collect(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Play `rwml.episodes` episodes of each of --tasks training tasks and write their triplets."""
    if options.tasks < 1:
        raise UserError(f"--tasks {options.tasks}: play at least 1")
    model, out = options.source, options.out.absolute()  # an environment may change the current folder
    config, path = resolve(model, options.recipe, overrides)
    with open_player(config, path) as rollouts:
        games = train_tasks(rollouts.factory, 0, options.tasks, config.run.seed)
        groups = _play(rollouts, games, config, config.rwml.episodes, "triplets")
    triplets = cut(groups, dedup=config.rwml.dedup)
    turns = sum(len(episode.turns) for group in groups for episode in group.trajectories)
    if not triplets:
        raise UserError(f"none of {turns} turns of {model} is a triplet: each was an invalid action or got no answer")
    write_triplets(out, triplets)
    to_stderr(f"{out}: {len(triplets)} triplets of {turns} turns, {sum(t.held_out for t in triplets)} held out")
    return 0


def cut(groups: Iterable[Group], *, dedup: bool) -> list[Triplet]:
    """The turns of episodes with a valid action and an answer; with `dedup`, of equal (h, a, o') the first."""
    turns = (
        Triplet(e.task.id, e.task.kind, n, turn.prompt, turn.response, turn.outcome.action, turn.outcome.observation)
        for group in groups
        for e in group.trajectories
        for n, turn in enumerate(e.turns)
        if turn.outcome.valid and turn.outcome.observation.strip()
    )
    kept: dict[Any, Triplet] = {}
    for n, triplet in enumerate(turns):
        kept.setdefault((triplet.prompt, triplet.action, triplet.next_state) if dedup else n, triplet)
    return list(kept.values())


def filter_easy(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Thin out the triplets that a copy of the model, fine-tuned on a few, predicts nearly always; plot how often."""
    out, (config, path, factory, sample) = options.out, _prepare(options, overrides)
    chat, settings = Chat(load_tokenizer(path), config.model.chat_template_kwargs), config.rwml
    policy = sft.load_learner(config, path)
    in_dtype = with_dtype(config, training_dtype(config, policy.device))
    with closing(make_engine(in_dtype, policy=policy, chat=chat, model_path=path)) as engine:
        engine.sleep()
        learnt = {task.id for task in sample(settings.sft_share)}
        fine_tune(policy, chat, [task for task in factory.training if task.id in learnt], config)
        push_weights(policy.lm, engine, version=1)
        with closing(Rollouts(factory, engine, chat, config)) as rollouts:
            others = [task for task in factory.training if task.id not in learnt]
            groups = _play(rollouts, others, config, settings.attempts, "easy")
    rates = [sum(e.won for e in group.trajectories) / len(group.trajectories) for group in groups]
    level = easy_level(rates, share=settings.easy_share, attempts=settings.attempts)
    rng = random.Random(config.run.seed)
    easy = sum(rate >= level for rate in rates) / len(rates)
    rated = zip(groups, rates, strict=True)
    chosen = [group.task for group, rate in rated if rate < level or rng.random() < settings.keep_easy]
    if not chosen:
        raise UserError(f"nothing is left of {len(rates)} triplets, all of them easy; raise rwml.keep_easy")
    write_triplets(out, [task.payload for task in [*chosen, *factory.held_out]])
    _plot(rates, level, settings.attempts, out.with_suffix(".png"))
    print(f"fine-tuned on {len(learnt)} triplets; predicted {len(rates)} others {settings.attempts} times each")
    print(f"right {sum(rates) / len(rates):.1%} of the time; easy (right in {level:.0%} or more): {easy:.1%}")
    print(f"kept {len(chosen)} to train on and {len(factory.held_out)} held out: {out}")
    print(f"two epochs of them: --run.updates {math.ceil(2 * len(chosen) / config.rollout.tasks)}")
    return 0


def easy_level(rates: Sequence[float], *, share: float, attempts: int) -> float:
    """The rate, a multiple of 1 / attempts, at or above which the share of `rates` is nearest to `share`.

    >>> easy_level([1.0, 1.0, 0.9, 0.5, 0.2, 0.0], share=0.3, attempts=10)
    1.0
    """
    levels = [n / attempts for n in range(attempts, 0, -1)]
    return min(levels, key=lambda level: abs(sum(rate >= level for rate in rates) / len(rates) - share))


def supervise(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Fine-tune on a share of the training triplets (the filter's draw, where it is rwml.sft_share) and export."""
    share, out = options.share, options.out
    if not 0.0 < share <= 1.0:
        raise UserError(f"--share {share:g}: a share of the triplets, above 0 and at most 1")
    config, path, _, sample = _prepare(options, overrides)
    tokenizer, policy = load_tokenizer(path), sft.load_learner(config, path)
    steps = fine_tune(policy, Chat(tokenizer, config.model.chat_template_kwargs), sample(share), config)
    print(sft.export_tuned(policy, tokenizer, out, config, steps=steps, on="next states"))
    return 0


def fine_tune(policy: Policy, chat: Chat, tasks: Sequence[Task], config: Config) -> int:
    """Cross-entropy of the next state's tokens, mean over a mini-batch, rwml.sft_epochs times; returns the steps."""
    rows, env = [], cast(NextStateConfig, config.env)
    for task in tasks:
        row = sft.example(chat, config, ask(task.payload, env), answer(task.payload.next_state, env))
        row.response_ids = row.response_ids[: config.rollout.max_response_tokens]
        rows.append(row)
    dtype = str(policy.dtype).removeprefix("torch.")
    to_stderr(f"fine-tuning: {len(rows):,} triplets, {config.rwml.sft_epochs} epochs, in {dtype}")
    settings = SftConfig(epochs=config.rwml.sft_epochs, lr=config.rwml.sft_lr)
    return sft.fine_tune(policy, rows, config, settings, key="rwml.sft_lr")


def _prepare(options: argparse.Namespace, overrides: dict[str, str]) -> tuple[Any, ...]:
    """(configuration, model path, factory, sample(share) of triplets to train on). No thoughts are imitated."""
    if options.model is None:
        raise UserError(f"paw rwml {options.stage}: say which model learns with --model")
    given = {"env.triplets": options.source, "model.path": options.model, "env.think": "false"}
    config, path = resolve(options.model, options.recipe, overrides | given)
    if config.env.name != "next_state":
        raise UserError(f"--recipe {options.recipe}: its env.name is '{config.env.name}'; give one for 'next_state'")
    factory = make_factory(config)
    assert isinstance(factory, NextStateFactory)

    def sample(share: float) -> list[Task]:
        count = max(1, round(share * len(factory.training)))
        return random.Random(config.run.seed).sample(factory.training, count)

    return config, path, factory, sample


def _play(rollouts: Rollouts, tasks: list[Task], config: Config, group_size: int, stream: str) -> list[Group]:
    options: Any = {"temperature": config.rollout.temperature, "seed": config.run.seed, "stream": stream}
    groups, stats = rollouts.play(tasks, group_size=group_size, progress=EPISODES, **options)
    tell(stats.failures)
    return groups


def _plot(rates: Sequence[float], level: float, attempts: int, path: Path) -> None:
    figure = Figure((5, 2.8), layout="constrained")
    axes = figure.subplots()
    counts = [sum(round(rate * attempts) == n for rate in rates) for n in range(attempts + 1)]
    colours = ["#e69f00" if n / attempts >= level else "#0072b2" for n in range(attempts + 1)]
    axes.bar(range(attempts + 1), [count / len(rates) for count in counts], color=colours)
    axes.set(xlabel=f"Right predictions of {attempts} (orange: easy)", ylabel="Share of triplets")
    write_file(path, partial(figure.savefig, dpi=150))
