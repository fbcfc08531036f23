"""The passes as torch.library operators: torch.compile, FakeTensorMode, checkpointing, autocast,
and which backend runs."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from dense_reference import columns, fused_loss, mapped, problem
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import paw_kernels
from paw_kernels import Loss, _native, _rows, token_loss, token_stats

OPTIONS = {"kl_coef": 0.1, "entropy_coef": 0.02}


class Fixed(NamedTuple):
    """A batch and its loss, made once and outside the compiled code."""

    batch: Any
    loss: Loss


def body_and_rows(T=60, V=37, D=12):
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.GELU(), torch.nn.Linear(D, D))
    inputs, weight, target, _, rows = problem(T, V, D, **OPTIONS)
    return body, inputs, torch.nn.Parameter(weight), target, Fixed(rows.batch, rows.loss)


def gradients(loss, *parameters):
    return torch.autograd.grad(loss, parameters)


def assert_equal(actual, expected):
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_compiles_into_one_graph_with_the_body():
    """With several temperatures, they become a symbol, and no check may break the graph."""
    body, inputs, weight, target, rows = body_and_rows()

    def loss(inputs, temperature, softcap):
        hidden = body(inputs)
        options = {"temperature": temperature, "softcap": softcap}
        statistics = token_stats(hidden, weight, target, **options)
        return (
            fused_loss(hidden, weight, target, rows, **options).loss
            + 0.1 * statistics.logp.mean()
            - 0.2 * statistics.entropy.sum()
        )

    parameters = [*body.parameters(), weight]
    # Inductor's decompositions and its cut into two graphs, without the minute of a C++ compiler.
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager_decomp_partition")
    assert_equal(
        gradients(compiled(inputs, 1.0, None), *parameters),
        gradients(loss(inputs, 1.0, None), *parameters),
    )
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for options in ((0.7, None), (1.3, None), (1.0, 2.0), (0.9, 3.0)):
        assert_equal(
            gradients(compiled(inputs, *options), *parameters),
            gradients(loss(inputs, *options), *parameters),
        )


def test_cuda_graphs_leave_the_operators_out():
    """The operators wait for the host, which a captured graph cannot do."""
    for name in ("token_loss", "token_stats", "token_stats_backward"):
        operator = getattr(torch.ops.paw_kernels, name).default
        assert is_cudagraph_unsafe_fx_node(torch.fx.Graph().create_node("call_function", operator))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_graphs_around_the_head_change_nothing():
    body, inputs, weight, target, rows = body_and_rows()
    body = body.cuda()
    inputs = inputs.cuda()
    target = target.cuda()
    weight = torch.nn.Parameter(weight.detach().cuda())
    rows = Fixed(mapped(rows.batch, lambda values: values.cuda()), rows.loss)

    def loss(inputs):
        return fused_loss(body(inputs), weight, target, rows).loss

    compiled = torch.compile(loss, mode="reduce-overhead")
    parameters = [*body.parameters(), weight]
    for _ in range(3):
        actual = gradients(compiled(inputs), *parameters)
        for left, right in zip(actual, gradients(loss(inputs), *parameters), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["token_loss", "token_stats"])
def test_derivatives_that_do_not_exist_are_refused(name):
    _, hidden, weight, target, rows = body_and_rows()

    def run_head(hidden, weight):
        if name == "token_loss":
            return fused_loss(hidden, weight, target, rows).loss
        return token_stats(hidden, weight, target).entropy.sum()

    with pytest.raises(
        RuntimeError, match=f"{name} has no second derivatives; .*create_graph=True"
    ):
        torch.autograd.grad(run_head(hidden, weight), weight, create_graph=True)
    hidden = hidden.detach()
    weight = weight.detach()
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match=r"no forward-mode derivatives \(jvp\)"),
    ):
        run_head(forward_ad.make_dual(hidden, torch.ones_like(hidden)), weight)
    with pytest.raises(RuntimeError, match=r"no forward-mode derivatives \(jvp\)"):
        torch.func.jvp(
            lambda other_weight: run_head(hidden, other_weight),
            (weight,),
            (torch.ones_like(weight),),
        )
    with forward_ad.dual_level():  # the head sees none of it
        run_head(hidden, weight)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
@pytest.mark.parametrize("name", ["token_loss", "token_stats"])
def test_autocast_casts_several_dtypes_to_its_own(name, compiled):
    """As in torch.nn.functional.linear: a body under autocast returns bf16, while weight and bias
    of the head are fp32."""
    hidden, weight, target, bias, rows = problem(60, 37, 12, bias=True, **OPTIONS)
    rows = Fixed(rows.batch, rows.loss)

    def run_head(hidden, weight, bias):
        if name == "token_loss":
            return fused_loss(hidden, weight, target, rows, bias=bias).loss
        return sum(tensor.sum() for tensor in token_stats(hidden, weight, target, bias=bias))

    mixed_leaves = [tensor.requires_grad_() for tensor in (hidden.bfloat16(), weight, bias)]
    cast_leaves = [tensor.detach().bfloat16().requires_grad_() for tensor in mixed_leaves]
    with pytest.raises(ValueError, match=r"weight must be torch.bfloat16, got torch.float32"):
        run_head(*mixed_leaves)
    function = (
        torch.compile(run_head, fullgraph=True, backend="aot_eager") if compiled else run_head
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = gradients(function(*mixed_leaves), *mixed_leaves)
    assert [gradient.dtype for gradient in actual] == [torch.bfloat16, torch.float32, torch.float32]
    of_cast_inputs = gradients(run_head(*cast_leaves), *cast_leaves)
    for gradient, expected in zip(actual, of_cast_inputs, strict=True):
        assert torch.equal(gradient.bfloat16(), expected)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"weight must be torch.bfloat16"),
    ):
        run_head(mixed_leaves[0], weight.double(), bias)


def test_inside_torch_compile_a_loss_is_made_before():
    """A function's closure may change without torch.compile noticing."""
    _, hidden, weight, target, rows = body_and_rows()

    def loss(logp, entropy, batch):
        return -logp

    compiled = torch.compile(
        lambda states: token_loss(states, weight, target, loss, rows.batch).loss
    )
    with pytest.raises(Exception, match=r"must be a paw_kernels\.Loss"):
        torch.compile(compiled, fullgraph=True, backend="eager")(hidden)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant):
    body, inputs, weight, target, rows = body_and_rows()
    inputs.requires_grad_()
    parameters = [*body.parameters(), weight]

    def run(checkpointed):
        hidden = checkpoint(body, inputs, use_reentrant=reentrant) if checkpointed else body(inputs)
        for parameter in parameters:
            parameter.grad = None
        fused_loss(hidden, weight, target, rows).loss.backward()
        return [parameter.grad for parameter in parameters]

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_get_the_shapes_and_dtypes_of_real_ones(device):
    _, inputs, weight, target, rows = body_and_rows()
    real_results = fused_loss(inputs.bfloat16(), weight.bfloat16(), target, rows)
    # Autograd of fake tensors on a device that this torch was not built for ends the process.
    with_gradients = device == "cpu"
    with FakeTensorMode(), torch.set_grad_enabled(with_gradients):
        number = torch.empty(60, device=device)
        labels = torch.empty(60, dtype=torch.int64, device=device)
        fake_batch = mapped(rows.batch, lambda values: number.to(values.dtype))
        hidden, fake_weight = (
            torch.empty(size, 12, dtype=torch.bfloat16, device=device, requires_grad=True)
            for size in (60, 37)
        )
        results = token_loss(hidden, fake_weight, labels, rows.loss, fake_batch, backend="torch")
        statistics = token_stats(hidden, fake_weight, labels, backend="torch")
        if with_gradients:
            (results.loss + statistics.logp.sum() + statistics.entropy.sum()).backward()
            assert hidden.grad.shape == hidden.shape
            assert fake_weight.grad.dtype == torch.bfloat16
    for actual, expected, name in zip(results, real_results, results._fields, strict=True):
        assert actual.shape == expected.shape, name
        assert actual.dtype == expected.dtype, name
        assert actual.device.type == device, name
    assert statistics.logp.shape == (60,)
    assert statistics.entropy.shape == (60,)
    assert statistics.logp.dtype == torch.float32


def test_operators_pass_the_checks_of_torch_library():
    hidden, weight, target, bias, rows = problem(20, 11, 6, bias=True, **OPTIONS)
    values = columns(rows.batch)
    loss = rows.loss
    names = ",".join(name if name in values else f"{name}?" for name in vars(rows.batch))
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.paw_kernels.token_loss,
        (*leaves, target, 0.7, 2.0, list(values.values()), names, loss.key, "auto", [True] * 3),
        test_utils=checks,
    )
    for keep in (False, True):
        arguments = (*leaves, target, 0.7, 2.0, "auto", keep)
        torch.library.opcheck(torch.ops.paw_kernels.token_stats, arguments, test_utils=checks)
    logits = hidden.detach() @ weight.detach().t()
    detached = [tensor.detach() for tensor in (bias, target)]
    torch.library.opcheck(torch.ops.paw_kernels.row_statistics, (logits, *detached, 1.3, 2.0))
    source = torch.arange(20)
    per_row = [torch.randn(20) for column in range(5)]
    torch.library.opcheck(
        torch.ops.paw_kernels.row_gradient_,
        (logits, *detached, source, *per_row, 1.3, torch.float32, 2.0),
    )


def test_without_a_compiler_the_head_falls_back_to_torch(monkeypatch, tmp_path):
    hidden, weight, target, _, rows = problem(20, 11, 6)
    monkeypatch.setattr(_native, "_CPU_LIBRARY", tmp_path / "_cpu.so")
    monkeypatch.setattr(_rows, "why_no_cpu_library", _native.why_no_cpu_library.__wrapped__)
    assert paw_kernels.best_backend(hidden.device, hidden.dtype) == "torch"
    assert fused_loss(hidden, weight, target, rows).loss.isfinite()
    reason = r"csrc/rows.cpp was not built; install a C\+\+ compiler"
    with pytest.raises(ValueError, match=rf"backend='cpu' cannot run here: {reason}"):
        fused_loss(hidden, weight, target, rows, backend="cpu")


def test_a_library_of_other_sources_is_not_called(monkeypatch, tmp_path):
    """Its functions of the same name would take different arguments."""
    other = tmp_path / "other.so"
    other.symlink_to(next(Path(torch.__file__).parent.glob("lib/libc10.*")))
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    why_not = _native.why_no_cpu_library.__wrapped__

    monkeypatch.setattr(_native, "_CPU_LIBRARY", other)
    assert why_not() == f"{other} was built from other sources; rerun pip install -e ."
    monkeypatch.setattr(_native, "_CPU_LIBRARY", broken)
    assert why_not().startswith(f"{broken} does not load: ")


def test_the_cpu_backend_is_the_one_in_use_here():
    assert paw_kernels.best_backend(torch.device("cpu"), torch.float32) == "cpu"
    for name in ("triton", "cuda"):
        assert "needs tensors on cuda" in paw_kernels.why_not_backend(
            name, torch.device("cpu"), torch.float32
        )
