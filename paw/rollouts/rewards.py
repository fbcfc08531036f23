"""Rewards that replace the environment's own: [reward] or [[rewards]].

One of several environments may have its own, [[envs.rewards]].
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paw.config import plugins
from paw.config.sections import Config, RewardConfig, RewardEntry
from paw.errors import UserError, others_code
from paw.rollouts.episode import bind
from paw.rollouts.guard import MAX_REWARD, number
from paw.types import Trajectory


class Reward(NamedTuple):
    """One reward of an episode."""

    label: str
    """Its name in metrics; "" if it is the only reward."""
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

    Returns [] if the environment's own rewards are used unchanged.
    """
    if config.rewards:
        return _load_all(config.rewards)
    origin = f"reward.type = '{config.reward.type}'"
    function = _load(config.reward, origin)
    return [] if function is None else [Reward("", 1.0, origin, function)]


def load_own_rewards(config: Config) -> dict[str, list[Reward]]:
    """Return the rewards of each environment with its own, [[envs.rewards]], by its label.

    The labels of these rewards begin with that of the environment.
    """
    return {label: _load_all(entries, env=label) for label, entries in config.own_rewards.items()}


def _load_all(entries: Sequence[RewardEntry], env: str = "") -> list[Reward]:
    """Return the rewards of a list, of all environments or of one."""
    rewards: list[Reward] = []
    for entry in entries:
        key = f"envs.{env}.rewards.{entry.label}" if env else f"rewards.{entry.label}"
        origin = f"{key}.type = '{entry.section.type}'"
        try:
            function = _load(entry.section, origin)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
        label = f"{env}/{entry.label}" if env else entry.label
        rewards.append(Reward(label, entry.weight, origin, function))
    return rewards


def _load(section: RewardConfig, origin: str) -> Callable[[Trajectory], Any] | None:
    if section.type == "env":
        return None
    reward = plugins.load("rewards", section.type)
    with others_code(origin):
        return bind(reward, section)
