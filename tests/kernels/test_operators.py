"""The passes as torch.library operators: torch.compile, FakeTensorMode, checkpointing, autocast; which backend runs."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from dense_reference import columns, fused_loss, mapped, problem
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import paw_kernels
from paw_kernels import Loss, _native, token_loss, token_stats

OPTIONS = {"kl_coef": 0.1, "entropy_coef": 0.02}


class Fixed(NamedTuple):
    """A batch and its loss, made once: outside of what is compiled."""

    batch: Any
    loss: Loss


def body_and_rows(T=60, V=37, D=12):
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.GELU(), torch.nn.Linear(D, D))
    inputs, weight, target, _, rows = problem(T, V, D, **OPTIONS)
    return body, inputs, torch.nn.Parameter(weight), target, Fixed(rows.batch, rows.loss)


def gradients(loss, *parameters):
    return torch.autograd.grad(loss, parameters)


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_compiles_into_one_graph_with_the_body():
    """For one temperature after another: it becomes a symbol, and no check of it may break the graph."""
    body, inputs, weight, target, rows = body_and_rows()

    def loss(inputs, temperature, softcap):
        hidden, how = body(inputs), {"temperature": temperature, "softcap": softcap}
        stats = token_stats(hidden, weight, target, **how)
        return (
            fused_loss(hidden, weight, target, rows, **how).loss
            + 0.1 * stats.logp.mean()
            - 0.2 * stats.entropy.sum()
        )

    parameters = [*body.parameters(), weight]
    compiled = torch.compile(loss, fullgraph=True)  # code of inductor's
    assert_equal(
        gradients(compiled(inputs, 1.0, None), *parameters),
        gradients(loss(inputs, 1.0, None), *parameters),
    )
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for how in ((0.7, None), (1.3, None), (1.0, 2.0), (0.9, 3.0)):
        assert_equal(
            gradients(compiled(inputs, *how), *parameters),
            gradients(loss(inputs, *how), *parameters),
        )


def test_cuda_graphs_leave_the_operators_out():
    """They wait for the host, which a captured graph cannot."""
    for name in ("token_loss", "token_stats", "token_stats_backward"):
        operator = getattr(torch.ops.paw_kernels, name).default
        assert is_cudagraph_unsafe_fx_node(torch.fx.Graph().create_node("call_function", operator))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_graphs_around_the_head_change_nothing():
    body, inputs, weight, target, rows = body_and_rows()
    body, inputs, target, weight = (
        body.cuda(),
        inputs.cuda(),
        target.cuda(),
        torch.nn.Parameter(weight.detach().cuda()),
    )
    rows = Fixed(mapped(rows.batch, lambda values: values.cuda()), rows.loss)

    def loss(inputs):
        return fused_loss(body(inputs), weight, target, rows).loss

    compiled, parameters = torch.compile(loss, mode="reduce-overhead"), [*body.parameters(), weight]
    for _ in range(3):
        got = gradients(compiled(inputs), *parameters)
        for a, b in zip(got, gradients(loss(inputs), *parameters), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["token_loss", "token_stats"])
def test_derivatives_that_do_not_exist_are_refused(name):
    _, hidden, weight, target, rows = body_and_rows()

    def of(hidden, weight):
        if name == "token_loss":
            return fused_loss(hidden, weight, target, rows).loss
        return token_stats(hidden, weight, target).entropy.sum()

    with pytest.raises(
        RuntimeError, match=f"{name} has no second derivatives; .*create_graph=True"
    ):
        torch.autograd.grad(of(hidden, weight), weight, create_graph=True)
    hidden, weight = hidden.detach(), weight.detach()
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match=r"no forward-mode derivatives \(jvp\)"),
    ):
        of(forward_ad.make_dual(hidden, torch.ones_like(hidden)), weight)
    with pytest.raises(RuntimeError, match=r"no forward-mode derivatives \(jvp\)"):
        torch.func.jvp(lambda w: of(hidden, w), (weight,), (torch.ones_like(weight),))
    with forward_ad.dual_level():  # of nothing that the head sees
        of(hidden, weight)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
@pytest.mark.parametrize("name", ["token_loss", "token_stats"])
def test_autocast_casts_several_dtypes_to_its_own(name, compiled):
    """As torch.nn.functional.linear: a body under autocast answers bf16, the head's weight and bias are fp32."""
    hidden, weight, target, bias, rows = problem(60, 37, 12, bias=True, **OPTIONS)
    rows = Fixed(rows.batch, rows.loss)

    def of(hidden, weight, bias):
        if name == "token_loss":
            return fused_loss(hidden, weight, target, rows, bias=bias).loss
        return sum(t.sum() for t in token_stats(hidden, weight, target, bias=bias))

    mixed = [t.requires_grad_() for t in (hidden.bfloat16(), weight, bias)]
    same = [t.detach().bfloat16().requires_grad_() for t in mixed]
    with pytest.raises(ValueError, match=r"weight must be torch.bfloat16, got torch.float32"):
        of(*mixed)
    call = torch.compile(of, fullgraph=True, backend="aot_eager") if compiled else of
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(call(*mixed), *mixed)
    assert [g.dtype for g in got] == [torch.bfloat16, torch.float32, torch.float32]
    assert all(
        torch.equal(g.bfloat16(), w) for g, w in zip(got, gradients(of(*same), *same), strict=True)
    )
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"weight must be torch.bfloat16"),
    ):
        of(mixed[0], weight.double(), bias)


def test_inside_torch_compile_a_loss_is_made_before():
    """A function's closure may change without torch.compile seeing it."""
    _, hidden, weight, target, rows = body_and_rows()
    compiled = torch.compile(
        lambda h: token_loss(h, weight, target, lambda *of: -of[0], rows.batch).loss
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
        for p in parameters:
            p.grad = None
        fused_loss(hidden, weight, target, rows).loss.backward()
        return [p.grad for p in parameters]

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_get_the_shapes_and_dtypes_of_real_ones(device):
    _, inputs, weight, target, rows = body_and_rows()
    real = fused_loss(inputs.bfloat16(), weight.bfloat16(), target, rows)
    # Autograd of fake tensors of a device that this torch was not built for ends the process.
    grad = device == "cpu"
    with FakeTensorMode(), torch.set_grad_enabled(grad):
        number, labels = (
            torch.empty(60, device=device),
            torch.empty(60, dtype=torch.int64, device=device),
        )
        fake = mapped(rows.batch, lambda values: number.to(values.dtype))
        hidden, head = (
            torch.empty(n, 12, dtype=torch.bfloat16, device=device, requires_grad=True)
            for n in (60, 37)
        )
        out = token_loss(hidden, head, labels, rows.loss, fake, backend="torch")
        stats = token_stats(hidden, head, labels, backend="torch")
        if grad:
            (out.loss + stats.logp.sum() + stats.entropy.sum()).backward()
            assert hidden.grad.shape == hidden.shape and head.grad.dtype == torch.bfloat16
    for got, want, name in zip(out, real, out._fields, strict=True):
        assert (got.shape, got.dtype, got.device.type) == (want.shape, want.dtype, device), name
    assert stats.logp.shape == stats.entropy.shape == (60,) and stats.logp.dtype == torch.float32


def test_operators_pass_the_checks_of_torch_library():
    hidden, weight, target, bias, rows = problem(20, 11, 6, bias=True, **OPTIONS)
    values, loss = columns(rows.batch), rows.loss
    names = ",".join(name if name in values else f"{name}?" for name in vars(rows.batch))
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.paw_kernels.token_loss,
        (*leaves, target, 0.7, 2.0, list(values.values()), names, loss.key, "auto", [True] * 3),
        test_utils=tests,
    )
    for keep in (False, True):
        given = (*leaves, target, 0.7, 2.0, "auto", keep)
        torch.library.opcheck(torch.ops.paw_kernels.token_stats, given, test_utils=tests)
    z, plain = hidden.detach() @ weight.detach().t(), [t.detach() for t in (bias, target)]
    torch.library.opcheck(torch.ops.paw_kernels.row_statistics, (z, *plain, 1.3, 2.0))
    source, per_row = torch.arange(20), [torch.randn(20) for _ in range(5)]
    torch.library.opcheck(
        torch.ops.paw_kernels.row_gradient_, (z, *plain, source, *per_row, 1.3, torch.float32, 2.0)
    )


def test_without_a_compiler_the_head_falls_back_to_torch(monkeypatch):
    from paw_kernels import _rows

    hidden, weight, target, _, rows = problem(20, 11, 6)
    monkeypatch.setattr(_rows, "cpu_library", lambda: None)
    assert paw_kernels.best_backend(hidden.device, hidden.dtype) == "torch"
    assert fused_loss(hidden, weight, target, rows).loss.isfinite()
    reason = r"csrc/rows.cpp was not built, or has changed since; install a C\+\+"
    with pytest.raises(ValueError, match=rf"backend='cpu' cannot run here: {reason}"):
        fused_loss(hidden, weight, target, rows, backend="cpu")


def test_a_library_of_older_sources_is_not_called(monkeypatch):
    """Its functions of the same name would take other arguments."""
    older = SimpleNamespace(origin="libc.so.6")
    monkeypatch.setattr(_native.importlib.util, "find_spec", lambda name: older)
    assert _native.cpu_library.__wrapped__() is None


def test_the_cpu_backend_is_the_one_in_use_here():
    assert paw_kernels.best_backend(torch.device("cpu"), torch.float32) == "cpu"
    for name in ("triton", "cuda"):
        assert "device cuda" in paw_kernels.why_not_backend(
            name, torch.device("cpu"), torch.float32
        )
