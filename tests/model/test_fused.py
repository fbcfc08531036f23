"""Fused decoder layers are taken only after a trial that would have seen them wrong."""

import os
import runpy
import subprocess
import sys
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.forkserver import _forkserver
from types import SimpleNamespace

import pytest
import torch
from forked import CONTEXT
from joint import make_lm

from paw.build import check_extras
from paw.config.recipe import load
from paw.config.sections import ModelConfig
from paw.distributed.ranks import Ranks
from paw.errors import UserError
from paw.model import fused, fused_trial
from paw.model.fused import Layers, choose_layers, fault_of, wanted_layers
from paw.model.fused_trial import FLOOR, Request, judge, largest_error, small_config

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
COMPILED = Layers(compiled=True)
LIGER = Layers(liger=True)


@pytest.mark.parametrize(
    ("compile", "liger", "on_gpu", "on_cpu"),
    [
        ("auto", "auto", [COMPILED, LIGER], []),
        ("auto", False, [COMPILED], []),
        ("auto", True, [LIGER], [LIGER]),
        (False, "auto", [], []),
        (True, "auto", [COMPILED], [COMPILED]),
        (True, True, [Layers(compiled=True, liger=True)], [Layers(compiled=True, liger=True)]),
    ],
)
def test_auto_means_fused_on_a_gpu_and_eager_on_a_cpu(compile, liger, on_gpu, on_cpu):
    config = ModelConfig(path="somewhere", compile=compile, liger=liger)
    assert wanted_layers(config, GPU) == on_gpu
    assert wanted_layers(config, CPU) == on_cpu


def choose(monkeypatch, faults, changes, *, ranks=None):
    """The choice on a GPU if the trial of a way finds faults[way]."""
    monkeypatch.setattr(fused, "import_liger", lambda device: None)
    tried = []

    def fault_of(request):
        tried.append(Layers(request.compiled, request.liger))
        return faults.get(tried[-1], "")

    monkeypatch.setattr(fused, "fault_of", fault_of)
    config = load("quickstart", {"model.dtype": "bfloat16"} | changes)
    choice = choose_layers(config, "here", GPU, attention="varlen", ranks=ranks or Ranks())
    return choice, tried


def test_what_a_trial_refuses_is_left_out_with_a_line(monkeypatch):
    assert choose(monkeypatch, {}, {}) == ((COMPILED, []), [COMPILED])

    (layers, lines), _ = choose(monkeypatch, {COMPILED: "no compiler"}, {})
    assert layers == LIGER
    assert lines == [
        "decoder layers are Liger's kernels, because others were refused: compiled: no compiler "
        "(--model.compile false skips the trials)"
    ]

    both = {COMPILED: "no compiler", LIGER: "wrong"}
    (layers, (line,)), tried = choose(monkeypatch, both, {})
    assert layers == fused.EAGER
    assert tried == [COMPILED, LIGER]
    assert "decoder layers are eager" in line
    assert "compiled: no compiler; Liger's kernels: wrong" in line


def test_layers_that_the_configuration_names_must_pass(monkeypatch):
    with pytest.raises(UserError, match=r"^model.compile = true: slow; use --model.compile false$"):
        choose(monkeypatch, {COMPILED: "slow"}, {"model.compile": True})
    with pytest.raises(UserError, match=r"^model.liger = true: wrong; use --model.liger false$"):
        choose(monkeypatch, {LIGER: "wrong"}, {"model.liger": True})
    with pytest.raises(UserError, match=r"model\.liger needs a GPU, but this run is on 'cpu'"):
        check_extras(load("quickstart", {"model.liger": True}), CPU)


def test_selective_checkpointing_is_not_compiled_unless_told(monkeypatch):
    selective = {"model.checkpointing": "selective"}
    (layers, (line,)), tried = choose(monkeypatch, {}, selective)
    assert layers == LIGER
    assert tried == [LIGER]
    assert "'selective' chooses among matrix products, which compiled layers hide" in line
    (layers, lines), _ = choose(monkeypatch, {}, selective | {"model.compile": True})
    assert (layers, lines) == (COMPILED, [])


def test_all_ranks_leave_out_what_fails_on_one_machine(monkeypatch):
    class Second(Ranks):
        """Rank 3, the second of its machine; another machine's trial of compiled layers fails."""

        rank = 3
        on_host = 2
        answers = iter([["", "", "no g++", ""], ["", "", "", ""]])

        def gather(self, item, kind=None):
            return next(self.answers)

    (layers, (line,)), tried = choose(monkeypatch, {}, {}, ranks=Second())
    assert layers == LIGER
    assert "compiled: rank 2: no g++" in line
    assert not tried  # the first rank of the machine tries


def make_results(**changes):
    generator = torch.Generator().manual_seed(0)
    results = {
        "hidden states": torch.randn(50, 8, generator=generator),
        "the gradient of a": torch.randn(8, 8, generator=generator),
        "the gradient of b": 1e-9 * torch.randn(8, generator=generator),
    }
    return results | changes


def test_errors_are_judged_by_rounding():
    exact = make_results()
    noise = {name: torch.randn(value.shape) for name, value in exact.items()}
    eager = {name: value + 0.01 * noise[name] for name, value in exact.items()}
    as_good = {name: value - 0.015 * noise[name] for name, value in exact.items()}
    floor = FLOOR["bfloat16"]
    assert largest_error(eager, eager, exact, floor)[0] < 1
    assert largest_error(as_good, eager, exact, floor)[0] < 1
    assert largest_error(exact, exact, exact, FLOOR["float32"])[0] == 0

    flipped = eager | {"the gradient of a": -eager["the gradient of a"]}
    share, worst = largest_error(flipped, eager, exact, floor)
    assert share > 10
    assert worst == "the gradient of a"
    broken = eager | {"hidden states": torch.full((50, 8), torch.nan)}
    share, worst = largest_error(broken, eager, exact, floor)
    assert not share <= 1
    assert worst == "hidden states"
    assert not largest_error({"hidden states": exact["hidden states"]}, eager, exact, floor)[0] <= 1
    # A gradient that is nothing but rounding.
    other_noise = exact | {"the gradient of b": 1e-9 * torch.randn(8)}
    assert largest_error(other_noise, exact, exact, FLOOR["float32"])[0] < 1


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_lm("qwen3", num_hidden_layers=3).config.save_pretrained(folder)
    return folder


def make_request(folder, **changes):
    request = Request(
        path=str(folder),
        device="cpu",
        dtype="bfloat16",
        weights="float32",
        attention="sdpa",
        checkpointing="none",
        offload_activations=False,
        lora=None,
        compiled=True,
        liger=False,
        parent=0,
    )
    return replace(request, **changes)


def test_a_trial_has_every_kind_of_layer(tmp_path):
    config = make_lm("qwen3", num_hidden_layers=6).config
    config.layer_types = ["full_attention"] * 3 + ["sliding_attention"] * 3
    config.save_pretrained(tmp_path)
    small = small_config(str(tmp_path))
    assert small.num_hidden_layers == 4
    assert small.layer_types == ["full_attention"] * 3 + ["sliding_attention"]


class TwiceTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


FAULTS = {
    "a smaller output": lambda out: 0.9 * out,
    "another gradient": TwiceTheGradient.apply,
    "nothing": lambda out: out,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trial_tells_wrong_layers_from_right_ones(monkeypatch, model_folder, fault, dtype):
    def make_wrong(lm):
        layer = lm.get_decoder().layers[0]
        eager = layer.forward
        layer.forward = lambda *args, **options: FAULTS[fault](eager(*args, **options))

    monkeypatch.setattr(fused_trial, "compile_layers", make_wrong)
    verdict = judge(make_request(model_folder, dtype=dtype))
    assert (verdict.share <= 1) == (fault == "nothing")
    assert bool(fused.judged(verdict)) == (fault != "nothing")


LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
COMBINED = {
    "checkpointing": "full",
    "offload_activations": True,
    "weights": "bfloat16",
    "lora": LORA,
}


@pytest.mark.long
@pytest.mark.slow
def test_compiled_layers_pass_with_everything_they_are_combined_with(monkeypatch, model_folder):
    """With a compiler back end that generates no code, as in test_patches.py."""
    pytest.importorskip("peft")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    verdict = judge(make_request(model_folder, **COMBINED))
    assert 0 < verdict.share <= 1, verdict


def run_module(words, output):
    """`python WORDS`, which are -m MODULE and its arguments."""
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    os.setsid()
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)


class ForkedTrial:
    """A trial's process as subprocess.Popen starts it, forked from one that has loaded torch."""

    def __init__(self, command, *, stdout, **options):
        with Connection(os.dup(stdout.fileno())) as output:
            self.process = CONTEXT.Process(target=run_module, args=(command[1:], output))
            self.process.start()
        self.pid = self.process.pid

    def wait(self, limit_s=None):
        self.process.join(limit_s)
        return self.process.exitcode


@pytest.mark.slow
def test_a_trial_runs_in_a_process_of_its_own(model_folder, monkeypatch):
    """Inductor takes a minute of a core, so here it is tried on a GPU alone. The test below starts
    new interpreters."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parent = os.getpid()
    if device == "cpu":
        parent = _forkserver._forkserver_pid
        names = ("DEVNULL", "STDOUT", "TimeoutExpired")
        constants = {name: getattr(subprocess, name) for name in names}
        monkeypatch.setattr(fused, "subprocess", SimpleNamespace(Popen=ForkedTrial, **constants))
    request = make_request(model_folder, parent=parent, device=device)
    assert fault_of(replace(request, compiled=device == "cuda")) == ""


def test_a_trial_that_fails_or_takes_too_long_is_a_fault(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise OSError('the driver is too old')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    request = make_request(tmp_path, parent=os.getpid())
    assert fault_of(request, limit_s=0.01) == "no result of the trial in 0.01 s"
    assert fault_of(request) == "the trial failed (OSError: the driver is too old)"


@pytest.mark.parametrize("key", ["model.compile", "model.liger"])
def test_a_value_that_is_none_of_the_three_is_named(key):
    with pytest.raises(UserError, match=rf"{key}.*sometimes"):
        load("quickstart", {key: "sometimes"})
