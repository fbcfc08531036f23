"""The CUDA kernels of the head against float64: on a GPU, and anywhere through the emulation of cuda_on_cpu.h."""

import pytest
import torch
from cuda_on_cpu import Machine
from dense_reference import problem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from paw_kernels import _native, _rows, _torch, segments
from paw_kernels._head import has_gradient, head_pass

pytestmark = pytest.mark.slow

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape, seed=0, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x, bias, target, a, c, scale):
    """Statistics and dL/dlogits in float64."""
    z = (x.double().cpu() + (0 if bias is None else bias.double().cpu())) * scale
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    log_p = log_p.clamp(min=-1e9)  # 0 log 0 = 0
    entropy, target = -(p * log_p).sum(-1), target.cpu()
    dz = a.double().cpu()[:, None] * (one_hot(target, x.shape[1]) - p)
    if c is not None:
        dz -= c.double().cpu()[:, None] * p * (log_p + entropy[:, None])
    return log_p.gather(1, target[:, None])[:, 0], entropy, z.logsumexp(-1), scale * dz


def run(machine: Machine, x, bias, target, a, c, scale, dtype, softcap=None):
    """Statistics and the packed gradient, in place."""
    ops, args = machine.ops, (bias, target)
    logp, entropy, *normaliser = ops.row_statistics(x, *args, scale, softcap)
    source = sources(has_gradient(a, c))
    ops.row_gradient_(x, *args, source, *normaliser, entropy, a, c, scale, dtype, softcap)
    return logp, entropy, source, _native.packed_rows(x, len(source), dtype)


def sources(live):
    source, count = segments.pack(live)
    return source[: int(count)]


def assert_gradient(got, want, dtype, noise):
    """Within twice the rounding of the exact result to the dtype, and float32's own noise."""
    rounding = (want.to(dtype).double() - want).abs().max().item() if want.numel() else 0
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=2 * rounding + noise)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 7),
    V=st.sampled_from([1, 2, 3, 5, 127, 128, 1000, 4099, 9000]),
    padding=st.integers(0, 3),
    offset=st.integers(0, 3),
    live=st.sampled_from([0.0, 0.4, 1.0]),
    scale=st.sampled_from([0.5, 1.0, 2.5]),
    size=st.sampled_from([0.0, 1.0, 30.0]),
    extras=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10_000),
)
def test_statistics_and_gradients_match_float64(machine, n, V, padding, offset, live, scale, size, extras, dtype, seed):
    # Rows at every alignment, with NaN around them that must neither be read nor written.
    stride = V + padding
    memory = torch.full((offset + n * stride + 4,), torch.nan)
    x = memory.as_strided((n, V), (stride, 1), offset)
    x.copy_(random(n, V, seed=seed, size=size))
    target = torch.randint(V, (n,), generator=torch.Generator().manual_seed(seed))
    target[0], target[-1] = 0, V - 1
    bias = random(V, seed=seed + 1) if extras else None
    alive = torch.rand(n, generator=torch.Generator().manual_seed(seed + 2)) < live
    a, c = random(n, seed=seed + 3) * alive, random(n, seed=seed + 4) * alive if extras else None
    logp, entropy, _, dz = exact(x, bias, target, a, c, scale)

    memory = memory.to(machine.device)
    x = memory.as_strided((n, V), (stride, 1), offset)
    got_logp, got_entropy, source, got = run(machine, x, *machine.put(bias, target, a, c), scale, dtype)

    spread = max(1.0, 4 * size * scale)
    assert (got_logp <= 0).all() and (got_entropy >= 0).all()
    torch.testing.assert_close(got_logp.double().cpu(), logp, rtol=1e-6, atol=1e-6 * spread)
    torch.testing.assert_close(got_entropy.double().cpu(), entropy, rtol=1e-6, atol=1e-6 * spread)
    assert_gradient(got, dz[source.cpu()], dtype, 2e-6 * spread * scale)
    outside = torch.ones_like(memory, dtype=torch.bool)
    outside.as_strided((n, V), (stride, 1), offset).fill_(False)
    assert memory[outside].isnan().all()


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_backend_gives_the_gradients_of_the_torch_backend(machine, softcap, monkeypatch):
    hidden, weight, target, bias, rows = problem(90, 130, 12, bias=True, scale=2.0)
    index, a, c = torch.arange(90), rows.advantage * rows.weight, rows.weight
    hidden, weight, bias, target, index, a, c = machine.put(hidden, weight, bias, target, index, a, c)
    arguments = hidden, weight, bias, target, index, 0.7, softcap
    options = {"coefficients": lambda chunk, *_: (a[chunk], c[chunk]), "wants": (True,) * 3}
    want = head_pass(_torch.make_rows, *arguments, **options)

    def make_rows(*args):
        return _rows.make_rows(*args)[0], 17  # rows a chunk

    monkeypatch.setattr(torch.ops, "paw_kernels", machine.ops)
    for got, expected in zip(head_pass(make_rows, *arguments, **options), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", [0, 2049, 4098])
def test_nan_and_infinity_stay_in_their_row(machine, place):
    V, special = 4099, [torch.nan, torch.inf, -torch.inf, 0.0]
    x = random(6, V)
    x[range(4), place] = torch.tensor(special)
    x[4] = -torch.inf
    x[5, 1:-1] = -torch.inf  # all but the ends
    target, a, c = torch.tensor([0, 1, V - 1, 7, 8, 0]), torch.ones(6), torch.ones(6)
    logp, entropy, _, dz = exact(x, None, target, a, c, 1.0)
    got_logp, got_entropy, _, got = run(machine, *machine.put(x, None, target, a, c), 1.0, torch.float32)

    undefined = torch.tensor([True, True, place == V - 1, False, True, False])
    nan = torch.tensor([True, True, False, False, True, False])
    assert torch.equal((got_logp.isnan() | got_logp.isinf()).cpu(), undefined)
    assert torch.equal(got_logp.isnan().cpu(), nan) and torch.equal(got_entropy.isnan().cpu(), nan)
    torch.testing.assert_close(got_logp.double().cpu()[~undefined], logp[~undefined], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got_entropy.double().cpu()[~nan], entropy[~nan], rtol=1e-6, atol=1e-6)
    assert got[nan].isnan().all(1).all()
    torch.testing.assert_close(got.double().cpu()[~nan], dz[~nan], rtol=0, atol=2e-6)


def test_nan_coefficients_reach_the_gradient(machine):
    a, target = torch.tensor([torch.nan, 0.0, 1.0]), torch.tensor([0, 1, 2])
    source, got = run(machine, *machine.put(random(3, 50), None, target, a, None), 1.0, torch.bfloat16)[2:]
    assert source.tolist() == [0, 2] and got.isnan().all(1).tolist() == [True, False]


def test_coefficients_that_vanish_with_the_scale_leave_no_logits_behind(machine):
    a = torch.tensor([1e-45, 1.0])
    source, got = run(machine, *machine.put(random(2, 50), None, torch.tensor([0, 1]), a, None), 0.5, torch.float32)[2:]
    assert source.tolist() == [0, 1] and (got[0].abs() < 1e-40).all() and (got[1] != 0).all()


def test_no_rows(machine):
    empty, target = machine.put(torch.empty(0), torch.empty(0, dtype=torch.int64))
    logp, *_, got = run(machine, empty.reshape(0, 3), None, target, empty, empty, 1.0, torch.float16)
    assert logp.shape == (0,) and got.shape == (0, 3)


def test_arguments_that_do_not_fit_are_refused(machine):
    ops, (x, target) = machine.ops, machine.put(random(3, 8), torch.zeros(3, dtype=torch.int64))
    one = torch.ones(3, device=machine.device)
    for bad, message in [
        ((x.half(), None, target), "expected scalar type Float"),
        ((x.t(), None, target), "logits must be .* contiguous rows"),
        ((x, one, target), "bias must be contiguous, 8 elements"),
        ((x, None, target[:2]), "target must be contiguous, 3 elements"),
        ((x, None, target.int()), "expected scalar type Long"),
        ((x[:, :0], None, target), "1 to 2.30 columns"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ops.row_statistics(*bad, 1.0)
    with pytest.raises(RuntimeError, match="dtype must be float32, bfloat16 or float16"):
        ops.row_gradient_(x, None, target, target, one, one, one, one, None, 1.0, torch.float64)


@pytest.mark.gpu
def test_more_rows_than_a_grid_axis_holds(gpu):
    n = 70_000
    x, target, ones = gpu.put(random(n, 3), torch.full((n,), 2), torch.ones(n))
    want = exact(x, None, target, ones, None, 1.0)
    logp, *_, got = run(gpu, x, None, target, ones, None, 1.0, torch.float32)
    torch.testing.assert_close(logp.double().cpu(), want[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.double().cpu(), want[-1], rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [128_256, 151_936, 152_064])
def test_heads_of_real_models(gpu, V):
    x, target = random(64, V, size=3.0), torch.randint(V, (64,), generator=torch.Generator().manual_seed(0))
    a, c = random(64, seed=1) * (random(64, seed=2) > 0), random(64, seed=3)
    c *= a != 0
    want = exact(x, None, target, a, c, 1.0)
    logp, entropy, source, got = run(gpu, *gpu.put(x, None, target, a, c), 1.0, torch.bfloat16)
    torch.testing.assert_close(logp.double().cpu(), want[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy.double().cpu(), want[1], rtol=1e-6, atol=1e-5)
    assert_gradient(got, want[-1][source.cpu()], torch.bfloat16, 1e-5)


@pytest.mark.gpu
def test_kernels_run_on_the_current_stream(gpu):
    x, target = gpu.put(random(512, 50_000), torch.zeros(512, dtype=torch.int64))
    want = gpu.ops.row_statistics(2 * x, None, target, 1.0)[0]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)  # on another stream the kernel would not wait for the product
        got = gpu.ops.row_statistics(x.mul_(2), None, target, 1.0)[0]
    torch.cuda.synchronize()
    assert torch.equal(got, want)
