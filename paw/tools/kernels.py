"""`paw doctor --kernels`: every backend of the head against float64 on this machine, then which is the fastest there.

Cases run one after another in a child: what crashes, hangs or does not compile is a line of the table, not the end.
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
from paw.files import cause, write_file
from paw.hub import check_hub
from paw_kernels import BACKENDS, _measured, why_not_backend
from paw_kernels._backend import implementation
from paw_kernels.trial import largest_error, milliseconds

LIMIT_S = 180.0
"""Of a case, imports and compilation included."""
DTYPES = ("float32", "bfloat16", "float16")
WIDTHS = (64, 896, 4096)
ROWS = (512, 4096)
"""That are timed: a short batch, and one that fills a GPU."""


@dataclass(frozen=True)
class Case:
    backend: str
    device: str
    dtype: str
    n: int
    V: int
    D: int
    timed: bool = False
    tiles: dict[str, Any] | None = field(default=None, hash=False)
    """Triton's; None for its own choice."""

    @property
    def way(self) -> str:
        """The backend and its tiles: triton 128x256x64, 8 warps, 4 stages, groups of 16, tma."""
        if self.tiles is None:
            return self.backend
        sizes = "{rows}x{cols}x{depth}, {warps} warps, {stages} stages, groups of {group}".format(**self.tiles)
        return ", ".join([f"{self.backend} {sizes}", *(name for name, on in self.tiles.items() if on is True)])

    def __str__(self) -> str:
        return f"{self.way} {self.dtype}, n {self.n}, V {self.V}, D {self.D}"


@dataclass(frozen=True)
class Answer:
    share: float = math.nan
    """Of the largest error that is allowed; right up to 1."""
    ms: float | None = None
    why: str = ""
    """There is no number."""

    @property
    def right(self) -> bool:
        return self.share <= 1

    def __str__(self) -> str:
        found = "FAILED" if self.why else f"{self.share:.2f}" + ("" if self.right else " WRONG")
        return found if self.ms is None else f"{self.ms:.4g} ms"


def check(shape: str | None, model: str | None) -> int:
    """Print the tables; 0 when every backend that can run here is right. Raises UserError for a shape that is none."""
    size = head_size(shape, model)
    cases, left_out = here()
    print("Each backend of the head against float64: the largest error over what it may be (2 x plain torch's + 1e-4).")
    answers = dict(zip(cases, told(run(cases, LIMIT_S), cases), strict=True))
    columns = [f"D {D}{ragged}" for D in WIDTHS for ragged in ("", " ragged")]
    table(answers, columns, lambda case: f"{case.backend:<7}{case.dtype}")
    for line in left_out:
        print(f"  -        {line}")
    failed = [case for case, answer in answers.items() if not answer.right]
    for case in failed:
        print(f"  FAILED   {case}: {answers[case].why or f'{answers[case].share:.3g} of the allowed error'}")
    if size is None:
        print("Nothing is timed without a size: add --model PATH or --shape VxD.")
    else:
        wrong = {(case.backend, case.dtype) for case in failed}
        timed = contest(*size, {case.backend: case.device for case in cases})
        timed = [case for case in timed if (case.backend, case.dtype) not in wrong]
        print("Forward + backward of V {} x D {}, half of its rows with a gradient:".format(*size))
        times = dict(zip(timed, told(run(timed, LIMIT_S), timed), strict=True))
        table(times, [f"n {n}" for n in ROWS], lambda case: f"{case.dtype:<9}{case.way}")
        keep(times)
    return 1 if failed else 0


def head_size(shape: str | None, model: str | None) -> tuple[int, int] | None:
    """(V, D) of `--shape`, else of `--model`."""
    if shape:
        if not (found := re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", shape)):
            raise UserError(f"--shape {clean(shape)}: it is the head's words x width, such as 151936x896")
        return int(found[1]), int(found[2])
    if not model:
        return None
    from paw.model.policy import head_shape

    check_hub(model)
    if (found := head_shape(model)) is None:
        raise UserError(f"model.path = '{clean(model)}': its config.json does not tell vocab_size and hidden_size")
    return found


def here() -> tuple[list[Case], list[str]]:
    """What there is to check on this machine, and what cannot run here and why. Triton's interpreter is for the CPU."""
    main = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # More than two tiles of 128 x 256 for each multiprocessor; of the interpreter's 16 x 32 for each of 3 programs.
    processors = torch.cuda.get_device_properties(main).multi_processor_count if main.type == "cuda" else 0
    sizes = {"cuda": (1000, 256 * math.ceil(2.5 * processors / 8)), "cpu": (300, 1024), "triton": (40, 128)}
    cases, left_out = [], []
    for backend in BACKENDS:
        device = torch.device("cpu") if backend == "cpu" else main
        interpreted = backend == "triton" and device.type == "cpu" and importlib.util.find_spec("triton")
        why = None if interpreted else why_not_backend(backend, device, torch.float32)
        if why:
            left_out.append(f"{backend}: {why}")
            continue
        n, V = sizes["triton" if interpreted else device.type]
        shapes = [(size, D) for D in WIDTHS for size in (V, V - 27)]
        cases += [Case(backend, device.type, dtype, n, *shape) for dtype in DTYPES for shape in shapes]
    return cases, left_out


def contest(V: int, D: int, devices: dict[str, str]) -> list[Case]:
    """What is timed: on a GPU in bfloat16 with several ways of Triton's, on a CPU without Triton."""
    gpu = "cuda" in devices.values()
    cases = []
    for backend, device in devices.items():
        if (device == "cuda") != gpu or (backend == "triton" and not gpu):
            continue
        ways: list[Any] = [None]
        if backend == "triton":
            from paw_kernels._triton import candidates

            ways = [tiles._asdict() for tiles in candidates(torch.cuda.get_device_capability())]
        dtypes = ("bfloat16",) if gpu else ("float32", "bfloat16")
        cases += [Case(backend, device, d, n, V, D, True, way) for d in dtypes for way in ways for n in ROWS]
    return cases


def told(answers: Iterable[Answer], cases: list[Case]) -> Iterator[Answer]:
    for number, (case, answer) in enumerate(zip(cases, answers, strict=True), 1):
        to_stderr(f"  {number}/{len(cases)} {case}: {answer.why or answer}")
        yield answer


def table(answers: dict[Case, Answer], columns: list[str], name: Callable[[Case], str]) -> None:
    rows: dict[str, list[Answer]] = {}
    for case, answer in answers.items():
        rows.setdefault(name(case), []).append(answer)
    width = max(map(len, rows), default=0)
    print(f"  {'':<{width}}" + "".join(f"{column:>14}" for column in columns))
    for row, found in rows.items():
        print(f"  {row:<{width}}" + "".join(f"{answer!s:>14}" for answer in found))


def keep(answers: dict[Case, Answer]) -> None:
    """Put the times where "auto" looks for them, in place of older ones of these sizes; a disk that refuses is told."""
    if not (times := {case: answer.ms for case, answer in answers.items() if answer.ms}):
        return
    path, some = _measured.file(), next(iter(times))
    key, known, old = _measured.key(torch.device(some.device)), {}, []
    with suppress(OSError, ValueError, TypeError, KeyError):  # of a broken file nothing is kept
        known = dict(json.loads(path.read_text(encoding="utf-8")))
        old = [time for time in known.get(key, ()) if (time["V"], time["D"]) != (some.V, some.D)]
    new = [_measured.Time(c.backend, c.dtype, c.V, c.D, c.n, ms, c.tiles)._asdict() for c, ms in times.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(known | {key: [*old, *new]}, indent=1) + "\n")
    except OSError as error:
        to_stderr(f"paw: cannot write {path}: {cause(error)}; `auto` will not know these times (set PAW_CACHE)")
    else:
        print(f"`auto` goes by the least of these times from now on: {path}")


def run(cases: list[Case], limit_s: float) -> Iterator[Answer]:
    """Their answers, in order."""
    todo = list(cases)
    while todo:
        mine = list(takewhile(lambda case: case.backend == todo[0].backend, todo))
        for answer in _in_a_child(mine, limit_s):
            todo.pop(0)
            yield answer


def _in_a_child(cases: list[Case], limit_s: float) -> Iterator[Answer]:
    """Answers to the first of these cases, of one backend: to all, unless a child ends before. Then why, at the end."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.NamedTemporaryFile("r", errors="replace") as said:
        child: Any = spawn.Process(target=_answer, args=(theirs, cases, said.name))
        child.start()
        theirs.close()
        try:
            for _ in cases:
                if not ours.poll(limit_s):
                    yield Answer(why=f"no answer in {limit_s:g} s")
                    return
                yield ours.recv()
        except EOFError:
            child.join()
            code, lines = child.exitcode, said.read().strip().splitlines()
            last = clean(lines[-1]) if lines else f"ended with exit code {code}"
            yield Answer(why=f"killed by {signal.Signals(-code).name}" if code < 0 else last)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with what it has started, such as a compiler
            child.kill()
            child.join()


def _answer(answers: Connection, cases: list[Case], said: str) -> None:
    """The child, a session of its own; what libraries write goes to the file `said`."""
    os.setsid()
    file = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if cases[0].backend == "triton" and cases[0].device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    for case in cases:
        answers.send(attempt(case))


def attempt(case: Case) -> Answer:
    """In the child. Raises what has left the GPU unusable."""
    device, dtype = torch.device(case.device), getattr(torch, case.dtype)
    n, V = (300, 512 + case.V % 256) if case.timed else (case.n, case.V)
    try:
        make_rows = implementation(case.backend)
        if case.tiles:
            from paw_kernels._triton import TUNED, Tiles

            for words in (V, case.V):
                TUNED[words, case.D, dtype.itemsize] = Tiles(**case.tiles)
        answer = Answer(largest_error(make_rows, device, dtype, n, V, case.D))
        if case.timed and answer.right:
            answer = replace(answer, ms=milliseconds(make_rows, device, dtype, case.n, case.V, case.D))
        return answer
    except Exception as error:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return Answer(why=clean(f"{type(error).__name__}: {error}"))
