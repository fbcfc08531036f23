"""The chunk loop of every backend: logits, statistics and gradients of some rows at a time.

For each chunk of n rows, a backend (`Rows`) fills its single [n, V] buffer with logits and returns
their statistics. These give the coefficients a and c of each row. The backend then turns the buffer
into dL/dz of the rows that have a gradient, packed to the front. Only these rows enter the two
gradient matmuls. If f is their share, this takes 1 + 2f matmul passes.

Memory besides inputs and results: the backend's buffer, whose size does not grow with T.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paw_kernels._checks import Values
from paw_kernels._native import claim_memory, pack


class Head(NamedTuple):
    """The inputs that determine the logits of one pass, as in `token_stats`."""

    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    entropy: bool = True
    """Whether the rows' entropy is needed. If not, a backend may skip it."""


class HeadPass(NamedTuple):
    """Results of one pass over N chosen rows. Gradients that were not asked for are None."""

    logp: Tensor
    """[N] float32."""
    entropy: Tensor
    """[N] float32, nats."""
    d_hidden: Tensor | None
    """[T, D] of `gradient_dtype`. Exactly 0 on rows that were not chosen or have coefficients 0."""
    d_weight: Tensor | None
    """[V, D] of `gradient_dtype`, summed in float32."""
    d_bias: Tensor | None
    """[V] of `gradient_dtype`, summed in float32."""
    has_gradient: Tensor | None = None
    """[N] bool: rows whose gradient is not zero; None without coefficients."""


class Rows(Protocol):
    """A backend's operations on the [n, V] buffer of one chunk.

    One object serves one pass and holds the buffer.
    """

    head: Tensor
    """[V, D]: the weight in the form that the gradient matmuls read."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logp and entropy [n] float32 for x [n, D]. The logits are kept for `gradient`."""
        ...

    def gradient(self, target: Tensor, source: Tensor, a: Tensor, c: Tensor | None) -> Tensor:
        """Return dL/d(W h + b) of rows `source` ([L] int64 into the chunk): [L, V], dtype of head.

        `source` comes from `pack`. target, a and c cover the whole chunk. It may overwrite the
        buffer.
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
    """Compute statistics and gradients of some rows of hidden in one pass.

    The rows are `index` ([N] int64, distinct; None for all). `coefficients` is called once for each
    chunk, in order. `wants` says which gradients to form, of hidden, weight and bias. `values` are
    the checks of the targets, which raise when the host first waits for the device.
    """
    values = values or Values(target, head.weight.shape[0])
    N = len(hidden) if index is None else index.numel()
    logp = torch.empty(N, dtype=torch.float32, device=hidden.device)
    entropy = torch.empty(N, dtype=torch.float32, device=hidden.device)
    row_has_gradient = None
    if coefficients is not None:
        row_has_gradient = torch.empty(N, dtype=torch.bool, device=hidden.device)
    gradients = _Gradients(hidden, head, index, wants, values)

    def run_chunk(rows: Rows, chunk: slice, *, only_chunk: bool) -> None:
        position = chunk if index is None else index[chunk]
        x = hidden[position].to(rows.head.dtype)
        y = values.target[position]
        logp[chunk], entropy[chunk] = rows.forward(x, y)
        if coefficients is None or row_has_gradient is None:
            return
        a, c = coefficients(chunk, logp[chunk], entropy[chunk])
        row_has_gradient[chunk] = has_gradient(a, c)
        if any(wants):
            gradients.add(
                rows, x, y, position, a, c, row_has_gradient[chunk], only_chunk=only_chunk
            )

    with torch.autocast(hidden.device.type, enabled=False):
        rows, step = make_rows(head, N, any(wants))
        for start in range(0, N, step):
            run_chunk(rows, slice(start, min(start + step, N)), only_chunk=step >= N)
    gradients.fill_missing()
    values.read()
    # The backend's buffer and the rounded dW never exist together beside a float32 dW.
    del rows
    d_weight, d_bias = gradients.rounded()
    return HeadPass(logp, entropy, gradients.d_hidden, d_weight, d_bias, row_has_gradient)


class _Gradients:
    """Sums dL/dhidden, dL/dweight and dL/dbias over the chunks of a pass, or None if unwanted."""

    def __init__(
        self,
        hidden: Tensor,
        head: Head,
        index: Tensor | None,
        wants: Sequence[bool],
        values: Values,
    ) -> None:
        self._head = head
        self._values = values
        self._in_float16 = hidden.dtype == torch.float16
        self._every_row = index is None
        """Whether the chunks cover all rows of hidden, in order."""
        self._dtype = gradient_dtype(hidden.dtype)
        self._wants_weight = wants[1]
        self.d_hidden: Tensor | None = None
        if wants[0]:
            self.d_hidden = torch.empty(hidden.shape, dtype=self._dtype, device=hidden.device)
            if not self._every_row:
                self.d_hidden.zero_()
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None
        if wants[2]:
            self.d_bias = torch.zeros(
                head.weight.shape[0], dtype=torch.float32, device=hidden.device
            )

    def add(
        self,
        rows: Rows,
        x: Tensor,
        target: Tensor,
        position: slice | Tensor,
        a: Tensor,
        c: Tensor | None,
        live: Tensor,
        *,
        only_chunk: bool,
    ) -> None:
        """Add a chunk: x [n, D] and its targets [n], located at `position` in hidden.

        `live` rows have a gradient.
        """
        unit = None
        if self._in_float16:
            a, c, unit = in_units(a, c, self._head.temperature)
        source, length = pack(live)
        # This waits for the device, because the shapes of the matmuls depend on the number of live
        # rows.
        largest = 1.0
        if unit is None:
            (count,) = self._values.read(length)
        else:
            count, largest = self._values.read(length, unit.max().reshape(1))
        source = source[: int(count)]
        dense = int(count) == len(target)  # all rows of the chunk, in order
        if self.d_hidden is not None and isinstance(position, slice) and not dense:
            self.d_hidden[position] = 0
        if source.numel() == 0:
            return

        if unit is not None and not dense:
            unit = unit[source]
        dz = rows.gradient(target, source, a, c)
        if self.d_bias is not None and unit is None:
            self.d_bias += dz.sum(0, dtype=torch.float32)
        elif self.d_bias is not None and unit is not None:
            self.d_bias += total_of(dz, unit, largest)
        if self.d_hidden is not None:
            self._add_hidden(self.d_hidden, dz, rows.head, position, source, unit, dense=dense)
        if self._wants_weight:
            self._add_weight(dz, x if dense else x[source], unit, largest, only_chunk=only_chunk)

    def _add_hidden(
        self,
        d_hidden: Tensor,
        dz: Tensor,
        weight: Tensor,
        position: slice | Tensor,
        source: Tensor,
        unit: Tensor | None,
        *,
        dense: bool,
    ) -> None:
        """Write dz @ weight to the rows `source` (all of them if `dense`) of the chunk at `position`."""
        if dense and isinstance(position, slice) and unit is None and dz.dtype == self._dtype:
            torch.mm(dz, weight, out=d_hidden[position])
            return
        product = dz @ weight if unit is None else float32_product(dz, weight) * unit[:, None]
        rows = source + position.start if isinstance(position, slice) else position[source]
        d_hidden.index_copy_(0, rows, product.to(self._dtype))

    def _add_weight(
        self, dz: Tensor, x: Tensor, unit: Tensor | None, largest: float, *, only_chunk: bool
    ) -> None:
        if unit is not None:
            # Scale each row by its share of the largest unit, which fits float16.
            x = (x * (unit / largest)[:, None]).to(x.dtype)
        is_first = self.d_weight is None
        if self.d_weight is None:
            # The first product overwrites the accumulator, so this head-sized tensor is neither
            # zeroed nor read. A single chunk needs no float32 accumulator.
            dtype = torch.float32
            if only_chunk and dz.dtype == self._dtype:
                dtype = self._dtype
            self.d_weight = claim_memory(
                torch.empty(self._head.weight.shape, dtype=dtype, device=dz.device)
            )
        _add_product(self.d_weight, dz.t(), x, add=not is_first, factor=largest)

    def fill_missing(self) -> None:
        """Set dW to zero if no row had a gradient."""
        if self._wants_weight and self.d_weight is None:
            weight = self._head.weight
            self.d_weight = torch.zeros(weight.shape, dtype=self._dtype, device=weight.device)

    def rounded(self) -> tuple[Tensor | None, Tensor | None]:
        """Return dW and db in the dtype of gradients."""
        dtype = gradient_dtype(self._head.weight.dtype)
        d_weight = self.d_weight
        if d_weight is not None:
            d_weight = d_weight.to(dtype)
        d_bias = self.d_bias
        if d_bias is not None:
            d_bias = d_bias.to(dtype)
        return d_weight, d_bias


def chunk_bytes(usual: int, device: torch.device, most: int = 0) -> int:
    """Return the bytes that a chunk may take.

    This is `usual`. On a GPU it is an eighth of the free memory if that is more, up to `most`, but
    never over half of the free memory. Together with a backend's CHUNK_BYTES and `equal_chunks`,
    this determines the chunks and so the order of sums.
    """
    if device.type != "cuda":
        return usual
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return max(1, min(max(usual, min(most, free // 8)), free // 2))


def equal_chunks(N: int, most: int) -> int:
    """Return the rows of a chunk if N rows form the fewest equal chunks of at most `most` rows.

    Chunks are equal because a short last chunk costs as much traffic for dW as a full one.
    """
    chunks = max(1, -(-N // most))
    return max(1, -(-N // chunks))


def has_gradient(a: Tensor, c: Tensor | None) -> Tensor:
    """Return bool: rows whose gradient is not zero. NaN counts as not zero."""
    if c is None:
        return a != 0
    return (a != 0) | (c != 0)


def rows_of(tensor: Tensor | None, rows: slice | Tensor) -> Tensor | None:
    """Return those rows of a tensor, or None if there is no tensor."""
    return None if tensor is None else tensor[rows]


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gradients before the upstream factor, for inputs of `dtype`.

    float16 (6e-8 to 65,504) can hold neither sums nor a token's weight.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def in_units(
    a: Tensor, c: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return a and c in units [n], one for each row, in which dL/dz fits float16, and the units.

    |dz| <= (|a| + |c| ln V) / temperature, at most 16,384 units if ln V < 16. The smallest value is
    6e-8 units, so p counts from 6e-11 up, whatever the weight, advantage and temperature.
    """
    size = a.abs()
    if c is not None:
        size = size + c.abs()
    unit = size / (1024 * temperature)
    unit.clamp_(min=torch.finfo(torch.float32).tiny)
    if c is not None:
        c = c / unit
    return a / unit, c, unit


def total_of(dz: Tensor, unit: Tensor, largest: float) -> Tensor:
    """Return sum_r unit_r dz_r in float32, without a float32 copy of dz [L, V]."""
    return float32_product((unit / largest)[None].to(dz.dtype), dz)[0] * largest


def logits(x: Tensor, head: Tensor, out: Tensor) -> Tensor:
    """Write x head^T in float32 to the first rows of `out` and return them."""
    return float32_product(x, head.t(), out[: x.shape[0]])


def float32_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    if left.dtype == torch.float32:
        return torch.mm(left, right, out=out)
    return torch.mm(left, right, out_dtype=torch.float32, out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, add: bool, factor: float) -> None:
    """Set total = factor left @ right, or with `add` total += that.

    It sums in float32 and writes in the dtype of total.
    """
    beta = int(add)  # with beta 0, the old content is not read
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=beta, alpha=factor, out=total)
    else:
        torch.addmm(total, left, right, beta=beta, alpha=factor, out_dtype=torch.float32, out=total)
