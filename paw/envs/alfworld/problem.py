"""One ALFWorld problem, parsed once and shared by every episode that plays it.

A game file (`game.tw-pddl`) is a JSON object: the PDDL domain, the text grammar, the PDDL problem and a walkthrough.
Domain and grammar are the same for every game of a release, so their rules are written out in `household.py`; what is
read here is the problem: its initial facts and its goal. PDDL is case-insensitive, and everything is kept lower-case.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paw.envs.checked import Strict, checked
from paw.errors import UserError

TASK_TYPES = {
    "pick": "pick_and_place_simple",
    "look": "look_at_obj_in_light",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "two": "pick_two_obj_and_place",
}
"""Our short names of the six task types -> ALFWorld's."""
KINDS = tuple(TASK_TYPES)
REQUIRED_STATE = {"clean": "clean", "heat": "hot", "cool": "cool"}
"""The state the object of a goal must have been brought into."""

Facts = Mapping[str, Iterable[tuple[str, ...]]]
"""Predicate name -> argument tuples, all lower-case."""

_COMMENT = re.compile(r";[^\n]*")
_FACT = re.compile(r"\((\w+)((?:\s+[^\s()]+)*)\s*\)")
_TASK = re.compile(r'"rhs":\s*("Your task is to: (?:[^"\\]|\\.)*")')
_SINK_RULE = re.compile(r"^\s*\(receptacleType \?r SinkType\)", re.MULTILINE)
_STATE_PREDICATES = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "issliced": "sliced", "istoggled": "toggled"}


class GameFile(Strict):
    pddl_domain: str
    grammar: str
    pddl_problem: str
    walkthrough: list[str] | None = None


class Goal(NamedTuple):
    kind: str
    """One of KINDS."""
    object: str
    """Type of the object to handle, such as "mugtype"."""
    target: str
    """Type of the receptacle to put it in; for "look", of the lamp."""


@dataclass(frozen=True, eq=False, repr=False)
class Game:
    """Everything about a problem that no action changes, and the state it starts from."""

    task: str
    """The sentence "Your task is to: ..." as the grammar says it."""
    goal: Goal
    name: str
    """Path of the file, or what the generator calls it."""
    walkthrough: list[str] | None

    names: dict[str, str]
    """Id -> the name the player sees: "mug_bar__plus_01..." -> "mug 2"."""
    location: dict[str, str]
    """Receptacle id -> location id, receptacles in sorted order."""
    at: dict[str, tuple[str, ...]]
    """Location id -> its receptacles, sorted."""
    receptacle_type: dict[str, str]
    object_type: dict[str, str]
    can_contain: frozenset[tuple[str, str]]
    """Pairs (receptacle type, object type)."""
    openable: frozenset[str]
    pickupable: frozenset[str]
    cleanable: frozenset[str]
    heatable: frozenset[str]
    coolable: frozenset[str]
    toggleable: frozenset[str]
    sliceable: frozenset[str]
    inner: dict[str, tuple[str, ...]]
    """Objects that are receptacles themselves (a bowl) -> what lies in them; nothing ever moves in or out."""
    sink_types: frozenset[str]
    """Receptacle types in which objects are cleaned."""

    start: str
    """Location of the agent at the start."""
    contents: dict[str, tuple[str, ...]]
    """Receptacle id -> objects in or on it, sorted. An object can be in two at once."""
    object_location: frozenset[tuple[str, str]]
    """Pairs (object, location); an object's location need not be that of the receptacle it is in."""
    opened: frozenset[str]
    states: dict[str, frozenset[str]]
    """Object id -> those of clean, hot, cool, sliced, toggled that hold at the start."""

    destinations: dict[str, str]
    """Command "go to ..." -> receptacle id, for every receptacle."""
    candidates: frozenset[str]
    """Objects that can fulfil the goal."""
    targets: tuple[str, ...]
    """Receptacles of the goal's type, sorted; for "look", the lamps."""

    scene: Any = None
    """What the generator drew, from which `generator.write` writes the file; None for a game that was read."""

    @property
    def kind(self) -> str:
        return self.goal.kind

    @classmethod
    def load(cls, path: str | Path) -> "Game":
        """Read a game.tw-pddl file.

        Raises UserError: the file cannot be read, is no complete game, or has a goal or grammar other than ALFWorld's.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"game file {path}: cannot be read: {error.strerror or error}") from error
        return cls.from_data(data, name=str(path))

    @classmethod
    def from_data(cls, data: Any, *, name: str) -> "Game":
        """A game from the content of its file, or that decoded; `name` says in errors where it came from."""
        try:
            file = checked(GameFile, data, f"game file {name}")
        except UserError as error:
            raise UserError(f"{error}; download the games again") from None
        task = _TASK.search(file.grammar)
        if task is None:
            raise UserError(f'game file {name}: its grammar names no task ("Your task is to: ...")')
        if "move {o} to {r}" not in file.grammar:
            raise UserError(
                f'game file {name}: its grammar has no "move ... to ..." command, so it is older than release '
                "json_2.1.2; download the games with alfworld >= 0.4.0, or play it with the textworld back end"
            )
        # The domain inside the released games also cleans in a sink that has no basin.
        sinks = ("sinkbasintype", "sinktype") if _SINK_RULE.search(file.pddl_domain) else ("sinkbasintype",)
        sentence = json.loads(task.group(1))
        return cls.parse(file.pddl_problem, sentence, walkthrough=file.walkthrough, name=name, sink_types=sinks)

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

        Raises UserError: the text is no complete problem, lacks facts that every game has, or its goal is none of the
        six task types.
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
        wanted = _parse_goal(text[goal:], name)

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
        able = {"clean": cleanable, "heat": heatable, "cool": coolable}.get(wanted.kind, object_type.keys())
        target_type = object_type if wanted.kind == "look" else receptacle_type
        return cls(
            task=task,
            goal=wanted,
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
            candidates=frozenset(thing for thing, t in object_type.items() if t == wanted.object and thing in able),
            targets=tuple(sorted(thing for thing, t in target_type.items() if t == wanted.target)),
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
