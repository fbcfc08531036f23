"""The float64 autograd reference of the fused head, by full logits, and a problem that takes every
branch of the losses."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from paw.algo import loss as losses
from paw_kernels import TokenLoss, _rows, _torch, token_loss, token_stats

POLICY = ("clip_low", "clip_high", "dual_clip")
TERMS = ("kl_coef", "entropy_coef")


@dataclass(frozen=True)
class Rows:
    """A batch and the settings of the joint loss. The batch's columns are attributes as well."""

    batch: losses.TokenBatch
    options: dict[str, Any]

    def __getattr__(self, name):
        return getattr(self.batch, name)

    @property
    def loss(self):
        settings = {"wm": "cmae"} | self.options
        policy = partial(
            losses.ppo, **{name: settings[name] for name in POLICY if name in settings}
        )
        wm_loss = partial(
            getattr(losses, settings["wm"]),
            **{name: settings[name] for name in ("rho", "q") if name in settings},
        )
        return losses.joint(
            policy, wm_loss, **{name: settings[name] for name in TERMS if name in settings}
        )

    def map(self, change):
        return Rows(mapped(self.batch, change), self.options)

    def to(self, *target):
        return self.map(
            lambda values: (
                values.to(*target) if values.is_floating_point() else values.to(target[0])
            )
        )

    def replace(self, **values):
        return Rows(replace(self.batch, **values), self.options)


def columns(batch):
    """The columns that are present in a batch, by name."""
    return {name: value for name, value in vars(batch).items() if value is not None}


def mapped(batch, change):
    return replace(batch, **{name: change(value) for name, value in columns(batch).items()})


class Backend(NamedTuple):
    """A backend of the head. Its methods take and return CPU tensors."""

    name: str
    key: str
    """The `backend` to pass. The emulated CUDA kernels replace those of "cpu"."""
    device: str
    examples: int
    """Of a property."""

    def loss(self, hidden, weight, target, rows, bias=None, *, upstream=1.0, **options):
        """The results of token_loss, and the gradients of hidden, weight and bias."""
        hidden_leaf, weight_leaf, bias_leaf = leaves(*self._put(hidden, weight, bias))
        rows = rows.to(self.device, torch.float32)
        target = target.to(self.device)
        results = fused_loss(
            hidden_leaf, weight_leaf, target, rows, bias=bias_leaf, backend=self.key, **options
        )
        (upstream * results.loss).backward()
        return TokenLoss(*(t.detach().cpu() for t in results)), [
            leaf.grad.cpu() for leaf in (hidden_leaf, weight_leaf, bias_leaf) if leaf is not None
        ]

    def stats(self, hidden, weight, target, pull, bias=None, **options):
        """The results of token_stats, and the gradients of pull(logp, entropy)."""
        hidden_leaf, weight_leaf, bias_leaf = leaves(*self._put(hidden, weight, bias))
        statistics = token_stats(
            hidden_leaf,
            weight_leaf,
            target.to(self.device),
            bias=bias_leaf,
            backend=self.key,
            **options,
        )
        logp, entropy = (t.cpu() for t in statistics)
        pull(logp, entropy).backward()
        return (logp.detach(), entropy.detach()), [
            leaf.grad.cpu() for leaf in (hidden_leaf, weight_leaf, bias_leaf) if leaf is not None
        ]

    def _put(self, *tensors):
        return [None if tensor is None else tensor.to(self.device) for tensor in tensors]


def fused_loss(hidden, weight, target, rows, **options):
    return token_loss(hidden, weight, target, rows.loss, rows.batch, **options)


def dense_stats(hidden, weight, target, bias=None, temperature=1.0, softcap=None):
    u = hidden @ weight.t()
    u = u if bias is None else u + bias
    z = (u if softcap is None else softcap * (u / softcap).tanh()) / temperature
    logp = z.log_softmax(-1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def dense_pulled(hidden, weight, target, pull, bias=None, *, dtype=torch.float64, **options):
    """Like Backend.stats, with full logits of `dtype`."""
    hidden_leaf, weight_leaf, bias_leaf = leaves(hidden, weight, bias, dtype=dtype)
    logp, entropy = dense_stats(hidden_leaf, weight_leaf, target, bias_leaf, **options)
    pull(logp, entropy).backward()
    return (logp.detach(), entropy.detach()), [
        leaf.grad for leaf in (hidden_leaf, weight_leaf, bias_leaf) if leaf is not None
    ]


def dense(hidden, weight, target, rows, bias=None, *, upstream=1.0, **options):
    """Like Backend.loss, with the formulas of the loss in float64."""
    double_batch = rows.to("cpu", torch.float64).batch
    statistics, gradients = dense_pulled(
        hidden,
        weight,
        target,
        lambda *statistics: upstream * rows.loss(*statistics, double_batch).sum(),
        bias,
        **options,
    )
    token_losses = rows.loss(*statistics, double_batch)
    return (token_losses.sum(), token_losses, *statistics), gradients


def problem(T, V, D, *, seed=0, bias=False, scale=1.0, temperature=1.0, softcap=None, **options):
    """Random inputs (hidden, weight, target, bias, rows) of actions and observations, some with
    weight or advantage 0."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    hidden = scale * randn(T, D)
    weight = randn(V, D) / D**0.5
    target = torch.randint(V, (T,), generator=generator)
    offset = randn(V) if bias else None
    logp = dense_stats(hidden, weight, target, offset, temperature, softcap)[0]
    batch = losses.TokenBatch(
        observation=torch.rand(T, generator=generator) < 0.4,
        weight=torch.rand(T, generator=generator) * (torch.rand(T, generator=generator) > 0.3),
        advantage=randn(T) * (torch.rand(T, generator=generator) > 0.15),
        old_logp=logp + randn(T),
        sampled_logp=logp,
        ref_logp=logp + 2 * randn(T),
    )
    return hidden, weight, target, offset, Rows(batch, options)


def leaves(*tensors, dtype=None):
    """Copies that require gradients. None stays None."""
    return [
        None
        if tensor is None
        else tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_()
        for tensor in tensors
    ]


def assert_close(actual, expected, tolerance=1e-5):
    """Asserts a difference of at most `tolerance` times the largest number, or 1 if larger."""
    actual = actual.double().cpu()
    expected = expected.double().cpu()
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


def set_chunk_rows(patch, rows, *, vocabulary):
    """Cuts passes into chunks of this many rows, and Triton's into chunks of one tile."""
    for device in ("cpu", "cuda"):
        patch.setitem(_torch.CHUNK_BYTES, device, rows * vocabulary * 4)
        patch.setitem(_rows.CHUNK_BYTES, device, rows * vocabulary * 4)
    patch.setattr(_rows, "CHUNK_ROWS", 1)
    patch.setattr(_rows, "KEPT_BYTES", rows * vocabulary * 4)
    patch.setattr(_torch, "CHUNK_ROWS", 1)
    if triton := sys.modules.get("paw_kernels._triton"):
        patch.setattr(triton, "CHUNK_BYTES", 1)
        patch.setattr(triton, "STATISTICS_BYTES", 1)
