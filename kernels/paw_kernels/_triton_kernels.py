"""Triton kernels of the fused head: logits a tile at a time, statistics of a row, dL/dz in place.

Let u be the logits after the soft cap and before the temperature T, and scale = log2(e) / T. A tile
of ROWS x COLS logits is never written. Each of its rows leaves four float32 numbers,

    peak = max u,   total = sum e,   slant = sum e x,   chosen = u at the target, else 0,   where x = (u - peak) scale,

and, for passes with gradients, the row of e = 2^x in (0, 1] in the dtype of the inputs. The
difference in x is taken before scaling, so x is exactly 0 at the peak, and total >= 1 and slant <=
0 in any rounding. With M the largest peak of a row over its tiles, shift = (peak - M) scale <= 0
and S = sum 2^shift total,

    log2 p_y = (u_y - M) scale - log2 S,   H / ln 2 = log2 S - sum 2^shift (slant + shift total) / S

add terms of one sign, so nothing cancels, log p <= 0 and H >= 0. p_j = e_j 2^(shift - log2 S), so
rounding e gives a relative error of p_j, whatever the size of the logits (logits rounded to
bfloat16 would be off by 6 % in p at |z| = 16). At the peak e is exactly 1, so 1 - p of a sure
token, which is its whole gradient, has no rounding error of e. The derivative of a soft cap is 1 -
(u / softcap)^2 with u = peak + log2(e) / scale. For the target, u comes from its log p if its e has
vanished or has 16 bits (LOSSY).

Every sum has a fixed order and nothing is atomic, so results repeat bit for bit. `tl.max` skips
NaN, but e is still NaN there, and so is every sum of the row.
"""

# Triton's type annotations are meant for host code. Inside a kernel, constexpr and range mean
# something else.
# pyrefly: ignore-errors

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

TRUNCATES = tl.constexpr(knobs.runtime.interpret)
LN2 = tl.constexpr(0.6931471805599453)
# The logit used for columns beyond V and for -inf. It is finite, because otherwise e x would be 0 *
# inf = NaN.
OUTSIDE = tl.constexpr(-1e30)
FAR = tl.constexpr(-1e20)  # the smallest log2 of e, so that a sum of e times it is finite
SMALLEST = tl.constexpr(1e-30)  # for logarithms; a subnormal would be flushed to 0 on the GPU


@triton.jit
def _narrowed(x, dtype: tl.constexpr):
    """Return x in the dtype in which it is stored.

    The interpreter truncates float32 to bfloat16, while a GPU rounds to even. Truncation has twice
    the error.
    """
    if TRUNCATES and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(dtype)


# Registers spill if too much of a tile is alive at once. So the target's logit is taken first, and
# after that u is needed only minus its peak.


@triton.jit
def _tanh(x):
    """tanh to about 4 ulp. It uses a polynomial where 1 - 2 / (1 + exp(2 x)) would cancel."""
    square = x * x
    p = 1.643756359e-2 * square - 5.267180450e-2
    p = p * square + 1.332072492e-1
    p = p * square - 3.333294663e-1
    return tl.where(
        square < 0.3025, x * square * p + x, 1 - 2 / (1 + tl.exp2(2.885390081777927 * x))
    )


@triton.jit
def _logits(u, first, target, bias, softcap, V, WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    """Return WIDTH columns from `first`, with bias and soft cap, and the target's logit or 0.

    Columns beyond V are masked. Few tiles hold the target of one of their rows, and only the last
    has columns beyond V. The others skip that work.
    """
    cols = first + tl.arange(0, WIDTH)
    if bias is not None:
        u += tl.load(bias + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
        u = tl.maximum(u, OUTSIDE, propagate_nan=tl.PropagateNan.ALL)
    if softcap is not None:
        u = softcap * _tanh(u * (1 / softcap))
    if RAGGED:  # noqa: SIM102 (a constant, then a branch)
        if first + WIDTH > V:
            u = tl.where((cols < V)[None, :], u, OUTSIDE)
    chosen = tl.zeros((u.shape[0],), tl.float32)
    if tl.max(((target >= first) & (target < first + WIDTH)).to(tl.int32), 0) > 0:
        chosen = tl.sum(tl.where(cols[None, :] == target[:, None], u, 0.0), 1)
    return u, chosen


@triton.jit
def _powers(
    u,
    peak,
    first,
    row,
    row_ok,
    e,
    width,
    V,
    scale,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Store e of WIDTH columns and return their (total, slant). slant is 0 without ENTROPY."""
    x = (u - peak[:, None]) * scale
    power = tl.exp2(x)
    total = tl.sum(power, 1)
    slant = tl.sum(power * x, 1) if ENTROPY else tl.zeros_like(total)
    if e is not None:
        if TMA:
            e.store([row, first], _narrowed(power, e.dtype))
        else:
            rows = row + tl.arange(0, u.shape[0])
            cols = first + tl.arange(0, WIDTH)
            address = e + rows.to(tl.int64)[:, None] * width + cols[None, :]
            tl.store(
                address,
                _narrowed(power, e.dtype.element_ty),
                mask=row_ok[:, None] & (cols < V)[None, :],
            )
    return total, slant


@triton.jit
def _product(
    x,
    w,
    row,
    col,
    n,
    V,
    D: tl.constexpr,
    w_row,
    w_col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return x @ w^T [ROWS, COLS] float32 of the tile that begins at (row, col)."""
    acc = tl.zeros((ROWS, COLS), tl.float32)
    if TMA:
        for k in range(0, D, DEPTH):
            left = x.load([row, k])
            right = w.load([col, k])
            if INTERPRETED:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            acc = tl.dot(left, right.T, acc, input_precision=PRECISION)
    else:
        # Rows and columns outside repeat the last one, so only a ragged D needs masks.
        rows = row + tl.arange(0, ROWS)
        ks = tl.arange(0, DEPTH)
        cols = tl.minimum(col + tl.arange(0, COLS), V - 1)
        left_at = x + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * D + ks[None, :]
        right_at = w + cols.to(tl.int64)[None, :] * w_row + ks[:, None] * w_col
        for k in range(0, D, DEPTH):
            if D % DEPTH == 0:
                left = tl.load(left_at)
                right = tl.load(right_at)
            else:
                left = tl.load(left_at, mask=(k + ks < D)[None, :], other=0.0)
                right = tl.load(right_at, mask=(k + ks < D)[:, None], other=0.0)
            if INTERPRETED:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
            left_at += DEPTH
            right_at += DEPTH * w_col
    return acc


@triton.jit
def _statistics(
    acc,
    e,
    bias,
    target,
    row,
    col,
    row_ok,
    width,
    V,
    scale,
    softcap,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HALVES: tl.constexpr,
    TMA: tl.constexpr,
    RAGGED: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Store e of a tile and return (peak, total, slant, chosen) of each row."""
    rows = row + tl.arange(0, ROWS)
    y = tl.load(target + rows, mask=row_ok, other=-1).to(tl.int32)
    if HALVES:
        half: tl.constexpr = COLS // 2
        a, b = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, half)), (0, 2, 1)))
        a, chosen = _logits(a, col, y, bias, softcap, V, half, RAGGED)
        b, chosen_b = _logits(b, col + half, y, bias, softcap, V, half, RAGGED)
        peak = tl.maximum(tl.max(a, 1), tl.max(b, 1))
        total, slant = _powers(a, peak, col, row, row_ok, e, width, V, scale, half, TMA, ENTROPY)
        total_b, slant_b = _powers(
            b, peak, col + half, row, row_ok, e, width, V, scale, half, TMA, ENTROPY
        )
        total += total_b
        slant += slant_b
        chosen += chosen_b
    else:
        acc, chosen = _logits(acc, col, y, bias, softcap, V, COLS, RAGGED)
        peak = tl.max(acc, 1)
        total, slant = _powers(acc, peak, col, row, row_ok, e, width, V, scale, COLS, TMA, ENTROPY)
    return peak, total, slant, chosen


@triton.jit(do_not_specialize=["n"])
def forward_kernel(
    x,
    w,
    e,
    bias,
    target,
    partial,
    n,
    V,
    D: tl.constexpr,
    scale,
    softcap,
    w_row,
    w_col,
    width,
    capacity,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    RAGGED: tl.constexpr,
    ENTROPY: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute statistics `partial` and e [n, V] of x [n, D] @ w [V, D]^T + bias [V].

    `partial` is [V / COLS, capacity, 4] (peak, slant, total, chosen). With TMA, x and w (and e) are
    tensor descriptors, else pointers (x contiguous). bias, softcap and e may be None. A fixed
    number of programs shares the tiles. GROUP tiles of rows go through the vocabulary together, so
    that all of them read a tile of w from the L2 cache. HALVES handles a tile's columns in two
    steps, which needs fewer registers.
    """
    row_tiles = tl.cdiv(n, ROWS)
    col_tiles = tl.cdiv(V, COLS)
    first = tl.program_id(0)
    tiles = row_tiles * col_tiles
    programs = tl.num_programs(0)
    for tile in tl.range(first, tiles, programs, flatten=FLATTEN, warp_specialize=SPECIALIZE):
        group = tile // (GROUP * col_tiles)
        inside = tile % (GROUP * col_tiles)
        size = min(row_tiles - group * GROUP, GROUP)
        block = inside // size
        row = (group * GROUP + inside % size) * ROWS
        col = block * COLS
        rows = row + tl.arange(0, ROWS)
        row_ok = rows < n

        acc = _product(
            x,
            w,
            row,
            col,
            n,
            V,
            D,
            w_row,
            w_col,
            ROWS,
            COLS,
            DEPTH,
            TMA,
            PRECISION,
            INTERPRETED,
        )
        peak, total, slant, chosen = _statistics(
            acc,
            e,
            bias,
            target,
            row,
            col,
            row_ok,
            width,
            V,
            scale,
            softcap,
            ROWS,
            COLS,
            HALVES,
            TMA,
            RAGGED,
            ENTROPY,
        )
        # One 16-byte store per row: [ROWS, 2, 2] with the last index fastest.
        statistics = tl.reshape(tl.join(tl.join(peak, total), tl.join(slant, chosen)), (ROWS, 4))
        address = (
            partial + (block.to(tl.int64) * capacity + rows)[:, None] * 4 + tl.arange(0, 4)[None, :]
        )
        tl.store(address, statistics, mask=row_ok[:, None])


@triton.jit(do_not_specialize=["n"])
def merge_kernel(partial, result, n, P, capacity, scale, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Merge partial [P, capacity, 4] into result [4, capacity].

    The result is (log p of the target, entropy, M, log2 S). Rows in which every logit is -inf are
    NaN. So is log p of a target whose logit is -inf.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = rows < n
    peak = tl.full((ROWS,), OUTSIDE, tl.float32)
    for first in range(0, P, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        address = partial + (blocks.to(tl.int64)[:, None] * capacity + rows[None, :]) * 4
        block_peak = tl.load(address, mask=(blocks < P)[:, None] & row_ok[None, :], other=OUTSIDE)
        peak = tl.maximum(peak, tl.max(block_peak, 0))
    total = tl.where(row_ok, 0.0, 1.0)
    slant = tl.zeros((ROWS,), tl.float32)
    chosen = tl.zeros((ROWS,), tl.float32)
    for first in range(0, P, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        address = partial + (blocks.to(tl.int64)[:, None] * capacity + rows[None, :]) * 4
        is_inside = (blocks < P)[:, None] & row_ok[None, :]
        shift = tl.where(
            is_inside,
            tl.maximum((tl.load(address, mask=is_inside, other=0.0) - peak[None, :]) * scale, FAR),
            0.0,
        )
        part_slant = tl.load(address + 1, mask=is_inside, other=0.0)
        part_total = tl.load(address + 2, mask=is_inside, other=0.0)
        factor = tl.exp2(shift)
        total += tl.sum(factor * part_total, 0)
        slant += tl.sum(factor * (part_slant + shift * part_total), 0)
        chosen += tl.sum(tl.load(address + 3, mask=is_inside, other=0.0), 0)
    log_total = tl.where(peak <= OUTSIDE, float("nan"), tl.log2(total))
    log_chosen = tl.where(chosen <= OUTSIDE, -float("inf"), (chosen - peak) * scale)
    out = result + rows
    tl.store(out, (log_chosen - log_total) * LN2, mask=row_ok)
    tl.store(out + capacity, (log_total - slant / total) * LN2, mask=row_ok)
    tl.store(out + 2 * capacity, peak, mask=row_ok)
    tl.store(out + 3 * capacity, log_total, mask=row_ok)


@triton.jit
def gradient_kernel(
    e,
    partial,
    result,
    target,
    source,
    a,
    c,
    width,
    P,
    capacity,
    scale,
    inverse_temperature,
    softcap,
    COLS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOSSY: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Replace row k of e by dL/d(W h + b) of row source[k].

    The gradient is (a (1[j = y] - p_j) - c p_j (log p_j + H)) / T. With a soft cap, this is
    multiplied by 1 - (u / softcap)^2.

    A program owns BLOCKS tiles of COLS columns of one row k. Programs do not conflict, because no
    row reads a row that is overwritten (`_native.pack`). A program is safe in itself, because each
    thread loads and stores the same elements. `width` is V plus the row's padding, whose content is
    never used. A mask by V would prevent wide loads for odd vocabularies. c and softcap may be
    None.
    """
    spans = tl.cdiv(width, BLOCKS * COLS)
    k = tl.program_id(0) // spans
    first = (tl.program_id(0) % spans) * BLOCKS
    row = tl.load(source + k)
    blocks = first + tl.arange(0, BLOCKS)
    cols = blocks[:, None] * COLS + tl.arange(0, COLS)[None, :]
    peak = tl.load(
        partial + (blocks.to(tl.int64) * capacity + row) * 4, mask=blocks < P, other=OUTSIDE
    )
    shift = (peak - tl.load(result + 2 * capacity + row)) * scale - tl.load(
        result + 3 * capacity + row
    )
    shift = tl.maximum(shift, FAR, propagate_nan=tl.PropagateNan.ALL)
    power = tl.load(e + row * width + cols, mask=cols < width, other=0.0).to(tl.float32)

    p = power * tl.exp2(shift)[:, None]
    at_target = tl.load(a + row) * inverse_temperature
    slope = at_target
    if (c is not None) | (softcap is not None):
        power = tl.maximum(power, SMALLEST)
        # This is one instruction with an error of 2^-22. The exact version has 25 and would take
        # longer than the memory accesses.
        log_power = tl.log2(power) if INTERPRETED else libdevice.fast_log2f(power)
    if c is not None:
        offset = shift * LN2 + tl.load(result + capacity + row)
        slope += tl.load(c + row) * inverse_temperature * (log_power * LN2 + offset[:, None])
    chosen = cols == tl.load(target + row).to(tl.int32)
    dz = tl.where(chosen, at_target, 0.0) - p * slope
    if softcap is not None:
        to_logit = 1 / scale
        highest = tl.load(result + 2 * capacity + row)
        # log2 of e relative to M.
        log_chosen = tl.load(result + row) / LN2 + tl.load(result + 3 * capacity + row)
        chosen &= LOSSY | (power <= SMALLEST)
        near = tl.where(chosen, highest, peak[:, None])
        below = tl.where(chosen, log_chosen, log_power) * to_logit
        # u = near + below, but the sum is never formed, because softcap - near is exact where the
        # cap saturates.
        dz *= ((softcap - near) - below) * ((softcap + near) + below) * (1 / (softcap * softcap))
    out = e + k.to(tl.int64) * width + cols
    tl.store(out, _narrowed(dz, e.dtype.element_ty), mask=cols < width)
