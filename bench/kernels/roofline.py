"""How long the fused head and its peers should take on one GPU: arithmetic only, nothing is run.

    python bench/kernels/roofline.py        # writes bench/results/kernels_predicted.csv

bench/kernels/must.py uses this model too.

A pass is a list of terms. Each has its floating-point operations, the bytes it must move and the
number of times that the host waits. Two machines bound what a real machine will do:

    best      torch's matmuls run at cuBLAS's rate and Triton's at its own, with their bytes hidden behind arithmetic
    cautious  Triton's matmul runs at 90 % of its rate and its epilogue at half the instructions per cycle; the bytes
              that a matmul's epilogue writes are not hidden

The epilogue of the fused matmul has the same number of instructions for every D, and the tensor
cores idle meanwhile: 3 % of a tile's time at D 4,096 and 14 % at 896. A pass takes at least as long
as the host needs to start its operations.

The backend `cuda` multiplies with cuBLAS, but stores its logits in float32 and reads them twice.

Rates are ceilings measured elsewhere on an H200 (bf16 product of 8,192^3 random numbers: 769 to 798
TFLOP/s; copy, bytes read plus written: 4.3 TB/s), not measurements of this code. The following are
assumptions: Triton's rates (620 TFLOP/s on an H100 or H200, 1,300 on a B200), the 90 %, the half,
the wait and the launch time.
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
TILE_ROWS = 128
TILE_COLS = 256
TILE_BYTES = 16
"""Bytes of statistics that a row stores for each tile of the vocabulary."""
TILE_WARPS = 8
SCHEDULERS = 4
"""Warp schedulers of a multiprocessor."""
LAUNCHES = 20
"""Torch operations in a call, besides those of its chunks: the most that
tests/kernels/test_token_loss.py allows."""
CHUNK_LAUNCHES = 140
"""The same for each chunk, including a PPO and world-model loss."""
GIB = 2**30
REFERENCE = 4096, *HEADS["Llama-3.1-8B"]


@dataclass(frozen=True)
class Machine:
    name: str
    tflops: float = 790.0
    gb_s: float = 4300.0
    triton_tflops: float = 620.0
    """Rate of Triton's matmul while it multiplies, assumed to be below cuBLAS's."""
    processors: int = 132
    """Multiprocessors."""
    ghz: float = 1.755
    """Clock under load."""
    tile_instructions: int = 1307
    """Instructions of each warp on a tile, besides its products: bench/results/triton_aot.csv,
    bfloat16, 128,256 x 4,096."""
    issue: float = 1.0
    """Instructions that each scheduler issues per cycle during such an epilogue."""
    overlap: bool = True
    """Whether all bytes of a matmul hide behind its arithmetic. If False, those that its epilogue
    writes and reads again do not."""
    wait_us: float = 50.0
    """Idle time at each point where the host waits for a number, up to the next large kernel."""
    launch_us: float = 5.0
    """Time the host needs to start a torch operation."""


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
"""All of this is assumed: that cuBLAS is as fast as Liger's whole head, 90 % of the data sheet's
bytes per second, Triton's rate and the clock."""


class Term(NamedTuple):
    name: str
    flops: float = 0.0
    read: float = 0.0
    """Bytes."""
    written: float = 0.0
    """Bytes that an epilogue writes, plus those that it reads again to accumulate."""
    waits: int = 0
    tiles: int = 0
    """Tiles of a matmul with its own epilogue."""
    launches: int = 0
    by_triton: bool = False
    """Whether Triton multiplies instead of cuBLAS."""

    def ms(self, machine: Machine) -> float:
        tflops = machine.triton_tflops if self.by_triton else machine.tflops
        arithmetic = self.flops / (tflops * 1e9)
        most_tiles = ceil_div(self.tiles, machine.processors)  # on one multiprocessor
        instructions = most_tiles * machine.tile_instructions * TILE_WARPS
        arithmetic += instructions / (SCHEDULERS * machine.issue * machine.ghz * 1e6)
        read_ms = self.read / (machine.gb_s * 1e6)
        written_ms = self.written / (machine.gb_s * 1e6)
        waiting = self.waits * machine.wait_us / 1e3
        if self.flops and not machine.overlap:
            return max(arithmetic, read_ms) + written_ms + waiting
        return max(arithmetic, read_ms + written_ms) + waiting


def total(terms: list[Term], machine: Machine) -> float:
    """Milliseconds of the GPU or of the host, whichever takes longer."""
    gpu_ms = sum(term.ms(machine) for term in terms)
    host_ms = sum(term.launches for term in terms) * machine.launch_us / 1e3
    return max(gpu_ms, host_ms)


def matmul_bound(
    T: int, D: int, V: int, live: float, machine: Machine = BEST, *, backward: bool = True
) -> float:
    """Milliseconds of the bare matmuls, 1 + 2 live passes."""
    return 2 * T * D * V * (1 + 2 * live * backward) / (machine.tflops * 1e9)


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def chunks(T: int, chunk_size: int) -> list[int]:
    """Rows of each chunk, at most `chunk_size`."""
    return [min(chunk_size, T - chunk_start) for chunk_start in range(0, T, chunk_size)]


def chunk_rows(T: int, D: int, V: int, *, backward: bool = True) -> int:
    """Rows of a chunk in bf16: the fewest chunks that fit, of equal size."""
    row_bytes = TILE_BYTES * ceil_div(V, TILE_COLS) + 2 * D
    byte_limit = STATISTICS_BYTES
    if backward:
        padded_V = ceil_div(V, 64) * 64
        row_bytes += 2 * (padded_V + 2 * D)
        byte_limit = CHUNK_BYTES
    tiles_that_fit = max(1, byte_limit // (row_bytes * TILE_ROWS))
    row_tiles = max(1, ceil_div(T, TILE_ROWS))
    number_of_chunks = ceil_div(row_tiles, tiles_that_fit)
    return ceil_div(row_tiles, number_of_chunks) * TILE_ROWS


def weight_gradient_bytes(chunk: int, number_of_chunks: int) -> int:
    """Bytes that a chunk moves for each element of dL/dW."""
    if number_of_chunks == 1:
        return 2  # bf16, written once
    if chunk == 0:
        return 4  # float32, written
    return 8  # float32, read and written


def backward_terms(
    live_rows: float, D: int, V: int, *, gradient_read: float, dw_bytes: int
) -> list[Term]:
    """The terms of a chunk's backward, in bf16.

    `gradient_read`: bytes that the row operation reads to write dL/dz. `dw_bytes`: bytes moved for
    each element of dL/dW.
    """
    matmul_flops = 2 * live_rows * D * V
    return [
        Term("wait", waits=1, launches=CHUNK_LAUNCHES),  # for the number of live rows
        Term("gradient", read=gradient_read, written=2 * live_rows * V),
        Term(
            "d_hidden",
            flops=matmul_flops,
            read=2 * (live_rows * V + V * D),
            written=2 * live_rows * D,
        ),
        # Live rows are gathered, their gradients scattered.
        Term("copies", read=4 * live_rows * D, written=4 * live_rows * D),
        Term(
            "d_weight",
            flops=matmul_flops,
            read=2 * (live_rows * V + live_rows * D),
            written=dw_bytes * V * D,
        ),
    ]


def paw(
    T: int, D: int, V: int, live: float, *, backward: bool = True, known: bool = False
) -> list[Term]:
    """The terms of the `triton` backend in bf16, if a share `live` of the T rows has a gradient.

    With `known`, only those rows enter the forward.
    """
    forward_rows = round(live * T) if known else T
    gradient_share = 1.0 if known else live  # share of the forward's rows that have a gradient
    chunk_sizes = chunks(forward_rows, chunk_rows(forward_rows, D, V, backward=backward))
    statistics = TILE_BYTES * ceil_div(V, TILE_COLS)  # bytes a row

    # With a backward, the inputs are checked together with the first chunk.
    terms = [Term("wait", waits=0 if backward else 1, launches=LAUNCHES)]
    for chunk, row_count in enumerate(chunk_sizes):
        logits_bytes = 2 * row_count * V if backward else 0
        tile_count = ceil_div(row_count, TILE_ROWS) * ceil_div(V, TILE_COLS)
        logits = Term(
            "logits",
            flops=2 * row_count * D * V,
            read=2 * (row_count * D + V * D),
            written=logits_bytes + statistics * row_count,
            tiles=tile_count,
            by_triton=True,
        )
        terms.append(logits)
        terms.append(Term("merge", read=statistics * row_count))
        if not backward:
            continue

        live_rows = gradient_share * row_count
        dw_bytes = weight_gradient_bytes(chunk, len(chunk_sizes))
        gradient_read = 2 * live_rows * V + statistics * live_rows
        terms += backward_terms(live_rows, D, V, gradient_read=gradient_read, dw_bytes=dw_bytes)
    if backward:
        terms.append(Term("copies", written=2 * T * D))  # zeros of d_hidden
        terms.append(Term("wait", waits=1))  # for whether the upstream gradient is 1
        if len(chunk_sizes) > 1:
            terms.append(Term("cast", read=4 * V * D, written=2 * V * D))
    return terms


def paw_cuda(T: int, D: int, V: int, live: float) -> list[Term]:
    """The terms of the backend `cuda` in bf16.

    cuBLAS writes the logits in float32. One row operation computes the statistics; another reads
    the logits again and writes dL/dz in bf16.
    """
    chunk_sizes = chunks(T, cuda_chunk_rows(T, V))
    terms = [Term("wait", launches=LAUNCHES)]
    for chunk, row_count in enumerate(chunk_sizes):
        live_rows = live * row_count
        dw_bytes = weight_gradient_bytes(chunk, len(chunk_sizes))
        terms += [
            Term(
                "logits",
                flops=2 * row_count * D * V,
                read=2 * (row_count * D + V * D),
                written=4 * row_count * V,
            ),
            Term("merge", read=4 * row_count * V),
        ]
        terms += backward_terms(live_rows, D, V, gradient_read=4 * live_rows * V, dw_bytes=dw_bytes)
    terms += [Term("copies", written=2 * T * D), Term("wait", waits=1)]
    if len(chunk_sizes) > 1:
        terms.append(Term("cast", read=4 * V * D, written=2 * V * D))
    return terms


def cuda_chunk_rows(T: int, V: int) -> int:
    """Rows of a chunk in paw_kernels._rows on a GPU with plenty of free memory."""
    number_of_chunks = ceil_div(T, max(1, ROOMY_BYTES // (4 * V)))
    return ceil_div(T, number_of_chunks)


def fastest(T: int, D: int, V: int, live: float, machine: Machine) -> list[Term]:
    """The terms of whichever of our backends is predicted to be faster on a machine."""
    backends = [paw(T, D, V, live), paw_cuda(T, D, V, live)]
    return min(backends, key=lambda terms: total(terms, machine))


class PeerModel(NamedTuple):
    """Three dense passes, or four if the logits are computed twice."""

    recompute: bool
    chunk: int
    """Rows of a chunk; 0 for all rows, -1 for Liger's rule of about T D / V."""
    bytes_per_logit: float
    """Bytes moved by row kernels between the matmuls, besides what the matmuls read and write."""
    accumulator: int
    """Bytes of an element of dW while it is accumulated."""
    scale: bool
    """Whether a separate pass multiplies dW and dX by the upstream gradient."""
    by_triton: bool = False
    """Whether its matmuls are Triton's instead of cuBLAS's or CUTLASS's."""


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
"""Read from their sources (see bench/kernels/peers.py). These are lower bounds, since their kernels
may not reach these rates."""


def peer(name: str, T: int, D: int, V: int) -> list[Term]:
    """The passes of a peer, forward + backward, in bf16."""
    model = PEERS[name]
    chunk_size = model.chunk or T
    if chunk_size < 0:
        liger_rows = ceil_div(T, ceil_div(V, D))
        next_power_of_two = 1 << (liger_rows - 1).bit_length()
        chunk_size = min(T, next_power_of_two)

    terms = []
    for chunk, row_count in enumerate(chunks(T, chunk_size)):
        stored = 2 * row_count * V if model.bytes_per_logit else 0
        logits = Term(
            "logits",
            flops=2 * row_count * D * V,
            read=2 * (row_count * D + V * D),
            written=stored,
            by_triton=model.by_triton,
        )
        terms.append(logits)
        if model.recompute:
            terms.append(logits)

        adds_to_dw = chunk > 0 or name == "liger_triton"  # Liger's first chunk adds to zeros
        dw_bytes = model.accumulator * (2 if adds_to_dw else 1)
        half_moved = model.bytes_per_logit * row_count * V / 2
        terms += [
            Term("gradient", read=half_moved, written=half_moved),
            Term(
                "d_hidden",
                flops=2 * row_count * D * V,
                read=2 * V * D + stored,
                written=2 * row_count * D,
                by_triton=model.by_triton,
            ),
            Term(
                "d_weight",
                flops=2 * row_count * D * V,
                read=2 * row_count * D + stored,
                written=dw_bytes * V * D,
                by_triton=model.by_triton,
            ),
        ]
    if model.scale:
        terms.append(Term("cast", read=2 * V * D + 2 * T * D, written=2 * V * D + 2 * T * D))
    return terms


def paw_memory(T: int, D: int, V: int) -> dict[str, float]:
    """GiB that a step at f = 1 holds: "peak" beside the inputs and "total".

    "total" is the sum of dW. It is in float32, or in bf16 if there is only one chunk, because the
    sum is then the result.
    """
    chunk_size = chunk_rows(T, D, V)
    row_bytes = TILE_BYTES * ceil_div(V, TILE_COLS) + 2 * V + 6 * D
    return step_memory(T, D, V, rows=chunk_size, chunk_bytes=chunk_size * row_bytes)


def step_memory(T: int, D: int, V: int, *, rows: int, chunk_bytes: int) -> dict[str, float]:
    """Like `paw_memory`, for any backend, given the rows and bytes of its chunks."""
    several_chunks = rows < T
    chunk_gib = chunk_bytes / GIB
    d_hidden_gib = 2 * T * D / GIB
    # dW in bf16 is allocated after the last chunk is freed.
    cast_gib = 2 * V * D / GIB if several_chunks else 0
    dw_bytes = 4 if several_chunks else 2
    return {
        "chunk": chunk_gib,
        "d_hidden": d_hidden_gib,
        "cast": cast_gib,
        "total": dw_bytes * V * D / GIB,
        "peak": d_hidden_gib + max(chunk_gib, cast_gib),
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
    """A record for each case of the GPU set; `ms` and the terms are those of the best machine."""
    shapes = [("Llama-3.1-8B", 4096)]
    for T in (2048, 8192, 32_768, 131_072):
        for head in HEADS:
            shapes.append((head, T))
    for head, T in shapes:
        yield paw_case(head, T, live=1.0, dead="", backward=True)
        yield paw_case(head, T, live=1.0, dead="", backward=False)
        for live_share in (0.4, 0.1):
            yield paw_case(head, T, live=live_share, dead="found", backward=True)
            yield paw_case(head, T, live=live_share, dead="known", backward=True)
        for live_share in (1.0, 0.4, 0.1):
            yield cuda_case(head, T, live=live_share)

        D, V = HEADS[head]
        for peer_name in PEERS:
            columns = (head, T, D, V, 1.0, "", peer_name, "forward + backward")
            yield case(columns, peer(peer_name, T, D, V), matmul_bound(T, D, V, 1.0))


def paw_case(head: str, T: int, *, live: float, dead: str, backward: bool) -> dict[str, object]:
    """The record of the `triton` backend; `dead` is as in bench/kernels/cases.py."""
    D, V = HEADS[head]
    is_known = dead == "known"
    forward_share = live if is_known else 1.0  # share of the rows that enter the forward
    forward_rows = round(forward_share * T)
    mode = "forward + backward" if backward else "forward"
    record = case(
        (head, T, D, V, live, dead, "paw[triton]", mode),
        paw(T, D, V, live, backward=backward, known=is_known),
        matmul_bound(forward_rows, D, V, live / forward_share, backward=backward),
    )
    if backward:
        gib = paw_memory(forward_rows, D, V)
        record["peak_mib"] = f"{1024 * (gib['peak'] + gib['total']):.0f}"
    return record


def cuda_case(head: str, T: int, *, live: float) -> dict[str, object]:
    """The record of the backend `cuda`, forward + backward; the forward finds the dead rows."""
    D, V = HEADS[head]
    dead = "" if live == 1 else "found"
    record = case(
        (head, T, D, V, live, dead, "paw[cuda]", "forward + backward"),
        paw_cuda(T, D, V, live),
        matmul_bound(T, D, V, live),
    )
    chunk_size = cuda_chunk_rows(T, V)
    gib = step_memory(T, D, V, rows=chunk_size, chunk_bytes=chunk_size * (4 * V + 6 * D))
    record["peak_mib"] = f"{1024 * (gib['peak'] + gib['total']):.0f}"
    return record


def case(columns: tuple, terms: list[Term], bound_ms: float) -> dict[str, object]:
    """The record of a case.

    `columns` are the values of CASE_COLUMNS, and `bound_ms` the milliseconds of the bare matmuls.
    """
    best_ms = total(terms, BEST)
    cautious = total(terms, CAUTIOUS)
    record: dict[str, object] = dict(zip(CASE_COLUMNS, columns, strict=True))
    record["ms"] = f"{best_ms:.3f}"
    record["ms_cautious"] = f"{cautious:.3f}"
    record["bound_ms"] = f"{bound_ms:.3f}"
    record["share"] = f"{bound_ms / best_ms:.3f}"
    record["share_cautious"] = f"{bound_ms / cautious:.3f}"
    for term_name in TERMS:
        term_ms = sum(term.ms(BEST) for term in terms if term.name == term_name)
        record[f"{term_name}_ms"] = f"{term_ms:.3f}"
    return record


def write(path: Path = PREDICTED) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({"kind": "prediction", **prediction} for prediction in predictions())


if __name__ == "__main__":
    write()
    print(PREDICTED)
