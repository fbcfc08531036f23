"""A GPU's first hour: everything of PaW that waits for one, measured by one command.

    make gpu                                      # python bench/gpu/first_hour.py
    python bench/gpu/first_hour.py --list         # prints the commands, runs nothing
    python bench/gpu/first_hour.py --only update  # parts with a word in their name; other rows stay
    python bench/gpu/first_hour.py --page         # renews the table of docs/gpu.md

Each part is a process of its own. One that fails, lacks a library or runs out of memory or time
costs its own rows, which say so. The table is printed and written to
bench/results/gpu_<device>.csv, after each part. Logs are in build/gpu/. Exit code 2 without a GPU,
1 if a part failed, 130 after Ctrl-C, otherwise 0.
"""

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, read, write
from bench.gpu.parts import MODEL, Part, parts
from paw.errors import clean, to_stderr

LOGS = ROOT / "build" / "gpu"
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- python bench/gpu/first_hour.py --page -->", "<!-- end -->"
NOT_MEASURED = "not measured"
TICK_S = 1.0
"""Seconds between two looks at a part that runs."""
GRACE_S = 10.0
"""Seconds that a part has to end after SIGTERM."""


@dataclass(frozen=True)
class Row:
    """A value of the table, or why it is missing."""

    part: str
    case: str
    measure: str
    unit: str
    value: float | None = None
    reason: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.part, self.case, self.measure


def empty_rows(chosen: Sequence[Part]) -> list[Row]:
    """The rows of these parts, without values."""
    rows = []
    for part in chosen:
        for case, measures in part.cases.items():
            for measure, unit in measures.items():
                rows.append(Row(part.name, case, measure, unit))
    return rows


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    every = parts(options.model)
    if options.page:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_table(page), encoding="utf-8")
        return 0
    chosen = [part for part in every if matches(part, options.only)]
    if not chosen:
        names = ", ".join(dict.fromkeys(part.name for part in every))
        to_stderr(f"--only {' '.join(options.only)}: no part has that in its name: {names}")
        return 2
    if options.list:
        for part in chosen:
            print(f"{part.name}: python {shlex.join(part.command)}")
        return 0

    facts = machine()
    if "error" in facts or (options.device == "cuda" and facts["gpus"] == "0"):
        reason = facts.get("error") or f"torch {facts['torch']} sees none"
        to_stderr(f"make gpu: no GPU: {reason} (paw doctor says what is installed)")
        return 2
    name = facts["device"].lower().replace(" ", "_").replace("/", "_")
    table = options.out or RESULTS / f"gpu_{name}.csv"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    return measure(every, chosen, facts, table, options.logs)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="parts to run")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--page", action="store_true", help=f"renew the table of {PAGE.name}")
    parser.add_argument("--model", default=MODEL, help="a shape, or quickstart: a tiny model")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="CSV file (default: in bench/results)")
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder of the parts' output")
    return parser.parse_args(arguments)


def matches(part: Part, words: Sequence[str]) -> bool:
    """Whether the part is chosen: without words every part is."""
    return not words or any(word in part.name or word in part.cases for word in words)


def machine() -> dict[str, str]:
    """What bench/gpu/machine.py prints; without torch, {"error": the last line of its output}."""
    command = [sys.executable, "bench/gpu/machine.py"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or ["no output"]
        return {"error": clean(lines[-1], 200)}
    return json.loads(answer.stdout)


def measure(
    every: Sequence[Part],
    chosen: Sequence[Part],
    facts: dict[str, str],
    table: Path,
    logs: Path,
) -> int:
    """Run the chosen parts, write and print the table. Returns the exit code."""
    logs.mkdir(parents=True, exist_ok=True)
    rows = {row.key: row for row in empty_rows(every)}
    rows |= {row.key: row for row in earlier_rows(table, facts) if row.key in rows}
    exit_code = 0
    for number, part in enumerate(chosen, 1):
        cases = ", ".join(part.cases) if len(part.cases) < 3 else f"{len(part.cases)} cases"
        print(f"[{number}/{len(chosen)}] {part.name}: {cases}", flush=True)
        started = time.monotonic()
        try:
            measured = run(part, logs)
        except KeyboardInterrupt:
            measured = [replace(row, reason="interrupted") for row in empty_rows([part])]
            exit_code = 130
        rows |= {row.key: row for row in measured}
        save(table, list(rows.values()), facts)
        missing = {row.reason for row in measured if row.value is None}
        outcome = "; ".join(sorted(missing)) or "measured"
        print(f"    {time.monotonic() - started:.0f} s: {outcome}", flush=True)
        if exit_code:
            break
    print()
    print(markdown(list(rows.values()), facts))
    print(f"\n{table} has the values: send it in with a pull request. Logs: {logs}")
    if not exit_code and any(failed(row) for row in rows.values()):
        exit_code = 1
    return exit_code


def failed(row: Row) -> bool:
    """Whether the row names a fault, not a library that is missing."""
    if row.measure in ("failed", "exit_code") and row.value:
        return True
    return row.reason.startswith(("exit code", "stopped"))


def run(part: Part, logs: Path) -> list[Row]:
    """Run a part. Returns its rows, each with a value or a reason."""
    for module, package in part.needs.items():
        if not importlib.util.find_spec(module):
            reason = f"{module} is not installed: pip install {package}"
            return [replace(row, reason=reason) for row in empty_rows([part])]

    out = logs / part.out if part.out else logs / "nothing"
    out.unlink(missing_ok=True)
    words = [word.replace("{out}", str(out)) for word in part.command]
    slug = part.out.partition(".")[0] or part.name.replace(" ", "-")
    log = logs / f"{slug}.log"
    exit_code, why_stopped = run_process([sys.executable, *words], log, minutes=part.minutes)

    reading = part.read(out, exit_code)
    reason = why_stopped
    if not reason and exit_code:
        reason = f"exit code {exit_code}: {last_line(log)}"
    rows = []
    for row in empty_rows([part]):
        value = reading.values.get((row.case, row.measure))
        if why_stopped and row.measure == "exit_code":
            value = None
        if value is None:
            row_reason = (
                reading.reasons.get(row.case) or reason or "not installed, or not for this GPU"
            )
            rows.append(replace(row, reason=row_reason))
        else:
            rows.append(replace(row, value=value))
    return rows


def run_process(command: list[str], log: Path, *, minutes: float) -> tuple[int, str]:
    """Run a command, its output in `log`. Returns (exit code, why it was stopped or "").

    It runs in a process group of its own, which is ended with it. On a terminal, a line shows the
    seconds and the last line of its output.
    """
    limit_s = 60 * minutes
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            while True:
                try:
                    return process.wait(timeout=TICK_S), ""
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - started
                    show(f"    {seconds:.0f} s: {last_line(log)}")
                if seconds > limit_s:
                    return -signal.SIGTERM, f"stopped after {minutes:g} minutes: {last_line(log)}"
        finally:
            show("")
            end_group(process)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of a process group: SIGTERM, then SIGKILL after GRACE_S."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def show(line: str) -> None:
    """Replace the last line of a terminal. Elsewhere nothing is printed."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K{line[:100]}", end="", flush=True)


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        if line.strip():
            return clean(line.strip(), 160)
    return "no output"


def save(table: Path, rows: Sequence[Row], facts: dict[str, str]) -> None:
    lines = []
    for row in rows:
        value = "" if row.value is None else f"{row.value:.6g}"
        reason = row.reason
        if row.value is None and not reason:
            reason = NOT_MEASURED
        line = {"part": row.part, "case": row.case, "measure": row.measure, "unit": row.unit}
        lines.append(line | {"value": value, "reason": reason} | facts)
    write(table, lines)


def earlier_rows(table: Path, facts: dict[str, str]) -> list[Row]:
    """The rows of a table that was written on the same machine by the same versions."""
    if not table.exists():
        return []
    rows = []
    for line in read(table):
        if facts.items() <= line.items():
            value = float(line["value"]) if line["value"] else None
            reason = "" if line["reason"] == NOT_MEASURED else line["reason"]
            rows.append(
                Row(line["part"], line["case"], line["measure"], line["unit"], value, reason)
            )
    return rows


def markdown(rows: Sequence[Row], facts: dict[str, str]) -> str:
    """The table: a line for each case, with its values or the reason why there are none."""
    lines = []
    if facts:
        known = [f"{name} {value}" for name, value in facts.items() if value]
        lines += [", ".join(known), ""]
    lines += ["| what | case | measured |", "|---|---|---|"]
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row.part, row.case), []).append(row)
    for (part, case), of_case in cases.items():
        lines.append(f"| {part} | {case} | {result(of_case)} |")
    return "\n".join(lines)


def result(of_case: Sequence[Row]) -> str:
    """The values of a case with their units."""
    texts = []
    for row in of_case:
        if row.value is not None:
            number = f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:.4g}"
            texts.append(f"{number} {row.unit}")
    if texts:
        return ", ".join(texts)
    units = ", ".join(row.unit for row in of_case)
    return (
        f"{NOT_MEASURED}: {of_case[0].reason}" if of_case[0].reason else f"{NOT_MEASURED} ({units})"
    )


def with_table(page: str) -> str:
    """The page with the table of today, no value of which is measured."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE}: {BEGIN} and {END} are missing")
    table = markdown(empty_rows(parts()), {})
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
