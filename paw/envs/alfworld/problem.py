"""One ALFWorld problem, parsed once and shared by every episode that plays it.

A game file (`game.tw-pddl`) is a JSON object: the PDDL domain, the text grammar, the PDDL problem and a walkthrough.
Domain and grammar are the same for every game of a release, so their rules are written out in `household.py`; what is
read here is the problem: its initial facts and its goal. PDDL is case-insensitive, and everything is kept lower-case.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paw.errors import UserError

KINDS = ("pick", "look", "clean", "heat", "cool", "two")
"""ALFWorld's six task types, in the order of its TASK_TYPES."""
REQUIRED_STATE = {"clean": "clean", "heat": "hot", "cool": "cool"}
"""The state the object of a goal must have been brought into."""

Facts = Mapping[str, Iterable[tuple[str, ...]]]
"""Predicate name -> argument tuples, all lower-case."""

_COMMENT = re.compile(r";[^\n]*")
_FACT = re.compile(r"\((\w+)((?:\s+[^\s()]+)*)\s*\)")
_TASK = re.compile(r'"rhs":\s*("Your task is to: (?:[^"\\]|\\.)*")')
_SINK_RULE = re.compile(r"^\s*\(receptacleType \?r SinkType\)", re.MULTILINE)
_STATE_PREDICATES = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "issliced": "sliced", "istoggled": "toggled"}
_KEYS = ("pddl_domain", "grammar", "pddl_problem")


@dataclass(frozen=True)
class Goal:
    kind: str
    """One of KINDS."""
    object: str
    """Type of the object to handle, such as "mugtype"."""
    target: str
    """Type of the receptacle to put it in; for "look", of the lamp."""


@dataclass(frozen=True, eq=False)
class Game:
    """Everything about a problem that no action changes, and the state it starts from."""

    task: str
    """The sentence "Your task is to: ..." as the grammar says it."""
    goal: Goal
    name: str
    """Path of the file, or what the generator calls it."""
    walkthrough: list[str] | None = field(repr=False)

    names: dict[str, str] = field(repr=False)
    """Id -> the name the player sees: "mug_bar__plus_01..." -> "mug 2"."""
    location: dict[str, str] = field(repr=False)
    """Receptacle id -> location id, receptacles in sorted order."""
    at: dict[str, tuple[str, ...]] = field(repr=False)
    """Location id -> its receptacles, sorted."""
    receptacle_type: dict[str, str] = field(repr=False)
    object_type: dict[str, str] = field(repr=False)
    can_contain: frozenset[tuple[str, str]] = field(repr=False)
    """Pairs (receptacle type, object type)."""
    openable: frozenset[str] = field(repr=False)
    pickupable: frozenset[str] = field(repr=False)
    cleanable: frozenset[str] = field(repr=False)
    heatable: frozenset[str] = field(repr=False)
    coolable: frozenset[str] = field(repr=False)
    toggleable: frozenset[str] = field(repr=False)
    sliceable: frozenset[str] = field(repr=False)
    inner: dict[str, tuple[str, ...]] = field(repr=False)
    """Objects that are receptacles themselves (a bowl) -> what lies in them; nothing ever moves in or out."""
    sink_types: frozenset[str] = field(repr=False)
    """Receptacle types in which objects are cleaned."""

    start: str = field(repr=False)
    """Location of the agent at the start."""
    contents: dict[str, tuple[str, ...]] = field(repr=False)
    """Receptacle id -> objects in or on it, sorted. An object can be in two at once."""
    object_location: frozenset[tuple[str, str]] = field(repr=False)
    """Pairs (object, location); an object's location need not be that of the receptacle it is in."""
    opened: frozenset[str] = field(repr=False)
    states: dict[str, frozenset[str]] = field(repr=False)
    """Object id -> those of clean, hot, cool, sliced, toggled that hold at the start."""

    destinations: dict[str, str] = field(repr=False)
    """Command "go to ..." -> receptacle id, for every receptacle."""
    candidates: frozenset[str] = field(repr=False)
    """Objects that can fulfil the goal."""
    targets: tuple[str, ...] = field(repr=False)
    """Receptacles of the goal's type, sorted; for "look", the lamps."""

    scene: Any = field(default=None, repr=False)
    """What the generator drew, from which `generator.write` writes the file; None for a game that was read."""

    @property
    def kind(self) -> str:
        return self.goal.kind

    @classmethod
    def load(cls, path: str | Path) -> "Game":
        """Read a game.tw-pddl file.

        Raises:
            UserError: the file cannot be read, is no complete game, or has a goal or grammar other than ALFWorld's.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"game file {path}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise UserError(f"game file {path}: not valid JSON ({error}); download the games again") from error
        return cls.from_data(data, name=str(path))

    @classmethod
    def from_data(cls, data: Any, *, name: str) -> "Game":
        """A game from the decoded JSON of its file; `name` says in errors where it came from.

        Raises:
            UserError: as `load`.
        """
        if not isinstance(data, dict):
            raise UserError(f"game file {name}: holds a JSON {type(data).__name__}, not an object")
        for key in _KEYS:
            if not isinstance(data.get(key), str):
                raise UserError(f'game file {name}: "{key}" is {"no text" if key in data else "missing"}')
        walkthrough = data.get("walkthrough")
        if walkthrough is not None and not (
            isinstance(walkthrough, list) and all(isinstance(command, str) for command in walkthrough)
        ):
            raise UserError(f'game file {name}: "walkthrough" is no list of commands')
        grammar = data["grammar"]
        task = _TASK.search(grammar)
        if task is None:
            raise UserError(f'game file {name}: its grammar names no task ("Your task is to: ...")')
        if "move {o} to {r}" not in grammar:
            raise UserError(
                f'game file {name}: its grammar has no "move ... to ..." command, so it is older than release '
                "json_2.1.2; download the games with alfworld >= 0.4.0, or play it with the textworld back end"
            )
        return cls.parse(
            data["pddl_problem"],
            json.loads(task.group(1)),
            walkthrough=walkthrough,
            name=name,
            # The domain inside the released games also cleans in a sink that has no basin.
            sink_types=("sinkbasintype", "sinktype") if _SINK_RULE.search(data["pddl_domain"]) else ("sinkbasintype",),
        )

    @classmethod
    def parse(
        cls,
        problem: str,
        task: str,
        *,
        walkthrough: list[str] | None = None,
        name: str = "problem",
        sink_types: Iterable[str] = ("sinkbasintype",),
    ) -> "Game":
        """A game from the text of a PDDL `problem`.

        Raises:
            UserError: the text is no complete problem, lacks facts that every game has, or its goal is none of the six
                task types.
        """
        text = _COMMENT.sub("", problem.lower())
        init, goal = text.find("(:init"), text.find("(:goal")
        if not 0 <= init < goal:
            raise UserError(f"game file {name}: its PDDL problem has no (:init ...) followed by a (:goal ...)")
        if text.count("(") != text.count(")"):
            raise UserError(f"game file {name}: its PDDL problem has unbalanced parentheses; it may be cut off")
        facts: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        for predicate, arguments in _FACT.findall(text, init, goal):
            facts[predicate].append(tuple(arguments.split()))
        parsed = _parse_goal(text[goal:], name)

        def pairs(predicate: str) -> list[tuple[str, str]]:
            try:
                return [(first, second) for first, second in facts.get(predicate, ())]
            except ValueError:
                raise UserError(f"game file {name}: a fact ({predicate} ...) has not two arguments") from None

        def having(predicate: str) -> frozenset[str]:
            return frozenset(arguments[0] for arguments in facts.get(predicate, ()))

        start = pairs("atlocation")
        location = dict(sorted(pairs("receptacleatlocation")))
        if len(start) != 1 or not location:
            missing = "receptacle" if start else "agent"
            raise UserError(f"game file {name}: its PDDL problem places no {missing}, or more than one agent")
        object_type, receptacle_type = dict(pairs("objecttype")), dict(pairs("receptacletype"))
        names = _names(facts)
        at: dict[str, list[str]] = defaultdict(list)
        for receptacle, place in location.items():
            at[place].append(receptacle)
        contents: dict[str, list[str]] = {receptacle: [] for receptacle in location}
        for thing, receptacle in sorted(pairs("inreceptacle")):
            contents.setdefault(receptacle, []).append(thing)
        inner: dict[str, list[str]] = {thing: [] for thing in having("isreceptacleobject")}
        for thing, outer in sorted(pairs("inreceptacleobject")):
            inner.setdefault(outer, []).append(thing)
        states: dict[str, frozenset[str]] = {}
        for predicate, state in _STATE_PREDICATES.items():
            for thing in having(predicate):
                states[thing] = states.get(thing, frozenset()) | {state}
        cleanable, heatable, coolable = having("cleanable"), having("heatable"), having("coolable")
        able = {"clean": cleanable, "heat": heatable, "cool": coolable}.get(parsed.kind, object_type.keys())
        target_type = object_type if parsed.kind == "look" else receptacle_type
        return cls(
            task=task,
            goal=parsed,
            name=name,
            walkthrough=walkthrough,
            names=names,
            location=location,
            at={place: tuple(receptacles) for place, receptacles in at.items()},
            receptacle_type=receptacle_type,
            object_type=object_type,
            can_contain=frozenset(pairs("cancontain")),
            openable=having("openable"),
            pickupable=having("pickupable"),
            cleanable=cleanable,
            heatable=heatable,
            coolable=coolable,
            toggleable=having("toggleable"),
            sliceable=having("sliceable"),
            inner={outer: tuple(things) for outer, things in inner.items()},
            sink_types=frozenset(sink_types),
            start=start[0][1],
            contents={receptacle: tuple(things) for receptacle, things in contents.items()},
            object_location=frozenset(pairs("objectatlocation")),
            opened=having("opened"),
            states=states,
            destinations={f"go to {names[receptacle]}": receptacle for receptacle in location},
            candidates=frozenset(thing for thing, t in object_type.items() if t == parsed.object and thing in able),
            targets=tuple(sorted(thing for thing, t in target_type.items() if t == parsed.target)),
        )


def _names(facts: Facts) -> dict[str, str]:
    """Id -> player's name, as alfworld.agents.utils.misc.Demangler gives them.

    Among the sorted ids of one type the numbers run downwards: the last one is number 1. Ids without "_bar_" (types,
    the agent) get no number but keep the space before it.
    """
    ids = set()
    for predicate, arguments in facts.items():
        if predicate not in ("distance", "cancontain"):  # no engine counts the one; the other is long, and about types
            ids.update(*arguments)
    types = {}
    for thing in sorted(ids):
        head, bar, _ = thing.partition("_bar_")
        types[thing] = (head + "basin" if "basin" in thing else head) if bar else None
    left = Counter(types.values())
    names = {}
    for thing, type_ in types.items():
        names[thing] = f"{thing} " if type_ is None else f"{type_} {left[type_]}"
        left[type_] -= 1
    return names


def _parse_goal(text: str, name: str) -> Goal:
    """The goal section, lower-case, as one of the six that ALFWorld's goal library writes (and keeps)."""
    object_types = dict(re.findall(r"\(objecttype\s+(\?\w+)\s+(\w+)\s*\)", text))
    receptacle_types = re.findall(r"\(receptacletype\s+\?\w+\s+(\w+)\s*\)", text)
    held = re.search(r"\(holds\s+\?\w+\s+(\?\w+)\s*\)", text)
    lamp = re.search(r"\(istoggled\s+(\?\w+)\s*\)", text)
    unknown = UserError(f"game file {name}: its goal is none of ALFWorld's six task types ({', '.join(KINDS)})")
    if "(issliced" in text or "(inreceptacleobject" in text:
        raise unknown
    if held and lamp and {held.group(1), lamp.group(1)} == object_types.keys():
        return Goal("look", object_types[held.group(1)], object_types[lamp.group(1)])
    if len(set(object_types.values())) != 1 or len(set(receptacle_types)) != 1 or held or lamp:
        raise unknown
    predicates = {"clean": "(isclean", "heat": "(ishot", "cool": "(iscool"}
    kind = next((kind for kind, predicate in predicates.items() if predicate in text), "pick")
    if len(object_types) == 2:
        kind = "two"
    return Goal(kind, next(iter(object_types.values())), receptacle_types[0])
