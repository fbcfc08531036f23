"""Plug-ins by name: environments, engines, agents, advantage estimators, losses, rewards and
callbacks.

A plug-in is named in one of four ways: by a built-in name ("gigpo"), by an entry point that an
installed package registers in the group `paw.<kind>`, by "module:name", or by "FILE.py:name" (a
path relative to the current folder). A program may also pass the plug-in itself, see `give`. Only
the named plug-in is imported. This module imports no torch.

A plug-in may have settings, which are keys of its section of the recipe. They are the keys of a
class's `Config`, a subclass of `Section`, or a function's keyword-only parameters.
"""

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from contextlib import chdir
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pydantic import ConfigDict, Field
from pydantic.errors import PydanticUserError

from paw.config.values import Section
from paw.errors import OURS, UserError, clean, describe, nearest

DESCRIBED = ConfigDict(use_attribute_docstrings=False)
"""Options of a section that is made here and whose keys already have descriptions. pydantic would
search every module for its source."""


class BuiltInPlugin(NamedTuple):
    """A built-in plug-in of a kind whose key's description says what each one does."""

    target: str
    """module:name"""
    meaning: str
    """What it does, in a few words."""


ENVS = {
    "alfworld": "paw.envs.alfworld.factory:AlfworldFactory",
    "webshop": "paw.envs.webshop.factory:WebshopFactory",
    "search": "paw.envs.search.factory:SearchFactory",
    "terminal": "paw.envs.terminal.factory:TerminalFactory",
    "tau2": "paw.envs.tau2:Tau2Factory",
    "next_state": "paw.envs.next_state:NextStateFactory",
    "verifiers": "paw.envs.bridges.verifiers:VerifiersFactory",
    "questions": "paw.envs.bridges.questions:QuestionsFactory",
    "tasks": "paw.envs.task_files:TasksFactory",
    "openenv": "paw.envs.bridges.openenv:OpenenvFactory",
    "gymnasium": "paw.envs.bridges.gymnasium:GymnasiumFactory",
}
SETTINGS = {
    "envs.alfworld": "paw.envs.settings:AlfworldConfig",
    "envs.webshop": "paw.envs.settings:WebshopConfig",
    "envs.search": "paw.envs.settings:SearchConfig",
    "envs.verifiers": "paw.envs.inverted:VerifiersConfig",
}
"""Built-in plug-in -> "module:name" of its `Config`, if that can be imported separately.

Its keys are then known without importing the plug-in, which takes long.
"""
CALLBACKS = {
    "progress": "paw.tools.train.callbacks:Progress",
    "samples": "paw.tools.train.callbacks:Samples",
    "report": "paw.tools.train.callbacks:Report",
    "tensorboard": "paw.tools.train.trackers:TensorBoard",
    "wandb": "paw.tools.train.trackers:Wandb",
    "trackio": "paw.tools.train.trackers:Trackio",
    "mlflow": "paw.tools.train.trackers:Mlflow",
}
ENGINES = {
    "transformers": BuiltInPlugin(
        "paw.rollouts.engines.transformers:TransformersEngine",
        meaning="the trainer's own model",
    ),
    "vllm": BuiltInPlugin(
        "paw.rollouts.engines.vllm:VllmEngine",
        meaning="an engine in each rank, next to the trainer",
    ),
    "server": BuiltInPlugin(
        "paw.rollouts.engines.server:ServerEngine",
        meaning="vLLM servers on their own devices or machines (docs/scale.md)",
    ),
}
POLICY_LOSSES = {
    "ppo": "paw.algo.loss:ppo",
    "cispo": "paw.algo.loss:cispo",
    "gspo": "paw.algo.loss:gspo",
}
WORLD_LOSSES = {
    "cmae": BuiltInPlugin("paw.algo.loss:cmae", meaning="[p <= rho] (1 - p)"),
    "mae": BuiltInPlugin("paw.algo.loss:mae", meaning="1 - p"),
    "ce": BuiltInPlugin("paw.algo.loss:ce", meaning="-log p"),
    "gce": BuiltInPlugin("paw.algo.loss:gce", meaning="(1 - p^q) / q (arXiv 1805.07836)"),
}
BUILT_IN: dict[str, dict[str, str]] = {
    "envs": ENVS,
    "engines": {name: engine.target for name, engine in ENGINES.items()},
    "advantages": {
        "grpo": "paw.algo.advantages:grpo",
        "rloo": "paw.algo.advantages:rloo",
        "gigpo": "paw.algo.advantages:gigpo",
        "ppo": "paw.algo.gae:gae",  # one per token, from the critic's values
    },
    "losses": POLICY_LOSSES | {name: loss.target for name, loss in WORLD_LOSSES.items()},
    "agents": {
        "plain": "paw.rollouts.episode:plain",
        "react": "paw.agents.react:React",
        "reflexion": "paw.agents.react:Reflexion",
        "search-r1": "paw.agents.search_r1:search_r1",
        "zerosearch": "paw.agents.search_r1:search_r1",
        "command": "paw.agents.command:Command",
    },
    "rewards": {"judge": "paw.agents.judge:Judge"},
    "scores": {},
    "curricula": {},
    "callbacks": CALLBACKS,
    "retrievers": {"zerosearch": "paw.agents.zerosearch:make_simulator"},
}
"""Name -> "module:name" of the plug-ins that come with PaW, by kind."""
CALLED = ("advantages", "losses", "agents", "rewards", "scores", "curricula")
"""Kinds whose plug-ins must be functions or classes. Plug-ins of other kinds may be objects."""
FILE_MODULE = "paw_plugin_"
"""Prefix of the names of modules that were imported from files."""
GIVEN = "given:"
"""Prefix of the names of plug-ins that a program passed as objects."""
_files: dict[tuple[str, int, int], ModuleType] = {}
"""(path, modification time, size) of a file -> its module."""
_handed_over: dict[str, Any] = {}
"""Name -> plug-in that a program has passed."""


def meanings(table: Mapping[str, BuiltInPlugin]) -> str:
    """Return "name: meaning" of each plug-in of a table, for the description of a key."""
    return "; ".join(f"{name}: {plugin.meaning}" for name, plugin in table.items())


def names(kind: str) -> list[str]:
    """Return the built-in names of a kind, and those that installed packages register."""
    return sorted({*BUILT_IN[kind], *_registered(kind)})


def give(plugin: Any) -> str:
    """Return a name for a class, function or object of this program.

    `load` finds it by this name while the program runs.
    """
    name = f"{GIVEN}{_name_of(plugin)}"
    while _handed_over.setdefault(name, plugin) is not plugin:
        name += "_"
    return name


def importable(plugin: Any) -> str:
    """Return a name by which another process finds a plug-in.

    A name that does not come from `give` is returned unchanged. Raises UserError if another process
    cannot import the plug-in.
    """
    if isinstance(plugin, str):
        if plugin not in _handed_over:
            return plugin
        plugin = _handed_over[plugin]

    module = sys.modules.get(getattr(plugin, "__module__", None) or "")
    attributes = getattr(plugin, "__qualname__", "")
    same_name: Any = module
    for attribute in attributes.split("."):
        same_name = getattr(same_name, attribute, None)
    if same_name is not plugin or module is None or module.__name__ == "__main__":
        raise UserError(
            f"{clean(_name_of(plugin))} was passed by a program, and another process cannot "
            "import it; put it in its own file and name it, as 'module:name' or 'FILE.py:name'"
        )
    if module.__name__.startswith(FILE_MODULE):
        return f"{module.__file__}:{attributes}"
    return f"{module.__name__}:{attributes}"


def _name_of(plugin: Any) -> str:
    return getattr(plugin, "__qualname__", type(plugin).__qualname__)


def load(kind: str, name: str) -> Any:
    """Return the class, function or object of that name.

    Raises UserError if there is none, or it cannot be imported.
    """
    if not name:
        raise UserError("it is not set: give a built-in name, 'module:name' or 'FILE.py:name'")
    if name.startswith(GIVEN):
        if name not in _handed_over:
            raise UserError(
                f"'{clean(name)}' was passed by a program; run that program again, "
                "or name a 'FILE.py:name'"
            )
        return _checked(kind, _handed_over[name], name)

    target = name
    if ":" not in name:
        target = BUILT_IN[kind].get(name) or _registered(kind).get(name)
    if target is None:
        hint = nearest(name, names(kind)) or f"there are: {', '.join(names(kind) or ['none'])}"
        raise UserError(
            f"there is no '{clean(name)}': {hint} (or give 'module:name' or 'FILE.py:name')"
        )

    source, _, attributes = target.rpartition(":")
    plugin: Any = _import(source, name)
    for attribute in attributes.split("."):
        if not hasattr(plugin, attribute):
            public = [key for key in vars(plugin) if not key.startswith("_")]
            hint = nearest(attribute, public)
            kind_of_source = "file" if source.endswith(".py") else "module"
            raise UserError(
                f"'{clean(name)}': the {kind_of_source} has no '{clean(attribute)}'"
                + (f"; {hint}" if hint else "")
            )
        plugin = getattr(plugin, attribute)
    return _checked(kind, plugin, name)


def _checked(kind: str, plugin: Any, name: str) -> Any:
    """Return the plug-in. Raises UserError if it must be a function or class but is not."""
    if kind in CALLED and not callable(plugin):
        raise UserError(f"'{clean(name)}' is a {type(plugin).__name__}, not a function or class")
    return plugin


def make(plugin: type, config: Any) -> Any:
    """Make an object of a class: plugin(config), or plugin() if it takes no argument and no
    settings.

    `config` is the section of the recipe that names the plug-in.
    """
    positional = []
    for parameter in inspect.signature(plugin).parameters.values():
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            positional.append(parameter)
    needs_argument = any(
        parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        for parameter in positional
    )
    takes_settings = bool(positional) and hasattr(plugin, "Config")
    return plugin(config) if needs_argument or takes_settings else plugin()


def settings(plugin: Any, name: str, base: type[Section] = Section) -> type[Section]:
    """Return the section `base` with the keys of a plug-in. An object adds none.

    Raises UserError if its settings cannot be keys.
    """
    return _settings(plugin, name, base) if callable(plugin) else base


@cache
def _settings(plugin: Any, name: str, base: type[Section]) -> type[Section]:
    if isinstance(plugin, type):
        return _settings_of_class(plugin, name, base)
    try:
        return _settings_of_function(plugin, name, base)
    except (TypeError, ValueError, NameError, PydanticUserError) as error:
        raise UserError(
            f"'{name}': its keyword-only parameters cannot be settings: {clean(error)}"
        ) from None


def _settings_of_class(plugin: type, name: str, base: type[Section]) -> type[Section]:
    config = getattr(plugin, "Config", Section)
    if not (isinstance(config, type) and issubclass(config, Section)):
        raise UserError(
            f"'{name}': {plugin.__name__}.Config must be a subclass of paw.config.Section"
        )
    if issubclass(config, base):
        return config
    if config is Section:
        return base
    return type(config.__name__, (config, base), {"model_config": DESCRIBED})


def _settings_of_function(plugin: Any, name: str, base: type[Section]) -> type[Section]:
    descriptions = _described_parameters(plugin.__doc__ or "")
    annotations: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for key, parameter in inspect.signature(plugin, eval_str=True).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        if parameter.annotation is parameter.empty:
            raise UserError(
                f"'{name}': the parameter '{key}' is a setting, and needs a type: "
                f"{key}: float = 1.0"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        annotations[key] = parameter.annotation
        fields[key] = Field(default, description=descriptions.get(key))
    if not fields:
        return base
    namespace = {"model_config": DESCRIBED, "__annotations__": annotations, **fields}
    return type(base.__name__, (base,), namespace)


def _described_parameters(docstring: str) -> dict[str, str]:
    """Return name -> text of each line "name: text", with the more indented lines below it."""
    entries = re.finditer(r"^( +)(\w+): (.+(?:\n\1 +\S.*)*)$", docstring, re.MULTILINE)
    return {entry[2]: " ".join(entry[3].split()) for entry in entries}


def import_file(file: str, origin: str) -> ModuleType:
    """Return the module of a Python file, imported once for each state of the file.

    Raises UserError, beginning with `origin`, if there is no such file or its code fails.
    """
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise UserError(
            f"{origin}: there is no file {path}; paths are relative to the current folder"
        )
    file_state = (str(path), path.stat().st_mtime_ns, path.stat().st_size)
    if file_state in _files:
        return _files[file_state]

    spec = importlib.util.spec_from_file_location(FILE_MODULE + path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        with chdir(Path.cwd()):  # restored afterwards: our relative paths must still hold
            spec.loader.exec_module(module)
    except OURS:
        raise
    except BaseException as error:  # SystemExit too
        location = str(path)
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(path):
                location = f"{path}, line {frame.lineno}"
        raise UserError(f"{origin}: {location}: {describe(error)}") from error
    _files[file_state] = module
    return module


def _import(source: str, name: str) -> ModuleType:
    """Import the module that `source` names, a FILE.py or a module. `name` is the plug-in's."""
    if source.endswith(".py"):
        return import_file(source, f"'{name}'")
    try:
        return importlib.import_module(source)
    except OURS:
        raise
    except BaseException as error:  # SystemExit too
        raise UserError(
            f"'{clean(name)}': the module cannot be imported: {describe(error)}"
        ) from error


@cache
def _registered(kind: str) -> dict[str, str]:
    """Name -> "module:name" of the entry points of a kind."""
    return {point.name: point.value for point in entry_points(group=f"paw.{kind}")}
