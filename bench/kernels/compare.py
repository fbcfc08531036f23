"""Time, memory and error of the fused head and its peers, on whatever this machine can run.

    python bench/kernels/compare.py                    # everything: GPU set where there is one, small CPU set elsewhere
    python bench/kernels/compare.py --quick            # the reference point and one long batch, shorter timing
    python bench/kernels/compare.py --only paw 'T 4096'    # cases whose name contains every word
    python bench/kernels/compare.py --resume           # leaves out what the file has already
    python bench/kernels/compare.py --plot bench/results/kernels_cpu.csv   # draw again, measure nothing

Rows are appended to bench/results/kernels_<device>.csv as they come, so a run may be stopped at any
time; then the plots in docs/ are drawn. A case that fails is a row with its error. From a plain
checkout: PYTHONPATH=.:kernels.

Per case: median and 20th / 80th percentile of timed calls after a warm-up, in turns with the cases
it is compared with, CUDA events on a GPU, inputs that are random and not in the cache; `share` is
the time of the bare matmuls that the case needs (1 + 2f passes, timed here on up to 4,096 rows)
over its time; `peak_mib` is what torch's allocator held above the inputs, `beside_dw_mib` the same
without a float32 dW (4 V D bytes); errors are against float64 (bench/kernels/problem.py), `passes`:
at most twice those of plain torch in the same dtype, plus 1e-4.
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
    Row,
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

    def __init__(self, path: Path, common: Row, *, keep: bool) -> None:
        self.path = path
        self.common = common
        self._done: set[tuple[str, ...]] = set()
        if keep and path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    self._done.add(tuple(row[name] for name in KEY))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")

    def has(self, row: Row) -> bool:
        return tuple(str(row.get(name, "")) for name in KEY) in self._done

    def add(self, row: Row) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n").writerow(
                {**self.common, **row}
            )


def run(options: argparse.Namespace, device: torch.device) -> Path:
    """Measure the cases that the options choose; returns the CSV file."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    common = environment(device)
    check_only(options, device, dtype)
    name = "cpu" if device.type == "cpu" else str(common["device"]).lower().replace(" ", "_")
    table = Table(options.out or RESULTS / f"kernels_{name}.csv", common, keep=options.resume)
    seconds = options.seconds or (0.2 if options.quick else 0.5)

    def wanted(label: str, columns: Row) -> bool:
        return all(word in label for word in options.only) and not table.has(columns)

    plan: dict[Group, list[Case]] = {}
    for group in groups(device, options.quick):
        of_group = cases(group, device, dtype)
        plan[group] = [case for case in of_group if wanted(case.label(), case.columns())]
    total = sum(len(chosen) for chosen in plan.values())
    numbers = count(1)
    print(f"{common['device']}, torch {common['torch']}: {total} cases -> {table.path}", flush=True)

    def show(case: Case, row: Row) -> None:
        table.add({**case.columns(), "dtype": dtype_name(dtype), **row})
        print(f"[{next(numbers)}/{total}] {case.label()}: {describe(row)}", flush=True)

    for columns, measurement in without_matmul(device, seconds):
        label = label_without_matmul(columns)
        if wanted(label, columns):
            row = {**columns, **attempt(measurement, device)}
            table.add(row)
            print(f"{label}: {describe(row)}", flush=True)

    for group, chosen in plan.items():
        if chosen:
            run_group(group, chosen, table, show, dtype=dtype, device=device, seconds=seconds)
    return table.path


def check_only(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    """Exits with a message if no case has all words of --only in its name."""
    labels = []
    for group in groups(device, options.quick):
        labels += [case.label() for case in cases(group, device, dtype)]
    for columns, _ in without_matmul(device, 0.0):
        labels.append(label_without_matmul(columns))
    for label in labels:
        if all(word in label for word in options.only):
            return
    raise SystemExit(
        f"--only {' '.join(options.only)}: no case has all of that in its name, as in '{labels[0]}'"
    )


def label_without_matmul(columns: Row) -> str:
    return f"{columns['mode']} {columns['implementation']}"


def run_group(
    group: Group,
    chosen: list[Case],
    table: Table,
    show: Callable[[Case, Row], None],
    *,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> None:
    """Measure the chosen cases of a group and the matmuls that they share; `show` gets the row of
    each case."""
    if any(case.name == "torch_compile" for case in chosen):
        torch.compiler.reset()  # it compiles for one shape at a time and gives up after eight

    ms_per_row: dict[str, float] = {}
    for product, row in bare_matmuls(group, dtype, device, seconds).items():
        table.add({**row, "dtype": dtype_name(dtype)})
        ms_per_row[product] = float(str(row["ms"])) / int(str(row["T"]))

    comparisons: dict[tuple[object, ...], list[Case]] = {}  # the cases of each are timed in turns
    for case in chosen:
        comparisons.setdefault((case.live, case.dead, case.mode), []).append(case)

    for compared in comparisons.values():
        compare(compared, show, ms_per_row, dtype=dtype, device=device, seconds=seconds)
        free(device)


def compare(
    compared: list[Case],
    show: Callable[[Case, Row], None],
    ms_per_row: dict[str, float],
    *,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> None:
    """Time cases on the same inputs in turns. No tensor outlives the call, so the next has all the
    memory."""
    problem = problem_of(compared[0], dtype, device)
    ready: list[Prepared] = []
    for case in compared:
        result = attempt(partial(prepare, case, problem), device)
        if isinstance(result, Prepared):
            ready.append(result)
        else:
            show(case, result)

    timings = in_turns([(prepared.call, prepared.inputs) for prepared in ready], seconds)
    for prepared, measured in zip(ready, timings, strict=True):
        show(prepared.case, prepared.timed(measured, ms_per_row))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def problem_of(case: Case, dtype: torch.dtype, device: torch.device) -> Problem:
    _, T, D, V = case.group
    return make_problem(
        T, D, V, live=case.live, known=case.dead == "known", dtype=dtype, device=device
    )


def attempt(measurement: Callable[[], Result], device: torch.device) -> Result | Row:
    """The measurement's result; if it raises, columns with the first line of the error."""
    try:
        return measurement()
    except Exception as error:  # a peer may fail in any way
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


def environment(device: torch.device) -> Row:
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


def describe(row: Row) -> str:
    if "error" in row:
        return str(row["error"])
    words = [f"{row['ms']} ms"]
    if row.get("share"):
        words.append(f"{float(str(row['share'])):.0%} of the matmul bound")
    if row.get("gb_s"):
        words.append(f"{row['gb_s']} GB/s")
    if row.get("peak_mib"):
        words.append(f"{row['peak_mib']} MiB")
    if row.get("passes") == "no":
        words.append("INACCURATE")
    return ", ".join(words)


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
