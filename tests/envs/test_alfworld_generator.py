"""Generated household games: the same for the same seed, solvable, of the promised size, never in two splits."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paw.envs.alfworld.generator import _DATA, SPLITS, games, write
from paw.envs.alfworld.household import Household
from paw.envs.alfworld.problem import KINDS, TASK_TYPES, Game
from paw.envs.alfworld.tables import ABILITIES, DIFFICULTIES, GOALS, HOLDS, SENTENCES

SEEDS = st.integers(0, 2**48)
LEVELS = st.sampled_from(sorted(DIFFICULTIES))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, level=LEVELS, data=st.data())
def test_every_game_starts_unsolved_and_its_walkthrough_wins(seed, level, data):
    kind = data.draw(st.sampled_from(DIFFICULTIES[level].kinds))
    (game,) = games("train", 0, 1, seed=seed, difficulty=level, kinds=[kind])
    household = Household(game)
    assert game.kind == kind
    assert not household.won
    for command in game.walkthrough:
        assert command in household.admissible
        household.step(command)
    assert household.won
    assert game.task.startswith("Your task is to: ") and game.task.endswith(".")
    assert len(game.walkthrough) <= 12
    for _, type_, index in game.scene.objects:
        assert type_ == "DeskLamp" or type_ in HOLDS[game.scene.receptacles[index][1]]


def test_splits_never_share_a_game_and_a_stream_can_be_entered_anywhere():
    whole = [game.scene for game in games("train", 0, 12, seed=3, difficulty="tiny")]
    assert [game.scene for game in games("train", 7, 5, seed=3, difficulty="tiny")] == whole[7:]
    assert [game.scene for game in games("train", 0, 12, seed=4, difficulty="tiny")] != whole
    scene = whole[0]
    renamed = tuple((f"{id_}9", type_, place) for id_, type_, place in scene.receptacles)
    assert (
        replace(scene, sentence="other words", seed=1, receptacles=renamed).split() == scene.split()
    )
    assert replace(scene, receptacles=scene.receptacles[::-1]).content() != scene.content()
    contents = [
        {
            game.scene.content()
            for seed in (0, 1)
            for game in games(split, 0, 100, seed=seed, difficulty="tiny")
        }
        for split in SPLITS
    ]
    assert all(len(content) > 190 for content in contents)  # a split hardly repeats itself
    assert len(set.union(*contents)) == sum(map(len, contents))


@pytest.mark.parametrize(
    ("level", "kinds", "receptacles", "objects"),
    [
        ("tiny", KINDS[:5], (4, 5), (3, 6)),
        ("small", KINDS, (5, 8), (5, 9)),
        ("medium", KINDS, (9, 14), (10, 17)),
        ("full", KINDS, (8, 46), (5, 90)),
    ],
)
def test_presets_keep_their_promises(level, kinds, receptacles, objects):
    made = list(games("train", 0, 100, difficulty=level))
    assert {game.kind for game in made} == set(kinds) and DIFFICULTIES[level].kinds == kinds
    for game in made:
        # a bathroom has no more receptacles than its table allows, whatever the preset would like
        assert min(receptacles[0], 8) <= len(game.scene.receptacles) <= receptacles[1]
        assert objects[0] <= len(game.scene.objects) <= objects[1]
    if level == "tiny":
        assert all(
            game.names[id_].endswith(" 1")
            for game in made
            for id_ in (*game.location, *game.object_type)
        )
    if level == "full":
        assert {game.scene.floor_plan // 100 for game in made} == {0, 2, 3, 4}  # all four rooms


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, level=LEVELS)
def test_a_written_game_plays_like_the_one_in_memory(tmp_path_factory, seed, level):
    (game,) = games("train", 0, 1, seed=seed, difficulty=level)
    path = write(game, tmp_path_factory.mktemp("games"))
    loaded = Game.load(path)
    assert (loaded.walkthrough, loaded.kind) == (game.walkthrough, game.kind)
    ours, theirs, rng = Household(game), Household(loaded), random.Random(seed)
    assert ours.reset() == theirs.reset()
    for _ in range(30):
        assert ours.admissible == theirs.admissible
        command = rng.choice(ours.admissible)
        assert (ours.step(command), ours.won) == (theirs.step(command), theirs.won)
    # As ALFWorld calls and describes it.
    kind, object_, _, parent, scene = path.parent.parent.name.split("-")
    trajectory = json.loads((path.parent / "traj_data.json").read_text())
    parameters = trajectory["pddl_params"]
    assert kind == trajectory["task_type"] == TASK_TYPES[game.kind] and trajectory["scene"][
        "scene_num"
    ] == int(scene)
    target = "toggle_target" if game.kind == "look" else "parent_target"
    assert (parameters["object_target"], parameters[target]) == (object_, parent)
    data = json.loads(path.read_text())
    assert data["solvable"] is True
    assert set(data) == {"pddl_domain", "grammar", "pddl_problem", "solvable", "walkthrough"}


def test_every_object_of_a_room_has_a_place_in_it():
    for room in (room for difficulty in DIFFICULTIES.values() for room in difficulty.rooms):
        for type_ in room.objects:
            assert any(type_ in HOLDS[receptacle] for receptacle in room.receptacles), type_


def test_tables_and_data_are_alfworlds():
    constants = pytest.importorskip("alfworld.gen.constants")
    library = pytest.importorskip("alfworld.gen.goal_library")
    info = pytest.importorskip("alfworld.info")

    def whole(types):
        return {type_ for type_ in types if not type_.endswith("Sliced")}

    for receptacle, types in HOLDS.items():
        assert set(types) == whole(constants.VAL_RECEPTACLE_OBJECTS[receptacle])
    for predicate in ("Cleanable", "Heatable", "Coolable", "Sliceable"):
        assert ABILITIES[predicate.lower()] == whole(constants.VAL_ACTION_OBJECTS[predicate])
    assert ABILITIES["isReceptacleObject"] == constants.MOVABLE_RECEPTACLES_SET
    for kind, task_type in TASK_TYPES.items():
        goal = library.gdict[task_type]["pddl"].format(
            obj="Mug", recep="Desk", toggle="Desk", mrecep=""
        )
        ours = f"(:goal (and {GOALS[kind].format(object='Mug', target='Desk')})))"
        assert "".join(ours.split()) == "".join(goal.replace("#", "-").split())
        templates = [
            s.format(obj="O", recep="T", toggle="T", mrecep="")
            for s in library.gdict[task_type]["templates"]
        ]
        assert [s.format(object="O", target="T") for s in SENTENCES[kind]] == templates
    for name, path in (
        ("alfred.pddl", info.ALFRED_PDDL_PATH),
        ("alfred.twl2", info.ALFRED_TWL2_PATH),
    ):
        with open(path, "rb") as file:  # noqa: PTH123
            assert (_DATA / name).read_bytes() == file.read()
