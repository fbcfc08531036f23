"""The native ALFWorld engine: what it says, allows and refuses to read; and the real engine,
which says the same."""

import json
import os
import random
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paw.envs.alfworld import index
from paw.envs.alfworld.factory import AlfworldFactory
from paw.envs.alfworld.generator import games, write
from paw.envs.alfworld.household import Household
from paw.envs.alfworld.oracle import oracle, solve
from paw.envs.alfworld.problem import KINDS, TASK_TYPES, Game
from paw.envs.alfworld.tables import DIFFICULTIES, GOALS
from paw.envs.base import eval_tasks
from paw.envs.settings import AlfworldConfig
from paw.errors import UserError
from paw.types import Task

GAMES = int(os.environ.get("PAW_TEXTWORLD_GAMES", "4"))
"""Official games played with the real engine, and generated ones; hundreds are for a machine of
one's own."""
HANDLING = ("take", "move", "open", "close", "clean", "heat", "cool", "slice", "use")


def two_cabinets(kind: str) -> str:
    """A problem: put two mugs in a cabinet, or look at a mug under the lamp."""
    conditions = GOALS[kind].format(
        object="Mug", target="DeskLamp" if kind == "look" else "Cabinet"
    )
    return Path(__file__).with_name("two_cabinets.pddl").read_text().replace("GOAL", conditions)


def kitchen() -> Household:
    return Household(Game(two_cabinets("two"), "Your task is to: be quick."))


def play(household: Household, *commands: str) -> str:
    """Returns the feedback of the last command. Every command must be admissible."""
    feedback = ""
    for command in commands:
        assert command in household.admissible, command
        feedback = household.step(command)
    return feedback


def test_what_is_seen_and_what_is_admissible():
    household = kitchen()
    assert household.reset() == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        "a cabinet 2, a cabinet 1, a countertop 1, a desk 1, a microwave 1, and a sinkbasin 1."
        "\n\nYour task is to: be quick."
    )
    assert (
        play(household, "look")
        == "You are in the middle of a room. Looking quickly around you, you see nothing."
    )
    before = household.admissible
    for command in (
        "",
        "fly away",
        "take mug 2 from countertop 1",
        "GO TO DESK 1",
        "open cabinet 1",
    ):
        assert household.step(command) == "Nothing happens."
    assert household.admissible == before
    assert (
        household.step("  go to desk 1 \n")
        == "You arrive at desk 1. On the desk 1, you see a desklamp 1."
    )
    household.step("go to cabinet 1")
    assert household.admissible == [
        *("examine cabinet 1", "examine cabinet 2", "examine countertop 1"),
        *("go to desk 1", "go to microwave 1", "go to sinkbasin 1", "help", "inventory", "look"),
        *("open cabinet 1", "open cabinet 2"),
        *(
            "take apple 1 from countertop 1",
            "take knife 1 from countertop 1",
            "take mug 2 from countertop 1",
        ),
    ]


def test_states_of_an_object_and_where_it_lies():
    household = kitchen()
    play(household, "go to countertop 1")
    assert "examine apple 1" not in household.admissible  # only what is held can be examined
    play(household, "take apple 1 from countertop 1")
    assert play(household, "examine apple 1") == "This is a cold apple 1."
    assert play(household, "go to sinkbasin 1", "clean apple 1 with sinkbasin 1") == (
        "You clean the apple 1 using the sinkbasin 1."
    )
    assert play(household, "examine apple 1") == "This is a cool and clean apple 1."
    play(household, "go to microwave 1", "heat apple 1 with microwave 1")  # through the closed door
    assert play(household, "examine apple 1") == "This is a hot and clean apple 1."
    play(
        household,
        "go to countertop 1",
        "move apple 1 to countertop 1",
        "take knife 1 from countertop 1",
    )
    assert (
        play(household, "slice apple 1 with knife 1") == "You sliced the apple 1 with the knife 1."
    )
    play(household, "move knife 1 to countertop 1", "take apple 1 from countertop 1")
    assert play(household, "examine apple 1") == "This is a hot and clean sliced apple 1."
    play(household, "move apple 1 to countertop 1", "take mug 2 from countertop 1")
    assert play(household, "examine mug 2") == "This is a normal mug 2. In it, you see nothing."
    play(household, "open cabinet 1", "move mug 2 to cabinet 1")
    facing = "You are facing the cabinet 2, cabinet 1, and countertop 1. Next to it, you see "
    assert play(household, "look") == facing + "a mug 2."
    play(household, "take mug 2 from cabinet 1", "open cabinet 2", "move mug 2 to cabinet 2")
    # Once for each place it was taken from.
    assert play(household, "look") == facing + "a mug 2, and a mug 2."
    play(household, "take mug 2 from cabinet 2")
    assert play(household, "look") == facing + "nothing."


def test_expert_gathers_two_objects_that_lie_in_two_targets():
    household = kitchen()
    play(
        household,
        "go to countertop 1",
        "open cabinet 1",
        "take mug 2 from countertop 1",
        "move mug 2 to cabinet 1",
    )
    assert not household.won  # both must lie in one
    for _ in range(10):
        if not household.won:
            play(household, oracle(household))
    assert household.won
    household.reset()
    assert not household.won
    assert household.held is None


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS), wander=st.integers(0, 80))
def test_expert_wins_from_wherever_random_play_leads(seed, kind, wander):
    household = Household(*games("train", 0, 1, seed=seed, difficulty="small", kinds=[kind]))
    generator = random.Random(seed)
    for _ in range(wander):
        handling = [
            command
            for command in household.admissible
            if not command.startswith(("go to", "examine"))
        ]
        household.step(
            generator.choice(handling if generator.random() < 0.6 else household.admissible)
        )
    for _ in range(20):
        if household.won:
            return
        play(household, oracle(household))
    pytest.fail(f"the expert has not won {household.game.name} in 20 steps")


@pytest.mark.slow
def test_official_walkthroughs_and_the_expert_win(official_games, tmp_path):
    kinds = dict.fromkeys(KINDS, 0)
    count = 0
    path = tmp_path / index.GAME_FILE
    for name, data in official_games(step=16):
        path.write_text(json.dumps(data))
        game = Game.load(path)
        household = Household(game)
        assert not household.won, name
        play(household, *game.walkthrough)
        assert household.won, name
        assert len(solve(game)) <= 50, name
        kinds[game.kind] += 1
        count += 1
    assert count == 244
    assert all(kinds.values())


def test_a_damaged_file_is_one_clear_line(tmp_path):
    path = write(*games("train", 3, 1, difficulty="tiny"), tmp_path)
    text = path.read_text()
    data = json.loads(path.read_text())
    problem = data["pddl_problem"]
    grammar = data["grammar"].replace("move {o} to", "put {o} in")
    for content, complaint in (
        (text[: len(text) // 2], "Invalid JSON"),
        ("\udcff", "Invalid JSON"),
        ("[1, 2]", "Input should be an object"),
        ({"grammar": 3}, "grammar: Input should be a valid string"),
        ({"walkthrough": "look"}, "walkthrough: Input should be a valid array"),
        ({"grammar": "{}"}, "names no task"),
        ({"grammar": grammar}, "json_2.1.2"),
        (text.replace('"pddl_problem"', '"pddl_problems"'), "pddl_problem: Field required"),
        ({"pddl_problem": problem[:-30]}, "cut off"),
        ({"pddl_problem": problem[:99]}, "(:goal"),
        ({"pddl_problem": problem.replace("(atLocation", "(at")}, "no agent"),
        (
            {"pddl_problem": problem.replace("(inReceptacle", "(inReceptacle x")},
            "does not have two arguments",
        ),
        (
            {"pddl_problem": "(define (:init (a b)) (:goal (and (isSliced ?o))))"},
            "not one of ALFWorld's six",
        ),
    ):
        changed = content if isinstance(content, str) else json.dumps(data | content)
        path.write_bytes(changed.encode(errors="surrogateescape"))
        assert complaint in refused(path)
    assert "cannot be read" in refused(tmp_path / "absent")
    assert "cannot be read" in refused(tmp_path)


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        Game.load(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def make_factory(**settings) -> AlfworldFactory:
    return AlfworldFactory(AlfworldConfig(max_turns=10_000, think=False, **settings))


@pytest.fixture(scope="module")
def both():
    """An environment of the native engine, and one of the real engine, which takes seconds to
    start."""
    pytest.importorskip("textworld", reason="the real engine needs the package textworld")
    pytest.importorskip("alfworld", reason="the real engine needs the package alfworld")
    native = make_factory().make()
    real = make_factory(backend="textworld").make()
    yield native, real
    real.close()


def play_both(both, task: Task, generator: random.Random, wander: int) -> bool:
    """Whether `task` was won, over `wander` mostly random steps and the rest of the walkthrough."""
    native, real = both
    assert real.reset(task) == native.reset(task)
    walkthrough = list(task.payload.walkthrough or [])
    while wander > 0 or walkthrough:
        assert real.context() == native.context(), task.id
        admissible = native.admissible_actions()
        chance = generator.random()
        handling = [command for command in admissible if command.startswith(HANDLING)]
        if walkthrough and (wander <= 0 or chance < 0.2):
            command = walkthrough.pop(0)
        elif chance < 0.25:
            command = generator.choice(("look", "inventory", "help", "fly away"))
        else:
            command = generator.choice(handling if handling and chance < 0.65 else admissible)
        wander -= 1
        outcome = native.step(native.format_action(command))
        assert real.step(real.format_action(command)) == outcome, task.id
        if outcome.done:
            return outcome.won
    assert real.oracle() == native.oracle()
    return False


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("count", [2, pytest.param(GAMES, marks=pytest.mark.long)])
def test_official_games_match_the_real_engine(both, official_games, tmp_path, monkeypatch, count):
    monkeypatch.setenv("PAW_CACHE", str(tmp_path))
    for game_id, game in islice(official_games(step=3893 // count), count):
        path = tmp_path / "json_2.1.1" / "train" / game_id.partition("/")[2] / index.GAME_FILE
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(game))
    games = make_factory(data=tmp_path, eval_split="train", backend="textworld")
    assert games.fingerprint().startswith("textworld ")
    generator = random.Random(0)
    tasks = eval_tasks(games, "train", 0, 0)
    assert len(tasks) == count
    for number, task in enumerate(tasks):
        assert task.id.split("/")[1].startswith(TASK_TYPES[task.kind])
        wander = (0, 40, 15)[number % 3]
        assert play_both(both, task, generator, wander) or wander


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_generated_games_match_the_real_engine(both):
    generator = random.Random(1)
    for number in range(GAMES):
        level = list(DIFFICULTIES.values())[number % 4]
        (game,) = games(
            "train",
            number,
            1,
            difficulty=level.name,
            kinds=[level.kinds[number % len(level.kinds)]],
        )
        wander = (40, 15, 0)[number % 3]
        assert play_both(both, Task("generated", game.kind, game), generator, wander) or wander


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_quirks_match_the_real_engine(both, tmp_path):
    """Long random play where receptacles share a location, an object is cool from the start, and
    a knife is at hand."""
    data = json.loads(write(*games("train", 0, 1, difficulty="tiny"), tmp_path).read_text())
    generator = random.Random(2)
    for kind in ("two", "look"):
        path = tmp_path / f"{kind}.tw-pddl"
        path.write_text(
            json.dumps({**data, "pddl_problem": two_cabinets(kind), "walkthrough": None})
        )
        play_both(both, Task(kind, kind, Game.load(path)), generator, wander=80)
