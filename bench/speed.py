"""What must be quick on any machine: `paw --help`, `import paw`, and a step of a household.

    python bench/speed.py

Measures processor seconds, on which other work on the machine has little effect. `paw --help`
should stay under half a second, and a household should make more than 20,000 steps a second. Exits
with 1 if either does not. Tests check what this rests on (no library is imported), not the seconds,
which differ from machine to machine.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from paw.envs.alfworld.generator import games
from paw.envs.alfworld.household import Household
from paw.envs.alfworld.oracle import oracle

HELP_S = 0.5
STEPS_A_SECOND = 20_000
HOUSEHOLDS = 20
COMMANDS = 50
"""Of each household."""
REPEATS = 5


def processor_seconds(*words: str) -> float:
    """Processor seconds of a child, the best of REPEATS: the first may compile bytecode."""
    seconds = []
    for _ in range(REPEATS):
        child = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{' '.join(words)}: exit code {child.returncode}")
        seconds.append(usage.ru_utime + usage.ru_stime)
    return min(seconds)


def household_steps() -> float:
    """Steps a second, the best of REPEATS, reading the admissible commands and the win flag after
    each."""
    rng = random.Random(0)
    episodes = [play(seed, rng) for seed in range(HOUSEHOLDS)]

    best = 0.0
    for _ in range(REPEATS):
        start = time.process_time()
        for household, commands in episodes:
            household.reset()
            for command in commands:
                household.step(command)
                assert household.admissible
                assert household.won is not None
        seconds = time.process_time() - start
        best = max(best, HOUSEHOLDS * COMMANDS / seconds)
    return best


def play(seed: int, rng: random.Random) -> tuple[Household, list[str]]:
    """A household and COMMANDS commands played in it, a third of them by the oracle."""
    household = Household(*games("train", 0, 1, seed=seed))
    commands = []
    for _ in range(COMMANDS):
        command = oracle(household) if rng.random() < 0.3 else rng.choice(household.admissible)
        household.step(command)
        commands.append(command)
    return household, commands


def main() -> int:
    help_s = processor_seconds("-m", "paw", "--help")
    import_s = processor_seconds("-c", "import paw")
    steps = household_steps()
    print(f"paw --help: {help_s:.2f} s (at most {HELP_S:g})")
    print(f"import paw: {import_s:.2f} s")
    print(f"household: {steps:,.0f} steps a second (at least {STEPS_A_SECOND:,})")
    quick = help_s <= HELP_S and steps >= STEPS_A_SECOND
    return 0 if quick else 1


if __name__ == "__main__":
    sys.exit(main())
