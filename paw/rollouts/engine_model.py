"""The model in an engine, as the agent of one episode sees it."""

from dataclasses import dataclass
from typing import Any, Protocol

from paw.config.sections import Config
from paw.rollouts.continuation import (
    Continuation,
    Prompt,
    add_result,
    continue_after,
    ids_up_to_end,
    prompt_after_response,
    record_observation,
    shows_results,
)
from paw.rollouts.engines.base import Completion, Engine
from paw.rollouts.episode import EnvHandle, Episode, Model, Response, Stop, Tools
from paw.rollouts.text.chat import (
    Chat,
    Context,
    ContextFull,
    FirstPromptTooLong,
    context_text,
)
from paw.rollouts.text.marks import conversation, stands_for
from paw.rollouts.text.stops import StopStrings, text_before
from paw.types import Reply, Turn, as_ids, as_values

CONVERSATIONS = 16
"""Number of conversations of an episode that can be continued. An older one is rendered in full."""


class Sampler(Protocol):
    """Plays the episode and passes the requests of all episodes to the engine (`Rollouts`)."""

    config: Config
    chat: Chat
    engine: Engine

    async def sample(
        self,
        episode: Episode,
        prompt_ids: list[int],
        seed: int,
        stopped: StopStrings | None,
        max_tokens: int,
    ) -> Completion: ...


@dataclass(frozen=True)
class AnsweredConversation:
    """A conversation up to the model's last answer to it."""

    messages: list[dict[str, Any]]
    """Without that answer."""
    tools: Tools
    turn: Turn
    reply: Reply | None
    """The answer with its tool calls, if there are tools."""

    def is_continued_by(self, messages: list[dict[str, Any]], tools: Tools) -> bool:
        """Whether `messages` are those of this conversation, the model's answer, then others."""
        length = len(self.messages)
        if not length < len(messages) - 1 or tools != self.tools:
            return False
        if messages[:length] != self.messages:
            return False
        answer = self.reply.message() if self.reply is not None else None
        return stands_for(messages[length], self.turn.response, answer)


class EngineModel(Model):
    """The model in the engine of `sampler`, for one episode.

    A prompt that continues an earlier turn begins with that turn's own ids. So an answer stays as
    the model wrote it, even if the template would drop parts of it (Qwen3 drops thoughts) or render
    it differently. There may be several conversations at a time. A conversation that continues none
    of them is rendered in full: the first one, or one whose answer has been rewritten.
    """

    def __init__(self, env: EnvHandle, sampler: Sampler) -> None:
        super().__init__(env, sampler.config)
        self._sampler = sampler
        self._chat = sampler.chat
        self._conversations: list[AnsweredConversation] = []
        """The conversations that may be continued, the latest last."""
        self._conversations_before: list[AnsweredConversation] = []
        """The value of `_conversations` before the last answer."""
        self._call_count = 0
        """Number of tool calls so far."""

    async def _answer(
        self, turn: Turn, context: Context, continues: Response | None, stop: Stop, seed: int
    ) -> str:
        conversation_before = None
        continuation = None
        if continues is None:
            conversation_before = self._continued(context)
        if conversation_before is not None:
            continuation = self._continuation(conversation_before, context)
            self._record_observation(conversation_before, continuation)
        prompt = self._prompt(context, continues, conversation_before, continuation)
        turn.prompt_ids = as_ids(prompt.ids)
        stop_strings = StopStrings(self._chat, stop) if stop else None
        completion = await self._sampler.sample(
            self.episode, prompt.ids, seed, stop_strings, self.max_tokens
        )
        self._count_tokens(turn, completion)

        length = len(completion.token_ids)
        stop_string = ""
        if stop_strings:
            length, stop_string = stop_strings.first(completion.token_ids)
        self._fill_tokens(turn, completion, length)
        last_tokens = completion.token_ids[-1:]
        has_ended = bool(stop_string) or not self._chat.end_ids.isdisjoint(last_tokens)
        self.cut = length >= self.max_tokens and not has_ended

        turn.response = prompt.opened + self._chat.decode(
            completion.token_ids[:length], calls=bool(self.tools)
        )
        self.reply = None
        if self.tools:
            answer = text_before(turn.response, stop_string)
            self.reply = self._chat.reply(answer, self.tools, self._call_count)
            self._call_count += len(self.reply.calls)
        self._remember(context, turn, conversation_before)
        return stop_string

    def take_back(self) -> None:
        super().take_back()
        self._conversations = self._conversations_before

    def token_texts(self, turn: Turn) -> list[str]:
        return [self._chat.raw_text([token]) for token in turn.response_ids.tolist()]

    def _remember(
        self, context: Context, turn: Turn, continued: AnsweredConversation | None
    ) -> None:
        """Replace the conversation that was `continued` with what it has become."""
        self._conversations_before = self._conversations
        others = [kept for kept in self._conversations if kept is not continued]
        if isinstance(context, str):
            self._conversations = others
            return
        answered = AnsweredConversation(context, self.tools, turn, self.reply)
        self._conversations = [*others, answered][-CONVERSATIONS:]

    def on_end(self) -> None:
        """If the last answer called tools, record how a prompt would show their results."""
        if self.reply is None:
            return
        if self.reply.calls or self.reply.problem:
            add_result(self._chat, self._last_turn, self.reply, self.config.wm.max_tokens)

    # --- prompts
    # ---------------------------------------------------------------------------------------------

    def _prompt(
        self,
        context: Context,
        continues: Response | None,
        conversation_before: AnsweredConversation | None,
        continuation: Continuation | None,
    ) -> Prompt:
        """Return the prompt of the next turn.

        It follows the response that it `continues`, or a conversation and its `continuation`, or it
        is rendered in full. A single message is cut to rollout.max_prompt_tokens. For anything else
        that is too long, raises ContextFull, or FirstPromptTooLong if it is the episode's first
        prompt.
        """
        limit = self.config.rollout.max_prompt_tokens
        if continues is None and isinstance(context, str) and not self.tools:
            prompt_ids, cut = self._chat.fit_prompt(context, limit)
            if cut > 0:
                self.episode.stats.prompts_truncated += 1
            return Prompt(prompt_ids, self._chat.opened)

        if continues is not None:
            prompt = prompt_after_response(self._chat, continues.turn, context_text(context))
        elif conversation_before is not None and continuation is not None:
            prompt_ids = ids_up_to_end(self._chat, conversation_before.turn) + continuation.ids
            prompt = Prompt(prompt_ids, self._chat.opened)
        else:
            prompt_ids = self._chat.conversation_ids(conversation(context), self.tools)
            prompt = Prompt(prompt_ids, self._chat.opened)
            is_first_turn = not self.episode.trajectory.turns
            if len(prompt_ids) > limit and is_first_turn:
                raise FirstPromptTooLong(
                    f"rollout.max_prompt_tokens = {limit}, the first prompt has {len(prompt_ids)}; "
                    "raise it: conversations are not cut"
                )
        if len(prompt.ids) > limit:
            raise ContextFull(f"rollout.max_prompt_tokens = {limit}")
        return prompt

    def _continued(self, context: Context) -> AnsweredConversation | None:
        """Return the latest conversation that this context continues."""
        messages = conversation(context)
        for answered in reversed(self._conversations):
            if answered.is_continued_by(messages, self.tools):
                return answered
        return None

    def _continuation(self, answered: AnsweredConversation, context: Context) -> Continuation:
        """Return what follows the last turn of a conversation that this context continues."""
        messages = conversation(context)
        answer_position = len(answered.messages)
        answer = messages[answer_position]
        if answered.reply is not None:
            answer = answered.reply.message()
        return continue_after(self._chat, answer, messages[answer_position + 1 :])

    def _record_observation(
        self, answered: AnsweredConversation, continuation: Continuation
    ) -> None:
        """Record in the answer's turn how the next prompt shows the turn's observation.

        If another conversation came in between, the environment may have answered there instead.
        """
        turn = answered.turn
        if turn is self._last_turn or shows_results(turn, continuation):
            record_observation(self._chat, turn, continuation, limit=self.config.wm.max_tokens)

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
