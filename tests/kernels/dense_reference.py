"""float64 autograd reference of the fused head: full logits, every formula written out once more, independently."""

import torch

from paw_kernels import ACTION, OBSERVATION, LossRows, _rows, _torch


def dense_stats(hidden, weight, target, bias=None, temperature=1.0, softcap=None):
    u = hidden @ weight.t()
    u = u if bias is None else u + bias
    z = (u if softcap is None else softcap * (u / softcap).tanh()) / temperature
    logp = z.log_softmax(-1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def dense_row_loss(logp, entropy, rows: LossRows):
    """Losses before the row weight, [T] in the dtype of logp; 0 on skipped rows."""
    losses = []
    for t, kind in enumerate(rows.kind.tolist()):
        loss = 0 * logp[t]
        if kind == ACTION:
            advantage, ratio = rows.advantage[t].to(logp.dtype), (logp[t] - rows.old_logp[t]).exp()
            clamped = ratio.clamp(1 - rows.clip_low, 1 + rows.clip_high)
            loss = torch.maximum(-advantage * ratio, -advantage * clamped)
            if advantage < 0:
                loss = torch.minimum(loss, -advantage * rows.dual_clip)
            if rows.kl_coef != 0:
                gap = rows.ref_logp[t] - logp[t]
                loss = loss + rows.kl_coef * (gap.exp() - gap - 1).clamp(-10, 10)
            loss = loss - rows.entropy_coef * entropy[t]
        elif kind == OBSERVATION:
            p = logp[t].exp()
            if rows.observation_loss == "ce":
                loss = -logp[t]
            elif rows.observation_loss == "gce":
                loss = (1 - p**rows.q) / rows.q
            elif rows.observation_loss == "mae" or p <= rows.rho:
                loss = 1 - p
        losses.append(loss)
    return torch.stack(losses) if losses else logp


def dense_loss(hidden, weight, target, rows: LossRows, bias=None, temperature=1.0, softcap=None):
    """Loss, row losses, log-probabilities and entropies, differentiable."""
    logp, entropy = dense_stats(hidden, weight, target, bias, temperature, softcap)
    row_loss = dense_row_loss(logp, entropy, rows)
    return (row_loss * rows.weight).sum(), row_loss, logp, entropy


def problem(T, V, D, *, seed=0, bias=False, scale=1.0, **options):
    """Random inputs (hidden, weight, target, bias, rows) on which every branch of the losses occurs."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    hidden, weight = scale * randn(T, D), randn(V, D) / D**0.5
    target = torch.randint(V, (T,), generator=g)
    offset = randn(V) if bias else None
    logp = dense_stats(hidden, weight, target, offset, options.pop("temperature", 1.0), options.pop("softcap", None))[0]
    rows = LossRows(
        kind=torch.randint(3, (T,), generator=g).to(torch.uint8),
        weight=torch.rand(T, generator=g) * (torch.rand(T, generator=g) > 0.15),
        advantage=randn(T) * (torch.rand(T, generator=g) > 0.15),
        old_logp=logp + randn(T),
        ref_logp=logp + 2 * randn(T),
        **options,
    )
    return hidden, weight, target, offset, rows


def set_chunk_rows(patch, rows, *, vocabulary):
    """Cut passes into chunks of so many rows, whatever the backend."""
    patch.setitem(_torch.CHUNK_BYTES, "cpu", rows * vocabulary * 4)
    patch.setitem(_rows.CHUNK_BYTES, "cpu", rows * vocabulary * 4)
    patch.setattr(_rows, "CHUNK_ROWS", 1)
