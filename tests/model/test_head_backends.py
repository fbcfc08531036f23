"""Training through every backend of the head that runs here: the same gradients as torch's, to
torch's own error."""

import pytest
import torch
from joint import Objective, dense, gradients, make_rows, packed, relative, tiny_policy

from paw.algo.loss import log_probs
from paw.algo.packing import Packing
from paw_kernels import BACKENDS, why_not_backend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2-tied", "llama"])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch"])
def test_the_gradient_of_an_update_is_that_of_plain_torch(backend, family, dtype):
    if reason := why_not_backend(backend, DEVICE, dtype):
        pytest.skip(reason)
    policy = tiny_policy(family).to(DEVICE)
    objective = Objective(kl_coef=0.1, entropy_coef=0.01, rho=0.05)
    rows = make_rows(policy, reference=True)
    _, exact_gradient, masked, has_live_tokens = dense(
        policy, rows, objective, update_samples=len(rows)
    )
    assert masked
    assert has_live_tokens
    policy.dtype = dtype
    errors = {}
    for policy.head_backend in ("torch", backend):
        _, gradient = packed(policy, rows, objective, update_samples=len(rows), budget=60)
        errors[policy.head_backend] = relative(gradient, exact_gradient)
    assert 0 < errors[backend] <= 2 * errors["torch"] + (1e-6 if dtype == torch.float32 else 1e-4)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch"])
def test_the_scoring_pass_is_that_of_plain_torch(backend):
    if reason := why_not_backend(backend, DEVICE, torch.float32):
        pytest.skip(reason)
    policy = tiny_policy().to(DEVICE)
    rows = make_rows(policy)
    scores = {}
    for policy.head_backend in ("torch", backend):
        scored = log_probs(policy, rows, Packing(budget=60), temperature=0.4).values()
        numbers = []
        for logp, entropy in scored:
            numbers += [*logp, entropy]
        scores[policy.head_backend] = torch.tensor(numbers)
    torch.testing.assert_close(scores[backend], scores["torch"], rtol=1e-5, atol=1e-5)
    gradients(policy)
