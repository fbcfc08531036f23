"""Whether a backend computes on this machine what it should, and how long it takes: `paw doctor
--kernels`, and the first use of a compiled one on a GPU."""

import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from paw_kernels._head import Head, HeadPass, MakeRows, head_pass

FLOOR = 1e-4


class _Problem:
    """Random inputs of one pass on `device`.

    Half of the rows have no gradient, as masked tokens have none.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, n: int, V: int, D: int, *, full: bool
    ) -> None:
        """`full`: with bias, temperature and a gradient of the entropy, for which kernels have code of their own."""
        g = torch.Generator(device).manual_seed(0)
        randn = partial(torch.randn, generator=g, device=device, dtype=torch.float32)
        self.hidden = (2 * randn(n, D)).to(dtype)
        weight, bias = randn(V, D).div_(D**0.5).to(dtype), randn(V).to(dtype)
        self.head = Head(weight, bias, 0.7, None) if full else Head(weight, None, 1.0, None)
        self.target = torch.randint(V, (n,), generator=g, device=device)
        self.target[-1] = V - 1
        live = torch.rand(n, generator=g, device=device) < 0.5
        self.a, self.c = randn(n) * live, 0.3 * randn(n) * live if full else None

    def run(self, make_rows: MakeRows, *, gradients: bool = True) -> HeadPass:
        index = torch.arange(len(self.target), device=self.target.device)

        def coefficients(rows: slice, *_: object) -> tuple[torch.Tensor, torch.Tensor | None]:
            return self.a[rows], None if self.c is None else self.c[rows]

        wants = [gradients, gradients, gradients and self.head.bias is not None]
        return head_pass(
            make_rows,
            self.hidden,
            self.head,
            self.target,
            index,
            coefficients if gradients else None,
            wants,
        )

    def dense(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """The same in plain torch: full logits, of `dtype`."""
        h, w, a = (x.to(dtype) for x in (self.hidden, self.head.weight, self.a))
        z = h @ w.t()
        if self.head.bias is not None:
            z += self.head.bias.to(dtype)
        log_p = (z / self.head.temperature).log_softmax(1)
        p, chosen = log_p.exp(), torch.nn.functional.one_hot(self.target, len(w)).to(dtype)
        entropy = -(p * log_p).sum(1)
        yield from ((chosen * log_p).sum(1), entropy)
        dz = a[:, None] * (chosen - p)
        if self.c is not None:
            dz -= self.c.to(dtype)[:, None] * p * (log_p + entropy[:, None])
        dz /= self.head.temperature
        yield from (dz @ w, dz.t() @ h, dz.sum(0))


@torch.no_grad()
def largest_error(
    make_rows: MakeRows, device: torch.device, dtype: torch.dtype, n: int, V: int, D: int
) -> float:
    """The largest error against float64 over what it may be, twice that of plain torch in that
    dtype and 1e-4: a backend is right up to 1. NaN where a result is.

    Of log-probabilities and entropies, which are float32 whatever the inputs are, float32's. With
    numbers below 1 the 1e-4 are relative.
    """
    shares: list[Tensor] = []
    with torch.autocast(device.type, enabled=False):
        for full in (False, True):
            given = _Problem(device, dtype, n, V, D, full=full)
            exact, plain, single = (
                list(given.dense(of)) for of in (torch.float64, dtype, torch.float32)
            )
            for found in (given.run(make_rows), given.run(make_rows, gradients=False)):
                for got, want, torchs in zip(found[:5], exact, single[:2] + plain[2:], strict=True):
                    if got is not None:
                        bar = 2 * (torchs - want).abs().max() + FLOOR * want.abs().max().clamp(
                            max=1
                        )
                        shares.append((got - want).abs().max() / bar)
    return float(torch.stack(shares).max())


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
    """Median of forward and backward passes over n rows of a [V, D] head, as many as take `seconds`, one at least."""
    given, taken = _Problem(device, dtype, n, V, D, full=False), []
    given.run(make_rows)
    while sum(taken) < seconds:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        given.run(make_rows)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return 1000 * sorted(taken)[len(taken) // 2]
