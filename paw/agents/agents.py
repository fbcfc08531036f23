"""How a model plays without training: an agent drives one `Episode`, from its environment's start to its end.

| agent.kind | what the model sees |
|---|---|
| plain | the environment's own prompt, one message a turn, as in training and `paw eval` |
| react | a transcript of thoughts, actions and observations after examples (`react`, arXiv 2210.03629) |
| reflexion | the same again after a failure, with the plans made from it (`reflexion`, arXiv 2303.11366) |
| search-r1 | one answer that searches as it is written (`search_r1`, arXiv 2503.09516) |
| zerosearch | that, with a second LLM as the search engine (`zerosearch`, arXiv 2505.04588) |
"""

from typing import Protocol

from paw.agents.episode import Episode
from paw.agents.react import React
from paw.agents.reflexion import Reflexion
from paw.agents.search_r1 import SearchR1
from paw.config import Config
from paw.envs.base import EnvFactory
from paw.errors import UserError


class Agent(Protocol):
    def play(self, episode: Episode) -> None:
        """Play the episode to its end."""
        ...


class Plain:
    def play(self, episode: Episode) -> None:
        episode.reset()
        while not episode.done:
            episode.step(episode.say(episode.environment.context()).text)


def make_agent(config: Config, factory: EnvFactory) -> Agent:
    """The agent that agent.kind names. UserError where it cannot play this environment."""
    kind, name = config.agent.kind, config.env.name
    if kind == "plain":
        return Plain()
    environment = factory.make()
    environment.close()
    if not hasattr(environment, "task"):
        what = f"{type(environment).__name__}.task (see Playable in paw/envs/base.py)"
        raise UserError(f"agent.kind = '{kind}' needs {what} of env.name = '{name}'; --agent plain does not")
    if kind in ("search-r1", "zerosearch"):
        if name != "search":
            raise UserError(f"agent.kind = '{kind}' answers questions: it plays env.name = 'search', not '{name}'")
        return SearchR1()
    return React(config) if kind == "react" else Reflexion(config)
