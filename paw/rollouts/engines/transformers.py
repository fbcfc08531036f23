"""Generation on the trainer's own weights: no second copy, no weight transfer, nothing to install.

`step` answers everything queued: prompts sorted by length, right-padded (causal attention never
looks right, so prefill needs no mask), the head applied to last positions only, then one token a
row with a KV cache whose finished rows leave. Token t of a request is drawn by inverting the
distribution function at a uniform number that is a pure function of (seed, t), so tokens do not
depend on the batch, but for rounding.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from paw.errors import UserError, describe
from paw.model.attention import token_mixers
from paw.model.check import EXACT, LENGTHS, own_logp, sliding_window, typical
from paw.model.logits import LogitTransform
from paw.model.precision import running_in
from paw.model.ranks import out_of_memory
from paw.rollouts.engines.base import Completion, Engine, Request


class TransformersEngine(Engine):
    """Samples from `model`, a Hugging Face causal LM: the trainer's, or with `own_weights` a copy that `sync` fills.

    `max_batch_tokens` bounds the padded prompt tokens of one prefill; within `in_dtype()`
    parameters have the dtype of the trainer's forward passes. Raises UserError for attention other
    than full (sliding windows, soft caps); a window of all layers may be as wide as the `longest`
    prompt with its response. Layers that mix tokens by recurrence or convolution would read
    padding: prompts of a batch are of one length then.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_ids: Collection[int],
        max_batch_tokens: int = 65536,
        in_dtype: Callable[[], AbstractContextManager[Any]] = nullcontext,
        own_weights: bool = False,
        longest: float = math.inf,
    ):
        super().__init__(getattr(model.config, "max_position_embeddings", None))
        self._mixes = bool(token_mixers(model))
        config: Any = model.config.get_text_config()
        kinds = {kind for kind in getattr(config, "layer_types", None) or [] if "attention" in kind}
        kinds -= {"full_attention", *(["linear_attention"] if self._mixes else [])}
        kinds |= {"sliding_attention"} if (sliding_window(config) or math.inf) < longest else set()
        kinds |= (
            {"soft-capped attention"} if getattr(config, "attn_logit_softcapping", None) else set()
        )
        if kinds:
            raise UserError(
                f"engine.type = 'transformers' samples from full-attention models only; '{config.model_type}' has"
                f" {', '.join(sorted(kinds))} layers: use --engine.type vllm"
            )
        self._model, self._end_ids, self._max_batch_tokens = (
            model,
            frozenset(end_ids),
            max_batch_tokens,
        )
        self._transform = LogitTransform.of(model.config)
        self._in_dtype, self._own_weights = in_dtype, own_weights

    def step(self) -> list[Completion]:
        """Everything queued, in the order of submission."""
        queued, self._requests = list(self._requests.values()), {}
        done: dict[int, Completion] = {}
        with _generation_mode(self._model), self._in_dtype():
            for batch in _batches(queued, self._max_batch_tokens, even=self._mixes):
                done.update((completion.key, completion) for completion in self._generate(batch))
        return [done[request.key] for request in queued]

    def sync(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().sync(parameters, version)
        if self._own_weights:
            own = dict(self._model.named_parameters(remove_duplicate=False))
            with torch.no_grad():
                for name, tensor in parameters:
                    own[name].copy_(tensor)

    def _generate(self, batch: list[Request]) -> list[Completion]:
        decoder: Any = self._model.get_decoder()
        head: Any = self._model.get_output_embeddings()
        device = head.weight.device
        columns: list[tuple[list[Any], ...]] = [([], [], []) for _ in batch]
        live = list(
            range(len(batch))
        )  # what the rows of the tensors below are, finished ones until they leave
        finished: set[int] = set()
        seeds = np.array([request.seed & (2**64 - 1) for request in batch], dtype=np.uint64)
        temperature_B = torch.tensor([request.temperature for request in batch], device=device)
        ids_BL = pad_sequence(
            [torch.tensor(request.prompt_ids) for request in batch], batch_first=True
        ).to(device)
        length_B = torch.tensor([len(request.prompt_ids) for request in batch], device=device)
        longest = max(request.max_tokens for request in batch)
        cache: Any = None
        if longest > 1:
            cache = _EvenCache(config=self._model.config) if self._mixes else _RowCache()
        hidden_BLD = decoder(
            input_ids=ids_BL, past_key_values=cache, use_cache=cache is not None
        ).last_hidden_state
        hidden_BD = hidden_BLD[torch.arange(len(batch), device=device), length_B - 1]
        del hidden_BLD

        for t in range(longest):
            uniform_B = torch.from_numpy(uniforms(seeds[live], t)).to(device)
            drawn = sample(self._transform(head(hidden_BD)), temperature_B, uniform_B)
            for row, *values in zip(live, *(x_B.tolist() for x_B in drawn), strict=True):
                if row in finished:
                    continue
                for column, value in zip(columns[row], values, strict=True):
                    column.append(value)
                tokens, request = columns[row][0], batch[row]
                ended = tokens[-1] in self._end_ids or len(tokens) == request.max_tokens
                if ended or (request.stopped and request.stopped(tokens)):
                    finished.add(row)
            if len(finished) == len(batch) or cache is None:
                break
            keep, token_B = [n for n, row in enumerate(live) if row not in finished], drawn[0]
            if len(keep) <= 0.75 * len(
                live
            ):  # dropping rows copies the cache, about the price of one decoding step
                keep_B = torch.tensor(keep, device=device)
                live = [live[n] for n in keep]
                temperature_B, length_B, token_B = (
                    temperature_B[keep_B],
                    length_B[keep_B],
                    token_B[keep_B],
                )
                cache.keep(keep_B)
            cache.write_at(length_B + t, max(len(batch[row].prompt_ids) for row in live) + t + 1)
            hidden_BD = decoder(
                input_ids=token_B[:, None],
                position_ids=(length_B + t)[:, None],
                attention_mask=cache.mask(),
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, 0]
        return [
            Completion(r.key, ids, logp, entropy)
            for r, (ids, logp, entropy) in zip(batch, columns, strict=True)
        ]


class _RowCache(Cache):
    """Keys and values [B, heads, slots, head size] of right-padded rows: position p of a row sits
    in slot p, so the first token that a row generates overwrites its first pad slot."""

    def __init__(self):
        super().__init__(layers=[])
        self._layers: list[list[Tensor]] = []
        self._slot_B: Tensor | None = None
        self._width = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ):
        if self._slot_B is None:
            self._layers.append([key_states, value_states])
            return key_states, value_states
        row_B = torch.arange(len(key_states), device=key_states.device)
        for whole, new in zip(self._layers[layer_idx], (key_states, value_states), strict=True):
            whole[row_B, :, self._slot_B] = new[:, :, 0]
        key, value = self._layers[layer_idx]
        return key[:, :, : self._width], value[:, :, : self._width]

    def write_at(self, slot_B: Tensor, width: int) -> None:
        """The next `update` writes to these slots, all of them below `width`."""
        self._slot_B, self._width = slot_B, width
        slots = self._layers[0][0].shape[2]
        if width > slots:
            pad = (0, 0, 0, max(16, width // 4) + width - slots)
            self._change(lambda x: torch.nn.functional.pad(x, pad))

    def mask(self) -> Tensor:
        """[B, 1, 1, width] bool: the slots a row's current token may look at, its own included."""
        assert self._slot_B is not None
        return (torch.arange(self._width, device=self._slot_B.device) <= self._slot_B[:, None])[
            :, None, None
        ]

    def keep(self, rows: Tensor) -> None:
        self._change(lambda x: x.index_select(0, rows))

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        self._layers = [[function(x) for x in layer] for layer in self._layers]


class _EvenCache(DynamicCache):
    """The cache of transformers for every kind of layer; rows of one length need no masks."""

    def write_at(self, slot_B: Tensor, width: int) -> None: ...

    def mask(self) -> None: ...

    def keep(self, rows: Tensor) -> None:
        self.reorder_cache(rows)  # type: ignore[arg-type]


def sample(
    logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(token, log-probability, entropy in nats), each [B]: inverse CDF at `uniform_B` in [0, 1).

    Temperature 0 takes the most likely token; log-probability and entropy are those of temperature
    1 then.
    """
    greedy_B = temperature_B == 0
    logp_BV = (logits_BV.float() / torch.where(greedy_B, 1.0, temperature_B)[:, None]).log_softmax(
        -1
    )
    p_BV = logp_BV.exp()
    cdf_BV = p_BV.double().cumsum(-1)
    token_B1 = torch.searchsorted(cdf_BV, uniform_B[:, None] * cdf_BV[:, -1:], right=True)
    token_B1 = token_B1.clamp_(
        max=logits_BV.shape[-1] - 1
    )  # beyond the end only where the logits are not finite
    token_B1 = torch.where(greedy_B[:, None], logits_BV.argmax(-1, keepdim=True), token_B1)
    return token_B1[:, 0], logp_BV.gather(-1, token_B1)[:, 0], torch.special.entr(p_BV).sum(-1)


def uniforms(seeds: np.ndarray, position: int) -> np.ndarray:
    """float64 in [0, 1), one for each uint64 seed: a counter-based generator (SplitMix64's finaliser, Steele 2014)."""
    golden = 0x9E3779B97F4A7C15
    key = _mix(seeds + np.uint64(golden))
    return (_mix(key + np.uint64((position + 1) * golden % 2**64)) >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _batches(
    requests: list[Request], max_tokens: int, *, even: bool = False
) -> Iterator[list[Request]]:
    """Requests of similar prompt length (`even`: the same), at most `max_tokens` padded tokens or one request."""
    batch: list[Request] = []
    for request in sorted(requests, key=lambda request: len(request.prompt_ids)):
        n = len(request.prompt_ids)
        if batch and (
            (len(batch) + 1) * n > max_tokens or (even and n != len(batch[0].prompt_ids))
        ):
            yield batch
            batch = []
        batch.append(request)
    if batch:
        yield batch


@contextmanager
def _generation_mode(model: PreTrainedModel) -> Iterator[None]:
    """No gradients, no dropout, an attention that takes masks. In no_grad and not inference_mode
    what a module caches (rotary tables, FSDP's gathered parameters) remains usable by the backward
    pass."""
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    model.config._attn_implementation = "sdpa"
    try:
        with torch.no_grad():
            yield
    finally:
        model.config._attn_implementation = attention
        model.train(training)


def check_sampling(lm: PreTrainedModel) -> float:
    """The largest difference, in float32, of log-probs that the transformers engine samples with,
    prompts of two lengths in a batch. UserError where they are not the model's own."""
    vocabulary, prompts, found = lm.config.get_text_config().vocab_size, {}, []
    refused = f"engine.type = 'transformers' cannot sample from model type '{lm.config.model_type}'"
    engine = TransformersEngine(lm, end_ids=[], longest=max(LENGTHS) + 4)
    for key, length in enumerate(LENGTHS):
        prompts[key] = torch.randint(
            vocabulary, (length,), generator=torch.Generator().manual_seed(key)
        ).tolist()
        engine.submit(Request(key, prompts[key], seed=key, temperature=1.0, max_tokens=4))
    with running_in(torch.float32, lm):
        try:
            sampled = engine.step()
        except Exception as error:  # of its cache, which raises whatever it meets first
            if out_of_memory(error):
                raise
            raise UserError(f"{refused}: {describe(error)}; use --engine.type vllm") from error
        for done in sampled:
            row = torch.tensor(prompts[done.key] + done.token_ids, device=lm.device)
            found.append(
                (own_logp(lm, row)[-len(done.logp) :].cpu() - torch.tensor(done.logp)).abs()
            )
    difference = torch.cat(found)
    largest = float(difference.max())
    if not typical(difference, lm) <= EXACT:
        raise UserError(
            f"{refused}: log-probs are off by {largest:.2g} nats from the model's own, beyond rounding ({EXACT:g}); "
            "use --engine.type vllm"
        )
    return largest
