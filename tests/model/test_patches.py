"""Liger's kernels and compiled layers give the log-probs and gradients of plain ones."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from joint import Objective, make_lm, make_rows, packed, relative
from transformers import GPT2Config, GPT2LMHeadModel

from paw.algo.loss import log_probs
from paw.algo.packing import Packing
from paw.errors import UserError
from paw.model.patches import apply_liger, compile_layers, import_liger
from paw.model.policy import Policy

needs_liger = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="Liger is not installed"
)


def assert_same(fast, plain, *, count):
    rows = make_rows(plain, count)
    scores = (
        log_probs(policy, rows, Packing(budget=60), temperature=1.0).values()
        for policy in (fast, plain)
    )
    assert all(
        fast_results[0] == pytest.approx(plain_results[0], abs=1e-5)
        for fast_results, plain_results in zip(*scores, strict=True)
    )
    fast_results, plain_results = (
        packed(policy, rows, Objective(), update_samples=count, budget=60)
        for policy in (fast, plain)
    )
    assert fast_results[0] == pytest.approx(plain_results[0], abs=1e-6)
    assert relative(fast_results[1], plain_results[1]) < 1e-5


@pytest.mark.slow
def test_sampling_stays_eager_with_compiled_layers():
    """test_fused.py compares what they compute."""
    fast = Policy(make_lm("qwen3", num_hidden_layers=1), checkpointing="full")
    plain = fast.lm.get_decoder().layers[0].forward
    compile_layers(fast.lm)
    with torch.compiler.set_stance("fail_on_recompile"):
        fast.lm(input_ids=torch.tensor([[1, 2, 3]]))
    assert fast.lm.get_decoder().layers[0].forward != plain


INTERPRETED = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np, torch, triton.language as tl
from triton.runtime import interpreter

# which leaves floats as they are, while Liger's kernels call their methods
as_tensor = interpreter._implicit_cvt
float32 = lambda x: tl.tensor(interpreter.TensorHandle(np.array([x], np.float32), tl.float32), tl.float32)
interpreter._implicit_cvt = lambda x: float32(x) if isinstance(x, float) else as_tensor(x)
from liger_kernel.ops import rms_norm

rms_norm.rsqrt = lambda x: tl.rsqrt(x)  # libdevice's is CUDA's
sys.path[:0] = sys.argv[1:]
from joint import make_rows, tiny_policy
from paw.model.patches import apply_liger
from test_patches import assert_same

plain, fast = (tiny_policy("qwen3", num_hidden_layers=1) for _ in range(2))
apply_liger(fast.lm)
assert_same(fast, plain, count=2)
norm, mlp = fast.lm.model.norm, fast.lm.model.layers[0].mlp
print(norm.forward.__func__.__module__, mlp.forward.__func__.__module__)
"""


@pytest.mark.long
@needs_liger
@pytest.mark.slow
def test_liger_gives_the_same():
    """In Triton's interpreter, in a separate process: the rotary embedding is patched for the
    whole process."""
    command = [sys.executable, "-c", INTERPRETED, *sys.path]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.split() == [
        "liger_kernel.transformers.rms_norm",
        "liger_kernel.transformers.swiglu",
    ]
    assert not finished.stderr


@needs_liger
def test_liger_says_what_it_cannot_do(monkeypatch):
    with pytest.raises(UserError, match=r"model\.liger needs a GPU, but this run is on 'cpu'"):
        import_liger(torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match="Liger has no kernels for 'gpt2' models"):
        apply_liger(GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)))


def test_missing_liger_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    with pytest.raises(UserError, match=r"pip install 'paw-trainer\[liger\]'"):
        import_liger(torch.device("cuda"))
