"""Very large and very small numbers: every backend against float64."""

import math

import pytest
import torch
from dense_reference import (
    Rows,
    assert_close,
    dense,
    dense_pulled,
    dense_stats,
    problem,
    set_chunk_rows,
)

from paw.algo.loss import TokenBatch
from paw_kernels import _head, _rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.mark.parametrize("exponent", [-10, -20])
def test_huge_logits_over_a_tiny_temperature_keep_every_digit(backend, exponent):
    """The largest logit is subtracted before scaling, because z rounded to float32 is off by
    2^-24 |z|."""
    spacing = 2.0**exponent
    weight = 1000 * spacing * 2**10 + spacing * torch.randint(
        12, (300, 1), generator=torch.Generator().manual_seed(0)
    )
    inputs = torch.ones(3, 1), weight.float(), torch.tensor([0, 7, 299]), leaning
    statistics, (_, weight_gradient) = backend.stats(*inputs, temperature=0.7 * spacing)
    exact_statistics, (_, exact_gradient) = dense_pulled(*inputs, temperature=0.7 * spacing)
    for actual, expected in zip(
        (*statistics, weight_gradient), (*exact_statistics, exact_gradient), strict=True
    ):
        assert (actual.double() - expected).abs().max() <= 2e-6 * expected.abs().max()


def leaning(logp, entropy):
    return (logp * torch.tensor([1.0, -2.0, 0.5]) + 0.3 * entropy).sum()


FLOAT16 = {  # size of the hidden states, row weight, advantage, temperature, upstream factor
    "large hidden states": (100.0, 1.0, 1.0, 100.0, 1.0),
    "weights below the smallest number": (1.0, 1e-9, 1.0, 1.0, 1e8),
    "a large advantage": (1.0, 1.0, 1e6, 1.0, 1e-6),
    "a small advantage": (1.0, 1.0, 1e-7, 1.0, 1e4),
    "a loss scale": (1.0, 1e-5, 1.0, 1.0, 65536.0),
    "a tiny temperature": (1e-3, 1e-4, 1.0, 1e-4, 1.0),
    "a huge temperature": (1.0, 1.0, 1.0, 1e4, 1e3),
}


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["float32 matmuls", "float16 matmuls"],
)
def matmuls(request, backend, monkeypatch):
    """The gradient matmuls of the cuda backend take float16, as on a GPU. Other backends on a CPU
    take float32."""
    if not request.param:
        return
    if (backend.name, backend.device) != ("cuda", "cpu"):
        pytest.skip("the emulated kernels of csrc/*.cu only")

    class Half(_rows.NativeRows):
        def __init__(self, *args):
            super().__init__(*args)
            self.head = self.head.half()

    def add_product(total, left, right, *, add, factor):
        assert left.dtype == right.dtype == torch.float16
        assert total.dtype == torch.float32
        total.copy_((total if add else 0) + factor * (left.float() @ right.float()))

    def product(left, right, out=None):
        assert left.dtype == right.dtype
        return torch.mm(left.float(), right.float(), out=out)

    monkeypatch.setattr(_rows, "NativeRows", Half)
    monkeypatch.setattr(_head, "_add_product", add_product)
    monkeypatch.setattr(_head, "float32_product", product)
    monkeypatch.setattr(
        _rows, "logits", lambda x, head, out: product(x.float(), head.t().float(), out[: len(x)])
    )


@pytest.mark.parametrize("chunks", [False, True], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("case", FLOAT16)
def test_float16_gradients_are_those_of_the_loss(backend, matmuls, case, chunks, monkeypatch):
    """Compares each row of hidden by itself, to a few steps of float16, starting at 6e-8, its
    smallest number."""
    size, row_weight, advantage, temperature, factor = FLOAT16[case]
    T = 18
    V = 40
    D = 16
    options = {"temperature": temperature}
    hidden, weight, target, bias, rows = problem(T, V, D, bias=True, **options)
    hidden, weight, bias = (
        (0.1 * tensor).half() for tensor in (10 * size * hidden, weight, temperature * bias)
    )
    logp, _ = dense_stats(hidden.double(), weight.double(), target, bias.double(), **options)
    rows = Rows(rows.batch, {"wm": "ce", "entropy_coef": 0.1}).replace(
        weight=row_weight
        * torch.logspace(0, -6, T),  # the lightest weighs a millionth of the heaviest
        advantage=advantage * rows.advantage,
        old_logp=logp.float(),
    )
    if chunks:
        set_chunk_rows(monkeypatch, 10, vocabulary=V)

    def pull(logp, entropy):
        return factor * ((logp * rows.advantage + 0.3 * entropy) * rows.weight).sum()

    def assert_gradients(gradients, exact_gradients):
        for position, (actual, expected) in enumerate(zip(gradients, exact_gradients, strict=True)):
            assert actual.dtype == torch.float16
            assert 1e-4 < expected.abs().max() < 65_504
            is_hidden = position == 0
            largest = expected.abs().amax(-1, keepdim=True) if is_hidden else expected.abs().max()
            assert ((actual - expected) / (largest + 1e-4)).abs().max() <= 4e-3

    inputs = hidden, weight, target, rows, bias
    gradients = backend.loss(*inputs, upstream=factor, **options)[1]
    assert_gradients(gradients, dense(*inputs, upstream=factor, **options)[1])

    inputs = hidden, weight, target, pull, bias
    gradients = backend.stats(*inputs, **options)[1]
    assert_gradients(gradients, dense_pulled(*inputs, **options)[1])


def test_a_mean_over_many_tokens_does_not_overflow_float16(backend):
    hidden = torch.full((128, 8), 640.0)
    target = torch.zeros(128).long()
    weight = 0.01 / 32 * torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    token_gradient = torch.full((128,), 1 / 128)
    rows = Rows(
        TokenBatch(
            token_gradient, token_gradient > 0, token_gradient, token_gradient, token_gradient
        ),
        {"wm": "ce"},
    )
    inputs = hidden.half(), weight.half(), target, rows, torch.zeros(16).half()
    expected = dense(*inputs)[1]
    assert (
        18 * 32 < expected[1].abs().max() < 20 * 32
    )  # of each token; 128 of them are beyond 65,504
    for result, exact in zip(backend.loss(*inputs)[1], expected, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=2e-3, atol=1e-7)


# A few, a full tile, and the first block of a row operation.
@pytest.mark.parametrize(
    "mask", [[3, 40, 69], range(32, 64), range(2100)], ids=["a few", "a tile", "a block"]
)
@pytest.mark.parametrize("bias_of_masked", [-math.inf, torch.finfo(torch.float32).min])
def test_masked_tokens_take_no_part(backend, mask, bias_of_masked):
    """With a bias of -inf, statistics and gradients of the other tokens are right. A masked target
    has log p = -inf and a finite gradient."""
    mask = torch.tensor(mask)
    if backend.name == "triton":  # blocks of 32 there, and thousands of columns would take seconds
        mask = mask[mask < 70][:64]
    vocabulary = 2200 if len(mask) > 70 else 70
    hidden, weight, target, bias, rows = problem(
        20, vocabulary, 16, bias=True, scale=2.0, temperature=0.7
    )
    allowed = torch.ones(vocabulary, dtype=torch.bool)
    allowed[mask] = False
    target = allowed.nonzero()[:, 0][target % allowed.sum()]
    bias[mask] = bias_of_masked
    finite = bias.clamp(min=-1e9)  # the reference itself would be NaN

    def pull(logp, entropy):
        return (logp * rows.advantage).sum() + (entropy * rows.weight).sum()

    def gradients_match(actual, expected):
        for result, exact in zip(actual, expected, strict=True):
            torch.testing.assert_close(
                result.double(), exact, rtol=0, atol=2e-5 * max(1.0, exact.abs().max().item())
            )

    actual = backend.stats(hidden, weight, target, pull, bias, temperature=0.7)
    expected = dense_pulled(hidden, weight, target, pull, finite, temperature=0.7)
    gradients_match((*actual[0], *actual[1]), (*expected[0], *expected[1]))
    assert (actual[1][1][mask] == 0).all()
    assert (actual[1][2][mask] == 0).all()

    target[3] = mask[-1]
    (logp, entropy), gradients = backend.stats(hidden, weight, target, pull, bias, temperature=0.7)
    assert logp[3] == -math.inf or (bias_of_masked > -math.inf and logp[3] < -1e38)
    assert logp[torch.arange(20) != 3].isfinite().all()
    torch.testing.assert_close(entropy, actual[0][1])
    gradients_match(
        gradients, dense_pulled(hidden, weight, target, pull, finite, temperature=0.7)[1]
    )


@pytest.mark.parametrize("loss", ["cmae", "ce"])
def test_the_loss_of_a_masked_target(backend, loss):
    """Infinite only if the loss is, and never NaN: a ratio of 0, a clamped KL, p = 0."""
    hidden, weight, target, bias, rows = problem(20, 70, 16, bias=True, kl_coef=0.1, wm=loss)
    bias[target[4]] = -math.inf
    rows.observation[4] = loss == "ce"
    rows.weight[4] = 1.0
    rows.advantage[4] = 1.0
    results, gradients = backend.loss(hidden, weight, target, rows, bias)
    assert results.logp[4] == -math.inf
    assert (results.entropy >= 0).all()
    assert (
        results.token_loss[4].item() == pytest.approx(1.0)
        if loss == "cmae"
        else results.token_loss[4] == math.inf
    )
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_wholly_masked_vocabulary_has_no_distribution(backend):
    hidden, weight, target, _, _ = problem(5, 70, 16)
    masked = torch.full((70,), -math.inf)
    statistics, gradients = backend.stats(
        hidden, weight, target, lambda *statistics: sum(statistics).sum(), masked
    )
    assert all(tensor.isnan().all() for tensor in (*statistics, gradients[0]))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_an_unlikely_target_keeps_its_own_derivative_under_a_soft_cap(backend, dtype):
    """exp(z - max) of the target is 0 in the dtype, yet the target carries the full gradient, times
    its own 1 - tanh^2."""
    hidden = torch.zeros(2, 8)
    hidden[:, 0] = 1.0
    weight = torch.zeros(40, 8)
    weight[:, 0] = torch.linspace(-2, 34, 40)
    weight[3, 0] = -28.0
    inputs = hidden.to(dtype), weight.to(dtype), torch.tensor([3, 3]), lambda logp, _: logp.sum()
    actual, expected = (
        compute(*inputs, softcap=30.0, temperature=0.25)[1][0]
        for compute in (backend.stats, dense_pulled)
    )
    torch.testing.assert_close(
        actual.double(), expected, rtol=2e-5 if dtype == torch.float32 else 1e-2, atol=0
    )


def test_a_masked_token_is_a_logit_of_minus_the_cap(backend):
    """As in the formula, the cap is applied after the bias, so the bias does not mask."""
    hidden, weight, target, bias, _ = problem(20, 70, 16, bias=True)
    bias[5] = -math.inf
    target[0] = 5
    actual = backend.stats(hidden, weight, target, lambda logp, _: logp.sum(), bias, softcap=3.0)[0]
    expected = dense_stats(
        hidden.double(), weight.double(), target, bias.clamp(min=-1e9).double(), softcap=3.0
    )
    for result, exact in zip(actual, expected, strict=True):
        assert_close(result, exact)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("peak", [3, 20, 40, 69])
def test_a_logit_far_above_the_others_anywhere_in_the_row(backend, dtype, peak):
    """Neither half of a tile, nor one tile because of another, may overflow or vanish."""
    hidden, weight, target, _, _ = problem(20, 70, 16, scale=0.5)
    hidden[:, 0] = 16.0
    weight[peak, 0] = 20.0
    target[::2] = peak
    inputs = (
        hidden.to(dtype),
        weight.to(dtype),
        target,
        lambda logp, entropy: (logp + entropy).sum(),
    )
    statistics, gradients = backend.stats(*inputs)
    exact_statistics, exact_gradients = dense_pulled(*inputs)
    for result, gradient in zip(statistics, exact_statistics, strict=True):
        assert_close(result, gradient, 2e-6)
    for result, gradient in zip(gradients, exact_gradients, strict=True):
        assert_close(result, gradient, 1e-5 if dtype == torch.float32 else 1e-2)


def test_sure_tokens_keep_their_gradient_in_bfloat16(backend):
    """1 - p of the target is exact. Here an error of half a bfloat16 step of p would be as large as
    1 - p itself."""
    hidden = torch.tensor([[8.0, 0, 0, 0, 0, 0, 0, 0]])
    weight = torch.zeros(40, 8)
    weight[3, 0] = 1.25  # z = 10, 39 others at 0: 1 - p = 0.00177
    inputs = hidden.bfloat16(), weight.bfloat16(), torch.tensor([3]), lambda logp, _: logp.sum()
    actual, expected = (compute(*inputs)[1][1][3, 0] for compute in (backend.stats, dense_pulled))
    torch.testing.assert_close(actual.double(), expected, rtol=0.005, atol=0)


def test_near_deterministic_rows_keep_relative_precision(backend):
    hidden = torch.eye(3) * 40
    weight = torch.eye(3)
    target = torch.arange(3)
    (logp, entropy), _ = backend.stats(hidden, weight, target, lambda logp, _: logp.sum())
    assert (logp <= 0).all()
    assert (entropy > 0).all()
    exact = dense_stats(hidden.double(), weight.double(), target)[1]
    torch.testing.assert_close(entropy.double(), exact, rtol=1e-4, atol=0)
