"""User-facing errors, and text that is safe to print.

A mistake of the user ends the command with one line and exit code 2 (UserError). Whatever an
environment, a model or a server wrote passes `clean` before it reaches a terminal or a log.
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
"""Characters of a line on the terminal."""
ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|\x1b(?:[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?"
)
"""Terminal control sequences (ECMA-48): colours and cursors, then titles and clipboards, then short
ones."""
PASSWORD = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]*://[^\s/?#@:]*:)[^\s/?#]*@")
"""A URL up to the end of its password: scheme://user:password@."""
HIDDEN = "***"


class UserError(Exception):
    """A user-facing error.

    The message names the value, where it came from and the fix, in one line. Passwords of URLs in
    it become ***.
    """

    exit_code = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*(masked(arg) for arg in args))


class OthersCodeError(UserError):
    """A user's own code failed or took too long: a callback, a loss, an environment's tasks."""


class NoOracleError(Exception):
    """The environment has no oracle, or none for this task."""


class EnvironmentFailure(Exception):
    """The environment broke, through no fault of the agent: its episode is dropped.

    The message is one line.
    """


OURS = (KeyboardInterrupt, UserError)
"""The exceptions by which an environment may end a run.

Anything else that it raises, SystemExit too, costs only its own episode.
"""


@contextmanager
def quietly() -> Iterator[None]:
    """Ignore whatever a broken or no longer needed environment raises, except Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        return


def masked(value: Any) -> Any:
    """A text, or a tree of lists and dicts, with the password of every URL in it replaced by ***.

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
    """Raise a failure of a user's own code, SystemExit included, as OthersCodeError.

    Its message is one line that begins with `origin`, the key that names the code, and says where
    the code failed.

    An Exception that did not pass through a user's code is a bug of ours or of a library, and is
    raised as it is, unless only a user's code runs in the block (`all_theirs`). An Exception for
    which `is_exempt` is true is raised as it is too.
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
    """`value` as text that is safe to print: at most `limit` characters, one line unless `lines`.

    Control sequences, control characters, bidirectional and zero-width controls are removed, lone
    surrogates become question marks, and line ends become spaces, so that no text fakes a line of
    progress. Passwords of URLs become ***.

    >>> clean("it\\x1b[2J broke\\nstep 99/99\\u202e \\ud800!", 20)
    'it broke step 99/99 ...'
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
    """Type and message of an exception as one line, also of one whose `__str__` raises."""
    return f"{type(error).__name__}: {clean(error)}".removesuffix(": ")


def user_location(error: BaseException) -> str:
    """ " (FILE, line N)" of the last line of a user's own code that an exception passed, or ""."""
    if isinstance(error, SyntaxError):  # its message has the line
        return ""
    location = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if _is_users(frame.filename):
            location = f" ({Path(frame.filename).name}, line {frame.lineno})"
    return location


def _is_users(file: str) -> bool:
    """Whether a traceback's file is a user's own: not PaW's, Python's or an installed library's."""
    package = Path(__file__).parent
    kernels = package.with_name("kernels")  # beside it in an editable install
    not_a_file = "<"
    if file.startswith((str(package), str(kernels), sysconfig.get_path("stdlib"), not_a_file)):
        return False
    return "site-packages" not in file and "dist-packages" not in file


def short_repr(value: object, limit: int = 100) -> str:
    """The repr of a value as one short line, long texts and containers cut."""
    text = f"a {type(value).__name__} that cannot be printed"
    with quietly():
        text = ShortRepr(limit).repr(value)
    return clean(text, limit)


class ShortRepr(reprlib.Repr):
    """A repr that cuts texts to `limit` characters, after passwords of URLs are masked."""

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

    No stream does if the terminal is gone, the disk is full, or a library has closed them.
    """
    for stream in streams:
        with suppress(AttributeError, OSError, ValueError):
            encoding = stream.encoding or "utf-8"
            text = clean(line, LINE_CHARS).encode(encoding, "replace").decode(encoding)
            print(text, file=stream, flush=True)
            return


def progress(activity: str, done: int, total: int) -> None:
    """Show on one line of a terminal how far an activity is; elsewhere show nothing."""
    with suppress(AttributeError, OSError, ValueError):  # the stream may be gone, as in `_print`
        if sys.stderr.isatty():
            text = f"{activity} {done}/{total}"
            erase = f"\r{' ' * len(text)}\r" if done == total else ""
            print(f"\r{text}{erase}", end="", file=sys.stderr, flush=True)


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """ "did you mean 'X'?" with the candidate most like `word`; "" if none is like it."""
    matches = difflib.get_close_matches(word[:255], list(candidates), n=1, cutoff=cutoff)
    return f"did you mean '{matches[0]}'?" if matches else ""
