"""Plug-ins by name: environments, engines, advantage estimators, losses, agents, rewards, callbacks.

A plug-in is named by a built-in name ("gigpo"), by the name of an entry point that an installed
package registers in the group `paw.<kind>`, as "module:name", or as "FILE.py:name" (a path relative
to the current folder). A program may hand one over as it is, see `give`. Nothing is imported for a
name that was not asked for, and no torch here.

A plug-in may have settings, which then are keys of its section of the recipe: a class those of its
`Config`, a subclass of `Section`; a function its keyword-only parameters.
"""

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from contextlib import chdir
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import Field, create_model
from pydantic.errors import PydanticUserError

from paw.errors import OURS, UserError, clean, describe, nearest
from paw.values import Section

ENVS = {
    "alfworld": "paw.envs.alfworld.factory:AlfworldFactory",
    "webshop": "paw.envs.webshop.factory:WebshopFactory",
    "search": "paw.envs.search.factory:SearchFactory",
    "tau2": "paw.envs.tau2:Tau2Factory",
    "next_state": "paw.envs.next_state:NextStateFactory",
    "verifiers": "paw.envs.verifiers:VerifiersFactory",
    "questions": "paw.envs.questions:QuestionsFactory",
    "openenv": "paw.envs.openenv:OpenenvFactory",
    "gymnasium": "paw.envs.gymnasium:GymnasiumFactory",
}
SETTINGS = {
    "envs.alfworld": "paw.envs.settings:AlfworldConfig",
    "envs.webshop": "paw.envs.settings:WebshopConfig",
    "envs.search": "paw.envs.settings:SearchConfig",
    "envs.verifiers": "paw.envs.inverted:VerifiersConfig",
}
"""Of built-in plug-ins that are long, "module:name" of their `Config`: its keys are known without importing them."""
CALLBACKS = {
    "progress": "paw.tools.callbacks:Progress",
    "samples": "paw.tools.callbacks:Samples",
    "report": "paw.tools.callbacks:Report",
    "tensorboard": "paw.tools.trackers:TensorBoard",
    "wandb": "paw.tools.trackers:Wandb",
    "trackio": "paw.tools.trackers:Trackio",
    "mlflow": "paw.tools.trackers:Mlflow",
}
BUILT_IN: dict[str, dict[str, str]] = {
    "envs": ENVS,
    "engines": {
        "transformers": "paw.rollouts.engines.built_in:Transformers",
        "vllm": "paw.rollouts.engines.built_in:Vllm",
        "server": "paw.rollouts.engines.built_in:Server",
    },
    "advantages": {name: f"paw.algo.advantages:{name}" for name in ("grpo", "rloo", "gigpo")}
    | {"ppo": "paw.algo.gae:gae"},  # one a token, from the critic's values
    "losses": {
        name: f"paw.algo.loss:{name}"
        for name in ("ppo", "cispo", "gspo", "cmae", "mae", "ce", "gce")
    },
    "agents": {
        "plain": "paw.rollouts.episode:plain",
        "react": "paw.agents.react:React",
        "reflexion": "paw.agents.react:Reflexion",
        "search-r1": "paw.agents.search_r1:search_r1",
        "zerosearch": "paw.agents.search_r1:search_r1",
    },
    "rewards": {},
    "scores": {},
    "callbacks": CALLBACKS,
    "retrievers": {"zerosearch": "paw.agents.zerosearch:make_simulator"},
}
"""Name -> "module:name" of the plug-ins that come with PaW, by kind."""
CALLED = ("advantages", "losses", "agents", "rewards", "scores")
"""Kinds of functions and classes; others may be objects."""
FILE_MODULE = "paw_plugin_"
"""Begins the name of a module that is a file."""
_files: dict[tuple[str, int, int], ModuleType] = {}
_given: dict[str, Any] = {}


def names(kind: str) -> list[str]:
    """Built-in names of a kind, and those that installed packages register."""
    return sorted({*BUILT_IN[kind], *_registered(kind)})


def give(plugin: Any) -> str:
    """A name for a class, function or object that this program made; `load` finds it while the program runs."""
    name = f"given:{getattr(plugin, '__qualname__', type(plugin).__qualname__)}"
    while _given.setdefault(name, plugin) is not plugin:
        name += "_"
    return name


def importable(plugin: Any) -> str:
    """The name under which another process finds a plug-in: a name as it is, if that is not one of
    `give`. UserError if it has none."""
    given = _given.get(plugin) if isinstance(plugin, str) else plugin
    if given is None:
        return plugin
    module = sys.modules.get(getattr(given, "__module__", None) or "")
    name = getattr(given, "__qualname__", "")
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not given or module is None or module.__name__ == "__main__":
        kind = getattr(given, "__qualname__", type(given).__qualname__)
        raise UserError(
            f"{clean(kind)} was handed over by a program, and another process cannot import it: put it in a file of "
            "its own and name it, as 'module:name' or 'FILE.py:name'"
        )
    file = module.__file__ if module.__name__.startswith(FILE_MODULE) else None
    return f"{file or module.__name__}:{name}"


def load(kind: str, name: str) -> Any:
    """The class, function or object that `name` means.

    UserError where there is none, or it cannot be imported.
    """
    if not name:
        raise UserError("it is not set: give a built-in name, 'module:name' or 'FILE.py:name'")
    if name.startswith("given:"):
        if name not in _given:
            raise UserError(
                f"'{clean(name)}' was handed over by a program; run that again, or name a 'FILE.py:name'"
            )
        return _callable(kind, _given[name], name)
    target = name if ":" in name else BUILT_IN[kind].get(name) or _registered(kind).get(name)
    if target is None:
        hint = nearest(name, names(kind)) or f"there are: {', '.join(names(kind) or ['none'])}"
        raise UserError(
            f"there is no '{clean(name)}': {hint} (or give 'module:name' or 'FILE.py:name')"
        )
    place, _, attributes = target.rpartition(":")
    found = (
        import_file(place, f"'{name}'") if place.endswith(".py") else _import_module(place, name)
    )
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            near = nearest(attribute, [key for key in vars(found) if key[0] != "_"])
            what = "file" if place.endswith(".py") else "module"
            raise UserError(
                f"'{clean(name)}': the {what} has no '{clean(attribute)}'" + (near and f"; {near}")
            )
        found = getattr(found, attribute)
    return _callable(kind, found, name)


def _callable(kind: str, found: Any, name: str) -> Any:
    if kind in CALLED and not callable(found):
        raise UserError(f"'{clean(name)}' is a {type(found).__name__}, no function or class")
    return found


def make(kind: type, config: Any) -> Any:
    """An object of a class; with its section of the recipe, where it has settings or cannot be made without."""
    takes = list(inspect.signature(kind).parameters.values())
    positional = [
        p for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    needed = any(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in positional)
    return kind(config) if needed or (positional and hasattr(kind, "Config")) else kind()


def settings(plugin: Any, name: str, base: type[Section] = Section) -> type[Section]:
    """The keys of a plug-in, beside those of `base`, as a section: an object has none. UserError
    for what cannot be keys."""
    return _settings(plugin, name, base) if callable(plugin) else base


@cache
def _settings(plugin: Any, name: str, base: type[Section]) -> type[Section]:
    if isinstance(plugin, type):
        own = getattr(plugin, "Config", Section)
        if not (isinstance(own, type) and issubclass(own, Section)):
            raise UserError(
                f"'{name}': {plugin.__name__}.Config must be a subclass of paw.config.Section"
            )
        return (
            own
            if issubclass(own, base)
            else base
            if own is Section
            else type(own.__name__, (own, base), {})
        )
    try:
        texts = _described_arguments(plugin.__doc__ or "")
        found: dict[str, Any] = {}
        for key, given in inspect.signature(plugin, eval_str=True).parameters.items():
            if given.kind is given.KEYWORD_ONLY:
                if given.annotation is given.empty:
                    needs = f"needs a type: {key}: float = 1.0"
                    raise UserError(f"'{name}': the parameter '{key}' is a setting, and {needs}")
                default = ... if given.default is given.empty else given.default
                found[key] = (given.annotation, Field(default, description=texts.get(key)))
        return create_model(base.__name__, __base__=base, **found) if found else base
    except (TypeError, ValueError, NameError, PydanticUserError) as error:
        raise UserError(
            f"'{name}': its keyword-only parameters cannot be settings: {clean(error)}"
        ) from None


def _described_arguments(docstring: str) -> dict[str, str]:
    """The text of each line "name: text" with the lines below it that are indented more."""
    entries = re.finditer(r"^( +)(\w+): (.+(?:\n\1 +\S.*)*)$", docstring, re.MULTILINE)
    return {entry[2]: " ".join(entry[3].split()) for entry in entries}


def import_file(file: str, origin: str) -> ModuleType:
    """The module of a Python file, imported once for each state of the file.

    A UserError begins with `origin`.
    """
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise UserError(f"{origin}: there is no file {path}; paths count from the current folder")
    state = (str(path), path.stat().st_mtime_ns, path.stat().st_size)
    if state in _files:
        return _files[state]
    spec = importlib.util.spec_from_file_location(FILE_MODULE + path.stem, path)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(
        spec
    )  # dataclasses look their module up
    try:
        with chdir(Path.cwd()):  # relative paths still have to be read, whatever the file does
            spec.loader.exec_module(module)
    except OURS:
        raise
    except BaseException as error:  # SystemExit as well
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise UserError(f"{origin}: {where}: {describe(error)}") from error
    _files[state] = module
    return module


def _import_module(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except OURS:
        raise
    except BaseException as error:  # SystemExit as well
        raise UserError(
            f"'{clean(name)}': the module cannot be imported: {describe(error)}"
        ) from error


@cache
def _registered(kind: str) -> dict[str, str]:
    """Name -> "module:name" of the entry points of a kind."""
    return {point.name: point.value for point in entry_points(group=f"paw.{kind}")}
