"""What an episode is worth, if not the environment's own reward: [reward] or [[rewards]]."""

from collections.abc import Callable
from typing import Any, NamedTuple

from paw.config import plugins
from paw.config.sections import Config, RewardConfig
from paw.errors import UserError, others_code
from paw.rollouts.episode import bind
from paw.rollouts.guard import MAX_REWARD, number
from paw.types import Trajectory


class Reward(NamedTuple):
    """One reward of an episode."""

    label: str
    """Its name in metrics; "" if it is the only one."""
    weight: float
    origin: str
    """The key that names it, for messages."""
    function: Callable[[Trajectory], Any] | None
    """None stands for the environment's own return."""

    @property
    def limits_itself(self) -> bool:
        """Whether it has its own time limits, so env.step_timeout_s does not apply."""
        return getattr(self.function, "limits_itself", False)

    def value(self, trajectory: Trajectory) -> float:
        """Return the reward without its weight. Raises EnvironmentFailure unless it is a number."""
        if self.function is None:
            return trajectory.episode_return
        return number(self.origin, self.function(trajectory), -MAX_REWARD, MAX_REWARD)


def load_rewards(config: Config) -> list[Reward]:
    """Return the rewards that [reward] or [[rewards]] name, with their settings.

    Returns none if the environment's own rewards count as they are.
    """
    if not config.rewards:
        origin = f"reward.type = '{config.reward.type}'"
        function = _load(config.reward, origin)
        return [] if function is None else [Reward("", 1.0, origin, function)]

    rewards: list[Reward] = []
    for entry in config.rewards:
        origin = f"rewards.{entry.label}.type = '{entry.section.type}'"
        try:
            function = _load(entry.section, origin)
        except UserError as error:
            raise UserError(f"[[rewards]] {entry.label}: {error}") from error
        rewards.append(Reward(entry.label, entry.weight, origin, function))
    return rewards


def _load(section: RewardConfig, origin: str) -> Callable[[Trajectory], Any] | None:
    if section.type == "env":
        return None
    reward = plugins.load("rewards", section.type)
    with others_code(origin):
        return bind(reward, section)
