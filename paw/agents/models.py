"""What agents talk to: a chat model, one prompt in and one answer out, from many threads at once.

`Local` is a Hugging Face model behind a rollout engine, `paw.agents.endpoint.Endpoint` an OpenAI-compatible server.
"""

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from paw.rollout.chat import Chat
from paw.rollout.engines.base import Completion, Engine, Request

GATHER_S = 0.01
"""An engine that takes no request while it runs waits so long after the last one for others to join the batch."""


class ContextFull(Exception):
    """The prompt does not fit the model's context. The episode is over, and lost: a second try would end the same."""


@dataclass(frozen=True)
class Reply:
    text: str
    """Up to a stop string, which is not part of it."""
    prompt_tokens: int
    completion_tokens: int
    """As sampled or billed, what a stop string cut off included."""
    cut: bool
    """Whether it ended at max_tokens."""


class ChatModel(Protocol):
    """Thread-safe."""

    def complete(
        self, prompt: str, *, start: str = "", stop: Sequence[str] = (), temperature: float, max_tokens: int, seed: int
    ) -> Reply:
        """Answer the one user message `prompt`; with `start`, go on with an answer that begins so.

        Raises:
            ContextFull: prompt and `start` leave no room for an answer.
        """
        ...

    def close(self) -> None: ...


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of the stop strings, and whether there was one.

    >>> cut_at("go on<end> or <stop>", ["<stop>", "<end>"])
    ('go on', True)
    """
    ends = [place for word in stop if (place := text.find(word)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


class Local:
    """A model behind one of our engines, whose weights are in place: agents' threads submit, one thread steps it.

    Stop strings are cut from the finished text, since engines know tokens only. A prompt longer than
    `max_prompt_tokens` loses its first tokens (`truncated` counts those), one with a `start` is ContextFull.
    """

    def __init__(self, engine: Engine, chat: Chat, *, max_prompt_tokens: int) -> None:
        self.engine, self.chat, self.max_prompt_tokens = engine, chat, max_prompt_tokens
        self.truncated = 0
        self._gather_s = 0.0 if engine.continuous else GATHER_S
        self._keys = itertools.count()
        self._arrived: SimpleQueue[tuple[Request, Future[Completion]] | None] = SimpleQueue()
        self._waiting: dict[int, Future[Completion]] = {}
        self._closed, self._lock = False, threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def complete(
        self, prompt: str, *, start: str = "", stop: Sequence[str] = (), temperature: float, max_tokens: int, seed: int
    ) -> Reply:
        if start:
            begun = self.chat.observation_ids(self.chat.sampled(start), self.max_prompt_tokens)
            ids = self.chat.prompt_ids(prompt) + begun
            if len(ids) > self.max_prompt_tokens:
                raise ContextFull(f"rollout.max_prompt_tokens = {self.max_prompt_tokens}")
        else:
            ids, cut = self.chat.fit_prompt(prompt, self.max_prompt_tokens)
            self.truncated += cut > 0
        future: Future[Completion] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            self._arrived.put((Request(next(self._keys), ids, seed, temperature, max_tokens), future))
        tokens = future.result().token_ids
        text, stopped = cut_at(self.chat.decode(tokens) if start else self.chat.answer(tokens), stop)
        cut = len(tokens) == max_tokens and tokens[-1] not in self.chat.end_ids
        return Reply(text, len(ids), len(tokens), cut and not stopped)

    def close(self) -> None:
        """Stop after the engine's current step; requests under way fail with RuntimeError. The engine stays open."""
        with self._lock:
            self._closed = True
            self._arrived.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while self._take():
            try:
                for completion in self.engine.step():
                    self._waiting.pop(completion.key).set_result(completion)
            except Exception as error:
                self._fail(error)
        self._fail(RuntimeError("closed"))

    def _fail(self, error: Exception) -> None:
        for future in self._waiting.values():
            future.set_exception(error)
        self._waiting.clear()

    def _take(self) -> bool:
        """Hand the engine what has arrived; wait for that while it has nothing to do. False when closed."""
        while True:
            try:
                arrived = self._arrived.get(timeout=self._gather_s if self.engine.pending else None)
            except Empty:
                return True
            if arrived is None:
                return False
            request, future = arrived
            try:
                self.engine.submit(request)
                self._waiting[request.key] = future
            except Exception as error:
                future.set_exception(error)
