"""Packed rows: whatever computes the attention, a row's hidden states are those of the row
alone."""

from dataclasses import replace

import pytest
import torch
from joint import VOCAB, make_lm
from torch._subclasses.fake_tensor import FakeTensorMode

from paw.errors import UserError
from paw.model.attention import pack_rows, packed_attention, pick_attention
from paw.model.policy import Policy

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
LENGTHS = [7, 1, 12, 12, 3]
LONG = [300, 230, 260]  # which a CPU takes one by one


def test_bounds_as_documented():
    packed = pack_rows([3, 2], kernel="sdpa", device=CPU)
    assert packed.cu_seqlens.tolist() == [0, 3, 5]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert packed.slot.tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert pack_rows([2, 3], kernel="sdpa", device=CPU).slot.tolist() == [0, 1, 3, 4, 5]
    assert pack_rows([2, 2], kernel="sdpa", device=CPU).slot is None
    assert pack_rows([2, 3], kernel="varlen", device=CPU).slot is None
    long_rows = pack_rows(LONG, kernel="sdpa", device=CPU)
    assert long_rows.one_by_one == tuple(LONG)
    assert long_rows.slot is None
    for lengths, padded in ((LONG, True), ([300, 300, 310], False), ([200, 60, 120], False)):
        assert pack_rows(lengths, kernel="sdpa", device=CPU, padded=padded).one_by_one == ()


@pytest.mark.parametrize("lengths", [LENGTHS, LONG], ids=["side by side", "one by one"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 2.0), (4, 2.0)])
def test_attention_is_that_of_a_block_diagonal_mask(lengths, window, softcap):
    torch.manual_seed(0)
    # with a cap the softmax is float32's
    total = sum(lengths)
    tolerance = 1e-12 if softcap is None else 1e-5
    q, k, v = (
        torch.randn(1, heads, total, 16, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    row_of_token = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(total)
    mask = (
        (row_of_token[:, None] == row_of_token)
        & (position[:, None] >= position)
        & (position[:, None] - position < (window or total))
    )
    scores = 0.3 * q @ k.repeat_interleave(2, dim=1).mT
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.repeat_interleave(2, dim=1)
    packed = pack_rows(lengths, kernel="sdpa", device=CPU)
    options = {"scaling": 0.3, "sliding_window": window, "softcap": softcap}
    output, _weights = packed_attention(None, q, k, v, None, packed=packed, **options)
    assert torch.allclose(output, expected.transpose(1, 2), atol=tolerance)
    weight = torch.randn_like(output)
    gradients = torch.autograd.grad((output * weight).sum(), (q, k, v))
    for gradient, expected_gradient in zip(
        gradients,
        torch.autograd.grad((expected.transpose(1, 2) * weight).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(gradient, expected_gradient, atol=tolerance)


def test_the_varlen_kernel_is_called_as_torch_declares_it():
    """On fake tensors: shapes, dtypes and options pass its checks; the numbers need a GPU."""
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (
            torch.empty(1, heads, sum(LENGTHS), 64, dtype=torch.bfloat16, device="cuda")
            for heads in (4, 2, 2)
        )
        bounds = torch.empty(len(LENGTHS) + 1, dtype=torch.int32, device="cuda")
        packed = replace(pack_rows(LENGTHS, kernel="varlen", device=CPU), cu_seqlens=bounds)
        output, _weights = packed_attention(None, q, k, v, None, packed=packed, scaling=0.125)
    assert output.shape == (1, sum(LENGTHS), 4, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["varlen", "flash"])
def test_kernels_agree_on_a_gpu(kernel):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if kernel != "varlen":
        pytest.importorskip("flash_attn")
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, sum(LENGTHS), 64, dtype=torch.bfloat16, device="cuda")
        for heads in (4, 2, 2)
    )
    outputs = [
        packed_attention(None, q, k, v, None, packed=pack_rows(LENGTHS, kernel=name, device=CUDA))[
            0
        ]
        for name in (kernel, "sdpa")
    ]
    assert torch.allclose(*outputs, atol=0.02)


def test_varlen_refuses_what_it_would_leave_out():
    states = torch.randn(1, 2, 5, 16)
    packed = pack_rows([3, 2], kernel="varlen", device=CPU)
    with pytest.raises(
        UserError, match=r"'varlen' does not support soft caps.*--model\.attention sdpa"
    ):
        packed_attention(None, states, states, states, None, packed=packed, softcap=50.0)


def test_kernels_that_cannot_run_are_refused():
    assert pick_attention("auto", CPU, torch.bfloat16) == "sdpa"
    assert pick_attention("auto", CUDA, torch.float32) == "sdpa"
    assert pick_attention("varlen", CUDA, torch.bfloat16) == "varlen"
    with pytest.raises(
        UserError, match=r"model\.attention = 'varlen': it runs only on a GPU in bfloat16"
    ):
        pick_attention("varlen", CPU, torch.bfloat16)
    with pytest.raises(UserError, match="flash-attn is not installed; run: pip install flash-attn"):
        pick_attention("flash", CUDA, torch.bfloat16)


def test_what_the_backward_pass_keeps_changes_no_bit():
    """Checkpointed fully or selectively, offloaded or not: the same hidden states and gradients."""
    ids = torch.randint(VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))

    def run(**options):
        policy = Policy(make_lm(), **options)
        calls = []
        policy.lm.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
        hidden = policy.hidden(ids, LENGTHS)
        hidden.square().sum().backward()
        assert len(calls) == (2 if "checkpointing" in options else 1)
        return [
            hidden.detach(),
            *(parameter.grad for parameter in policy.parameters() if parameter.grad is not None),
        ]

    plain = run()
    for options in (
        {"checkpointing": "selective"},
        {"checkpointing": "full"},
        {"offload_activations": True},
        {"checkpointing": "full", "offload_activations": True},
    ):
        assert all(map(torch.equal, run(**options), plain)), options
