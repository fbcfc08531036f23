"""The native ALFWorld engine: what it says, what it allows, what it refuses to read."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paw.envs.alfworld.generator import generate, write
from paw.envs.alfworld.household import Household
from paw.envs.alfworld.oracle import oracle, solve
from paw.envs.alfworld.problem import KINDS, Game
from paw.envs.alfworld.tables import GOALS
from paw.errors import UserError

TWO_CABINETS = Path(__file__).with_name("two_cabinets.pddl")


def kitchen(kind: str = "two") -> Household:
    """The household of two_cabinets.pddl: put two mugs in a cabinet, or look at a mug under the lamp."""
    goal = GOALS[kind].format(object="Mug", target="DeskLamp" if kind == "look" else "Cabinet")
    return Household(Game.parse(TWO_CABINETS.read_text().replace("GOAL", goal), "Your task is to: be quick."))


def play(household: Household, *commands: str) -> str:
    """Feedback of the last command; every one must be admissible."""
    feedback = ""
    for command in commands:
        assert command in household.admissible, command
        feedback = household.step(command)
    return feedback


def test_welcome_names_every_receptacle_but_look_sees_none_before_the_first_move():
    household = kitchen()
    assert household.reset() == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        "a cabinet 2, a cabinet 1, a countertop 1, a desk 1, a microwave 1, and a sinkbasin 1."
        "\n\nYour task is to: be quick."
    )
    assert play(household, "look") == ("You are in the middle of a room. Looking quickly around you, you see nothing.")


def test_admissible_commands_are_sorted_and_leave_out_going_where_one_is():
    household = kitchen()
    household.step("go to cabinet 1")
    assert household.admissible == [
        *("examine cabinet 1", "examine cabinet 2", "examine countertop 1"),
        *("go to desk 1", "go to microwave 1", "go to sinkbasin 1", "help", "inventory", "look"),
        *("open cabinet 1", "open cabinet 2"),
        *("take apple 1 from countertop 1", "take knife 1 from countertop 1", "take mug 2 from countertop 1"),
    ]


def test_what_is_not_admissible_does_nothing():
    household = kitchen()
    before = household.admissible
    for command in ("", "fly away", "take mug 2 from countertop 1", "GO TO DESK 1", "open cabinet 1"):
        assert household.step(command) == "Nothing happens."
    assert household.admissible == before
    assert household.step("  go to desk 1 \n") == "You arrive at desk 1. On the desk 1, you see a desklamp 1."


def test_an_object_moved_between_neighbours_lies_next_to_them():
    household = kitchen()
    play(household, "go to countertop 1", "take mug 2 from countertop 1", "open cabinet 1", "move mug 2 to cabinet 1")
    facing = "You are facing the cabinet 2, cabinet 1, and countertop 1. Next to it, you see "
    assert play(household, "look") == facing + "a mug 2."
    play(household, "take mug 2 from cabinet 1", "open cabinet 2", "move mug 2 to cabinet 2")
    assert play(household, "look") == facing + "a mug 2, and a mug 2."  # once for each place it was taken from
    play(household, "take mug 2 from cabinet 2")
    assert play(household, "look") == facing + "nothing."


def test_states_of_an_object_and_that_only_a_held_one_can_be_examined():
    household = kitchen()
    play(household, "go to countertop 1")
    assert "examine apple 1" not in household.admissible
    play(household, "take apple 1 from countertop 1")
    assert play(household, "examine apple 1") == "This is a cold apple 1."
    assert play(household, "go to sinkbasin 1", "clean apple 1 with sinkbasin 1") == (
        "You clean the apple 1 using the sinkbasin 1."
    )
    assert play(household, "examine apple 1") == "This is a cool and clean apple 1."
    play(household, "go to microwave 1", "heat apple 1 with microwave 1")  # through the closed door
    assert play(household, "examine apple 1") == "This is a hot and clean apple 1."
    play(household, "go to countertop 1", "move apple 1 to countertop 1", "take knife 1 from countertop 1")
    assert play(household, "slice apple 1 with knife 1") == "You sliced the apple 1 with the knife 1."
    play(household, "move knife 1 to countertop 1", "take apple 1 from countertop 1")
    assert play(household, "examine apple 1") == "This is a hot and clean sliced apple 1."
    play(household, "move apple 1 to countertop 1", "take mug 2 from countertop 1")
    assert play(household, "examine mug 2") == "This is a normal mug 2. In it, you see nothing."


def test_expert_gathers_two_objects_that_lie_in_two_targets():
    household = kitchen()
    play(household, "go to countertop 1", "open cabinet 1", "take mug 2 from countertop 1", "move mug 2 to cabinet 1")
    assert not household.won  # both must lie in one
    for _ in range(10):
        if not household.won:
            play(household, oracle(household))
    assert household.won
    household.reset()
    assert not household.won and household.held is None


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS), wander=st.integers(0, 80))
def test_expert_wins_from_wherever_random_play_leads(seed, kind, wander):
    household = Household(generate(seed, difficulty="small", kinds=[kind]))
    rng = random.Random(seed)
    for _ in range(wander):
        handling = [c for c in household.admissible if not c.startswith(("go to", "examine"))]
        household.step(rng.choice(handling if rng.random() < 0.6 else household.admissible))
    for _ in range(20):
        if household.won:
            return
        play(household, oracle(household))
    pytest.fail(f"the expert has not won {household.game.name} in 20 steps")


@pytest.mark.slow
def test_every_official_walkthrough_and_the_expert_win(official_games):
    kinds, count = dict.fromkeys(KINDS, 0), 0
    for name, data in official_games():
        game = Game.from_data(data, name=name)
        household = Household(game)
        assert not household.won, name
        play(household, *game.walkthrough)
        assert household.won, name
        assert len(solve(game)) <= 50, name
        kinds[game.kind] += 1
        count += 1
    assert count == 3893
    assert all(kinds.values())


def test_speed():
    """20,000 steps per CPU second, best of three, reading the admissible commands and the win flag after every one."""
    played = []
    rng = random.Random(0)
    for seed in range(20):
        household, commands = Household(generate(seed, difficulty="full")), []
        for _ in range(50):
            commands.append(oracle(household) if rng.random() < 0.3 else rng.choice(household.admissible))
            household.step(commands[-1])
        played.append((household, commands))
    best = 0.0
    for _ in range(3):
        start = time.process_time()
        for household, commands in played:
            household.reset()
            for command in commands:
                household.step(command)
                assert household.admissible
                assert household.won is not None
        best = max(best, sum(len(commands) for _, commands in played) / (time.process_time() - start))
    assert best >= 20_000, f"{best:.0f} steps/s"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: ..., "pddl_problem: Field required"),
        (lambda data: data["pddl_problem"][:-30], "cut off"),
        (lambda data: data["pddl_problem"][:99], "(:goal"),
        (lambda data: data["pddl_problem"].replace("(atLocation", "(at"), "no agent"),
        (lambda data: data["pddl_problem"].replace("(inReceptacle", "(inReceptacle x"), "has not two arguments"),
        (lambda data: "(define (:init (a b)) (:goal (and (isSliced ?o))))", "none of ALFWorld's six"),
    ],
)
def test_a_damaged_problem_is_one_clear_line(tmp_path, change, complaint):
    path = write(generate(3, difficulty="tiny"), tmp_path)
    data = json.loads(path.read_text())
    data["pddl_problem"] = change(data)
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    assert complaint in refused(path)


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        Game.load(path)
    message = str(error.value)
    assert str(path) in message and "\n" not in message
    return message


def test_damaged_files_are_one_clear_line(tmp_path):
    path = write(generate(3, difficulty="tiny"), tmp_path)
    text, data = path.read_text(), json.loads(path.read_text())
    grammar = data["grammar"].replace("move {o} to", "put {o} in")
    for content, complaint in (
        ("", "Invalid JSON"),
        (text[: len(text) // 2], "Invalid JSON"),
        ("\udcff", "Invalid JSON"),
        ("[1, 2]", "Input should be an object"),
        (json.dumps(data | {"grammar": 3}), "grammar: Input should be a valid string"),
        (json.dumps(data | {"walkthrough": "look"}), "walkthrough: Input should be a valid array"),
        (json.dumps(data | {"grammar": "{}"}), "names no task"),
        (json.dumps(data | {"grammar": grammar}), "json_2.1.2"),
    ):
        path.write_bytes(content.encode(errors="surrogateescape"))
        assert complaint in refused(path)
    assert "cannot be read" in refused(tmp_path / "absent") and "cannot be read" in refused(tmp_path)
