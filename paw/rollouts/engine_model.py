"""The model in an engine, as the agent of one episode sees it."""

from typing import Any, Protocol

from paw.config.sections import Config
from paw.errors import EnvironmentFailure
from paw.rollouts.continuation import (
    Continuation,
    Prompt,
    add_result,
    continue_after,
    ids_up_to_end,
    prompt_after_response,
    record_observation,
)
from paw.rollouts.engines.base import Completion, Engine
from paw.rollouts.episode import EnvHandle, Episode, Model, Response, Stop
from paw.rollouts.text.chat import Chat, Context, ContextFull, context_text
from paw.rollouts.text.marks import conversation, stands_for
from paw.rollouts.text.stops import StopStrings, text_before
from paw.types import Turn, as_ids, as_values


class Sampler(Protocol):
    """Plays the episode and passes the requests of all episodes to the engine (`Rollouts`)."""

    config: Config
    chat: Chat
    engine: Engine

    async def sample(
        self, episode: Episode, prompt_ids: list[int], seed: int, stopped: StopStrings | None
    ) -> Completion: ...


class EngineModel(Model):
    """The model in the engine of `sampler`, for one episode.

    A prompt that continues an earlier turn begins with that turn's own ids. So an answer stays as
    the model wrote it, even if the template would drop parts of it (Qwen3 drops thoughts) or render
    it differently. A conversation that does not continue the last one is rendered in full. This is
    the case for the first one, and after the environment has rewritten an answer.
    """

    def __init__(self, env: EnvHandle, sampler: Sampler) -> None:
        super().__init__(env, sampler.config)
        self._sampler = sampler
        self._chat = sampler.chat
        self._messages: list[dict[str, Any]] = []
        """The last conversation without the model's answer; [] if the last context was a text."""
        self._call_count = 0
        """Number of tool calls so far."""

    async def _answer(
        self, turn: Turn, context: Context, continues: Response | None, stop: Stop, seed: int
    ) -> str:
        continuation = self._continuation(context) if continues is None else None
        if continuation is not None:
            self._record_observation(continuation)
        prompt = self._prompt(context, continues, continuation)
        turn.prompt_ids = as_ids(prompt.ids)
        stop_strings = StopStrings(self._chat, stop) if stop else None
        completion = await self._sampler.sample(self.episode, prompt.ids, seed, stop_strings)
        self._count_tokens(turn, completion)

        length = len(completion.token_ids)
        stop_string = ""
        if stop_strings:
            length, stop_string = stop_strings.first(completion.token_ids)
        self._fill_tokens(turn, completion, length)

        tools = self.env.tools
        turn.response = prompt.opened + self._chat.decode(
            completion.token_ids[:length], calls=bool(tools)
        )
        if tools:
            answer = text_before(turn.response, stop_string)
            self.reply = self._chat.reply(answer, tools, self._call_count)
            self._call_count += len(self.reply.calls)
        self._messages = [] if isinstance(context, str) else context
        return stop_string

    def on_end(self) -> None:
        """If the last answer called tools, record how a prompt would show their results."""
        if self.reply is None:
            return
        if self.reply.calls or self.reply.problem:
            add_result(self._chat, self._last_turn, self.reply, self.config.wm.max_tokens)

    # --- prompts
    # ---------------------------------------------------------------------------------------------

    def _prompt(
        self, context: Context, continues: Response | None, continuation: Continuation | None
    ) -> Prompt:
        """Return the prompt of the next turn.

        It follows the response that it `continues`, or the last turn and its `continuation`, or it
        is rendered in full. A single message is cut to rollout.max_prompt_tokens. For anything else
        that is too long, raises ContextFull, or EnvironmentFailure if it is the first prompt of a
        conversation.
        """
        limit = self.config.rollout.max_prompt_tokens
        if continues is None and isinstance(context, str) and not self.env.tools:
            ids, cut = self._chat.fit_prompt(context, limit)
            if cut > 0:
                self.episode.stats.prompts_truncated += 1
            return Prompt(ids, self._chat.opened)

        if continues is not None:
            prompt = prompt_after_response(self._chat, continues.turn, context_text(context))
        elif continuation is not None:
            ids = ids_up_to_end(self._chat, self._last_turn) + continuation.ids
            prompt = Prompt(ids, self._chat.opened)
        else:
            ids = self._chat.conversation_ids(conversation(context), self.env.tools)
            prompt = Prompt(ids, self._chat.opened)
            is_first_turn = not self.episode.trajectory.turns
            if len(ids) > limit and is_first_turn:
                raise EnvironmentFailure(
                    f"rollout.max_prompt_tokens = {limit}, the first prompt has {len(ids)}; "
                    "raise it: conversations are not cut"
                )
        if len(prompt.ids) > limit:
            raise ContextFull(f"rollout.max_prompt_tokens = {limit}")
        return prompt

    def _continuation(self, context: Context) -> Continuation | None:
        """Return what follows the last turn, or None if the conversation does not continue it."""
        messages = conversation(context)
        if not self._continues_last(messages):
            return None
        answer_position = len(self._messages)
        answer = messages[answer_position]
        if self.reply is not None:
            answer = self.reply.message()
        return continue_after(self._chat, answer, messages[answer_position + 1 :])

    def _record_observation(self, continuation: Continuation) -> None:
        """Record in the last turn how the next prompt shows the turn's observation."""
        record_observation(
            self._chat, self._last_turn, continuation, limit=self.config.wm.max_tokens
        )

    def _continues_last(self, messages: list[dict[str, Any]]) -> bool:
        """Whether these are the last conversation's messages, the model's answer, then others."""
        length = len(self._messages)
        if not 0 < length < len(messages) - 1 or messages[:length] != self._messages:
            return False
        answer = self.reply.message() if self.reply is not None else None
        return stands_for(messages[length], self._last_turn.response, answer)

    @property
    def _last_turn(self) -> Turn:
        return self.episode.trajectory.turns[-1]

    # --- completions
    # ---------------------------------------------------------------------------------------------

    def _count_tokens(self, turn: Turn, completion: Completion) -> None:
        stats = self.episode.stats
        stats.prompt_tokens += len(turn.prompt_ids)
        stats.response_tokens += len(completion.token_ids)
        stats.cached_tokens += completion.cached_tokens

    def _fill_tokens(self, turn: Turn, completion: Completion, length: int) -> None:
        """Put the first `length` tokens of a completion, and their data, into the turn."""
        turn.response_ids = as_ids(completion.token_ids[:length])
        turn.sampled_logp = as_values(completion.logp[:length])
        if completion.entropy is not None:
            turn.entropy = as_values(completion.entropy[:length])
        turn.server = completion.server

        missing_end = self._chat.missing_end(turn.response_ids)
        if missing_end:
            turn.separator_ids = as_ids(missing_end + self._chat.separator_ids)

        turn.version = self._sampler.engine.version
        if completion.versions:
            versions = completion.versions[:length]
            turn.version = min(versions)
            turn.versions = as_ids(versions) if len(set(versions)) > 1 else None
