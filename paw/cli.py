"""The command line: `paw train | eval | rollout | ...`, see `paw --help`.

`paw.commands` has the table of commands. A user's mistake prints one line on stderr and exits with
code 2.
"""

import argparse
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from paw.commands import COMMANDS
from paw.errors import LINE_CHARS, UserError, clean, short_repr, to_stderr
from paw.processes import watcher
from paw.processes.lifeline import end_tool_servers
from paw.version import __version__

OVERRIDES = (
    "any key of the configuration can be set: --optim.lr 5e-4 --wm.enabled false "
    "(docs/keys.md has all keys)"
)
SHORT_OPTIONS = {
    "--agent": "agent.type",
    "--env": "env.name",
    "--endpoint": "endpoint.url",
    "--model": "endpoint.model",
}
"""Short options, each for a key of the configuration."""
VARIABLES = {
    # No library sends usage reports.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # torch's profiler does not print its stages.
    "KINETO_LOG_LEVEL": "99",
    # By default, waiting OpenMP threads spin for long and slow down a busy machine.
    "GOMP_SPINCOUNT": "3000",
}
"""Environment variables to set before torch is loaded, unless the user has set them."""
Overrides = dict[str, str]


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: _run(arguments))


def exit_code(run: Callable[[], int]) -> int:
    """Return the exit code of `run`, or of the problem that it raised (one line on stderr)."""
    _set_variables()
    try:
        return run()
    except UserError as error:
        to_stderr(f"paw: {clean(error, LINE_CHARS)}")
        if "RANK" in os.environ:
            from paw.distributed.parallel import decline  # loads torch

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
    # Less memory is lost to fragmentation. vLLM's sleeping allocator turns it off for its own pool.
    allocator = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not any(name in os.environ for name in allocator):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _run(arguments: list[str]) -> int:
    words, overrides = split_overrides(arguments)
    options, unknown_words = _parser(words).parse_known_args(words)
    if overrides and not options.overrides:
        unknown_words = [f"--{key}" for key in overrides]
    if unknown_words:
        raise UserError(f"command line: {_unknown(unknown_words[0], options.overrides)}")

    # The handler of `paw.__main__` exits at once. Only training keeps it, until it has started.
    usual_handlers = (signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler)
    if options.name != "train" and signal.getsignal(signal.SIGINT) not in usual_handlers:
        signal.signal(signal.SIGINT, watcher.interrupt)
    try:
        return options.command(options, overrides)
    except SystemExit as error:  # an environment's file or a library raised it, not we
        raise UserError(f"stopped: something called sys.exit({short_repr(error.code)})") from error


def entry() -> NoReturn:
    """`main` for the shell.

    Ranks and interrupted commands skip the interpreter's shutdown, during which threads of C++
    libraries sometimes abort.
    """
    try:
        exit_code = main()
    except SystemExit as error:  # raised by the parser: --help, --version
        watcher.say_ending(error.code if isinstance(error.code, int) else 0)
        raise
    except BaseException:
        watcher.say_ending(1)
        if "RANK" not in os.environ:
            raise
        traceback.print_exc()
        exit_code = 1
    watcher.say_ending(exit_code)
    if exit_code == 130 or "RANK" in os.environ:
        end_tool_servers()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors, and which takes no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see {self.prog} --help")


def _parser(words: list[str]) -> argparse.ArgumentParser:
    """Return a parser of all commands, with the arguments of the one that begins `words`."""
    parser = _Parser(
        prog="paw", description="Policy and world-model co-training for language agents."
    )
    parser.add_argument("--version", action="version", version=f"paw {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command_parser = commands.add_parser(
            name,
            help=command.description,
            description=command.description,
            epilog=OVERRIDES if command.takes_overrides else None,
        )
        if words[:1] == [name]:
            command_parser.set_defaults(
                command=command.add_arguments(command_parser), overrides=command.takes_overrides
            )
    return parser


def _unknown(word: str, takes_overrides: bool) -> str:
    """Explain what is wrong with a word that is neither an argument nor an override."""
    if not word.startswith("--"):
        return f"'{clean(word)}' is not an option; overrides look like --optim.lr 5e-4"
    if not takes_overrides:
        return f"unknown option '{clean(word)}'; see --help"
    from paw.config.hints import hint  # loads pydantic

    key = word.removeprefix("--").replace("-", "_")
    return f"unknown option '{clean(word)}'{hint(key, {})}"


def split_overrides(arguments: list[str]) -> tuple[list[str], Overrides]:
    """Split a command line into (other arguments, overrides).

    Overrides are `--a.b value`, `--a.b=value` and their short options.
    """
    others: list[str] = []
    overrides: Overrides = {}
    command = COMMANDS.get(arguments[0]) if arguments else None
    has_own_model = command is not None and command.has_model_option
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        is_own_option = option == "--model" and has_own_model
        if option in SHORT_OPTIONS and not is_own_option:
            option = f"--{SHORT_OPTIONS[option]}"
        if not option.startswith("--") or "." not in option:
            others.append(argument)
            continue
        if not equals:
            value = next(remaining, None)
        if value is None:
            raise UserError(f"command line: '{option}' needs a value")
        overrides[option.removeprefix("--")] = value
    return others, overrides
