"""Household games made offline, in ALFWorld's own file format, each with a walkthrough that wins it.

Everything is a pure function of the seed, the difficulty and the kinds of task. A game belongs to
one split, decided by a hash of goal and scene without ids, numbers and wording; a draw that belongs
to another split is drawn again.
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
"""Split -> its residues of the content hash modulo 4: half of all games, and a quarter each."""

_DATA = Path(__file__).parent / "data"
# The domain names these types, so a problem must declare them whether or not the room has any.
_DOMAIN_RECEPTACLES, _DOMAIN_OBJECTS = (
    ("SinkBasin", "Microwave", "Fridge"),
    ("Knife", "ButterKnife"),
)


@dataclass(frozen=True)
class Scene:
    """What was drawn. Types and ids are CamelCase, as in game files."""

    seed: int
    kind: str
    object: str
    target: str
    """Type of the receptacle to put it in; for "look", of the lamp."""
    receptacles: tuple[tuple[str, str, str], ...]
    """(id, type, location) of each."""
    objects: tuple[tuple[str, str, int], ...]
    """(id, type, index of the receptacle it is in) of each."""
    start: str
    sentence: str
    floor_plan: int

    def content(self) -> str:
        """Goal and scene without ids, numbers and wording: equal for games that ask the same of the same room."""
        held: list[list[str]] = [[] for _ in self.receptacles]
        for _, type_, index in self.objects:
            held[index].append(type_)
        room = sorted([type_, *sorted(held[i])] for i, (_, type_, _) in enumerate(self.receptacles))
        return json.dumps([self.kind, self.object, self.target, room])

    def split(self) -> str:
        """The one split of SPLITS this game may appear in."""
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
    """Games `start`, ..., `start + count - 1` of an endless seeded stream; within one a tiny game may come twice.

    `difficulty` is one of DIFFICULTIES. UserError: it does not offer one of the `kinds` (default:
    all it has).
    """
    level = DIFFICULTIES[difficulty]
    kinds = level.kinds if kinds is None else kinds
    if wrong := [kind for kind in kinds if kind not in level.kinds]:
        offered = ", ".join(level.kinds)
        raise UserError(
            f'task type "{wrong[0]}" is not offered by difficulty "{level.name}"; it has {offered}'
        )
    for index in range(start, start + count):
        for attempt in itertools.count():
            parts = json.dumps(
                (split, seed, index, attempt)
            ).encode()  # neighbouring games share nothing
            scene = _draw(int.from_bytes(hashlib.sha256(parts).digest()[:6], "big"), level, kinds)
            if scene.split() == split:
                break
        name = f"generated/{difficulty}/{scene.kind}/{scene.seed:012x}"
        game = Game(_problem(scene), f"Your task is to: {scene.sentence}.", name=name)
        game.walkthrough, game.scene = solve(game), scene
        yield game


# ---- drawing a scene


def _draw(seed: int, difficulty: Difficulty, kinds: Sequence[str]) -> Scene:
    """The scene of `seed`: rooms in which the goal cannot be set are drawn again."""
    rng = random.Random(seed)
    kind = rng.choice(kinds)
    rooms = [room for room in difficulty.rooms if kind in room.kinds]
    while True:
        room = rng.choice(rooms)
        types = _receptacle_types(rng, room, kind, difficulty)
        goal = _goal(rng, room, kind, types)
        if goal is not None:
            break
    object_, target = goal
    placed = _place_objects(rng, room, kind, types, object_, target, difficulty)
    taken: set[str] = set()
    spots = [_location(spot, rng) for spot in rng.sample(range(25 * 25), len(types) + 1)]
    return Scene(
        seed=seed,
        kind=kind,
        object=object_,
        target=target,
        receptacles=tuple(
            (_id(rng, type_, taken), type_, spots[i]) for i, type_ in enumerate(types)
        ),
        objects=tuple((_id(rng, type_, taken), type_, index) for type_, index in placed),
        start=spots[-1],
        sentence=rng.choice(tables.SENTENCES[kind]).format(
            object=object_.lower(), target=target.lower()
        ),
        floor_plan=room.scenes + rng.randint(1, 30),
    )


def _receptacle_types(
    rng: random.Random, room: Room, kind: str, difficulty: Difficulty
) -> list[str]:
    types: list[str] = []
    for type_, (low, high) in room.receptacles.items():
        number = rng.randint(low, high) if high > low else low
        types += [type_] * min(number, difficulty.per_type or number)
    if difficulty.receptacles is None:
        return types
    tool = tables.TREATMENTS[kind][0] if kind in tables.TREATMENTS else None
    rng.shuffle(types)
    types.sort(key=lambda type_: type_ != tool)
    return types[: rng.randint(*difficulty.receptacles)]


def _goal(rng: random.Random, room: Room, kind: str, types: list[str]) -> tuple[str, str] | None:
    """(object type, target type), or None where the draw does not allow a goal of this kind."""
    if kind == "look":
        object_ = rng.choice(room.objects)
        possible = _holders(types, object_) and any(type_ in tables.LAMP_SPOTS for type_ in types)
        return (object_, tables.LAMP) if possible else None
    tool, able = tables.TREATMENTS.get(kind, (None, None))
    object_ = rng.choice([o for o in room.objects if able is None or o in tables.ABILITIES[able]])
    targets = sorted({types[i] for i in _holders(types, object_)} - {tool})
    if not targets:
        return None
    target = rng.choice(targets)
    return (object_, target) if _sources(types, object_, target) else None


def _place_objects(
    rng: random.Random,
    room: Room,
    kind: str,
    types: list[str],
    object_: str,
    target: str,
    difficulty: Difficulty,
) -> list[tuple[str, int]]:
    """(type, index of the receptacle) of every object.

    Those of the goal's type start outside its target.
    """
    needed = 2 if kind == "two" else 1
    if difficulty.objects is None:
        crowd = []
        for type_ in room.objects:
            number = min(rng.choice((0, 1, 1, 2, 3)), difficulty.copies)
            crowd += [type_] * (number - needed if type_ == object_ else number)
    else:
        crowd = [o for o in room.objects if o != object_ and _holders(types, o)] * difficulty.copies
        crowd += [object_] * (difficulty.copies - needed)
        rng.shuffle(crowd)
        crowd = crowd[: rng.randint(*difficulty.objects) - needed]
    placed = []
    for type_ in [object_] * needed + crowd:
        places = _sources(types, type_, target) if type_ == object_ else _holders(types, type_)
        if places:
            placed.append((type_, rng.choice(places)))
    if kind == "look":
        placed.append(
            (
                tables.LAMP,
                rng.choice([i for i, type_ in enumerate(types) if type_ in tables.LAMP_SPOTS]),
            )
        )
    return placed


def _holders(types: list[str], object_: str) -> list[int]:
    return [i for i, type_ in enumerate(types) if object_ in tables.HOLDS[type_]]


def _sources(types: list[str], object_: str, target: str) -> list[int]:
    return [i for i in _holders(types, object_) if types[i] != target]


def _location(spot: int, rng: random.Random) -> str:
    """A cell of a 25 x 25 grid, with a direction to face and an angle to look down at, as ALFRED writes locations."""
    x, y = (f"_minus_{-v}" if v < 0 else f"{v}" for v in (spot // 25 - 12, spot % 25 - 12))
    return f"loc_bar_{x}_bar_{y}_bar_{rng.randrange(4)}_bar_{15 * rng.randint(1, 4)}"


def _id(rng: random.Random, type_: str, taken: set[str]) -> str:
    """An unused id: type and position in metres, "Mug_bar__plus_01_dot_65_bar_..."; a basin is part of a sink."""
    head, tail = (
        (type_.removesuffix("Basin"), f"_bar_{type_}") if type_.endswith("Basin") else (type_, "")
    )
    while True:
        id_ = head
        for _ in range(3):
            v = int(rng.random() * 800) - 400
            id_ += f"_bar__{'minus' if v < 0 else 'plus'}_{abs(v) // 100:02}_dot_{abs(v) % 100:02}"
        id_ += tail
        if id_ not in taken:
            taken.add(id_)
            return id_


# ---- writing files


def _problem(scene: Scene) -> str:
    """The scene as a PDDL problem of data/alfred.pddl."""
    receptacle_types = {type_ for _, type_, _ in scene.receptacles}
    object_types = {type_ for _, type_, _ in scene.objects}
    facts = []
    for id_, type_, location in scene.receptacles:
        facts += [f"receptacleType {id_} {type_}Type", f"receptacleAtLocation {id_} {location}"]
        facts += [f"openable {id_}"] if type_ in tables.OPENABLE else []
    for type_ in sorted(receptacle_types):
        facts += [
            f"canContain {type_}Type {object_}Type"
            for object_ in tables.HOLDS[type_]
            if object_ in object_types
        ]
    for id_, type_, index in scene.objects:
        receptacle, _, location = scene.receptacles[index]
        facts += [
            f"objectType {id_} {type_}Type",
            f"{'toggleable' if type_ == tables.LAMP else 'pickupable'} {id_}",
        ]
        facts += [
            f"{ability} {id_}" for ability, types in tables.ABILITIES.items() if type_ in types
        ]
        facts += [f"inReceptacle {id_} {receptacle}", f"objectAtLocation {id_} {location}"]
    facts.append(f"atLocation agent1 {scene.start}")
    declared = ["agent1 - agent"]
    declared += [f"{type_}Type - otype" for type_ in sorted({*object_types, *_DOMAIN_OBJECTS})]
    declared += [
        f"{type_}Type - rtype" for type_ in sorted({*receptacle_types, *_DOMAIN_RECEPTACLES})
    ]
    declared += [f"{id_} - object" for id_, _, _ in scene.objects]
    declared += [f"{id_} - receptacle" for id_, _, _ in scene.receptacles]
    declared += [
        f"{place} - location" for place in sorted({scene.start, *(r[2] for r in scene.receptacles)})
    ]
    head = f"(define (problem generated_{scene.seed:012x})\n(:domain alfred)\n(:objects\n    "
    goal = tables.GOALS[scene.kind].format(object=scene.object, target=scene.target)
    body = "\n    ".join(declared) + ")\n(:init\n    (" + ")\n    (".join(facts)
    return f"{head}{body}))\n(:goal (and {goal})))\n"


def write(game: Game, folder: str | Path) -> Path:
    """Write a generated game under `folder`, a split's root, as ALFWorld lays games out; returns its game.tw-pddl.

    Beside it lies the part of traj_data.json that alfworld's own environment and expert read.
    """
    scene = game.scene
    assert isinstance(scene, Scene), f"{game.name} was not generated"
    domain, grammar = (
        (_DATA / name).read_text(encoding="utf-8") for name in ("alfred.pddl", "alfred.twl2")
    )
    task_type, parent = TASK_TYPES[scene.kind], "" if scene.kind == "look" else scene.target
    data = {"pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", scene.sentence)}
    data |= {"pddl_problem": _problem(scene), "solvable": True, "walkthrough": game.walkthrough}
    goal = {
        "object_target": scene.object,
        "parent_target": parent,
        "toggle_target": "" if parent else scene.target,
    }
    trial_id = f"trial_G{scene.seed:012x}"
    trajectory = {
        "task_type": task_type,
        "task_id": trial_id,
        "scene": {"scene_num": scene.floor_plan, "floor_plan": f"FloorPlan{scene.floor_plan}"},
        "pddl_params": {**goal, "mrecep_target": "", "object_sliced": False},
        "turk_annotations": {"anns": [{"task_desc": scene.sentence, "high_descs": []}]},
    }
    trial = (
        Path(folder)
        / f"{task_type}-{scene.object}-None-{scene.target}-{scene.floor_plan}"
        / trial_id
    )
    trial.mkdir(parents=True, exist_ok=True)
    (trial / "traj_data.json").write_text(json.dumps(trajectory), encoding="utf-8")
    path = trial / "game.tw-pddl"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path
