"""Expert play. An environment's oracle plays its games, and its turns become training rows."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from paw.config.sections import Config, EnvConfig
from paw.envs.base import EnvFactory, admissible_responses, train_tasks
from paw.envs.several import parts_of
from paw.errors import OURS, EnvironmentFailure, NoOracleError, UserError, describe, quietly
from paw.rollouts.continuation import add_result
from paw.rollouts.guard import CheckedEnv, make_threads
from paw.rollouts.text.chat import Chat, Context
from paw.rollouts.text.marks import conversation
from paw.types import Ids, Outcome, Reply, Sample, Task, Turn, as_ids, no_values

MAX_FAILED = 100
"""Maximum games in a row that may fail before their first turn. One more ends expert play."""


class Demonstration(NamedTuple):
    """One turn of expert play."""

    prompt: Context
    choices: list[str]
    """All admissible responses."""
    response: str
    observation: str
    """The environment's answer."""
    tools: list[dict[str, Any]]


def demonstrations(
    factory: EnvFactory,
    env: EnvConfig,
    *,
    seed: int,
    random_actions: float,
    stray_actions: float = 0.0,
    split: str = "warmup",
) -> Iterator[Demonstration]:
    """Yield turns of an expert that plays the games of a split endlessly, of all environments.

    `random_actions` and `stray_actions` are the shares of turns whose action is not the expert's. A
    random action is any admissible one. A stray action was admissible in the turn before and often
    no longer has an effect. A game whose environment fails is abandoned. Raises
    UserError if too many games in a row fail, or if the environment has no expert.
    """
    rng = random.Random(seed)
    players: dict[str, _ExpertPlayer] = {}
    for label, env_part in parts_of(factory, env).items():
        players[label] = _ExpertPlayer(
            env_part.factory, env_part.config, rng, random_actions, stray_actions
        )
    failed_in_a_row = 0
    for task in _tasks_without_end(factory, seed=seed, split=split):
        player = players[task.env]
        has_ended = False
        previous_choices: list[str] | None = None
        while not has_ended:
            try:
                turn, has_ended = player.play_turn(task.own, previous_choices)
            except OURS:
                raise
            except NoOracleError as error:
                raise UserError(
                    f"env.name = '{player.env.name}': {error}, "
                    "so there is no expert play to learn from"
                ) from None
            except BaseException as error:
                failed_in_a_row += 1
                player.drop_environment()
                if failed_in_a_row > MAX_FAILED:
                    raise UserError(
                        f"expert play: {failed_in_a_row} games in a row failed ({describe(error)})"
                    ) from None
                break

            yield turn
            previous_choices = turn.choices
            failed_in_a_row = 0


def _tasks_without_end(factory: EnvFactory, *, seed: int, split: str) -> Iterator[Task]:
    for batch in itertools.count():
        yield from train_tasks(factory, batch, 64, seed, split=split)


class _ExpertPlayer:
    """Plays turns with an expert's actions, and with shares of random and of stray ones."""

    def __init__(
        self,
        factory: EnvFactory,
        env: EnvConfig,
        rng: random.Random,
        random_actions: float,
        stray_actions: float,
    ) -> None:
        self.factory = factory
        self.env = env
        self.rng = rng
        self.random_actions = random_actions
        self.stray_actions = stray_actions
        self.threads = make_threads(factory, env)
        self.environment: CheckedEnv | None = None

    def play_turn(
        self, task: Task, previous_choices: list[str] | None
    ) -> tuple[Demonstration, bool]:
        """Return (the next turn, whether the game is over after it).

        `previous_choices` are the choices of the turn before. None starts the game.
        """
        call = self.threads.call
        if self.environment is None:
            self.environment = CheckedEnv(call(self.factory.make), self.env)
        environment = self.environment
        if previous_choices is None:
            call(environment.reset, task)
        prompt = call(environment.context)
        choices = call(admissible_responses, environment)
        if previous_choices and self.rng.random() < self.stray_actions:
            response = self.rng.choice(previous_choices)
        elif choices and self.rng.random() < self.random_actions:
            response = self.rng.choice(choices)
        else:
            response = call(environment.oracle)
        outcome = call(environment.step, response)
        turn = Demonstration(prompt, choices, response, outcome.observation, environment.tools)
        return turn, outcome.done

    def drop_environment(self) -> None:
        """Close the environment. The next turn is played in another one."""
        # If a call hangs, closing would hang too.
        if self.environment and not self.threads.given_up:
            with quietly():
                self.threads.call(self.environment.close)
        self.environment = None


def example(
    chat: Chat,
    config: Config,
    prompt: Context,
    response: str,
    observation: str = "",
    tools: Sequence[Any] = (),
) -> Sample:
    """Return a turn to learn from, as token ids.

    The observation is cut to wm.max_tokens. A prompt that is one user message is cut to
    rollout.max_prompt_tokens. Raises UserError if the chat template rejects the conversation.
    """
    try:
        if isinstance(prompt, str) and not tools:
            prompt_ids, _ = chat.fit_prompt(prompt, config.rollout.max_prompt_tokens)
        else:
            prompt_ids = chat.conversation_ids(conversation(prompt), list(tools))
        outcome = Outcome(observation, 0.0, done=False, won=False)
        turn = Turn(
            prompt_ids=as_ids(prompt_ids),
            response_ids=as_ids(chat.response_ids(response)),
            sampled_logp=no_values(),
            entropy=None,
            prompt="",
            response=response,
            outcome=outcome,
            anchor="",
            version=0,
        )
        if isinstance(response, Reply) and response.calls:
            add_result(chat, turn, response, config.wm.max_tokens)
    except EnvironmentFailure as error:
        raise UserError(str(error)) from None
    return Sample(
        group=0,
        trajectory=0,
        step=0,
        prompt_ids=turn.prompt_ids,
        response_ids=turn.response_ids,
        separator_ids=separator_ids(turn, chat),
        observation_ids=as_ids(chat.observation_ids(turn.observation, config.wm.max_tokens)),
    )


def separator_ids(turn: Turn, chat: Chat) -> Ids:
    """Return the tokens between a turn's response and observation, else the chat template's."""
    return as_ids(chat.separator_ids) if turn.separator_ids is None else turn.separator_ids
