"""The command line: `paw train | eval | rollout | ...`, see `paw --help`.

The modules of a command are imported only when it runs, so that `paw --help` is quick. A user's
mistake is one line on stderr and exit code 2.
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

from paw.errors import LINE_CHARS, UserError, clean, short_repr, to_stderr, to_stdout
from paw.processes import watcher
from paw.processes.lifeline import end_tool_servers
from paw.version import __version__

if TYPE_CHECKING:
    from paw.config.sections import Config

OVERRIDES = (
    "any key of the configuration can be set: --optim.lr 5e-4 --wm.enabled false "
    "(docs/keys.md has all keys)"
)
SHORT = {
    "--agent": "agent.type",
    "--env": "env.name",
    "--endpoint": "endpoint.url",
    "--model": "endpoint.model",
}
"""Options that are short for a key."""
OWN_MODEL = ("rwml", "plan", "doctor")
"""Commands with an option --model of their own."""
COMMANDS = {
    "train": "train a recipe and write a run directory with a report",
    "eval": "play held-out games with a model or a run and print success with its interval",
    "rollout": "play episodes and write every turn as JSON lines",
    "profile": "time and memory of an update with and without the world model",
    "plan": "predict memory and time, and find settings that fit",
    "experiment": "compare variants over seeds, as the tables of the paper do",
    "sft": "fine-tune a model on expert play of an environment or on recorded episodes",
    "rwml": "world-model learning by RL: "
    "collect triplets, filter out easy ones, or fine-tune on them",
    "play": "play a game in the terminal and see what the agent sees",
    "report": "write report.html and plots of one run, or of several to compare",
    "serve": "serve a corpus to search, or an environment to OpenEnv's clients",
    "export": "write a checkpoint of a run in Hugging Face format",
    "warmup": "make the quickstart model of a recipe (cached)",
    "env": "check that an environment keeps the rules of the protocol",
    "data": "say where an environment's files are, check them, or generate some; "
    "make a small model",
    "keys": "print the reference of all keys (docs/keys.md)",
    "doctor": "say what is installed and what is missing, inspect a model, "
    "or check and time the kernels",
}
VARIABLES = {
    # Nothing sends reports of its use.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # torch's profiler does not print its stages.
    "KINETO_LOG_LEVEL": "99",
    # OpenMP's threads would spin for long while they wait, and slow down a machine with other work.
    "GOMP_SPINCOUNT": "3000",
}
"""Environment variables that are set before torch is loaded, unless they are set already."""
Overrides = dict[str, str]


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _set_variables()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        to_stderr(f"paw: {clean(error, LINE_CHARS)}")
        if "RANK" in os.environ:
            from paw.distributed.parallel import decline

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
        to_stderr(f"paw: {short_repr(error.filename)}: {error.strerror}")
        return 2


def _set_variables() -> None:
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    # Less memory is lost to fragments. vLLM's sleeping allocator turns it off for its own pool.
    allocator = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not any(name in os.environ for name in allocator):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _run(arguments: list[str]) -> int:
    words, overrides = _split_overrides(arguments)
    options, unknown_words = _parser(words).parse_known_args(words)
    takes_overrides = getattr(options, "overrides", True)
    if overrides and not takes_overrides:
        unknown_words = [f"--{key}" for key in overrides]
    if unknown_words:
        raise UserError(f"command line: {_unknown(unknown_words[0], takes_overrides)}")

    # Only training keeps the handler of `paw.__main__`, which leaves at once, until it has begun.
    others = (signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler)
    if options.name != "train" and signal.getsignal(signal.SIGINT) not in others:
        signal.signal(signal.SIGINT, watcher.interrupt)
    try:
        return options.command(options, overrides)
    except SystemExit as error:  # an environment's file or a library raised it, not we
        raise UserError(f"stopped: something called sys.exit({short_repr(error.code)})") from error


def entry() -> NoReturn:
    """`main` for the shell.

    Ranks and interrupted commands skip the end of the interpreter, in which threads of C++
    libraries abort now and then.
    """
    try:
        code = main()
    except SystemExit as error:  # raised by the parser: --help, --version
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
    """A parser whose errors are UserErrors, and which takes no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see {self.prog} --help")


def _parser(words: list[str]) -> argparse.ArgumentParser:
    """All commands by name, with the arguments of the one that `words` begin with."""
    parser = _Parser(
        prog="paw", description="Policy and world-model co-training for language agents."
    )
    parser.add_argument("--version", action="version", version=f"paw {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for name, description in COMMANDS.items():
        command = commands.add_parser(
            name, help=description, description=description, epilog=OVERRIDES
        )
        if words[:1] != [name]:
            continue
        if name == "train":
            _add_train_arguments(command)
            command.set_defaults(command=_train)
        else:
            from paw.commands import add_arguments

            command.set_defaults(command=add_arguments(name, command))
    return parser


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _train_epilog()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", help="name of a packaged recipe, or a .toml file")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        default="",
        metavar="CHECKPOINT",
        help="continue this run (of the name's highest number), from its newest checkpoint "
        "or from step_NNNNNN",
    )
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="GPUs, or CPUs: a process each"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration, and stop"
    )


def _train_epilog() -> str:
    """How keys are set, and the names of all recipes, wrapped between names."""
    from paw.config.recipe import recipe_names

    names = textwrap.fill(
        "  ".join(recipe_names()),
        width=100,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    paragraphs = [
        OVERRIDES,
        "an environment of your own: paw train own-environment --env.name FILE.py:Class",
        "recipes (docs/recipes.md says what each is for, --dry-run prints its keys):\n" + names,
    ]
    return "\n\n".join(paragraphs)


def _train(options: argparse.Namespace, overrides: Overrides) -> int:
    from paw.config.recipe import check_passwords, load_named
    from paw.rundir.run_lock import run_names

    numbered = "run.name" not in overrides
    config = load_named(options.recipe, overrides)
    name = next(run_names(config, resume=options.resume, numbered=numbered))
    if options.dry_run:
        _explain(config, name)
        return 0
    check_passwords(config)
    if config.endpoint.url:
        raise UserError(
            f"endpoint.url = '{config.endpoint.url}': "
            "an endpoint plays in `paw eval`, it cannot be trained"
        )

    if "RANK" in os.environ:
        from paw.distributed.launcher import die_with_launcher

        die_with_launcher()
    else:
        _check(config, name, options.resume)
        _announce_warmup(config, options.resume)
    if options.gpus != 1:
        return _launch(options, overrides, config)
    from paw.tools.train.train import train

    report = train(config, resume=options.resume, numbered=numbered)
    if os.environ.get("RANK", "0") == "0" and report.is_file():
        to_stdout(f"report: {report}")
    return 0


def _explain(config: "Config", name: str) -> None:
    """Print a configuration with the run's final name (`--dry-run`), and its warnings."""
    from paw.config.recipe import warnings
    from paw.tools.reference import explain

    run = config.run.model_copy(update={"name": name})
    print(explain(config.model_copy(update={"run": run})), end="")
    for line in warnings(config):
        to_stderr(line)


def _launch(options: argparse.Namespace, overrides: Overrides, config: "Config") -> int:
    """Train in a process for each GPU that the servers of the run leave."""
    from paw.distributed.launcher import launch

    count = options.gpus - config.engine.gpus
    if count < 1:
        reason = "at least 1"
        if config.engine.gpus:
            reason = f"engine.servers take {config.engine.gpus}, none is left"
        raise UserError(f"--gpus {options.gpus}: {reason}")

    arguments = ["train", options.recipe]
    for key, value in overrides.items():
        arguments += [f"--{key}", value]
    if options.resume:
        arguments += ["--resume", options.resume]
    return launch(count, arguments, device=config.model.device)


def _check(config: "Config", name: str, resume: str) -> None:
    """Check what needs no model, before torch is loaded, which takes seconds.

    Ranks check it later, once they have met: if one of them, perhaps on another machine, lacks
    something, all must know.
    """
    from paw.rundir.run_lock import check_free

    check_free(config.run.dir / name, resume=resume)
    data = getattr(config.env, "data", None)
    if data and not data.expanduser().exists():
        from paw.envs import make_factory

        make_factory(config)  # says what is missing and how to get it
    # Mistakes in an environment of one's own are reported before the hub is asked.
    if config.model.path != "quickstart" and ":" not in config.env.name:
        from paw.io.hub import check_hub

        check_hub(config.model.path)


def _announce_warmup(config: "Config", resume: str) -> None:
    """Print what comes first, before torch is loaded, which takes long on a busy machine.

    Only for environments that generate their tasks: they are made in a moment, and their mistakes
    are reported without this line.
    """
    generates = getattr(config.env, "data", "") is None
    if config.model.path == "quickstart" and generates and not resume:
        from paw.envs import make_factory

        make_factory(config)
        to_stdout(
            "warm-up: loading PyTorch; "
            "the quickstart's model is made first, unless the cache has it"
        )


def _unknown(word: str, takes_overrides: bool) -> str:
    """What is wrong with a word of the command line that is neither an argument nor an override."""
    if not word.startswith("--"):
        return f"'{clean(word)}' is not an option; overrides look like --optim.lr 5e-4"
    if not takes_overrides:
        return f"unknown option '{clean(word)}'; see --help"
    from paw.config.hints import hint

    key = word.removeprefix("--").replace("-", "_")
    return f"unknown option '{clean(word)}'{hint(key, {})}"


def _split_overrides(arguments: list[str]) -> tuple[list[str], Overrides]:
    """(other arguments, overrides) of a command line.

    Overrides are `--a.b value`, `--a.b=value` and the options that are short for them.
    """
    others: list[str] = []
    overrides: Overrides = {}
    has_own_model = bool(arguments) and arguments[0] in OWN_MODEL
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if option in SHORT and not (option == "--model" and has_own_model):
            option = f"--{SHORT[option]}"
        if not option.startswith("--") or "." not in option:
            others.append(argument)
            continue
        if not equals:
            value = next(remaining, None)
        if value is None:
            raise UserError(f"command line: '{option}' needs a value")
        overrides[option.removeprefix("--")] = value
    return others, overrides
