"""Tests whether a backend is correct on this machine, and measures how long it takes.

`paw doctor --kernels` and the first use of a compiled backend on a GPU call it.
"""

import time
from functools import partial

import torch
from torch import Tensor

from paw_kernels._head import Head, HeadPass, MakeRows, Rows, head_pass, rows_of

FLOOR = 1e-4
"""Error that is always allowed, however small plain torch's is. Relative to numbers below 1."""


class _Problem:
    """Random inputs of one pass on `device`.

    Half of the rows have no gradient, like masked tokens.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, n: int, V: int, D: int, *, full: bool
    ) -> None:
        """`full` adds bias, temperature and a gradient of the entropy, for which kernels have
        separate code."""
        generator = torch.Generator(device).manual_seed(0)
        randn = partial(torch.randn, generator=generator, device=device, dtype=torch.float32)
        self.hidden = (2 * randn(n, D)).to(dtype)
        weight = randn(V, D).div_(D**0.5).to(dtype)
        bias = randn(V).to(dtype)
        self.head = Head(weight, None, temperature=1.0, softcap=None)
        if full:
            self.head = Head(weight, bias, temperature=0.7, softcap=None)
        self.target = torch.randint(V, (n,), generator=generator, device=device)
        self.target[-1] = V - 1

        live = torch.rand(n, generator=generator, device=device) < 0.5
        self.a = randn(n) * live
        self.c = None
        if full:
            self.c = 0.3 * randn(n) * live

    def run(self, make_rows: MakeRows, *, gradients: bool = True) -> HeadPass:
        def coefficients(rows: slice, *_: object) -> tuple[Tensor, Tensor | None]:
            return self.a[rows], rows_of(self.c, rows)

        return head_pass(
            make_rows,
            self.hidden,
            self.head,
            self.target,
            index=torch.arange(len(self.target), device=self.target.device),
            coefficients=coefficients if gradients else None,
            wants=[gradients, gradients, gradients and self.head.bias is not None],
        )

    def dense(self, dtype: torch.dtype) -> list[Tensor]:
        """Run the pass in plain torch with full logits of `dtype`.

        Returns logp, entropy, dhidden, dweight and dbias.
        """
        hidden = self.hidden.to(dtype)
        weight = self.head.weight.to(dtype)
        z = hidden @ weight.t()
        if self.head.bias is not None:
            z += self.head.bias.to(dtype)
        log_p = (z / self.head.temperature).log_softmax(1)
        p = log_p.exp()
        is_target = torch.nn.functional.one_hot(self.target, len(weight)).to(dtype)
        logp = (is_target * log_p).sum(1)
        entropy = -(p * log_p).sum(1)

        dz = self.a.to(dtype)[:, None] * (is_target - p)
        if self.c is not None:
            dz -= self.c.to(dtype)[:, None] * p * (log_p + entropy[:, None])
        dz /= self.head.temperature
        return [logp, entropy, dz @ weight, dz.t() @ hidden, dz.sum(0)]


@torch.no_grad()
def largest_error(
    make_rows: MakeRows, device: torch.device, dtype: torch.dtype, n: int, V: int, D: int
) -> float:
    """Return the largest error against float64 as a share of the allowed one.

    A backend is correct if this is at most 1. It is NaN if a result is NaN. The allowed error is
    twice that of plain torch in that dtype, plus FLOOR. For log-probabilities and entropies, which
    are always float32, plain torch in float32 is the reference. Gradients are formed twice: in as
    few chunks as the backend takes, and in two.
    """
    shares: list[Tensor] = []
    with torch.autocast(device.type, enabled=False):
        for full in (False, True):
            problem = _Problem(device, dtype, n, V, D, full=full)
            exact = problem.dense(torch.float64)
            in_dtype = problem.dense(dtype)
            in_float32 = problem.dense(torch.float32)
            in_torch = in_float32[:2] + in_dtype[2:]
            for result in (
                problem.run(make_rows),
                problem.run(partial(_in_two_chunks, make_rows)),
                problem.run(make_rows, gradients=False),
            ):
                for value, exact_value, torch_value in zip(
                    result[:5], exact, in_torch, strict=True
                ):
                    if value is not None:
                        shares.append(_share_of_allowed(value, exact_value, torch_value))
    return float(torch.stack(shares).max())


def _in_two_chunks(make_rows: MakeRows, head: Head, N: int, gradients: bool) -> tuple[Rows, int]:
    """Make the backend's rows, for chunks of at most half of the N rows.

    With several chunks, dW is summed in float32, which a single chunk does not do.
    """
    rows, step = make_rows(head, N, gradients)
    return rows, min(step, max(1, -(-N // 2)))


def _share_of_allowed(value: Tensor, exact: Tensor, torch_value: Tensor) -> Tensor:
    """Return `value`'s largest error over the allowed one. `torch_value` is plain torch's."""
    allowed = 2 * (torch_value - exact).abs().max() + FLOOR * exact.abs().max().clamp(max=1)
    return (value - exact).abs().max() / allowed


@torch.no_grad()
def milliseconds(
    make_rows: MakeRows,
    device: torch.device,
    dtype: torch.dtype,
    n: int,
    V: int,
    D: int,
    *,
    seconds: float = 2.0,
) -> float:
    """Return the median time of a forward and backward pass over n rows of a [V, D] head.

    After one pass that is not timed, it times as many as fit in `seconds`, at least one.
    """
    problem = _Problem(device, dtype, n, V, D, full=False)
    problem.run(make_rows)
    pass_seconds: list[float] = []
    while sum(pass_seconds) < seconds:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        problem.run(make_rows)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        pass_seconds.append(time.perf_counter() - start)
    return 1000 * sorted(pass_seconds)[len(pass_seconds) // 2]
