"""Commands per second in the terminal: in a sandbox that is kept, and in a new one for each command.

    python bench/rollout/terminal_steps.py [--commands 300]

The environment itself keeps one sandbox and starts a new bash in it for each command. Writes
bench/results/terminal_steps_cpu.csv. "turns" are complete turns of generated tasks (prompt,
command, files, check), played by the oracle with 30 % random commands.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, commit, write
from paw.envs.terminal.factory import TerminalFactory
from paw.envs.terminal.sandbox import Limits, Shell, open_shell, temporary_folder
from paw.envs.terminal.settings import TerminalConfig
from paw.tools.warmup.expert_play import demonstrations

LIMITS = Limits(memory_mib=512, processes=64, disk_mib=64)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--commands", type=int, default=300)
    options = parser.parse_args()
    records = []
    with temporary_folder() as folder:
        folder.write("/task/a", b"red\nblue\n")
        folder.hand_over()
        shell = open_shell(folder, workdir="/task", limits=LIMITS)
        for command in ("echo 3 > out", "grep -c red a", "sed -i s/red/blue/ a"):
            for is_kept in (True, False):
                speed = commands_per_second(shell, command, options.commands, keep_sandbox=is_kept)
                sandbox = "kept" if is_kept else "new"
                records.append({"what": command, "sandbox": sandbox, "per second": round(speed)})
        shell.close()
    records.append(
        {
            "what": "turns",
            "sandbox": "kept",
            "per second": round(turns_per_second(options.commands)),
        }
    )
    for record in records:
        print(*record.values(), sep="  ")
        record["commit"] = commit("paw/envs/terminal")
    write(RESULTS / "terminal_steps_cpu.csv", records)


def commands_per_second(shell: Shell, command: str, count: int, *, keep_sandbox: bool) -> float:
    """How many times per second a command runs, one run after another."""
    shell.run(command, 10)
    started = time.perf_counter()
    for _ in range(count):
        if not keep_sandbox:
            shell.close()
        shell.run(command, 10)
    return count / (time.perf_counter() - started)


def turns_per_second(count: int) -> float:
    """How many turns of generated tasks are played per second, one after another."""
    config = TerminalConfig.model_validate({"style": "compact", "max_turns": 6})
    turns = demonstrations(TerminalFactory(config), config, seed=0, random_actions=0.3)
    next(turns)
    started = time.perf_counter()
    for _ in itertools.islice(turns, count):
        pass
    return count / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
