"""What goes where in ALFWorld's households, what is asked for there, and how large generated ones are."""

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
"""Predicate -> the object types it holds for."""
TREATMENTS = {
    "clean": ("SinkBasin", "cleanable"),
    "heat": ("Microwave", "heatable"),
    "cool": ("Fridge", "coolable"),
}
"""Kind of task -> where the object is treated, and which objects can be."""
SENTENCES: dict[str, list[str]] = _TABLES["sentences"]
GOALS: dict[str, str] = _TABLES["goals"]


@dataclass(frozen=True)
class Room:
    receptacles: Mapping[str, tuple[int, int]]
    """Receptacle type -> least and greatest number of them."""
    objects: tuple[str, ...]
    """Object types that may lie about."""
    kinds: tuple[str, ...]
    scenes: int
    """AI2-THOR numbers its floor plans by room: kitchens 1-30, living rooms 201-230, ..."""


@dataclass(frozen=True)
class Difficulty:
    """What a generated game is drawn from. `None` leaves a number to the room's own table.

    >>> DIFFICULTIES["tiny"].kinds
    ('pick', 'look', 'clean', 'heat', 'cool')
    """

    name: str
    rooms: tuple[Room, ...]
    receptacles: tuple[int, int] | None = None
    """Least and greatest number of receptacles."""
    per_type: int | None = None
    objects: tuple[int, int] | None = None
    """Least and greatest number of objects, lamp not counted; fewer where the room has no place for one."""
    copies: int = 3
    """At most so many objects of one type; a two-object task has two of its own at any rate."""

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind in KINDS if any(kind in room.kinds for room in self.rooms))


def _room(name: str) -> Room:
    table = _TABLES["rooms"][name]
    counts = {type_: (low, high) for type_, (low, high) in table["receptacles"].items()}
    return Room(
        counts, tuple(table["objects"].split()), tuple(table["kinds"].split()), table["scenes"]
    )


DIFFICULTIES = {
    name: Difficulty(name, tuple(map(_room, table.pop("rooms").split())), **table)
    for name, table in _TABLES["difficulties"].items()
}
