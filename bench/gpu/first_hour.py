"""A GPU's first hour: one command measures everything in PaW that needs a GPU.

    make gpu                                      # python bench/gpu/first_hour.py
    python bench/gpu/first_hour.py --list         # prints the commands, runs nothing
    python bench/gpu/first_hour.py --only update  # parts with a word in their name; other rows stay
    python bench/gpu/first_hour.py --page         # updates the table in docs/gpu.md

Each part runs in its own process. A part that fails, lacks a library, or runs out of memory or time
loses only its own rows, and they say why. The table is written to bench/results/gpu_<device>.csv
after each part and printed at the end. Logs are in build/gpu/. The exit code is 2 without a GPU,
1 if a part failed, 130 after Ctrl-C, and otherwise 0.
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
BEGIN = "<!-- python bench/gpu/first_hour.py --page -->"
END = "<!-- end -->"
NOT_MEASURED = "not measured"
TICK_S = 1.0
"""Seconds between two checks of a running part."""
GRACE_S = 10.0
"""Seconds a part is given to end after SIGTERM."""


@dataclass(frozen=True)
class Measurement:
    """A row of the table: a value, or why it is missing."""

    part: str
    case: str
    measure: str
    unit: str
    value: float | None = None
    reason: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.part, self.case, self.measure


def without_values(chosen: Sequence[Part]) -> list[Measurement]:
    """The measurements that these parts make, without values."""
    measurements = []
    for part in chosen:
        for case, measures in part.cases.items():
            for measure, unit in measures.items():
                measurements.append(Measurement(part.name, case, measure, unit))
    return measurements


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    all_parts = parts(options.model)
    if options.page:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_table(page), encoding="utf-8")
        return 0
    chosen = [part for part in all_parts if matches(part, options.only)]
    if not chosen:
        part_names = ", ".join(dict.fromkeys(part.name for part in all_parts))
        to_stderr(f"--only {' '.join(options.only)}: no part has that in its name: {part_names}")
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
    device_name = facts["device"].lower().replace(" ", "_").replace("/", "_")
    table_path = options.out or RESULTS / f"gpu_{device_name}.csv"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    return measure(all_parts, chosen, facts, table_path, options.logs)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="parts to run")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--page", action="store_true", help=f"update the table in {PAGE.name}")
    parser.add_argument(
        "--model", default=MODEL, help="a known shape, or quickstart for a tiny model"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="CSV file (default: in bench/results)")
    parser.add_argument("--logs", type=Path, default=LOGS, help="folder of the parts' output")
    return parser.parse_args(arguments)


def matches(part: Part, words: Sequence[str]) -> bool:
    """Whether a name of the part contains one of the words. Without words, every part matches."""
    return not words or any(wanted in part.name or wanted in part.cases for wanted in words)


def machine() -> dict[str, str]:
    """What bench/gpu/machine.py prints; without torch, {"error": the last line of its output}."""
    command = [sys.executable, "bench/gpu/machine.py"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if answer.returncode:
        error_lines = answer.stderr.strip().splitlines() or ["no output"]
        return {"error": clean(error_lines[-1], 200)}
    return json.loads(answer.stdout)


def measure(
    all_parts: Sequence[Part],
    chosen: Sequence[Part],
    facts: dict[str, str],
    table_path: Path,
    logs: Path,
) -> int:
    """Run the chosen parts, write and print the table. Returns the exit code."""
    logs.mkdir(parents=True, exist_ok=True)
    measurements = {measurement.key: measurement for measurement in without_values(all_parts)}
    for earlier in earlier_measurements(table_path, facts):
        if earlier.key in measurements:
            measurements[earlier.key] = earlier
    exit_code = 0
    for number, part in enumerate(chosen, 1):
        cases = ", ".join(part.cases) if len(part.cases) < 3 else f"{len(part.cases)} cases"
        print(f"[{number}/{len(chosen)}] {part.name}: {cases}", flush=True)
        started = time.monotonic()
        try:
            measured = run(part, logs)
        except KeyboardInterrupt:
            measured = [
                replace(missing, reason="interrupted") for missing in without_values([part])
            ]
            exit_code = 130
        measurements |= {measurement.key: measurement for measurement in measured}
        save(table_path, list(measurements.values()), facts)
        reasons = {measurement.reason for measurement in measured if measurement.value is None}
        outcome = "; ".join(sorted(reasons)) or "measured"
        print(f"    {time.monotonic() - started:.0f} s: {outcome}", flush=True)
        if exit_code:
            break
    print()
    print(markdown(list(measurements.values()), facts))
    print(f"\n{table_path} has the values: send it in with a pull request. Logs: {logs}")
    if not exit_code and any(failed(measurement) for measurement in measurements.values()):
        exit_code = 1
    return exit_code


def failed(measurement: Measurement) -> bool:
    """Whether the measurement reports a fault, rather than a missing library."""
    if measurement.measure in ("failed", "exit_code") and measurement.value:
        return True
    return measurement.reason.startswith(("exit code", "stopped"))


def run(part: Part, logs: Path) -> list[Measurement]:
    """Run a part. Returns its measurements, each with a value or a reason."""
    for module, package in part.needs.items():
        if not importlib.util.find_spec(module):
            reason = f"{module} is not installed: pip install {package}"
            return [replace(missing, reason=reason) for missing in without_values([part])]

    output_path = logs / part.out if part.out else logs / "nothing"
    output_path.unlink(missing_ok=True)
    arguments = [argument.replace("{out}", str(output_path)) for argument in part.command]
    log_name = part.out.partition(".")[0] or part.name.replace(" ", "-")
    log_path = logs / f"{log_name}.log"
    exit_code, why_stopped = run_process(
        [sys.executable, *arguments], log_path, minutes=part.minutes
    )

    reading = part.read(output_path, exit_code)
    reason = why_stopped
    if not reason and exit_code:
        reason = f"exit code {exit_code}: {last_line(log_path)}"
    measurements = []
    for measurement in without_values([part]):
        value = reading.values.get((measurement.case, measurement.measure))
        if why_stopped and measurement.measure == "exit_code":
            value = None
        if value is not None:
            measurements.append(replace(measurement, value=value))
            continue
        why_missing = reading.reasons.get(measurement.case) or reason
        why_missing = why_missing or "not installed, or not for this GPU"
        measurements.append(replace(measurement, reason=why_missing))
    return measurements


def run_process(command: list[str], log_path: Path, *, minutes: float) -> tuple[int, str]:
    """Run a command with its output in a log. Returns (exit code, why it was stopped or "").

    The command runs in its own process group, which ends with it. On a terminal, a line shows the
    elapsed seconds and the last line of the output.
    """
    limit_s = 60 * minutes
    started = time.monotonic()
    with log_path.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            while True:
                try:
                    return process.wait(timeout=TICK_S), ""
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - started
                    show(f"    {seconds:.0f} s: {last_line(log_path)}")
                if seconds > limit_s:
                    why = f"stopped after {minutes:g} minutes: {last_line(log_path)}"
                    return -signal.SIGTERM, why
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
    """Replace the last line of the terminal. Prints nothing if the output is not a terminal."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K{line[:100]}", end="", flush=True)


def last_line(log_path: Path) -> str:
    """The last line of a log that is not blank."""
    with log_path.open("rb") as log_file:
        log_file.seek(max(0, log_path.stat().st_size - 4096))
        last_lines = log_file.read().decode(errors="replace").splitlines()
    for line in reversed(last_lines):
        if line.strip():
            return clean(line.strip(), 160)
    return "no output"


def save(table_path: Path, measurements: Sequence[Measurement], facts: dict[str, str]) -> None:
    records = []
    for measurement in measurements:
        value_text = "" if measurement.value is None else f"{measurement.value:.6g}"
        reason = measurement.reason
        if measurement.value is None and not reason:
            reason = NOT_MEASURED
        record = {
            "part": measurement.part,
            "case": measurement.case,
            "measure": measurement.measure,
            "unit": measurement.unit,
        }
        records.append(record | {"value": value_text, "reason": reason} | facts)
    write(table_path, records)


def earlier_measurements(table_path: Path, facts: dict[str, str]) -> list[Measurement]:
    """The measurements in a table that were made on the same machine by the same versions."""
    if not table_path.exists():
        return []
    measurements = []
    for record in read(table_path):
        if facts.items() <= record.items():
            value = float(record["value"]) if record["value"] else None
            reason = "" if record["reason"] == NOT_MEASURED else record["reason"]
            measurement = Measurement(
                part=record["part"],
                case=record["case"],
                measure=record["measure"],
                unit=record["unit"],
                value=value,
                reason=reason,
            )
            measurements.append(measurement)
    return measurements


def markdown(measurements: Sequence[Measurement], facts: dict[str, str]) -> str:
    """The table: a line for each case, with its values or the reason why they are missing."""
    lines = []
    if facts:
        known_facts = [f"{fact} {value}" for fact, value in facts.items() if value]
        lines += [", ".join(known_facts), ""]
    lines += ["| what | case | measured |", "|---|---|---|"]
    cases: dict[tuple[str, str], list[Measurement]] = {}
    for measurement in measurements:
        cases.setdefault((measurement.part, measurement.case), []).append(measurement)
    for (part, case), of_case in cases.items():
        lines.append(f"| {part} | {case} | {result(of_case)} |")
    return "\n".join(lines)


def result(of_case: Sequence[Measurement]) -> str:
    """The values of a case with their units."""
    values = []
    for measurement in of_case:
        if measurement.value is not None:
            number_format = ",.0f" if measurement.value >= 1000 else ".4g"
            values.append(f"{measurement.value:{number_format}} {measurement.unit}")
    if values:
        return ", ".join(values)
    units = ", ".join(measurement.unit for measurement in of_case)
    if of_case[0].reason:
        return f"{NOT_MEASURED}: {of_case[0].reason}"
    return f"{NOT_MEASURED} ({units})"


def with_table(page: str) -> str:
    """The page with the current table, in which no value has been measured."""
    before, begin_mark, rest = page.partition(BEGIN)
    _, end_mark, after = rest.partition(END)
    if not begin_mark or not end_mark:
        raise SystemExit(f"{PAGE}: {BEGIN} and {END} are missing")
    table = markdown(without_values(parts()), {})
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
