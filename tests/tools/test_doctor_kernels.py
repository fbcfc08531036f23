"""`paw doctor --kernels`: what it checks and times, a case that dies, and where "auto" finds the
times."""

import importlib
import importlib.util
import json
import multiprocessing
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import torch
from forked import CONTEXT

from paw.tools.doctor import kernels
from paw.tools.doctor.kernels import Answer, Case
from paw_kernels import _measured, best_backend

if importlib.util.find_spec("triton"):
    importlib.import_module("triton_interpreted")  # the children are forks of this process

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAW_CACHE", str(tmp_path / "cache"))
    _measured.times.cache_clear()
    yield tmp_path / "cache" / "kernels.json"
    _measured.times.cache_clear()


def timed(backend, n, ms, V=600):
    return Case(backend, "cpu", "float32", n, V, 64, timed=True), Answer(0.5, ms)


def test_times_are_where_auto_finds_them_and_replace_those_of_the_same_size(cache, capsys):
    cache.parent.mkdir()
    cache.write_text("[broken")
    kernels.keep(dict([timed("cpu", 512, 2.0, V=70)]))
    kernels.keep(
        dict([timed("cpu", 512, 2.0), timed("torch", 512, 3.0), timed("torch", 4096, 1.0)])
    )
    kernels.keep(
        dict(
            [
                timed("cpu", 512, 2.0),
                timed("torch", 512, 1.0),
                (Case("cuda", "cpu", "float16", 1, 1, 1), Answer(why="failed")),
            ]
        )
    )
    assert str(cache) in capsys.readouterr().out
    times = json.loads(cache.read_text())[_measured.key(CPU)]
    assert [(t["V"], t["backend"], t["ms"]) for t in times] == [
        (70, "cpu", 2.0),
        (600, "cpu", 2.0),
        (600, "torch", 1.0),
    ]
    assert best_backend(CPU, torch.float32, (600, 64)) == "torch"
    assert best_backend(CPU, torch.float32, (70, 64)) == "cpu"


def test_a_folder_that_cannot_be_written_is_told_and_no_error(cache, capsys):
    cache.parent.write_text("")
    kernels.keep(dict([timed("cpu", 512, 2.0)]))
    output = capsys.readouterr()
    assert f"paw: cannot write {cache}: " in output.err
    assert output.err.endswith("(set PAW_CACHE)\n")
    assert not output.out


def test_on_a_gpu_six_ways_of_triton_are_timed_beside_cuda_and_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    devices = {"triton": "cuda", "cuda": "cuda", "cpu": "cpu", "torch": "cuda"}
    cases = kernels.cases_to_time(151_936, 896, devices)
    assert {case.dtype for case in cases} == {"bfloat16"}
    assert {case.device for case in cases} == {"cuda"}
    assert len(set(cases)) == 16
    ways = [case.way for case in cases if case.n == 4096]
    assert len(ways) == 8
    assert len(set(ways)) == 8
    assert sum(way.startswith("triton 128x") for way in ways) == 6
    assert {
        case.backend for case in kernels.cases_to_time(600, 64, {"triton": "cpu", "cpu": "cpu"})
    } == {"cpu"}


@pytest.mark.slow
def test_a_case_that_crashes_hangs_or_raises_is_an_answer_and_the_next_goes_on(
    tmp_path, monkeypatch
):
    broken = tmp_path / "triton"
    broken.mkdir()
    (broken / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    # The child that crashes is a new interpreter. Those after it are forks, which have loaded torch.
    contexts = chain([multiprocessing.get_context("spawn")], repeat(CONTEXT))
    of_child = SimpleNamespace(get_context=lambda method: next(contexts))
    monkeypatch.setattr(kernels, "multiprocessing", of_child)
    size = {"dtype": "float32", "n": 40, "V": 101, "D": 64}
    cases = [
        Case("triton", "cpu", **size),
        Case("cuda", "cuda", **size),
        *[Case("torch", "cpu", **size)] * 2,
    ]
    crashed, raised, *right = kernels.run(cases, 250)
    assert crashed == Answer(why="killed by SIGSEGV", share=crashed.share)
    assert "CUDA" in raised.why
    assert "Error: " in raised.why
    assert not raised.right
    assert right[0].right
    assert right[0].share > 0
    assert right[1].share == right[0].share
    (late,) = kernels.run(cases[-1:], 0.0001)
    assert late.why == "no answer in 0.0001 s"
    assert str(late) == "FAILED"


def answer_quickly(*arguments):
    """What the doctor's child does, with less than two seconds for a time."""
    kernels.milliseconds = partial(kernels.milliseconds, seconds=0.02)
    kernels._answer(*arguments)


def quick_process(*, target, args):
    assert target is kernels._answer
    return CONTEXT.Process(target=answer_quickly, args=args)


@pytest.mark.slow
def test_the_command_checks_all_that_runs_here_and_auto_goes_by_its_times(
    paw_here, monkeypatch, cache, paw_env
):
    # Children that have loaded torch: the test above has a new interpreter.
    context = SimpleNamespace(Pipe=CONTEXT.Pipe, Process=quick_process)
    forked = SimpleNamespace(get_context=lambda method: context)
    monkeypatch.setattr(kernels, "multiprocessing", forked)
    monkeypatch.setattr(kernels, "WIDTHS", (64,))
    monkeypatch.setattr(kernels, "DTYPES", ("bfloat16",))
    monkeypatch.setattr(kernels, "ROWS", (32,))
    monkeypatch.setitem(paw_env, "PAW_CACHE", str(cache.parent))
    for name, value in paw_env.items():
        monkeypatch.setenv(name, value)
    result = paw_here("doctor", "--kernels", "--shape", "97x24")
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines[2:5]] == [
        [name, "bfloat16"] for name in ("triton", "cpu", "torch")
    ]
    assert "WRONG" not in result.stdout
    assert "n 32" in result.stdout
    assert " ms\n" in result.stdout
    assert result.stderr.count("triton bfloat16, n 24, V 101, D 64: 0.") == 1
    measured = _measured.fastest(CPU, torch.float32, 97, 24)
    assert measured
    assert measured.ms > 0
    assert measured.backend in ("cpu", "torch")
    assert (
        "--shape 97: it must be the head's"
        in paw_here("doctor", "--kernels", "--shape", "97", code=2).stderr
    )
