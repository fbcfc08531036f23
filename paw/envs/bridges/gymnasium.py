"""gymnasium environments whose observations are text, and whose actions are text or a choice."""

from typing import Any

from paw.config import plugins
from paw.envs.base import EnvFactory, Tasks, seeds
from paw.envs.conversation import Conversation, Message, invalid, opening
from paw.envs.settings import ConversationConfig
from paw.errors import UserError, clean, describe, needed
from paw.types import Outcome, Task


class GymnasiumConfig(ConversationConfig):
    """A gymnasium environment whose observations are text."""

    name: str = "gymnasium"
    """Which environment."""
    id: str = ""
    """The registered id of the environment, such as "MyGame-v0"."""
    module: str = ""
    """Module or FILE.py that registers it."""
    kwargs: dict[str, bool | int | float | str] = {}
    """Arguments of gymnasium.make."""


class GymnasiumFactory(EnvFactory):
    """The environment `env.id`, with seeds as tasks.

    Raises UserError if gymnasium is not installed, or if the environment is unknown, cannot be made
    or has other spaces.
    """

    Config = GymnasiumConfig
    name = "gymnasium"
    may_block = True  # we do not know, but it may
    runs_others_code = True

    def __init__(self, config: GymnasiumConfig) -> None:
        self.config = config
        self.reward_max = config.reward
        self.invalid_penalty = config.invalid_penalty
        if not config.processes:  # with processes, the first one makes this check
            self.make().close()

    def tasks(self, split: str, seed: int) -> Tasks:
        if split == "warmup":
            raise UserError(
                "model.path = 'quickstart': gymnasium has no oracle to imitate; "
                "use an instruct model"
            )
        return seeds(split, seed)

    def make(self) -> "GymnasiumEnv":
        return GymnasiumEnv(self.config)

    def fingerprint(self) -> str:
        return f"gymnasium {self.config.id} {self.config.kwargs}"


class GymnasiumEnv(Conversation):
    """One episode at a time.

    The actions of a Discrete space are named by `get_action_meanings()`, or by their numbers if the
    environment lacks this method.
    """

    def __init__(self, config: GymnasiumConfig) -> None:
        self.config = config
        gymnasium = needed("gymnasium", "env.name = 'gymnasium'", "gymnasium")
        self._env = _make(gymnasium, config)
        self._space: Any = self._env.action_space
        """The space of the actions."""
        self._number_of_action = _check_spaces(gymnasium, self._env, config)
        """Name of an action -> its number; empty if actions are text."""
        self._return = 0.0

    def begin(self, task: Task) -> list[Message]:
        self._return = 0.0
        observation, _ = self._env.reset(seed=task.payload["seed"])
        return opening(self.config.instruction, observation)

    def say(self, text: str) -> Outcome:
        is_choice = bool(self._number_of_action)
        action = self._number_of_action.get(text) if is_choice else text
        if action is None or not self._space.contains(action):
            problem = f"it is not in {self._space}"
            if is_choice:
                problem = f"it must be one of {', '.join(self._number_of_action)}"
            return invalid(problem, text)

        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._return += reward
        return Outcome(
            observation,
            reward=float(reward),
            done=bool(terminated or truncated),
            won=bool(terminated) and self._return >= self.config.reward,
            action=text,
        )

    def admissible_actions(self) -> list[str]:
        return [*self._number_of_action]

    def close(self) -> None:
        self._env.close()


def _make(gymnasium: Any, config: GymnasiumConfig) -> Any:
    """Make the gymnasium.Env. Raises UserError if it cannot be made."""
    env_id = config.id
    if config.module.endswith(".py"):
        plugins.import_file(config.module, f"env.module = '{config.module}'")
    elif config.module:
        env_id = f"{config.module}:{config.id}"
    options: dict[str, Any] = dict(config.kwargs)
    try:
        return gymnasium.make(env_id, **options)
    except Exception as error:
        raise UserError(f"env.id = '{config.id}': it cannot be made: {describe(error)}") from None


def _check_spaces(gymnasium: Any, env: Any, config: GymnasiumConfig) -> dict[str, int]:
    """Return {name of an action: its number} for a Discrete space, and {} if actions are text.

    Raises UserError for other spaces.
    """
    observations = env.observation_space
    actions = env.action_space
    numbers = range(0)
    if isinstance(actions, gymnasium.spaces.Discrete):
        numbers = range(int(actions.start), int(actions.start + actions.n))
    has_actions = bool(numbers) or isinstance(actions, gymnasium.spaces.Text)
    if not has_actions or not isinstance(observations, gymnasium.spaces.Text):
        raise UserError(
            f"env.id = '{config.id}': observations are {clean(observations, 60)}, actions are "
            f"{clean(actions, 60)}; wrap it: observations must be Text, actions Text or Discrete"
        )

    names = [str(number) for number in numbers]
    meanings = getattr(env.unwrapped, "get_action_meanings", None)
    if meanings and numbers:
        names = meanings()
    return dict(zip(names, numbers, strict=True))
