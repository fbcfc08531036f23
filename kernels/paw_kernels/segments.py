"""Reductions over segments, top-alpha selection and the compaction scan, as deterministic torch.library operators.

Plain torch on every device; kernels of csrc/select.cu on CUDA where they are built. No operator waits for the device;
`segment_sum`, `segment_mean` and `top_alpha` do so once, to check values. Nothing here is differentiable.
"""

import torch
from torch import Tensor

from paw_kernels._checks import raise_first

_LIBRARY = torch.library.Library("paw_kernels", "FRAGMENT")
_LIBRARY.define("segment_reduce(Tensor values, Tensor offsets, bool mean) -> Tensor")
_LIBRARY.define("top_alpha(Tensor score, Tensor valid, float alpha) -> Tensor")
_LIBRARY.define("pack(Tensor chosen) -> (Tensor, Tensor)")


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sums of values [T] float32 over the N segments [offsets[s], offsets[s + 1]): [N] float32, 0 for an empty one.

    `offsets` [N + 1] int64 rises from 0 to T. Summed in float64. NaN stays in its segment.

    Raises ValueError for other shapes or dtypes, two devices, offsets that fall or do not go from 0 to T.

    >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3])).tolist()
    [3.0, 0.0, 4.0]
    """
    _check_segments(values, offsets)
    return torch.ops.paw_kernels.segment_reduce(values.contiguous(), offsets.contiguous(), False)


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """As `segment_sum`, over the number of values; 0 for an empty segment.

    >>> segment_mean(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3])).tolist()
    [1.5, 0.0, 4.0]
    """
    _check_segments(values, offsets)
    return torch.ops.paw_kernels.segment_reduce(values.contiguous(), offsets.contiguous(), True)


def top_alpha(score: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """[N] bool: the ceil(alpha n_valid - 1e-9) valid rows of the highest score, ties to the lower index.

    score [N] float32, valid [N] bool; scores of rows that are not valid are never read. PaW Eq. (9): the share alpha of
    the rows whose action the policy was least sure of. The slack keeps 0.1 * 30 = 3.0000000000000004 from selecting 4.

    Raises ValueError for other shapes or dtypes, two devices, alpha outside [0, 1], NaN among the valid scores.

    >>> top_alpha(torch.tensor([1.0, 3.0, 3.0, 9.0]), torch.tensor([True, True, True, False]), 0.3).tolist()
    [False, True, False, False]
    """
    _check_vector("score", score, torch.float32)
    _check_vector("valid", valid, torch.bool)
    if valid.shape != score.shape or valid.device != score.device:
        raise ValueError(
            f"valid must have the shape and device of score, {list(score.shape)} on {score.device}; "
            f"got {list(valid.shape)} on {valid.device}"
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    raise_first({"score must not be NaN on valid rows": (score.isnan() & valid).any()})
    return torch.ops.paw_kernels.top_alpha(score.contiguous(), valid.contiguous(), float(alpha))


def pack(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Where each of the L chosen rows of chosen [n] bool goes, so that packing in place can be done in parallel.

    Answers source [n] int64 and L itself, [1] int64, without waiting for the device. source[k] = k where row k < L is
    chosen; each hole there is filled by a chosen row from L on, in order; -1 from L on. So no row written is read by
    another.

    >>> source, count = pack(torch.tensor([True, False, True, False, False, True]))
    >>> source.tolist(), count.tolist()
    ([0, 5, 2, -1, -1, -1], [3])
    """
    return torch.ops.paw_kernels.pack(chosen.contiguous())


def _segment_reduce(values: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    total = torch.segment_reduce(values.double(), "sum", offsets=offsets, unsafe=True)
    return (total / offsets.diff().clamp_(min=1) if mean else total).float()


def _top_alpha(score: Tensor, valid: Tensor, alpha: float) -> Tensor:
    places = (alpha * valid.sum(dtype=torch.float64) - 1e-9).ceil()
    # By score, then valid ones first; -0 + 0 is 0, which radix sorts tell from -0.
    order = torch.argsort(score + 0.0, descending=True, stable=True)
    order = order[torch.argsort(~valid[order], stable=True)]
    chosen = torch.arange(len(score), device=score.device) < places
    return torch.zeros_like(valid).index_copy_(0, order, chosen)


def _pack(chosen: Tensor) -> tuple[Tensor, Tensor]:
    index, count = torch.arange(chosen.numel(), device=chosen.device), chosen.sum().reshape(1)
    order = torch.argsort(chosen, descending=True, stable=True)  # the chosen rows, ascending; then what is left over
    inside = index < count
    hole = inside > chosen
    rank = hole.cumsum(0)  # the last of the chosen rows fill the holes, in order
    source = torch.where(hole, order[rank + (count - rank[-1:] - 1)], index)
    return torch.where(inside, source, -1), count


for _name, _function in (("segment_reduce", _segment_reduce), ("top_alpha", _top_alpha), ("pack", _pack)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("paw_kernels::segment_reduce")
def _(values, offsets, mean):
    return values.new_empty(offsets.shape[0] - 1)


@torch.library.register_fake("paw_kernels::top_alpha")
def _(score, valid, alpha):
    return torch.empty_like(valid)


@torch.library.register_fake("paw_kernels::pack")
def _(chosen):
    return chosen.new_empty(chosen.shape[0], dtype=torch.int64), chosen.new_empty(1, dtype=torch.int64)


def _check_vector(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dim() != 1 or tensor.dtype != dtype:
        raise ValueError(f"{name} must be one-dimensional {dtype}, got shape {list(tensor.shape)}, {tensor.dtype}")


def _check_segments(values: Tensor, offsets: Tensor) -> None:
    _check_vector("values", values, torch.float32)
    _check_vector("offsets", offsets, torch.int64)
    if offsets.numel() == 0 or offsets.device != values.device:
        raise ValueError(
            f"offsets must have at least one element, on {values.device} as values has; "
            f"got shape {list(offsets.shape)} on {offsets.device}"
        )
    T = values.numel()
    ends = (offsets[0] != 0) | (offsets[-1] != T)
    raise_first(
        {
            f"offsets must go from 0 to {T}, the number of values": ends,
            "offsets must not fall": (offsets.diff() < 0).any(),
        }
    )
