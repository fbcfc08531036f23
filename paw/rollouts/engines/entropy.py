"""The entropy of vLLM's distribution at each sampled token. vLLM does not return it.

A logits processor that changes nothing computes it, in the process in which vLLM samples. PaW
selects transitions by the entropy of their actions. If the sampler provides the entropies,
`policy.old_logp = "engine"` saves the trainer a pass over the samples.

Written for vLLM 0.32 and both of its model runners. V1, which runs on CPUs, passes logits divided
by the temperature. V2, which runs on GPUs, passes logits that are not divided.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as ProcessorV2

NAME = "paw_entropy"
"""Key in SamplingParams.extra_args. Its value is [request key, number of prompt tokens]."""
_entropies: dict[str, dict[int, "TokenEntropy"]] = {}
"""Entropies by request key, then by index of the response token."""


class Step:
    """Entropies of all rows in one engine step, copied to the host when one is read."""

    def __init__(self, entropy: Tensor) -> None:
        self._entropy: Tensor | list[float] = entropy

    def __getitem__(self, row: int) -> float:
        if isinstance(self._entropy, Tensor):
            self._entropy = self._entropy.tolist()
        return self._entropy[row]


@dataclass(frozen=True)
class TokenEntropy:
    """Where the entropy at a token is kept."""

    step: Step
    row: int

    @property
    def value(self) -> float:
        return self.step[self.row]


@dataclass
class RunningRequest:
    """A request in the batch."""

    key: str
    prompt_tokens: int
    temperature: float
    response: list[int] = field(default_factory=list)
    """The response so far, which vLLM keeps filling (V1)."""


class Entropy(ProcessorV1, ProcessorV2):
    """Keeps the entropies, in nats, of requests with NAME in their extra_args, until `take`."""

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self._requests: dict[int, RunningRequest] = {}
        """By row of the batch (V1) or by slot (V2)."""

    def is_argmax_invariant(self) -> bool:
        return True

    def add_request(
        self, req_idx: int, sampling_params: SamplingParams, response: list[int] | None = None
    ) -> bool:
        """Note that a request enters the batch or comes back (V2)."""
        self._requests.pop(req_idx, None)
        argument = (sampling_params.extra_args or {}).get(NAME)
        if not argument:
            return False
        key, prompt_tokens = argument
        _entropies.setdefault(key, {})
        request = RunningRequest(key, prompt_tokens, sampling_params.temperature or 1.0)
        if response is not None:
            request.response = response
        self._requests[req_idx] = request
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Note that requests leave, enter or move within the batch (V1)."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._requests.pop(row, None)
        for row, params, _, response in batch_update.added:
            self.add_request(row, params, response)
        for source, target, direction in batch_update.moved:
            moved = self._requests.pop(source, None)
            replaced = self._requests.pop(target, None)
            if moved:
                self._requests[target] = moved
            if replaced and direction == MoveDirectionality.SWAP:
                self._requests[source] = replaced

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Keep the entropies of a step. Returns the logits, [rows, V] float32, unchanged.

        If a prompt is computed in parts, vLLM samples after each part. The last part overwrites
        what the others wrote.
        """
        scaled = logits
        if ctx is None:
            request_of_row = self._rows_v1(len(logits))
        else:
            request_of_row = self._rows_v2(ctx)
            temperatures = [1.0] * len(logits)
            for row, (request, _) in request_of_row.items():
                temperatures[row] = request.temperature
            scaled = logits / torch.tensor(temperatures, device=logits.device)[:, None]
        if not request_of_row:
            return logits

        step = Step(torch.special.entr(scaled.softmax(-1)).sum(-1))
        for row, (request, index) in request_of_row.items():
            if request.key in _entropies:
                _entropies[request.key][index] = TokenEntropy(step, row)
        return logits

    def _rows_v1(self, count: int) -> dict[int, tuple[RunningRequest, int]]:
        """Return (request, index of the response token being sampled) for each row."""
        request_of_row = {}
        for row, request in self._requests.items():
            if row < count:
                request_of_row[row] = (request, len(request.response))
        return request_of_row

    def _rows_v2(self, ctx: Any) -> dict[int, tuple[RunningRequest, int]]:
        """Do the same as `_rows_v1`. `ctx` has each row's slot and sequence length."""
        slots = ctx.idx_mapping_np.tolist()
        lengths = ctx.seq_lens_upper_bound_np.tolist()
        request_of_row = {}
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            request = self._requests.get(slot)
            if request:
                request_of_row[row] = (request, length - request.prompt_tokens)
        return request_of_row


def take(key: str, count: int) -> list[float] | None:
    """Return the entropies of a request's `count` response tokens, and forget them.

    Returns None if one is missing.
    """
    by_index = _entropies.pop(key, {})
    entropies = [by_index.get(token_index) for token_index in range(count)]
    if not all(entropies):
        return None
    return [entropy.value for entropy in entropies if entropy]


class Extension:
    """Added to vLLM's workers, for /collective_rpc."""

    def paw_entropy(self, responses: list[tuple[str, int]]) -> list[list[float] | None]:
        """Call `take` for several requests."""
        return [take(key, token_count) for key, token_count in responses]
