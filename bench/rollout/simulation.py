"""Simulated environments of realistic lengths, and an engine that gives every request its own length.

Prompts have 200 to 400 tokens, of which a group shares the first 160. Responses are log-normal
around 55 tokens, from 10 to 200. Episodes have 5 to 50 turns, and a third of them reach the limit.
Everything is determined by the seeds and the responses.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

from paw.rollouts.engines.base import Completion, Engine, Request
from paw.rollouts.episode import derive_seed
from paw.rollouts.text.chat import Chat
from paw.types import Outcome, Task

TASK_TOKENS = 160
"""Tokens of a task. All prompts of its group begin with them."""
HISTORY_TOKENS = 60
"""How many tokens of a past response a prompt repeats at most."""
MAX_PROMPT = 448
MAX_RESPONSE = 200
MAX_TURNS = 50
TEMPLATE = "<user> {% for m in messages %}{{ m['content'] }} <assistant> {% endfor %}"


def qwen2(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int
) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=hidden < 3584,
        initializer_range=2.5 * hidden**-0.5,  # random weights whose samples depend on the prompt
    )


SHAPES = {
    "quickstart": qwen2(64, 160, 3, 2, 2, 1024),
    "2.6m": qwen2(256, 512, 4, 4, 2, 1024),
    "qwen2.5-1.5b": qwen2(1536, 8960, 28, 12, 2, 151936),
    "qwen2.5-7b": qwen2(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": qwen2(5120, 13824, 48, 40, 8, 152064),
}


def make_chat(vocabulary_size: int) -> Chat:
    """A chat with one token per word, so that texts have exactly the intended number of tokens."""
    vocabulary = {"<user>": 0, "<assistant>": 1, "<end>": 2}
    for token_id in range(3, vocabulary_size):
        vocabulary[f"w{token_id}"] = token_id
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=TEMPLATE,
        eos_token="<end>",
        unk_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    return Chat(tokenizer)


class SimulatedFactory:
    """Environments of random words. The n-th one made plays episodes of the n-th length that `seed`
    draws."""

    name = "simulated"
    reward_max = 1.0
    invalid_penalty = 0.0
    runs_others_code = True

    def __init__(
        self, words: int, *, seed: int = 0, env_ms: float = 0.0, max_turns: int = MAX_TURNS
    ):
        self.words = words
        self.seed = seed
        self.seconds = env_ms / 1e3
        self.max_turns = max_turns
        self.may_block = env_ms > 0
        self.made: list[SimulatedEnvironment] = []

    def tasks(self, count: int) -> list[Task]:
        return [Task(f"task {i}", "simulated", self.text(TASK_TOKENS, 1, i)) for i in range(count)]

    def text(self, length: int, *place: int) -> str:
        """Random words, always the same for the same place."""
        numbers = self.random(*place).integers(3, self.words, length)
        return " ".join(f"w{number}" for number in numbers)

    def random(self, *place: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *place])

    def make(self) -> "SimulatedEnvironment":
        environment = SimulatedEnvironment(self, number=len(self.made))
        self.made.append(environment)
        return environment


class SimulatedEnvironment:
    """Shows the task, the last two responses and an observation of 40 to 120 words."""

    def __init__(self, factory: SimulatedFactory, number: int):
        self.factory = factory
        self.number = number
        rng = factory.random(2, number)
        turns = MAX_TURNS
        if rng.random() >= 0.35:
            turns = int(np.clip(5 + rng.gamma(2.2, 6), 5, MAX_TURNS))
        self.turns = min(turns, factory.max_turns)
        self.observation_lengths = rng.integers(40, 121, MAX_TURNS + 1).tolist()

    def reset(self, task: Task) -> str:
        self.task = task
        self.responses: list[str] = []
        return task.payload

    @property
    def done(self) -> bool:
        return len(self.responses) == self.turns

    def context(self) -> str:
        past = [" ".join(response.split()[:HISTORY_TOKENS]) for response in self.responses[-2:]]
        return " ".join([self.task.payload, *past, self.anchor()])

    def anchor(self) -> str:
        turn = len(self.responses)
        return self.factory.text(self.observation_lengths[turn], 3, self.number, turn)

    def step(self, response: str) -> Outcome:
        time.sleep(self.factory.seconds)
        self.responses.append(response)
        return Outcome("", 0.0, self.done, False, response)


class Meter(Engine):
    """An engine that gives every request its own length, around `median` tokens, and records its
    batches.

    In `lock_step`, each step works until no request is left, so that episodes wait for each other's
    turn. If `everybody` has the environments of such a play, each step also samples a response for
    those whose episodes are over and throws it away, as the reference code does.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        everybody: Sequence[SimulatedEnvironment] = (),
        *,
        lock_step: bool = False,
        median: float = 55,
    ):
        self.engine = engine
        self.chat = chat
        self.everybody = everybody
        self.median = median
        self.continuous = not lock_step
        self.batches: list[int] = []
        """Number of requests in the batch of every engine step."""
        self.generated = 0
        """Tokens of all responses, including those thrown away."""

    def submit(self, request: Request) -> None:
        rng = np.random.default_rng(request.seed)
        length = self.median * rng.lognormal(0, 0.65)
        max_tokens = int(np.clip(length, self.median / 5.5, MAX_RESPONSE))
        self.generated += max_tokens
        self.engine.submit(replace(request, max_tokens=max_tokens))

    def step(self) -> list[Completion]:
        for environment in self.everybody:
            if environment.done:
                self._submit_for_finished(environment)

        completions: list[Completion] = []
        while self.engine.pending:
            self.batches.append(self.engine.pending)
            completions += self.engine.step()
            if self.continuous:
                break
        return [completion for completion in completions if completion.key >= 0]

    def _submit_for_finished(self, environment: SimulatedEnvironment) -> None:
        """Submit another turn of a finished episode. Its negative key marks it for discarding."""
        request = Request(
            key=-1 - environment.number,
            prompt_ids=self.chat.prompt_ids(environment.context()),
            seed=derive_seed("finished", environment.number, len(self.batches)),
            temperature=1.0,
            max_tokens=MAX_RESPONSE,
        )
        self.submit(request)
