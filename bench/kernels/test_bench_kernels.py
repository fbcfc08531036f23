"""Compares the fused head with plain torch on a CPU in one run: pytest bench --benchmark-only."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.kernels.cases import (
    BOTH,
    Case,
    Group,
    implementation,
    native_row_statistics,
    plain_row_statistics,
    row_problem,
)
from bench.kernels.problem import make_problem
from paw_kernels import why_not_backend

CPU = torch.device("cpu")
SMALL = Group("small", 512, 128, 32_000)
needs_cpu_op = pytest.mark.skipif(
    why_not_backend("cpu", CPU, torch.float32) is not None,
    reason="the C++ row operations are not built",
)


@pytest.mark.benchmark(group="row statistics 256 x 151,936")
@pytest.mark.parametrize("how", ["torch", pytest.param("cpu", marks=needs_cpu_op)])
def test_bench_row_statistics(benchmark, how):
    logits, target = row_problem(256, 151_936, CPU)
    benchmark.pedantic(
        plain_row_statistics if how == "torch" else native_row_statistics,
        (logits, target),
        rounds=5,
        warmup_rounds=1,
    )


@pytest.mark.benchmark(group="loss + gradients, T 512, D 128, V 32,000")
@pytest.mark.parametrize("live", [1.0, 0.4, 0.1])
@pytest.mark.parametrize(
    "name", ["naive", "paw[torch]", pytest.param("paw[cpu]", marks=needs_cpu_op)]
)
def test_bench_loss(benchmark, name, live):
    problem = make_problem(*SMALL[1:], live=live, known=False, dtype=torch.float32, device=CPU)
    functions = implementation(Case(SMALL, live, "" if live == 1 else "found", name, BOTH), problem)
    inputs = [tensor.detach().requires_grad_() for tensor in (problem.hidden, problem.weight)]

    def step():
        torch.autograd.grad(functions.both(*inputs)[0], inputs)

    benchmark.pedantic(step, rounds=5, warmup_rounds=1)
