"""For programs that train with PaW: configuration, command line, and mistakes as one line.

A program with a function `main` takes any key of the configuration, as the `paw` command does:

    def main(words):
        config = paw.load("quickstart", words, **{"env.name": MyGame})
        print(paw.train(config))

    if __name__ == "__main__":
        paw.script(main)
"""

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from paw.cli import exit_code, split_overrides
from paw.config.recipe import load_named
from paw.config.sections import Config
from paw.errors import UserError, clean, short_repr

KEY = re.compile(r"[a-z_]+(\.\w[\w.-]*)+=")
"""Start of an override without dashes, `optim.lr=1e-4`."""


def load(recipe: str | Path | Config, words: Sequence[str] = (), **changes: Any) -> Config:
    """The configuration of a recipe, given by name or path, with keys changed.

    For example `load("quickstart", **{"optim.lr": 1e-4})`. The first argument may also be a
    configuration, whose keys are then changed. `words` are those of a command line (`--optim.lr
    1e-4` or `optim.lr=1e-4`), and come after `changes`. A function as `model.path`, such as
    `paw.smollm2`, is called unless words name a model. Raises UserError if the recipe or a key is
    unknown, or a value is wrong.
    """
    if words:
        changes |= overrides_of(words)
    if callable(make_model := changes.get("model.path")):
        changes["model.path"] = make_model()
    return load_named(recipe, changes)


def script(main: Callable[[list[str]], object]) -> NoReturn:
    """Call `main` with the words after the script's name, then end the process.

    A UserError is one line on stderr and exit code 2, Ctrl-C is exit code 130; other exceptions
    keep their traceback. `--help` prints the docstring of main's module instead.
    """
    words = sys.argv[1:]

    def run() -> int:
        if "--help" in words or "-h" in words:
            print(inspect.cleandoc(sys.modules[main.__module__].__doc__ or ""))
        else:
            main(words)
        return 0

    sys.exit(exit_code(run))


def overrides_of(words: Sequence[str]) -> dict[str, str]:
    """Return the keys that the words of a command line set, with their texts.

    Words are `--optim.lr 1e-4`, `--optim.lr=1e-4` or `optim.lr=1e-4`. Raises UserError if one is
    none of these.

    >>> overrides_of(["run.updates=2", "--optim.lr", "1e-4"])
    {'run.updates': '2', 'optim.lr': '1e-4'}
    """
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise UserError(
            f"words = {short_repr(words)}: they must be a list of texts, "
            "such as ['--optim.lr', '1e-4']"
        )
    options = [f"--{word}" if KEY.match(word) else word for word in words]
    others, overrides = split_overrides(options)
    if others:
        raise UserError(
            f"command line: '{clean(others[0])}' sets no key; "
            "write --optim.lr 1e-4 or optim.lr=1e-4 (docs/keys.md has all keys)"
        )
    return overrides
