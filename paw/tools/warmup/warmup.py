"""`paw warmup`: makes the quickstart model by a supervised warm-up on expert play, and caches it.

The demonstrations are fresh games of the warm-up stream, which shares no game with RL or
evaluation. The expert takes a random action now and then, so the model sees states off the expert's
path. These actions stay in the labels, so the policy starts with the entropy that RL needs to
explore.

If a run has two ranks on one machine, the second measures success while the first continues to
learn. The model is bit for bit the one that a single process makes, so the cache does not depend on
who made it.
"""

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from paw.config.recipe import WARMUP, check_config
from paw.config.sections import Config, WarmupConfig
from paw.distributed.ranks import Ranks
from paw.envs import make_factory
from paw.envs.base import EnvFactory, warmup_tasks
from paw.errors import to_stderr
from paw.io.cache import cache_dir, ensure_cached
from paw.model.policy import Policy
from paw.rollouts.engines.transformers import TransformersEngine
from paw.rollouts.episode import plain
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.success import success_metrics
from paw.rollouts.text.chat import Chat, context_text
from paw.tools.warmup import expert_play, quickstart, supervised_step
from paw.tools.warmup.examiner import Examiner, examine
from paw.tools.warmup.expert_play import demonstrations, example
from paw.tools.warmup.supervised_step import step as train_step
from paw.types import Sample

MADE_BY = (__file__, quickstart.__file__, expert_play.__file__, supervised_step.__file__)
"""Files whose content is part of the cached model's key."""
CORPUS_STRAYS = 0.05
"""Share of stray actions in those turns. The tokenizer needs words for the answers to them too."""
OVERSHOOT = 0.2
"""A success that is this far above warmup.stop_success leaves little to learn. There is a warning.
"""
LR_STEPS = 40
"""Steps over which the learning rate rises to warmup.lr."""
MUON_LR = 2.0
"""Muon's learning rate, as a multiple of AdamW's. Muon's steps are as large as AdamW's."""
CHECK_FROM = 300
"""First step after which success may be measured."""
CHECK_EVERY = 50
"""Steps between two measurements, and between two lines of progress."""
CHECK_GAMES = 256
"""Games of a measurement."""
CHECK_START = 10_000_000
"""Number of the first warm-up game for measuring. The model learns from the games before it."""
CHECK_BATCH_TOKENS = 2048
"""Padded prompt tokens of one forward pass in a measurement. They fit into a CPU's cache.

The run's engine may be of another type, so none of its settings apply here.
"""

Report = Callable[[str], None]
"""Called with each line of progress."""


def warmup(config: Config) -> Path:
    """Return the folder of the model that `model.path = "quickstart"` starts from, made now unless
    cached.

    It can be the `model.path` of another configuration. Raises UserError if the environment has no
    oracle to learn from.
    """
    check_config(config, "paw.warmup")
    return ensure_warm_model(config, make_factory(config), to_stderr)


def ensure_warm_model(
    config: Config, factory: EnvFactory, report: Report, ranks: Ranks | None = None
) -> Path:
    """Return the folder of this configuration's quickstart model, made now unless cached.

    All `ranks` must call it. The first makes the model, on its machine.
    """
    ranks = ranks or Ranks()
    recipe: dict[str, Any] = {
        "code": [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in MADE_BY],
        "warmup": config.warmup.model_dump(mode="json"),
        "env": config.env.model_dump(mode="json", exclude={"processes"}),
        "temperature": config.rollout.temperature,
        "games": factory.fingerprint(),
    }
    if config.envs:
        recipe["envs"] = [
            entry.model_dump(mode="json", exclude={"processes"}) for entry in config.envs
        ]
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    name = f"quickstart-{digest}"

    is_cached = ranks.broadcast_from_rank0(lambda: (cache_dir() / name).is_dir())
    second_rank_examines = not is_cached and ranks.world_size == 2 and ranks.on_host == 2
    if is_cached and ranks.first:
        report(f"warm-up: cached in {cache_dir() / name}")

    def take_part() -> str:
        if not ranks.first:
            if second_rank_examines:
                _examine_for_first_rank(config, factory, ranks)
            return ""
        examiner = Examiner(ranks) if second_rank_examines else None
        try:
            return str(ensure_cached(name, partial(_warm_up, config, factory, report, examiner)))
        finally:
            if examiner:
                examiner.dismiss()

    return Path(ranks.gather_results(take_part, str)[0])


def _warm_up(
    config: Config, factory: EnvFactory, report: Report, examiner: Examiner | None, folder: Path
) -> None:
    """Make the model and write it to `folder`, with a summary in warmup.json."""
    started = time.monotonic()
    turns = config.warmup.corpus_turns
    report(f"warm-up: {turns:,} turns of expert play, whose words are the vocabulary")
    tokenizer = _learn_tokenizer(config, factory)
    lm = quickstart.build_model(tokenizer, config.warmup)
    report(
        f"warm-up: {lm.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary"
    )

    chat = Chat(tokenizer)
    trained = _train(lm, chat, config, factory, report, examiner, started=started)
    quickstart.save(lm, tokenizer, folder)
    summary = trained._asdict() | {"seconds": time.monotonic() - started}
    (folder / WARMUP).write_text(json.dumps(summary, indent=1), encoding="utf-8")


def _examine_for_first_rank(config: Config, factory: EnvFactory, ranks: Ranks) -> None:
    """Measure the models that the first rank sends, on the second."""
    with ExitStack() as stack:

        def prepare() -> tuple[Qwen3ForCausalLM, Callable[[int], float]]:
            tokenizer = _learn_tokenizer(config, factory)  # as the first does at the same time
            lm = quickstart.build_model(tokenizer, config.warmup)
            rollouts = _make_rollouts(lm, Chat(tokenizer), config, factory)
            stack.callback(rollouts.close)
            return lm, lambda step: _measure_success(rollouts, config, step)

        examine(ranks, prepare)


def _learn_tokenizer(config: Config, factory: EnvFactory) -> PreTrainedTokenizerFast:
    turns = demonstrations(
        factory,
        config.env,
        seed=config.warmup.seed,
        random_actions=config.warmup.random_actions,
        stray_actions=CORPUS_STRAYS,
    )
    corpus = list(islice(turns, config.warmup.corpus_turns))
    return quickstart.build_tokenizer(
        prompts=[context_text(turn.prompt) for turn in corpus],
        actions={choice for turn in corpus for choice in turn.choices},
        observations=[turn.observation for turn in corpus],
    )


class _Trained(NamedTuple):
    """How a warm-up ended."""

    steps: int
    loss: float
    success: float
    """Share of the last measurement's games that were won."""


class _Measured(NamedTuple):
    """The model after a step, and its success."""

    step: int
    loss: float
    success: float
    weights: dict[str, Tensor] | None = None
    """None if the model still has them."""


def _train(
    lm: Qwen3ForCausalLM,
    chat: Chat,
    config: Config,
    factory: EnvFactory,
    report: Report,
    examiner: Examiner | None,
    *,
    started: float,
) -> _Trained:
    """Train the model until it wins warmup.stop_success of its games, or for warmup.max_steps."""
    settings = config.warmup
    temperature = config.rollout.temperature

    def progress(step: int, loss: float, success: str = "") -> None:
        seconds = time.monotonic() - started
        report(f"warm-up: step {step}, loss {loss:.3f}, {success}{seconds:.0f} s")

    steps = _optimizer_steps(lm, chat, config, factory, progress)
    if examiner:
        measurements = _measured_by_examiner(lm, steps, examiner)
    else:
        measurements = _measured_here(lm, steps, chat, config, factory)
    trained = _Trained(0, 0.0, 0.0)
    with closing(measurements):
        for step, loss, success, weights in measurements:
            progress(step, loss, f"success {success:.2f} at temperature {temperature:g}, ")
            previous_success = trained.success
            trained = _Trained(step, loss, success)
            # This is a mean of two measurements, because a single one is off by 2.5 points.
            if (success + previous_success) / 2 >= settings.stop_success:
                if weights is not None:
                    lm.load_state_dict(weights)
                _warn_of_overshoot(success, settings, report)
                return trained

    report(
        "warm-up: success stayed below "
        f"warmup.stop_success = {settings.stop_success}; going on with it"
    )
    return trained


def _measured_here(
    lm: Qwen3ForCausalLM,
    steps: Iterator[tuple[int, float]],
    chat: Chat,
    config: Config,
    factory: EnvFactory,
) -> Generator[_Measured, None, None]:
    """Yield the success after each of the steps. They wait for its measurement."""
    with closing(_make_rollouts(lm, chat, config, factory)) as rollouts:
        for step, loss in steps:
            yield _Measured(step, loss, _measure_success(rollouts, config, step))


def _measured_by_examiner(
    lm: Qwen3ForCausalLM, steps: Iterator[tuple[int, float]], examiner: Examiner
) -> Generator[_Measured, None, None]:
    """Yield the success after each of the steps. Meanwhile the model takes the next one."""
    waiting: _Measured | None = None
    for step, loss in steps:
        if waiting:
            yield waiting._replace(success=examiner.success())
        weights = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
        examiner.send(step, weights)
        waiting = _Measured(step, loss, success=0.0, weights=weights)
    if waiting:
        yield waiting._replace(success=examiner.success())


def _optimizer_steps(
    lm: Qwen3ForCausalLM,
    chat: Chat,
    config: Config,
    factory: EnvFactory,
    progress: Callable[[int, float], None],
) -> Iterator[tuple[int, float]]:
    """Take warmup.max_steps optimizer steps.

    Yields (step from 1, its loss) after those whose success is measured. `progress` gets some of
    the others.
    """
    settings = config.warmup
    policy = Policy(lm)
    optimizers = _optimizers(lm, settings)
    batches = _batches(factory, chat, config)
    for step in range(1, settings.max_steps + 1):
        loss = train_step(
            policy,
            optimizers,
            next(batches),
            lr=settings.lr * min(1.0, step / LR_STEPS),
            lm_weight=settings.lm_weight,
            observations=settings.observations,
            by_row=True,
            packing=None,
        )
        if _is_measured(step, settings):
            yield step, loss
        elif step % CHECK_EVERY == 0:
            progress(step, loss)


def _is_measured(step: int, settings: WarmupConfig) -> bool:
    """Whether success is measured after this step."""
    if step == settings.max_steps:
        return True
    return step >= CHECK_FROM and step % CHECK_EVERY == 0


def _warn_of_overshoot(success: float, settings: WarmupConfig, report: Report) -> None:
    if success > settings.stop_success + OVERSHOOT:
        report(
            f"warm-up: success {success:.2f} is well above "
            f"warmup.stop_success = {settings.stop_success:g}: the games are too easy, "
            "or the steps too large (warmup.lr), to stop in time"
        )


def _make_rollouts(
    lm: Qwen3ForCausalLM, chat: Chat, config: Config, factory: EnvFactory
) -> Rollouts:
    """Return rollouts that play the games of measurements with the model's current weights."""
    engine = TransformersEngine(lm, end_ids=chat.end_ids, max_batch_tokens=CHECK_BATCH_TOKENS)
    return Rollouts(factory, engine, chat, config, agent=plain)


def _measure_success(rollouts: Rollouts, config: Config, step: int) -> float:
    """Measure the share of CHECK_GAMES games that the model wins after `step`."""
    seed = config.warmup.seed
    groups, stats = rollouts.play_tasks(
        warmup_tasks(rollouts.factory, CHECK_START, CHECK_GAMES, seed),
        group_size=1,
        temperature=config.rollout.temperature,
        seed=seed,
        stream=f"warmup/{step}",
    )
    return success_metrics(groups, stats.failed).get("success", 0.0)


def _optimizers(lm: nn.Module, settings: WarmupConfig) -> list[torch.optim.Optimizer]:
    """Make AdamW and, with warmup.optimizer = "muon", Muon for the matrices of the layers."""
    weight_decay = 0.01
    layer_matrices = []
    others = []
    for name, parameter in lm.named_parameters():  # a tied head appears as the embedding
        is_matrix = parameter.ndim == 2 and "embed" not in name
        if settings.optimizer == "muon" and is_matrix:
            layer_matrices.append(parameter)
        else:
            others.append(parameter)

    adamw = torch.optim.AdamW(others, lr=settings.lr, betas=(0.9, 0.98), weight_decay=weight_decay)
    if not layer_matrices:
        return [adamw]
    group: dict[str, Any] = {"params": layer_matrices, "scale": MUON_LR}
    return [adamw, Muon([group], {"weight_decay": weight_decay})]


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with adjust_lr_fn="match_rms_adamw", but in float32.

    torch's own version iterates in bfloat16, which many CPUs only emulate. There it takes nearly
    half the time of a warm-up step. All matrices of one shape are updated at once.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                shape = (min(parameter.shape), max(parameter.shape))
                by_shape.setdefault(shape, []).append(parameter)

            for (_, columns), parameters in by_shape.items():
                directions = []  # each with at least as many columns as rows
                for parameter in parameters:
                    direction = self._direction(parameter)
                    is_wide = direction.shape[1] == columns
                    directions.append(direction if is_wide else direction.T)

                changes = _orthogonal(torch.stack(directions))
                for parameter, change in zip(parameters, changes, strict=True):
                    is_wide = parameter.shape[1] == columns
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(
                        change if is_wide else change.T,
                        alpha=-0.2 * math.sqrt(columns) * group["lr"],
                    )

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient with Nesterov's momentum. Updates the parameter's momentum."""
        grad = cast(Tensor, parameter.grad)
        state = self.state[parameter]
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.lerp_(grad, 0.05)
        return grad.lerp(momentum, 0.95)


def _orthogonal(matrices: Tensor) -> Tensor:
    """Approximate the nearest matrices with orthonormal rows, by Muon's Newton-Schulz iteration.

    `matrices` is [n, rows, columns], with rows <= columns.
    """
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x


def _batches(factory: EnvFactory, chat: Chat, config: Config) -> Iterator[list[Sample]]:
    """Yield batches without end. The rows of a batch have similar lengths."""
    settings = config.warmup
    turns = demonstrations(
        factory, config.env, seed=settings.seed, random_actions=settings.random_actions
    )
    rng = random.Random(settings.seed)
    while True:
        rows = []
        for turn in islice(turns, 8 * settings.batch_size):
            row = example(chat, config, turn.prompt, turn.response, turn.observation, turn.tools)
            rows.append(row)
        rows.sort(key=_length)
        batches = []
        for batch_start in range(0, len(rows), settings.batch_size):
            batches.append(rows[batch_start : batch_start + settings.batch_size])
        rng.shuffle(batches)
        yield from batches


def _length(row: Sample) -> int:
    """Return the number of tokens of a row."""
    token_parts = (row.prompt_ids, row.response_ids, row.separator_ids, row.observation_ids)
    return sum(map(len, token_parts))
