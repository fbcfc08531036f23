"""How large and how varied the generated households are."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from paw.envs.alfworld.problem import KINDS
from paw.errors import UserError


@dataclass(frozen=True)
class Room:
    receptacles: Mapping[str, tuple[int, int]]
    """Receptacle type -> least and greatest number of them."""
    objects: tuple[str, ...]
    """Object types that may lie about."""
    kinds: tuple[str, ...]
    """Task types that can be set here."""
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
    """At most so many receptacles of one type."""
    objects: tuple[int, int] | None = None
    """Least and greatest number of objects, lamp not counted; fewer where the room has no place for one."""
    copies: int = 3
    """At most so many objects of one type; a two-object task has two of its own at any rate."""

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The task types this difficulty offers."""
        return tuple(kind for kind in KINDS if any(kind in room.kinds for room in self.rooms))


# The counts follow AI2-THOR's floor plans.
_KITCHEN = Room(
    receptacles={
        "Cabinet": (4, 16),
        "Drawer": (3, 12),
        "CounterTop": (1, 3),
        "Fridge": (1, 1),
        "Microwave": (1, 1),
        "SinkBasin": (1, 1),
        "StoveBurner": (4, 4),
        "CoffeeMachine": (1, 1),
        "Toaster": (1, 1),
        "GarbageCan": (1, 1),
        "Shelf": (0, 3),
        "DiningTable": (0, 1),
        "SideTable": (0, 1),
    },
    objects=(
        *("Apple", "Book", "Bowl", "Bread", "ButterKnife", "CreditCard", "Cup", "DishSponge", "Egg", "Fork"),
        *("Glassbottle", "Kettle", "Knife", "Ladle", "Lettuce", "Mug", "Pan", "PepperShaker", "Plate", "Pot"),
        *("Potato", "SaltShaker", "SoapBottle", "Spatula", "Spoon", "Statue", "Tomato", "Vase", "WineBottle"),
    ),
    kinds=("pick", "clean", "heat", "cool", "two"),
    scenes=0,
)
_LIVING_ROOM = Room(
    receptacles={
        "Sofa": (1, 1),
        "ArmChair": (1, 2),
        "CoffeeTable": (1, 2),
        "SideTable": (1, 3),
        "Shelf": (0, 5),
        "Drawer": (1, 6),
        "Dresser": (0, 1),
        "GarbageCan": (1, 1),
        "Safe": (0, 1),
        "DiningTable": (0, 1),
        "Cabinet": (0, 4),
        "Ottoman": (0, 1),
    },
    objects=(
        *("Book", "Box", "Candle", "CellPhone", "CreditCard", "KeyChain", "Laptop", "Newspaper", "Pillow", "Plate"),
        *("RemoteControl", "Statue", "TissueBox", "Vase", "Watch", "WateringCan"),
    ),
    kinds=("pick", "look", "two"),
    scenes=200,
)
_BEDROOM = Room(
    receptacles={
        "Bed": (1, 1),
        "Desk": (1, 2),
        "SideTable": (1, 2),
        "Drawer": (2, 8),
        "Shelf": (1, 6),
        "GarbageCan": (1, 1),
        "Dresser": (0, 1),
        "ArmChair": (0, 1),
        "Safe": (0, 1),
        "LaundryHamper": (0, 1),
    },
    objects=(
        *("AlarmClock", "BaseballBat", "BasketBall", "Book", "Bowl", "Box", "CD", "CellPhone", "Cloth", "CreditCard"),
        *("KeyChain", "Laptop", "Mug", "Pen", "Pencil", "Pillow", "Statue", "TennisRacket", "TissueBox", "Vase"),
        "Watch",
    ),
    kinds=("pick", "look", "two"),
    scenes=300,
)
_BATHROOM = Room(
    receptacles={
        "SinkBasin": (1, 2),
        "BathtubBasin": (0, 1),
        "Toilet": (1, 1),
        "ToiletPaperHanger": (1, 1),
        "TowelHolder": (1, 1),
        "HandTowelHolder": (1, 2),
        "Cabinet": (2, 4),
        "CounterTop": (1, 1),
        "GarbageCan": (1, 1),
        "Shelf": (0, 1),
        "Cart": (0, 1),
        "Drawer": (0, 4),
    },
    objects=(
        *("Candle", "Cloth", "DishSponge", "HandTowel", "Plunger", "SoapBar", "SoapBottle", "SprayBottle"),
        *("TissueBox", "ToiletPaper", "Towel"),
    ),
    kinds=("pick", "clean", "two"),
    scenes=400,
)
_TINY_KITCHEN = Room(
    receptacles={
        type_: (1, 1)
        for type_ in ("CounterTop", "DiningTable", "Cabinet", "Fridge", "Microwave", "SinkBasin", "Shelf", "SideTable")
    },
    objects=("Apple", "Bowl", "Cup", "Egg", "Mug", "Plate", "Potato", "Tomato"),
    kinds=("pick", "look", "clean", "heat", "cool"),
    scenes=0,
)
_ROOMS = (_KITCHEN, _LIVING_ROOM, _BEDROOM, _BATHROOM)

DIFFICULTIES = {
    difficulty.name: difficulty
    for difficulty in (
        # Small enough to be learnt from scratch in minutes on a processor: every name ends in 1.
        Difficulty("tiny", (_TINY_KITCHEN,), receptacles=(4, 5), per_type=1, objects=(3, 5), copies=1),
        Difficulty("small", _ROOMS, receptacles=(5, 8), per_type=2, objects=(5, 8), copies=2),
        Difficulty("medium", _ROOMS, receptacles=(9, 14), per_type=4, objects=(10, 16), copies=3),
        Difficulty("full", _ROOMS),
    )
}


def get_difficulty(difficulty: str | Difficulty) -> Difficulty:
    """A preset by its name; a `Difficulty` is returned as it is.

    Raises:
        UserError: no preset has that name.
    """
    if isinstance(difficulty, Difficulty):
        return difficulty
    if difficulty not in DIFFICULTIES:
        raise UserError(f'difficulty "{difficulty}" is not known; choose one of {", ".join(DIFFICULTIES)}')
    return DIFFICULTIES[difficulty]
