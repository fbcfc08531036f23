"""Generation on the trainer's own weights, with no second copy, no transfer and nothing to install.

Prompts are sorted by length and padded on the right. Causal attention never looks to the right, so
prefill needs no mask. The head is applied only to last positions. Then each row gets one token per
step. Finished rows are removed from the KV cache.

Token t of a request is drawn by inverting the distribution function at a uniform number. That
number is a pure function of (seed, t), so tokens do not depend on the batch, except through
rounding.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from paw.distributed.ranks import out_of_memory
from paw.errors import UserError, describe
from paw.model.attention import token_mixers
from paw.model.check import EXACT, LENGTHS, own_logp, sliding_window, typical_difference
from paw.model.logits import LogitTransform
from paw.model.policy import Policy
from paw.model.precision import parameters_as, running_in
from paw.rollouts.engines.base import Completion, Request

TRIAL_TOKENS = 4
"""Length of a response in `check_sampling`, in tokens."""


def model_for_sampling(
    policy: Policy, *, own_weights: bool
) -> tuple[PreTrainedModel, Callable[[], AbstractContextManager[Any]]]:
    """Return (the policy's model or with `own_weights` a copy, what makes its parameters' dtype
    that of the trainer's forward passes)."""
    model: Any = policy.lm
    if own_weights:
        model = copy.deepcopy(model).requires_grad_(False)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(policy.device, policy.dtype)
        model = model.to(policy.device)  # its buffers
    return model, lambda: parameters_as(policy.dtype, model.modules())


class Generator:
    """Answers requests with `model`, a Hugging Face causal LM.

    `max_batch_tokens` bounds the padded prompt tokens of one prefill. Within `in_dtype()`
    parameters have the dtype of the trainer's forward passes.

    Raises UserError, which begins with `origin`, for any attention that is not full (sliding
    windows, soft caps). A window is allowed if all layers have it and it is as wide as the
    `longest` prompt with its response. Layers that mix tokens by recurrence or convolution would
    read padding, so for them all prompts of a batch have the same length.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_ids: Collection[int],
        max_batch_tokens: int = 65536,
        in_dtype: Callable[[], AbstractContextManager[Any]] = nullcontext,
        longest: float = math.inf,
        origin: str,
    ) -> None:
        self._model = model
        self._end_ids = frozenset(end_ids)
        self._max_batch_tokens = max_batch_tokens
        self._in_dtype = in_dtype
        self._mixes_tokens = bool(token_mixers(model))
        self._transform = LogitTransform.of(model.config)

        partial_kinds = _partial_attention(model, longest=longest, mixes_tokens=self._mixes_tokens)
        if partial_kinds:
            model_type = model.config.get_text_config().model_type
            raise UserError(
                f"{origin} samples from full-attention models only;"
                f" '{model_type}' has {', '.join(sorted(partial_kinds))} layers:"
                " use --engine.type vllm"
            )

    def answer(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the response to each request, in the same order."""
        completions: dict[int, Completion] = {}
        with _generation_mode(self._model), self._in_dtype():
            for batch in _batches(requests, self._max_batch_tokens, same_length=self._mixes_tokens):
                for completion in self._generate(batch):
                    completions[completion.key] = completion
        return [completions[request.key] for request in requests]

    def load(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Copy parameters, given by name, into the model."""
        own_parameters = dict(self._model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in parameters:
                own_parameters[name].copy_(tensor)

    def _generate(self, batch: list[Request]) -> list[Completion]:
        """Prefill, then sample one token per step for every row that has not finished."""
        decoder: Any = self._model.get_decoder()
        head: Any = self._model.get_output_embeddings()
        device = head.weight.device
        responses = [_Response(request, self._end_ids) for request in batch]
        # Index in `batch` of each row of the tensors; a finished row stays until rows are dropped.
        live = list(range(len(batch)))
        seeds = np.array([request.seed & (2**64 - 1) for request in batch], dtype=np.uint64)
        temperature_B = torch.tensor([request.temperature for request in batch], device=device)
        length_B = torch.tensor([len(request.prompt_ids) for request in batch], device=device)
        longest = max(request.max_tokens for request in batch)
        cache = self._make_cache() if longest > 1 else None
        hidden_BD = self._prefill(decoder, batch, length_B, cache)

        for t in range(longest):
            uniform_B = torch.from_numpy(uniforms(seeds[live], t)).to(device)
            logits_BV = self._transform(head(hidden_BD))
            token_B, logp_B, entropy_B = sample(logits_BV, temperature_B, uniform_B)
            samples = zip(live, token_B.tolist(), logp_B.tolist(), entropy_B.tolist(), strict=True)
            for request_index, token, logp, entropy in samples:
                if not responses[request_index].finished:
                    responses[request_index].add(token, logp, entropy)
            if cache is None or all(response.finished for response in responses):
                break

            kept_rows = [
                row
                for row, request_index in enumerate(live)
                if not responses[request_index].finished
            ]
            # Dropping rows copies the cache, which costs about as much as one decoding step.
            if len(kept_rows) <= 0.75 * len(live):
                rows_B = torch.tensor(kept_rows, device=device)
                live = [live[row] for row in kept_rows]
                temperature_B = temperature_B[rows_B]
                length_B = length_B[rows_B]
                token_B = token_B[rows_B]
                cache.keep(rows_B)

            longest_prompt = max(len(batch[request_index].prompt_ids) for request_index in live)
            cache.write_at(length_B + t, longest_prompt + t + 1)
            hidden_BD = decoder(
                input_ids=token_B[:, None],
                position_ids=(length_B + t)[:, None],
                attention_mask=cache.mask(),
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, 0]
        return [response.completion() for response in responses]

    def _make_cache(self) -> "_RowCache | _EvenCache":
        if self._mixes_tokens:
            return _EvenCache(config=self._model.config)
        return _RowCache()

    def _prefill(self, decoder: Any, batch: list[Request], length_B: Tensor, cache: Any) -> Tensor:
        """Return hidden states [B, D] of the prompts' last tokens. Fills the cache, if any."""
        device = length_B.device
        prompts = [torch.tensor(request.prompt_ids) for request in batch]
        ids_BL = pad_sequence(prompts, batch_first=True).to(device)
        hidden_BLD = decoder(
            input_ids=ids_BL, past_key_values=cache, use_cache=cache is not None
        ).last_hidden_state
        return hidden_BLD[torch.arange(len(batch), device=device), length_B - 1]


def _partial_attention(model: PreTrainedModel, *, longest: float, mixes_tokens: bool) -> set[str]:
    """Return the kinds of attention that do not see all `longest` tokens, or that cap logits."""
    config: Any = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or []
    kinds = {kind for kind in layer_types if "attention" in kind}
    kinds.discard("full_attention")
    if mixes_tokens:
        kinds.discard("linear_attention")
    if (sliding_window(config) or math.inf) < longest:
        kinds.add("sliding_attention")
    if getattr(config, "attn_logit_softcapping", None):
        kinds.add("soft-capped attention")
    return kinds


class _Response:
    """The response to a request, token by token."""

    def __init__(self, request: Request, end_ids: Collection[int]) -> None:
        self._request = request
        self._end_ids = end_ids
        self._token_ids: list[int] = []
        self._logp: list[float] = []
        self._entropy: list[float] = []
        self.finished = False

    def add(self, token: int, logp: float, entropy: float) -> None:
        self._token_ids.append(token)
        self._logp.append(logp)
        self._entropy.append(entropy)
        stopped = self._request.stopped
        self.finished = (
            token in self._end_ids
            or len(self._token_ids) == self._request.max_tokens
            or bool(stopped and stopped(self._token_ids))
        )

    def completion(self) -> Completion:
        return Completion(self._request.key, self._token_ids, self._logp, self._entropy)


class _RowCache(Cache):
    """Keys and values [B, heads, slots, head size] of right-padded rows. Position p of a row is in
    slot p, so the first token that a row generates overwrites its first pad slot."""

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
        key, value = self._layers[layer_idx]
        key[row_B, :, self._slot_B] = key_states[:, :, 0]
        value[row_B, :, self._slot_B] = value_states[:, :, 0]
        return key[:, :, : self._width], value[:, :, : self._width]

    def write_at(self, slot_B: Tensor, width: int) -> None:
        """Make the next `update` write to these slots, all of which are below `width`."""
        self._slot_B = slot_B
        self._width = width
        slots = self._layers[0][0].shape[2]
        if width > slots:
            pad = (0, 0, 0, max(16, width // 4) + width - slots)
            self._change(lambda x: torch.nn.functional.pad(x, pad))

    def mask(self) -> Tensor:
        """Slots that a row's current token may see, including its own: [B, 1, 1, width] bool."""
        assert self._slot_B is not None
        slots = torch.arange(self._width, device=self._slot_B.device)
        mask_BW = slots <= self._slot_B[:, None]
        return mask_BW[:, None, None]

    def keep(self, rows: Tensor) -> None:
        self._change(lambda x: x.index_select(0, rows))

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        self._layers = [[function(x) for x in layer] for layer in self._layers]


class _EvenCache(DynamicCache):
    """The cache of transformers, for any kind of layer. Rows of equal length need no masks."""

    def write_at(self, slot_B: Tensor, width: int) -> None: ...

    def mask(self) -> None: ...

    def keep(self, rows: Tensor) -> None:
        self.reorder_cache(rows)  # type: ignore[arg-type]


def sample(
    logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (token, log-probability, entropy in nats), each [B], by inverse CDF at `uniform_B`.

    `uniform_B` is in [0, 1). At temperature 0 the token is the most likely one, and its
    log-probability and entropy are those at temperature 1.
    """
    greedy_B = temperature_B == 0
    scale_B = torch.where(greedy_B, 1.0, temperature_B)
    logp_BV = (logits_BV.float() / scale_B[:, None]).log_softmax(-1)
    p_BV = logp_BV.exp()
    cdf_BV = p_BV.double().cumsum(-1)
    token_B1 = torch.searchsorted(cdf_BV, uniform_B[:, None] * cdf_BV[:, -1:], right=True)
    # The index is beyond the end only if the logits are not finite.
    token_B1 = token_B1.clamp_(max=logits_BV.shape[-1] - 1)
    token_B1 = torch.where(greedy_B[:, None], logits_BV.argmax(-1, keepdim=True), token_B1)
    token_B = token_B1[:, 0]
    logp_B = logp_BV.gather(-1, token_B1)[:, 0]
    entropy_B = torch.special.entr(p_BV).sum(-1)
    return token_B, logp_B, entropy_B


def uniforms(seeds: np.ndarray, position: int) -> np.ndarray:
    """Return float64 numbers in [0, 1), one for each uint64 seed.

    They come from a counter-based generator with SplitMix64's finaliser (Steele 2014).
    """
    golden = 0x9E3779B97F4A7C15
    keys = _mix(seeds + np.uint64(golden))
    counter = np.uint64((position + 1) * golden % 2**64)
    return (_mix(keys + counter) >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _batches(
    requests: Sequence[Request], max_tokens: int, *, same_length: bool
) -> Iterator[list[Request]]:
    """Split requests into batches of prompts with similar lengths, or equal ones if `same_length`.

    Each batch has at most `max_tokens` padded tokens, or is a single request.
    """
    batch: list[Request] = []
    for request in sorted(requests, key=lambda request: len(request.prompt_ids)):
        length = len(request.prompt_ids)
        if batch:
            too_large = (len(batch) + 1) * length > max_tokens
            other_length = same_length and length != len(batch[0].prompt_ids)
            if too_large or other_length:
                yield batch
                batch = []
        batch.append(request)
    if batch:
        yield batch


@contextmanager
def _generation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Switch off gradients and dropout, and use an attention implementation that takes masks.

    This uses no_grad rather than inference_mode, because the backward pass must be able to use what
    a module caches in this block (rotary tables, FSDP's gathered parameters).
    """
    training = model.training
    attention = model.config._attn_implementation
    model.eval()
    model.config._attn_implementation = "sdpa"
    try:
        with torch.no_grad():
            yield
    finally:
        model.config._attn_implementation = attention
        model.train(training)


def check_sampling(lm: PreTrainedModel, origin: str = "engine.type = 'transformers'") -> float:
    """Compare the log-probs that the generator samples with to the model's own, in float32.

    Prompts of two lengths are in one batch. Returns the largest difference, in nats. Raises
    UserError, which begins with `origin`, if the model cannot be sampled from, or if the difference
    is more than rounding.
    """
    refusal = f"{origin} cannot sample from model type '{lm.config.model_type}'"
    generator = Generator(lm, end_ids=[], longest=max(LENGTHS) + TRIAL_TOKENS, origin=origin)
    vocabulary = lm.config.get_text_config().vocab_size
    requests: list[Request] = []
    for key, length in enumerate(LENGTHS):
        random = torch.Generator().manual_seed(key)
        prompt = torch.randint(vocabulary, (length,), generator=random).tolist()
        requests.append(Request(key, prompt, seed=key, temperature=1.0, max_tokens=TRIAL_TOKENS))

    with running_in(torch.float32, lm):
        try:
            completions = generator.answer(requests)
        except Exception as error:  # a model's cache may raise anything
            if out_of_memory(error):
                raise
            raise UserError(f"{refusal}: {describe(error)}; use --engine.type vllm") from error
        differences = []
        for request, completion in zip(requests, completions, strict=True):
            token_row = torch.tensor(request.prompt_ids + completion.token_ids, device=lm.device)
            trainer_logp = own_logp(lm, token_row)[-len(completion.logp) :].cpu()
            differences.append((trainer_logp - torch.tensor(completion.logp)).abs())

    difference = torch.cat(differences)
    largest = float(difference.max())
    if not typical_difference(difference, lm) <= EXACT:  # so that NaN is refused as well
        raise UserError(
            f"{refusal}: log-probs are off by {largest:.2g} nats from the model's own,"
            f" beyond rounding ({EXACT:g}); use --engine.type vllm"
        )
    return largest
