"""The tables of docs/kernels.md: what must be reached, what the model predicts, what was measured.

    python bench/kernels_must.py        # puts them into docs/kernels.md and prints the first

Predicted: from bench/roofline.py, on its best and its cautious machine. Measured: from the tables of bench/kernels.py,
the fastest backend of ours; "open" where no GPU has written one yet.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.kernels_plot import BOTH, HEAD, STATISTICS, Rows, read
from bench.kernels_problem import HEADS
from bench.roofline import BEST, CAUTIOUS, REFERENCE, TERMS, Term, matmul_bound, paw, paw_memory, total

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- python bench/kernels_must.py -->", "<!-- end -->"
QUACK_MS = 17.33
"""Forward + backward at the reference point on an H200, printed in Liger-Kernel 0.8.5's Hopper kernel."""


@dataclass(frozen=True)
class Must:
    what: str
    sign: str
    limit: float
    predicted: tuple[float, float] | None
    """On the best and the cautious machine."""
    measured: Callable[[Rows, Rows], float | None]
    """From the rows of a GPU and those of a CPU; None where they do not say."""

    def met(self, value: float) -> bool:
        return value <= self.limit if self.sign == "<=" else value >= self.limit

    def margin(self, value: float) -> str:
        return f"{1 - value / self.limit if self.sign == '<=' else value / self.limit - 1:+.0%}"

    def line(self, gpu: Rows, cpu: Rows) -> str:
        predicted, measured = "", self.measured(gpu, cpu)
        if self.predicted is not None:
            best, cautious = self.predicted
            met = self.met(best) + self.met(cautious)
            margins = f"{self.margin(best)} .. {self.margin(cautious)}" if best != cautious else self.margin(best)
            values = f"{best:.2f} .. {cautious:.2f}" if best != cautious else f"{best:.2f}"
            predicted = f"{values} ({margins}): {('missed', 'depends', 'met')[met]}"
        found = "open" if measured is None else f"{measured:.2f}: {'met' if self.met(measured) else 'missed'}"
        return f"| {self.what} | {self.sign} {self.limit:.2f} | {predicted} | {found} |"


def table() -> list[Must]:
    dense, sparse = paw(*REFERENCE, 1.0), paw(*REFERENCE, 0.4)
    d, s = ([total(terms, machine) for machine in (BEST, CAUTIOUS)] for terms in (dense, sparse))
    bound = matmul_bound(*REFERENCE, 1.0)
    T, _, _ = REFERENCE
    found = [
        Must("reference point, f = 1, ms", "<=", 18.0, (d[0], d[1]), lambda gpu, _: ours(gpu, T, 1.0)),
        Must("f = 0.4 over its own f = 1", "<=", 0.65, (s[0] / d[0], s[1] / d[1]), lambda gpu, _: ratio(gpu, T)),
        Must("f = 0.4, ms over the best peer's", "<=", 1 / 1.4, (s[0] / QUACK_MS, s[1] / QUACK_MS),
             lambda gpu, _: over_best_peer(gpu, T)),
        Must("share of the matmul bound, f = 1", ">=", 0.9, (bound / d[0], bound / d[1]),
             lambda gpu, _: best(gpu, HEAD, T, 1.0, "share", largest=True)),
    ]  # fmt: skip
    for head in ("Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B"):
        gib = paw_memory(32_768, *HEADS[head])["peak"]
        found.append(Must(f"GiB over inputs and a float32 dW, T 32k, {head}", "<=", 1.5, (gib, gib), memory_of(head)))
    found.append(Must("row statistics on a CPU, 256 x 151,936, times as fast as torch", ">=", 5, None, row_op))
    return found


def best(rows: Rows, head: str, T: int, live: float, column: str, *, largest: bool = False) -> float | None:
    """Over our backends, forward + backward, dead rows found by the forward."""
    where = {"head": head, "T": str(T), "live": str(live), "mode": BOTH}
    mine = [r for r in rows if r["implementation"].startswith("paw[") and r["dead"] != "known" and r["passes"] == "yes"]
    values = [float(r[column]) for r in mine if all(r[name] == value for name, value in where.items())]
    return (max if largest else min)(values) if values else None


def ours(rows: Rows, T: int, live: float) -> float | None:
    return best(rows, HEAD, T, live, "ms")


def ratio(rows: Rows, T: int) -> float | None:
    sparse, dense = ours(rows, T, 0.4), ours(rows, T, 1.0)
    return None if sparse is None or dense is None else sparse / dense


def over_best_peer(rows: Rows, T: int) -> float | None:
    where = {"head": HEAD, "T": str(T), "mode": BOTH, "live": "0.4", "dead": "found"}
    theirs = [r for r in rows if r["ms"] and r["implementation"] != "matmul" and "paw[" not in r["implementation"]]
    peers = [float(r["ms"]) for r in theirs if all(r[name] == value for name, value in where.items())]
    mine = ours(rows, T, 0.4)
    return None if mine is None or not peers else mine / min(peers)


def memory_of(head: str) -> Callable[[Rows, Rows], float | None]:
    def gib(gpu: Rows, _: Rows) -> float | None:
        mib = best(gpu, head, 32_768, 1.0, "beside_dw_mib")
        return None if mib is None else mib / 1024

    return gib


def row_op(_: Rows, cpu: Rows) -> float | None:
    ms = {r["implementation"]: float(r["ms"]) for r in cpu if r["mode"] == "row statistics" and r["ms"]}
    return ms["torch"] / ms["paw[cpu]"] if {"torch", "paw[cpu]"} <= ms.keys() else None


def measured_rows() -> tuple[Rows, Rows]:
    """Of a GPU (an H200's, if there is one) and of a CPU."""
    tables = [read(path) for path in sorted((ROOT / "bench" / "results").glob("kernels_*.csv"))]
    tables = [rows for rows in tables if rows and rows[0]["kind"] == "measured"]
    gpus = sorted((rows for rows in tables if rows[0]["cuda"]), key=lambda rows: "H200" not in rows[0]["device"])
    cpus = [rows for rows in tables if not rows[0]["cuda"]]
    return gpus[0] if gpus else [], cpus[0] if cpus else []


def gap() -> str:
    """Where the time above the bare matmuls goes on the best machine, and how slow the fused matmul may be."""
    terms = paw(*REFERENCE, 1.0)
    rate = BEST.tflops * 1e9

    def over(name: str) -> float:
        mine: list[Term] = [term for term in terms if term.name == name]
        return sum(term.ms(BEST) - term.flops / rate for term in mine)

    largest = sorted(TERMS, key=over, reverse=True)[:3]
    fused = [term for term in terms if term.tiles]
    share = sum(term.flops for term in fused) / rate / (sum(term.ms(BEST) for term in fused) + 18 - total(terms, BEST))
    return (
        f"Predicted gap to the bare matmuls ({matmul_bound(*REFERENCE, 1.0):.2f} ms) at the reference point: "
        f"{', '.join(f'{name} {over(name):.2f} ms' for name in largest)}. "
        "With all else at its best, 18 ms hold while the logits matmul with its epilogue reaches "
        f"{share:.0%} of cuBLAS's rate."
    )


def markdown() -> str:
    gpu, cpu = measured_rows()
    head = ["| what | must | predicted (margin) | measured |", "|---|---|---|---|"]
    return "\n".join([*head, *(must.line(gpu, cpu) for must in table()), "", gap()])


def cpu_markdown() -> str:
    """Milliseconds and MiB of forward + backward on a CPU, a line an implementation; then what must be reached, there
    and on an older processor."""
    rows, older = (both_modes(read(ROOT / "bench" / "results" / f"kernels_cpu{name}.csv")) for name in ("", "_avx2"))
    heads = heads_of(rows)
    lines = list(dict.fromkeys((r["mode"], r["implementation"], r["live"]) for r in rows))
    lines = [(mode, name, live) for mode, name, live in lines if live == "1.0" or name == "paw[cpu]"]
    cells = {}
    for r in rows:
        ms = float(r["ms"])
        text = f"{ms:,.4g}" if ms < 1e4 else f"{ms:,.0f}"
        cells[r["mode"], r["implementation"], r["live"], r["head"]] = f"{text} ms, {float(r['peak_mib']):,.0f} MiB"
    found = titles(heads)
    for mode, name, live in sorted(lines):
        text = (
            f"{name}{'' if live == '1.0' else f', f = {float(live):g}'}{', statistics' if mode == STATISTICS else ''}"
        )
        found.append(f"| {text} | {' | '.join(cells.get((mode, name, live, head), '') for head, *_ in heads)} |")
    found += ["", "Speed over the fastest peer's, and what it must be:", "", *over_peers(rows)]
    return "\n".join([*found, "", "On the AVX2 processor:", "", *over_peers(older)])


def both_modes(rows: Rows) -> Rows:
    return [r for r in rows if r["mode"] in (BOTH, STATISTICS) and r["dead"] != "known" and r["ms"]]


def heads_of(rows: Rows) -> list[tuple[str, ...]]:
    return list(dict.fromkeys((r["head"], r["T"], r["D"], r["V"]) for r in rows))


def titles(heads: list[tuple[str, ...]]) -> list[str]:
    shapes = [f"{T} x {int(V):,} x {D}" for _, T, D, V in heads]
    return [f"| T x V x D | {' | '.join(shapes)} |", "|---" * (1 + len(heads)) + "|"]


def over_peers(rows: Rows) -> list[str]:
    """The table of speeds over the fastest peer."""
    found = titles(heads_of(rows))
    for text, mode, live, musts in CPU_MUSTS:
        over = [over_fastest_peer(rows, head, mode, live) for head, *_ in heads_of(rows)]
        words = [
            ""
            if x is None
            else f"{x[0]:.2f}, must {must:g}: {'met' if x[0] >= must else 'missed'} ({x[1]:.0%} matmuls)"
            for x, must in zip(over, musts, strict=False)
        ]
        found.append(f"| {text} | {' | '.join(words)} |")
    return found


CPU_MUSTS = (
    ("f = 1", BOTH, "1.0", (1, 1, 1)),
    ("f = 0.4", BOTH, "0.4", (1.5, 1.5, 1.5)),
    ("statistics", STATISTICS, "1.0", (1, 1.3, 1.3)),
)


def over_fastest_peer(rows: Rows, head: str, mode: str, live: str) -> tuple[float, float] | None:
    """And the share of bare matmuls. Peers do the same work whatever f is: where none was timed beside ours, those at
    f = 1 count."""
    mine = [r for r in rows if (r["head"], r["mode"], r["live"], r["implementation"]) == (head, mode, live, "paw[cpu]")]
    peers = [r for r in rows if (r["head"], r["mode"]) == (head, mode) and not r["implementation"].startswith("paw[")]
    beside = [r for r in peers if r["live"] == live]
    theirs = [float(r["ms"]) for r in beside or peers]
    return (min(theirs) / float(mine[0]["ms"]), float(mine[0]["share"])) if mine and theirs else None


def updated(text: str) -> str:
    """The page with the tables of today, in the order of the marks."""
    parts = text.split(BEGIN)
    for i, block in enumerate((markdown(), cpu_markdown()), start=1):
        parts[i] = f"\n\n{block}\n\n{END}{parts[i].split(END, 1)[1]}"
    return BEGIN.join(parts)


if __name__ == "__main__":
    print(markdown())
    DOCS.write_text(updated(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
