"""What does not depend on the head's backend: any loss, which tokens learn, autograd's rules, and
mistakes reported in one line."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import torch
from dense_reference import (
    assert_close,
    dense,
    dense_pulled,
    dense_stats,
    fused_loss,
    leaves,
    problem,
    set_chunk_rows,
)
from torch.utils._python_dispatch import TorchDispatchMode

from paw.algo import loss as losses
from paw_kernels import token_loss, token_stats

PARITY = Path(__file__).parents[2] / ".." / "shared" / "data" / "parity" / "losses.json"


@dataclasses.dataclass
class Margins:
    margin: torch.Tensor
    unused: torch.Tensor | None = None


def test_any_function_of_log_prob_and_entropy_is_a_loss():
    """A hinge on log p and a pull on the entropy, which none of our losses has."""
    hidden, weight, target, _, rows = problem(150, 37, 12, scale=2.0)

    def loss(logp, entropy, batch):
        assert batch.unused is None
        return (batch.margin - logp).clamp(min=0) ** 2 + 0.1 * (entropy - 1).square() * (logp > -3)

    hidden_leaf, weight_leaf = leaves(hidden, weight)
    results = token_loss(hidden_leaf, weight_leaf, target, loss, Margins(rows.old_logp))
    results.loss.backward()
    double_batch = Margins(rows.old_logp.double())
    d_hidden, d_weight = dense_pulled(
        hidden, weight, target, lambda *statistics: loss(*statistics, double_batch).sum()
    )[1]
    assert_close(hidden_leaf.grad, d_hidden)
    assert_close(weight_leaf.grad, d_weight)
    assert torch.equal(results.has_gradient, (d_hidden != 0).any(1))
    assert 0 < results.has_gradient.sum() < 150


def test_which_tokens_have_a_gradient():
    hidden, weight, target, _, rows = problem(400, 20, 8, scale=2.0)
    results = fused_loss(hidden.requires_grad_(), weight, target, rows)
    ratio = (results.logp - rows.old_logp).exp()
    positive = rows.advantage > 0
    negative = rows.advantage < 0
    clip_cases = positive & (ratio > 1.2), negative & (ratio < 0.8), negative & (ratio > 3)
    masked = results.logp.exp() > 0.2
    assert all((~rows.observation & case).any() for case in clip_cases)
    assert (rows.observation & masked).any()
    assert (rows.observation & ~masked).any()
    clipped = clip_cases[0] | clip_cases[1] | clip_cases[2]
    learns = torch.where(rows.observation, ~masked, ~clipped & (rows.advantage != 0))
    assert torch.equal(results.has_gradient, learns & (rows.weight != 0))


def test_the_kl_clamp_stops_its_gradient_and_huge_ratios_stay_finite():
    hidden, weight, target, _, rows = problem(11, 11, 4, kl_coef=0.5)
    zero = torch.zeros(11)
    gap = torch.tensor([0, 0, 0, 0, 9, 95, -30, -200.0, 0, 0, 0])
    advantage = torch.tensor([0.0] * 8 + [1.0, 0.0, -1.0])
    old_logp = torch.where(torch.arange(11) < 8, rows.old_logp, -500.0)
    reference = rows.sampled_logp + 1 + gap
    rows = rows.replace(
        observation=zero.bool(),
        weight=zero + 1,
        advantage=advantage,
        ref_logp=reference,
        old_logp=old_logp,
    )
    (hidden_leaf,) = leaves(hidden)
    results = fused_loss(hidden_leaf, weight, target, rows)
    results.loss.backward()
    assert results.has_gradient[:8].tolist() == [True] * 4 + [False] * 4
    assert (hidden_leaf.grad[4:8] == 0).all()
    torch.testing.assert_close(results.token_loss[4:8], zero[:4] + 5)
    assert_close(hidden_leaf.grad, dense(hidden, weight, target, rows)[1][0])
    results = fused_loss(
        hidden.requires_grad_(), weight, target, dataclasses.replace(rows, options={})
    )
    torch.testing.assert_close(results.token_loss[8:], torch.tensor([-1.2, 0.0, 3.0]))
    assert not results.has_gradient[8:].any()


def test_gce_lies_between_ce_and_mae():
    hidden, weight, target, _, rows = problem(150, 37, 12, scale=2.0, kl_coef=0.1)

    def loss_and_gradients(name, **options):
        hidden_leaf, weight_leaf = leaves(hidden, weight)
        results = fused_loss(
            hidden_leaf,
            weight_leaf,
            target,
            dataclasses.replace(rows, options={"wm": name, **options}),
        )
        return results.token_loss, *torch.autograd.grad(results.loss, (hidden_leaf, weight_leaf))

    assert all(map(torch.equal, loss_and_gradients("gce", q=1.0), loss_and_gradients("mae")))
    for actual, expected in zip(
        loss_and_gradients("gce", q=1e-3), loss_and_gradients("ce"), strict=True
    ):
        assert_close(actual, expected, 2e-2)  # of order q log(p)^2
    learned = rows.observation & (rows.weight > 0)
    assert (loss_and_gradients("mae")[0] < loss_and_gradients("gce")[0])[learned].all()
    assert (loss_and_gradients("gce")[0] < loss_and_gradients("ce")[0])[learned].all()


def test_tied_weights_receive_both_gradients_and_micro_batches_add_up():
    _, weight, target, _, rows = problem(40, 31, 8)
    ids = torch.arange(40) % 31
    (tied,) = leaves(weight)
    (expected,) = leaves(weight, dtype=torch.float64)
    for part in (slice(0, 30), slice(30, 40)):
        hidden = torch.nn.functional.embedding(ids[part], tied)
        fused_loss(
            hidden, tied, target[part], rows.map(lambda values, part=part: values[part])
        ).loss.backward()
    statistics = dense_stats(expected[ids], expected, target)
    rows.loss(*statistics, rows.to("cpu", torch.float64).batch).sum().backward()
    assert_close(tied.grad, expected.grad)


@pytest.mark.parametrize("upstream", [1.0, -0.3])
def test_backward_hands_over_its_gradients_once_unless_the_graph_is_kept(upstream):
    hidden, weight, target, _, rows = problem(40, 31, 8)
    hidden_leaf, weight_leaf = leaves(hidden, weight)
    expected = torch.autograd.grad(
        upstream * fused_loss(hidden_leaf, weight_leaf, target, rows).loss,
        (hidden_leaf, weight_leaf),
    )
    loss = upstream * fused_loss(hidden_leaf, weight_leaf, target, rows).loss
    for times in (1, 2):
        loss.backward(retain_graph=True)
        assert_close(hidden_leaf.grad, times * expected[0], 1e-6)
        assert_close(weight_leaf.grad, times * expected[1], 1e-6)
    assert_close(torch.autograd.grad(loss, weight_leaf)[0], expected[1], 1e-6)
    results = fused_loss(hidden_leaf, weight_leaf, target, rows)
    torch.autograd.grad(results.loss, weight_leaf)
    with pytest.raises(RuntimeError, match="second time"):
        results.loss.backward()


def test_only_wanted_gradients_are_formed():
    hidden, weight, target, _, rows = problem(40, 31, 8)
    hidden_leaf, weight_leaf = leaves(hidden, weight)
    whole = fused_loss(hidden_leaf, weight_leaf, target, rows)
    whole.loss.backward()
    (only_hidden,) = leaves(hidden)
    (only_weight,) = leaves(weight)
    fused_loss(only_hidden, weight, target, rows).loss.backward()
    fused_loss(hidden, only_weight, target, rows).loss.backward()
    assert torch.equal(hidden_leaf.grad, only_hidden.grad)
    assert torch.equal(weight_leaf.grad, only_weight.grad)
    frozen = fused_loss(hidden, weight, target, rows)
    assert not frozen.loss.requires_grad
    assert torch.equal(frozen.has_gradient, whole.has_gradient)
    with torch.no_grad():
        results = (
            fused_loss(hidden_leaf, weight_leaf, target, rows).loss,
            token_stats(hidden_leaf, weight_leaf, target).logp,
            whole.logp,
        )
    assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize("T", [0, 1, 5])
def test_batches_without_a_gradient(T):
    hidden, weight, target, _, rows = problem(T, 31, 8)
    hidden_leaf, weight_leaf = leaves(hidden, weight)
    results = fused_loss(hidden_leaf, weight_leaf, target, rows.replace(weight=torch.zeros(T)))
    results.loss.backward()
    assert results.loss.item() == 0
    assert not results.has_gradient.any()
    assert hidden_leaf.grad.shape == hidden.shape
    assert weight_leaf.grad.shape == weight.shape
    assert not hidden_leaf.grad.any()
    assert not weight_leaf.grad.any()


def with_value(tensor, position, value):
    tensor = tensor.clone()
    tensor[position] = value
    return tensor


ERRORS = {
    "hidden must be [T, D]": lambda h, w, y, r: (h[None], w, y, r),
    "hidden must be float32": lambda h, w, y, r: (h.double(), w.double(), y, r),
    "weight must be [V, D]": lambda h, w, y, r: (h, w[:, :3], y, r),
    "weight must be torch.float32": lambda h, w, y, r: (h, w.bfloat16(), y, r),
    "weight must be on cpu": lambda h, w, y, r: (h, w.to("meta"), y, r),
    "target must have shape": lambda h, w, y, r: (h, w, y[:3], r),
    "target must be torch.int64": lambda h, w, y, r: (h, w, y.int(), r),
    "target must be in [0, 11)": lambda h, w, y, r: (h, w, with_value(y, 1, 11), r),
    "target must be in [0, 11": lambda h, w, y, r: (h, w, with_value(y, 1, -1), r),
    "batch.weight must have shape": lambda h, w, y, r: (h, w, y, r.replace(weight=r.weight[:2])),
    "batch.weight must be finite": lambda h, w, y, r: (
        h,
        w,
        y,
        r.replace(weight=r.weight + torch.inf),
    ),
    "batch.old_logp must be torch.float32": lambda h, w, y, r: (
        h,
        w,
        y,
        r.replace(old_logp=r.old_logp.double()),
    ),
    "bias must have shape [11]": {"bias": torch.zeros(8)},
    "temperature must be positive and finite, got 0.0": {"temperature": 0.0},
    "temperature must be positive and finite, got -1.0": {"temperature": -1.0},
    "temperature must be positive and finite, got nan": {"temperature": float("nan")},
    "softcap must be None, or positive and finite, got 0.0": {"softcap": 0.0},
    "softcap must be None, or positive and finite, got nan": {"softcap": float("nan")},
    "softcap must be None, or positive and finite, got -1.0": {"softcap": -1.0},
    "softcap must be None, or positive and finite, got inf": {"softcap": float("inf")},
    "known backends: auto, triton, cuda, cpu, torch": {"backend": "fast"},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument(message):
    hidden, weight, target, _, rows = problem(4, 11, 6)
    change = ERRORS[message]
    options = {}
    inputs = hidden, weight, target, rows
    if isinstance(change, dict):
        options = change
    else:
        inputs = change(*inputs)
    with pytest.raises(ValueError) as error:
        fused_loss(*inputs, **options)
    assert message in str(error.value)
    if not message.startswith("batch"):
        with pytest.raises(ValueError) as error:
            token_stats(*inputs[:3], **options)
        assert message in str(error.value)


def test_a_loss_of_another_shape_and_a_batch_that_is_none_are_refused():
    hidden, weight, target, _, rows = problem(4, 11, 6)
    with pytest.raises(
        ValueError,
        match=r"one float32 number for each token, \[4\], got torch.float32 of shape \[\]",
    ):
        token_loss(hidden, weight, target, lambda logp, entropy, batch: -logp.mean(), rows.batch)
    with pytest.raises(ValueError, match="batch must be a dataclass of tensors, got dict"):
        token_loss(hidden, weight, target, rows.loss, {})


@pytest.mark.skipif(
    not PARITY.exists(), reason="parity data of the reference code is not on this machine"
)
def test_clipped_surrogate_and_k3_match_the_reference_code():
    """Token-mean losses and their gradients in logp, for the functions that the trainer passes to
    the head."""
    for data in json.loads(PARITY.read_text())[:8]:
        mask = torch.tensor(data["mask"]).flatten()
        values = {
            name: torch.tensor(data[name]).flatten()
            for name in ("logp", "old_logp", "ref_logp", "advantage")
        }
        weight = mask / mask.sum()
        logp = values.pop("logp").requires_grad_()
        expected = data["expected"]
        batch = losses.TokenBatch(
            weight=weight, observation=mask < 0, sampled_logp=weight, **values
        )
        policy = losses.ppo(logp, torch.zeros_like(mask), batch)
        kl = losses.k3(logp, batch)
        assert (policy * weight).sum().item() == pytest.approx(
            expected["policy_loss_token_mean"], abs=1e-5
        )
        assert (kl * weight).sum().item() == pytest.approx(expected["k3_token_mean"], abs=1e-5)
        (gradient,) = torch.autograd.grad((policy * weight).sum(), logp)
        clipped = (((gradient == 0) & (batch.advantage != 0)) * weight).sum().item()
        assert clipped == pytest.approx(
            expected["clip_frac"] + expected["clip_frac_dual"], abs=1e-6
        )
        torch.testing.assert_close(
            gradient, torch.tensor(expected["d_policy_loss_d_logp"]).flatten(), rtol=1e-5, atol=1e-6
        )
        (gradient,) = torch.autograd.grad((kl * weight).sum(), logp)
        torch.testing.assert_close(
            gradient, torch.tensor(expected["d_k3_d_logp"]).flatten(), rtol=1e-4, atol=1e-6
        )


operator = importlib.import_module("paw_kernels.token_loss")


class Launches(TorchDispatchMode):
    """Counts what would start a kernel on a GPU, including the loss and its derivatives."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.paw_kernels.token_loss.default:
            with self:
                return operator._token_loss._init_fn(*args)
        self.count += not (func.is_view or "empty" in func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 141), (torch.float16, 154)])
def test_launches_and_waits_are_few(dtype, most, monkeypatch):
    hidden, weight, target, _, rows = problem(40, 70, 16, kl_coef=0.1, entropy_coef=0.05, rho=0.05)
    inputs = *leaves(hidden.to(dtype), weight.to(dtype)), target, rows
    with Launches() as launches:
        fused_loss(*inputs, backend="torch")
    assert 0 < launches.count <= most
    waits = []
    for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__index__", "nonzero"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda tensor, method=method: (waits.append(tensor), method(tensor))[1],
        )
    set_chunk_rows(monkeypatch, 10, vocabulary=70)
    fused_loss(*inputs, backend="torch")
    assert len(waits) == 4  # one per chunk
