"""The peers of the fused head. Each is a function (hidden [T, D], weight [V, D], target [T]) -> loss.

The loss is the cross-entropy of each row ([T] float32) if the peer returns it, otherwise the mean
over rows. Peers cannot skip rows without a gradient, so they work on every row they are given. Each
library is imported when its peer first runs; `why_not` says what is missing. Based on the sources
of liger-kernel 0.8.5, quack-kernels 0.6.5, cut-cross-entropy 25.1.1, torch 2.13 and prime-rl.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    name: str
    loss: Loss
    passes: int
    """Matmuls of [T, D] by [V, D] in forward + backward."""
    package: str = "torch"
    """The distribution whose version goes into the table."""
    module: str = "torch"
    """This module and `needs` must be importable."""
    needs: str = "torch"
    gpu_only: bool = False
    is_cross_entropy: bool = True
    """If False, the value is a different loss with the gradient of the mean cross-entropy."""

    def why_not(self, device: torch.device) -> str | None:
        """Why the peer cannot run on `device`, or None if it can."""
        if self.gpu_only and device.type != "cuda":
            return "needs a GPU"
        if self.name == "torch_linear_ce" and not hasattr(F, "linear_cross_entropy"):
            return f"needs torch >= 2.13, this is {torch.__version__}"
        missing = [
            name for name in (self.module, self.needs) if importlib.util.find_spec(name) is None
        ]
        return f"{missing[0]} is not installed" if missing else None

    def version(self) -> str:
        if self.package == "torch":
            return torch.__version__
        return importlib.metadata.version(self.package)


def naive(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Full logits and log-softmax in the dtype of the inputs."""
    logp = (hidden @ weight.t()).log_softmax(-1)
    return -logp.gather(1, target[:, None]).squeeze(1).float()


def naive_fp32(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Full logits, rounded by the matmul, then cast to float32, as in most trainers."""
    return F.cross_entropy((hidden @ weight.t()).float(), target, reduction="none")


@cache
def _compiled() -> Loss:
    return torch.compile(naive_fp32, dynamic=False)


def compiled(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _compiled()(hidden, weight, target)


def torch_linear_ce(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """torch's own chunked operator. Without options it would build the full logits."""
    return F.linear_cross_entropy(
        hidden, weight, target, options=torch.nn.LinearCrossEntropyOptions()
    )


def liger_triton(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Liger's default: chunks of about T D / V rows, with dW accumulated in the dtype of the
    weight."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]


def liger_cute(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Hopper only. One chunk, so its buffer is [T, V]. T must be a multiple of 128, V of 256."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        liger_fused_linear_cross_entropy_sm90,
    )

    return liger_fused_linear_cross_entropy_sm90(hidden, weight, target)


def liger_grpo(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """GRPO with advantages and ratios of 1, which has the gradient of the mean cross-entropy.

    Sequences of up to 2,048 tokens.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    length = 2048 if hidden.shape[0] % 2048 == 0 else hidden.shape[0]
    head = LigerFusedLinearGRPOLoss(beta=0.0, compiled=hidden.is_cuda, use_ref_model=False)
    tokens = target.view(-1, length)
    ones = torch.ones(tokens.shape, device=hidden.device)
    return head(hidden.view(-1, length, hidden.shape[1]), weight, tokens, ones, ones[:, 0])[0]


def cut_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Apple's head with its default filter: blocks with p below 2^-12 (bf16) get no gradient."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, target, reduction="none")


def quack(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Chunks of 4,096 rows. If V is a multiple of 128, Hopper has a scaled-exponential pipeline."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(hidden, weight, target)


TOKENS = 8192
"""Rows of a tile in the prime-rl-style head, as its trainer sets them automatically."""
VOCABULARY = 8192
"""Columns of a tile, its fixed vocabulary block."""


class _TiledLogProbs(torch.autograd.Function):
    """Online softmax over vocabulary blocks. The backward recomputes the logits of every tile."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        T = hidden.shape[0]
        logp = torch.empty(T, device=hidden.device)
        entropy = torch.empty(T, device=hidden.device)
        log_sum = torch.empty(T, device=hidden.device)
        for rows in _blocks(T, TOKENS):
            hidden_tile = hidden[rows]
            target_tile = target[rows]
            largest_logit = torch.full(target_tile.shape, -torch.inf, device=hidden_tile.device)
            exp_sum = torch.zeros(target_tile.shape, device=hidden_tile.device)
            weighted_sum = torch.zeros(target_tile.shape, device=hidden_tile.device)
            at_target = torch.zeros(target_tile.shape, device=hidden_tile.device)
            for columns in _blocks(weight.shape[0], VOCABULARY):
                logits_tile = (hidden_tile @ weight[columns].t()).float()
                new_largest = torch.maximum(largest_logit, logits_tile.amax(1))
                shrink = (largest_logit - new_largest).exp()
                exponentials = (logits_tile - new_largest[:, None]).exp()
                exp_sum = exp_sum * shrink + exponentials.sum(1)
                weighted_sum = weighted_sum * shrink + (exponentials * logits_tile).sum(1)
                largest_logit = new_largest
                inside, column = _within(target_tile, columns)
                at_target += logits_tile.gather(1, column[:, None]).squeeze(1) * inside
            log_sum[rows] = largest_logit + exp_sum.log()
            logp[rows] = at_target - log_sum[rows]
            entropy[rows] = log_sum[rows] - weighted_sum / exp_sum
        ctx.save_for_backward(hidden, weight, target, log_sum)
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, d_logp: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, target, log_sum = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight)
        for rows in _blocks(hidden.shape[0], TOKENS):
            hidden_tile = hidden[rows]
            target_tile = target[rows]
            upstream = d_logp[rows]
            for columns in _blocks(weight.shape[0], VOCABULARY):
                weight_tile = weight[columns]
                logits_tile = (hidden_tile @ weight_tile.t()).float()
                probabilities = (logits_tile - log_sum[rows, None]).exp()
                inside, column = _within(target_tile, columns)
                d_logits = -upstream[:, None] * probabilities
                d_logits.scatter_add_(1, column[:, None], (upstream * inside)[:, None])
                d_logits = d_logits.to(hidden_tile.dtype)
                d_hidden[rows] += d_logits @ weight_tile
                d_weight[columns] += d_logits.t() @ hidden_tile
        return d_hidden, d_weight, None


def _blocks(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _within(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in the block, and each target's column in it (any if outside)."""
    inside = (target >= columns.start) & (target < columns.stop)
    return inside, (target - columns.start).clamp(0, columns.stop - columns.start - 1)


def prime_rl(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """A head in the style of prime-rl's fused one, without the host waits of the original."""
    return -_TiledLogProbs.apply(hidden, weight, target)[0]


_liger = partial(Peer, package="liger-kernel", module="liger_kernel")
PEERS = (
    Peer("naive", naive, 3),
    Peer("naive_fp32", naive_fp32, 3),
    Peer("torch_compile", compiled, 3),
    Peer("torch_linear_ce", torch_linear_ce, 3),
    Peer("prime_rl_style", prime_rl, 4),
    _liger("liger_grpo", liger_grpo, 4, is_cross_entropy=False),
    _liger("liger_triton", liger_triton, 3, gpu_only=True),
    _liger("liger_cute", liger_cute, 3, needs="cutlass", gpu_only=True),
    Peer(
        "cut_cross_entropy",
        cut_cross_entropy,
        4,
        "cut-cross-entropy",
        "cut_cross_entropy",
        gpu_only=True,
    ),
    Peer("quack", quack, 3, "quack-kernels", "quack", "cutlass", gpu_only=True),
)
