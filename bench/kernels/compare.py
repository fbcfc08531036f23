"""Time, memory and error of the fused head and its peers, as far as this machine can run them.

    python bench/kernels/compare.py                    # everything: the GPU set, or a small CPU set without a GPU
    python bench/kernels/compare.py --quick            # the reference point and one long batch, timed for less time
    python bench/kernels/compare.py --only paw 'T 4096'    # cases whose name contains every word
    python bench/kernels/compare.py --resume           # skips the cases that the file already has
    python bench/kernels/compare.py --plot bench/results/kernels_cpu.csv   # draws again, measures nothing

Rows are appended to bench/results/kernels_<device>.csv as they are measured, so a run may be
stopped at any time. At the end, the plots in docs/ are drawn. A case that fails gets a row with its
error. In a checkout that is not installed, set PYTHONPATH=.:kernels.

Columns of a case:
- ms, ms_low, ms_high: median, 20th and 80th percentile of timed calls after a warm-up. Cases that
  are compared take turns. Inputs are random and not in the cache. A GPU is timed by CUDA events.
- share: time of the bare matmuls that the case needs (1 + 2f passes, timed here on up to 4,096
  rows), divided by the time of the case.
- peak_mib: what torch's allocator held above the inputs. beside_dw_mib: the same without a float32
  dW (4 V D bytes).
- error_*: errors against float64 (bench/kernels/problem.py). passes: whether they are at most twice
  those of plain torch in the same dtype, plus 1e-4.
"""

import argparse
import csv
import datetime
import gc
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.common import RESULTS, ROOT, commit, cpu_name
from bench.kernels.cases import (
    Case,
    Group,
    Prepared,
    Record,
    bare_matmuls,
    cases,
    groups,
    prepare,
    without_matmul,
)
from bench.kernels.measure import in_turns
from bench.kernels.problem import Problem, make_problem

Result = TypeVar("Result")
MACHINE_COLUMNS = (
    "kind",
    "date",
    "commit",
    "device",
    "threads",
    "load",
    "python",
    "torch",
    "triton",
    "cuda",
)
CASE_COLUMNS = ("head", "T", "D", "V", "dtype", "live", "dead", "implementation", "version", "mode")
TIME_COLUMNS = ("ms", "ms_low", "ms_high", "runs", "tflops", "bound_ms", "share", "gb_s")
MEMORY_COLUMNS = ("peak_mib", "beside_dw_mib")
ERROR_COLUMNS = ("error_loss", "error_logp", "error_d_hidden", "error_d_weight", "passes", "error")
COLUMNS = MACHINE_COLUMNS + CASE_COLUMNS + TIME_COLUMNS + MEMORY_COLUMNS + ERROR_COLUMNS
KEY = ("head", "T", "live", "dead", "implementation", "mode")


class Table:
    """A CSV file that grows row by row."""

    def __init__(self, path: Path, common: Record, *, keep_rows: bool) -> None:
        self.path = path
        self.common = common
        self._done: set[tuple[str, ...]] = set()
        if keep_rows and path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                for record in csv.DictReader(file):
                    self._done.add(tuple(record[column] for column in KEY))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")

    def has(self, record: Record) -> bool:
        return tuple(str(record.get(column, "")) for column in KEY) in self._done

    def add(self, record: Record) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n").writerow(
                {**self.common, **record}
            )


def run(options: argparse.Namespace, device: torch.device) -> Path:
    """Measure the cases that the options choose. Returns the CSV file."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    common = environment(device)
    check_only(options, device, dtype)
    device_name = "cpu" if device.type == "cpu" else str(common["device"]).lower().replace(" ", "_")
    table = Table(
        options.out or RESULTS / f"kernels_{device_name}.csv", common, keep_rows=options.resume
    )
    seconds = options.seconds or (0.2 if options.quick else 0.5)

    def wanted(case_label: str, columns: Record) -> bool:
        return all(wanted_word in case_label for wanted_word in options.only) and not table.has(
            columns
        )

    cases_by_group: dict[Group, list[Case]] = {}
    for group in groups(device, options.quick):
        of_group = cases(group, device, dtype)
        cases_by_group[group] = [case for case in of_group if wanted(case.label(), case.columns())]
    case_count = sum(len(chosen) for chosen in cases_by_group.values())
    numbers = count(1)
    print(
        f"{common['device']}, torch {common['torch']}: {case_count} cases -> {table.path}",
        flush=True,
    )

    def show(case: Case, record: Record) -> None:
        table.add({**case.columns(), "dtype": dtype_name(dtype), **record})
        print(f"[{next(numbers)}/{case_count}] {case.label()}: {describe(record)}", flush=True)

    for columns, measurement in without_matmul(device, seconds):
        case_label = label_without_matmul(columns)
        if wanted(case_label, columns):
            record = {**columns, **attempt(measurement, device)}
            table.add(record)
            print(f"{case_label}: {describe(record)}", flush=True)

    for group, chosen in cases_by_group.items():
        if chosen:
            run_group(group, chosen, table, show, dtype=dtype, device=device, seconds=seconds)
    return table.path


def check_only(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    """Exits with a message if no case has all the words of --only in its name."""
    labels = []
    for group in groups(device, options.quick):
        labels += [case.label() for case in cases(group, device, dtype)]
    for columns, _ in without_matmul(device, 0.0):
        labels.append(label_without_matmul(columns))
    for case_label in labels:
        if all(wanted_word in case_label for wanted_word in options.only):
            return
    raise SystemExit(
        f"--only {' '.join(options.only)}: no case has all of that in its name, as in '{labels[0]}'"
    )


def label_without_matmul(columns: Record) -> str:
    return f"{columns['mode']} {columns['implementation']}"


def run_group(
    group: Group,
    chosen: list[Case],
    table: Table,
    show: Callable[[Case, Record], None],
    *,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> None:
    """Measure the chosen cases of a group and the matmuls that they share.

    `show` is called with each case and its record.
    """
    if any(case.name == "torch_compile" for case in chosen):
        torch.compiler.reset()  # torch compiles one shape at a time and gives up after eight

    ms_per_row: dict[str, float] = {}
    for product, record in bare_matmuls(group, dtype, device, seconds).items():
        table.add({**record, "dtype": dtype_name(dtype)})
        ms_per_row[product] = float(str(record["ms"])) / int(str(record["T"]))

    comparisons: dict[tuple[object, ...], list[Case]] = {}  # cases of one entry are timed in turns
    for case in chosen:
        comparisons.setdefault((case.live, case.dead, case.mode), []).append(case)

    for compared in comparisons.values():
        compare(compared, show, ms_per_row, dtype=dtype, device=device, seconds=seconds)
        free(device)


def compare(
    compared: list[Case],
    show: Callable[[Case, Record], None],
    ms_per_row: dict[str, float],
    *,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> None:
    """Time cases on the same inputs in turns.

    No tensor outlives the call, so the next comparison has all the memory.
    """
    problem = problem_of(compared[0], dtype, device)
    prepared_cases: list[Prepared] = []
    for case in compared:
        result = attempt(partial(prepare, case, problem), device)
        if isinstance(result, Prepared):
            prepared_cases.append(result)
        else:
            show(case, result)

    timings = in_turns([(prepared.call, prepared.inputs) for prepared in prepared_cases], seconds)
    for prepared, measured in zip(prepared_cases, timings, strict=True):
        show(prepared.case, prepared.timed(measured, ms_per_row))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def problem_of(case: Case, dtype: torch.dtype, device: torch.device) -> Problem:
    _, T, D, V = case.group
    return make_problem(
        T, D, V, live=case.live, known=case.dead == "known", dtype=dtype, device=device
    )


def attempt(measurement: Callable[[], Result], device: torch.device) -> Result | Record:
    """The result of the measurement, or a column with the first line of its error."""
    try:
        return measurement()
    except Exception as error:  # a peer may raise anything
        if isinstance(error, torch.OutOfMemoryError):
            return {"error": "out of memory"}
        message = str(error).strip() or "no message"
        return {"error": f"{type(error).__name__}: {message.splitlines()[0][:160]}"}
    finally:
        free(device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def environment(device: torch.device) -> Record:
    triton = list(importlib.metadata.distributions(name="triton"))
    return {
        "kind": "measured",
        "date": datetime.date.today().isoformat(),
        "commit": commit("kernels", "csrc"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "load": f"{os.getloadavg()[0]:.1f}",  # at the start: above 1 or so, do not trust the times of a CPU
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton[0].version if triton else "",
        "cuda": torch.version.cuda or "",
    }


def describe(record: Record) -> str:
    if "error" in record:
        return str(record["error"])
    facts = [f"{record['ms']} ms"]
    if record.get("share"):
        facts.append(f"{float(str(record['share'])):.0%} of the matmul bound")
    if record.get("gb_s"):
        facts.append(f"{record['gb_s']} GB/s")
    if record.get("peak_mib"):
        facts.append(f"{record['peak_mib']} MiB")
    if record.get("passes") == "no":
        facts.append("INACCURATE")
    return ", ".join(facts)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shorter timing")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="cases whose name contains every word"
    )
    parser.add_argument(
        "--resume", action="store_true", help="leave out the cases that the file has"
    )
    parser.add_argument(
        "--seconds", type=float, help="time spent on timing one case (default: 0.5, quick 0.2)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="CSV file, with its plot beside it (default: in bench/results, its plot in docs)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the plots of this CSV")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = options.plot or run(options, device)

    from bench.kernels.plot import draw

    for picture in draw(path, options.out.parent if options.out else ROOT / "docs"):
        print(picture)


if __name__ == "__main__":
    main()
