"""The commands: what each takes, and what runs it.

Modules that run them are imported then: some take long.
"""

import argparse
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paw.errors import to_stderr
from paw.recipe import load

Overrides = dict[str, str]
Command = Callable[[argparse.Namespace, Overrides], int]
NO_OVERRIDES = {"report", "export", "data", "doctor", "keys"}


def add_arguments(name: str, sub: argparse.ArgumentParser, short: Iterable[str]) -> Command:
    """Add a command's arguments to its parser; returns what runs it.

    `short`: words for the keys of an endpoint.
    """
    add = sub.add_argument
    if name in NO_OVERRIDES:
        sub.epilog = None
        sub.set_defaults(overrides=False)
    if name in ("eval", "rollout"):
        # an endpoint may play in place of a model
        add(
            "model",
            nargs="?" if name == "eval" else None,
            help="run directory, model folder or Hugging Face name",
        )
        add("--recipe", help="environment and sampling (default: the run's own configuration)")
    match name:
        case "eval":
            agents = (
                "an agent plays: --agent TYPE --env NAME --endpoint URL --model NAME (short for"
            )
            sub.epilog = f"{agents} {' '.join(f'--{key}' for key in short)}); {sub.epilog}"
            add("--json", action="store_true", help="print one JSON object")
            add(
                "--out",
                type=Path,
                help="agents: folder of the episodes and results (default: in run.dir)",
            )
            return _running("paw.tools.evaluate")
        case "rollout":
            add("--tasks", type=int, default=4, help="tasks to play (default: %(default)s)")
            add("--out", default="-", help="file for the episodes (default: standard output)")
            return _running("paw.tools.player")
        case "profile":
            add("recipe", help="name of a packaged recipe, or a .toml file")
            add(
                "--repeats",
                type=int,
                default=10,
                metavar="N",
                help="passes of each variant (default: %(default)s)",
            )
            add(
                "--out",
                type=Path,
                default=Path("profile"),
                help="folder to write (default: %(default)s)",
            )
            add(
                "--trace",
                action="store_true",
                help="write profiler traces (on a GPU: memory snapshots too)",
            )
            either = sub.add_mutually_exclusive_group().add_argument
            either(
                "--rollouts",
                type=Path,
                metavar="FILE",
                help="episodes of `paw rollout` instead of playing",
            )
            either(
                "--synthetic",
                action="store_true",
                help="play nothing: random tokens of the recipe's sizes",
            )
            return _running("paw.tools.profile")
        case "plan":
            from paw.tools.fit import BASE

            add(
                "recipe",
                nargs="?",
                help=f"name of a packaged recipe, or a .toml file (with --model: {BASE})",
            )
            add(
                "--model",
                metavar="NAME",
                help="model folder or Hugging Face name, in place of the recipe's",
            )
            add(
                "--gpus",
                default="1x80GB",
                metavar="NxGB",
                help="all cards, and their memory (default: %(default)s)",
            )
            add(
                "--host-gib",
                type=float,
                metavar="N",
                help="memory of a host (default: not limited)",
            )
            add(
                "--hosts",
                type=int,
                default=1,
                metavar="N",
                help="hosts the cards are in (default: 1)",
            )
            add("--json", action="store_true", help="print one JSON object")
            add("--out", type=Path, metavar="FILE", help="write the recipe that fits")
            return _running("paw.tools.planning")
        case "experiment":
            from paw.tools.experiment.runs import VARIANTS, parse_seeds

            sub.epilog = (
                "any key of the configuration can be set for all variants: --run.updates 120"
            )
            sub.formatter_class = argparse.RawDescriptionHelpFormatter
            add("experiment", choices=["compare"], help="variants x seeds, with intervals")
            add("recipe", help="name of a packaged recipe, or a .toml file")
            seeds: dict[str, Any] = {"type": parse_seeds, "metavar": "N"}
            add(
                "--seeds",
                default="5",
                help="how many, or which: 0-4,7 (default: %(default)s)",
                **seeds,
            )
            add(
                "--out",
                type=Path,
                default=Path("compare"),
                help="folder to write (default: %(default)s)",
            )
            add(
                "--jobs",
                type=int,
                default=1,
                metavar="N",
                help="runs at once, of one thread if several",
            )
            add(
                "--gpus",
                type=int,
                default=1,
                metavar="N",
                help="of each run, as `paw train --gpus N`",
            )
            add("--report-only", action="store_true", help="train nothing, use what is finished")
            named = "see --list; the first is the baseline (default: %(default)s)"
            add("--variants", default="grpo,paw,ce,constant,unselected", metavar="A,B", help=named)
            own = "one of your own, such as 'loud: wm.scale=10 wm.loss=mae' (repeatable)"
            add(
                "--variant",
                action="append",
                default=[],
                metavar="'NAME: KEY=VALUE ...'",
                help=own,
                dest="own",
            )
            add(
                "--pair-seeds",
                default=[],
                help="seeds of the first two variants, if they are to have more",
                **seeds,
            )
            listing = "\n".join(
                f"{name:12} {what}\n{'':12} {keys}" for name, (keys, what) in VARIANTS.items()
            )
            add("--list", action="version", version=listing, help="print the named variants")
            return _running("paw.tools.experiment.compare")
        case "sft":
            add("model", help="model folder, Hugging Face name or run directory: what learns")
            add(
                "--recipe",
                help="environment, sizes and optimizer (default: the run's own configuration)",
            )
            add(
                "--rollouts",
                type=Path,
                metavar="FILE",
                help="episodes of `paw rollout` instead of expert play",
            )
            add(
                "--out",
                type=Path,
                required=True,
                help="folder to write; stopped, the same command goes on from there",
            )
            return _running("paw.tools.sft")
        case "rwml":
            add("stage", choices=["collect", "filter", "sft"])
            add("source", help="collect: the model that plays; filter, sft: the triplets")
            add(
                "--recipe",
                required=True,
                help="collect: the games; filter, sft: a next-state recipe",
            )
            add("--model", help="filter, sft: the model that learns")
            add(
                "--tasks",
                type=int,
                default=256,
                help="collect: games to play (default: %(default)s)",
            )
            add(
                "--share",
                type=float,
                default=1.0,
                help="sft: share of the training triplets (default: all)",
            )
            add("--out", type=Path, required=True, help="file (sft: folder) to write")
            return _running("paw.tools.rwml")
        case "play":
            _environment(sub)
            add("--seed", type=int, default=0, metavar="N", help="another game (default: 0)")
            add(
                "--json",
                action="store_true",
                help="one command a line in, one JSON object a line out",
            )
            return _running("paw.tools.play")
        case "env":
            add("action", choices=["check"], help="play a few episodes and say which rules hold")
            _environment(sub)
            add("--json", action="store_true", help="print one JSON object")
            return _running("paw.tools.env_check")
        case "report":
            add(
                "run_dir",
                nargs="+",
                type=Path,
                help="folder of a run; several are compared on one page",
            )
            default = "RUN_DIR; for several, comparison/ beside it"
            add("--out", type=Path, help=f"folder for report.html and plots/ (default: {default})")
            return _running("paw.tools.report")
        case "data":
            from paw.envs.alfworld.tables import DIFFICULTIES

            add(
                "env",
                choices=["alfworld", "webshop", "search", "smollm2"],
                help="whose files are meant",
            )
            add(
                "--dir",
                type=Path,
                help="their folder (default: ~/.cache/ENV; alfworld: $ALFWORLD_DATA first)",
            )
            either = sub.add_mutually_exclusive_group().add_argument
            either(
                "--download",
                action="store_true",
                help="alfworld: get the games with alfworld's own command",
            )
            either(
                "--generate",
                type=int,
                metavar="N",
                help="write N games, products or entities to --out",
            )
            out = "folder for what is generated (smollm2: default in the cache)"
            add("--out", type=Path, metavar="DIR", help=out)
            add(
                "--seed",
                type=int,
                default=0,
                help="seed of what is generated (default: %(default)s)",
            )
            add(
                "--difficulty",
                choices=DIFFICULTIES,
                default="full",
                help="alfworld: size of generated games",
            )
            corpus = "search: the documents (default: DIR/corpus.jsonl or DIR/wiki-18.jsonl)"
            add("--corpus", type=Path, help=corpus)
            return _running("paw.tools.data")
        case "serve":
            parsers = sub.add_subparsers(dest="what", required=True, metavar="retriever|env")
            retriever, env = parsers.add_parser("retriever"), parsers.add_parser("env")
            for add in (retriever.add_argument, env.add_argument):
                add(
                    "--host",
                    default="127.0.0.1",
                    help="address to listen at (default: %(default)s)",
                )
                add(
                    "--port",
                    type=int,
                    default=8000,
                    help="0 takes a free one (default: %(default)s)",
                )
            add = retriever.add_argument
            add(
                "--corpus",
                metavar="FILE",
                help="JSON lines {id, contents} (default: the generated world)",
            )
            add("--retriever", default="bm25", help="bm25 or dense (default: %(default)s)")
            _environment(env)
            env.add_argument(
                "--sessions", type=int, default=256, help="episodes at once (default: %(default)s)"
            )
            env.set_defaults(command=_running("paw.tools.serve_env"))
            return _serve_retriever
        case "export":
            add("run", type=Path, help="run directory")
            newest = "folder name, such as step_000050 (default: the newest that verifies)"
            add("--checkpoint", metavar="NAME", help=newest)
            add("--out", type=Path, help="folder to write (default: RUN/hf)")
            add(
                "--push",
                default="",
                metavar="USER/NAME",
                help="send it to the Hugging Face hub, as a private model",
            )
            add("--public", action="store_true", help="with --push: a new one is public")
            return _running("paw.tools.export")
        case "warmup":
            add("recipe", nargs="?", default="quickstart")
            return _warmup
        case "keys":
            return _keys
        case "doctor":
            add(
                "--model",
                metavar="PATH",
                help="a model's folder or Hugging Face name: can it be trained?",
            )
            add("--json", action="store_true", help="with --model: as JSON")
            add(
                "--kernels",
                action="store_true",
                help="check every backend of the head here; with --model, time them",
            )
            add("--shape", metavar="VxD", help="with --kernels: time them at the size of this head")
            return _doctor
    raise KeyError(name)


def _environment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "env", metavar="NAME|FILE.py:Class", help="a built-in environment, or one of your own"
    )
    parser.add_argument("--recipe", help="its settings (default: NAME-grpo, or the defaults)")


def _running(module: str) -> Command:
    """`run(options, overrides)` of a module."""
    return lambda options, overrides: importlib.import_module(module).run(options, overrides)


def _serve_retriever(options: argparse.Namespace, overrides: Overrides) -> int:
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


def _keys(*_: object) -> int:
    from paw.tools.reference import page

    print(page())
    return 0


def _doctor(options: argparse.Namespace, _: Overrides) -> int:
    from paw.tools import doctor

    if options.kernels:
        from paw.tools import kernels

        return kernels.check(options.shape, options.model)
    return doctor.run_model(options.model, as_json=options.json) if options.model else doctor.run()
