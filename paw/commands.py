"""The commands beside `train`: what each takes, and what runs it."""

import argparse
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paw.errors import to_stderr
from paw.recipe import load

Overrides = dict[str, str]
Command = Callable[[argparse.Namespace, Overrides], int]
MODULES = {
    "plan": "paw.tools.fit",
    "experiment": "paw.tools.experiment.compare",
    "play": "paw.tools.play",
    "report": "paw.tools.report",
    "env": "paw.tools.env_check",
    "data": "paw.tools.data",
}
"""Commands whose module has its own `add_arguments(parser)` and `run(options, overrides)`."""
NO_OVERRIDES = {"report", "export", "data", "doctor", "keys"}


def add_arguments(name: str, sub: argparse.ArgumentParser, short: Iterable[str]) -> Command:
    """Add a command's arguments to its parser; returns what runs it. `short`: words for the keys of an endpoint."""
    add = sub.add_argument
    if name in NO_OVERRIDES:
        sub.epilog = None
        sub.set_defaults(overrides=False)
    if name in ("eval", "rollout"):
        # an endpoint may play in place of a model
        add("model", nargs="?" if name == "eval" else None, help="run directory, model folder or Hugging Face name")
        add("--recipe", help="environment and sampling (default: the run's own configuration)")
    match name:
        case "eval":
            agents = "an agent plays: --agent TYPE --env NAME --endpoint URL --model NAME (short for"
            sub.epilog = f"{agents} {' '.join(f'--{key}' for key in short)}); {sub.epilog}"
            add("--json", action="store_true", dest="as_json", help="print one JSON object")
            add("--out", type=Path, help="agents: folder of the episodes and results (default: in run.dir)")
            return _calling("paw.tools.evaluate", "evaluate")
        case "rollout":
            add("--tasks", type=int, default=4, help="tasks to play (default: %(default)s)")
            add("--out", default="-", help="file for the episodes (default: standard output)")
            return _calling("paw.tools.player", "rollout_model")
        case "profile":
            add("recipe", help="name of a packaged recipe, or a .toml file")
            add("--repeats", type=int, default=10, metavar="N", help="passes of each variant (default: %(default)s)")
            add("--out", type=Path, default=Path("profile"), help="folder to write (default: %(default)s)")
            add("--trace", action="store_true", help="write profiler traces (on a GPU: memory snapshots too)")
            either = sub.add_mutually_exclusive_group().add_argument
            either("--rollouts", type=Path, metavar="FILE", help="episodes of `paw rollout` instead of playing")
            either("--synthetic", action="store_true", help="play nothing: random tokens of the recipe's sizes")
            return _calling("paw.tools.profile", "profile")
        case "sft":
            add("model", help="model folder, Hugging Face name or run directory: what learns")
            add("--recipe", help="environment, sizes and optimizer (default: the run's own configuration)")
            add("--rollouts", type=Path, metavar="FILE", help="episodes of `paw rollout` instead of expert play")
            add("--out", type=Path, required=True, help="folder to write; stopped, the same command goes on from there")
            return _passing("paw.tools.sft")
        case "rwml":
            add("stage", choices=["collect", "filter", "sft"])
            add("source", help="collect: the model that plays; filter, sft: the triplets")
            add("--recipe", required=True, help="collect: the games; filter, sft: a next-state recipe")
            add("--model", help="filter, sft: the model that learns")
            add("--tasks", type=int, default=256, help="collect: games to play (default: %(default)s)")
            add("--share", type=float, default=1.0, help="sft: share of the training triplets (default: all)")
            add("--out", type=Path, required=True, help="file (sft: folder) to write")
            return _passing("paw.tools.rwml")
        case "serve":
            parsers = sub.add_subparsers(dest="what", required=True, metavar="retriever|env")
            retriever, env = parsers.add_parser("retriever"), parsers.add_parser("env")
            for add in (retriever.add_argument, env.add_argument):
                add("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
                add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
            add = retriever.add_argument
            add("--corpus", metavar="FILE", help="JSON lines {id, contents} (default: the generated world)")
            add("--retriever", default="bm25", help="bm25 or dense (default: %(default)s)")
            add = env.add_argument
            add("env", metavar="NAME|FILE.py:Class", help="a built-in environment, or one of your own")
            add("--recipe", help="settings to play with (default: NAME-grpo, or the defaults)")
            add("--sessions", type=int, default=256, help="episodes at once (default: %(default)s)")
            return _serve
        case "export":
            add("run", type=Path, help="run directory")
            add(
                "--checkpoint",
                dest="checkpoint_name",
                metavar="NAME",
                help="folder name, such as step_000050 (default: the newest that verifies)",
            )
            add("--out", type=Path, help="folder to write (default: RUN/hf)")
            add("--push", default="", metavar="USER/NAME", help="send it to the Hugging Face hub, as a private model")
            add("--public", action="store_true", help="with --push: a new one is public")
            return _calling("paw.state.restore", "export_run")
        case "warmup":
            add("recipe", nargs="?", default="quickstart")
            return _warmup
        case "keys":
            return _calling("paw.tools.reference", "page")
        case "doctor":
            add("--model", metavar="PATH", help="a model's folder or Hugging Face name: can it be trained?")
            add("--run", type=Path, metavar="DIR", help="a run's directory: what happened to it, how to go on?")
            add("--json", action="store_true", help="with --model or --run: as JSON")
            add("--kernels", action="store_true", help="check every backend of the head here; with --model, time them")
            add("--shape", metavar="VxD", help="with --kernels: time them at the size of this head")
            return _doctor
    module = importlib.import_module(MODULES[name])
    module.add_arguments(sub)
    return (lambda options, _: module.run(options)) if name in NO_OVERRIDES else module.run


def _calling(module: str, function: str) -> Command:
    """Calls `function` with the options by name; what it returns is the exit code, or printed."""

    def run(options: argparse.Namespace, overrides: Overrides) -> int:
        given = {key: value for key, value in vars(options).items() if key not in ("name", "command", "overrides")}
        given |= {} if options.name in NO_OVERRIDES else {"overrides": overrides}
        result = getattr(importlib.import_module(module), function)(**given)
        if not isinstance(result, int):
            print(result)
            return 0
        return result

    return run


def _passing(module: str) -> Command:
    """`run` of a module that takes long to import."""
    return lambda options, overrides: importlib.import_module(module).run(options, overrides)


def _serve(options: argparse.Namespace, overrides: Overrides) -> int:
    if options.what == "env":
        from paw.tools import serve_env

        return serve_env.serve(options, overrides)
    from paw.envs.search.retrieval.server import serve

    given = {"env.data": "none", "env.retriever": options.retriever}
    given |= {"env.corpus": options.corpus} if options.corpus else {}
    config: Any = load("search-grpo", given | overrides)
    return serve(config.env, host=options.host, port=options.port)


def _warmup(options: argparse.Namespace, overrides: Overrides) -> int:
    from paw.envs import make_factory

    config = load(options.recipe, overrides)
    from paw.tools.warmup import ensure_warm_model

    print(ensure_warm_model(config, make_factory(config), to_stderr))
    return 0


def _doctor(options: argparse.Namespace, _: Overrides) -> int:
    from paw.tools import doctor, kernels, postmortem

    if options.kernels:
        return kernels.check(options.shape, options.model)
    if options.run:
        return postmortem.run(options.run, as_json=options.json)
    return doctor.run_model(options.model, as_json=options.json) if options.model else doctor.run()
