"""Messages between the trainer and the process that plays ahead: one JSON object a line, checked by pydantic.

Never pickles: exceptions and outcomes of a user's own classes need not survive one, and a pickle
can run code. Token ids and log-probs travel as packed arrays, so that they are small and arrive bit
for bit.
"""

import hashlib
import socket
import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from multiprocessing.connection import wait
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic_core import to_json

from paw.errors import LINE_CHARS, UserError, clean
from paw.rollouts.base import RolloutResult
from paw.rollouts.exchange import set_tasks, turns_of
from paw.types import Task, Turn

CHUNK = 1 << 20
"""Bytes read at once."""
IDS = ("prompt_ids", "response_ids", "versions", "observation_ids", "separator_ids")
"""Integers of a turn that are packed."""
VALUES = ("sampled_logp", "entropy")
"""Floats of a turn that are packed."""


class Message(BaseModel):
    model_config = ConfigDict(
        ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants"
    )


class PackedRows(Message):
    """Lists of numbers: int32 ("i") or float64 ("d"). A list may be None."""

    lengths: bytes
    """Of each list, as int32; -1 for None."""
    numbers: bytes

    @classmethod
    def pack(cls, rows: Sequence[Sequence[float] | None], typecode: Literal["i", "d"]) -> Self:
        numbers = array(typecode)
        for row in rows:
            numbers.extend(row or ())
        lengths = array("i", (-1 if row is None else len(row) for row in rows))
        return cls(lengths=lengths.tobytes(), numbers=numbers.tobytes())

    def unpack(self, typecode: Literal["i", "d"]) -> list[list[Any] | None]:
        lengths = array("i", self.lengths)
        numbers = array(typecode, self.numbers)
        bounds = accumulate((max(0, length) for length in lengths), initial=0)
        rows: list[list[Any] | None] = []
        for length, (start, end) in zip(lengths, pairwise(bounds), strict=True):
            rows.append(None if length < 0 else numbers[start:end].tolist())
        return rows


# --- from the trainer
# ------------------------------------------------------------------------------------------------


class Start(Message):
    """The first message: what the process needs to play."""

    kind: Literal["start"] = "start"
    config: str
    """The configuration as JSON."""
    model: str
    """Folder of the tokenizer."""
    positions: int
    rank: int
    world_size: int
    urls: list[str]
    served_model: str
    """Name by which the servers have the adapters; "" without LoRA."""
    end_ids: list[int]
    vocabulary: int
    """Tokens of the model: ids that servers send are below it."""
    entropy: bool
    timeout_s: float


class WeightsExpected(Message):
    kind: Literal["weights expected"] = "weights expected"
    version: int


class WeightsArrived(Message):
    kind: Literal["weights arrived"] = "weights arrived"
    version: int
    faults: dict[str, str]


class PlayUpdate(Message):
    kind: Literal["play"] = "play"
    step: int
    count: int
    """Tasks of the update."""


FromTrainer = Annotated[
    Start | WeightsExpected | WeightsArrived | PlayUpdate, Field(discriminator="kind")
]


# --- from the process that plays ahead
# -------------------------------------------------------------------------------


class Alive(Message):
    """Sent every second."""

    kind: Literal["alive"] = "alive"


class Ready(Message):
    """The environment and the tokenizer are loaded."""

    kind: Literal["ready"] = "ready"


class EpisodesEnded(Message):
    kind: Literal["progress"] = "progress"
    done: int
    total: int


class UpdateFailed(Message):
    """A UserError, whatever its class: its text and exit code."""

    kind: Literal["failed"] = "failed"
    step: int | None
    """None: the process cannot play at all."""
    text: str
    exit_code: int

    @classmethod
    def of(cls, step: int | None, error: UserError) -> Self:
        code = error.exit_code if isinstance(error.exit_code, int) else UserError.exit_code
        return cls(step=step, text=clean(error, LINE_CHARS), exit_code=code)

    def error(self) -> UserError:
        error = UserError(self.text)
        error.exit_code = self.exit_code
        return error


class UpdatePlayed(Message):
    """The episodes of an update."""

    kind: Literal["played"] = "played"
    step: int
    tasks: str
    """Digest of the ids of its tasks."""
    rest: RolloutResult
    """All but the packed numbers of its turns. Tasks are named by their place in the update."""
    ids: PackedRows
    values: PackedRows

    @classmethod
    def pack(cls, step: int, played: RolloutResult, tasks: Sequence[Task]) -> Self:
        """Takes `played` apart."""
        turns = turns_of(played)
        ids = PackedRows.pack([getattr(turn, name) for turn in turns for name in IDS], "i")
        values = PackedRows.pack([getattr(turn, name) for turn in turns for name in VALUES], "d")
        for turn in turns:
            _set_numbers(turn, IDS, [[], [], None, None, None])
            _set_numbers(turn, VALUES, [[], None])
        set_tasks(played, {task.id: Task(str(place)) for place, task in enumerate(tasks)})
        return cls(step=step, tasks=digest(tasks), rest=played, ids=ids, values=values)

    def unpack(self, tasks: Sequence[Task]) -> RolloutResult:
        """The episodes, of these tasks. Raises UserError if they were played of others."""
        if self.tasks != digest(tasks):
            raise UserError(
                f"update {self.step + 1}: the process that plays ahead has other tasks than the trainer; an environment"
                " must list the same tasks whenever it is loaded, or be played without: --rollout.ahead 0"
            )
        ids = iter(self.ids.unpack("i"))
        values = iter(self.values.unpack("d"))
        for turn in turns_of(self.rest):
            _set_numbers(turn, IDS, [next(ids) for _ in IDS])
            _set_numbers(turn, VALUES, [next(values) for _ in VALUES])
        set_tasks(self.rest, {str(place): task for place, task in enumerate(tasks)})
        return self.rest


FromPlayer = Annotated[
    Alive | Ready | EpisodesEnded | UpdatePlayed | UpdateFailed, Field(discriminator="kind")
]


def digest(tasks: Sequence[Task]) -> str:
    ids = "\0".join(task.id for task in tasks)
    return hashlib.sha256(ids.encode("utf-8", "surrogatepass")).hexdigest()


def _set_numbers(turn: Turn, names: Sequence[str], values: Sequence[Any]) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(turn, name, value)


class Channel:
    """One end of a socket; `incoming` is the type of the messages that it receives."""

    def __init__(self, connected: socket.socket, incoming: Any) -> None:
        self._socket = connected
        self._incoming = TypeAdapter(incoming)
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, message: Message) -> None:
        """From any thread. Raises OSError if the other end is closed."""
        line = to_json(message, bytes_mode="base64", inf_nan_mode="constants")
        with self._sending:
            self._socket.sendall(line)
            self._socket.sendall(b"\n")

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message; None if no byte arrives for `timeout_s` seconds.

        Raises EOFError or OSError at the end, and pydantic's ValidationError for what is no
        message.
        """
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if not wait([self._socket], timeout_s):
                return None
            chunk = self._socket.recv(CHUNK)
            if not chunk:
                raise EOFError
            self._received += chunk
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return self._incoming.validate_json(line)

    def end(self) -> None:
        """Tell both ends that no more messages come, even if a forked process holds the socket too."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
