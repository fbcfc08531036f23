"""Small generated households and a random quickstart model for their text. Real parts, made in
milliseconds."""

import copy
import functools
import random

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from paw.config.sections import WarmupConfig
from paw.envs.alfworld.factory import AlfworldFactory
from paw.envs.base import admissible_responses, warmup_tasks
from paw.envs.settings import AlfworldConfig
from paw.rollouts.engines.base import Completion
from paw.rollouts.engines.transformers import TransformersEngine
from paw.rollouts.text.chat import Chat
from paw.tools.warmup import quickstart

ENV = AlfworldConfig(
    difficulty="tiny", style="compact", history=3, max_turns=5, reward=1.0, invalid_penalty=0.1
)
MODEL = WarmupConfig(hidden_size=32, layers=2, intermediate_size=48, initializer_range=0.2)


def make_factory(**changes):
    return AlfworldFactory(ENV.model_copy(update=changes))


@functools.cache
def corpus(game_count=100):
    """(prompts, actions, observations) of expert play mixed with random actions."""
    factory = make_factory()
    rng = random.Random(0)
    environment = factory.make()
    prompts = []
    actions = set()
    observations = []
    for task in warmup_tasks(factory, 0, game_count, 0):
        environment.reset(task)
        is_over = False
        while not is_over:
            choices = admissible_responses(environment)
            prompts.append(environment.context())
            actions.update(choices)
            action = rng.choice(choices) if rng.random() < 0.3 else environment.oracle()
            outcome = environment.step(action)
            observations.append(outcome.observation)
            is_over = outcome.done
    return prompts, actions, observations


@functools.cache
def make_tokenizer():
    return quickstart.build_tokenizer(*corpus())


def make_model(seed=0):
    return quickstart.build_model(make_tokenizer(), MODEL.model_copy(update={"seed": seed}))


def make_chat():
    return Chat(make_tokenizer())


@functools.cache
def _practised(steps=20):
    model = make_model()
    chat = make_chat()
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        inputs = []
        labels = []
        for prompt in rng.choices(corpus()[0], k=32):
            head = chat.prompt_ids(prompt)
            _, _, actions = prompt.partition("\ncan:\n")
            answer = chat.response_ids("\n" + rng.choice(actions.splitlines()))
            inputs.append(torch.tensor(head + answer))
            labels.append(torch.tensor([-100] * len(head) + answer))
        input_ids = pad_sequence(inputs, True, 0)
        targets = pad_sequence(labels, True, -100)
        logits = model(input_ids=input_ids).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def practised_model():
    """A model that has seen some admissible actions. About half of its actions are valid."""
    return copy.deepcopy(_practised())


def make_engine(model=None, **options):
    return TransformersEngine(model or practised_model(), end_ids=make_chat().end_ids, **options)


class Scripted:
    """An engine whose model responds with `answer(prompt)`."""

    version = 0
    continuous = True

    def __init__(self, chat, answer):
        self.chat = chat
        self.answer = answer
        self.queue = []

    def submit(self, request):
        self.queue.append(request)

    @property
    def pending(self):
        return len(self.queue)

    def step(self):
        completions = []
        for request in self.queue:
            prompt = self.chat.decode(request.prompt_ids)
            ids = self.chat.response_ids(self.answer(prompt))
            completions.append(Completion(request.key, ids, [-1.0] * len(ids), entropy=None))
        self.queue = []
        return completions
