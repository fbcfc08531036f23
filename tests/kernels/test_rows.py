"""Compares the row operations of csrc/ with float64: in C++ on the CPU, and in CUDA, emulated by
cuda_on_cpu.h or on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from paw_kernels import _head, _native, _rows
from paw_kernels._head import has_gradient


def random(*shape, seed=0, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x, bias, target, a, c, scale):
    """logp, entropy, log-sum-exp and dL/dlogits in float64."""
    logits = (x.double() + (0 if bias is None else bias.double())) * scale
    log_p = logits.log_softmax(-1)
    probability = log_p.exp()
    log_p = log_p.clamp(min=-1e9)  # 0 log 0 = 0
    entropy = -(probability * log_p).sum(-1)
    gradient = a.double()[:, None] * (one_hot(target, x.shape[1]) - probability)
    if c is not None:
        gradient -= c.double()[:, None] * probability * (log_p + entropy[:, None])
    return log_p.gather(1, target[:, None])[:, 0], entropy, logits.logsumexp(-1), scale * gradient


def run(machine, x, bias, target, a, c, scale, dtype):
    """Returns the statistics (top and the logarithm of the sum added up), the sources, and the
    packed gradient, made in place."""
    logp, entropy, largest, log_total = machine.ops.row_statistics(x, bias, target, scale)
    source, count = _native.pack(has_gradient(a, c))
    source = source[: int(count)]
    machine.ops.row_gradient_(
        x, bias, target, source, largest, log_total, entropy, a, c, scale, dtype
    )
    statistics = [tensor.cpu() for tensor in (logp, entropy, largest * scale + log_total)]
    return statistics, source.cpu(), _native.packed_rows(x, len(source), dtype).cpu()


def assert_gradient(actual, expected, dtype, noise):
    """Within twice the rounding of the exact result to the dtype, plus float32's own noise."""
    rounding = (
        (expected.to(dtype).double() - expected).abs().max().item() if expected.numel() else 0
    )
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2 * rounding + noise)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 7),
    V=st.sampled_from([1, 2, 3, 5, 127, 128, 1000, 2049, 4099, 9000]),
    padding=st.integers(0, 3),
    offset=st.integers(0, 3),
    live=st.sampled_from([0.0, 0.4, 1.0]),
    scale=st.sampled_from([0.5, 1.0, 2.5]),
    size=st.sampled_from([0.0, 1.0, 30.0]),
    extras=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 10_000),
)
def test_statistics_and_gradients_match_float64(
    machine, n, V, padding, offset, live, scale, size, extras, dtype, seed
):
    # Rows at every alignment, surrounded by NaN that must be neither read nor written.
    stride = V + padding
    memory = torch.full((offset + n * stride + 4,), torch.nan)
    x = memory.as_strided((n, V), (stride, 1), offset)
    x.copy_(random(n, V, seed=seed, size=size))
    target = torch.randint(V, (n,), generator=torch.Generator().manual_seed(seed))
    target[0] = 0
    target[-1] = V - 1
    bias = random(V, seed=seed + 1) if extras else None
    is_live = torch.rand(n, generator=torch.Generator().manual_seed(seed + 2)) < live
    a = random(n, seed=seed + 3) * is_live
    c = random(n, seed=seed + 4) * is_live if extras else None
    *statistics, exact_gradient = exact(x, bias, target, a, c, scale)

    dtype = (
        torch.float32 if machine.ops is torch.ops.paw_kernels and machine.device == "cpu" else dtype
    )
    memory = memory.to(machine.device)
    x = memory.as_strided((n, V), (stride, 1), offset)
    statistics_here, source, actual = run(
        machine, x, *machine.put(bias, target, a, c), scale, dtype
    )

    spread = max(1.0, 4 * size * scale)
    assert (statistics_here[0] <= 0).all()
    assert (statistics_here[1] >= 0).all()
    for result, expected in zip(statistics_here, statistics, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-6 * spread)
    assert_gradient(actual, exact_gradient[source], dtype, 2e-6 * spread * scale)
    outside = torch.ones_like(memory, dtype=torch.bool)
    outside.as_strided((n, V), (stride, 1), offset).fill_(False)
    assert memory[outside].isnan().all()


@pytest.mark.parametrize("place", [0, 2049, 4098])
def test_nan_and_infinity_stay_in_their_row(machine, place):
    V = 4099
    special = [torch.nan, torch.inf, -torch.inf, 0.0]
    x = random(6, V)
    x[range(4), place] = torch.tensor(special)
    x[4] = -torch.inf
    x[5, 1:-1] = -torch.inf  # all except the ends
    target = torch.tensor([0, 1, V - 1, 7, 8, 0])
    a = torch.ones(6)
    c = torch.ones(6)
    logp, entropy, _, dz = exact(x, None, target, a, c, 1.0)
    (got_logp, got_entropy, _), _, got = run(
        machine, *machine.put(x, None, target, a, c), 1.0, torch.float32
    )

    undefined = torch.tensor([True, True, place == V - 1, False, True, False])
    nan = torch.tensor([True, True, False, False, True, False])
    assert torch.equal(got_logp.isnan() | got_logp.isinf(), undefined)
    assert torch.equal(got_logp.isnan(), nan)
    assert torch.equal(got_entropy.isnan(), nan)
    torch.testing.assert_close(
        got_logp.double()[~undefined], logp[~undefined], rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(got_entropy.double()[~nan], entropy[~nan], rtol=1e-6, atol=1e-6)
    assert got[nan].isnan().all(1).all()
    torch.testing.assert_close(got.double()[~nan], dz[~nan], rtol=0, atol=2e-6)


def test_coefficients_that_are_nan_or_vanish_with_the_scale(machine):
    """NaN reaches the gradient, and no logits stay in the buffer."""
    a = torch.tensor([torch.nan, 0.0, 1e-45, 1.0])
    target = torch.tensor([0, 1, 2, 3])
    _, source, gradient = run(
        machine, *machine.put(random(4, 50), None, target, a, None), 0.5, torch.float32
    )
    assert sorted(source.tolist()) == [0, 2, 3]
    nan, tiny, plain = (gradient[source.tolist().index(row)] for row in (0, 2, 3))
    assert nan.isnan().all()
    assert (tiny.abs() < 1e-40).all()
    assert (plain != 0).all()


def test_the_tanh_of_the_soft_cap_is_accurate_everywhere(machine):
    """The largest logit of a row with one logit is that logit."""
    count = 4000 if machine.ops is torch.ops.paw_kernels else 500
    x = torch.cat(
        [
            torch.logspace(-37, 2, count),
            torch.linspace(0.5, 0.6, count // 4),
            torch.tensor([1e30, torch.inf]),
        ]
    )
    x = torch.cat([x, -x, torch.zeros(1)])
    logits, target, nan = machine.put(
        x[:, None], torch.zeros_like(x).long(), torch.full((1, 1), torch.nan)
    )
    largest = machine.ops.row_statistics(logits, None, target, 1.0, 1.0)[2]
    torch.testing.assert_close(largest.double().cpu(), x.double().tanh(), rtol=4e-7, atol=0)
    assert all(
        tensor.isnan() for tensor in machine.ops.row_statistics(nan, None, target[:1], 1.0, 1.0)[:2]
    )


def test_no_rows(machine):
    empty, target = machine.put(torch.empty(0), torch.empty(0, dtype=torch.int64))
    (logp, *_), _, gradient = run(
        machine, empty.reshape(0, 3), None, target, empty, empty, 1.0, torch.float32
    )
    assert logp.shape == (0,)
    assert gradient.shape == (0, 3)


def test_rows_do_not_depend_on_each_other_nor_on_the_number_of_threads():
    logits = torch.randn(70, 3001)
    target = torch.randint(3001, (70,))
    threads = torch.get_num_threads()
    whole = torch.ops.paw_kernels.row_statistics(logits, None, target, 1.0)
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        with_other_threads = torch.ops.paw_kernels.row_statistics(logits, None, target, 1.0)
    finally:
        torch.set_num_threads(threads)
    single_row = torch.ops.paw_kernels.row_statistics(logits[13:14], None, target[13:14], 1.0)
    for all_rows, other_threads, alone in zip(whole, with_other_threads, single_row, strict=True):
        assert torch.equal(all_rows, other_threads)
        assert torch.equal(all_rows[13:14], alone)


def test_arguments_that_do_not_fit_are_refused(machine):
    if machine.ops is torch.ops.paw_kernels and machine.device == "cpu":
        pytest.skip("the head checks them")
    ops = machine.ops
    x, target = machine.put(random(3, 8), torch.zeros(3, dtype=torch.int64))
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


LARGE = [
    (70_000, 3, 1e-6, torch.float32)
]  # more rows than a grid axis holds, then heads of real models
LARGE += [(64, V, 1e-5, torch.bfloat16) for V in (128_256, 151_936, 152_064)]


@pytest.mark.parametrize(("n", "V", "noise", "dtype"), LARGE)
def test_large_sizes(machine, n, V, noise, dtype):
    if machine.device == "cpu":
        pytest.skip("no CUDA device")
    x = random(n, V)
    a = torch.ones(n)
    c = None
    if V > 3:
        x = 3 * x
        a = random(n, seed=1) * (random(n, seed=2) > 0)
        c = random(n, seed=3) * (a != 0)
    target = torch.randint(V, (n,), generator=torch.Generator().manual_seed(0))
    *exact_statistics, exact_gradient = exact(x, None, target, a, c, 1.0)
    statistics, source, gradient = run(machine, *machine.put(x, None, target, a, c), 1.0, dtype)
    for result, expected in zip(statistics, exact_statistics, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=noise)
    assert_gradient(gradient, exact_gradient[source], dtype, noise)


def test_kernels_run_on_the_current_stream(machine):
    if machine.device == "cpu":
        pytest.skip("no CUDA device")
    x, target = machine.put(random(512, 50_000), torch.zeros(512, dtype=torch.int64))
    expected = machine.ops.row_statistics(2 * x, None, target, 1.0)[0]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        # On a different stream, the kernel would not wait for the product.
        torch.cuda._sleep(100_000_000)
        actual = machine.ops.row_statistics(x.mul_(2), None, target, 1.0)[0]
    torch.cuda.synchronize()
    assert torch.equal(actual, expected)


def test_chunks_are_equal_and_as_large_as_a_gpu_has_room_for(monkeypatch):
    """2,048 rows twice, instead of 2,861 and 1,235. One chunk if there is plenty of memory, several
    if it is nearly full."""
    gib = 2**30
    vocabulary = 128_256
    device = torch.device("cuda", 0)
    memory = {"reserved": 3 * gib, "allocated": 2 * gib}  # the allocator has 1 GiB to give
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: memory["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: memory["allocated"])
    for free, chunks in ((60, [4096]), (9, [2048] * 2), (0, [1024] * 4)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free * gib, 80 * gib))
        room = _head.chunk_bytes(_rows.CHUNK_BYTES["cuda"], device, _rows.ROOMY_BYTES)
        step = _head.equal_chunks(4096, room // (4 * vocabulary))
        assert [min(step, 4096 - start) for start in range(0, 4096, step)] == chunks
    assert _head.chunk_bytes(7, torch.device("cpu"), 70) == 7
