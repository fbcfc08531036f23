"""What the fused head and its peers should take on one GPU: arithmetic, nothing is run.

    python bench/kernels/roofline.py        # writes bench/results/kernels_predicted.csv

bench/kernels/must.py reads the model, too.

A pass is a list of terms, each with its floating-point operations, the bytes it must move and the
times the host waits. Two machines bound what one real machine will do:

    best      torch's matmuls at cuBLAS's rate and Triton's at its own, their bytes hidden behind their arithmetic
    cautious  Triton's matmul at 90 % of its rate, its epilogue at half of the instructions a cycle, and bytes written
              by a matmul's epilogue not hidden

The epilogue of the fused matmul has as many instructions whatever D is, and the tensor cores idle
meanwhile: 3 % of a tile's time at D 4,096 and 14 % at 896. What the host takes to start every
operation is the least that a pass takes.

The backend `cuda` multiplies by cuBLAS, but stores its logits in float32 and reads them twice.

Rates are ceilings read elsewhere on an H200 (bf16 product of 8,192^3 random numbers: 769 to 798
TFLOP/s; copy, bytes read plus written: 4.3 TB/s), not measurements of this code. Triton's rates, 620
TFLOP/s on an H100 or H200 and 1,300 on a B200, 90 %, a half, the wait and the launch are
assumptions.
"""

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS
from bench.kernels.problem import HEADS

PREDICTED = RESULTS / "kernels_predicted.csv"
CHUNK_BYTES = 1440 << 20
"""Limit of a chunk in paw_kernels._triton, with gradients."""
ROOMY_BYTES = 2400 << 20
"""The same in paw_kernels._rows, with eight times as much free memory."""
STATISTICS_BYTES = 96 << 20
"""Limit of a chunk in paw_kernels._triton, without gradients."""
TILE_ROWS, TILE_COLS = 128, 256
TILE_BYTES = 16
"""Statistics that a row leaves in each tile of the vocabulary."""
TILE_WARPS = 8
SCHEDULERS = 4
"""Warp schedulers of a multiprocessor."""
LAUNCHES = 20
"""Operations of torch in a call, beside those of its chunks: at most what
tests/kernels/test_token_loss.py allows."""
CHUNK_LAUNCHES = 140
"""The same in each chunk, a PPO and world-model loss included."""
GIB = 2**30
REFERENCE = 4096, *HEADS["Llama-3.1-8B"]


@dataclass(frozen=True)
class Machine:
    name: str
    tflops: float = 790.0
    gb_s: float = 4300.0
    triton_tflops: float = 620.0
    """Rate of Triton's matmul while it multiplies. Assumed: it does not reach cuBLAS's."""
    processors: int = 132
    """Multiprocessors."""
    ghz: float = 1.755
    """Clock under load."""
    tile_instructions: int = 1307
    """Of each warp on a tile, beside its products: bench/results/triton_aot.csv, bfloat16,
    128,256 x 4,096."""
    issue: float = 1.0
    """Instructions that each scheduler starts a cycle during such an epilogue."""
    overlap: bool = True
    """Bytes of a matmul hide behind its arithmetic; False: what its epilogue writes and re-reads
    does not."""
    wait_us: float = 50.0
    """Idle time at each point where the host waits for a number, up to the next large kernel."""
    launch_us: float = 5.0
    """Time of the host to start an operation of torch."""


BEST = Machine("best")
CAUTIOUS = Machine("cautious", triton_tflops=0.9 * 620.0, issue=0.5, overlap=False)
LIGER_B200_TFLOPS = 1463.0
"""Rate that Liger publishes for its CuTe head on a B200."""
B200 = Machine(
    "B200",
    tflops=LIGER_B200_TFLOPS,
    gb_s=0.9 * 8000.0,
    triton_tflops=1300.0,
    processors=148,
    ghz=1.8,
    tile_instructions=1092,
)
"""All of it is assumed: that cuBLAS is as fast as Liger's whole head, 90 % of the data sheet's bytes
per second, Triton's rate and the clock."""


class Term(NamedTuple):
    name: str
    flops: float = 0.0
    read: float = 0.0
    """Bytes."""
    written: float = 0.0
    """Bytes that an epilogue writes, and those that it reads again to add to."""
    waits: int = 0
    tiles: int = 0
    """Tiles of a matmul with an epilogue of its own."""
    launches: int = 0
    by_triton: bool = False
    """Whether Triton multiplies, not cuBLAS."""

    def ms(self, machine: Machine) -> float:
        tflops = machine.triton_tflops if self.by_triton else machine.tflops
        arithmetic = self.flops / (tflops * 1e9)
        most_tiles = ceil_div(self.tiles, machine.processors)  # of one multiprocessor
        instructions = most_tiles * machine.tile_instructions * TILE_WARPS
        arithmetic += instructions / (SCHEDULERS * machine.issue * machine.ghz * 1e6)
        read = self.read / (machine.gb_s * 1e6)
        written = self.written / (machine.gb_s * 1e6)
        waiting = self.waits * machine.wait_us / 1e3
        if self.flops and not machine.overlap:
            return max(arithmetic, read) + written + waiting
        return max(arithmetic, read + written) + waiting


def total(terms: list[Term], machine: Machine) -> float:
    """Milliseconds of the GPU, or of the host if those are more."""
    gpu_ms = sum(term.ms(machine) for term in terms)
    host_ms = sum(term.launches for term in terms) * machine.launch_us / 1e3
    return max(gpu_ms, host_ms)


def matmul_bound(
    T: int, D: int, V: int, live: float, machine: Machine = BEST, *, backward: bool = True
) -> float:
    """Milliseconds of the bare 1 + 2 live passes."""
    return 2 * T * D * V * (1 + 2 * live * backward) / (machine.tflops * 1e9)


def ceil_div(n: int, divisor: int) -> int:
    return -(-n // divisor)


def chunks(T: int, size: int) -> list[int]:
    """Rows of each chunk of at most `size`."""
    return [min(size, T - start) for start in range(0, T, size)]


def chunk_rows(T: int, D: int, V: int, *, backward: bool = True) -> int:
    """Rows of a chunk in bf16: as few chunks as fit, of equal size."""
    row_bytes = TILE_BYTES * ceil_div(V, TILE_COLS) + 2 * D
    limit = STATISTICS_BYTES
    if backward:
        padded_V = ceil_div(V, 64) * 64
        row_bytes += 2 * (padded_V + 2 * D)
        limit = CHUNK_BYTES
    tiles_that_fit = max(1, limit // (row_bytes * TILE_ROWS))
    tiles = max(1, ceil_div(T, TILE_ROWS))
    number_of_chunks = ceil_div(tiles, tiles_that_fit)
    return ceil_div(tiles, number_of_chunks) * TILE_ROWS


def weight_gradient_bytes(chunk: int, number_of_chunks: int) -> int:
    """Bytes that a chunk moves for each number of dL/dW."""
    if number_of_chunks == 1:
        return 2  # bf16, written once
    if chunk == 0:
        return 4  # float32, written
    return 8  # float32, read and written


def paw(
    T: int, D: int, V: int, live: float, *, backward: bool = True, known: bool = False
) -> list[Term]:
    """The FS path in bf16: `live` of the T rows have a gradient; with `known` only they enter the
    forward."""
    forward_rows = round(live * T) if known else T
    share = 1.0 if known else live  # of the forward's rows: those with a gradient
    sizes = chunks(forward_rows, chunk_rows(forward_rows, D, V, backward=backward))
    statistics = TILE_BYTES * ceil_div(V, TILE_COLS)  # bytes a row

    # Whether the inputs are good is asked with the first chunk of a backward.
    terms = [Term("wait", waits=0 if backward else 1, launches=LAUNCHES)]
    for i, n in enumerate(sizes):
        logits_bytes = 2 * n * V if backward else 0
        tiles = ceil_div(n, TILE_ROWS) * ceil_div(V, TILE_COLS)
        logits = Term(
            "logits",
            flops=2 * n * D * V,
            read=2 * (n * D + V * D),
            written=logits_bytes + statistics * n,
            tiles=tiles,
            by_triton=True,
        )
        terms.append(logits)
        terms.append(Term("merge", read=statistics * n))
        if not backward:
            continue

        L = share * n
        dw_bytes = weight_gradient_bytes(i, len(sizes))
        terms += [
            Term("wait", waits=1, launches=CHUNK_LAUNCHES),  # for the number of live rows
            Term("gradient", read=2 * L * V + statistics * L, written=2 * L * V),
            Term("d_hidden", flops=2 * L * D * V, read=2 * (L * V + V * D), written=2 * L * D),
            # Live rows are gathered, their gradients scattered.
            Term("copies", read=4 * L * D, written=4 * L * D),
            Term(
                "d_weight", flops=2 * L * D * V, read=2 * (L * V + L * D), written=dw_bytes * V * D
            ),
        ]
    if backward:
        terms.append(Term("copies", written=2 * T * D))  # zeros of d_hidden
        terms.append(Term("wait", waits=1))  # for whether the upstream gradient is 1
        if len(sizes) > 1:
            terms.append(Term("cast", read=4 * V * D, written=2 * V * D))
    return terms


def paw_cuda(T: int, D: int, V: int, live: float) -> list[Term]:
    """The same by the backend `cuda`: cuBLAS's logits in float32, then one operation on the rows for
    the statistics, and one that reads them again and writes dL/dz in bf16."""
    sizes = chunks(T, cuda_chunk_rows(T, V))
    terms = [Term("wait", launches=LAUNCHES)]
    for i, n in enumerate(sizes):
        L = live * n
        if len(sizes) == 1:
            dw_bytes = 2
        elif i == 0:
            dw_bytes = 4
        else:
            dw_bytes = 8
        terms += [
            Term("logits", flops=2 * n * D * V, read=2 * (n * D + V * D), written=4 * n * V),
            Term("merge", read=4 * n * V),
            Term("wait", waits=1, launches=CHUNK_LAUNCHES),
            Term("gradient", read=4 * L * V, written=2 * L * V),
            Term("d_hidden", flops=2 * L * D * V, read=2 * (L * V + V * D), written=2 * L * D),
            Term("copies", read=4 * L * D, written=4 * L * D),
            Term(
                "d_weight", flops=2 * L * D * V, read=2 * (L * V + L * D), written=dw_bytes * V * D
            ),
        ]
    terms += [Term("copies", written=2 * T * D), Term("wait", waits=1)]
    if len(sizes) > 1:
        terms.append(Term("cast", read=4 * V * D, written=2 * V * D))
    return terms


def cuda_chunk_rows(T: int, V: int) -> int:
    """Rows of a chunk of paw_kernels._rows on a GPU with much free memory."""
    number_of_chunks = ceil_div(T, max(1, ROOMY_BYTES // (4 * V)))
    return ceil_div(T, number_of_chunks)


def fastest(T: int, D: int, V: int, live: float, machine: Machine) -> list[Term]:
    """The terms of our backend that is predicted to be the faster one on a machine."""
    backends = [paw(T, D, V, live), paw_cuda(T, D, V, live)]
    return min(backends, key=lambda terms: total(terms, machine))


class PeerModel(NamedTuple):
    """Three dense passes, or four if the logits are computed twice."""

    recompute: bool
    chunk: int
    """Rows of a chunk; 0 for all of them, -1 for Liger's rule, about T D / V."""
    bytes_per_logit: float
    """Moved by row kernels between the matmuls, beside what the matmuls read and write."""
    accumulator: int
    """Bytes of an element of dW while it grows."""
    scale: bool
    """dW and dX are multiplied by the upstream gradient in a pass of their own."""
    by_triton: bool = False
    """Whether its matmuls are Triton's, not cuBLAS's or CUTLASS's."""


PEERS = {
    # log-softmax reads twice and writes; backward writes zeros for the gather, reads two tensors
    # twice and writes.
    "naive": PeerModel(False, 0, 2 * (3 + 1 + 5), 2, False),
    "naive_fp32": PeerModel(False, 0, 4 * (3 + 1 + 5) + 2 * 6, 2, False),  # and the casts
    "quack": PeerModel(False, 4096, 4, 4, False),  # the pipeline before that of 16.78 ms
    "liger_cute": PeerModel(False, 0, 4, 2, False),
    "liger_triton": PeerModel(False, -1, 6, 2, True),
    "cut_cross_entropy": PeerModel(True, 0, 0, 2, False, by_triton=True),
    "prime_rl_style": PeerModel(True, 8192, 100, 2, False),
}
"""Read from their sources (see bench/kernels/peers.py); a floor, since their kernels need not reach
these rates."""


def peer(name: str, T: int, D: int, V: int) -> list[Term]:
    """The passes of a peer, forward + backward, in bf16."""
    model = PEERS[name]
    size = model.chunk or T
    if size < 0:
        rows = ceil_div(T, ceil_div(V, D))
        next_power_of_two = 1 << (rows - 1).bit_length()
        size = min(T, next_power_of_two)

    terms = []
    for i, n in enumerate(chunks(T, size)):
        stored = 2 * n * V if model.bytes_per_logit else 0
        logits = Term(
            "logits",
            flops=2 * n * D * V,
            read=2 * (n * D + V * D),
            written=stored,
            by_triton=model.by_triton,
        )
        terms.append(logits)
        if model.recompute:
            terms.append(logits)

        adds_to_dw = i > 0 or name == "liger_triton"  # Liger's first chunk adds to zeros
        dw_bytes = model.accumulator * (2 if adds_to_dw else 1)
        half_moved = model.bytes_per_logit * n * V / 2
        terms += [
            Term("gradient", read=half_moved, written=half_moved),
            Term(
                "d_hidden",
                flops=2 * n * D * V,
                read=2 * V * D + stored,
                written=2 * n * D,
                by_triton=model.by_triton,
            ),
            Term(
                "d_weight",
                flops=2 * n * D * V,
                read=2 * n * D + stored,
                written=dw_bytes * V * D,
                by_triton=model.by_triton,
            ),
        ]
    if model.scale:
        terms.append(Term("cast", read=2 * V * D + 2 * T * D, written=2 * V * D + 2 * T * D))
    return terms


def paw_memory(T: int, D: int, V: int) -> dict[str, float]:
    """GiB that a step at f = 1 holds: "peak" beside the inputs and "total", where dW is summed.

    That sum is in float32, or in bf16 if there is only one chunk: then it is the result.
    """
    n = chunk_rows(T, D, V)
    row_bytes = TILE_BYTES * ceil_div(V, TILE_COLS) + 2 * V + 6 * D
    return step_memory(T, D, V, rows=n, chunk_bytes=n * row_bytes)


def step_memory(T: int, D: int, V: int, *, rows: int, chunk_bytes: int) -> dict[str, float]:
    """As `paw_memory`, for any backend: its chunks have that many rows and bytes."""
    several_chunks = rows < T
    chunk = chunk_bytes / GIB
    d_hidden = 2 * T * D / GIB
    # dW in bf16, allocated when the last chunk is freed.
    cast = 2 * V * D / GIB if several_chunks else 0
    dw_bytes = 4 if several_chunks else 2
    return {
        "chunk": chunk,
        "d_hidden": d_hidden,
        "cast": cast,
        "total": dw_bytes * V * D / GIB,
        "peak": d_hidden + max(chunk, cast),
    }


# --- every case

TERMS = ("logits", "merge", "wait", "gradient", "d_hidden", "d_weight", "copies", "cast")
CASE_COLUMNS = ("head", "T", "D", "V", "live", "dead", "implementation", "mode")
COLUMNS = (
    "kind",
    *CASE_COLUMNS,
    *("ms", "ms_cautious", "bound_ms", "share", "share_cautious", "peak_mib"),
    *(f"{name}_ms" for name in TERMS),
)


def predictions() -> Iterator[dict[str, object]]:
    """A row for each case of the GPU set; `ms` and the terms are on the best machine."""
    shapes = [("Llama-3.1-8B", 4096)]
    for T in (2048, 8192, 32_768, 131_072):
        for head in HEADS:
            shapes.append((head, T))
    for head, T in shapes:
        yield paw_case(head, T, live=1.0, dead="", backward=True)
        yield paw_case(head, T, live=1.0, dead="", backward=False)
        for live in (0.4, 0.1):
            yield paw_case(head, T, live=live, dead="found", backward=True)
            yield paw_case(head, T, live=live, dead="known", backward=True)
        for live in (1.0, 0.4, 0.1):
            yield cuda_case(head, T, live=live)

        D, V = HEADS[head]
        for name in PEERS:
            columns = (head, T, D, V, 1.0, "", name, "forward + backward")
            yield case(columns, peer(name, T, D, V), matmul_bound(T, D, V, 1.0))


def paw_case(head: str, T: int, *, live: float, dead: str, backward: bool) -> dict[str, object]:
    """The row of ours; `dead` as in bench/kernels/cases.py."""
    D, V = HEADS[head]
    known = dead == "known"
    share = live if known else 1.0  # of the rows: those that enter the forward
    forward_rows = round(share * T)
    mode = "forward + backward" if backward else "forward"
    row = case(
        (head, T, D, V, live, dead, "paw[triton]", mode),
        paw(T, D, V, live, backward=backward, known=known),
        matmul_bound(forward_rows, D, V, live / share, backward=backward),
    )
    if backward:
        gib = paw_memory(forward_rows, D, V)
        row["peak_mib"] = f"{1024 * (gib['peak'] + gib['total']):.0f}"
    return row


def cuda_case(head: str, T: int, *, live: float) -> dict[str, object]:
    """The row of the backend `cuda`, forward + backward; the forward finds the dead rows."""
    D, V = HEADS[head]
    dead = "" if live == 1 else "found"
    row = case(
        (head, T, D, V, live, dead, "paw[cuda]", "forward + backward"),
        paw_cuda(T, D, V, live),
        matmul_bound(T, D, V, live),
    )
    n = cuda_chunk_rows(T, V)
    gib = step_memory(T, D, V, rows=n, chunk_bytes=n * (4 * V + 6 * D))
    row["peak_mib"] = f"{1024 * (gib['peak'] + gib['total']):.0f}"
    return row


def case(columns: tuple, terms: list[Term], bound: float) -> dict[str, object]:
    """The row of a case: `columns` are the values of CASE_COLUMNS, `bound` the milliseconds of the
    bare matmuls."""
    best = total(terms, BEST)
    cautious = total(terms, CAUTIOUS)
    row: dict[str, object] = dict(zip(CASE_COLUMNS, columns, strict=True))
    row["ms"] = f"{best:.3f}"
    row["ms_cautious"] = f"{cautious:.3f}"
    row["bound_ms"] = f"{bound:.3f}"
    row["share"] = f"{bound / best:.3f}"
    row["share_cautious"] = f"{bound / cautious:.3f}"
    for name in TERMS:
        ms = sum(term.ms(BEST) for term in terms if term.name == name)
        row[f"{name}_ms"] = f"{ms:.3f}"
    return row


def write(path: Path = PREDICTED) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({"kind": "prediction", **row} for row in predictions())


if __name__ == "__main__":
    write()
    print(PREDICTED)
