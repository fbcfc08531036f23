"""What the fused head and its peers should take on one GPU: arithmetic, nothing is run.

    python bench/roofline.py        # writes bench/results/kernels_predicted.csv; bench/kernels_must.py reads the model

A pass is a list of terms, each with its floating-point operations, the bytes it must move and the times the host waits.
Two machines bound what one real machine will do:

    best      every matmul at cuBLAS's rate, its bytes hidden behind its arithmetic
    cautious  the fused logits matmul at 90 % of that rate, its epilogue at half of the instructions a cycle, and bytes
              written by a matmul's epilogue not hidden

The epilogue of the fused matmul has as many instructions whatever D is, and the tensor cores idle meanwhile: 3 % of a
tile's time at D 4,096 and 14 % at 896. What the host takes to start every operation is the least that a pass takes.

Rates are ceilings read elsewhere on an H200 (bf16 product of 8,192^3 random numbers: 769 to 798 TFLOP/s; copy, bytes
read plus written: 4.3 TB/s), not measurements of this code; 90 %, a half, the wait and the launch are assumptions.
"""

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.kernels_problem import HEADS

PREDICTED = Path(__file__).parent / "results" / "kernels_predicted.csv"
CHUNK_BYTES, STATISTICS_BYTES = 1440 << 20, 96 << 20
"""Of paw_kernels._triton, with and without gradients."""
TILE_ROWS, TILE_COLS = 128, 256
TILE_BYTES = 16
"""Statistics that a row leaves in each tile of the vocabulary."""
TILE_INSTRUCTIONS, TILE_WARPS = 1307, 8
"""Of each warp on a tile, beside its products: bench/results/triton_aot.csv, sm_90, bfloat16, 128,256 x 4,096."""
SCHEDULERS, PROCESSORS, GHZ = 4, 132, 1.755
"""Warp schedulers of a multiprocessor, multiprocessors and clock of an H100 or H200 under load."""
LAUNCHES, CHUNK_LAUNCHES = 20, 140
"""Operations of torch in a call and in each of its chunks, a PPO and world-model loss included: at most what
tests/kernels/test_token_loss.py holds."""
GIB = 2**30
REFERENCE = 4096, *HEADS["Llama-3.1-8B"]


@dataclass(frozen=True)
class Machine:
    name: str
    tflops: float = 790.0
    gb_s: float = 4300.0
    fused: float = 1.0
    """Rate of a matmul with an epilogue of its own, over cuBLAS's, while it multiplies."""
    issue: float = 1.0
    """Instructions that each scheduler starts a cycle during such an epilogue."""
    overlap: bool = True
    """Bytes of a matmul hide behind its arithmetic; False: what its epilogue writes and re-reads does not."""
    wait_us: float = 50.0
    """Idle time at each point where the host waits for a number, and until the next large kernel."""
    launch_us: float = 5.0
    """Of the host, to start an operation of torch."""


BEST, CAUTIOUS = Machine("best"), Machine("cautious", fused=0.9, issue=0.5, overlap=False)


class Term(NamedTuple):
    name: str
    flops: float = 0.0
    read: float = 0.0
    """Bytes."""
    written: float = 0.0
    """By an epilogue, with what it must read again to add to."""
    waits: int = 0
    tiles: int = 0
    """Of a fused matmul, on the multiprocessor that has the most of them."""
    launches: int = 0

    def ms(self, on: Machine) -> float:
        arithmetic = self.flops / (on.tflops * 1e9 * (on.fused if self.tiles else 1.0))
        arithmetic += self.tiles * TILE_INSTRUCTIONS * TILE_WARPS / (SCHEDULERS * on.issue * GHZ * 1e6)
        read, written = (n / (on.gb_s * 1e6) for n in (self.read, self.written))
        if self.flops and not on.overlap:
            return max(arithmetic, read) + written + self.waits * on.wait_us / 1e3
        return max(arithmetic, read + written) + self.waits * on.wait_us / 1e3


def total(terms: list[Term], on: Machine) -> float:
    """Milliseconds: of the GPU, or of the host where that is more."""
    return max(sum(term.ms(on) for term in terms), sum(term.launches for term in terms) * on.launch_us / 1e3)


def matmul_bound(T: int, D: int, V: int, live: float, on: Machine = BEST, *, backward: bool = True) -> float:
    """Milliseconds of the bare 1 + 2 live passes."""
    return 2 * T * D * V * (1 + 2 * live * backward) / (on.tflops * 1e9)


def chunks(T: int, size: int) -> list[int]:
    return [min(size, T - start) for start in range(0, T, size)]


def chunk_rows(T: int, D: int, V: int, *, backward: bool = True) -> int:
    """Rows of a chunk in bf16: as few chunks as fit, of equal size."""
    row_bytes = TILE_BYTES * -(-V // TILE_COLS) + 2 * D
    if backward:
        row_bytes += 2 * (-(-V // 64) * 64 + 2 * D)
    most = max(1, (CHUNK_BYTES if backward else STATISTICS_BYTES) // (row_bytes * TILE_ROWS))
    tiles = max(1, -(-T // TILE_ROWS))
    return -(-tiles // -(-tiles // most)) * TILE_ROWS


def paw(T: int, D: int, V: int, live: float, *, backward: bool = True, known: bool = False) -> list[Term]:
    """The FS path in bf16: `live` of the T rows have a gradient; with `known` only they enter the forward."""
    entering, share = (round(live * T), 1.0) if known else (T, live)
    sizes = chunks(entering, chunk_rows(entering, D, V, backward=backward))
    statistics = TILE_BYTES * -(-V // TILE_COLS)
    terms = [Term("wait", waits=0 if backward else 1, launches=LAUNCHES)]  # are the inputs good: with the first chunk
    for i, n in enumerate(sizes):
        L = share * n
        e = 2 * n * V if backward else 0
        tiles = -(-n // TILE_ROWS) * -(-V // TILE_COLS)
        terms += [
            Term("logits", 2 * n * D * V, 2 * (n * D + V * D), e + statistics * n, tiles=-(-tiles // PROCESSORS)),
            Term("merge", read=statistics * n),
        ]
        if not backward:
            continue
        add = 2 if len(sizes) == 1 else 4 if i == 0 else 8
        terms += [
            Term("wait", waits=1, launches=CHUNK_LAUNCHES),  # how many are live
            Term("gradient", read=2 * L * V + statistics * L, written=2 * L * V),
            Term("d_hidden", 2 * L * D * V, 2 * (L * V + V * D), 2 * L * D),
            Term("copies", read=4 * L * D, written=4 * L * D),  # live rows gathered, their gradients scattered
            Term("d_weight", 2 * L * D * V, 2 * (L * V + L * D), add * V * D),
        ]
    if backward:
        terms += [Term("copies", written=2 * T * D), Term("wait", waits=1)]  # zeros of d_hidden; is the factor 1
        if len(sizes) > 1:
            terms.append(Term("cast", read=4 * V * D, written=2 * V * D))
    return terms


class PeerModel(NamedTuple):
    """Three dense passes, or four where the logits are made twice."""

    recompute: bool
    chunk: int
    """Rows; 0 for all of them, -1 for Liger's rule, about T D / V."""
    bytes_per_logit: float
    """Moved by row kernels between the matmuls, beside what the matmuls read and write."""
    accumulator: int
    """Bytes of an element of dW while it grows."""
    scale: bool
    """dW and dX are multiplied by the upstream gradient in a pass of their own."""


PEERS = {
    # log-softmax reads twice and writes; backward writes zeros for the gather, reads two tensors twice and writes.
    "naive": PeerModel(False, 0, 2 * (3 + 1 + 5), 2, False),
    "naive_fp32": PeerModel(False, 0, 4 * (3 + 1 + 5) + 2 * 6, 2, False),  # and the casts
    "quack": PeerModel(False, 4096, 4, 4, False),  # the pipeline that QUACK_MS was measured with
    "liger_cute": PeerModel(False, 0, 4, 2, False),
    "liger_triton": PeerModel(False, -1, 6, 2, True),
    "cut_cross_entropy": PeerModel(True, 0, 0, 2, False),
    "prime_rl_style": PeerModel(True, 8192, 100, 2, False),
}
"""Read from their sources (see bench/peers.py); a floor, since their kernels need not reach these rates."""


def peer(name: str, T: int, D: int, V: int) -> list[Term]:
    model = PEERS[name]
    size = model.chunk or T
    if size < 0:
        per = -(-T // -(-V // D))
        size = min(T, 1 << (per - 1).bit_length())
    terms = []
    for i, n in enumerate(chunks(T, size)):
        stored = 2 * n * V if model.bytes_per_logit else 0
        logits = Term("logits", 2 * n * D * V, 2 * (n * D + V * D), stored)
        fresh = i == 0 and name != "liger_triton"  # it adds to zeros
        terms += [logits] * (1 + model.recompute)
        terms += [
            Term("gradient", read=model.bytes_per_logit * n * V / 2, written=model.bytes_per_logit * n * V / 2),
            Term("d_hidden", 2 * n * D * V, 2 * V * D + stored, 2 * n * D),
            Term("d_weight", 2 * n * D * V, 2 * n * D + stored, model.accumulator * (1 if fresh else 2) * V * D),
        ]
    if model.scale:
        terms.append(Term("cast", read=2 * V * D + 2 * T * D, written=2 * V * D + 2 * T * D))
    return terms


def paw_memory(T: int, D: int, V: int) -> dict[str, float]:
    """GiB that a step at f = 1 holds: "peak" beside the inputs and "total", the sum of dW (float32, unless one chunk
    does: then it is the result)."""
    n = chunk_rows(T, D, V)
    chunk = n * (TILE_BYTES * -(-V // TILE_COLS) + 2 * V + 6 * D) / GIB
    d_hidden, cast = 2 * T * D / GIB, 2 * V * D / GIB if n < T else 0
    # `cast`, dW in bf16, is made when the last chunk is gone.
    total = (4 if n < T else 2) * V * D / GIB
    return {"chunk": chunk, "d_hidden": d_hidden, "cast": cast, "total": total, "peak": d_hidden + max(chunk, cast)}


# --- every case -------------------------------------------------------------------------------------------------------

TERMS = ("logits", "merge", "wait", "gradient", "d_hidden", "d_weight", "copies", "cast")
COLUMNS = (
    *(
        "kind",
        "head",
        "T",
        "D",
        "V",
        "live",
        "dead",
        "implementation",
        "mode",
        "ms",
        "ms_cautious",
        "bound_ms",
        "share",
    ),
    *("share_cautious", "peak_mib", *(f"{name}_ms" for name in TERMS)),
)


def predictions() -> Iterator[dict[str, object]]:
    """One row a case of the GPU set, `ms` and the terms on the best machine."""
    shapes = [("Llama-3.1-8B", 4096), *((head, T) for T in (2048, 8192, 32_768, 131_072) for head in HEADS)]
    for head, T in shapes:
        D, V = HEADS[head]
        for live, known in ((1.0, False), (0.4, False), (0.4, True), (0.1, False), (0.1, True)):
            for backward in (True, False) if live == 1 else (True,):
                dead = "" if live == 1 else "known" if known else "found"
                where = (head, T, D, V, live, dead, "paw[triton]", "forward + backward" if backward else "forward")
                share = live if known else 1.0
                bound = matmul_bound(round(share * T), D, V, live / share, backward=backward)
                gib = paw_memory(round(share * T), D, V)
                memory = {"peak_mib": f"{1024 * (gib['peak'] + gib['total']):.0f}"} if backward else {}
                yield case(where, paw(T, D, V, live, backward=backward, known=known), bound) | memory
        for name in PEERS:
            where = (head, T, D, V, 1.0, "", name, "forward + backward")
            yield case(where, peer(name, T, D, V), matmul_bound(T, D, V, 1.0))


def case(where: tuple, terms: list[Term], bound: float) -> dict[str, object]:
    names = ("head", "T", "D", "V", "live", "dead", "implementation", "mode")
    best, cautious = total(terms, BEST), total(terms, CAUTIOUS)
    by_name = {f"{name}_ms": f"{sum(t.ms(BEST) for t in terms if t.name == name):.3f}" for name in TERMS}
    return {
        **dict(zip(names, where, strict=True)),
        **{"ms": f"{best:.3f}", "ms_cautious": f"{cautious:.3f}", "bound_ms": f"{bound:.3f}"},
        **{"share": f"{bound / best:.3f}", "share_cautious": f"{bound / cautious:.3f}"},
        **by_name,
    }


def write(path: Path = PREDICTED) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({"kind": "prediction", **row} for row in predictions())


if __name__ == "__main__":
    write()
    print(PREDICTED)
