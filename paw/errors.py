"""Errors for users, and text that is safe to print.

A user's mistake (UserError) ends the command with one line and exit code 2. Text from an
environment, a model or a server goes through `clean` before it reaches a terminal or a log.
"""

import difflib
import importlib
import re
import reprlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LINE_CHARS = 2000
"""Maximum characters of a line on the terminal."""
ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|\x1b(?:[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?"
)
"""Terminal control sequences (ECMA-48): first colours and cursors, then titles and clipboards, then
short sequences."""
PASSWORD = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]*://[^\s/?#@:]*:)[^\s/?#]*@")
"""A URL up to the end of its password: scheme://user:password@."""
HIDDEN = "***"


class UserError(Exception):
    """A user-facing error.

    The message is one line that gives the value, its source and the fix. Passwords in its URLs
    become ***.
    """

    exit_code = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*(masked(arg) for arg in args))


class OthersCodeError(UserError):
    """A user's own code failed or took too long: a callback, a loss, an environment's tasks."""


class NoOracleError(Exception):
    """The environment has no oracle, or none for this task."""


class EnvironmentFailure(Exception):
    """The environment broke through no fault of the agent, so its episode is dropped.

    The message is one line.
    """


OURS = (KeyboardInterrupt, UserError)
"""The only exceptions from an environment that may end a run.

Any other exception, even SystemExit, costs only the episode that raised it.
"""


@contextmanager
def quietly() -> Iterator[None]:
    """Ignore whatever an environment that is broken or no longer needed raises, except Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        return


def masked(value: Any) -> Any:
    """Return a text, or a tree of lists and dicts, with the password of every URL replaced by ***.

    >>> masked({"urls": ["http://me:secret@host:8000/v1", "http://host"]})
    {'urls': ['http://me:***@host:8000/v1', 'http://host']}
    """
    if isinstance(value, str):
        return PASSWORD.sub(rf"\g<1>{HIDDEN}@", value) if "@" in value else value
    if isinstance(value, dict):
        return {key: masked(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [masked(part) for part in value]
    return value


@contextmanager
def others_code(
    origin: str,
    *,
    is_exempt: Callable[[Exception], bool] = lambda error: False,
    all_theirs: bool = False,
) -> Iterator[None]:
    """Turn a failure of a user's own code, including SystemExit, into OthersCodeError.

    Its message is one line. It begins with `origin`, the key that names the code, and says where
    the code failed.

    An Exception that did not pass through a user's code is a bug in PaW or a library, and is raised
    unchanged, unless the block runs only a user's code (`all_theirs`). An Exception for which
    `is_exempt` is true is also raised unchanged.
    """
    try:
        yield
    except OURS:
        raise
    except BaseException as error:
        location = user_location(error)
        if isinstance(error, Exception):
            is_theirs = (all_theirs or location) and not is_exempt(error)
            if not is_theirs:
                raise
        raise OthersCodeError(f"{origin}: {describe(error)}{location}") from error


def clean(value: object, limit: int = 500, *, lines: bool = False) -> str:
    """Return `value` as safe text of at most `limit` characters, on one line unless `lines`.

    Control sequences, control characters, and bidirectional and zero-width controls are removed.
    Lone surrogates become question marks. Line ends become spaces, so that no text can fake a line
    of progress. Passwords in URLs become ***.

    >>> clean("it\\x1b[2J broke\\nupdate 99/99\\u202e \\ud800!", 22)
    'it broke update 99/99 ...'
    """
    text = f"a {type(value).__name__} that cannot be printed"
    with quietly():
        text = str(value)
    text = ESCAPE.sub("", text[: 4 * limit])
    text = masked(text.encode("utf-8", "replace").decode())
    allowed = "\n\t" if lines else ""
    characters = []
    for character in text:
        if character.isprintable() or character in allowed:
            characters.append(character)
        elif character.isspace():
            characters.append(" ")
    text = "".join(characters)
    if not lines:
        text = text.strip()
    return text if len(text) <= limit else f"{text[:limit]}..."


def describe(error: BaseException) -> str:
    """Return an exception's type and message as one line, even if its `__str__` raises."""
    return f"{type(error).__name__}: {clean(error)}".removesuffix(": ")


def user_location(error: BaseException) -> str:
    """Return " (FILE, line N)" for the last line of a user's code in the traceback, or ""."""
    if isinstance(error, SyntaxError):  # its message already gives the line
        return ""
    location = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if _is_users(frame.filename):
            location = f" ({Path(frame.filename).name}, line {frame.lineno})"
    return location


def _is_users(file: str) -> bool:
    """Whether a file in a traceback is a user's, not PaW's, Python's or an installed library's."""
    package = Path(__file__).parent
    kernels = package.with_name("kernels")  # beside it in an editable install
    not_a_file = "<"
    if file.startswith((str(package), str(kernels), sysconfig.get_path("stdlib"), not_a_file)):
        return False
    return "site-packages" not in file and "dist-packages" not in file


def short_repr(value: object, limit: int = 100) -> str:
    """Return a value's repr as one short line. Long texts and containers are cut."""
    text = f"a {type(value).__name__} that cannot be printed"
    with quietly():
        text = ShortRepr(limit).repr(value)
    return clean(text, limit)


class ShortRepr(reprlib.Repr):
    """A repr that masks passwords in URLs, then cuts texts to `limit` characters."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.maxstring = limit
        self.maxother = limit

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(masked(x), level)


def needed(module: str, feature: str, extra: str, *, instead: str = "") -> Any:
    """The module of that name.

    Raises UserError if it is not installed. The message says which `feature` needs it, which
    `extra` of paw-trainer installs it, and what may be used `instead`.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        fix = f"pip install 'paw-trainer[{extra}]'"
        if instead:
            fix += f", or use {instead}"
        raise UserError(f"{feature} needs {package}: {fix} ({clean(error, 200)})") from None


def to_stderr(line: str) -> None:
    _print(line, sys.stderr, sys.__stderr__)


def to_stdout(line: str) -> None:
    _print(line, sys.stdout, sys.__stdout__)


def _print(line: str, *streams: Any) -> None:
    """Print a line to the first stream that takes it.

    The line is lost if the terminal is gone, the disk is full, or a library has closed the streams.
    """
    for stream in streams:
        with suppress(AttributeError, OSError, ValueError):
            encoding = stream.encoding or "utf-8"
            text = clean(line, LINE_CHARS).encode(encoding, "replace").decode(encoding)
            print(text, file=stream, flush=True)
            return


def progress(activity: str, done: int, total: int) -> None:
    """Show the progress of an activity on one line of a terminal. Print nothing elsewhere."""
    with suppress(AttributeError, OSError, ValueError):  # the stream may be gone, as in `_print`
        if sys.stderr.isatty():
            text = f"{activity} {done}/{total}"
            erase = f"\r{' ' * len(text)}\r" if done == total else ""
            print(f"\r{text}{erase}", end="", file=sys.stderr, flush=True)


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "did you mean 'X'?" with the candidate closest to `word`, or "" if none is close."""
    matches = difflib.get_close_matches(word[:255], list(candidates), n=1, cutoff=cutoff)
    return f"did you mean '{matches[0]}'?" if matches else ""
