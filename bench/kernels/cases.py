"""The cases to measure on a device, and how to measure one of them."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.kernels.measure import Times, copies, peak_bytes, times
from bench.kernels.peers import PEERS
from bench.kernels.problem import (
    HEADS,
    Problem,
    errors,
    loss_of_rows,
    passes,
    paw_loss,
    slope_of_mean,
    slope_of_rows,
)
from paw_kernels import BACKENDS, token_loss, token_stats, why_not_backend

MATMUL_ROWS = 4096
FORWARD = "forward"
BOTH = "forward + backward"
STATISTICS = "statistics + backward"
"""Log-probabilities and entropies by a separate function, and the gradient of the
log-probabilities."""
Record = dict[str, object]
"""Columns of the table by name."""


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
    """"" (no dead rows), "found" (by the forward) or "known" (only live rows are gathered)."""
    name: str
    mode: str

    def columns(self) -> Record:
        return {
            "head": self.group.head,
            "T": self.group.T,
            "D": self.group.D,
            "V": self.group.V,
            "live": self.live,
            "dead": self.dead,
            "implementation": self.name,
            "mode": self.mode,
        }

    def label(self) -> str:
        dead = f" dead {self.dead}" if self.dead else ""
        return f"{self.group.head} T {self.group.T} f {self.live:g}{dead} {self.name} {self.mode}"


def groups(device: torch.device, quick: bool) -> list[Group]:
    """Groups in order of importance, with the reference point first."""
    if device.type == "cpu":
        on_cpu = [Group("quickstart", T=2048, D=64, V=600), Group("small", T=512, D=128, V=32_000)]
        if not quick:
            on_cpu.append(Group("Qwen2.5-0.5B", T=256, D=896, V=151_936))
        return on_cpu

    reference = Group("Llama-3.1-8B", 4096, *HEADS["Llama-3.1-8B"])
    if quick:
        return [reference, Group("Qwen2.5-7B", 32_768, *HEADS["Qwen2.5-7B"])]
    on_gpu = [reference]
    for T in (32_768, 8192, 2048, 131_072):
        for head, (D, V) in HEADS.items():
            on_gpu.append(Group(head, T, D, V))
    return on_gpu


def cases(group: Group, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every case of a group that can run on this device."""
    our_names = []
    for backend in BACKENDS:
        if why_not_backend(backend, device, dtype) is None:
            our_names.append(f"paw[{backend}]")
    peer_names = [peer.name for peer in PEERS if peer.why_not(device) is None]
    for implementation_name in (*our_names, *peer_names):
        yield Case(group, live=1.0, dead="", name=implementation_name, mode=FORWARD)
        yield Case(group, live=1.0, dead="", name=implementation_name, mode=BOTH)
    if device.type == "cpu":
        for implementation_name in (*our_names, "naive", "torch_compile"):
            yield Case(group, live=1.0, dead="", name=implementation_name, mode=STATISTICS)

    # Dense work takes the same time whatever the rows are, so peers are timed only if it is cheap.
    is_large_on_cpu = device.type == "cpu" and group.V > 100_000
    peers_if_found = peer_names if group.T <= 8192 and not is_large_on_cpu else []
    peers_if_known = peer_names if group.T in (512, 2048, 4096, 32_768) else []
    for live in (0.4, 0.1):
        for implementation_name in (*our_names, *peers_if_found):
            yield Case(group, live=live, dead="found", name=implementation_name, mode=BOTH)
        for implementation_name in (*our_names, *peers_if_known):
            yield Case(group, live=live, dead="known", name=implementation_name, mode=BOTH)


@dataclass(frozen=True)
class Implementation:
    both: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    """(hidden, weight) -> (scalar loss, logp [T] or None), differentiable."""
    forward: Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]
    """The same for the forward pass alone, which may be a different function."""
    slope: Tensor
    """[T] float64: dL/dlogp of each row, for the loss of `both`."""
    expected: Tensor | None
    """The true loss, float64; None if the loss is not compared."""
    version: str = ""


def implementation(case: Case, problem: Problem) -> Implementation:
    """The functions that a case calls, and the values to compare their results with."""
    if case.mode == STATISTICS:
        return _statistics_implementation(case, problem)
    row_index = problem.live if case.dead == "known" else None
    if case.name.startswith("paw["):
        return _paw_implementation(case, problem, row_index)
    return _peer_implementation(case, problem, row_index)


def _statistics_implementation(case: Case, problem: Problem) -> Implementation:
    statistics = statistics_of(case.name)

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logp, _ = statistics(hidden, weight, problem.target)
        return -logp.mean(), logp.detach()

    logp_slope = slope_of_mean(problem)
    return Implementation(
        both=both, forward=both, slope=logp_slope, expected=(logp_slope * problem.logp).sum()
    )


def _paw_implementation(case: Case, problem: Problem, row_index: Tensor | None) -> Implementation:
    """One of our backends, on the rows `row_index` only if given."""
    backend = _backend(case.name)
    labels = problem.target if row_index is None else problem.target[row_index]

    def fused(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        row_tokens = problem.rows
        if row_index is not None:
            hidden = hidden[row_index]
            row_tokens = row_tokens.take(row_index)
        result = token_loss(hidden, weight, labels, paw_loss, row_tokens, backend=backend)
        return result.loss, result.logp

    def statistics(hidden: Tensor, weight: Tensor) -> tuple[None, Tensor]:
        return None, token_stats(hidden, weight, problem.target, backend=backend).logp

    return Implementation(
        both=fused, forward=statistics, slope=slope_of_rows(problem), expected=loss_of_rows(problem)
    )


def _peer_implementation(case: Case, problem: Problem, row_index: Tensor | None) -> Implementation:
    """The mean loss of a peer, on the rows `row_index` only if given."""
    peer = next(peer for peer in PEERS if peer.name == case.name)
    labels = problem.target if row_index is None else problem.target[row_index]

    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        peer_loss = peer.loss(hidden if row_index is None else hidden[row_index], weight, labels)
        per_row = peer_loss.dim() == 1 and row_index is None
        return peer_loss.mean(), -peer_loss.detach() if per_row else None

    logp_slope = slope_of_mean(problem, row_index)
    expected = (logp_slope * problem.logp).sum() if peer.is_cross_entropy else None
    return Implementation(
        both=run, forward=run, slope=logp_slope, expected=expected, version=peer.version()
    )


def _backend(name: str) -> str:
    """The BACKEND in an implementation's name "paw[BACKEND]"."""
    return name.removeprefix("paw[").removesuffix("]")


def statistics_of(name: str) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The function (hidden, weight, target) -> (logp, entropy) of an implementation."""

    def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return plain_row_statistics(hidden @ weight.t(), target)

    if name.startswith("paw["):
        return partial(token_stats, backend=_backend(name))
    if name == "torch_compile":
        return torch.compile(plain, dynamic=False)
    return plain


@dataclass(frozen=True)
class Prepared:
    """A case that has run once and is ready to be timed: `call` on each of `inputs`."""

    case: Case
    call: Callable[[Tensor], object]
    inputs: list[Tensor]
    live: int
    """Number of rows in the gradient matmuls: those with a gradient, or all if the implementation
    cannot skip any."""
    columns: Record

    def timed(self, measured: Times, matmuls: dict[str, float]) -> Record:
        """Columns of the table. `matmuls`: milliseconds per row of the bare matmuls."""
        group = self.case.group
        forward_rows = self.live if self.case.dead == "known" else group.T
        backward_rows = 0 if self.case.mode == FORWARD else self.live
        bound_ms = (
            matmuls["logits"] * forward_rows
            + (matmuls["d_hidden"] + matmuls["d_weight"]) * backward_rows
        )
        flops = 2 * group.D * group.V * (forward_rows + 2 * backward_rows)
        return {
            **timing(measured, flops=flops),
            "bound_ms": f"{bound_ms:.4g}",
            "share": f"{bound_ms / measured.median:.3f}",
            **self.columns,
        }


def prepare(case: Case, problem: Problem) -> Prepared:
    """Measures the errors and memory of one call. Raises whatever the implementation raises."""
    functions = implementation(case, problem)
    backward = case.mode != FORWARD
    weight = problem.weight.detach().requires_grad_(backward)
    inputs = [hidden.detach().requires_grad_(backward) for hidden in copies(problem.hidden)]

    def call(hidden: Tensor) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
        if case.mode == FORWARD:
            with torch.no_grad():
                loss, logp = functions.forward(hidden, weight)
            return loss, logp, []
        loss, logp = functions.both(hidden, weight)
        return loss.detach(), logp, list(torch.autograd.grad(loss, (hidden, weight)))

    loss, logp, gradients = call(inputs[0])
    loss_and_truth = None
    if loss is not None and functions.expected is not None:
        loss_and_truth = (loss, functions.expected)
    case_errors = errors(
        problem, functions.slope, loss=loss_and_truth, logp=logp, gradients=gradients
    )

    del loss, logp, gradients  # their memory would count as held before the call
    peak = peak_bytes(call, inputs[0])
    weight_gradient = 4 * case.group.V * case.group.D

    columns: Record = {
        "peak_mib": f"{peak / 2**20:.1f}",
        "beside_dw_mib": f"{(peak - weight_gradient) / 2**20:.1f}" if backward else "",
    }
    for result_name, error in asdict(case_errors).items():
        columns[f"error_{result_name}"] = "" if error is None else f"{error:.2e}"
    columns["passes"] = "yes" if passes(case_errors, problem.plain) else "no"
    columns["version"] = functions.version

    skips_dead_rows = case.name.startswith("paw[") or case.dead == "known"
    gradient_rows = problem.live.numel() if skips_dead_rows else case.group.T
    return Prepared(case=case, call=call, inputs=inputs, live=gradient_rows, columns=columns)


def timing(measured: Times, *, flops: int = 0, moved: int = 0) -> Record:
    """Columns of the table. Rates are given only if `flops` or the bytes `moved` are."""
    return {
        "ms": f"{measured.median:.4g}",
        "ms_low": f"{measured.low:.4g}",
        "ms_high": f"{measured.high:.4g}",
        "runs": measured.runs,
        "tflops": f"{flops / measured.median / 1e9:.4g}" if flops else "",
        "gb_s": f"{moved / measured.median / 1e6:.4g}" if moved else "",
    }


def bare_matmuls(
    group: Group, dtype: torch.dtype, device: torch.device, seconds: float
) -> dict[str, Record]:
    """The three bare matmuls on up to 4,096 rows, with results in `dtype`."""
    row_count = min(group.T, MATMUL_ROWS)
    D = group.D
    V = group.V
    hidden = torch.randn(row_count, D, dtype=dtype, device=device)
    weight = torch.randn(V, D, dtype=dtype, device=device)
    logits = torch.randn(row_count, V, dtype=dtype, device=device)
    d_hidden = torch.empty_like(hidden)
    d_weight = torch.empty_like(weight)
    logits_out = torch.empty_like(logits)
    products = {
        "logits": (lambda x: torch.mm(x, weight.t(), out=logits_out), hidden),
        "d_hidden": (lambda z: torch.mm(z, weight, out=d_hidden), logits),
        "d_weight": (lambda z: torch.mm(z.t(), hidden, out=d_weight), logits),
    }
    records: dict[str, Record] = {}
    for product, (matmul, operand) in products.items():
        records[product] = {
            "head": group.head,
            "T": row_count,
            "D": D,
            "V": V,
            "implementation": "matmul",
            "mode": f"matmul {product}",
            **timing(times(matmul, [operand], seconds), flops=2 * row_count * D * V),
        }
    return records


def without_matmul(
    device: torch.device, seconds: float
) -> Iterator[tuple[Record, Callable[[], Record]]]:
    """The measurements that need no head: (columns that identify it, the measurement)."""
    yield {"implementation": "torch", "mode": "copy"}, partial(_copy, device, seconds)

    row_count = 256 if device.type == "cpu" else MATMUL_ROWS
    V = 151_936
    implementations = ["torch", "torch_compile"]
    if why_not_backend(device.type, device, torch.float32) is None:
        implementations.append(f"paw[{device.type}]")
    for implementation_name in implementations:
        columns: Record = {
            "T": row_count,
            "V": V,
            "dtype": "float32",
            "implementation": implementation_name,
            "mode": "row statistics",
        }
        yield columns, partial(_row_statistics, implementation_name, row_count, V, device, seconds)


def _copy(device: torch.device, seconds: float) -> Record:
    source = torch.randn((1 << 28) if device.type == "cpu" else (1 << 30), device=device)
    destination = torch.empty_like(source)
    return timing(times(destination.copy_, [source], seconds), moved=2 * source.nbytes)


def _row_statistics(
    implementation_name: str, row_count: int, V: int, device: torch.device, seconds: float
) -> Record:
    """logp and entropy of given float32 logits [rows, V], to compare csrc/ with plain torch."""
    logits, target = row_problem(row_count, V, device)
    statistics = plain_row_statistics
    if implementation_name == "torch_compile":
        statistics = torch.compile(plain_row_statistics)
    elif implementation_name.startswith("paw["):
        statistics = native_row_statistics

    statistics_pairs = zip(
        statistics(logits, target), plain_row_statistics(logits.double(), target), strict=True
    )
    largest_error = max(
        (statistic.double() - expected).abs().amax().item()
        for statistic, expected in statistics_pairs
    )
    measured = times(lambda logits: statistics(logits, target), [logits], seconds)
    return {**timing(measured, moved=logits.nbytes), "error_logp": f"{largest_error:.2e}"}


def row_problem(row_count: int, V: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(logits [rows, V] float32, target [rows] int64)."""
    generator = torch.Generator(device).manual_seed(0)
    logits = 3 * torch.randn(row_count, V, generator=generator, device=device)
    target = torch.randint(V, (row_count,), generator=generator, device=device)
    return logits, target


def plain_row_statistics(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(logp, entropy) in plain torch."""
    logp = logits.log_softmax(-1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def native_row_statistics(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.paw_kernels.row_statistics(logits, None, target, 1.0)[:2]
