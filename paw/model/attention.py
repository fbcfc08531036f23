"""Attention over packed rows.

The rows of a micro-batch are concatenated, and no row sees another. Hugging Face models call
`packed_attention` by the name `ATTENTION` and pass it the rows' bounds as the keyword `packed`.
flash-attn and torch's varlen kernel take these bounds directly. Elsewhere (CPUs, fp32) the rows are
laid side by side for torch's sdpa. It is causal, so no row sees the padding on its right, and this
costs less than a T x T mask. On a CPU, long rows of different lengths go through sdpa one by one.
Layers that mix tokens by recurrence or convolution (mixers.py) take no bounds, so they get the rows
side by side too.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, GradientCheckpointingLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from paw.algo.device import to_device
from paw.errors import UserError

ATTENTION = "paw_packed"
LONG_ROW = 256
MAX_PADDING = 1.1
"""On a CPU, rows of at least LONG_ROW tokens on average go through sdpa one by one if padding would
multiply the work by more than MAX_PADDING."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Bounds of rows packed into T tokens.

    Example: rows of 3 and 2 tokens have cu_seqlens [0, 3, 5].
    """

    kernel: str
    """flash, varlen or sdpa."""
    rows: int
    longest: int
    cu_seqlens: Tensor
    """[rows + 1] int32: the start of each row, then T."""
    position_ids: Tensor
    """[T] int64, from 0 in each row."""
    slot: Tensor | None
    """[T] int64: each token's index in [rows * longest] when the rows lie side by side.

    None if all rows have the same length, or if nothing needs them side by side.
    """
    one_by_one: tuple[int, ...]
    """Lengths of the rows if sdpa takes them one by one, else ()."""
    paths: "Paths | None" = None
    """What the rows see if they are segments of a prefix tree; None if each sees only itself."""

    @property
    def key_bounds(self) -> tuple[Tensor, int]:
        """(bounds of the keys of each row, [rows + 1] int32; the longest row of keys)."""
        if self.paths is None:
            return self.cu_seqlens, self.longest
        return self.paths.cu_seqlens, self.paths.longest

    def side_by_side(self, x: Tensor) -> Tensor:
        """[T, ...] -> [rows, longest, ...], with zeros after shorter rows."""
        if self.slot is not None:
            x = x.new_zeros(self.rows * self.longest, *x.shape[1:]).index_copy(0, self.slot, x)
        return x.unflatten(0, (self.rows, self.longest))

    def one_after_another(self, x: Tensor) -> Tensor:
        """[rows, longest, ...] -> [T, ...]."""
        x = x.flatten(0, 1)
        if self.slot is None:
            return x
        return x.index_select(0, self.slot)


@dataclass(frozen=True)
class ScoreSettings:
    """A layer's settings for turning products of queries and keys into attention."""

    scaling: float | None
    """Factor of the scores. None means size^-1/2."""
    sliding_window: int | None
    """Number of tokens that a token sees, including itself. None means all tokens up to it."""
    softcap: float | None
    """Bound of the scores, softcap tanh(score / softcap). None means no bound."""

    @property
    def window_size(self) -> tuple[int, int]:
        """Number of tokens seen to the left and right; -1 for all that causality allows."""
        if not self.sliding_window:
            return (-1, 0)
        return (self.sliding_window - 1, 0)


@dataclass(frozen=True, eq=False)
class Paths:
    """The keys that the segments of a prefix tree see. Each segment sees the keys of its path.

    A segment's own tokens are the last of its path. Attention is causal from the bottom right: the
    last query sees the whole path, the query before it all but the last token, and so on.
    """

    index: Tensor
    """[K] int64: the index of each key among the T tokens."""
    cu_seqlens: Tensor
    """[rows + 1] int32: the start of each segment's path in `index`, then K."""
    lengths: tuple[int, ...]
    """Of the paths."""

    @property
    def longest(self) -> int:
        return max(self.lengths)


def pack_tree(
    lengths: Sequence[int], paths: Sequence[np.ndarray], *, kernel: str, device: torch.device
) -> Packed:
    """Return bounds of the segments of a prefix tree (`paw.algo.prefixes`), on `device`.

    `lengths` are the numbers of tokens that the segments add, and `paths` [n] int64 what they see.
    """
    path_lengths = tuple(len(path) for path in paths)
    positions = [
        np.arange(seen - added, seen) for seen, added in zip(path_lengths, lengths, strict=True)
    ]
    starts = np.array([0, *accumulate(lengths)], np.int32)
    path_starts = np.array([0, *accumulate(path_lengths)], np.int32)
    arrays = [starts, path_starts, np.concatenate(positions), np.concatenate(paths)]
    cu_seqlens, path_cu_seqlens, position_ids, path_index = to_device(arrays, device)
    return Packed(
        kernel=kernel,
        rows=len(lengths),
        longest=max(lengths),
        cu_seqlens=cu_seqlens,
        position_ids=position_ids,
        slot=None,
        one_by_one=tuple(lengths) if kernel == "sdpa" else (),
        paths=Paths(
            index=path_index,
            cu_seqlens=path_cu_seqlens,
            lengths=path_lengths,
        ),
    )


def pack_rows(
    lengths: Sequence[int], *, kernel: str, device: torch.device, padded: bool = False
) -> Packed:
    """Return the bounds of rows of the given lengths (>= 1), on `device`.

    `padded` says that some layers need the rows side by side, whatever the attention kernel takes.
    """
    starts = [0, *accumulate(lengths)]
    longest = max(lengths)
    takes_sdpa = kernel == "sdpa"
    one_by_one = takes_sdpa and device.type == "cpu" and not padded and _padding_is_costly(lengths)
    side_by_side = (padded or takes_sdpa) and not one_by_one
    equally_long = sum(lengths) == longest * len(lengths)

    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    arrays = [np.array(starts, np.int32), positions]
    if side_by_side and not equally_long:
        arrays.append(positions + longest * np.repeat(np.arange(len(lengths)), lengths))
    cu_seqlens, position_ids, *slots = to_device(arrays, device)
    return Packed(
        kernel=kernel,
        rows=len(lengths),
        longest=longest,
        cu_seqlens=cu_seqlens,
        position_ids=position_ids,
        slot=slots[0] if slots else None,
        one_by_one=tuple(lengths) if one_by_one else (),
    )


def _padding_is_costly(lengths: Sequence[int]) -> bool:
    """Whether rows are long and cost much more side by side. Work is quadratic in length."""
    if sum(lengths) < LONG_ROW * len(lengths):
        return False
    padded_work = max(lengths) ** 2 * len(lengths)
    return padded_work > MAX_PADDING * sum(n**2 for n in lengths)


def pick_attention(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the kernel to use: flash, varlen or sdpa.

    Raises UserError if the wanted one cannot run there.
    """
    if wanted == "auto":
        for kernel in ("flash", "varlen"):
            if not _why_not(kernel, device, dtype):
                return kernel
        return "sdpa"
    reason = _why_not(wanted, device, dtype)
    if reason:
        raise UserError(f"model.attention = '{wanted}': {reason}; or use --model.attention auto")
    return wanted


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Packed | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each row.

    Query is [1, heads, T, size], key and value are [1, kv heads, T, size]. `softcap` (Gemma 2)
    bounds the scores before the softmax. flash-attn supports it, torch's sdpa and varlen do not.

    Returns [1, T, heads, size], the layout that Hugging Face models expect. Without `packed`, this
    is the sdpa of transformers.
    """
    if packed is None:
        if softcap is not None:
            raise ValueError(
                "sdpa does not support soft caps of attention scores; "
                "use vLLM to sample from such a model"
            )
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            sliding_window=sliding_window,
            **options,
        )

    # Some rotary embeddings leave query and key in float32.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, size]
    if packed.paths is not None:
        k = k.index_select(0, packed.paths.index)
        v = v.index_select(0, packed.paths.index)
    settings = ScoreSettings(scaling=scaling, sliding_window=sliding_window, softcap=softcap)
    out = KERNELS[packed.kernel](q, k, v, packed, settings)
    return out.unsqueeze(0), None


def _flash(q: Tensor, k: Tensor, v: Tensor, packed: Packed, settings: ScoreSettings) -> Tensor:
    key_cu_seqlens, longest_keys = packed.key_bounds
    return _flash_attention()(
        q,
        k,
        v,
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_k=key_cu_seqlens,
        max_seqlen_q=packed.longest,
        max_seqlen_k=longest_keys,
        softmax_scale=settings.scaling,
        causal=True,
        window_size=settings.window_size,
        softcap=settings.softcap or 0.0,
    )


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packed, settings: ScoreSettings) -> Tensor:
    if settings.softcap is not None:
        raise UserError(
            "model.attention = 'varlen' does not support soft caps of attention scores, "
            "which this model uses; install flash-attn, or use --model.attention sdpa"
        )
    options: dict[str, Any] = {"scale": settings.scaling, "window_size": settings.window_size}
    if "enable_gqa" in _varlen_options():
        options["enable_gqa"] = True
    else:  # torch 2.11
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    key_cu_seqlens, longest_keys = packed.key_bounds
    return _varlen_attention()(
        q,
        k,
        v,
        packed.cu_seqlens,
        key_cu_seqlens,
        packed.longest,
        longest_keys,
        **options,
    )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, packed: Packed, settings: ScoreSettings) -> Tensor:
    if packed.one_by_one:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, size]
        key_lengths = packed.paths.lengths if packed.paths else packed.one_by_one
        q_rows = q.split(packed.one_by_one, dim=2)
        k_rows = k.split(key_lengths, dim=2)
        v_rows = v.split(key_lengths, dim=2)
        outputs = []
        for q_row, k_row, v_row in zip(q_rows, k_rows, v_rows, strict=True):
            out = _causal(q_row, k_row, v_row, settings)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    q, k, v = (packed.side_by_side(x).transpose(1, 2) for x in (q, k, v))
    out = _causal(q, k, v, settings)
    return packed.one_after_another(out.transpose(1, 2))


def _causal(q: Tensor, k: Tensor, v: Tensor, settings: ScoreSettings) -> Tensor:
    """Compute causal attention of rows of equal length, with sdpa unless there is a soft cap.

    Query [rows, heads, length, size], key and value [rows, kv heads, path, size]: the queries are
    those of the last `length` tokens of the path.
    """
    length = q.shape[2]
    path = k.shape[2]
    before = path - length
    window = settings.sliding_window
    softcap = settings.softcap
    mask = None
    if before or softcap is not None or (window and window < path):
        mask = torch.ones(length, path, dtype=torch.bool, device=q.device).tril(before)
        if window:
            mask &= ~mask.tril(before - window)
    if softcap is None:
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=settings.scaling,
            enable_gqa=True,
        )

    # softcap tanh(score / softcap): this needs [rows, heads, length, length] in memory
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    scale = settings.scaling or q.shape[-1] ** -0.5
    scores = softcap * (q @ k.transpose(2, 3) * (scale / softcap)).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)  # type: ignore[operator]
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


KERNELS = {"flash": _flash, "varlen": _varlen, "sdpa": _sdpa}
"""By name: query [T, heads, size], key and value [T, kv heads, size] -> [T, heads, size]."""


def decoder_layers(lm: nn.Module) -> list[nn.Module]:
    """Return the layers. They are checkpointed, sharded and compiled one by one."""
    return [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]


def token_mixers(layer: nn.Module) -> list[Any]:
    """Return the modules of a decoder layer, other than attention, that mix tokens: gated delta
    nets, Mamba, short convolutions.

    Each has its own causal convolution.
    """
    mixers = []
    for module in layer.modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            mixers.append(module)
    return mixers


def _why_not(kernel: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return why a kernel cannot run, or "" if it can."""
    if kernel == "sdpa":
        return ""
    if device.type != "cuda" or dtype == torch.float32:
        return "it runs only on a GPU in bfloat16"
    if kernel == "varlen" and "window_size" not in _varlen_options():
        return "it needs torch 2.11 or later"
    if kernel == "flash" and _flash_attention() is None:
        return "flash-attn is not installed; run: pip install flash-attn"
    return ""


@cache
def _varlen_options() -> frozenset[str]:
    return frozenset(inspect.signature(_varlen_attention()).parameters)


def _varlen_attention() -> Any:
    from torch.nn.attention.varlen import varlen_attn  # takes a second to import

    return varlen_attn


@cache
def _flash_attention() -> Any:
    """Return flash-attn's function for packed rows, or None if it is not installed."""
    try:
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError):  # OSError: built for another torch
        return None
    return flash_attn_varlen_func


@dataclass
class AttentionCalls:
    """A record of how layers called `packed_attention`."""

    windows: set[int | None] = field(default_factory=set)
    """Sliding windows of the calls; None for a call without one."""
    count: int = 0
    without_bounds: int = 0
    """Number of calls without the bounds of rows."""


@contextmanager
def record_attention() -> Iterator[AttentionCalls]:
    """Record the calls of `packed_attention` in this block."""
    calls = AttentionCalls()
    attention: Any = ALL_ATTENTION_FUNCTIONS[ATTENTION]

    def recording(
        *args: Any, sliding_window: int | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        calls.windows.add(sliding_window)
        calls.count += 1
        if options.get("packed") is None:
            calls.without_bounds += 1
        return attention(*args, sliding_window=sliding_window, **options)

    AttentionInterface.register(ATTENTION, recording)
    try:
        yield calls
    finally:
        AttentionInterface.register(ATTENTION, attention)


AttentionInterface.register(ATTENTION, packed_attention)
