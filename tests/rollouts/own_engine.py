"""A user's own engines, for test_engine_plugin.py: one that works, and several that do not."""

import copy

import torch

from paw.config import Section
from paw.rollouts.engines.base import Completion, Engine, EnginePlan
from paw.rollouts.engines.transformers import TransformersEngine


class Slow(Engine):
    """Samples from a copy of the model, one response after another, without a KV cache."""

    class Config(Section):
        at_once: int = 4
        """Number of responses per step."""

    gives_entropy = True

    def __init__(self, parts):
        super().__init__(parts.context)
        self.at_once = parts.config.engine.at_once
        self.end_ids = parts.end_ids
        self.model = copy.deepcopy(parts.policy.lm).requires_grad_(False)
        self.model.set_attn_implementation("sdpa")

    def sync(self, parameters, version):
        super().sync(parameters, version)
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in parameters:
            weights[name].copy_(tensor)

    @torch.no_grad()
    def step(self):
        keys = list(self.requests)[: self.at_once]
        return [self.answer(self.requests.pop(key)) for key in keys]

    def answer(self, request):
        generator = torch.Generator().manual_seed(request.seed % 2**63)
        tokens = []
        logps = []
        entropy = []
        while len(tokens) < request.max_tokens and not self.ended(tokens, request):
            input_ids = torch.tensor([request.prompt_ids + tokens])
            logits = self.model(input_ids).logits[0, -1].float()
            log_probabilities = (logits / (request.temperature or 1.0)).log_softmax(-1)
            token = int(torch.multinomial(log_probabilities.exp(), 1, generator=generator))
            tokens.append(token if request.temperature else int(logits.argmax()))
            logps.append(float(log_probabilities[tokens[-1]]))
            entropy.append(float(torch.special.entr(log_probabilities.exp()).sum()))
        return Completion(request.key, tokens, logps, entropy)

    def ended(self, tokens, request):
        stopped = request.stopped and request.stopped(tokens)
        return bool(tokens) and (tokens[-1] in self.end_ids or stopped)


class Small(Slow):
    """Declares its needs: two engines, each with its own GPU."""

    shares_card = False

    @classmethod
    def plan(cls, run):
        return EnginePlan(engines=2, own_card=(run.weight_bytes, 2**30), cache_tokens=1000)


class Silent(Slow):
    gives_entropy = False


class Able(Slow):
    has_pool = True
    takes_adapters = True


class Remote(Slow):
    """A service on other machines."""

    shares_card = False

    @classmethod
    def plan(cls, run):
        return EnginePlan(engines=1, decodes=False)


class Watched(TransformersEngine):
    pass


class Speaks(Slow):
    def __init__(self, parts):
        super().__init__(parts)
        self.chat = parts.chat


class FailsAtTheStart(Slow):
    @classmethod
    def start(cls, config, model_path, **options):
        raise OSError("no such service")


class FailsAtAStep(Slow):
    def step(self):
        return 1 / 0


class FailsAtASync(Slow):
    def sync(self, parameters, version):
        raise KeyError("no such weight")


class Exits(Slow):
    def submit(self, request):
        raise SystemExit(3)


class Sparse(Slow):
    def sleep(self):
        for _ in self.at_once:
            pass


class Unfinished(Engine):
    pass


class Hasty(Slow):
    def __init__(self, parts):
        self.model = parts.policy.lm


class Broken(Slow):
    def __init__(self, parts):
        raise ValueError(f"no room for {parts.context} tokens")


class Elsewhere(Slow):
    @classmethod
    def make(cls, parts):
        return "an engine"


nothing = 5
