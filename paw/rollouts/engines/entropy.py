"""The entropy of vLLM's distribution at each sampled token, which it does not return: a logits
processor that changes nothing, in whatever process vLLM samples.

PaW selects transitions by the entropy of their actions. With it from the sampler, `policy.old_logp
= "engine"` needs no pass of the trainer over the samples. Written for vLLM 0.32 and both of its
model runners: V1, which CPUs use, hands over logits that are divided by the temperature; V2, which
GPUs use, logits that are not.
"""

from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as ProcessorV2

NAME = "paw_entropy"
"""In SamplingParams.extra_args: [key of the request, tokens of its prompt]."""
_taken: dict[str, dict[int, tuple["_Step", int]]] = {}
"""Key -> index of the response token -> (step, row)."""


class _Step:
    """What one step of the engine found, brought to the host once it is asked for."""

    def __init__(self, entropy: Tensor) -> None:
        self._entropy: Tensor | list[float] = entropy

    def __getitem__(self, row: int) -> float:
        if isinstance(self._entropy, Tensor):
            self._entropy = self._entropy.tolist()
        return self._entropy[row]


class Entropy(ProcessorV1, ProcessorV2):
    """Keeps the entropy, nats, of the rows of requests that have NAME among their extra arguments, until `take`."""

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self._rows: dict[int, tuple[str, int, float, list[int]]] = {}
        """Row (V1) or slot (V2) -> (key, prompt tokens, temperature, response so far)."""

    def is_argmax_invariant(self) -> bool:
        return True

    def add_request(
        self, req_idx: int, sampling_params: SamplingParams, response: list[int] | None = None
    ) -> bool:
        """V2: a request enters the batch, or comes back."""
        self._rows.pop(req_idx, None)
        name = (sampling_params.extra_args or {}).get(NAME)
        if name:
            key, prompt = name
            _taken.setdefault(key, {})
            self._rows[req_idx] = (
                key,
                prompt,
                sampling_params.temperature or 1.0,
                [] if response is None else response,
            )
        return bool(name)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """V1: requests leave, enter and move within the batch."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, response in batch_update.added:
            self.add_request(row, params, response)
        for one, other, how in batch_update.moved:
            ours, theirs = self._rows.pop(one, None), self._rows.pop(other, None)
            if ours:
                self._rows[other] = ours
            if theirs and how == MoveDirectionality.SWAP:
                self._rows[one] = theirs

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """[rows, V] float32, returned as they are. A prompt that is computed in parts is sampled
        from after each; the last one counts, as it writes where the others did."""
        if ctx is None:
            at = {
                row: (found, len(found[3]))
                for row, found in self._rows.items()
                if row < len(logits)
            }
            scaled = logits
        else:
            slots, lengths = ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist()
            at = {
                row: (self._rows[slot], length - self._rows[slot][1])
                for row, (slot, length) in enumerate(zip(slots, lengths, strict=True))
                if slot in self._rows
            }
            temperatures = [at[row][0][2] if row in at else 1.0 for row in range(len(logits))]
            scaled = logits / torch.tensor(temperatures, device=logits.device)[:, None]
        if at:
            step = _Step(torch.special.entr(scaled.softmax(-1)).sum(-1))
            for row, ((key, *_), index) in at.items():
                if key in _taken:
                    _taken[key][index] = step, row
        return logits


def take(key: str, count: int) -> list[float] | None:
    """The entropies of a request's `count` response tokens, which are forgotten; None where one is missing."""
    found = _taken.pop(key, {})
    values = [found.get(index) for index in range(count)]
    return [value[0][value[1]] for value in values if value] if all(values) else None


class Extension:
    """Of vLLM's workers, for /collective_rpc."""

    def paw_entropy(self, asked: list[tuple[str, int]]) -> list[list[float] | None]:
        """`take` for several requests."""
        return [take(key, count) for key, count in asked]
