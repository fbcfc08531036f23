"""Speed of the native household engine and the generator: pytest bench --benchmark-only."""

import itertools

import pytest

from paw.envs.alfworld.generator import games, generate
from paw.envs.alfworld.household import Household


@pytest.mark.parametrize("difficulty", ["tiny", "full"])
def test_bench_play_walkthroughs(benchmark, difficulty):
    """Whole walkthroughs, resets included; steps/s is extra_info["steps"] / mean."""
    played = list(games("train", 0, 50, difficulty=difficulty))

    def play() -> int:
        steps = 0
        for game in played:
            household = Household(game)
            household.reset()
            for command in game.walkthrough or []:
                household.step(command)
                steps += 1
            assert household.won
        return steps

    benchmark.extra_info["steps"] = benchmark(play)


@pytest.mark.parametrize("difficulty", ["tiny", "full"])
def test_bench_generate(benchmark, difficulty):
    seeds = itertools.count()
    benchmark(lambda: generate(next(seeds), difficulty=difficulty))
