"""How a model plays without training: an agent drives one `Episode`, from its environment's start to its end.

| agent.kind | what the model sees |
|---|---|
| plain | the environment's own prompt, one message a turn, as in training and `paw eval` |
| react | a transcript of thoughts, actions and observations after examples (`react`, arXiv 2210.03629) |
| reflexion | the same again after a failure, with the plans made from it (`reflexion`, arXiv 2303.11366) |
| search-r1 | one answer that searches as it is written (`search_r1`, arXiv 2503.09516) |
| zerosearch | that, with a second LLM as the search engine (`zerosearch`, arXiv 2505.04588) |
"""

from collections.abc import Sequence
from typing import Any, Protocol

from paw.agents.models import ChatModel, Reply
from paw.config import Config
from paw.errors import UserError
from paw.experience.envs.base import Suite
from paw.experience.rollout import derive_seed
from paw.types import Outcome, Task


class Episode:
    """One task in play: the environment, the model, and the record of both.

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

    def step(self, response: str) -> Outcome:
        """Play what the environment makes of `response`."""
        self.outcome = outcome = self.environment.step(response)
        turn = {"trial": self.trials, "response": response, "action": outcome.action, "valid": outcome.valid}
        self.turns.append({**turn, "observation": outcome.observation, "reward": outcome.reward})
        return outcome


class Agent(Protocol):
    def play(self, episode: Episode) -> None:
        """Play the episode to its end."""
        ...


class Plain:
    def play(self, episode: Episode) -> None:
        episode.reset()
        while not episode.done:
            episode.step(episode.say(episode.environment.prompt()).text)


def make_agent(config: Config, suite: Suite) -> Agent:
    """The agent that agent.kind names. UserError where the environment is none it can play."""
    kind = config.agent.kind
    if kind == "plain":
        return Plain()
    raise UserError(f"agent.kind = '{kind}' is not there yet")
