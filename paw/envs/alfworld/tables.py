"""Tables of ALFWorld's households: what lies where, what tasks ask for, and the sizes of generated
rooms.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paw.envs.alfworld.problem import KINDS

_TABLES = tomllib.loads(
    (Path(__file__).parent / "data" / "household.toml").read_text(encoding="utf-8")
)

HOLDS = {receptacle: tuple(types.split()) for receptacle, types in _TABLES["holds"].items()}
"""Receptacle type -> types of the objects that may lie in or on it."""
OPENABLE = ("Cabinet", "Drawer", "Fridge", "Microwave", "Safe")
LAMP = "DeskLamp"
LAMP_SPOTS = ("CoffeeTable", "Desk", "DiningTable", "Dresser", "Shelf", "SideTable")
ABILITIES = {
    predicate: frozenset(types.split()) for predicate, types in _TABLES["abilities"].items()
}
"""Predicate -> the object types that have this ability."""
TREATMENTS = {
    "clean": ("SinkBasin", "cleanable"),
    "heat": ("Microwave", "heatable"),
    "cool": ("Fridge", "coolable"),
}
"""Kind of task -> (type of the receptacle in which the object is treated, ability it needs)."""
SENTENCES: dict[str, list[str]] = _TABLES["sentences"]
GOALS: dict[str, str] = _TABLES["goals"]


@dataclass(frozen=True)
class Room:
    receptacles: Mapping[str, tuple[int, int]]
    """Receptacle type -> least and greatest number of receptacles."""
    objects: tuple[str, ...]
    """Types of the objects that may lie around."""
    kinds: tuple[str, ...]
    scenes: int
    """AI2-THOR numbers its floor plans by room: kitchens 1-30, living rooms 201-230, ..."""


@dataclass(frozen=True)
class Difficulty:
    """Sizes of a generated game. `None` leaves a number to the room's own table.

    >>> DIFFICULTIES["tiny"].kinds
    ('pick', 'look', 'clean', 'heat', 'cool')
    """

    name: str
    rooms: tuple[Room, ...]
    receptacles: tuple[int, int] | None = None
    """Least and greatest number of receptacles."""
    per_type: int | None = None
    """Greatest number of receptacles of one type."""
    objects: tuple[int, int] | None = None
    """Least and greatest number of objects besides the lamp; fewer if the room has no space."""
    copies: int = 3
    """Greatest number of objects of one type. A two-object task always has its two."""

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind in KINDS if any(kind in room.kinds for room in self.rooms))


def _room(name: str) -> Room:
    table = _TABLES["rooms"][name]
    return Room(
        receptacles={
            receptacle_type: (low, high)
            for receptacle_type, (low, high) in table["receptacles"].items()
        },
        objects=tuple(table["objects"].split()),
        kinds=tuple(table["kinds"].split()),
        scenes=table["scenes"],
    )


def _difficulty(name: str) -> Difficulty:
    sizes = dict(_TABLES["difficulties"][name])
    rooms = tuple(_room(room) for room in sizes.pop("rooms").split())
    return Difficulty(name, rooms, **sizes)


DIFFICULTIES = {name: _difficulty(name) for name in _TABLES["difficulties"]}
