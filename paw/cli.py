"""The command line: `paw train | eval | rollout | ...`, see `paw --help`.

A command's modules are imported when it is the one: `paw --help` is quick. A user's mistake is one
line on stderr and exit code 2.
"""

import argparse
import errno
import os
import signal
import sys
import textwrap
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from paw import __version__, watcher
from paw.errors import LINE_CHARS, UserError, clean, shown, to_stderr, to_stdout
from paw.lifeline import end_tool_servers

if TYPE_CHECKING:
    from paw.config import Config

OVERRIDES = "any key of the configuration can be set: --optim.lr 5e-4 --wm.enabled false (docs/keys.md has all keys)"
SHORT = {
    "--agent": "agent.type",
    "--env": "env.name",
    "--endpoint": "endpoint.url",
    "--model": "endpoint.model",
}
COMMANDS = {
    "train": "train a recipe and write a run directory with a report",
    "eval": "play held-out games with a model or a run and print success with its interval",
    "rollout": "play episodes and write every turn as JSON lines",
    "profile": "time and memory of an update with and without the world model",
    "plan": "predict memory and time, and find settings that fit",
    "experiment": "compare variants over seeds, as the tables of the paper do",
    "sft": "fine-tune a model on expert play of an environment or on recorded episodes",
    "rwml": "world-model learning by RL: collect triplets, filter out easy ones, or fine-tune on them",
    "play": "play a game in the terminal and see what the agent sees",
    "report": "write report.html and plots of one run, or of several to compare",
    "serve": "serve a corpus to search, or an environment to OpenEnv's clients",
    "export": "write a checkpoint of a run in Hugging Face format",
    "warmup": "make the quickstart model of a recipe (cached)",
    "env": "check that an environment keeps the rules of the protocol",
    "data": "say where an environment's files are, check them, or generate some; make a small model",
    "keys": "print the reference of all keys (docs/keys.md)",
    "doctor": "say what is installed and what is missing, inspect a model, or check and time the kernels",
}
VARIABLES = {
    **dict.fromkeys(
        ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY"), "1"
    ),  # nothing phones home
    "KINETO_LOG_LEVEL": "99",  # torch's profiler talks of its stages
    "GOMP_SPINCOUNT": "3000",  # OpenMP threads that wait would spin for long, and slow down a machine with other work
}
"""Of the environment, set before torch is loaded unless they are set already."""
Overrides = dict[str, str]


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    # Less memory lost to fragments; vLLM's sleeping allocator turns it off for its own pool.
    if not any(f"PYTORCH_{kind}ALLOC_CONF" in os.environ for kind in ("", "CUDA_", "HIP_")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    try:
        words, overrides = _split_overrides(sys.argv[1:] if argv is None else argv)
        options, rest = _parser(words).parse_known_args(words)
        takes = getattr(options, "overrides", True)
        if overrides and not takes:
            rest = [f"--{key}" for key in overrides]
        if rest:
            raise UserError(f"command line: {_unknown(rest[0], takes)}")
        known = (signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler)
        if options.name != "train" and signal.getsignal(signal.SIGINT) not in known:
            signal.signal(
                signal.SIGINT, watcher.interrupt
            )  # training leaves at once until it has begun
        try:
            return options.command(options, overrides)
        except SystemExit as error:  # not ours: of an environment's file, or of a library
            raise UserError(f"stopped: something called sys.exit({shown(error.code)})") from error
    except UserError as error:
        to_stderr(f"paw: {clean(error, LINE_CHARS)}")
        if "RANK" in os.environ:
            from paw.model.parallel import decline

            decline(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away (`paw rollout | head`)
        return 141
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        to_stderr(f"paw: {shown(error.filename)}: {error.strerror}")
        return 2


def entry() -> NoReturn:
    """`main` for the shell. Ranks and interrupted commands skip the interpreter's own end, in which
    threads of C++ libraries abort now and then.
    """
    try:
        code = main()
    except SystemExit as error:  # of the parser: --help, --version
        watcher.say_ending(error.code if isinstance(error.code, int) else 0)
        raise
    except BaseException:
        watcher.say_ending(1)
        if "RANK" not in os.environ:
            raise
        traceback.print_exc()
        code = 1
    watcher.say_ending(code)
    if code == 130 or "RANK" in os.environ:
        end_tool_servers()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # half a word is a mistake

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see {self.prog} --help")


def _parser(words: list[str]) -> argparse.ArgumentParser:
    """All commands by name, with the arguments of the one that `words` begin with."""
    parser = _Parser(
        prog="paw", description="Policy and world-model co-training for language agents."
    )
    parser.add_argument("--version", action="version", version=f"paw {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for name, help in COMMANDS.items():
        sub = commands.add_parser(name, help=help, description=help, epilog=OVERRIDES)
        if words[:1] != [name]:
            continue
        if name == "train":
            resume = "continue this run (of the name's highest number), from its newest checkpoint or from step_NNNNNN"
            sub.epilog = _train_epilog()
            sub.formatter_class = argparse.RawDescriptionHelpFormatter
            sub.add_argument("recipe", help="name of a packaged recipe, or a .toml file")
            sub.add_argument(
                "--resume", nargs="?", const="auto", default="", metavar="CHECKPOINT", help=resume
            )
            sub.add_argument(
                "--gpus", type=int, default=1, metavar="N", help="GPUs, or CPUs: a process each"
            )
            sub.add_argument(
                "--dry-run", action="store_true", help="print the resolved configuration, and stop"
            )
            sub.set_defaults(command=_train)
        else:
            from paw.commands import add_arguments

            sub.set_defaults(command=add_arguments(name, sub, SHORT.values()))
    return parser


def _train_epilog() -> str:
    """How keys are set, and the names of all recipes, wrapped between names."""
    from paw.recipe import recipe_names

    names = textwrap.fill(
        "  ".join(recipe_names()),
        width=100,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    return (
        f"{OVERRIDES}\n\nan environment of your own: paw train own-environment --env.name FILE.py:Class"
        f"\n\nrecipes (docs/recipes.md says what each is for, --dry-run prints its keys):\n{names}"
    )


def _train(options: argparse.Namespace, overrides: Overrides) -> int:
    from paw.recipe import check_passwords, load_named, warnings
    from paw.state.run_lock import run_names

    resume, numbered = options.resume, "run.name" not in overrides
    config = load_named(options.recipe, overrides)
    name = next(run_names(config, resume=resume, numbered=numbered))
    if options.dry_run:
        from paw.tools.reference import explain

        print(
            explain(
                config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
            ),
            end="",
        )
        for line in warnings(config):
            to_stderr(line)
        return 0
    check_passwords(config)
    if config.endpoint.url:
        why = "an endpoint plays in `paw eval`, it cannot be trained"
        raise UserError(f"endpoint.url = '{config.endpoint.url}': {why}")
    if "RANK" in os.environ:
        from paw.model.launcher import die_with_launcher

        die_with_launcher()
    else:
        _check(config, name, resume)
        _announce_warmup(config, resume)
    if options.gpus != 1:
        from paw.model.launcher import launch

        words = [word for key, value in overrides.items() for word in (f"--{key}", value)]
        if (count := options.gpus - config.engine.gpus) < 1:
            taken = (
                f"engine.servers take {config.engine.gpus}, none is left"
                if config.engine.gpus
                else "at least 1"
            )
            raise UserError(f"--gpus {options.gpus}: {taken}")
        words = ["train", options.recipe, *words, *(resume and ["--resume", resume])]
        return launch(count, words, device=config.model.device)
    from paw.tools.train import train

    report = train(config, resume=resume, numbered=numbered)
    if os.environ.get("RANK", "0") == "0" and report.is_file():
        to_stdout(f"report: {report}")
    return 0


def _check(config: "Config", name: str, resume: str) -> None:
    """What needs no model, before torch is loaded, which takes seconds. Ranks look once they have
    met: all are to know what one of them, maybe on another machine, lacks."""
    from paw.state.run_lock import check_free

    check_free(config.run.dir / name, resume=resume)
    data = getattr(config.env, "data", None)
    if data and not data.expanduser().exists():
        from paw.envs import make_factory

        make_factory(config)  # says what is missing and how to get it
    if (
        config.model.path != "quickstart" and ":" not in config.env.name
    ):  # one's own mistakes come first
        from paw.hub import check_hub

        check_hub(config.model.path)


def _announce_warmup(config: "Config", resume: str) -> None:
    """Say what comes before torch is loaded, which takes long on a busy machine, in as many processes as ranks.

    Only of environments that generate their tasks, which are made in a moment: their mistakes come
    without this line.
    """
    generates = getattr(config.env, "data", "") is None
    if config.model.path == "quickstart" and generates and not resume:
        from paw.envs import make_factory

        make_factory(config)
        to_stdout(
            "warm-up: loading PyTorch; the quickstart's model is made first, unless the cache has it"
        )


def _unknown(word: str, overrides: bool) -> str:
    if not word.startswith("--"):
        return f"'{clean(word)}' is not an option; overrides look like --optim.lr 5e-4"
    if not overrides:
        return f"unknown option '{clean(word)}'; see --help"
    from paw.hints import hint

    return f"unknown option '{clean(word)}'{hint(word.removeprefix('--').replace('-', '_'), {})}"


def _split_overrides(words: list[str]) -> tuple[list[str], Overrides]:
    """Take `--a.b value` and `--a.b=value` out of the command line, short forms too: (the other words, overrides)."""
    others: list[str] = []
    overrides: Overrides = {}
    rest = iter(words)
    own_model = words[:1] in (["rwml"], ["plan"], ["doctor"])
    for word in rest:
        key, equals, value = word.partition("=")
        if key in SHORT and not (key == "--model" and own_model):
            key = f"--{SHORT[key]}"
        if not key.startswith("--") or "." not in key:
            others.append(word)
            continue
        if not equals and (value := next(rest, None)) is None:
            raise UserError(f"command line: '{key}' needs a value")
        overrides[key.removeprefix("--")] = value
    return others, overrides
