"""The table of commands: a description of each, its arguments and the function that runs it.

`paw --help` imports this module, which therefore loads nothing but the standard library. Functions
that add arguments may load pydantic, but not torch, which takes seconds. The module that runs a
command is imported when the command runs.
"""

import argparse
import importlib
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from paw.io.imports import no_collections

Overrides = dict[str, str]
Run = Callable[[argparse.Namespace, Overrides], int]
"""(options, overrides) -> exit code."""
RECIPE = "name of a packaged recipe, or a .toml file"


class Command(NamedTuple):
    description: str
    """A line for `paw --help`."""
    add_arguments: Callable[[argparse.ArgumentParser], Run]
    """Adds the command's arguments to its parser and returns the function that runs the command."""
    takes_overrides: bool = True
    """Whether keys of the configuration can be set, such as --optim.lr 5e-4."""
    has_model_option: bool = False
    """Whether --model is an option of its own. Otherwise it is short for --endpoint.model."""


def _run_of(module: str) -> Run:
    """Return a module's function `run(options, overrides)`. Its first call imports the module."""

    def run(options: argparse.Namespace, overrides: Overrides) -> int:
        with no_collections():
            command_module = importlib.import_module(module)
        return command_module.run(options, overrides)

    return run


def _train(parser: argparse.ArgumentParser) -> Run:
    parser.epilog = f"{parser.epilog}\n\n{_train_epilog()}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", help=RECIPE)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        default="",
        metavar="CHECKPOINT",
        help="continue this run (the highest number of its name) from its newest checkpoint "
        "or from step_NNNNNN",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="number of GPUs (or CPUs), one process each",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration, and stop"
    )
    return _run_of("paw.tools.train.start")


def _train_epilog() -> str:
    """Explain how to name an environment of your own, and list all recipes."""
    from paw.config.recipe import recipe_names  # loads pydantic

    names = textwrap.fill(
        "  ".join(recipe_names()),
        width=100,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    return (
        "an environment of your own: paw train own-environment --env.name FILE.py:Class\n\n"
        f"recipes (docs/recipes.md says what each is for, --dry-run prints its keys):\n{names}"
    )


def _eval(parser: argparse.ArgumentParser) -> Run:
    parser.epilog = (
        "an agent plays: --agent TYPE --env NAME --endpoint URL --model NAME (short for "
        f"--agent.type --env.name --endpoint.url --endpoint.model); {parser.epilog}"
    )
    parser.add_argument(
        "model",
        nargs="?",  # an endpoint may play in place of a model
        help="run directory, model folder or Hugging Face name",
    )
    parser.add_argument(
        "--recipe", help="environment and sampling (default: the run's own configuration)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--out",
        type=Path,
        help="agents: folder of the episodes and results (default: in run.dir)",
    )
    return _run_of("paw.tools.evaluate.evaluate")


def _rollout(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("model", help="run directory, model folder or Hugging Face name")
    parser.add_argument(
        "--recipe", help="environment and sampling (default: the run's own configuration)"
    )
    parser.add_argument("--tasks", type=int, default=4, help="tasks to play (default: %(default)s)")
    parser.add_argument(
        "--out", default="-", help="file for the episodes (default: standard output)"
    )
    return _run_of("paw.tools.evaluate.player")


def _profile(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("recipe", help=RECIPE)
    parser.add_argument(
        "--repeats",
        type=int,
        default=10,
        metavar="N",
        help="passes of each variant (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("profile"),
        help="folder to write (default: %(default)s)",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="write profiler traces (on a GPU: memory snapshots too)",
    )
    episodes = parser.add_mutually_exclusive_group()
    episodes.add_argument(
        "--rollouts",
        type=Path,
        metavar="FILE",
        help="episodes of `paw rollout` instead of playing",
    )
    episodes.add_argument(
        "--synthetic",
        action="store_true",
        help="play nothing: random tokens of the recipe's sizes",
    )
    return _run_of("paw.tools.profile")


def _plan(parser: argparse.ArgumentParser) -> Run:
    from paw.tools.plan.fit import BASE  # loads pydantic

    parser.add_argument("recipe", nargs="?", help=f"{RECIPE} (with --model: {BASE})")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="model folder or Hugging Face name, in place of the recipe's",
    )
    parser.add_argument(
        "--gpus",
        default="1x80GB",
        metavar="NxGB",
        help="number of cards, and the memory of each (default: %(default)s)",
    )
    parser.add_argument(
        "--host-gib",
        type=float,
        metavar="N",
        help="memory of a host (default: unlimited)",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="number of hosts that hold the cards (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the recipe that fits")
    return _run_of("paw.tools.plan.planning")


def _experiment(parser: argparse.ArgumentParser) -> Run:
    from paw.tools.experiment.runs import parse_seeds  # loads pydantic

    parser.epilog = "any key of the configuration can be set for all variants: --run.updates 120"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("experiment", choices=["compare"], help="variants x seeds, with intervals")
    parser.add_argument("recipe", help=RECIPE)
    parser.add_argument(
        "--seeds",
        type=parse_seeds,
        default="5",
        metavar="N",
        help="how many, or which: 0-4,7 (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("compare"),
        help="folder to write (default: %(default)s)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at once; each uses one thread if there are several",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="GPUs of each run, as in `paw train --gpus N`",
    )
    parser.add_argument(
        "--report-only", action="store_true", help="train nothing; report what is finished"
    )
    _add_variants(parser)
    return _run_of("paw.tools.experiment.compare")


def _add_variants(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which variants are compared."""
    from paw.tools.experiment.runs import VARIANTS, parse_seeds  # loads pydantic

    parser.add_argument(
        "--variants",
        default="grpo,paw,ce,constant,unselected",
        metavar="A,B",
        help="see --list; the first is the baseline (default: %(default)s)",
    )
    parser.add_argument(
        "--variant",
        dest="own",
        action="append",
        default=[],
        metavar="'NAME: KEY=VALUE ...'",
        help="one of your own, such as 'loud: wm.scale=10 wm.loss=mae' (repeatable)",
    )
    parser.add_argument(
        "--pair-seeds",
        type=parse_seeds,
        default=[],
        metavar="N",
        help="seeds of the first two variants, if they need more",
    )
    listing = "\n".join(
        f"{name:12} {description}\n{'':12} {keys}" for name, (keys, description) in VARIANTS.items()
    )
    parser.add_argument(
        "--list", action="version", version=listing, help="print the named variants"
    )


def _sft(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument(
        "model", help="model to train: a model folder, Hugging Face name or run directory"
    )
    parser.add_argument(
        "--recipe",
        help="environment, sizes and optimizer (default: the run's own configuration)",
    )
    parser.add_argument(
        "--rollouts",
        type=Path,
        metavar="FILE",
        help="episodes of `paw rollout` instead of expert play",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder to write; if stopped, the same command continues",
    )
    return _run_of("paw.tools.sft.sft")


def _rwml(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("stage", choices=["collect", "filter", "sft"])
    parser.add_argument("source", help="collect: the model that plays; filter, sft: the triplets")
    parser.add_argument(
        "--recipe",
        required=True,
        help="collect: the games; filter, sft: a next-state recipe",
    )
    parser.add_argument("--model", help="filter, sft: the model that learns")
    parser.add_argument(
        "--tasks",
        type=int,
        default=256,
        help="collect: games to play (default: %(default)s)",
    )
    parser.add_argument(
        "--share",
        type=float,
        default=1.0,
        help="sft: share of the training triplets (default: all)",
    )
    parser.add_argument("--out", type=Path, required=True, help="file (sft: folder) to write")
    return _run_of("paw.tools.sft.rwml")


def _play(parser: argparse.ArgumentParser) -> Run:
    _add_environment(parser)
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="another game (default: 0)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="read one command per line, write one JSON object per line",
    )
    return _run_of("paw.tools.play.play")


def _env(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument(
        "action", choices=["check"], help="play a few episodes and say which rules hold"
    )
    _add_environment(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _run_of("paw.tools.env_check.env_check")


def _report(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument(
        "run_dir",
        nargs="+",
        type=Path,
        help="folder of a run; several are compared on one page",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for report.html and plots/ "
        "(default: RUN_DIR; for several, comparison/ beside it)",
    )
    return _run_of("paw.tools.report.report")


def _view(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("run_dir", type=Path, help="folder of a run, or of several, such as runs/")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; another one lets other machines read the runs "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port; 0 picks a free one (default: %(default)s)"
    )
    return _run_of("paw.tools.view")


def _data(parser: argparse.ArgumentParser) -> Run:
    from paw.envs.alfworld.tables import DIFFICULTIES  # loads pydantic

    parser.add_argument(
        "env",
        choices=["alfworld", "webshop", "search", "smollm2"],
        help="environment or model that the files belong to",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="their folder (default: ~/.cache/ENV; alfworld: $ALFWORLD_DATA first)",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--download",
        action="store_true",
        help="alfworld: get the games with alfworld's own command",
    )
    action.add_argument(
        "--generate",
        type=int,
        metavar="N",
        help="write N games, products or entities to --out",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for what is generated (smollm2: default in the cache)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of what is generated (default: %(default)s)",
    )
    parser.add_argument(
        "--difficulty",
        choices=DIFFICULTIES,
        default="full",
        help="alfworld: size of generated games",
    )
    parser.add_argument(
        "--corpus",
        type=Path,
        help="search: the documents (default: DIR/corpus.jsonl or DIR/wiki-18.jsonl)",
    )
    return _run_of("paw.tools.data")


def _serve(parser: argparse.ArgumentParser) -> Run:
    servers = parser.add_subparsers(dest="what", required=True, metavar="retriever|env|gateway")
    retriever = servers.add_parser("retriever")
    _add_address(retriever)
    retriever.add_argument(
        "--corpus",
        metavar="FILE",
        help="JSON lines {id, contents} (default: the generated world)",
    )
    retriever.add_argument(
        "--retriever", default="bm25", help="bm25 or dense (default: %(default)s)"
    )

    env = servers.add_parser("env")
    _add_address(env)
    _add_environment(env)
    env.add_argument(
        "--sessions", type=int, default=256, help="episodes at once (default: %(default)s)"
    )
    env.set_defaults(command=_run_of("paw.tools.play.serve_env"))

    gateway = servers.add_parser("gateway")
    _add_address(gateway)
    gateway.add_argument(
        "model",
        nargs="?",
        help="run directory, model folder or Hugging Face name (or --endpoint URL --model NAME)",
    )
    gateway.add_argument("--recipe", help="settings (default: the run's own, or own-agent)")
    gateway.add_argument(
        "--out",
        type=Path,
        default=Path("sessions.jsonl"),
        help="file that sessions are appended to (default: %(default)s)",
    )
    gateway.set_defaults(command=_run_of("paw.tools.play.serve_gateway"))
    return _run_of("paw.tools.play.serve_retriever")


def _export(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="folder name, such as step_000050 (default: the newest that verifies)",
    )
    parser.add_argument("--out", type=Path, help="folder to write (default: RUN/hf)")
    parser.add_argument(
        "--push",
        default="",
        metavar="USER/NAME",
        help="push it to the Hugging Face hub as a private model",
    )
    parser.add_argument(
        "--public", action="store_true", help="with --push: make a new repository public"
    )
    return _run_of("paw.tools.export")


def _warmup(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("recipe", nargs="?", default="quickstart")
    return _run_of("paw.tools.warmup.start")


def _keys(parser: argparse.ArgumentParser) -> Run:
    return _run_of("paw.tools.reference")


def _doctor(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="model folder or Hugging Face name: report whether it can be trained",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object (not with --kernels)"
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="check every backend of the head on this machine; with --model, time them",
    )
    parser.add_argument(
        "--shape", metavar="VxD", help="with --kernels: time them at the size of this head"
    )
    return _run_of("paw.tools.doctor.doctor")


def _add_environment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "env", metavar="NAME|FILE.py:Class", help="a built-in environment, or one of your own"
    )
    parser.add_argument("--recipe", help="its settings (default: NAME-grpo, or the defaults)")


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port; 0 picks a free one (default: %(default)s)"
    )


COMMANDS = {
    "train": Command("train a recipe and write a run directory with a report", _train),
    "eval": Command(
        "play held-out games with a model or a run and print success with its interval", _eval
    ),
    "rollout": Command("play episodes and write every turn as JSON lines", _rollout),
    "profile": Command("time and memory of an update with and without the world model", _profile),
    "plan": Command(
        "predict memory and time, and find settings that fit", _plan, has_model_option=True
    ),
    "experiment": Command(
        "compare variants over seeds, as the tables of the paper do", _experiment
    ),
    "sft": Command(
        "fine-tune a model on expert play of an environment or on recorded episodes", _sft
    ),
    "rwml": Command(
        "world-model learning by RL: collect triplets, filter out easy ones, or fine-tune on them",
        _rwml,
        has_model_option=True,
    ),
    "play": Command("play a game in the terminal and see what the agent sees", _play),
    "report": Command(
        "write report.html and plots of one run, or of several to compare",
        _report,
        takes_overrides=False,
    ),
    "view": Command("show runs in a browser, live while they go on", _view, takes_overrides=False),
    "serve": Command(
        "serve a corpus to search, an environment to OpenEnv's clients, "
        "or a model to agents, whose sessions are recorded",
        _serve,
    ),
    "export": Command(
        "write a checkpoint of a run in Hugging Face format", _export, takes_overrides=False
    ),
    "warmup": Command("make the quickstart model of a recipe (cached)", _warmup),
    "env": Command("check that an environment follows the rules of the protocol", _env),
    "data": Command(
        "say where an environment's files are, check them, or generate some; make a small model",
        _data,
        takes_overrides=False,
    ),
    "keys": Command("print the reference of all keys (docs/keys.md)", _keys, takes_overrides=False),
    "doctor": Command(
        "say what is installed and what is missing, inspect a model, or check and time the kernels",
        _doctor,
        takes_overrides=False,
        has_model_option=True,
    ),
}
"""Every command by name, in the order of `paw --help`."""
