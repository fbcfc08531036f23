"""The tables of docs/kernels.md: what must be reached, what the model predicts, what was measured.

    python bench/kernels/must.py        # puts them into docs/kernels.md and prints the first

Predicted: from bench/kernels/roofline.py, on its best and its cautious machine. Measured: the fastest of
our backends in the tables of bench/kernels/compare.py; "open" if no GPU has written one yet.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT
from bench.kernels.plot import BOTH, HEAD, STATISTICS, Rows, matches, read
from bench.kernels.problem import HEADS
from bench.kernels.roofline import (
    B200,
    BEST,
    CAUTIOUS,
    LIGER_B200_TFLOPS,
    REFERENCE,
    Machine,
    Term,
    fastest,
    matmul_bound,
    paw,
    paw_cuda,
    paw_memory,
    total,
)

DOCS = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- python bench/kernels/must.py -->", "<!-- end -->"
QUACK_MS = 16.78
LIGER_MS = 16.71
"""Forward + backward at the reference point on an H200, as QuACK and Liger (its CuTe kernel) publish
it."""
REFERENCE_MS = 18.0
"""The limit at the reference point, f = 1."""


@dataclass(frozen=True)
class Must:
    """One line of the first table: a limit, its prediction and its measurement."""

    what: str
    sign: str
    """ "<=" or ">="."""
    limit: float
    predicted: tuple[float, float] | None
    """On the best and the cautious machine."""
    measured: Callable[[Rows, Rows], float | None]
    """(rows of a GPU, rows of a CPU) -> the value; None if they do not contain it."""

    def met(self, value: float) -> bool:
        return value <= self.limit if self.sign == "<=" else value >= self.limit

    def margin(self, value: float) -> str:
        ratio = value / self.limit
        margin = 1 - ratio if self.sign == "<=" else ratio - 1
        return f"{margin:+.0%}"

    def line(self, gpu: Rows, cpu: Rows) -> str:
        limit = f"{self.sign} {self.limit:.2f}"
        return f"| {self.what} | {limit} | {self._prediction()} | {self._measurement(gpu, cpu)} |"

    def _prediction(self) -> str:
        if self.predicted is None:
            return ""
        best, cautious = self.predicted
        values = f"{best:.2f}"
        margins = self.margin(best)
        if best != cautious:
            values += f" .. {cautious:.2f}"
            margins += f" .. {self.margin(cautious)}"
        machines_that_meet_it = self.met(best) + self.met(cautious)
        verdict = ("missed", "depends", "met")[machines_that_meet_it]
        return f"{values} ({margins}): {verdict}"

    def _measurement(self, gpu: Rows, cpu: Rows) -> str:
        value = self.measured(gpu, cpu)
        if value is None:
            return "open"
        return f"{value:.2f}: {'met' if self.met(value) else 'missed'}"


def table() -> list[Must]:
    """Every line of the first table."""
    musts = reference_musts()
    for head in ("Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B"):
        gib = paw_memory(32_768, *HEADS[head])["peak"]
        memory = Must(
            f"GiB over inputs and a float32 dW, T 32k, {head}",
            sign="<=",
            limit=1.5,
            predicted=(gib, gib),
            measured=memory_of(head),
        )
        musts.append(memory)
    row_statistics = Must(
        "row statistics on a CPU, 256 x 151,936, times as fast as torch",
        sign=">=",
        limit=5,
        predicted=None,
        measured=row_op,
    )
    musts.append(row_statistics)
    return musts


def reference_musts() -> list[Must]:
    """The times at the reference point on a GPU."""
    T, _, _ = REFERENCE
    dense_best = predicted_ms(1.0, BEST)
    dense_cautious = predicted_ms(1.0, CAUTIOUS)
    sparse_best = predicted_ms(0.4, BEST)
    sparse_cautious = predicted_ms(0.4, CAUTIOUS)
    best_peer_ms = min(QUACK_MS, LIGER_MS)
    bound = matmul_bound(*REFERENCE, 1.0)

    return [
        Must(
            "reference point, f = 1, ms",
            sign="<=",
            limit=REFERENCE_MS,
            predicted=(dense_best, dense_cautious),
            measured=lambda gpu, _: ours(gpu, T, 1.0),
        ),
        Must(
            "f = 0.4 over its own f = 1",
            sign="<=",
            limit=0.65,
            predicted=(sparse_best / dense_best, sparse_cautious / dense_cautious),
            measured=lambda gpu, _: ratio(gpu, T),
        ),
        Must(
            "f = 0.4, ms over the best peer's",
            sign="<=",
            limit=1 / 1.4,
            predicted=(sparse_best / best_peer_ms, sparse_cautious / best_peer_ms),
            measured=lambda gpu, _: over_best_peer(gpu, T),
        ),
        Must(
            "share of the matmul bound, f = 1",
            sign=">=",
            limit=0.9,
            predicted=(bound / dense_best, bound / dense_cautious),
            measured=lambda gpu, _: best(gpu, HEAD, T, 1.0, "share", largest=True),
        ),
    ]


def predicted_ms(live: float, machine: Machine) -> float:
    """Milliseconds at the reference point of whichever backend is predicted to be the faster."""
    return total(fastest(*REFERENCE, live, machine), machine)


# --- what a GPU's or a CPU's rows say


def best(
    rows: Rows, head: str, T: int, live: float, column: str, *, largest: bool = False
) -> float | None:
    """The smallest (or largest) value of our backends, forward + backward, if the forward finds the
    dead rows.

    None if no row that passes is there.
    """
    columns = {"head": head, "T": str(T), "live": str(live), "mode": BOTH}
    values = []
    for row in rows:
        is_ours = (
            row["implementation"].startswith("paw[")
            and row["dead"] != "known"
            and row["passes"] == "yes"
        )
        if is_ours and matches(row, columns):
            values.append(float(row[column]))
    if not values:
        return None
    return max(values) if largest else min(values)


def ours(rows: Rows, T: int, live: float) -> float | None:
    return best(rows, HEAD, T, live, "ms")


def ratio(rows: Rows, T: int) -> float | None:
    sparse = ours(rows, T, 0.4)
    dense = ours(rows, T, 1.0)
    if sparse is None or dense is None:
        return None
    return sparse / dense


def over_best_peer(rows: Rows, T: int) -> float | None:
    """Our milliseconds at f = 0.4 over the fastest peer's; None if either is missing."""
    columns = {"head": HEAD, "T": str(T), "mode": BOTH, "live": "0.4", "dead": "found"}
    peers = []
    for row in rows:
        is_peer = (
            row["ms"] and row["implementation"] != "matmul" and "paw[" not in row["implementation"]
        )
        if is_peer and matches(row, columns):
            peers.append(float(row["ms"]))
    ms = ours(rows, T, 0.4)
    if ms is None or not peers:
        return None
    return ms / min(peers)


def memory_of(head: str) -> Callable[[Rows, Rows], float | None]:
    """The measurement of a head's GiB beside a float32 dW."""

    def gib(gpu: Rows, _: Rows) -> float | None:
        mib = best(gpu, head, 32_768, 1.0, "beside_dw_mib")
        return None if mib is None else mib / 1024

    return gib


def row_op(_: Rows, cpu: Rows) -> float | None:
    """Torch's milliseconds for the row statistics over ours on a CPU; None if either is missing."""
    ms = {
        row["implementation"]: float(row["ms"])
        for row in cpu
        if row["mode"] == "row statistics" and row["ms"]
    }
    if "torch" not in ms or "paw[cpu]" not in ms:
        return None
    return ms["torch"] / ms["paw[cpu]"]


def measured_rows() -> tuple[Rows, Rows]:
    """(rows of a GPU, an H200's if there is one; rows of a CPU); empty if there is no table."""
    gpus: list[Rows] = []
    cpus: list[Rows] = []
    for path in sorted(RESULTS.glob("kernels_*.csv")):
        rows = read(path)
        if not rows or rows[0]["kind"] != "measured":
            continue
        if rows[0]["cuda"]:
            gpus.append(rows)
        else:
            cpus.append(rows)
    gpus.sort(key=lambda rows: "H200" not in rows[0]["device"])
    return gpus[0] if gpus else [], cpus[0] if cpus else []


# --- the tables


def backends_and_peers() -> str:
    """Both backends on an H200, the gap to the bare matmuls, and peers' published numbers."""
    T, D, V = REFERENCE
    triton = paw(*REFERENCE, 1.0)
    cuda = paw_cuda(*REFERENCE, 1.0)
    flops_per_ms = BEST.tflops * 1e9
    fused = [term for term in triton if term.tiles]
    bare_ms = sum(term.flops for term in fused) / flops_per_ms
    allowed_ms = sum(term.ms(BEST) for term in fused) + REFERENCE_MS - total(triton, BEST)
    b200_tflops = 6 * T * D * V / total(fastest(*REFERENCE, 1.0, B200), B200) / 1e9
    return (
        f"Predicted at the reference point, f = 1: `triton` {span(triton)} ms, `cuda` {span(cuda)} ms; "
        f"the bare matmuls take {matmul_bound(*REFERENCE, 1.0):.2f} ms. With all else at its best, "
        f"`triton` takes 18 ms if its logits matmul with its epilogue reaches "
        f"{bare_ms / allowed_ms:.0%} of cuBLAS's rate.\n\n"
        f"Published by others, on an H200: QuACK {QUACK_MS:.2f} ms, Liger's CuTe kernel {LIGER_MS:.2f} ms. "
        f"At f = 1 our prediction is {verdict(predicted_ms(1.0, BEST))} .. "
        f"{verdict(predicted_ms(1.0, CAUTIOUS))} the faster of the two. On a B200 Liger publishes "
        f"{LIGER_B200_TFLOPS:,.0f} TFLOP/s; ours is predicted to reach {b200_tflops:,.0f}, if cuBLAS "
        "alone is as fast there as Liger's whole head."
    )


def span(terms: list[Term]) -> str:
    return f"{total(terms, BEST):.2f} .. {total(terms, CAUTIOUS):.2f}"


def verdict(ms: float) -> str:
    """A predicted time relative to the best peer's published one."""
    return f"{ms / min(QUACK_MS, LIGER_MS):.2f} x"


def markdown() -> str:
    """The table of what must be reached, and the two backends beside their peers."""
    gpu, cpu = measured_rows()
    lines = ["| what | must | predicted (margin) | measured |", "|---|---|---|---|"]
    lines += [must.line(gpu, cpu) for must in table()]
    lines += ["", backends_and_peers()]
    return "\n".join(lines)


def cpu_markdown() -> str:
    """Milliseconds and MiB of forward + backward on a CPU, a line for each implementation.

    Below it what must be reached, on this processor and on an older one.
    """
    rows = both_modes(read(RESULTS / "kernels_cpu.csv"))
    older = both_modes(read(RESULTS / "kernels_cpu_avx2.csv"))

    cells = {}
    cases = set()
    for row in rows:
        case = row["mode"], row["implementation"], row["live"]
        cells[*case, row["head"]] = time_and_memory(row)
        if row["live"] == "1.0" or row["implementation"] == "paw[cpu]":
            cases.add(case)

    heads = heads_of(rows)
    lines = titles(heads)
    for mode, name, live in sorted(cases):
        label = name
        if live != "1.0":
            label += f", f = {float(live):g}"
        if mode == STATISTICS:
            label += ", statistics"
        cells_of_line = [cells.get((mode, name, live, head), "") for head, *_ in heads]
        lines.append(f"| {label} | {' | '.join(cells_of_line)} |")

    lines += ["", "Speed over the fastest peer's, and what it must be:", "", *over_peers(rows)]
    lines += ["", "On the AVX2 processor:", "", *over_peers(older)]
    return "\n".join(lines)


def both_modes(rows: Rows) -> Rows:
    """The timed rows of forward + backward and of statistics + backward, without those whose dead
    rows are known."""
    return [
        row
        for row in rows
        if row["mode"] in (BOTH, STATISTICS) and row["dead"] != "known" and row["ms"]
    ]


def time_and_memory(row: dict[str, str]) -> str:
    ms = float(row["ms"])
    digits = f"{ms:,.4g}" if ms < 1e4 else f"{ms:,.0f}"
    return f"{digits} ms, {float(row['peak_mib']):,.0f} MiB"


def heads_of(rows: Rows) -> list[tuple[str, ...]]:
    """(head, T, D, V) of the rows, each once, in the order of the rows."""
    return list(dict.fromkeys((row["head"], row["T"], row["D"], row["V"]) for row in rows))


def titles(heads: list[tuple[str, ...]]) -> list[str]:
    shapes = [f"{T} x {int(V):,} x {D}" for _, T, D, V in heads]
    return [f"| T x V x D | {' | '.join(shapes)} |", "|---" * (1 + len(heads)) + "|"]


def over_peers(rows: Rows) -> list[str]:
    """The table of speeds over the fastest peer."""
    heads = heads_of(rows)
    lines = titles(heads)
    for label, mode, live, limits in CPU_MUSTS:
        cells = []
        for (head, *_), limit in zip(heads, limits, strict=False):
            speed_and_share = over_fastest_peer(rows, head, mode, live)
            if speed_and_share is None:
                cells.append("")
                continue
            speed, share = speed_and_share
            verdict = "met" if speed >= limit else "missed"
            cells.append(f"{speed:.2f}, must {limit:g}: {verdict} ({share:.0%} matmuls)")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


CPU_MUSTS = (
    ("f = 1", BOTH, "1.0", (1, 1, 1)),
    ("f = 0.4", BOTH, "0.4", (1.5, 1.5, 1.5)),
    ("statistics", STATISTICS, "1.0", (1, 1.3, 1.3)),
)
"""(label, mode, live, least speed over the fastest peer for each head)."""


def over_fastest_peer(rows: Rows, head: str, mode: str, live: str) -> tuple[float, float] | None:
    """(speed over the fastest peer, share of bare matmuls); None if either side is missing.

    Peers do the same work whatever f is: if none was timed beside ours, those at f = 1 count.
    """
    own_row = None
    peers = []
    for row in rows:
        if row["head"] != head or row["mode"] != mode:
            continue
        if not row["implementation"].startswith("paw["):
            peers.append(row)
        elif row["implementation"] == "paw[cpu]" and row["live"] == live and own_row is None:
            own_row = row
    if own_row is None or not peers:
        return None
    peers_beside = [row for row in peers if row["live"] == live]
    fastest = min(float(row["ms"]) for row in peers_beside or peers)
    return fastest / float(own_row["ms"]), float(own_row["share"])


def updated(text: str) -> str:
    """The page with today's tables, in the order of the marks."""
    parts = text.split(BEGIN)
    for i, block in enumerate((markdown(), cpu_markdown()), start=1):
        _, after = parts[i].split(END, 1)
        parts[i] = f"\n\n{block}\n\n{END}{after}"
    return BEGIN.join(parts)


if __name__ == "__main__":
    print(markdown())
    DOCS.write_text(updated(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
