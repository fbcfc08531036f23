"""What there is to measure on a device, and how one case is measured."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.kernels_measure import Times, copies, peak_bytes, times
from bench.kernels_problem import (
    HEADS,
    Problem,
    errors,
    loss_of_rows,
    passes,
    paw_loss,
    slope_of_mean,
    slope_of_rows,
)
from bench.peers import PEERS
from paw_kernels import BACKENDS, token_loss, token_stats, why_not_backend

MATMUL_ROWS = 4096
FORWARD, BOTH, STATISTICS = "forward", "forward + backward", "statistics + backward"
"""The last: log-probabilities and entropies by a function of their own, and the gradient of the former."""
Row = dict[str, object]
"""Columns of the table, by name."""


class Group(NamedTuple):
    """Cases that share their matmuls."""

    head: str
    T: int
    D: int
    V: int


class Case(NamedTuple):
    group: Group
    live: float
    dead: str
    """"" (none), "found" (by the forward) or "known" (the live rows alone, gathered)."""
    name: str
    mode: str

    def columns(self) -> Row:
        g = self.group
        where = {"head": g.head, "T": g.T, "D": g.D, "V": g.V}
        return {**where, "live": self.live, "dead": self.dead, "implementation": self.name, "mode": self.mode}

    def label(self) -> str:
        dead = f" dead {self.dead}" if self.dead else ""
        return f"{self.group.head} T {self.group.T} f {self.live:g}{dead} {self.name} {self.mode}"


def groups(device: torch.device, quick: bool) -> list[Group]:
    """The reference point first, then what matters most."""
    if device.type == "cpu":
        found = [Group("quickstart", 2048, 64, 600), Group("small", 512, 128, 32_000)]
        return found if quick else [*found, Group("Qwen2.5-0.5B", 256, 896, 151_936)]
    reference = Group("Llama-3.1-8B", 4096, *HEADS["Llama-3.1-8B"])
    if quick:
        return [reference, Group("Qwen2.5-7B", 32_768, *HEADS["Qwen2.5-7B"])]
    return [reference, *(Group(head, T, *HEADS[head]) for T in (32_768, 8192, 2048, 131_072) for head in HEADS)]


def cases(group: Group, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    ours = [f"paw[{name}]" for name in BACKENDS if why_not_backend(name, device, dtype) is None]
    theirs = [peer.name for peer in PEERS if peer.why_not(device) is None]
    for name in (*ours, *theirs):
        yield Case(group, 1.0, "", name, FORWARD)
        yield Case(group, 1.0, "", name, BOTH)
    if device.type == "cpu":
        for name in (*ours, "naive", "torch_compile"):
            yield Case(group, 1.0, "", name, STATISTICS)
    # Dense work takes as long whatever the rows are; shown where it is cheap to show.
    large = device.type == "cpu" and group.V > 100_000
    for live in (0.4, 0.1):
        for name in (*ours, *(theirs if group.T <= 8192 and not large else ())):
            yield Case(group, live, "found", name, BOTH)
        for name in (*ours, *(theirs if group.T in (512, 2048, 4096, 32_768) else ())):
            yield Case(group, live, "known", name, BOTH)


@dataclass(frozen=True)
class Implementation:
    both: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    """(hidden, weight) -> (scalar loss, logp [T] or None), differentiable."""
    forward: Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]
    """The same of the forward pass alone, which may be another function."""
    slope: Tensor
    """[T] float64: dL/dlogp of each row of `both`."""
    want: Tensor | None
    """What the loss should be, float64; None if it is not compared."""
    version: str = ""


def implementation(case: Case, problem: Problem) -> Implementation:
    target, rows = problem.target, problem.rows
    index = problem.live if case.dead == "known" else None
    labels = target if index is None else target[index]
    if case.mode == STATISTICS:
        found = statistics_of(case.name)

        def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            logp, _ = found(hidden, weight, target)
            return -logp.mean(), logp.detach()

        slope = slope_of_mean(problem)
        return Implementation(both, both, slope, (slope * problem.logp).sum())
    if case.name.startswith("paw["):
        backend = case.name[4:-1]

        def fused(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            x, batch = (hidden, rows) if index is None else (hidden[index], rows.take(index))
            out = token_loss(x, weight, labels, paw_loss, batch, backend=backend)
            return out.loss, out.logp

        def statistics(hidden: Tensor, weight: Tensor) -> tuple[None, Tensor]:
            return None, token_stats(hidden, weight, target, backend=backend).logp

        return Implementation(fused, statistics, slope_of_rows(problem), loss_of_rows(problem))

    peer = next(peer for peer in PEERS if peer.name == case.name)

    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        loss = peer.loss(hidden if index is None else hidden[index], weight, labels)
        per_row = loss.dim() == 1 and index is None
        return loss.mean(), -loss.detach() if per_row else None

    slope = slope_of_mean(problem, index)
    want = (slope * problem.logp).sum() if peer.is_cross_entropy else None
    return Implementation(run, run, slope, want, peer.version())


def statistics_of(name: str) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return plain_row_statistics(hidden @ weight.t(), target)

    if name.startswith("paw["):
        return partial(token_stats, backend=name[4:-1])
    return torch.compile(plain, dynamic=False) if name == "torch_compile" else plain


@dataclass(frozen=True)
class Prepared:
    """A case that ran once: what is left is to time `call` on `inputs`."""

    case: Case
    call: Callable[[Tensor], object]
    inputs: list[Tensor]
    live: int
    """Rows that the gradient products are of: those with a gradient, or all where an implementation cannot skip any."""
    row: Row

    def timed(self, of: Times, matmuls: dict[str, float]) -> Row:
        """Columns of the table; `matmuls`: milliseconds a row of the bare products."""
        group, backward = self.case.group, self.case.mode != FORWARD
        entering, leaving = self.live if self.case.dead == "known" else group.T, self.live if backward else 0
        bound = matmuls["logits"] * entering + (matmuls["d_hidden"] + matmuls["d_weight"]) * leaving
        times_of = timing(of, flops=2 * group.D * group.V * (entering + 2 * leaving))
        return {**times_of, "bound_ms": f"{bound:.4g}", "share": f"{bound / of.median:.3f}", **self.row}


def prepare(case: Case, problem: Problem) -> Prepared:
    """Errors and memory of one call. Raises whatever the implementation raises."""
    run = implementation(case, problem)
    backward = case.mode != FORWARD
    weight = problem.weight.detach().requires_grad_(backward)
    inputs = [x.detach().requires_grad_(backward) for x in copies(problem.hidden)]

    def call(hidden: Tensor) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
        if case.mode == FORWARD:
            with torch.no_grad():
                return *run.forward(hidden, weight), []
        loss, logp = run.both(hidden, weight)
        return loss.detach(), logp, list(torch.autograd.grad(loss, (hidden, weight)))

    loss, logp, gradients = call(inputs[0])
    compared = None if loss is None or run.want is None else (loss, run.want)
    found = errors(problem, run.slope, loss=compared, logp=logp, gradients=gradients)
    del loss, logp, gradients
    peak = peak_bytes(call, inputs[0])
    live = problem.live.numel() if case.name.startswith("paw[") or case.dead == "known" else case.group.T
    row: Row = {
        "peak_mib": f"{peak / 2**20:.1f}",
        "beside_dw_mib": f"{(peak - 4 * case.group.V * case.group.D) / 2**20:.1f}" if backward else "",
        **{f"error_{name}": "" if value is None else f"{value:.2e}" for name, value in asdict(found).items()},
        "passes": "yes" if passes(found, problem.plain) else "no",
        "version": run.version,
    }
    return Prepared(case, call, inputs, live, row)


def timing(of: Times, *, flops: int = 0, moved: int = 0) -> Row:
    return {
        **{"ms": f"{of.median:.4g}", "ms_low": f"{of.low:.4g}", "ms_high": f"{of.high:.4g}", "runs": of.runs},
        "tflops": f"{flops / of.median / 1e9:.4g}" if flops else "",
        "gb_s": f"{moved / of.median / 1e6:.4g}" if moved else "",
    }


def bare_matmuls(group: Group, dtype: torch.dtype, device: torch.device, seconds: float) -> dict[str, Row]:
    """The three products of up to 4,096 rows, each written in `dtype`."""
    n, D, V = min(group.T, MATMUL_ROWS), group.D, group.V
    x, w, z = (torch.randn(shape, dtype=dtype, device=device) for shape in ((n, D), (V, D), (n, V)))
    dx, dw, out = torch.empty_like(x), torch.empty_like(w), torch.empty_like(z)
    calls = {
        "logits": (lambda x: torch.mm(x, w.t(), out=out), x),
        "d_hidden": (lambda z: torch.mm(z, w, out=dx), z),
        "d_weight": (lambda z: torch.mm(z.t(), x, out=dw), z),
    }
    where = {"head": group.head, "T": n, "D": D, "V": V, "implementation": "matmul"}
    return {
        name: {**where, "mode": f"matmul {name}", **timing(times(call, [a], seconds), flops=2 * n * D * V)}
        for name, (call, a) in calls.items()
    }


def without_matmul(device: torch.device, seconds: float) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """What has no head: (columns that name it, the measurement)."""
    yield {"implementation": "torch", "mode": "copy"}, partial(_copy, device, seconds)
    rows, V = (256 if device.type == "cpu" else MATMUL_ROWS), 151_936
    native = why_not_backend(device.type, device, torch.float32) is None
    for name in ("torch", "torch_compile", *([f"paw[{device.type}]"] if native else [])):
        what: Row = {"T": rows, "V": V, "dtype": "float32", "implementation": name, "mode": "row statistics"}
        yield what, partial(_row_statistics, name, rows, V, device, seconds)


def _copy(device: torch.device, seconds: float) -> Row:
    source = torch.randn((1 << 28) if device.type == "cpu" else (1 << 30), device=device)
    out = torch.empty_like(source)
    return timing(times(out.copy_, [source], seconds), moved=2 * source.nbytes)


def _row_statistics(name: str, rows: int, V: int, device: torch.device, seconds: float) -> Row:
    """logp and entropy of given float32 logits [rows, V]: the row operation of csrc/ against plain torch."""
    z, target = row_problem(rows, V, device)
    plain = torch.compile(plain_row_statistics) if name == "torch_compile" else plain_row_statistics
    call = native_row_statistics if name.startswith("paw[") else plain
    pairs = zip(call(z, target), plain_row_statistics(z.double(), target), strict=True)
    error = max((got.double() - want).abs().amax().item() for got, want in pairs)
    timed = times(lambda z: call(z, target), [z], seconds)
    return {**timing(timed, moved=z.nbytes), "error_logp": f"{error:.2e}"}


def row_problem(rows: int, V: int, device: torch.device) -> tuple[Tensor, Tensor]:
    g = torch.Generator(device).manual_seed(0)
    z = 3 * torch.randn(rows, V, generator=g, device=device)
    return z, torch.randint(V, (rows,), generator=g, device=device)


def plain_row_statistics(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """logp and entropy as one writes them."""
    logp = z.log_softmax(-1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def native_row_statistics(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.paw_kernels.row_statistics(z, None, target, 1.0)[:2]
