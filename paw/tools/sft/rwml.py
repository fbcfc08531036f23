"""`paw rwml`: the steps of RWML (arXiv 2602.05842) that come before RL on next states.

RL on next states is `paw train` with a next-state recipe. Held-out triplets (envs/next_state.py)
are neither used for fine-tuning nor filtered. The filter drops the triplets that its copy of the
model was fine-tuned on, because it cannot tell how easy they are.
"""

import argparse
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

from matplotlib.figure import Figure

from paw.config.sections import Config
from paw.config.tool_sections import SftConfig
from paw.envs import make_factory
from paw.envs.base import train_tasks
from paw.envs.next_state import (
    NextStateConfig,
    NextStateFactory,
    Triplet,
    answer,
    ask,
    write_triplets,
)
from paw.errors import UserError, to_stderr
from paw.io.files import write_file
from paw.model.dtype import training_dtype, with_dtype
from paw.model.loading import load_tokenizer
from paw.model.policy import Policy
from paw.rollouts.engines.make import make_engine
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.sync import push_weights
from paw.rollouts.text.chat import Chat
from paw.tools.evaluate.player import EPISODES, open_player, report_failures, resolve
from paw.tools.sft import sft
from paw.tools.warmup import expert_play
from paw.types import Group, Task, Trajectory


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Run the stage `options.stage`. Returns the exit code."""
    stages = {"collect": collect, "filter": filter_easy, "sft": supervise}
    return stages[options.stage](options, overrides)


def collect(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Play `rwml.episodes` episodes of each of --tasks training tasks and write their triplets."""
    if options.tasks < 1:
        raise UserError(f"--tasks {options.tasks}: play at least 1")
    model = options.source
    out = options.out.absolute()  # an environment may change the current folder
    config, path = resolve(model, options.recipe, overrides)
    with open_player(config, path) as rollouts:
        tasks = train_tasks(rollouts.factory, 0, options.tasks, config.run.seed)
        groups = _play(rollouts, tasks, config, group_size=config.rwml.episodes, stream="triplets")

    triplets = cut(groups, dedup=config.rwml.dedup)
    turns = sum(len(episode.turns) for group in groups for episode in group.trajectories)
    if not triplets:
        raise UserError(
            f"none of {turns} turns of {model} is a triplet: "
            "each was an invalid action or got no answer"
        )
    write_triplets(out, triplets)
    held_out = sum(triplet.held_out for triplet in triplets)
    to_stderr(f"{out}: {len(triplets)} triplets of {turns} turns, {held_out} held out")
    return 0


def cut(groups: Iterable[Group], *, dedup: bool) -> list[Triplet]:
    """Return triplets of the turns with a valid action and an answer.

    With `dedup`, keeps only the first of equal (history, action, next observation).
    """
    triplets: list[Triplet] = []
    for group in groups:
        for episode in group.trajectories:
            triplets.extend(_triplets_of_episode(episode))
    if not dedup:
        return triplets
    distinct: dict[tuple[Any, str, str], Triplet] = {}
    for triplet in triplets:
        distinct.setdefault((triplet.prompt, triplet.action, triplet.next_state), triplet)
    return list(distinct.values())


def _triplets_of_episode(episode: Trajectory) -> Iterator[Triplet]:
    task = episode.task
    for number, turn in enumerate(episode.turns):
        outcome = turn.outcome
        if outcome.valid and outcome.observation.strip():
            yield Triplet(
                task.id,
                task.kind,
                number,
                turn.prompt,
                turn.response,
                outcome.action,
                outcome.observation,
            )


def filter_easy(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Drop most of the easy triplets, and plot the rates of right predictions.

    A triplet is easy if a copy of the model, fine-tuned on a few triplets, nearly always predicts
    it.
    """
    out = options.out
    config, path, factory = _prepare(options, overrides)
    settings = config.rwml
    learnt = {task.id for task in _sample(factory, settings.sft_share, config)}
    groups = _predict_others(config, path, factory, learnt)
    rates = []
    for group in groups:
        right = sum(episode.won for episode in group.trajectories)
        rates.append(right / len(group.trajectories))
    level = easy_level(rates, share=settings.easy_share, attempts=settings.attempts)

    rng = random.Random(config.run.seed)
    kept_tasks = []
    for group, rate in zip(groups, rates, strict=True):
        if rate < level or rng.random() < settings.keep_easy:
            kept_tasks.append(group.task)
    if not kept_tasks:
        raise UserError(
            f"nothing is left of {len(rates)} triplets, all of them easy; raise rwml.keep_easy"
        )
    write_triplets(out, [task.payload for task in [*kept_tasks, *factory.held_out]])
    _plot(rates, level, settings.attempts, out.with_suffix(".png"))

    easy = sum(rate >= level for rate in rates) / len(rates)
    updates = math.ceil(2 * len(kept_tasks) / config.rollout.tasks)
    print(
        f"fine-tuned on {len(learnt)} triplets; "
        f"predicted {len(rates)} others {settings.attempts} times each"
    )
    print(
        f"right {sum(rates) / len(rates):.1%} of the time; "
        f"easy (right in {level:.0%} or more): {easy:.1%}"
    )
    print(f"kept {len(kept_tasks)} to train on and {len(factory.held_out)} held out: {out}")
    print(f"two epochs of them: --run.updates {updates}")
    return 0


def _predict_others(
    config: Config, path: str, factory: NextStateFactory, learnt: set[str]
) -> list[Group]:
    """Predict the training triplets not in `learnt`, with a model fine-tuned on those in `learnt`.

    `learnt` are ids of tasks.
    """
    chat = Chat(load_tokenizer(path), config.model.chat_template_kwargs)
    policy = sft.load_learner(config, path)
    engine_config = with_dtype(config, training_dtype(config, policy.device))
    with closing(make_engine(engine_config, policy=policy, chat=chat, model_path=path)) as engine:
        engine.sleep()
        learnt_tasks = [task for task in factory.training if task.id in learnt]
        others = [task for task in factory.training if task.id not in learnt]
        fine_tune(policy, chat, learnt_tasks, config)
        push_weights(policy.lm, engine, version=1)
        with closing(Rollouts(factory, engine, chat, config)) as rollouts:
            return _play(rollouts, others, config, group_size=config.rwml.attempts, stream="easy")


def easy_level(rates: Sequence[float], *, share: float, attempts: int) -> float:
    """Return the level from which triplets are easy. About a `share` of the `rates` is at or above
    it.

    It is the multiple of 1 / attempts that comes nearest to that.

    >>> easy_level([1.0, 1.0, 0.9, 0.5, 0.2, 0.0], share=0.3, attempts=10)
    1.0
    """

    def distance(level: float) -> float:
        easy = sum(rate >= level for rate in rates) / len(rates)
        return abs(easy - share)

    levels = [hits / attempts for hits in range(attempts, 0, -1)]
    return min(levels, key=distance)


def supervise(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Fine-tune on a share of the training triplets and export the model.

    With rwml.sft_share as the share, they are the ones that the filter's copy is fine-tuned on.
    """
    share = options.share
    if not 0.0 < share <= 1.0:
        raise UserError(f"--share {share:g}: it must be a share above 0 and at most 1")
    config, path, factory = _prepare(options, overrides)
    tokenizer = load_tokenizer(path)
    policy = sft.load_learner(config, path)
    chat = Chat(tokenizer, config.model.chat_template_kwargs)
    steps = fine_tune(policy, chat, _sample(factory, share, config), config)
    print(sft.export_tuned(policy, tokenizer, options.out, config, steps=steps, on="next states"))
    return 0


def fine_tune(policy: Policy, chat: Chat, tasks: Sequence[Task], config: Config) -> int:
    """Fine-tune on the next states of `tasks`, rwml.sft_epochs times. Returns the step count.

    The loss is the mean cross-entropy of the next state's tokens over a mini-batch.
    """
    env = cast(NextStateConfig, config.env)
    rows = []
    for task in tasks:
        question = ask(task.payload, env)
        next_state = answer(task.payload.next_state, env)
        row = expert_play.example(chat, config, prompt=question, response=next_state)
        row.response_ids = row.response_ids[: config.rollout.max_response_tokens]
        rows.append(row)
    dtype = str(policy.dtype).removeprefix("torch.")
    to_stderr(f"fine-tuning: {len(rows):,} triplets, {config.rwml.sft_epochs} epochs, in {dtype}")
    settings = SftConfig(epochs=config.rwml.sft_epochs, lr=config.rwml.sft_lr)
    return sft.fine_tune(policy, rows, config, settings, key="rwml.sft_lr")


def _prepare(
    options: argparse.Namespace, overrides: dict[str, str]
) -> tuple[Config, str, NextStateFactory]:
    """Return (configuration, model path, factory of the triplets).

    env.think is off, because the answers to imitate contain no thoughts.
    """
    if options.model is None:
        raise UserError(f"paw rwml {options.stage}: say with --model which model learns")
    overrides = overrides | {
        "env.triplets": options.source,
        "model.path": options.model,
        "env.think": "false",
    }
    config, path = resolve(options.model, options.recipe, overrides)
    if config.env.name != "next_state":
        raise UserError(
            f"--recipe {options.recipe}: its env.name is '{config.env.name}'; "
            "give one for 'next_state'"
        )
    factory = make_factory(config)
    assert isinstance(factory, NextStateFactory)
    return config, path, factory


def _sample(factory: NextStateFactory, share: float, config: Config) -> list[Task]:
    """Draw a share of the triplets with the run's seed. Equal shares give equal triplets."""
    count = max(1, round(share * len(factory.training)))
    return random.Random(config.run.seed).sample(factory.training, count)


def _play(
    rollouts: Rollouts, tasks: list[Task], config: Config, *, group_size: int, stream: str
) -> list[Group]:
    groups, stats = rollouts.play_tasks(
        tasks,
        group_size=group_size,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        stream=stream,
        progress=EPISODES,
    )
    report_failures(stats.failures)
    return groups


def _plot(rates: Sequence[float], level: float, attempts: int, path: Path) -> None:
    """Write a histogram of the rates to `path`. Rates from `level` on are the easy ones."""
    shares = []
    colours = []
    for hits in range(attempts + 1):
        count = sum(round(rate * attempts) == hits for rate in rates)
        shares.append(count / len(rates))
        colours.append("#e69f00" if hits / attempts >= level else "#0072b2")

    figure = Figure((5, 2.8), layout="constrained")
    axes = figure.subplots()
    axes.bar(range(attempts + 1), shares, color=colours)
    axes.set(xlabel=f"Right predictions of {attempts} (orange: easy)", ylabel="Share of triplets")
    write_file(path, partial(figure.savefig, dpi=150))
