"""What must be quick on any machine: `paw --help`, `import paw`, and a step of a household.

    python bench/speed.py

Processor seconds, so that other work on the machine counts little. `paw --help` should stay under
half a second, and a household should make more than 20,000 steps a second; the tests hold what that
rests on (no library is imported), not the seconds, which differ from machine to machine. Ends with
code 1 if one of them is missed.
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
REPEATS = 5


def processor_seconds(*words: str) -> float:
    """Of a child, the best of some: the first may compile bytecode."""
    found = []
    for _ in range(REPEATS):
        child = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{' '.join(words)}: exit code {child.returncode}")
        found.append(usage.ru_utime + usage.ru_stime)
    return min(found)


def household_steps() -> float:
    """Steps a second, the best of some, reading the admissible commands and the win flag after each."""
    played, rng = [], random.Random(0)
    for seed in range(20):
        household, commands = Household(*games("train", 0, 1, seed=seed)), []
        for _ in range(50):
            expert = rng.random() < 0.3
            commands.append(oracle(household) if expert else rng.choice(household.admissible))
            household.step(commands[-1])
        played.append((household, commands))

    best = 0.0
    for _ in range(REPEATS):
        started = time.process_time()
        for household, commands in played:
            household.reset()
            for command in commands:
                household.step(command)
                assert household.admissible and household.won is not None
        best = max(best, 1000 / (time.process_time() - started))
    return best


def main() -> int:
    shown = processor_seconds("-m", "paw", "--help")
    imported = processor_seconds("-c", "import paw")
    steps = household_steps()
    print(f"paw --help: {shown:.2f} s (at most {HELP_S:g})")
    print(f"import paw: {imported:.2f} s")
    print(f"household: {steps:,.0f} steps a second (at least {STEPS_A_SECOND:,})")
    return 0 if shown <= HELP_S and steps >= STEPS_A_SECOND else 1


if __name__ == "__main__":
    sys.exit(main())
