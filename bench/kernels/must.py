"""The tables of docs/kernels.md: limits that must be met, predictions of the model, and measurements.

    python bench/kernels/must.py        # writes them into docs/kernels.md and prints the first

Predictions are those of bench/kernels/roofline.py for its best and its cautious machine. A
measurement is that of our fastest backend in the tables of bench/kernels/compare.py, or "open" if
no GPU has written one yet.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT
from bench.kernels.plot import BOTH, HEAD, STATISTICS, Records, matches, read
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
BEGIN = "<!-- python bench/kernels/must.py -->"
END = "<!-- end -->"
QUACK_MS = 16.78
LIGER_MS = 16.71
"""Forward + backward at the reference point on an H200, as published by QuACK and Liger (for its
CuTe kernel)."""
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
    """On the best and on the cautious machine."""
    measured: Callable[[Records, Records], float | None]
    """(records of a GPU, records of a CPU) -> the value, or None if they do not contain it."""

    def met(self, value: float) -> bool:
        return value <= self.limit if self.sign == "<=" else value >= self.limit

    def margin(self, value: float) -> str:
        ratio = value / self.limit
        margin = 1 - ratio if self.sign == "<=" else ratio - 1
        return f"{margin:+.0%}"

    def line(self, gpu_records: Records, cpu_records: Records) -> str:
        limit = f"{self.sign} {self.limit:.2f}"
        measurement = self._measurement(gpu_records, cpu_records)
        return f"| {self.what} | {limit} | {self._prediction()} | {measurement} |"

    def _prediction(self) -> str:
        if self.predicted is None:
            return ""
        best_value, cautious = self.predicted
        values = f"{best_value:.2f}"
        margins = self.margin(best_value)
        if best_value != cautious:
            values += f" .. {cautious:.2f}"
            margins += f" .. {self.margin(cautious)}"
        machines_that_meet_it = self.met(best_value) + self.met(cautious)
        verdict = ("missed", "depends", "met")[machines_that_meet_it]
        return f"{values} ({margins}): {verdict}"

    def _measurement(self, gpu_records: Records, cpu_records: Records) -> str:
        value = self.measured(gpu_records, cpu_records)
        if value is None:
            return "open"
        return f"{value:.2f}: {'met' if self.met(value) else 'missed'}"


def table() -> list[Must]:
    """Every line of the first table."""
    musts = reference_musts()
    for head_name in ("Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B"):
        predicted_gib = paw_memory(32_768, *HEADS[head_name])["peak"]
        memory = Must(
            f"GiB over inputs and a float32 dW, T 32k, {head_name}",
            sign="<=",
            limit=1.5,
            predicted=(predicted_gib, predicted_gib),
            measured=memory_of(head_name),
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
    """The lines about times at the reference point on a GPU."""
    T, _, _ = REFERENCE
    dense_best = predicted_ms(1.0, BEST)
    dense_cautious = predicted_ms(1.0, CAUTIOUS)
    sparse_best = predicted_ms(0.4, BEST)
    sparse_cautious = predicted_ms(0.4, CAUTIOUS)
    best_peer_ms = min(QUACK_MS, LIGER_MS)
    bound_ms = matmul_bound(*REFERENCE, 1.0)

    return [
        Must(
            "reference point, f = 1, ms",
            sign="<=",
            limit=REFERENCE_MS,
            predicted=(dense_best, dense_cautious),
            measured=lambda gpu_records, _: ours(gpu_records, T, 1.0),
        ),
        Must(
            "f = 0.4 over its own f = 1",
            sign="<=",
            limit=0.65,
            predicted=(sparse_best / dense_best, sparse_cautious / dense_cautious),
            measured=lambda gpu_records, _: ratio(gpu_records, T),
        ),
        Must(
            "f = 0.4, ms over the best peer's",
            sign="<=",
            limit=1 / 1.4,
            predicted=(sparse_best / best_peer_ms, sparse_cautious / best_peer_ms),
            measured=lambda gpu_records, _: over_best_peer(gpu_records, T),
        ),
        Must(
            "share of the matmul bound, f = 1",
            sign=">=",
            limit=0.9,
            predicted=(bound_ms / dense_best, bound_ms / dense_cautious),
            measured=lambda gpu_records, _: best(gpu_records, HEAD, T, 1.0, "share", largest=True),
        ),
    ]


def predicted_ms(live_share: float, machine: Machine) -> float:
    """Milliseconds at the reference point, by whichever backend is predicted to be faster."""
    return total(fastest(*REFERENCE, live_share, machine), machine)


# --- what the records of a GPU or a CPU say


def best(
    records: Records,
    head_name: str,
    T: int,
    live_share: float,
    column: str,
    *,
    largest: bool = False,
) -> float | None:
    """The smallest (or largest) value of our backends in forward + backward.

    Cases whose dead rows are known beforehand do not count, nor do inaccurate ones. None if no
    record is left.
    """
    columns = {"head": head_name, "T": str(T), "live": str(live_share), "mode": BOTH}
    values = []
    for record in records:
        is_ours = (
            record["implementation"].startswith("paw[")
            and record["dead"] != "known"
            and record["passes"] == "yes"
        )
        if is_ours and matches(record, columns):
            values.append(float(record[column]))
    if not values:
        return None
    return max(values) if largest else min(values)


def ours(records: Records, T: int, live_share: float) -> float | None:
    return best(records, HEAD, T, live_share, "ms")


def ratio(records: Records, T: int) -> float | None:
    sparse_ms = ours(records, T, 0.4)
    dense_ms = ours(records, T, 1.0)
    if sparse_ms is None or dense_ms is None:
        return None
    return sparse_ms / dense_ms


def over_best_peer(records: Records, T: int) -> float | None:
    """Our milliseconds at f = 0.4 divided by the fastest peer's; None if either is missing."""
    columns = {"head": HEAD, "T": str(T), "mode": BOTH, "live": "0.4", "dead": "found"}
    peer_times = []
    for record in records:
        is_peer = (
            record["ms"]
            and record["implementation"] != "matmul"
            and "paw[" not in record["implementation"]
        )
        if is_peer and matches(record, columns):
            peer_times.append(float(record["ms"]))
    our_ms = ours(records, T, 0.4)
    if our_ms is None or not peer_times:
        return None
    return our_ms / min(peer_times)


def memory_of(head_name: str) -> Callable[[Records, Records], float | None]:
    """The function that reads the GiB of a head beside a float32 dW."""

    def gib(gpu_records: Records, _: Records) -> float | None:
        peak_mib = best(gpu_records, head_name, 32_768, 1.0, "beside_dw_mib")
        return None if peak_mib is None else peak_mib / 1024

    return gib


def row_op(_: Records, cpu_records: Records) -> float | None:
    """Torch's ms for the row statistics divided by ours on a CPU; None if either is missing."""
    ms_by_implementation = {}
    for record in cpu_records:
        if record["mode"] == "row statistics" and record["ms"]:
            ms_by_implementation[record["implementation"]] = float(record["ms"])
    if "torch" not in ms_by_implementation or "paw[cpu]" not in ms_by_implementation:
        return None
    return ms_by_implementation["torch"] / ms_by_implementation["paw[cpu]"]


def measured_rows() -> tuple[Records, Records]:
    """(records of a GPU, preferably an H200; records of a CPU). Empty if there is no table."""
    gpu_tables: list[Records] = []
    cpu_tables: list[Records] = []
    for table_path in sorted(RESULTS.glob("kernels_*.csv")):
        records = read(table_path)
        if not records or records[0]["kind"] != "measured":
            continue
        if records[0]["cuda"]:
            gpu_tables.append(records)
        else:
            cpu_tables.append(records)
    gpu_tables.sort(key=lambda records: "H200" not in records[0]["device"])
    return gpu_tables[0] if gpu_tables else [], cpu_tables[0] if cpu_tables else []


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


def verdict(predicted: float) -> str:
    """A predicted time relative to the best peer's published one."""
    return f"{predicted / min(QUACK_MS, LIGER_MS):.2f} x"


def markdown() -> str:
    """The table of what must be reached, and both backends beside their peers."""
    gpu_records, cpu_records = measured_rows()
    table_lines = ["| what | must | predicted (margin) | measured |", "|---|---|---|---|"]
    table_lines += [must.line(gpu_records, cpu_records) for must in table()]
    table_lines += ["", backends_and_peers()]
    return "\n".join(table_lines)


def cpu_markdown() -> str:
    """Milliseconds and MiB of forward + backward on a CPU, with a line for each implementation.

    Below that, what must be reached, on this processor and on an older one.
    """
    records = both_modes(read(RESULTS / "kernels_cpu.csv"))
    older_records = both_modes(read(RESULTS / "kernels_cpu_avx2.csv"))

    cell_texts = {}
    case_keys = set()
    for record in records:
        case_key = record["mode"], record["implementation"], record["live"]
        cell_texts[*case_key, record["head"]] = time_and_memory(record)
        if record["live"] == "1.0" or record["implementation"] == "paw[cpu]":
            case_keys.add(case_key)

    head_shapes = heads_of(records)
    table_lines = titles(head_shapes)
    for mode, implementation, live_share in sorted(case_keys):
        label = implementation
        if live_share != "1.0":
            label += f", f = {float(live_share):g}"
        if mode == STATISTICS:
            label += ", statistics"
        cells_of_line = [
            cell_texts.get((mode, implementation, live_share, head_name), "")
            for head_name, *_ in head_shapes
        ]
        table_lines.append(f"| {label} | {' | '.join(cells_of_line)} |")

    table_lines += ["", "Speed over the fastest peer's, and what it must be:", ""]
    table_lines += over_peers(records)
    table_lines += ["", "On the AVX2 processor:", "", *over_peers(older_records)]
    return "\n".join(table_lines)


def both_modes(records: Records) -> Records:
    """The timed records of forward + backward and statistics + backward, except those whose dead
    rows are known."""
    timed_records = []
    for record in records:
        is_found = record["dead"] != "known"
        if record["mode"] in (BOTH, STATISTICS) and is_found and record["ms"]:
            timed_records.append(record)
    return timed_records


def time_and_memory(record: dict[str, str]) -> str:
    milliseconds = float(record["ms"])
    digits = f"{milliseconds:,.4g}" if milliseconds < 1e4 else f"{milliseconds:,.0f}"
    return f"{digits} ms, {float(record['peak_mib']):,.0f} MiB"


def heads_of(records: Records) -> list[tuple[str, ...]]:
    """The distinct (head, T, D, V) of the records, in their order."""
    return list(
        dict.fromkeys((record["head"], record["T"], record["D"], record["V"]) for record in records)
    )


def titles(head_shapes: list[tuple[str, ...]]) -> list[str]:
    shapes = [f"{T} x {int(V):,} x {D}" for _, T, D, V in head_shapes]
    return [f"| T x V x D | {' | '.join(shapes)} |", "|---" * (1 + len(head_shapes)) + "|"]


def over_peers(records: Records) -> list[str]:
    """The table of speeds relative to the fastest peer."""
    head_shapes = heads_of(records)
    table_lines = titles(head_shapes)
    for label, mode, live_share, limits in CPU_MUSTS:
        cells = []
        for (head_name, *_), limit in zip(head_shapes, limits, strict=False):
            speed_and_share = over_fastest_peer(records, head_name, mode, live_share)
            if speed_and_share is None:
                cells.append("")
                continue
            speed, share = speed_and_share
            verdict = "met" if speed >= limit else "missed"
            cells.append(f"{speed:.2f}, must {limit:g}: {verdict} ({share:.0%} matmuls)")
        table_lines.append(f"| {label} | {' | '.join(cells)} |")
    return table_lines


CPU_MUSTS = (
    ("f = 1", BOTH, "1.0", (1, 1, 1)),
    ("f = 0.4", BOTH, "0.4", (1.5, 1.5, 1.5)),
    ("statistics", STATISTICS, "1.0", (1, 1.3, 1.3)),
)
"""(label, mode, live, least speed relative to the fastest peer for each head)."""


def over_fastest_peer(
    records: Records, head_name: str, mode: str, live_share: str
) -> tuple[float, float] | None:
    """(speed relative to the fastest peer, share of bare matmuls), or None if either side is
    missing.

    Peers do the same work for every f. If none was timed beside ours, those at f = 1 count.
    """
    own_record = None
    peer_records = []
    for record in records:
        if record["head"] != head_name or record["mode"] != mode:
            continue
        if not record["implementation"].startswith("paw["):
            peer_records.append(record)
        elif (
            record["implementation"] == "paw[cpu]"
            and record["live"] == live_share
            and own_record is None
        ):
            own_record = record
    if own_record is None or not peer_records:
        return None
    peers_beside = [record for record in peer_records if record["live"] == live_share]
    fastest = min(float(record["ms"]) for record in peers_beside or peer_records)
    return fastest / float(own_record["ms"]), float(own_record["share"])


def updated(page: str) -> str:
    """The page with the current tables between its marks, in order."""
    sections = page.split(BEGIN)
    for position, tables in enumerate((markdown(), cpu_markdown()), start=1):
        _, rest_of_page = sections[position].split(END, 1)
        sections[position] = f"\n\n{tables}\n\n{END}{rest_of_page}"
    return BEGIN.join(sections)


if __name__ == "__main__":
    print(markdown())
    DOCS.write_text(updated(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
