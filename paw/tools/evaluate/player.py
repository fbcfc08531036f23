"""`paw rollout`, and `paw eval` of a local model.

The model comes from a training run, a folder or a Hugging Face name.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from paw.config.recipe import load
from paw.config.sections import Config
from paw.envs import make_factory
from paw.envs.base import EnvFactory
from paw.errors import UserError, clean, masked, progress, to_stderr
from paw.io.files import writing
from paw.model.check import longest_row
from paw.model.dtype import pick_dtype, with_dtype
from paw.model.loading import load_policy, load_tokenizer
from paw.model.policy import pick_device
from paw.rollouts.attempts import attempt_lines, evaluation_metrics, shares_by_kind
from paw.rollouts.engines import find_engine
from paw.rollouts.engines.make import make_engine
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.success import success_metrics, success_text
from paw.rollouts.sync import push_weights
from paw.rollouts.text.chat import Chat
from paw.tools.evaluate.played import load_played
from paw.tools.evaluate.results import kind_lines, kind_rows
from paw.tools.evaluate.turns import write_turns
from paw.tools.export import export_run
from paw.tools.train.preparation import start_model
from paw.types import Group

EPISODES = partial(progress, "episodes")
"""Callback that shows how many episodes have ended."""


def evaluate_model(config: Config, path: str) -> dict[str, Any]:
    """Play `eval.games` held-out games with the model at `path`.

    Returns success with its interval, overall, by kind of task and by environment. With several
    `eval.attempts`, also pass@k and best-of-k.
    """
    with open_player(config, path) as rollouts:
        groups, stats = rollouts.evaluation(EPISODES)
        report_failures(stats.failures)
        source = rollouts.factory.fingerprint()
    attempts = config.eval.attempts
    metrics = evaluation_metrics(groups, stats.failed, attempts=attempts)
    if stats.context_full:
        metrics["context_full"] = stats.context_full
    if config.envs:
        metrics["envs"] = list(config.environments)
    return {
        "model": path,
        "source": masked(source),
        "temperature": config.eval.temperature,
        **metrics,
        "kinds": kind_rows(shares_by_kind(groups, stats.failed, attempts=attempts)),
    }


def evaluation_text(summary: dict[str, Any]) -> str:
    """Return the result of `evaluate_model` as text for people."""
    lines = [
        f"{summary['model']} on {clean(summary['source'])}, temperature {summary['temperature']:g}",
        f"success {success_text(summary)}",
    ]
    if "success" in summary:
        lines.append(f"95 % interval {summary['ci_low']:.1%} to {summary['ci_high']:.1%}")
        lines += attempt_lines(summary)
        lines += kind_lines(summary["kinds"])
        score = f"mean score {summary['score']:.3f}, " if "score" in summary else ""
        lines.append(
            f"{score}mean turns {summary['steps']:.1f}, "
            f"valid actions {summary['valid_actions']:.1%}"
        )
    if "context_full" in summary:
        lines.append(f"{summary['context_full']} episodes were lost because the context was full")
    return "\n".join(lines)


def rollout(
    model: str | Path,
    recipe: str | Path | Config | None = None,
    *,
    tasks: int = 4,
    out: str | Path | TextIO | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[Group]:
    """Play training tasks with a model, `rollout.group_size` episodes of each.

    Args:
        model: a run's directory, a model's folder or a Hugging Face name.
        recipe: what is played and how: a recipe's name or path, or a configuration. Default: the
            run's own.
        tasks: number of tasks.
        out: file to which the episodes are written too: a JSON object for each turn, with token ids
            and log-probs.
        changes: keys of the configuration to change: `{"rollout.group_size": 2}`.

    Returns a group for each task: `group.trajectories` are its episodes, `trajectory.turns` the
    turns of an episode. Raises UserError if the model, the recipe, a key or a value cannot be used.
    """
    config, path = resolve(str(model), recipe, dict(changes or {}))
    if tasks < 1:
        raise UserError(f"--tasks {tasks}: play at least 1")
    with open_player(config, path) as rollouts, ExitStack() as stack:
        file = _open_output(out, stack)
        groups, stats = rollouts.training(0, tasks, EPISODES)
        report_failures(stats.failures)
        if file:
            write_turns(groups, file)
    episode_count = sum(len(group.trajectories) for group in groups)
    to_stderr(
        f"{episode_count} episodes, success {success_text(success_metrics(groups, stats.failed))}"
    )
    return groups


def _open_output(out: str | Path | TextIO | None, stack: ExitStack) -> TextIO | None:
    """Return the file to write. If `out` is a path, opens the file here and `stack` closes it."""
    if not isinstance(out, str | Path):
        return out
    with writing(f"--out {out}"):
        return stack.enter_context(Path(out).open("w", encoding="utf-8"))


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Play --tasks training tasks in groups, and write a JSON object for each turn."""
    out = sys.stdout if options.out == "-" else options.out
    rollout(options.model, options.recipe, tasks=options.tasks, out=out, changes=overrides)
    return 0


def resolve(
    model: str, recipe: str | Path | Config | None, overrides: dict[str, Any]
) -> tuple[Config, str]:
    """Return (configuration, path of the model) for a run directory, or for a model and a recipe.

    Raises UserError if neither the recipe nor the overrides say what to play.
    """
    folder = Path(model)
    if (folder / "config.toml").is_file():
        config = load(recipe or folder / "config.toml", overrides)
        return config, str(_exported_model(folder))
    if recipe is None and not (folder / "paw.toml").is_file():
        if "env.name" not in overrides:
            problem = "is not a folder; if it is a model on the hub"
            if folder.exists():
                problem = "is not a run directory"
            raise UserError(
                f"{model} {problem}, name its environment with --recipe NAME or --env NAME"
            )
        return load_played(None, overrides), model
    config = load(recipe or folder / "paw.toml", overrides)
    if recipe and model == "quickstart":
        return config, start_model(None, config)
    return config, model


def _exported_model(run_dir: Path) -> Path:
    """Return the folder of a run's exported model. Exports it now if it is missing or outdated.

    It is outdated if a checkpoint is newer. Then the run was resumed and later killed.
    """
    exported = run_dir / "hf" / "config.json"
    saved_at = [path.stat().st_mtime for path in (run_dir / "checkpoints").glob("step_*")]
    if not exported.is_file() or exported.stat().st_mtime < max(saved_at, default=0.0):
        return export_run(run_dir)
    return run_dir / "hf"


@contextmanager
def open_player(config: Config, path: str, factory: EnvFactory | None = None) -> Iterator[Rollouts]:
    """Open rollouts with the model at `path`, on the games of `factory` or the configuration."""
    factory = factory or make_factory(config)
    chat = Chat(load_tokenizer(path), config.model.chat_template_kwargs, config.model.tool_parser)
    device = pick_device(config.model.device)
    config = with_dtype(config, pick_dtype(device))
    longest = 0  # not checked, because the engine has its own check
    if find_engine(config.engine.type).runs_policy:
        longest = longest_row(config, update=False)
    policy = load_policy(
        path, device=device, dtype=config.model.dtype, check=False, longest=longest
    )
    with closing(make_engine(config, policy=policy, chat=chat, model_path=path)) as engine:
        push_weights(policy.lm, engine, version=0)
        with closing(Rollouts(factory, engine, chat, config)) as rollouts:
            yield rollouts


def report_failures(failures: list[str]) -> None:
    """Print the failures of environments to stderr."""
    for failure in failures:
        to_stderr(f"environment failed: {failure}")
