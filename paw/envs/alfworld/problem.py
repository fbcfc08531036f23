"""One ALFWorld problem, parsed once and shared by every episode that plays it.

Of a game file (`game.tw-pddl`) the PDDL problem and the task are read; the rules, the same for
every game of a release, are written out in `household.py`. PDDL is case-insensitive, and everything
is kept lower-case.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paw.envs.checked import Strict, checked
from paw.errors import UserError
from paw.files import reading

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
_ABILITIES = (
    "openable",
    "pickupable",
    "cleanable",
    "heatable",
    "coolable",
    "toggleable",
    "sliceable",
)
_STATE_PREDICATES = {
    "isclean": "clean",
    "ishot": "hot",
    "iscool": "cool",
    "issliced": "sliced",
    "istoggled": "toggled",
}


class GameFile(Strict):
    pddl_domain: str
    grammar: str
    pddl_problem: str
    walkthrough: list[str] | None = None


class Goal(NamedTuple):
    kind: str
    object: str
    """Type of the object to handle, such as "mugtype"."""
    target: str
    """Type of the receptacle to put it in; for "look", of the lamp."""


class Game:
    """Everything about a PDDL `problem` that no action changes, and the state it starts from; read-only.

    Raises UserError: the problem is incomplete, or its goal is none of the six.
    """

    def __init__(
        self,
        problem: str,
        task: str,
        *,
        name: str = "problem",
        walkthrough: list[str] | None = None,
        sink_types: tuple[str, ...] = ("sinkbasintype",),
    ) -> None:
        self.task, self.name, self.walkthrough = task, name, walkthrough
        """The sentence "Your task is to: ..."; path of the file, or what the generator calls it."""
        self.scene: Any = None
        """What the generator drew, from which `generator.write` writes the file; None for a game that was read."""
        text = _COMMENT.sub("", problem.lower())
        init, goal = text.find("(:init"), text.find("(:goal")
        if not 0 <= init < goal:
            raise UserError(
                f"game file {name}: its PDDL problem has no (:init ...) followed by a (:goal ...)"
            )
        if text.count("(") != text.count(")"):
            raise UserError(
                f"game file {name}: its PDDL problem has unbalanced parentheses; it may be cut off"
            )
        facts: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        for predicate, arguments in _FACT.findall(text, init, goal):
            facts[predicate].append(tuple(arguments.split()))

        def pairs(predicate: str) -> list[tuple[str, str]]:
            try:
                return sorted((first, second) for first, second in facts.get(predicate, ()))
            except ValueError:
                raise UserError(
                    f"game file {name}: a fact ({predicate} ...) has not two arguments"
                ) from None

        def having(predicate: str) -> frozenset[str]:
            return frozenset(arguments[0] for arguments in facts.get(predicate, ()))

        self.goal = _parse_goal(text[goal:], name)
        start, located = pairs("atlocation"), pairs("receptacleatlocation")
        if len(start) != 1 or not located:
            missing = "receptacle" if start else "agent"
            raise UserError(
                f"game file {name}: its PDDL problem places no {missing}, or more than one agent"
            )
        self.names = _names(facts)
        """Id -> the name the player sees: "mug_bar__plus_01..." -> "mug 2"."""
        self.location = dict(located)
        """Receptacle id -> location id, receptacles in sorted order."""
        self.at = _grouped(self.location.items())
        """Location id -> its receptacles, sorted."""
        self.destinations = {
            f"go to {self.names[receptacle]}": receptacle for receptacle in self.location
        }
        self.receptacle_type, self.object_type = (
            dict(pairs("receptacletype")),
            dict(pairs("objecttype")),
        )
        self.can_contain = frozenset(pairs("cancontain"))
        """Pairs (receptacle type, object type)."""
        self.able = {ability: having(ability) for ability in _ABILITIES}
        """Ability -> the ids it holds for."""
        self.inner = dict.fromkeys(having("isreceptacleobject"), ()) | _grouped(
            pairs("inreceptacleobject")
        )
        """Objects that are receptacles themselves (a bowl) -> what lies in them; nothing ever moves in or out."""
        self.tools = {"clean": sink_types, "heat": ("microwavetype",), "cool": ("fridgetype",)}
        """Receptacle types in which an object is treated so."""

        self.start = start[0][1]
        self.contents = dict.fromkeys(self.location, ()) | _grouped(pairs("inreceptacle"))
        """Receptacle id -> objects in or on it, sorted. An object can be in two at once."""
        self.object_location = frozenset(pairs("objectatlocation"))
        """Pairs (object, location); an object's location need not be that of the receptacle it is in."""
        self.opened = having("opened")
        self.states: dict[str, frozenset[str]] = {}
        """Object id -> those of clean, hot, cool, sliced, toggled that hold at the start."""
        for predicate, state in _STATE_PREDICATES.items():
            for thing in having(predicate):
                self.states[thing] = self.states.get(thing, frozenset()) | {state}

        kind, object_, target = self.goal
        fit = self.able.get(f"{kind}able", self.object_type.keys())
        self.candidates = frozenset(
            thing for thing, t in self.object_type.items() if t == object_ and thing in fit
        )
        """Objects that can fulfil the goal."""
        types = self.object_type if kind == "look" else self.receptacle_type
        self.targets = sorted(thing for thing, t in types.items() if t == target)
        """Receptacles of the goal's type, sorted; for "look", the lamps."""

    @property
    def kind(self) -> str:
        return self.goal.kind

    @classmethod
    def load(cls, path: str | Path) -> "Game":
        """Read a game.tw-pddl file.

        UserError if that fails, or its goal or grammar is none of ALFWorld's.
        """
        with reading(f"game file {path}"):
            data = Path(path).read_bytes()
        try:
            file = checked(GameFile, data, f"game file {path}")
        except UserError as error:
            raise UserError(f"{error}; download the games again") from None
        task = _TASK.search(file.grammar)
        if task is None:
            raise UserError(f'game file {path}: its grammar names no task ("Your task is to: ...")')
        if "move {o} to {r}" not in file.grammar:
            raise UserError(
                f'game file {path}: its grammar has no "move ... to ..." command, so it is older than release '
                "json_2.1.2; download the games with alfworld >= 0.4.0, or play it with the textworld back end"
            )
        # The domain inside the released games also cleans in a sink that has no basin.
        sinks = (
            ("sinkbasintype", "sinktype")
            if _SINK_RULE.search(file.pddl_domain)
            else ("sinkbasintype",)
        )
        sentence = json.loads(task.group(1))
        return cls(
            file.pddl_problem,
            sentence,
            walkthrough=file.walkthrough,
            name=str(path),
            sink_types=sinks,
        )


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Second -> the firsts it comes with, in order."""
    found: dict[str, tuple[str, ...]] = {}
    for first, second in pairs:
        found[second] = (*found.get(second, ()), first)
    return found


def _names(facts: Facts) -> dict[str, str]:
    """Id -> player's name, as alfworld.agents.utils.misc.Demangler gives them: of each type the last id is number 1.

    Ids without "_bar_" (types, the agent) get no number but keep the space before it.
    """
    ids = set()
    for predicate, arguments in facts.items():
        if predicate not in (
            "distance",
            "cancontain",
        ):  # no engine counts the one; the other is long, and about types
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
    unknown = UserError(
        f"game file {name}: its goal is none of ALFWorld's six task types ({', '.join(KINDS)})"
    )
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
