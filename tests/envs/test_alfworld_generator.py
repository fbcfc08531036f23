"""Generated household games are the same for the same seed, can be solved, have the promised size,
and belong to one split."""

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
    assert game.task.startswith("Your task is to: ")
    assert game.task.endswith(".")
    assert len(game.walkthrough) <= 12
    for _, object_type, index in game.scene.objects:
        assert object_type == "DeskLamp" or object_type in HOLDS[game.scene.receptacles[index][1]]


def test_splits_never_share_a_game_and_a_stream_can_be_entered_anywhere():
    stream = [game.scene for game in games("train", 0, 12, seed=3, difficulty="tiny")]
    assert [game.scene for game in games("train", 7, 5, seed=3, difficulty="tiny")] == stream[7:]
    assert [game.scene for game in games("train", 0, 12, seed=4, difficulty="tiny")] != stream
    scene = stream[0]
    renamed = tuple(
        (f"{receptacle_id}9", receptacle_type, place)
        for receptacle_id, receptacle_type, place in scene.receptacles
    )
    assert (
        replace(scene, sentence="other words", seed=1, receptacles=renamed).split() == scene.split()
    )
    assert replace(scene, receptacles=scene.receptacles[::-1]).content() != scene.content()
    contents = []
    for split in SPLITS:
        of_split = set()
        for seed in (0, 1):
            played = games(split, 0, 100, seed=seed, difficulty="tiny")
            of_split.update(game.scene.content() for game in played)
        contents.append(of_split)
    assert all(len(content) > 190 for content in contents)  # a split rarely repeats a game
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
    played_games = list(games("train", 0, 100, difficulty=level))
    assert {game.kind for game in played_games} == set(kinds)
    assert DIFFICULTIES[level].kinds == kinds
    for game in played_games:
        # a bathroom's table limits its receptacles, whatever the preset asks for
        assert min(receptacles[0], 8) <= len(game.scene.receptacles) <= receptacles[1]
        assert objects[0] <= len(game.scene.objects) <= objects[1]
    if level == "tiny":
        for game in played_games:
            for object_id in (*game.location, *game.object_type):
                assert game.names[object_id].endswith(" 1")
    if level == "full":
        rooms = {game.scene.floor_plan // 100 for game in played_games}
        assert rooms == {0, 2, 3, 4}  # all four kinds of rooms


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, level=LEVELS)
def test_a_written_game_plays_like_the_one_in_memory(tmp_path_factory, seed, level):
    (game,) = games("train", 0, 1, seed=seed, difficulty=level)
    path = write(game, tmp_path_factory.mktemp("games"))
    loaded = Game.load(path)
    assert loaded.walkthrough == game.walkthrough
    assert loaded.kind == game.kind
    in_memory = Household(game)
    from_file = Household(loaded)
    generator = random.Random(seed)
    assert in_memory.reset() == from_file.reset()
    for _ in range(30):
        assert in_memory.admissible == from_file.admissible
        command = generator.choice(in_memory.admissible)
        assert in_memory.step(command) == from_file.step(command)
        assert in_memory.won == from_file.won
    # The names and descriptions are ALFWorld's.
    kind, object_, _, parent, scene = path.parent.parent.name.split("-")
    trajectory = json.loads((path.parent / "traj_data.json").read_text())
    parameters = trajectory["pddl_params"]
    assert kind == trajectory["task_type"] == TASK_TYPES[game.kind]
    assert trajectory["scene"]["scene_num"] == int(scene)
    target = "toggle_target" if game.kind == "look" else "parent_target"
    assert parameters["object_target"] == object_
    assert parameters[target] == parent
    trajectory_data = json.loads(path.read_text())
    assert trajectory_data["solvable"] is True
    assert set(trajectory_data) == {
        "pddl_domain",
        "grammar",
        "pddl_problem",
        "solvable",
        "walkthrough",
    }


def test_every_object_of_a_room_has_a_place_in_it():
    for difficulty in DIFFICULTIES.values():
        for room in difficulty.rooms:
            places = [HOLDS[receptacle] for receptacle in room.receptacles]
            for object_type in room.objects:
                assert any(object_type in place for place in places), object_type


def test_tables_and_data_are_alfworlds():
    constants = pytest.importorskip("alfworld.gen.constants")
    library = pytest.importorskip("alfworld.gen.goal_library")
    alfworld_info = pytest.importorskip("alfworld.info")

    def unsliced(object_types):
        return {object_type for object_type in object_types if not object_type.endswith("Sliced")}

    for receptacle, object_types in HOLDS.items():
        assert set(object_types) == unsliced(constants.VAL_RECEPTACLE_OBJECTS[receptacle])
    for predicate in ("Cleanable", "Heatable", "Coolable", "Sliceable"):
        assert ABILITIES[predicate.lower()] == unsliced(constants.VAL_ACTION_OBJECTS[predicate])
    assert ABILITIES["isReceptacleObject"] == constants.MOVABLE_RECEPTACLES_SET
    for kind, task_type in TASK_TYPES.items():
        goal = library.gdict[task_type]["pddl"].format(
            obj="Mug", recep="Desk", toggle="Desk", mrecep=""
        )
        own_goal = f"(:goal (and {GOALS[kind].format(object='Mug', target='Desk')})))"
        assert "".join(own_goal.split()) == "".join(goal.replace("#", "-").split())
        templates = [
            sentence.format(obj="O", recep="T", toggle="T", mrecep="")
            for sentence in library.gdict[task_type]["templates"]
        ]
        assert [
            sentence.format(object="O", target="T") for sentence in SENTENCES[kind]
        ] == templates
    for name, path in (
        ("alfred.pddl", alfworld_info.ALFRED_PDDL_PATH),
        ("alfred.twl2", alfworld_info.ALFRED_TWL2_PATH),
    ):
        with open(path, "rb") as file:  # noqa: PTH123
            assert (_DATA / name).read_bytes() == file.read()
