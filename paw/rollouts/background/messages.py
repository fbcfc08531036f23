"""Messages between the trainer and the process that plays ahead.

Each message is one JSON object on a line, checked by pydantic. Pickles are not used, because
exceptions and outcomes of a user's own classes may not survive pickling, and a pickle can run code.
Token ids and log-probs travel as packed arrays, so they are small and arrive bit for bit.
"""

import hashlib
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic_core import to_json

from paw.errors import LINE_CHARS, UserError, clean, describe
from paw.rollouts.base import RolloutResult
from paw.rollouts.exchange import set_tasks, turns_of
from paw.types import Task, Turn, no_ids, no_values

CHUNK = 1 << 20
"""Bytes per read."""
REQUIRED = {"prompt_ids": no_ids, "response_ids": no_ids, "sampled_logp": no_values}
"""Array fields of a turn that are never None, with a function that makes an empty array."""


class Message(BaseModel):
    model_config = ConfigDict(
        ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants"
    )


class PackedRows(Message):
    """Arrays of numbers, concatenated. An array may be None."""

    lengths: bytes
    """The length of each array, as int32; -1 for None."""
    numbers: bytes

    @classmethod
    def pack(cls, rows: Sequence[np.ndarray | None], dtype: type[np.number]) -> Self:
        numbers = [np.empty(0, dtype)]
        lengths: list[int] = []
        for row in rows:
            lengths.append(-1 if row is None else len(row))
            if row is not None:
                numbers.append(row)
        return cls(
            lengths=np.array(lengths, np.int32).tobytes(),
            numbers=np.concatenate(numbers, dtype=dtype).tobytes(),
        )

    def unpack(self, dtype: type[np.number]) -> list[np.ndarray | None]:
        """Return the arrays, which are views of one array."""
        numbers = np.frombuffer(bytearray(self.numbers), dtype)
        unpacked_rows: list[np.ndarray | None] = []
        row_start = 0
        for length in np.frombuffer(self.lengths, np.int32).tolist():
            if length < 0:
                unpacked_rows.append(None)
                continue
            unpacked_rows.append(numbers[row_start : row_start + length])
            row_start += length
        return unpacked_rows


# --- from the trainer
# ------------------------------------------------------------------------------------------------


class Start(Message):
    """The first message, with everything the process needs to play."""

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
    """Name of the adapters on the servers; "" without LoRA."""
    end_ids: list[int]
    vocabulary: int
    """Size of the model's vocabulary. Ids that servers send are below it."""
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
    """The text and exit code of a UserError of any class."""

    kind: Literal["failed"] = "failed"
    step: int | None
    """None: the process cannot play at all."""
    text: str
    exit_code: int

    @classmethod
    def of(cls, step: int | None, error: UserError) -> Self:
        exit_code = error.exit_code if isinstance(error.exit_code, int) else UserError.exit_code
        return cls(step=step, text=clean(error, LINE_CHARS), exit_code=exit_code)

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
    """Everything except the packed numbers of turns. A task is given by its index in the update."""
    ids: PackedRows
    values: PackedRows

    @classmethod
    def pack(cls, step: int, result: RolloutResult, tasks: Sequence[Task]) -> Self:
        """Make the message for these episodes. Takes `result` apart."""
        token_ids: list[np.ndarray | None] = []
        values: list[np.ndarray | None] = []
        for turn in turns_of(result):
            token_ids += _take_fields(turn, Turn.IDS)
            values += _take_fields(turn, Turn.VALUES)
        set_tasks(result, {task.id: Task(str(task_index)) for task_index, task in enumerate(tasks)})
        return cls(
            step=step,
            tasks=digest(tasks),
            rest=result,
            ids=PackedRows.pack(token_ids, np.int32),
            values=PackedRows.pack(values, np.float64),
        )

    def unpack(self, tasks: Sequence[Task]) -> RolloutResult:
        """Return the episodes of these tasks. Raises UserError if other tasks were played."""
        if self.tasks != digest(tasks):
            raise UserError(
                f"update {self.step + 1}: "
                "the process that plays ahead has different tasks from the trainer; "
                "an environment must list the same tasks whenever it is loaded; "
                "if it cannot, use --rollout.ahead 0"
            )
        token_ids = iter(self.ids.unpack(np.int32))
        values = iter(self.values.unpack(np.float64))
        for turn in turns_of(self.rest):
            for name in Turn.IDS:
                setattr(turn, name, next(token_ids))
            for name in Turn.VALUES:
                setattr(turn, name, next(values))
        set_tasks(self.rest, {str(task_index): task for task_index, task in enumerate(tasks)})
        return self.rest


FromPlayer = Annotated[
    Alive | Ready | EpisodesEnded | UpdatePlayed | UpdateFailed, Field(discriminator="kind")
]


def digest(tasks: Sequence[Task]) -> str:
    task_ids = "\0".join(task.id for task in tasks)
    return hashlib.sha256(task_ids.encode("utf-8", "surrogatepass")).hexdigest()


def _take_fields(turn: Turn, names: Sequence[str]) -> list[np.ndarray | None]:
    """Take the arrays of some fields out of a turn, leaving them empty."""
    arrays: list[np.ndarray | None] = []
    for name in names:
        arrays.append(getattr(turn, name))
        setattr(turn, name, REQUIRED[name]() if name in REQUIRED else None)
    return arrays


class ChannelClosed(ConnectionError):
    """The other end of a channel is closed."""


class Channel:
    """One end of a socket. `incoming` is the type of messages it receives."""

    def __init__(self, connected: socket.socket, incoming: Any) -> None:
        self._socket = connected
        self._incoming = TypeAdapter(incoming)
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, message: Message) -> None:
        """May be called from any thread. Raises ChannelClosed if the other end is closed."""
        line = to_json(message, bytes_mode="base64", inf_nan_mode="constants")
        try:
            with self._sending:
                self._socket.sendall(line)
                self._socket.sendall(b"\n")
        except OSError as error:
            raise ChannelClosed(describe(error)) from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; None if no byte arrives for `timeout_s` seconds.

        Raises EOFError or OSError at the end, and pydantic's ValidationError for a line that is not
        a message.
        """
        searched = 0
        while True:
            line_end = self._received.find(b"\n", searched)
            if line_end >= 0:
                break
            searched = len(self._received)
            if not wait([self._socket], timeout_s):
                return None
            chunk = self._socket.recv(CHUNK)
            if not chunk:
                raise EOFError
            self._received += chunk
        line = bytes(self._received[:line_end])
        del self._received[: line_end + 1]
        return self._incoming.validate_json(line)

    def end(self) -> None:
        """End the connection for both ends, even if a forked process holds the socket too."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
