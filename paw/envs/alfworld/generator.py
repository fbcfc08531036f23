"""Generates household games in ALFWorld's own file format, each with a walkthrough that wins it.

Everything is a pure function of the seed, the difficulty and the kinds of task. Each game belongs
to exactly one split, which a hash of its goal and scene (without ids, numbers and wording) decides.
If a drawn game belongs to a different split, another one is drawn.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paw.envs.alfworld import tables
from paw.envs.alfworld.oracle import solve
from paw.envs.alfworld.problem import TASK_TYPES, Game
from paw.envs.alfworld.tables import DIFFICULTIES, Difficulty, Room
from paw.errors import UserError

SPLITS = {"train": (0, 1), "warmup": (2,), "unseen": (3,)}
"""Residues modulo 4 of the content hash, by the split they belong to.

Half of all games are for training, and a quarter each for the warm-up and for evaluation.
"""

_DATA = Path(__file__).parent / "data"
# The domain mentions these types, so every problem must declare them, even if the room has none.
_DOMAIN_RECEPTACLES = ("SinkBasin", "Microwave", "Fridge")
_DOMAIN_OBJECTS = ("Knife", "ButterKnife")


@dataclass(frozen=True)
class Scene:
    """Everything drawn for one game. Types and ids are in CamelCase, as in game files."""

    seed: int
    kind: str
    object: str
    target: str
    """Type of the receptacle for the object; for "look", the type of the lamp."""
    receptacles: tuple[tuple[str, str, str], ...]
    """(id, type, location) of each receptacle."""
    objects: tuple[tuple[str, str, int], ...]
    """(id, type, index of its receptacle) of each object."""
    start: str
    sentence: str
    floor_plan: int

    def content(self) -> str:
        """Return goal and scene as JSON, without ids, numbers and wording.

        Two games with the same goal in the same room have the same content.
        """
        contents: list[list[str]] = [[] for _ in self.receptacles]
        for _, object_type, object_index in self.objects:
            contents[object_index].append(object_type)

        room = []
        for (_, receptacle_type, _), object_types in zip(self.receptacles, contents, strict=True):
            room.append([receptacle_type, *sorted(object_types)])
        return json.dumps([self.kind, self.object, self.target, sorted(room)])

    def split(self) -> str:
        """Return the only split of SPLITS in which this game may appear."""
        residue = hashlib.sha256(self.content().encode()).digest()[0] % 4
        return next(split for split, residues in SPLITS.items() if residue in residues)


def games(
    split: str,
    start: int,
    count: int,
    *,
    seed: int = 0,
    difficulty: str = "full",
    kinds: Sequence[str] | None = None,
) -> Iterator[Game]:
    """Generate games `start`, ..., `start + count - 1` of an endless seeded stream.

    `difficulty` is a name in DIFFICULTIES. `kinds` are some of its kinds of task (default: all of
    them). A tiny game may occur twice in a stream. Raises UserError if the difficulty lacks one of
    the `kinds`.
    """
    level = DIFFICULTIES[difficulty]
    if kinds is None:
        kinds = level.kinds
    for kind in kinds:
        if kind not in level.kinds:
            raise UserError(
                f'task type "{kind}" is not offered by difficulty "{level.name}"; '
                f"it has {', '.join(level.kinds)}"
            )

    for game_index in range(start, start + count):
        scene = _draw_for_split(split, seed, game_index, level, kinds)
        name = f"generated/{difficulty}/{scene.kind}/{scene.seed:012x}"
        game = Game(_problem(scene), f"Your task is to: {scene.sentence}.", name=name)
        game.walkthrough = solve(game)
        game.scene = scene
        yield game


# ---- drawing a scene


def _draw_for_split(
    split: str, seed: int, index: int, difficulty: Difficulty, kinds: Sequence[str]
) -> Scene:
    """Return scene number `index` of a stream, the first draw that belongs to `split`."""
    for attempt in itertools.count():
        # The seed is hashed, so scenes of adjacent numbers have nothing in common.
        key = json.dumps((split, seed, index, attempt)).encode()
        scene_seed = int.from_bytes(hashlib.sha256(key).digest()[:6], "big")
        scene = _draw(scene_seed, difficulty, kinds)
        if scene.split() == split:
            return scene
    raise AssertionError("unreachable")


def _draw(seed: int, difficulty: Difficulty, kinds: Sequence[str]) -> Scene:
    """Draw the scene of `seed`. A room that allows no goal of the drawn kind is drawn again."""
    rng = random.Random(seed)
    kind = rng.choice(kinds)
    rooms = [room for room in difficulty.rooms if kind in room.kinds]
    while True:
        room = rng.choice(rooms)
        receptacle_types = _receptacle_types(rng, room, kind, difficulty)
        goal = _goal(rng, room, kind, receptacle_types)
        if goal is not None:
            break
    object_type, target_type = goal
    placed = _place_objects(rng, room, kind, receptacle_types, object_type, target_type, difficulty)

    # There is one cell of the grid for each receptacle, and one where the agent starts.
    cells = rng.sample(range(25 * 25), len(receptacle_types) + 1)
    locations = [_location(cell, rng) for cell in cells]
    used_ids: set[str] = set()
    receptacles = []
    for receptacle_type, location in zip(receptacle_types, locations, strict=False):
        receptacles.append((_id(rng, receptacle_type, used_ids), receptacle_type, location))
    objects = []
    for receptacle_type, receptacle_index in placed:
        objects.append((_id(rng, receptacle_type, used_ids), receptacle_type, receptacle_index))
    sentence = rng.choice(tables.SENTENCES[kind])
    return Scene(
        seed=seed,
        kind=kind,
        object=object_type,
        target=target_type,
        receptacles=tuple(receptacles),
        objects=tuple(objects),
        start=locations[-1],
        sentence=sentence.format(object=object_type.lower(), target=target_type.lower()),
        floor_plan=room.scenes + rng.randint(1, 30),
    )


def _receptacle_types(
    rng: random.Random, room: Room, kind: str, difficulty: Difficulty
) -> list[str]:
    """Draw the type of each receptacle in the room.

    If the difficulty limits their number, the ones that the `kind` of task needs are kept.
    """
    types: list[str] = []
    for type_, (low, high) in room.receptacles.items():
        number = rng.randint(low, high) if high > low else low
        if difficulty.per_type:
            number = min(number, difficulty.per_type)
        types += [type_] * number
    if difficulty.receptacles is None:
        return types

    tool = tables.TREATMENTS[kind][0] if kind in tables.TREATMENTS else None
    rng.shuffle(types)
    types.sort(key=lambda type_: type_ != tool)
    return types[: rng.randint(*difficulty.receptacles)]


def _goal(
    rng: random.Random, room: Room, kind: str, receptacle_types: list[str]
) -> tuple[str, str] | None:
    """Draw (object type, target type), or None if the drawn room allows no goal of this kind."""
    if kind == "look":
        object_type = rng.choice(room.objects)
        has_lamp_spot = any(type_ in tables.LAMP_SPOTS for type_ in receptacle_types)
        if not has_lamp_spot or not _holders(receptacle_types, object_type):
            return None
        return object_type, tables.LAMP

    tool, ability = tables.TREATMENTS.get(kind, (None, None))
    suitable = [
        type_ for type_ in room.objects if ability is None or type_ in tables.ABILITIES[ability]
    ]
    object_type = rng.choice(suitable)
    # The tool itself is never the target, or the object would be there once it is treated.
    targets = {receptacle_types[i] for i in _holders(receptacle_types, object_type)} - {tool}
    if not targets:
        return None
    target_type = rng.choice(sorted(targets))
    if not _sources(receptacle_types, object_type, target_type):
        return None
    return object_type, target_type


def _place_objects(
    rng: random.Random,
    room: Room,
    kind: str,
    receptacle_types: list[str],
    object_type: str,
    target_type: str,
    difficulty: Difficulty,
) -> list[tuple[str, int]]:
    """Draw (type, index of its receptacle) for every object.

    Objects of the goal's type start outside the goal's target.
    """
    needed = 2 if kind == "two" else 1
    if difficulty.objects is None:
        others = _objects_by_room(rng, room, object_type, needed, difficulty)
    else:
        others = _objects_by_number(rng, room, receptacle_types, object_type, needed, difficulty)

    placed = []
    for type_ in [object_type] * needed + others:
        if type_ == object_type:
            choices = _sources(receptacle_types, type_, target_type)
        else:
            choices = _holders(receptacle_types, type_)
        if choices:
            placed.append((type_, rng.choice(choices)))
    if kind == "look":
        lamp_spots = [i for i, type_ in enumerate(receptacle_types) if type_ in tables.LAMP_SPOTS]
        placed.append((tables.LAMP, rng.choice(lamp_spots)))
    return placed


def _objects_by_room(
    rng: random.Random, room: Room, object_type: str, needed: int, difficulty: Difficulty
) -> list[str]:
    """Draw the types of further objects: a few of each type that the room may have."""
    types = []
    for type_ in room.objects:
        number = min(rng.choice((0, 1, 1, 2, 3)), difficulty.copies)
        if type_ == object_type:
            number -= needed
        types += [type_] * number
    return types


def _objects_by_number(
    rng: random.Random,
    room: Room,
    receptacle_types: list[str],
    object_type: str,
    needed: int,
    difficulty: Difficulty,
) -> list[str]:
    """Draw the types of further objects, as many as the difficulty says."""
    assert difficulty.objects is not None
    types = []
    for type_ in room.objects:
        if type_ != object_type and _holders(receptacle_types, type_):
            types.append(type_)
    types *= difficulty.copies
    types += [object_type] * (difficulty.copies - needed)
    rng.shuffle(types)
    return types[: rng.randint(*difficulty.objects) - needed]


def _holders(receptacle_types: list[str], object_type: str) -> list[int]:
    """Return the indices of the receptacles that can hold an object of this type."""
    return [i for i, type_ in enumerate(receptacle_types) if object_type in tables.HOLDS[type_]]


def _sources(receptacle_types: list[str], object_type: str, target_type: str) -> list[int]:
    """Return those of `_holders` that are not of the goal's target type."""
    holders = _holders(receptacle_types, object_type)
    return [i for i in holders if receptacle_types[i] != target_type]


def _location(cell: int, rng: random.Random) -> str:
    """Write cell number `cell` of a 25 x 25 grid as ALFRED writes locations.

    The direction to face and the angle to look down are drawn at random.
    """
    x = _signed(cell // 25 - 12)
    y = _signed(cell % 25 - 12)
    return f"loc_bar_{x}_bar_{y}_bar_{rng.randrange(4)}_bar_{15 * rng.randint(1, 4)}"


def _signed(number: int) -> str:
    return f"_minus_{-number}" if number < 0 else f"{number}"


def _id(rng: random.Random, type_: str, used_ids: set[str]) -> str:
    """Make a new id from type and position in metres, and add it to `used_ids`.

    For example "Mug_bar__plus_01_dot_65_bar_...". A basin is part of a sink, so its id begins with
    the sink's type.
    """
    head = type_
    tail = ""
    if type_.endswith("Basin"):
        head = type_.removesuffix("Basin")
        tail = f"_bar_{type_}"
    while True:
        position = ""
        for _ in range(3):
            centimetres = int(rng.random() * 800) - 400
            sign = "minus" if centimetres < 0 else "plus"
            metres, hundredths = divmod(abs(centimetres), 100)
            position += f"_bar__{sign}_{metres:02}_dot_{hundredths:02}"
        id_ = f"{head}{position}{tail}"
        if id_ not in used_ids:
            used_ids.add(id_)
            return id_


# ---- writing files


def _problem(scene: Scene) -> str:
    """Write the scene as a PDDL problem for data/alfred.pddl."""
    objects = "\n    ".join(_declarations(scene))
    facts = "\n    ".join(f"({fact})" for fact in _facts(scene))
    goal = tables.GOALS[scene.kind].format(object=scene.object, target=scene.target)
    return (
        f"(define (problem generated_{scene.seed:012x})\n"
        f"(:domain alfred)\n"
        f"(:objects\n    {objects})\n"
        f"(:init\n    {facts})\n"
        f"(:goal (and {goal})))\n"
    )


def _declarations(scene: Scene) -> list[str]:
    """Return everything that the facts mention, with its type in the domain."""
    object_types = {thing_type for _, thing_type, _ in scene.objects}.union(_DOMAIN_OBJECTS)
    receptacle_types = {thing_type for _, thing_type, _ in scene.receptacles}.union(
        _DOMAIN_RECEPTACLES
    )
    locations = {location for _, _, location in scene.receptacles} | {scene.start}

    declarations = ["agent1 - agent"]
    declarations += [f"{thing_type}Type - otype" for thing_type in sorted(object_types)]
    declarations += [f"{thing_type}Type - rtype" for thing_type in sorted(receptacle_types)]
    declarations += [f"{thing_id} - object" for thing_id, _, _ in scene.objects]
    declarations += [f"{thing_id} - receptacle" for thing_id, _, _ in scene.receptacles]
    declarations += [f"{location} - location" for location in sorted(locations)]
    return declarations


def _facts(scene: Scene) -> list[str]:
    """Return the facts that hold at the start, without the parentheses of PDDL."""
    facts = []
    for thing_id, thing_type, location in scene.receptacles:
        facts.append(f"receptacleType {thing_id} {thing_type}Type")
        facts.append(f"receptacleAtLocation {thing_id} {location}")
        if thing_type in tables.OPENABLE:
            facts.append(f"openable {thing_id}")

    object_types = {thing_type for _, thing_type, _ in scene.objects}
    for receptacle_type in sorted({thing_type for _, thing_type, _ in scene.receptacles}):
        for object_type in tables.HOLDS[receptacle_type]:
            if object_type in object_types:
                facts.append(f"canContain {receptacle_type}Type {object_type}Type")

    for thing_id, thing_type, type_index in scene.objects:
        receptacle, _, location = scene.receptacles[type_index]
        facts.append(f"objectType {thing_id} {thing_type}Type")
        facts.append(
            f"toggleable {thing_id}" if thing_type == tables.LAMP else f"pickupable {thing_id}"
        )
        for ability, able_types in tables.ABILITIES.items():
            if thing_type in able_types:
                facts.append(f"{ability} {thing_id}")
        facts.append(f"inReceptacle {thing_id} {receptacle}")
        facts.append(f"objectAtLocation {thing_id} {location}")

    facts.append(f"atLocation agent1 {scene.start}")
    return facts


def write(game: Game, folder: str | Path) -> Path:
    """Write a generated game under `folder`, a split's root. Returns its game.tw-pddl's path.

    The folders are named as in ALFWorld. Next to the game, there is a traj_data.json with the keys
    that alfworld's own environment and expert read.
    """
    scene = game.scene
    assert isinstance(scene, Scene), f"{game.name} was not generated"
    grammar = (_DATA / "alfred.twl2").read_text(encoding="utf-8")
    contents = {
        "pddl_domain": (_DATA / "alfred.pddl").read_text(encoding="utf-8"),
        "grammar": grammar.replace("UNKNOWN GOAL", scene.sentence),
        "pddl_problem": _problem(scene),
        "solvable": True,
        "walkthrough": game.walkthrough,
    }
    task_type = TASK_TYPES[scene.kind]
    trial_id = f"trial_G{scene.seed:012x}"
    is_look = scene.kind == "look"
    trajectory = {
        "task_type": task_type,
        "task_id": trial_id,
        "scene": {"scene_num": scene.floor_plan, "floor_plan": f"FloorPlan{scene.floor_plan}"},
        "pddl_params": {
            "object_target": scene.object,
            "parent_target": "" if is_look else scene.target,
            "toggle_target": scene.target if is_look else "",
            "mrecep_target": "",
            "object_sliced": False,
        },
        "turk_annotations": {"anns": [{"task_desc": scene.sentence, "high_descs": []}]},
    }

    name = f"{task_type}-{scene.object}-None-{scene.target}-{scene.floor_plan}"
    trial = Path(folder) / name / trial_id
    trial.mkdir(parents=True, exist_ok=True)
    (trial / "traj_data.json").write_text(json.dumps(trajectory), encoding="utf-8")
    path = trial / "game.tw-pddl"
    path.write_text(json.dumps(contents), encoding="utf-8")
    return path
