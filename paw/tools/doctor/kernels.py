"""`paw doctor --kernels`: check every backend of the head against float64 here, then time them.

Cases run one after another in a child process. A case that crashes, hangs or does not compile
becomes a line of the table, and the others continue.
"""

import importlib.util
import json
import math
import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from multiprocessing.connection import Connection
from typing import Any

import torch

from paw.errors import UserError, clean, to_stderr
from paw.io.files import cause, write_file
from paw.io.hub import check_hub
from paw_kernels import BACKENDS, _measured, why_not_backend
from paw_kernels._backend import REFUSED, implementation
from paw_kernels.trial import largest_error, milliseconds

LIMIT_S = 180.0
"""Maximum seconds of a case, including imports and compilation."""
DTYPES = ("float32", "bfloat16", "float16")
WIDTHS = (64, 896, 4096)
"""Hidden sizes D that are checked."""
ROWS = (512, 4096)
"""Numbers of rows that are timed: a short batch, and one that fills a GPU."""


@dataclass(frozen=True)
class Case:
    """One backend on one problem: n rows of width D against a vocabulary of V words."""

    backend: str
    device: str
    dtype: str
    n: int
    V: int
    D: int
    timed: bool = False
    tiles: dict[str, Any] | None = field(default=None, hash=False)
    """Triton's tile sizes; None lets it choose."""

    @property
    def way(self) -> str:
        """The backend and its tiles: "triton 128x256x64, 8 warps, 4 stages, groups of 16, tma"."""
        if self.tiles is None:
            return self.backend
        sizes = "{rows}x{cols}x{depth}, {warps} warps, {stages} stages, groups of {group}".format(
            **self.tiles
        )
        switches = [name for name, value in self.tiles.items() if value is True]
        return ", ".join([f"{self.backend} {sizes}", *switches])

    def __str__(self) -> str:
        return f"{self.way} {self.dtype}, n {self.n}, V {self.V}, D {self.D}"


@dataclass(frozen=True)
class Answer:
    """The result of a case."""

    share: float = math.nan
    """The largest error as a share of the allowed error. Up to 1 is correct."""
    ms: float | None = None
    """Milliseconds of forward + backward, if timed."""
    why: str = ""
    """Why the case failed; "" if it did not."""

    @property
    def right(self) -> bool:
        return self.share <= 1

    def __str__(self) -> str:
        if self.ms is not None:
            return f"{self.ms:.4g} ms"
        if self.why:
            return "FAILED"
        return f"{self.share:.2f}" if self.right else f"{self.share:.2f} WRONG"


def check(shape: str | None, model: str | None) -> int:
    """Print the tables. Returns 0 if every backend that can run here is correct.

    Raises UserError if `shape` is not VxD.
    """
    V_and_D = head_size(shape, model)
    cases, left_out = cases_to_check()
    failed = _check_errors(cases, left_out)
    if V_and_D is None:
        print("Nothing is timed without a size: add --model PATH or --shape VxD.")
    else:
        V, D = V_and_D
        failed_kinds = {(case.backend, case.dtype) for case in failed}
        candidates = cases_to_time(V, D, {case.backend: case.device for case in cases})
        _time([case for case in candidates if (case.backend, case.dtype) not in failed_kinds], V, D)
    return 1 if failed else 0


def _check_errors(cases: list[Case], left_out: list[str]) -> list[Case]:
    """Run the cases, print their errors and what cannot run. Returns the cases that failed."""
    print(
        "Each backend of the head against float64: "
        "the largest error over what it may be (2 x plain torch's + 1e-4)."
    )
    answers = dict(zip(cases, reported(run(cases, LIMIT_S), cases), strict=True))
    columns = [f"D {D}{ragged}" for D in WIDTHS for ragged in ("", " ragged")]
    table(answers, columns, lambda case: f"{case.backend:<7}{case.dtype}")
    for line in left_out:
        print(f"  -        {line}")

    failed = []
    for case, answer in answers.items():
        if not answer.right:
            failed.append(case)
            print(f"  FAILED   {case}: {answer.why or f'{answer.share:.3g} of the allowed error'}")
    return failed


def _time(cases: list[Case], V: int, D: int) -> None:
    """Run the cases, print their times, and keep the times for "auto"."""
    print(f"Forward + backward of V {V} x D {D}, half of its rows with a gradient:")
    times = dict(zip(cases, reported(run(cases, LIMIT_S), cases), strict=True))
    table(times, [f"n {n}" for n in ROWS], lambda case: f"{case.dtype:<9}{case.way}")
    keep(times)


def head_size(shape: str | None, model: str | None) -> tuple[int, int] | None:
    """Return (V, D) of `--shape`, otherwise of `--model`; None without either."""
    if shape:
        match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", shape)
        if not match:
            raise UserError(
                f"--shape {clean(shape)}: it must be the head's words x width, such as 151936x896"
            )
        return int(match[1]), int(match[2])
    if not model:
        return None
    from paw.model.policy import (
        head_shape,
    )  # loads transformers, which the child processes do without

    check_hub(model)
    size = head_shape(model)
    if size is None:
        raise UserError(
            f"model.path = '{clean(model)}': its config.json lacks vocab_size and hidden_size"
        )
    return size


def cases_to_check() -> tuple[list[Case], list[str]]:
    """Return (cases to check on this machine, lines about what cannot run here and why).

    On a CPU, Triton runs in its interpreter.
    """
    main_device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases: list[Case] = []
    left_out = [f"{name}: {why}" for name, why in REFUSED.items()]
    for backend in BACKENDS:
        device = torch.device("cpu") if backend == "cpu" else main_device
        on_cpu = backend == "triton" and device.type == "cpu"
        if on_cpu and importlib.util.find_spec("triton"):
            # In its interpreter, which runs on any machine: more than two tiles of 16 x 32 for each
            # of its 3 programs.
            n, V = 24, 128
        else:
            why = why_not_backend(backend, device, torch.float32)
            if why:
                left_out.append(f"{backend}: {why}")
                continue
            n, V = checked_size(device)
        ragged_V = V - 27  # not a multiple of a tile
        for dtype in DTYPES:
            for D in WIDTHS:
                cases.append(Case(backend, device.type, dtype, n, V, D))
                cases.append(Case(backend, device.type, dtype, n, ragged_V, D))
    return cases, left_out


def checked_size(device: torch.device) -> tuple[int, int]:
    """Return (n, V) of a check: on a GPU, more than two tiles of 128 x 256 per multiprocessor.

    So a program of a persistent kernel goes from one tile to the next, which is where loads,
    products and sums of different tiles may overlap.
    """
    if device.type != "cuda":
        return 300, 1024
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return 1000, 256 * math.ceil(2.5 * processors / 8)


def cases_to_time(V: int, D: int, devices: dict[str, str]) -> list[Case]:
    """Return the cases to time. `devices` has the device type of each backend.

    On a GPU they are in bfloat16, with several tile sizes of Triton's. On a CPU they leave Triton
    out.
    """
    on_gpu = "cuda" in devices.values()
    dtypes = ("bfloat16",) if on_gpu else ("float32", "bfloat16")
    cases = []
    for backend, device in devices.items():
        if (device == "cuda") != on_gpu:
            continue
        if backend == "triton" and not on_gpu:
            continue

        tile_choices: list[Any] = [None]
        if backend == "triton":
            from paw_kernels._triton import candidates

            tile_choices = [
                tiles._asdict() for tiles in candidates(torch.cuda.get_device_capability())
            ]
        for dtype in dtypes:
            for tiles in tile_choices:
                for n in ROWS:
                    cases.append(Case(backend, device, dtype, n, V, D, timed=True, tiles=tiles))
    return cases


def reported(answers: Iterable[Answer], cases: list[Case]) -> Iterator[Answer]:
    """Yield the answers as they come, and print each to stderr."""
    for number, (case, answer) in enumerate(zip(cases, answers, strict=True), 1):
        to_stderr(f"  {number}/{len(cases)} {case}: {answer.why or answer}")
        yield answer


def table(answers: dict[Case, Answer], columns: list[str], name: Callable[[Case], str]) -> None:
    """Print the answers. Cases with the same name share a row."""
    answers_of_row: dict[str, list[Answer]] = {}
    for case, answer in answers.items():
        answers_of_row.setdefault(name(case), []).append(answer)
    width = max(map(len, answers_of_row), default=0)
    print(f"  {'':<{width}}" + "".join(f"{column:>14}" for column in columns))
    for row, row_answers in answers_of_row.items():
        print(f"  {row:<{width}}" + "".join(f"{answer!s:>14}" for answer in row_answers))


def keep(answers: dict[Case, Answer]) -> None:
    """Write the times where "auto" looks for them, replacing older times of these sizes.

    If the file cannot be written, this prints a warning and is not an error.
    """
    times = {case: answer.ms for case, answer in answers.items() if answer.ms}
    if not times:
        return
    path = _measured.file()
    first = next(iter(times))  # all have its device, V and D
    key = _measured.key(torch.device(first.device))

    by_key: dict[str, Any] = {}
    other_sizes: list[Any] = []
    with suppress(OSError, ValueError, TypeError, KeyError):  # a broken file is dropped whole
        by_key = dict(json.loads(path.read_text(encoding="utf-8")))
        other_sizes = [
            time for time in by_key.get(key, ()) if (time["V"], time["D"]) != (first.V, first.D)
        ]
    measured = []
    for case, ms in times.items():
        time = _measured.Time(case.backend, case.dtype, case.V, case.D, case.n, ms, case.tiles)
        measured.append(time._asdict())

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        by_key[key] = [*other_sizes, *measured]
        write_file(path, json.dumps(by_key, indent=1) + "\n")
    except OSError as error:
        to_stderr(
            f"paw: cannot write {path}: {cause(error)}; "
            "`auto` will not know these times (set PAW_CACHE)"
        )
    else:
        print(f"from now on `auto` takes the quickest of these: {path}")


def run(cases: list[Case], limit_s: float) -> Iterator[Answer]:
    """Yield the answers of the cases, in order."""
    pending = list(cases)
    while pending:
        same_backend = list(takewhile(lambda case: case.backend == pending[0].backend, pending))
        for answer in _in_a_child(same_backend, limit_s):
            pending.pop(0)
            yield answer


def _in_a_child(cases: list[Case], limit_s: float) -> Iterator[Answer]:
    """Yield one child process's answers to these cases of one backend, in order.

    If the child dies or hangs, the last answer is that of the case that caused it. The cases after
    it have none.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe()
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        child: Any = spawn.Process(target=_answer, args=(sender, cases, output.name))
        child.start()
        sender.close()
        try:
            for _ in cases:
                if not receiver.poll(limit_s):
                    yield Answer(why=f"no answer in {limit_s:g} s")
                    return
                yield receiver.recv()
        except EOFError:
            child.join()
            yield Answer(why=_cause_of_death(child.exitcode, output.read()))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with what it started, such as a compiler
            child.kill()
            child.join()


def _cause_of_death(exit_code: int, output: str) -> str:
    """Return the signal that killed a child, otherwise the last line of its output."""
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    lines = output.strip().splitlines()
    return clean(lines[-1]) if lines else f"ended with exit code {exit_code}"


def _answer(answers: Connection, cases: list[Case], output: str) -> None:
    """Run the child process in its own session. Output of libraries goes to the file `output`."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if cases[0].backend == "triton" and cases[0].device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    for case in cases:
        answers.send(attempt(case))


def attempt(case: Case) -> Answer:
    """Check a case and, if asked for, time it. This runs in the child.

    Raises an exception if an error has left the GPU unusable.
    """
    device = torch.device(case.device)
    dtype = getattr(torch, case.dtype)
    n = case.n
    V = case.V
    if case.timed:  # for the check a small problem with the same remainder of V is enough
        n, V = checked_size(device)
        V += case.V % 256
    try:
        make_rows = implementation(case.backend)
        if case.tiles:
            from paw_kernels._triton import TUNED, Tiles

            for vocabulary in (V, case.V):
                TUNED[vocabulary, case.D, dtype.itemsize] = Tiles(**case.tiles)
        answer = Answer(largest_error(make_rows, device, dtype, n, V, case.D))
        if case.timed and answer.right:
            ms = milliseconds(make_rows, device, dtype, case.n, case.V, case.D)
            answer = replace(answer, ms=ms)
        return answer
    except Exception as error:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return Answer(why=clean(f"{type(error).__name__}: {error}"))
