"""Environments of gymnasium whose observations are text, and whose actions are text or one of a few."""

from typing import Any

from paw import plugins
from paw.envs.base import EnvFactory, Tasks, seeds
from paw.envs.conversation import Conversation, Message, invalid, opening
from paw.envs.settings import SpokenConfig
from paw.errors import UserError, clean, describe, needed
from paw.types import Outcome, Task


class GymnasiumConfig(SpokenConfig):
    """An environment of gymnasium whose observations are text."""

    name: str = "gymnasium"
    """Which environment."""
    id: str = ""
    """Its registered id, such as "MyGame-v0"."""
    module: str = ""
    """Module or FILE.py that registers it."""
    kwargs: dict[str, bool | int | float | str] = {}
    """Arguments of gymnasium.make."""


class GymnasiumFactory(EnvFactory):
    """UserError: gymnasium is not installed or knows no `env.id`, or that cannot be made or has other spaces."""

    Config = GymnasiumConfig
    name = "gymnasium"
    may_block = runs_others_code = True  # whether it blocks is not known

    def __init__(self, config: GymnasiumConfig) -> None:
        self.config, self.reward_max, self.invalid_penalty = (
            config,
            config.reward,
            config.invalid_penalty,
        )
        if not config.processes:  # where they run finds out else
            self.make().close()

    def tasks(self, split: str, seed: int) -> Tasks:
        if split == "warmup":
            raise UserError(
                "model.path = 'quickstart': gymnasium has no oracle to imitate; take an instruct model"
            )
        return seeds(split, seed)

    def make(self) -> "GymnasiumEnv":
        return GymnasiumEnv(self.config)

    def fingerprint(self) -> str:
        return f"gymnasium {self.config.id} {self.config.kwargs}"


class GymnasiumEnv(Conversation):
    """One episode at a time.

    Of a choice the names are those of `get_action_meanings()`, where there is that.
    """

    def __init__(self, config: GymnasiumConfig) -> None:
        where, module = f"env.id = '{config.id}'", config.module
        gymnasium = needed("gymnasium", "env.name = 'gymnasium'", "gymnasium")
        if file := module.endswith(".py"):
            plugins.import_file(module, f"env.module = '{module}'")
        try:
            name, options = (
                config.id if file or not module else f"{module}:{config.id}",
                dict[str, Any](config.kwargs),
            )
            self._env: Any = gymnasium.make(name, **options)
        except Exception as error:
            raise UserError(f"{where}: it cannot be made: {describe(error)}") from None
        seen, actions, text = (
            self._env.observation_space,
            self._env.action_space,
            gymnasium.spaces.Text,
        )
        numbers = range(0)
        if isinstance(actions, gymnasium.spaces.Discrete):
            numbers = range(int(actions.start), int(actions.start + actions.n))
        if not isinstance(seen, text) or not (numbers or isinstance(actions, text)):
            fix = "the first must be Text, the others Text or Discrete; wrap it"
            raise UserError(
                f"{where}: observations are {clean(seen, 60)}, actions {clean(actions, 60)}; {fix}"
            )
        meanings = getattr(self._env.unwrapped, "get_action_meanings", None)
        self._choice = dict(
            zip(meanings() if meanings and numbers else map(str, numbers), numbers, strict=True)
        )
        self.config, self._space = config, actions

    def begin(self, task: Task) -> list[Message]:
        self._return = 0.0
        return opening(self.config.instruction, self._env.reset(seed=task.payload["seed"])[0])

    def say(self, text: str) -> Outcome:
        action = self._choice.get(text) if self._choice else text
        if action is None or not self._space.contains(action):
            problem = (
                f"it must be one of {', '.join(self._choice)}"
                if self._choice
                else f"it is not in {self._space}"
            )
            return invalid(problem, text)
        seen, reward, terminated, truncated, _ = self._env.step(action)
        self._return += reward
        won = bool(terminated) and self._return >= self.config.reward
        return Outcome(
            seen, float(reward), done=bool(terminated or truncated), won=won, action=text
        )

    def admissible_actions(self) -> list[str]:
        return [*self._choice]

    def close(self) -> None:
        self._env.close()
