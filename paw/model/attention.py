"""Attention over packed rows: the rows of a micro-batch lie one after another, and none sees another.

Hugging Face models call `packed_attention` by the name `ATTENTION`; the rows' bounds reach it as
the keyword `packed`. flash-attn and torch's varlen kernel read them as they are. Elsewhere (CPUs,
fp32) the rows are laid side by side for torch's sdpa: causal, so that padding on the right reaches
no row, and cheaper than a mask of T x T; on a CPU long rows that differ go through it one by one.
Side by side they are for layers that mix tokens by recurrence or convolution (mixers.py), which
know no bounds.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, GradientCheckpointingLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from paw.errors import UserError

ATTENTION = "paw_packed"
LONG_ROW, MOST_PADDING = 256, 1.1
"""On a CPU rows of this mean length go through sdpa one by one where padding would make it this many times the work."""


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
    """[rows + 1] int32: where each row starts, and T."""
    position_ids: Tensor
    """[T] int64, from 0 in each row."""
    slot: Tensor | None
    """[T] int64: each token's place in [rows * longest]; None where that is its own, or nothing lays them so."""
    one_by_one: tuple[int, ...]
    """Lengths of rows that sdpa takes one by one; () where it takes them side by side."""

    def side_by_side(self, x: Tensor) -> Tensor:
        """[T, ...] -> [rows, longest, ...], zeros behind shorter rows."""
        if self.slot is not None:
            x = x.new_zeros(self.rows * self.longest, *x.shape[1:]).index_copy(0, self.slot, x)
        return x.unflatten(0, (self.rows, self.longest))

    def one_after_another(self, x: Tensor) -> Tensor:
        """[rows, longest, ...] -> [T, ...]."""
        x = x.flatten(0, 1)
        return x if self.slot is None else x.index_select(0, self.slot)


def pack_rows(
    lengths: Sequence[int], *, kernel: str, device: torch.device, padded: bool = False
) -> Packed:
    """Bounds of rows of the given lengths (>= 1), on `device`; with `padded` for layers that need them side by side."""
    starts = [0, *accumulate(lengths)]
    longest = max(lengths)
    one_by_one = (
        kernel == "sdpa"
        and device.type == "cpu"
        and not padded
        and starts[-1] >= LONG_ROW * len(lengths)
    )
    one_by_one &= longest**2 * len(lengths) > MOST_PADDING * sum(n**2 for n in lengths)
    needed = (
        (padded or kernel == "sdpa") and not one_by_one and starts[-1] != longest * len(lengths)
    )
    slots = [b * longest + p for b, n in enumerate(lengths) for p in range(n)] if needed else []
    return Packed(
        kernel=kernel,
        rows=len(lengths),
        longest=longest,
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=device),
        position_ids=torch.tensor([p for n in lengths for p in range(n)], device=device),
        slot=torch.tensor(slots, device=device) if slots else None,
        one_by_one=tuple(lengths) if one_by_one else (),
    )


def pick_attention(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel to use, flash, varlen or sdpa; UserError when the wanted one cannot run there."""
    if wanted == "auto":
        return next(
            name for name in ("flash", "varlen", "sdpa") if not _why_not(name, device, dtype)
        )
    if reason := _why_not(wanted, device, dtype):
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
    """Causal attention within each row: query [1, heads, T, size], key and value [1, kv heads, T, size].

    `softcap` (Gemma 2) bounds the scores before the softmax; sdpa and varlen know none, flash-attn
    does.

    Returns [1, T, heads, size], the layout Hugging Face models expect. Without `packed` it is their
    own sdpa.
    """
    if packed is None:
        if softcap is not None:
            raise ValueError(
                "sdpa has no soft cap of attention scores; sampling from such a model is left to vLLM"
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
    query, key = (
        query.to(value.dtype),
        key.to(value.dtype),
    )  # some rotary embeddings leave them in float32
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, size]
    window = (sliding_window - 1, 0) if sliding_window else (-1, 0)
    if packed.kernel == "flash":
        from flash_attn import flash_attn_varlen_func

        bounds = (packed.cu_seqlens, packed.cu_seqlens, packed.longest, packed.longest)
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            *bounds,
            softmax_scale=scaling,
            causal=True,
            window_size=window,
            softcap=softcap or 0.0,
        )
    elif packed.kernel == "varlen":
        if softcap is not None:
            cap = "knows no soft cap of attention scores, which this model has"
            raise UserError(
                f"model.attention = 'varlen' {cap}; install flash-attn, or use --model.attention sdpa"
            )
        out = _varlen(q, k, v, packed, scaling, window)
    else:
        out = _sdpa(
            q, k, v, packed, scaling=scaling, sliding_window=sliding_window, softcap=softcap
        )
    return out.unsqueeze(0), None


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, scaling: float | None, window: tuple[int, int]
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scaling, "window_size": window}
    if "enable_gqa" in _varlen_options():
        options["enable_gqa"] = True
    else:  # torch 2.11
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    bounds = (packed.cu_seqlens, packed.cu_seqlens, packed.longest, packed.longest)
    return varlen_attn(q, k, v, *bounds, **options)  # type: ignore[return-value]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, packed: Packed, **options: Any) -> Tensor:
    if packed.one_by_one:
        split = (x.transpose(0, 1)[None].split(packed.one_by_one, dim=2) for x in (q, k, v))
        return torch.cat(
            [_causal(*row, **options)[0].transpose(0, 1) for row in zip(*split, strict=True)]
        )
    q, k, v = (packed.side_by_side(x).transpose(1, 2) for x in (q, k, v))
    return packed.one_after_another(_causal(q, k, v, **options).transpose(1, 2))


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Query [rows, heads, length, size], key and value [rows, kv heads, length, size]."""
    mask, length = None, q.shape[2]
    if softcap is not None or (sliding_window and sliding_window < length):
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        if sliding_window:
            mask &= ~mask.tril(-sliding_window)
    if softcap is None:
        causal = mask is None
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True
        )
    # softcap tanh(score / softcap) is held: [rows, heads, length, length]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = softcap * (q @ k.transpose(2, 3) * ((scaling or q.shape[-1] ** -0.5) / softcap)).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)  # type: ignore[operator]
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def decoder_layers(lm: nn.Module) -> list[nn.Module]:
    """The layers that are checkpointed, sharded and compiled one by one."""
    return [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]


def token_mixers(layer: nn.Module) -> list[Any]:
    """What mixes the tokens of a decoder layer beside attention: gated delta nets, Mamba, short
    convolutions. Each has a causal convolution of its own."""
    return [
        module
        for module in layer.modules()
        if any(isinstance(m, nn.Conv1d) for m in module.children())
    ]


def _why_not(kernel: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why a kernel cannot run, or ""."""
    if kernel == "sdpa":
        return ""
    if device.type != "cuda" or dtype == torch.float32:
        return "it runs on a GPU in bfloat16 only"
    if kernel == "varlen":
        return "" if "window_size" in _varlen_options() else "it needs torch 2.11 or later"
    return "" if _flash_installed() else "flash-attn is not installed; run: pip install flash-attn"


@cache
def _varlen_options() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


@cache
def _flash_installed() -> bool:
    try:
        import flash_attn  # noqa: F401
    except (ImportError, OSError):  # OSError: built for another torch
        return False
    return True


@dataclass
class AttentionSeen:
    """What layers ask `packed_attention` for."""

    windows: set[int | None] = field(default_factory=set)
    """Sliding windows, None for whole rows."""
    calls: int = 0
    without_bounds: int = 0
    """Calls that do not say where rows end."""


@contextmanager
def attention_seen() -> Iterator[AttentionSeen]:
    """The calls of `packed_attention` meanwhile."""
    seen = AttentionSeen()
    usual: Any = ALL_ATTENTION_FUNCTIONS[ATTENTION]

    def noting(
        *args: Any, sliding_window: int | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        seen.windows.add(sliding_window)
        seen.calls += 1
        seen.without_bounds += options.get("packed") is None
        return usual(*args, sliding_window=sliding_window, **options)

    AttentionInterface.register(ATTENTION, noting)
    try:
        yield seen
    finally:
        AttentionInterface.register(ATTENTION, usual)


AttentionInterface.register(ATTENTION, packed_attention)
