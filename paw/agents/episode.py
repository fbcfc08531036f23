"""One task in play by an agent: its environment, its model, and the record of both."""

from collections.abc import Sequence
from typing import Any

from paw.agents.models import ChatModel, Reply
from paw.config import Config
from paw.rollout.scheduler import derive_seed
from paw.types import Outcome, Task


class Episode:
    """What an agent asks and plays through. `environment` is a Playable, for the plain agent any Env.

    Call n of an episode draws with the seed that turn n of `paw eval` draws with.
    """

    def __init__(self, task: Task, environment: Any, model: ChatModel, config: Config, place: int) -> None:
        self.task, self.environment, self.model, self.config, self.place = task, environment, model, config, place
        self.turns: list[dict[str, Any]] = []
        """trial, response, action, observation, reward, valid of every turn of every trial."""
        self.calls = self.prompt_tokens = self.completion_tokens = self.trials = 0
        self.plans: list[str] = []
        self.outcome: Outcome | None = None
        """Of the last turn of this trial."""

    @property
    def done(self) -> bool:
        return self.outcome is not None and self.outcome.done

    @property
    def won(self) -> bool:
        return self.outcome is not None and self.outcome.won

    def reset(self) -> str:
        """Begin a trial; returns the first observation."""
        self.trials += 1
        self.outcome = None
        return self.environment.reset(self.task)

    def say(self, prompt: str, *, start: str = "", stop: Sequence[str] = ()) -> Reply:
        """The model's answer to the user message `prompt`, or the rest of one that begins with `start`."""
        config = self.config
        seed = derive_seed(config.eval.seed, "eval", self.place, 0, self.calls)
        reply = self.model.complete(
            prompt,
            start=start,
            stop=stop,
            temperature=config.eval.temperature,
            max_tokens=config.rollout.max_response_tokens,
            seed=seed,
        )
        self.calls += 1
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        return reply

    def step(self, response: str, *, said: str | None = None) -> Outcome:
        """Play what the environment makes of `response`; `said` is what the model wrote, if that is something else."""
        self.outcome = outcome = self.environment.step(response)
        turn = {"trial": self.trials, "response": response if said is None else said, "action": outcome.action}
        turn |= {"valid": outcome.valid, "observation": outcome.observation, "reward": outcome.reward}
        self.turns.append(turn)
        return outcome
