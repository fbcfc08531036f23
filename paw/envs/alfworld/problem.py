"""One ALFWorld problem, parsed once and shared by every episode that plays it.

Only the PDDL problem and the task are read from a game file (`game.tw-pddl`). The rules are the
same for every game of a release and are written out in `household.py`. PDDL is case-insensitive, so
everything is kept in lower case.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from paw.envs.checked import Strict, checked
from paw.errors import UserError
from paw.io.files import reading

TASK_TYPES = {
    "pick": "pick_and_place_simple",
    "look": "look_at_obj_in_light",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "two": "pick_two_obj_and_place",
}
"""Our short names of the six task types -> ALFWorld's names."""
KINDS = tuple(TASK_TYPES)
REQUIRED_STATE = {"clean": "clean", "heat": "hot", "cool": "cool"}
"""The state into which the object must be brought, by kind of task."""

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
    """The keys of a game file that are read."""

    pddl_domain: str
    grammar: str
    pddl_problem: str
    walkthrough: list[str] | None = None


class Goal(NamedTuple):
    kind: str
    object: str
    """Type of the object to handle, such as "mugtype"."""
    target: str
    """Type of the receptacle for it; for "look", the type of the lamp."""


class Game:
    """The parts of a PDDL `problem` that no action changes, and the state at the start. Read-only.

    Raises UserError if the problem is incomplete, or if its goal is not one of the six.
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
        self.task = task
        """The sentence "Your task is to: ..."."""
        self.name = name
        """Path of the file, or the name that the generator gave."""
        self.walkthrough = walkthrough
        self.scene: Any = None
        """What the generator drew. `generator.write` writes the file from it. None if the game was
        read from a file."""

        facts, self.goal = _parse_problem(problem, name)
        starts, located = _places(facts, name)

        # No action changes these.
        self.names = _names(facts)
        """Id -> the name that the player sees: "mug_bar__plus_01..." -> "mug 2"."""
        self.location = dict(located)
        """Receptacle id -> location id, receptacles in sorted order."""
        self.at = _grouped(self.location.items())
        """Location id -> its receptacles, sorted."""
        self.receptacle_type = dict(facts.pairs("receptacletype"))
        self.object_type = dict(facts.pairs("objecttype"))
        self.can_contain = frozenset(facts.pairs("cancontain"))
        """Pairs (receptacle type, object type)."""
        self.able = {ability: facts.subjects(ability) for ability in _ABILITIES}
        """Ability -> the ids that have it."""
        bowls = facts.subjects("isreceptacleobject")
        self.inner = _grouped(facts.pairs("inreceptacleobject"), bowls)
        """What lies in objects that are receptacles themselves (a bowl), by object."""
        self.tools = {"clean": sink_types, "heat": ("microwavetype",), "cool": ("fridgetype",)}
        """Kind of task -> the receptacle types in which an object is treated."""

        # The state at the start.
        self.start = starts[0][1]
        """The agent's location."""
        self.contents = _grouped(facts.pairs("inreceptacle"), self.location)
        """Receptacle id -> objects in or on it, sorted. An object can be in two at once."""
        self.object_location = frozenset(facts.pairs("objectatlocation"))
        """Pairs (object, location). An object's location can differ from its receptacle's."""
        self.opened = facts.subjects("opened")
        self.states = _states(facts)
        """Object id -> those of clean, hot, cool, sliced, toggled that hold at the start."""

    @cached_property
    def destinations(self) -> dict[str, str]:
        """Command -> the receptacle to which it goes."""
        return {f"go to {self.names[receptacle]}": receptacle for receptacle in self.location}

    @cached_property
    def candidates(self) -> frozenset[str]:
        """Objects that can fulfil the goal."""
        suitable = self.able.get(f"{self.goal.kind}able", self.object_type.keys())
        return frozenset(
            object_id
            for object_id, object_type in self.object_type.items()
            if object_type == self.goal.object and object_id in suitable
        )

    @cached_property
    def targets(self) -> list[str]:
        """Receptacles of the goal's type, sorted; for "look", the lamps."""
        types = self.object_type if self.goal.kind == "look" else self.receptacle_type
        return sorted(
            thing_id for thing_id, thing_type in types.items() if thing_type == self.goal.target
        )

    @property
    def kind(self) -> str:
        return self.goal.kind

    @classmethod
    def load(cls, path: str | Path) -> "Game":
        """Read a game.tw-pddl file.

        Raises UserError if that fails, or if its goal or grammar is not one of ALFWorld's.
        """
        with reading(f"game file {path}"):
            file_bytes = Path(path).read_bytes()
        try:
            file = checked(GameFile, file_bytes, f"game file {path}")
        except UserError as error:
            raise UserError(f"{error}; download the games again") from None
        task = _TASK.search(file.grammar)
        if task is None:
            raise UserError(f'game file {path}: its grammar names no task ("Your task is to: ...")')
        if "move {o} to {r}" not in file.grammar:
            raise UserError(
                f'game file {path}: its grammar has no "move ... to ..." command, so it is older '
                "than release json_2.1.2; download the games with alfworld >= 0.4.0, or play it "
                "with the textworld back end"
            )
        sink_types = ("sinkbasintype",)
        if _SINK_RULE.search(file.pddl_domain):
            # The domain of the released games also allows cleaning in a sink without a basin.
            sink_types = ("sinkbasintype", "sinktype")
        return cls(
            file.pddl_problem,
            json.loads(task.group(1)),
            walkthrough=file.walkthrough,
            name=str(path),
            sink_types=sink_types,
        )


class _Facts:
    """The facts of a PDDL problem, in lower case."""

    def __init__(self, game_name: str) -> None:
        self.arguments: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        """The arguments of each fact, by predicate."""
        self._game_name = game_name

    def pairs(self, predicate: str) -> list[tuple[str, str]]:
        """Return the facts of a predicate with two arguments, sorted."""
        try:
            return sorted((first, second) for first, second in self.arguments.get(predicate, ()))
        except ValueError:
            raise UserError(
                f"game file {self._game_name}: a fact ({predicate} ...) does not have two arguments"
            ) from None

    def subjects(self, predicate: str) -> frozenset[str]:
        """Return the first argument of each fact of a predicate."""
        return frozenset(arguments[0] for arguments in self.arguments.get(predicate, ()))


def _parse_problem(problem: str, name: str) -> tuple[_Facts, Goal]:
    """Return the facts of the (:init ...) section, and the goal."""
    text = _COMMENT.sub("", problem.lower())
    init_start = text.find("(:init")
    goal_start = text.find("(:goal")
    if not 0 <= init_start < goal_start:
        raise UserError(
            f"game file {name}: its PDDL problem has no (:init ...) followed by a (:goal ...)"
        )
    if text.count("(") != text.count(")"):
        raise UserError(
            f"game file {name}: its PDDL problem has unbalanced parentheses; it may be cut off"
        )

    facts = _Facts(name)
    for predicate, arguments in _FACT.findall(text, init_start, goal_start):
        facts.arguments[predicate].append(tuple(arguments.split()))
    return facts, _parse_goal(text[goal_start:], name)


def _places(facts: _Facts, name: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the pairs (agent, location), of which there is one, and (receptacle, location)."""
    starts = facts.pairs("atlocation")
    located = facts.pairs("receptacleatlocation")
    if len(starts) != 1 or not located:
        missing = "receptacle" if starts else "agent"
        raise UserError(
            f"game file {name}: its PDDL problem places no {missing}, or more than one agent"
        )
    return starts, located


def _states(facts: _Facts) -> dict[str, frozenset[str]]:
    """Return by object id those of clean, hot, cool, sliced, toggled that hold."""
    states: dict[str, frozenset[str]] = {}
    for predicate, state in _STATE_PREDICATES.items():
        for object_id in facts.subjects(predicate):
            states[object_id] = states.get(object_id, frozenset()) | {state}
    return states


def _grouped(
    pairs: Iterable[tuple[str, str]], seconds: Iterable[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Group the first elements, in order, by the second element they are paired with.

    `seconds` are there in any case, with an empty group if nothing is paired with them.
    """
    groups: dict[str, tuple[str, ...]] = dict.fromkeys(seconds, ())
    for first, second in pairs:
        groups[second] = (*groups.get(second, ()), first)
    return groups


def _names(facts: _Facts) -> dict[str, str]:
    """Return the name that the player sees for each id, as alfworld.agents.utils.misc.Demangler
    does.

    The ids of a type are numbered in descending order, so the last one is number 1. Ids without
    "_bar_" (types, the agent) get no number, but keep the space before it.
    """
    all_ids = set()
    for predicate, arguments in facts.arguments.items():
        # No engine counts the ids of distances. All the many facts of "cancontain" are about types.
        if predicate not in ("distance", "cancontain"):
            all_ids.update(*arguments)

    types: dict[str, str | None] = {}
    for thing_id in sorted(all_ids):
        head, bar, _ = thing_id.partition("_bar_")
        if not bar:
            types[thing_id] = None
        elif "basin" in thing_id:
            types[thing_id] = f"{head}basin"
        else:
            types[thing_id] = head

    remaining = Counter(types.values())
    names = {}
    for thing_id, thing_type in types.items():
        names[thing_id] = (
            f"{thing_id} " if thing_type is None else f"{thing_type} {remaining[thing_type]}"
        )
        remaining[thing_type] -= 1
    return names


def _parse_goal(text: str, name: str) -> Goal:
    """Parse the goal section, in lower case, as one of the six goals of ALFWorld's library."""
    object_types = dict(re.findall(r"\(objecttype\s+(\?\w+)\s+(\w+)\s*\)", text))
    receptacle_types = re.findall(r"\(receptacletype\s+\?\w+\s+(\w+)\s*\)", text)
    held = re.search(r"\(holds\s+\?\w+\s+(\?\w+)\s*\)", text)
    lamp = re.search(r"\(istoggled\s+(\?\w+)\s*\)", text)
    unknown_goal = UserError(
        f"game file {name}: its goal is not one of ALFWorld's six task types ({', '.join(KINDS)})"
    )
    if "(issliced" in text or "(inreceptacleobject" in text:
        raise unknown_goal

    if held and lamp and {held.group(1), lamp.group(1)} == object_types.keys():
        return Goal("look", object_types[held.group(1)], object_types[lamp.group(1)])
    if held or lamp:
        raise unknown_goal
    if len(set(object_types.values())) != 1 or len(set(receptacle_types)) != 1:
        raise unknown_goal

    if len(object_types) == 2:
        kind = "two"
    elif "(isclean" in text:
        kind = "clean"
    elif "(ishot" in text:
        kind = "heat"
    elif "(iscool" in text:
        kind = "cool"
    else:
        kind = "pick"
    object_type = next(iter(object_types.values()))
    return Goal(kind, object_type, target=receptacle_types[0])
