"""What goes where in ALFWorld's households, and what is asked for there.

HOLDS, CLEANABLE, ... are VAL_RECEPTACLE_OBJECTS and VAL_ACTION_OBJECTS of alfworld/gen/constants.py (0.4.2, without the
sliced foods), GOALS and SENTENCES its goal library (alfworld/gen/goal_library.py). ALFWorld is MIT licensed: see
data/NOTICE. Type names are CamelCase, as in game files.
"""

_ANY_SURFACE = (
    "AlarmClock Apple BaseballBat BasketBall Book Bowl Box Bread ButterKnife CD Candle CellPhone Cloth CreditCard Cup "
    "DishSponge Egg Fork Glassbottle HandTowel Kettle KeyChain Knife Ladle Laptop Lettuce Mug Newspaper Pan PaperTowel "
    "Pen Pencil PepperShaker Plate Pot Potato RemoteControl SaltShaker SoapBar SoapBottle Spatula Spoon SprayBottle "
    "Statue TennisRacket TissueBox ToiletPaper ToiletPaperRoll Tomato Vase Watch WateringCan WineBottle"
)
_SEAT = "BasketBall Book Box CellPhone Cloth CreditCard KeyChain Laptop Newspaper Pillow RemoteControl"
_HOLDS = {
    "ArmChair": _SEAT,
    "BathtubBasin": "Cloth DishSponge HandTowel SoapBar",
    "Bed": "BaseballBat BasketBall Book CellPhone Laptop Newspaper Pillow TennisRacket",
    "Cabinet": (
        "Book Bowl Box CD Candle Cloth Cup DishSponge Glassbottle HandTowel Kettle Ladle Mug Newspaper Pan "
        "PepperShaker Plate Plunger Pot SaltShaker SoapBar SoapBottle SprayBottle TissueBox ToiletPaper "
        "ToiletPaperRoll Vase WateringCan WineBottle"
    ),
    "Cart": (
        "Candle Cloth DishSponge HandTowel Mug PaperTowel Plunger SoapBar SoapBottle SprayBottle Statue TissueBox "
        "ToiletPaper ToiletPaperRoll Vase"
    ),
    "CoffeeMachine": "Mug",
    "CoffeeTable": _ANY_SURFACE,
    "CounterTop": _ANY_SURFACE,
    "Desk": (
        "AlarmClock BasketBall Book Bowl Box CD Candle CellPhone Cloth CreditCard Cup Glassbottle KeyChain Laptop Mug "
        "Newspaper Pen Pencil Plate RemoteControl SoapBottle SprayBottle Statue TennisRacket TissueBox ToiletPaper "
        "ToiletPaperRoll Vase Watch WateringCan WineBottle"
    ),
    "DiningTable": _ANY_SURFACE,
    "Drawer": (
        "Book ButterKnife CD Candle CellPhone Cloth CreditCard DishSponge Fork HandTowel KeyChain Knife Ladle "
        "Newspaper Pen Pencil PepperShaker RemoteControl SaltShaker SoapBar SoapBottle Spatula Spoon SprayBottle "
        "TissueBox ToiletPaper ToiletPaperRoll Watch WateringCan"
    ),
    "Dresser": (
        "AlarmClock BasketBall Book Bowl Box CD Candle CellPhone Cloth CreditCard Cup Glassbottle KeyChain Laptop Mug "
        "Newspaper Pen Pencil Plate RemoteControl SprayBottle Statue TennisRacket TissueBox ToiletPaper "
        "ToiletPaperRoll Vase Watch WateringCan WineBottle"
    ),
    "Fridge": "Apple Bowl Bread Cup Egg Glassbottle Lettuce Mug Pan Plate Pot Potato Tomato WineBottle",
    "GarbageCan": (
        "Apple Bread CD Cloth DishSponge Egg HandTowel Lettuce Newspaper PaperTowel Pen Pencil Potato SoapBar "
        "SoapBottle SprayBottle TissueBox ToiletPaper ToiletPaperRoll Tomato WineBottle"
    ),
    "HandTowelHolder": "HandTowel",
    "LaundryHamper": "Cloth",
    "Microwave": "Apple Bowl Bread Cup Egg Glassbottle Mug Plate Potato Tomato",
    "Ottoman": _SEAT,
    "Safe": "CD CellPhone CreditCard KeyChain Statue Vase Watch",
    "Shelf": (
        "AlarmClock Book Bowl Box CD Candle CellPhone Cloth CreditCard Cup DishSponge Glassbottle HandTowel Kettle "
        "KeyChain Mug Newspaper PaperTowel Pen Pencil PepperShaker Plate Pot RemoteControl SaltShaker SoapBar "
        "SoapBottle SprayBottle Statue TissueBox ToiletPaper ToiletPaperRoll Vase Watch WateringCan WineBottle"
    ),
    "SideTable": _ANY_SURFACE,
    "SinkBasin": (
        "Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Glassbottle HandTowel Kettle Knife Ladle Lettuce Mug "
        "Pan Plate Pot Potato SoapBar Spatula Spoon Tomato"
    ),
    "Sofa": _SEAT,
    "StoveBurner": "Kettle Pan Pot",
    "Toaster": "",
    "Toilet": (
        "Candle Cloth DishSponge HandTowel Newspaper PaperTowel SoapBar SoapBottle SprayBottle TissueBox ToiletPaper "
        "ToiletPaperRoll"
    ),
    "ToiletPaperHanger": "ToiletPaper ToiletPaperRoll",
    "TowelHolder": "Towel",
}
HOLDS = {receptacle: tuple(types.split()) for receptacle, types in _HOLDS.items()}
"""Receptacle type -> types of the objects that may lie in or on it."""
OPENABLE = ("Cabinet", "Drawer", "Fridge", "Microwave", "Safe")
LAMP = "DeskLamp"
LAMP_SPOTS = ("CoffeeTable", "Desk", "DiningTable", "Dresser", "Shelf", "SideTable")

_ABILITIES = {
    "cleanable": (
        "Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Kettle Knife Ladle Lettuce Mug Pan Plate Pot Potato "
        "SoapBar Spatula Spoon Tomato"
    ),
    "heatable": "Apple Bread Cup Egg Mug Plate Potato Tomato",
    "coolable": "Apple Bowl Bread Cup Egg Lettuce Mug Pan Plate Pot Potato Tomato WineBottle",
    "sliceable": "Apple Bread Egg Lettuce Potato Tomato",
    "isReceptacleObject": "Bowl Box Cup Mug Pan Plate Pot",
}
ABILITIES = {predicate: frozenset(types.split()) for predicate, types in _ABILITIES.items()}
"""Predicate -> the object types it holds for."""
TREATMENTS = {"clean": ("SinkBasin", "cleanable"), "heat": ("Microwave", "heatable"), "cool": ("Fridge", "coolable")}
"""Kind of task -> where the object is treated, and which objects can be."""

TASK_TYPES = {
    "pick": "pick_and_place_simple",
    "look": "look_at_obj_in_light",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "two": "pick_two_obj_and_place",
}
"""Our short names of the task types -> ALFWorld's."""
SENTENCES = {
    "pick": ("put a {object} in {target}", "put some {object} on {target}"),
    "look": ("look at {object} under the {target}", "examine the {object} with the {target}"),
    "clean": ("put a clean {object} in {target}", "clean some {object} and put it in {target}"),
    "heat": ("put a hot {object} in {target}", "heat some {object} and put it in {target}"),
    "cool": ("put a cool {object} in {target}", "cool some {object} and put it in {target}"),
    "two": ("put two {object} in {target}", "find two {object} and put them in {target}"),
}
_TREATED = (
    "(exists (?r - receptacle) (exists (?o - object) (and ({able} ?o) (objectType ?o {{object}}Type) "
    "(receptacleType ?r {{target}}Type) ({state} ?o) (inReceptacle ?o ?r))))"
)
GOALS = {
    "pick": (
        "(exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r) (objectType ?o {object}Type) "
        "(receptacleType ?r {target}Type))))"
    ),
    "look": (
        "(exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?ot {target}Type) "
        "(toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r))) "
        "(exists (?o - object ?a - agent) (and (objectType ?o {object}Type) (holds ?a ?o)))"
    ),
    "clean": _TREATED.format(able="cleanable", state="isClean"),
    "heat": _TREATED.format(able="heatable", state="isHot"),
    "cool": _TREATED.format(able="coolable", state="isCool"),
    "two": (
        "(exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 {object}Type) "
        "(receptacleType ?r {target}Type) (inReceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1 ?o2)) "
        "(objectType ?o2 {object}Type) (receptacleType ?r {target}Type) (inReceptacle ?o2 ?r))))))"
    ),
}
