"""float64 autograd reference of the fused head: full logits, and a problem with every branch of the losses."""

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
    """A batch and the settings of the joint loss. The columns of the batch are attributes too."""

    batch: losses.TokenBatch
    options: dict[str, Any]

    def __getattr__(self, name):
        return getattr(self.batch, name)

    @property
    def loss(self):
        of = {"wm": "cmae"} | self.options
        policy = partial(losses.ppo, **{name: of[name] for name in POLICY if name in of})
        wm = partial(
            getattr(losses, of["wm"]), **{name: of[name] for name in ("rho", "q") if name in of}
        )
        return losses.joint(policy, wm, **{name: of[name] for name in TERMS if name in of})

    def map(self, change):
        return Rows(mapped(self.batch, change), self.options)

    def to(self, *where):
        return self.map(
            lambda values: values.to(*where) if values.is_floating_point() else values.to(where[0])
        )

    def replace(self, **values):
        return Rows(replace(self.batch, **values), self.options)


def columns(batch):
    """Those that a loss reads, not the absent ones."""
    return {name: value for name, value in vars(batch).items() if value is not None}


def mapped(batch, change):
    return replace(batch, **{name: change(value) for name, value in columns(batch).items()})


class Backend(NamedTuple):
    """A backend of the head. Inputs of its methods and what they answer are on the CPU."""

    name: str
    key: str
    """What to pass as `backend`: the emulated CUDA kernels stand in for those of "cpu"."""
    device: str
    examples: int
    """Of a property."""

    def loss(self, hidden, weight, target, rows, bias=None, *, upstream=1.0, **how):
        """Results of token_loss, gradients of hidden, weight and bias."""
        h, w, b = leaves(*self._put(hidden, weight, bias))
        rows, target = rows.to(self.device, torch.float32), target.to(self.device)
        out = fused_loss(h, w, target, rows, bias=b, backend=self.key, **how)
        (upstream * out.loss).backward()
        return TokenLoss(*(t.detach().cpu() for t in out)), [
            x.grad.cpu() for x in (h, w, b) if x is not None
        ]

    def stats(self, hidden, weight, target, pull, bias=None, **how):
        """Results of token_stats, gradients of pull(logp, entropy)."""
        h, w, b = leaves(*self._put(hidden, weight, bias))
        stats = token_stats(h, w, target.to(self.device), bias=b, backend=self.key, **how)
        logp, entropy = (t.cpu() for t in stats)
        pull(logp, entropy).backward()
        return (logp.detach(), entropy.detach()), [x.grad.cpu() for x in (h, w, b) if x is not None]

    def _put(self, *tensors):
        return [None if t is None else t.to(self.device) for t in tensors]


def fused_loss(hidden, weight, target, rows, **how):
    return token_loss(hidden, weight, target, rows.loss, rows.batch, **how)


def dense_stats(hidden, weight, target, bias=None, temperature=1.0, softcap=None):
    u = hidden @ weight.t()
    u = u if bias is None else u + bias
    z = (u if softcap is None else softcap * (u / softcap).tanh()) / temperature
    logp = z.log_softmax(-1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def dense_pulled(hidden, weight, target, pull, bias=None, *, dtype=torch.float64, **how):
    """As Backend.stats, with full logits of `dtype`."""
    h, w, b = leaves(hidden, weight, bias, dtype=dtype)
    logp, entropy = dense_stats(h, w, target, b, **how)
    pull(logp, entropy).backward()
    return (logp.detach(), entropy.detach()), [x.grad for x in (h, w, b) if x is not None]


def dense(hidden, weight, target, rows, bias=None, *, upstream=1.0, **how):
    """As Backend.loss; the formulas of the loss are float64's."""
    wide = rows.to("cpu", torch.float64).batch
    stats, gradients = dense_pulled(
        hidden, weight, target, lambda *stats: upstream * rows.loss(*stats, wide).sum(), bias, **how
    )
    each = rows.loss(*stats, wide)
    return (each.sum(), each, *stats), gradients


def problem(T, V, D, *, seed=0, bias=False, scale=1.0, temperature=1.0, softcap=None, **options):
    """Random inputs (hidden, weight, target, bias, rows): actions and observations, some of weight or advantage 0."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    hidden, weight = scale * randn(T, D), randn(V, D) / D**0.5
    target = torch.randint(V, (T,), generator=g)
    offset = randn(V) if bias else None
    logp = dense_stats(hidden, weight, target, offset, temperature, softcap)[0]
    batch = losses.TokenBatch(
        observation=torch.rand(T, generator=g) < 0.4,
        weight=torch.rand(T, generator=g) * (torch.rand(T, generator=g) > 0.3),
        advantage=randn(T) * (torch.rand(T, generator=g) > 0.15),
        old_logp=logp + randn(T),
        sampled_logp=logp,
        ref_logp=logp + 2 * randn(T),
    )
    return hidden, weight, target, offset, Rows(batch, options)


def leaves(*tensors, dtype=None):
    """Copies of their own that require gradients; None stays."""
    return [
        None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_()
        for t in tensors
    ]


def assert_close(got, want, tolerance=1e-5):
    """Within `tolerance` of the largest number, and of 1."""
    got, want = got.double().cpu(), want.double().cpu()
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * scale)


def set_chunk_rows(patch, rows, *, vocabulary):
    """Cut passes into chunks of so many rows; of Triton's, into chunks of one tile."""
    for device in ("cpu", "cuda"):
        patch.setitem(_torch.CHUNK_BYTES, device, rows * vocabulary * 4)
        patch.setitem(_rows.CHUNK_BYTES, device, rows * vocabulary * 4)
    patch.setattr(_rows, "CHUNK_ROWS", 1)
    patch.setattr(_rows, "KEPT_BYTES", rows * vocabulary * 4)
    patch.setattr(_torch, "CHUNK_ROWS", 1)
    if triton := sys.modules.get("paw_kernels._triton"):
        patch.setattr(triton, "CHUNK_BYTES", 1)
        patch.setattr(triton, "STATISTICS_BYTES", 1)
