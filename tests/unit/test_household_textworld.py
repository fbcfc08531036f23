"""The native engine against the real one, string for string: feedback, every admissible command, the win flag.

The real engine takes one to three seconds to start a game. PAW_TEXTWORLD_GAMES sets how many official and how many
generated games are played (6 each by default); hundreds are for a machine of one's own.
"""

import json
import os
import random
from pathlib import Path

import pytest

from paw.envs.alfworld.generator import generate, write
from paw.envs.alfworld.household import Household
from paw.envs.alfworld.problem import KINDS, Game
from paw.envs.alfworld.tables import GOALS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]
GAMES = int(os.environ.get("PAW_TEXTWORLD_GAMES", "6"))
HANDLING = ("take", "move", "open", "close", "clean", "heat", "cool", "slice", "use")


@pytest.fixture(scope="module")
def engine():
    """The real engine. Its planner library is global to the process, so there is one, used in turn by all games."""
    textworld = pytest.importorskip("textworld", reason="the real engine needs the package textworld")
    pytest.importorskip("alfworld", reason="the real engine needs the package alfworld")
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs import PddlEnv

    return AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)), shuffle=False)


def play_both(engine, path, rng, wander=0) -> tuple[list[str], bool]:
    """Mismatches, and whether the game was won, over `wander` mostly random steps and the rest of the walkthrough."""
    game = Game.load(path)
    household = Household(game)
    engine.load(str(path))
    state, feedback, command = engine.reset(), household.reset(), "(reset)"
    walkthrough = list(game.walkthrough or [])
    won = False
    while True:
        real = (state.feedback, state["admissible_commands"], bool(state["won"]))
        ours = (feedback, household.admissible, household.won)
        if real != ours:
            return [f"{path.parent.name}, after {command!r}:\n  real {real}\n  ours {ours}"], won
        won = won or household.won
        draw = rng.random()
        handling = [c for c in household.admissible if c.startswith(HANDLING)]
        if wander <= 0 and not walkthrough:
            return [], won
        if walkthrough and (wander <= 0 or draw < 0.2):
            command = walkthrough.pop(0)
        elif draw < 0.25:
            command = rng.choice(("look", "inventory", "help", "fly away", " look "))
        else:
            command = rng.choice(handling if handling and draw < 0.65 else household.admissible)
        wander -= 1
        state, _, _ = engine.step(command)
        feedback = household.step(command)


def test_official_games(engine, official_games, tmp_path):
    rng = random.Random(0)
    chosen = set(rng.sample(range(3893), GAMES))
    mismatches, wins = [], 0
    for index, (name, data) in enumerate(official_games()):
        if index in chosen:
            path = tmp_path / name / "game.tw-pddl"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(data))
            found, won = play_both(engine, path, rng, wander=rng.choice((0, 15, 40)))
            mismatches += found
            wins += won
    assert not mismatches, "\n".join(mismatches)
    assert wins


def test_generated_games(engine, tmp_path):
    rng = random.Random(1)
    mismatches, wins = [], 0
    for index in range(GAMES):
        level = ("tiny", "small", "medium", "full")[index % 4]
        kind = KINDS[index % (5 if level == "tiny" else 6)]
        path = write(generate(index, difficulty=level, kinds=[kind]), tmp_path)
        found, won = play_both(engine, path, rng, wander=rng.choice((0, 15, 40)))
        mismatches += found
        wins += won
    assert not mismatches, "\n".join(mismatches)
    assert wins


def test_quirks(engine, tmp_path):
    """Long random play where receptacles share a location, an object is cool from the start, and a knife is at hand."""
    data = json.loads(write(generate(0, difficulty="tiny"), tmp_path).read_text())
    problem = Path(__file__).with_name("two_cabinets.pddl").read_text()
    rng = random.Random(2)
    mismatches = []
    for kind, target in (("two", "Cabinet"), ("look", "DeskLamp")):
        path = tmp_path / kind / "game.tw-pddl"
        path.parent.mkdir()
        goal = GOALS[kind].format(object="Mug", target=target)
        path.write_text(json.dumps({**data, "pddl_problem": problem.replace("GOAL", goal), "walkthrough": None}))
        for _ in range(2):
            mismatches += play_both(engine, path, rng, wander=60)[0]
    assert not mismatches, "\n".join(mismatches)
