"""The real engine behind the interface of `Household`: textworld's PddlEnv with alfworld's names.

It runs in a `paw.envs.workers.worker`, because its planner library is global to a process and calls
exit() on bad input.
"""

import importlib.util

from paw.errors import UserError


class TextworldHousehold:
    """One game file, played by the real engine."""

    admissible: list[str]
    won: bool

    def __init__(self, path: str) -> None:
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.core import EnvInfos
        from textworld.envs import PddlEnv

        wanted = EnvInfos(won=True, admissible_commands=True)
        self._engine = AlfredDemangler(PddlEnv(wanted), shuffle=False)
        self._engine.load(path)

    def reset(self) -> str:
        return self._read(self._engine.reset())

    def step(self, command: str) -> str:
        return self._read(self._engine.step(command)[0])

    def _read(self, state) -> str:
        self.admissible = list(state["admissible_commands"])
        self.won = bool(state["won"])
        return state["feedback"]


def require_textworld() -> None:
    """Raise UserError, with the install command, if alfworld or textworld is missing."""
    for package in ("textworld", "alfworld"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"the textworld back end needs the package {package}: "
                "pip install 'paw-trainer[alfworld]' "
                '(or set env.backend to "native", which needs nothing)'
            )
