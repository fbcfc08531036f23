"""Which backend "auto" picks: what was measured to be fastest, or else what works. And the trial
that tells whether a backend works."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

import paw_kernels
from paw_kernels import _backend, _measured, token_stats, trial
from paw_kernels._torch import TorchRows, make_rows

CPU = torch.device("cpu")
BF16 = torch.bfloat16
GPU = torch.device("cuda", 0)


@pytest.fixture
def times_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PAW_CACHE", str(tmp_path))
    _measured.times.cache_clear()
    yield tmp_path / "kernels.json"
    _measured.times.cache_clear()


def time_of(backend, rows, milliseconds, **changes):
    return (
        _measured.Time(backend, "float32", 70, 16, rows, milliseconds)._replace(**changes)._asdict()
    )


def test_auto_is_what_was_the_fastest_at_the_nearest_number_of_rows(times_file):
    times = [
        time_of("cpu", 512, 1.0),
        time_of("torch", 512, 2.0),
        time_of("cpu", 4096, 9.0),
        time_of("torch", 4096, 8.0),
    ]
    times_file.write_text(
        json.dumps({_measured.key(CPU): times, "another": [time_of("torch", 512, 0.1)]})
    )
    choice = partial(paw_kernels.best_backend, CPU, torch.float32)
    assert choice((70, 16), 1) == "cpu"
    assert choice((70, 16), 700) == "cpu"
    assert choice((70, 16), 3000) == "torch"
    assert choice((70, 16)) == "torch"
    assert choice((71, 16)) == "cpu"
    assert choice() == "cpu"
    assert paw_kernels.best_backend(CPU, BF16, (70, 16)) == "cpu"
    hidden = torch.randn(3000, 16)
    weight = torch.randn(70, 16)
    target = torch.zeros(3000, dtype=torch.int64)
    plain = token_stats(hidden, weight, target, backend="torch")
    other = token_stats(hidden, weight, target, backend="cpu")
    auto = token_stats(hidden, weight, target)
    assert torch.equal(auto.entropy, plain.entropy)
    assert not torch.equal(auto.entropy, other.entropy)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"KEY": [{"ms": 1}]}', '{"KEY": 3}', b"\xff", None]
)
def test_a_file_that_cannot_be_read_is_one_warning(times_file, content):
    if content is None:
        times_file.mkdir()
    elif isinstance(content, bytes):
        times_file.write_bytes(content)
    else:
        times_file.write_text(content.replace("KEY", _measured.key(CPU)))
    with pytest.warns(
        RuntimeWarning, match=r"kernels.json is ignored \(.*paw doctor --kernels writes a new one"
    ) as warnings:
        assert {paw_kernels.best_backend(CPU, torch.float32, (70, 16)) for _ in range(2)} == {"cpu"}
    assert len(warnings) == 1


def test_times_of_other_kernels_or_another_torch_do_not_count(times_file, monkeypatch):
    machine_key = _measured.key(CPU)
    assert torch.__version__ in machine_key
    assert "kernels " in machine_key
    for part in (torch.__version__, machine_key[-12:], machine_key.partition(",")[0]):
        times_file.write_text(
            json.dumps({machine_key.replace(part, "another"): [time_of("torch", 512, 1.0)]})
        )
        _measured.times.cache_clear()
        assert paw_kernels.best_backend(CPU, torch.float32, (70, 16)) == "cpu"


@pytest.mark.parametrize(
    ("capability", "order"),
    [
        ((8, 0), ["triton", "cuda", "torch"]),
        ((8, 9), ["triton", "cuda", "torch"]),
        ((9, 0), ["cuda", "triton", "torch"]),
        ((10, 0), ["cuda", "triton", "torch"]),
        ((12, 0), ["triton", "cuda", "torch"]),
    ],
)
def test_before_anything_is_measured_the_capability_decides(monkeypatch, capability, order):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert list(_backend.order(GPU, BF16)) == order
    assert list(_backend.order(GPU, torch.float32)) == ["cuda", "torch"]


class Wrong(TorchRows):
    """Right except for the sign of c, or for the last column of the gradient, which is `column`."""

    column: float | None = None

    def gradient(self, target, source, a, c):
        if self.column is not None:
            gradient = super().gradient(target, source, a, c)
            gradient[:, -1] = self.column
            return gradient
        return super().gradient(target, source, a, None if c is None else -c)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_trial_tells_right_results_from_wrong_ones(monkeypatch, dtype):
    sizes = CPU, dtype, 40, 101, 64
    assert 0 < trial.largest_error(make_rows, *sizes) <= 1

    def make_wrong_rows(head, N, _):
        return Wrong(head, N), N

    assert trial.largest_error(make_wrong_rows, *sizes) > 1
    monkeypatch.setattr(Wrong, "column", 0.0)
    assert trial.largest_error(make_wrong_rows, *sizes) > 1
    monkeypatch.setattr(Wrong, "column", torch.nan)
    assert not trial.largest_error(make_wrong_rows, *sizes) <= 1


class WrongLater(TorchRows):
    """Right in the first chunk, but without gradients in later ones."""

    chunks = 0

    def gradient(self, target, source, a, c):
        self.chunks += 1
        return super().gradient(target, source, a, c) * (self.chunks == 1)


def test_a_trial_sums_gradients_over_two_chunks():
    error = trial.largest_error(lambda head, N, _: (WrongLater(head, N), N), CPU, BF16, 40, 101, 64)
    assert error > 1


def test_quack_is_refused_with_what_it_lacks():
    reason = paw_kernels.why_not_backend("quack", GPU, BF16)
    assert "lacks the sum of e x, from which the entropy" in reason
    hidden, weight = torch.zeros(1, 16), torch.zeros(70, 16)
    with pytest.raises(ValueError, match=r"'quack' cannot run here: .*; use backend='triton'"):
        token_stats(hidden, weight, torch.zeros(1, dtype=torch.int64), backend="quack")


COMPILER = """if True:
    import os, sys, warnings, torch, triton
    from types import SimpleNamespace
    from triton.backends.compiler import GPUTarget
    from paw_kernels import _backend, _triton
    # What a machine without a GPU lacks: the name of one. Compiler, kernels and tensors are real.
    of = dict(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
              get_current_stream=lambda _: 0, is_active=lambda: True)
    triton.runtime.driver.set_active(SimpleNamespace(**of))
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    _triton.why_not = lambda *_: None
    os.environ["TRITON_INTERPRET"] = "1"  # to be let through with tensors of the CPU
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            name = _backend.first_that_works(("triton", "cuda", "torch"), torch.device("cpu"), torch.bfloat16)
    print(name, len(told), told[0].message)
"""


@pytest.mark.slow
def test_triton_that_cannot_compile_is_left_out_with_one_warning(tmp_path):
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo "release 12.8, V12.8.93"\necho broken >&2; exit 1\n'
    )
    ptxas.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= dict.fromkeys(("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"), str(ptxas))
    variables["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    process = subprocess.run(
        [sys.executable, "-c", COMPILER], env=variables, capture_output=True, text=True
    )
    last_line = (process.stdout.splitlines() or [process.stderr])[
        -1
    ]  # after the assembly that Triton prints
    assert last_line.startswith("torch 1 head backend 'triton' is left out: PTXASError: "), (
        last_line
    )


def test_wrong_tiles_in_the_interpreter_are_left_out(monkeypatch):
    from triton_interpreted import backend as _triton

    if not _triton.INTERPRETED:
        pytest.skip("the interpreter is for machines without a GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    choice = partial(_backend.first_that_works, ("triton", "cuda", "torch"), CPU, BF16)
    monkeypatch.setitem(
        _triton.TILES, ("interpreter", 2), _triton.TILES["interpreter", 2]._replace(depth=24)
    )
    _backend.fault_of_backend.cache_clear()
    with pytest.warns(
        RuntimeWarning,
        match="'triton' is left out: .*power of 2.*; see paw doctor --kernels",
    ):
        assert choice() == "torch"
    _backend.fault_of_backend.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["triton", "cuda", "torch"])
@pytest.mark.parametrize("D", [64, 896, 4096])
def test_gradient_values_of_several_tiles_a_program(backend, D):
    """In bfloat16, over more than two tiles per multiprocessor."""
    if reason := paw_kernels.why_not_backend(backend, GPU, BF16):
        pytest.skip(reason)
    tiles = 2.5 * torch.cuda.get_device_properties(GPU).multi_processor_count
    for vocabulary in (int(tiles / 8 + 1) * 256, int(tiles / 8 + 1) * 256 - 27):
        assert (
            trial.largest_error(_backend.implementation(backend), GPU, BF16, 1000, vocabulary, D)
            <= 1
        )
