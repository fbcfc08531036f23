"""Attention over packed rows: the rows of a micro-batch lie one after another, and none sees another.

Hugging Face models call `packed_attention` by the name `ATTENTION`; the rows' bounds reach it as the keyword `packed`.
flash-attn and torch's varlen kernel read them as they are. Elsewhere (CPUs, fp32) the rows are laid side by side for
torch's sdpa: causal, so that padding on the right reaches no row, and cheaper than a mask of T x T.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from paw.errors import UserError

ATTENTION = "paw_packed"


@dataclass(frozen=True, eq=False)
class Packed:
    """Bounds of rows packed into T tokens. Example: rows of 3 and 2 tokens have cu_seqlens [0, 3, 5]."""

    kernel: str
    """flash, varlen or sdpa."""
    rows: int
    longest: int
    cu_seqlens: Tensor
    """[rows + 1] int32: where each row starts, and T."""
    position_ids: Tensor
    """[T] int64, from 0 in each row."""
    slot: Tensor | None
    """[T] int64: each token's place in [rows * longest]; None where that is its own (rows of one length)."""
    attended: list[bool] = field(default_factory=list)
    """Filled by the first attention that respects the bounds."""


def pack_rows(lengths: Sequence[int], *, kernel: str, device: torch.device) -> Packed:
    """Bounds of rows of the given lengths (>= 1), on `device`."""
    starts = [0, *accumulate(lengths)]
    longest = max(lengths)
    even = starts[-1] == longest * len(lengths)
    slots = [] if even or kernel != "sdpa" else [b * longest + p for b, n in enumerate(lengths) for p in range(n)]
    return Packed(
        kernel=kernel,
        rows=len(lengths),
        longest=longest,
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=device),
        position_ids=torch.tensor([p for n in lengths for p in range(n)], device=device),
        slot=torch.tensor(slots, device=device) if slots else None,
    )


def pick_attention(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel to use, flash, varlen or sdpa; UserError when the wanted one cannot run there."""
    if wanted == "auto":
        return next(name for name in ("flash", "varlen", "sdpa") if not _why_not(name, device, dtype))
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
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row: query [1, heads, T, size], key and value [1, kv heads, T, size].

    Returns [1, T, heads, size], the layout Hugging Face models expect. Without `packed` it is their own sdpa.
    """
    if packed is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **options
        )
    if not packed.attended:
        packed.attended.append(True)
    if torch.is_autocast_enabled(query.device.type):  # rotary embedding left query and key in float32
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, size]
    window = (sliding_window - 1, 0) if sliding_window else (-1, 0)
    if packed.kernel == "flash":
        from flash_attn import flash_attn_varlen_func

        bounds = (packed.cu_seqlens, packed.cu_seqlens, packed.longest, packed.longest)
        out = flash_attn_varlen_func(q, k, v, *bounds, softmax_scale=scaling, causal=True, window_size=window)
    elif packed.kernel == "varlen":
        out = _varlen(q, k, v, packed, scaling, window)
    else:
        out = _side_by_side(q, k, v, packed, scaling, sliding_window)
    return out.unsqueeze(0), None


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scaling: float | None, window: tuple[int, int]) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scaling, "window_size": window}
    if "enable_gqa" in _varlen_options():
        options["enable_gqa"] = True
    else:  # torch 2.11
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    bounds = (packed.cu_seqlens, packed.cu_seqlens, packed.longest, packed.longest)
    return varlen_attn(q, k, v, *bounds, **options)  # type: ignore[return-value]


def _side_by_side(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, scaling: float | None, sliding_window: int | None
) -> Tensor:
    def lay(x: Tensor) -> Tensor:  # [T, heads, size] -> [rows, heads, longest, size]
        if packed.slot is not None:
            x = x.new_zeros(packed.rows * packed.longest, *x.shape[1:]).index_copy(0, packed.slot, x)
        return x.unflatten(0, (packed.rows, packed.longest)).transpose(1, 2)

    mask = None
    if sliding_window and sliding_window < packed.longest:
        ahead = torch.ones(packed.longest, packed.longest, dtype=torch.bool, device=q.device)
        mask = ahead.tril() & ~ahead.tril(-sliding_window)
    out = scaled_dot_product_attention(
        lay(q), lay(k), lay(v), attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    out = out.transpose(1, 2).flatten(0, 1)
    return out if packed.slot is None else out.index_select(0, packed.slot)


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
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


@cache
def _flash_installed() -> bool:
    try:
        import flash_attn  # noqa: F401
    except (ImportError, OSError):  # OSError: built for another torch
        return False
    return True


AttentionInterface.register(ATTENTION, packed_attention)
