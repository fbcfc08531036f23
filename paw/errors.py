"""User-facing errors, and text that is safe to print.

A mistake of the user ends the command with one line and exit code 2 (UserError). Whatever an
environment, a model or a server wrote passes `clean` before it reaches a terminal or a log.
"""

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
"""Terminal control sequences (ECMA-48): of colours and cursors, of titles and clipboards, of a few characters."""


PASSWORD = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]*://[^\s/?#@:]*:)[^\s/?#]*@")
"""A URL up to the end of its password, scheme://user:password@."""
HIDDEN = "***"


class UserError(Exception):
    """A user-facing error. The message names the value, where it came from and the fix, in one
    line; passwords of URLs in it become ***."""

    exit_code = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*(masked(arg) for arg in args))


class OthersCodeError(UserError):
    """Code that is not ours failed, or took too long: a callback, a loss, the tasks of a user's own environment."""


class NoOracleError(Exception):
    """An environment has no oracle, or none for this task."""


class EnvironmentFailure(Exception):
    """The environment broke, through no fault of the agent: its episode is dropped.

    One line says how.
    """


OURS = (KeyboardInterrupt, UserError)
"""All that an environment may end a run with; anything else it raises, SystemExit too, costs its own episode."""


@contextmanager
def quietly() -> Iterator[None]:
    """Ignores what an environment raises that is broken or no longer needed; Ctrl-C passes."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        return


def masked(value: Any) -> Any:
    """A text, or a tree of lists and dicts, with *** in place of the password of every URL in it.

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
    what: str, *, spare: Callable[[Exception], bool] = lambda error: False, all_theirs: bool = False
) -> Iterator[None]:
    """A failure of code that is not ours, SystemExit included, is one line: an OthersCodeError that
    begins with `what`, the key that names the code, and says where it failed.

    An Exception that passed no one else's code is a bug of ours, or a library's, and keeps its
    traceback, unless nothing but their code runs inside (`all_theirs`); so does one to `spare`.
    """
    try:
        yield
    except OURS:
        raise
    except BaseException as error:
        is_theirs = not isinstance(error, Exception) or (
            (all_theirs or place(error)) and not spare(error)
        )
        if not is_theirs:
            raise
        raise OthersCodeError(f"{what}: {describe(error)}{place(error)}") from error


def clean(value: object, limit: int = 500, *, lines: bool = False) -> str:
    """`value` as text that is safe to print: one line (unless `lines`) of at most `limit` characters.

    Control sequences, control characters, bidirectional and zero-width controls are taken out, lone
    surrogates become question marks, and line ends spaces, so that no text fakes a line of
    progress. Passwords of URLs become ***.

    >>> clean("it\\x1b[2J broke\\nstep 99/99\\u202e \\ud800!", 20)
    'it broke step 99/99 ...'
    """
    text = f"a {type(value).__name__} that cannot be printed"
    with quietly():
        text = str(value)
    text = masked(ESCAPE.sub("", text[: 4 * limit]).encode("utf-8", "replace").decode())
    kept = "\n\t" if lines else ""
    text = "".join(c if c.isprintable() or c in kept else " " if c.isspace() else "" for c in text)
    text = text if lines else text.strip()
    return text if len(text) <= limit else f"{text[:limit]}..."


def describe(error: BaseException) -> str:
    """Type and message of an exception as one line. Holds for one whose `__str__` raises, too."""
    return f"{type(error).__name__}: {clean(error)}".removesuffix(": ")


def place(error: BaseException) -> str:
    """ " (FILE, line N)", the last that an exception passed which is neither ours nor a library's; "" without one."""
    if isinstance(error, SyntaxError):  # which says it itself
        return ""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not _is_no_users(frame.filename)
    ]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _is_no_users(file: str) -> bool:
    """Whether a file is PaW's (an editable install has its kernels in a folder beside it), Python's or a library's."""
    package = Path(__file__).parent
    folders = (str(package), str(package.with_name("kernels")), sysconfig.get_path("stdlib"), "<")
    return file.startswith(folders) or "site-packages" in file or "dist-packages" in file


def shown(value: object, limit: int = 100) -> str:
    """The repr of a value as one short line, long texts and containers cut."""
    text = f"a {type(value).__name__} that cannot be printed"
    with quietly():
        text = ShortRepr(limit).repr(value)
    return clean(text, limit)


class ShortRepr(reprlib.Repr):
    """A repr whose texts are at most `limit` long, passwords of URLs masked before they are cut."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.maxstring = limit
        self.maxother = limit

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(masked(x), level)


def needed(module: str, what: str, extra: str, *, instead: str = "") -> Any:
    """That module. UserError where it is not installed: `what` needs it, which extra of paw-trainer
    has it, and what may be used `instead`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name, fix = module.partition(".")[0], f"pip install 'paw-trainer[{extra}]'"
        fix += instead and f", or use {instead}"
        raise UserError(f"{what} needs {name}: {fix} ({clean(error, 200)})") from None


def to_stderr(line: str) -> None:
    _print(line, sys.stderr, sys.__stderr__)


def to_stdout(line: str) -> None:
    _print(line, sys.stdout, sys.__stdout__)


def _print(line: str, *streams: Any) -> None:
    """To the first that takes it; none does where a terminal is gone, a disk full or a library has closed them."""
    for stream in streams:
        with suppress(AttributeError, OSError, ValueError):
            encoding = stream.encoding or "utf-8"
            print(
                clean(line, LINE_CHARS).encode(encoding, "replace").decode(encoding),
                file=stream,
                flush=True,
            )
            return


def progress(what: str, done: int, total: int) -> None:
    """How far something is, in place on a terminal; nothing elsewhere."""
    with suppress(AttributeError, OSError, ValueError):  # as above
        if sys.stderr.isatty():
            text = f"{what} {done}/{total}"
            print(
                f"\r{text}" + f"\r{' ' * len(text)}\r" * (done == total),
                end="",
                file=sys.stderr,
                flush=True,
            )


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """ "did you mean 'X'?" of the known word that is most like `word`, or "" where none is like it."""
    import difflib

    near = difflib.get_close_matches(word[:255], list(known), n=1, cutoff=cutoff)
    return f"did you mean '{near[0]}'?" if near else ""
