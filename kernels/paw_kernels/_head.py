"""The chunk loop of every backend: logits, statistics and gradients of some rows at a time, 1 + 2f matmul passes.

Per chunk of n rows a backend (`Rows`) fills its one [n, V] buffer with logits and returns their statistics; from
these come the coefficients a and c of each row, and the backend turns the buffer into dL/dz of the rows that have a
gradient, packed to its front. Only those reach the two gradient matmuls; f is their share.

Memory beside inputs and results: the backend's buffer, flat in T.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paw_kernels._checks import Values
from paw_kernels._native import claimed, pack


class Head(NamedTuple):
    """What the logits of one pass are made of; as in `token_stats`."""

    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    entropy: bool = True
    """Of the rows; a backend may leave it out where False."""


class HeadPass(NamedTuple):
    """Results of one pass over N chosen rows; gradients are None where not asked for."""

    logp: Tensor
    """[N] float32."""
    entropy: Tensor
    """[N] float32, nats."""
    d_hidden: Tensor | None
    """[T, D] of `gradient_dtype`; exactly 0 on rows that were not chosen or whose coefficients are 0."""
    d_weight: Tensor | None
    """[V, D] of `gradient_dtype`, summed in float32."""
    d_bias: Tensor | None
    """[V] of `gradient_dtype`, summed in float32."""
    has_gradient: Tensor | None = None
    """[N] bool: rows whose gradient is not zero; None without coefficients."""


class Rows(Protocol):
    """What a backend does with the [n, V] buffer of one chunk. One object serves one pass and holds the buffer."""

    head: Tensor
    """[V, D]: the weight as the gradient matmuls read it."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """logp and entropy [n] float32 of the logits of x [n, D], which are kept for `gradient`."""
        ...

    def gradient(self, target: Tensor, source: Tensor, a: Tensor, c: Tensor | None) -> Tensor:
        """dL/d(W h + b) of the rows `source` ([L] int64 into the chunk) as [L, V] in the dtype of head.

        `source` comes from `pack`; target, a and c are those of the whole chunk. May overwrite the buffer.
        """
        ...


Coefficients = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(rows of a chunk, their logp, entropy) -> a = dL/dlogp and c = dL/dentropy, [n] float32, c None for all zeros."""

MakeRows = Callable[[Head, int, bool], tuple[Rows, int]]
"""(head, N, with gradients?) -> the backend's rows and the number of rows of a chunk."""


def head_pass(
    make_rows: MakeRows,
    hidden: Tensor,
    head: Head,
    target: Tensor,
    index: Tensor | None,
    coefficients: Coefficients | None = None,
    wants: Sequence[bool] = (False, False, False),
    values: Values | None = None,
) -> HeadPass:
    """Statistics of the rows `index` ([N] int64, distinct; None for all) of hidden, and their gradients in one pass.

    `coefficients` is called once a chunk, in order; `wants` says which gradients to form: of hidden, weight, bias.
    `values` of the targets are read, and raise, where the host waits first.
    """
    values = values or Values(target, head.weight.shape[0])
    target = values.target
    sums = _chunks(make_rows, hidden, head, target, index, coefficients, wants, values)
    values.read()
    # Rounded only now that the backend's buffer is gone: beside a float32 dW the larger of the two counts, not both.
    d_weight, d_bias = (None if d is None else d.to(gradient_dtype(head.weight.dtype)) for d in sums[3:5])
    return sums._replace(d_weight=d_weight, d_bias=d_bias)


def _chunks(
    make_rows: MakeRows,
    hidden: Tensor,
    head: Head,
    target: Tensor,
    index: Tensor | None,
    coefficients: Coefficients | None,
    wants: Sequence[bool],
    values: Values,
) -> HeadPass:
    """dW and db as they were summed."""
    weight, N, device = head.weight, len(hidden) if index is None else index.numel(), hidden.device
    dtype = gradient_dtype(hidden.dtype)
    logp, entropy = (torch.empty(N, dtype=torch.float32, device=device) for _ in range(2))
    live = None if coefficients is None else torch.empty(N, dtype=torch.bool, device=device)
    d_hidden = torch.empty(hidden.shape, dtype=dtype, device=device) if wants[0] else None
    if d_hidden is not None and index is not None:
        d_hidden.zero_()
    d_weight: Tensor | None = None
    d_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=device) if wants[2] else None

    with torch.autocast(device.type, enabled=False):
        rows, step = make_rows(head, N, any(wants))
        for start in range(0, N, step):
            chunk = slice(start, min(start + step, N))
            at = chunk if index is None else index[chunk]
            x, y = hidden[at].to(rows.head.dtype), target[at]
            logp[chunk], entropy[chunk] = rows.forward(x, y)
            if coefficients is None or live is None:
                continue
            a, c = coefficients(chunk, logp[chunk], entropy[chunk])
            live[chunk] = found = has_gradient(a, c)
            if not any(wants):
                continue
            unit, largest = None, 1.0
            if hidden.dtype == torch.float16:
                a, c, unit = in_units(a, c, head.temperature)
            source, length = pack(found)
            # Waits for the device: the shapes of the matmuls depend on the number of rows.
            L, *most = values.read(length, *([] if unit is None else [unit.max().reshape(1)]))
            source, dense = source[: int(L)], int(L) == len(y)  # dense: all rows, in order
            if d_hidden is not None and index is None and not dense:
                d_hidden[chunk] = 0
            if source.numel() == 0:
                continue
            if unit is not None:
                unit, largest = unit if dense else unit[source], most[0]
            dz = rows.gradient(y, source, a, c)
            if d_bias is not None:
                d_bias += dz.sum(0, dtype=torch.float32) if unit is None else total_of(dz, unit, largest)
            if d_hidden is not None:
                if dense and isinstance(at, slice) and unit is None and dz.dtype == dtype:
                    torch.mm(dz, rows.head, out=d_hidden[at])
                else:
                    product = float32_product(dz, rows.head) * unit[:, None] if unit is not None else dz @ rows.head
                    place = at[source] if isinstance(at, Tensor) else source + start
                    d_hidden.index_copy_(0, place, product.to(dtype))
            if wants[1]:
                add, x = d_weight is not None, x if dense else x[source]
                if unit is not None:  # a row counts by its share of the largest unit, which fits float16 again
                    x = (x * (unit / largest)[:, None]).to(x.dtype)
                if d_weight is None:
                    # An accumulator the size of the head is neither zeroed nor read first; one chunk needs none.
                    final = step >= N and dz.dtype == dtype
                    kept = dtype if final else torch.float32
                    d_weight = claimed(torch.empty(weight.shape, dtype=kept, device=device))
                _add_product(d_weight, dz.t(), x, add=add, factor=largest)
    if wants[1] and d_weight is None:
        d_weight = torch.zeros(weight.shape, dtype=dtype, device=device)
    return HeadPass(logp, entropy, d_hidden, d_weight, d_bias, live)


def chunk_bytes(usual: int, device: torch.device, most: int = 0) -> int:
    """Bytes that one chunk may take: `usual`; on a GPU an eighth of what is free, up to `most`; never over half of it.

    With every backend's CHUNK_BYTES and `equal_chunks` this decides the chunks. Another number rounds otherwise.
    """
    if device.type != "cuda":
        return usual
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return max(1, min(max(usual, min(most, free // 8)), free // 2))


def equal_chunks(N: int, most: int) -> int:
    """Rows of a chunk when N rows are cut into the fewest chunks of at most `most`: a short last one costs as much of
    dW's traffic as a full one."""
    return max(1, -(-N // max(1, -(-N // most))))


def has_gradient(a: Tensor, c: Tensor | None) -> Tensor:
    """bool: rows whose gradient is not zero. NaN counts as one."""
    return a != 0 if c is None else (a != 0) | (c != 0)


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of gradients before the upstream factor: float16 (6e-8 to 65,504) holds neither sums nor weights of a token."""
    return torch.float32 if dtype == torch.float16 else dtype


def in_units(a: Tensor, c: Tensor | None, temperature: float) -> tuple[Tensor, Tensor | None, Tensor]:
    """a and c as multiples of a unit [n] of each row, and that unit: in these dL/dz fits float16.

    |dz| <= (|a| + |c| ln V) / temperature, at most 16,384 units where ln V < 16. The smallest value is 6e-8 units, so
    p counts from 6e-11 on, whatever weight, advantage and temperature are.
    """
    unit = (a.abs() if c is None else a.abs() + c.abs()) / (1024 * temperature)
    unit.clamp_(min=torch.finfo(torch.float32).tiny)
    return a / unit, None if c is None else c / unit, unit


def total_of(dz: Tensor, unit: Tensor, largest: float) -> Tensor:
    """sum_r unit_r dz_r in float32, without a copy of dz [L, V] in it."""
    return float32_product((unit / largest)[None].to(dz.dtype), dz)[0] * largest


def logits(x: Tensor, head: Tensor, out: Tensor) -> Tensor:
    """x head^T in float32, written to the first rows of `out`."""
    return float32_product(x, head.t(), out[: x.shape[0]])


def float32_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    if left.dtype == torch.float32:
        return torch.mm(left, right, out=out)
    return torch.mm(left, right, out_dtype=torch.float32, out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, add: bool, factor: float) -> None:
    """total = factor left @ right, or total += that, each product summed in float32 and written as total is."""
    how = {"beta": 1 if add else 0, "alpha": factor}  # with beta 0 the old content is not read
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total, **how)
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total, **how)
