"""`paw eval` and `paw rollout`: a trained run, a model folder or a Hugging Face model plays games."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from paw.config import Config
from paw.envs import make_factory
from paw.envs.base import EnvFactory
from paw.errors import UserError, clean, masked, progress, to_stderr
from paw.files import writing
from paw.model.check import longest_row
from paw.model.dtype import pick_dtype, with_dtype
from paw.model.policy import load_policy, load_tokenizer, pick_device
from paw.recipe import load
from paw.rollout.chat import Chat
from paw.rollout.engines import make_engine
from paw.rollout.scheduler import Rollouts
from paw.rollout.success import kinds, success_metrics, success_text
from paw.rollout.sync import push_weights
from paw.state.export import start_model
from paw.state.restore import export_run
from paw.tools.played import load_played
from paw.tools.results import kind_lines, kind_rows

EPISODES = partial(progress, "episodes")
"""Shows how many have ended."""


def evaluate_model(config: Config, path: str, *, as_json: bool) -> int:
    """Play `eval.games` held-out games and print success with Wilson intervals; returns 1 where episodes failed."""
    with open_player(config, path) as rollouts:
        groups, stats = rollouts.evaluation(EPISODES)
        tell(stats.failures)
        metrics, table = success_metrics(groups, stats.failed), kind_rows(kinds(groups, stats.failed))
        source = rollouts.factory.fingerprint()
    if as_json:
        about = {"model": path, "source": masked(source), "temperature": config.eval.temperature}
        print(json.dumps({**about, **metrics, "kinds": table}))
        return 1 if stats.failed else 0
    print(f"{path} on {clean(source)}, temperature {config.eval.temperature:g}")
    print(f"success {success_text(metrics)}")
    if groups:
        print(f"95 % interval {metrics['ci_low']:.1%} to {metrics['ci_high']:.1%}")
        print("\n".join(kind_lines(table)))
        scored = f"mean score {metrics['score']:.3f}, " if "score" in metrics else ""
        print(f"{scored}mean turns {metrics['steps']:.1f}, valid actions {metrics['valid_actions']:.1%}")
    return 1 if stats.failed else 0


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Play --tasks training tasks in groups and write one JSON object per turn, token ids and log-probs included."""
    tasks, out = options.tasks, options.out
    config, path = resolve(options.model, options.recipe, overrides)
    if tasks < 1:
        raise UserError(f"--tasks {tasks}: play at least 1")
    with open_player(config, path) as rollouts, ExitStack() as stack:
        with writing(f"--out {out}"):
            file = sys.stdout if out == "-" else stack.enter_context(Path(out).open("w", encoding="utf-8"))
        groups, stats = rollouts.training(0, tasks, EPISODES)
        tell(stats.failures)
        for episode in (trajectory for group in groups for trajectory in group.trajectories):
            where = {"task": episode.task.id, "kind": episode.task.kind, "member": episode.member}
            for number, turn in enumerate(episode.turns):
                file.write(json.dumps({**where, "step": number, **asdict(turn)}) + "\n")
    written = sum(len(group.trajectories) for group in groups)
    to_stderr(f"{written} episodes, success {success_text(success_metrics(groups, stats.failed))}")
    return 0


def resolve(model: str, recipe: str | None, overrides: dict[str, str]) -> tuple[Config, str]:
    """(configuration, model path) of a run directory, or of a model with a recipe."""
    run = Path(model)
    if (run / "config.toml").is_file():
        config = load(recipe or run / "config.toml", overrides)
        exported = run / "hf" / "config.json"
        saved = [path.stat().st_mtime for path in (run / "checkpoints").glob("step_*")]
        stale = not exported.is_file() or exported.stat().st_mtime < max(saved, default=0.0)  # killed after a resume
        return config, str(export_run(run) if stale else run / "hf")
    if recipe is None and not (run / "paw.toml").is_file():
        if "env.name" not in overrides:
            what = "is not a run directory" if run.exists() else "is no folder here; if it is a model of the hub"
            raise UserError(f"{model} {what}, say what it plays with --recipe NAME or --env NAME")
        return load_played(None, overrides), model
    config = load(recipe or run / "paw.toml", overrides)
    return config, start_model(None, config) if recipe and model == "quickstart" else model


@contextmanager
def open_player(config: Config, path: str, factory: EnvFactory | None = None) -> Iterator[Rollouts]:
    """Plays the games of the configuration (`factory`, if it is made already) with the model of that path."""
    factory = factory or make_factory(config)
    chat = Chat(load_tokenizer(path), config.model.chat_template_kwargs, config.model.tool_parser)
    device = pick_device(config.model.device)
    config = with_dtype(config, pick_dtype(device))
    options: dict[str, Any] = {"device": device}
    if config.engine.type == "transformers":  # vLLM has its own way
        options["longest"] = longest_row(config, update=False)
    policy = load_policy(path, dtype=config.model.dtype, check=False, **options)
    with closing(make_engine(config, policy=policy, chat=chat, model_path=path)) as engine:
        push_weights(policy.lm, engine, version=0)
        with closing(Rollouts(factory, engine, chat, config)) as rollouts:
            yield rollouts


def tell(failures: list[str]) -> None:
    for failure in failures:
        to_stderr(f"environment failed: {failure}")
