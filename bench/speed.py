"""What must be fast on any machine: `paw --help`, `import paw`, and a household's step.

    python bench/speed.py

Measures processor seconds, which other work on the machine hardly affects. `paw --help` should take
less than half a second, and a household should make more than 20,000 steps a second. Exits with 1
if either is too slow. Tests do not check the seconds, which differ from machine to machine, but
what makes them possible: that no library is imported.
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
"""Commands played in each household."""
REPEATS = 5


def processor_seconds(*arguments: str) -> float:
    """Processor seconds of a Python process, the best of REPEATS: the first may compile."""
    seconds = []
    for _ in range(REPEATS):
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(arguments)}: exit code {process.returncode}")
        seconds.append(usage.ru_utime + usage.ru_stime)
    return min(seconds)


def household_steps() -> float:
    """Steps a second, the best of REPEATS.

    After each step, the admissible commands and the win flag are read.
    """
    rng = random.Random(0)
    episodes = [play(seed, rng) for seed in range(HOUSEHOLDS)]

    most_steps_a_second = 0.0
    for _ in range(REPEATS):
        started = time.process_time()
        for household, commands in episodes:
            household.reset()
            for command in commands:
                household.step(command)
                assert household.admissible
                assert household.won is not None
        seconds = time.process_time() - started
        most_steps_a_second = max(most_steps_a_second, HOUSEHOLDS * COMMANDS / seconds)
    return most_steps_a_second


def play(seed: int, rng: random.Random) -> tuple[Household, list[str]]:
    """A household and COMMANDS commands played in it, about a third of them the oracle's."""
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
    steps_a_second = household_steps()
    print(f"paw --help: {help_s:.2f} s (at most {HELP_S:g})")
    print(f"import paw: {import_s:.2f} s")
    print(f"household: {steps_a_second:,.0f} steps a second (at least {STEPS_A_SECOND:,})")
    is_quick = help_s <= HELP_S and steps_a_second >= STEPS_A_SECOND
    return 0 if is_quick else 1


if __name__ == "__main__":
    sys.exit(main())
