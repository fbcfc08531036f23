"""Where numbers are very large or very small: every backend against float64."""

import pytest
import torch
from dense_reference import dense_stats

from paw_kernels import token_stats


@pytest.mark.parametrize("exponent", [-10, -20])
def test_huge_logits_over_a_tiny_temperature_keep_every_digit(backend, exponent):
    """The difference to the largest logit is taken before it is scaled: z rounded to float32 is off by 2^-24 |z|."""
    step = 2.0**exponent
    weight = (
        1000 * step * 2**10 + step * torch.randint(12, (300, 1), generator=torch.Generator().manual_seed(0))
    ).float()
    hidden, target = torch.ones(3, 1), torch.tensor([0, 7, 299])
    results = []
    for dtype in (torch.float32, torch.float64):
        w = weight.to(dtype, copy=True).requires_grad_()
        of = {"temperature": 0.7 * step}
        if dtype == torch.float32:
            logp, entropy = token_stats(hidden, w, target, backend=backend, **of)
        else:
            logp, entropy = dense_stats(hidden.double(), w, target, **of)
        (logp * torch.tensor([1.0, -2.0, 0.5]) + 0.3 * entropy).sum().backward()
        results.append((logp.detach(), entropy.detach(), w.grad))
    for got, want in zip(*results, strict=True):
        assert (got.double() - want).abs().max() <= 2e-6 * want.abs().max()
