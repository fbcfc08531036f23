"""What only the Triton backend has. Its numbers are tested in test_head.py and test_extremes.py."""

import pytest
import torch
from dense_reference import assert_close, dense_stats, leaves, problem
from triton_interpreted import backend as _triton

from paw_kernels import token_stats
from paw_kernels._head import Head


@pytest.mark.parametrize(
    ("V", "D"), [(128_256, 8192), (151_936, 2048), (152_064, 3584), (152_064, 8192)]
)
def test_chunks_are_few_equal_and_flat_in_T(monkeypatch, V, D):
    """4,096 rows are one chunk with the vocabularies of Llama 3 and Qwen2.5, and no chunk takes
    1.5 GiB."""
    for tiles in ("interpreter", 2), ("interpreter", 4):
        monkeypatch.setitem(_triton.TILES, tiles, _triton.TILES["sm_90", tiles[1]])
    monkeypatch.setattr(_triton, "INTERPRETED", True)
    weight = torch.empty(V, D, dtype=torch.bfloat16, device="meta")

    def step(N, gradients=True):
        rows, step = _triton.make_rows(Head(weight, None, 1.0, None), N, gradients)
        held_bytes = sum(
            tensor.nbytes
            for tensor in (rows._buffer, rows._partial, rows._result)
            if tensor is not None
        )
        # Of the chunk's hidden states: taken, packed, their gradient.
        copies = 3 if gradients else 1
        assert held_bytes + copies * step * D * 2 <= (1.45 * 2**30 if gradients else 100 * 2**20)
        return step

    assert step(4096) == 4096
    assert step(0) == 128
    assert step(1) == 128
    assert step(128) == 128
    assert step(5700) == 2944  # instead of 5,120 and 580
    assert 4096 <= step(32_768) <= 5504
    assert step(10**6) >= 4096
    assert step(10**6, gradients=False) >= 3840


CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_tiles_fit_into_shared_memory_and_none_of_the_table_is_specialised(capability):
    """Only `paw doctor --kernels` tries what no GPU has run yet."""
    arch = _triton._architecture(capability)
    for size in (2, 4):
        for tiles in _triton.candidates(capability, size):
            _triton._check_shared_memory(tiles, size, arch)
        assert not _triton.TILES[arch, size].specialize
    specialised = [tiles.specialize for tiles in _triton.candidates(capability)]
    assert any(specialised) == (arch == "sm_100")


def test_tiles_that_do_not_fit_are_refused(monkeypatch):
    weight = torch.empty(512, 64, dtype=torch.bfloat16, device="meta")
    monkeypatch.setitem(_triton.TUNED, (512, 64, 2), _triton.TILES["sm_90", 2])
    assert _triton.tiles_for(weight, None, "sm_90").cols == 256
    with pytest.raises(ValueError, match="need 192 KiB of shared memory, and this GPU has 99 KiB"):
        _triton.tiles_for(weight, None, "other")


def test_processors_are_left_to_collectives_in_backward_passes_of_several_ranks(monkeypatch):
    class Gpu:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Gpu)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    device = torch.device("cuda", 0)
    seen = []
    for ranks in (1, 2):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda ranks=ranks: ranks)
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        y.register_hook(lambda _: seen.append(_triton._processors(device)))
        seen.append(_triton._processors(device))
        y.sum().backward()
        seen.append(_triton._processors(device))
    assert seen == [132, 132, 132, 132, 116, 132]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_more_rows_than_a_grid_axis_and_more_weights_than_int32():
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    for T, V, D in ((70_000, 300, 64), (40, 300_000, 8192)):
        hidden = torch.randn(T, D, **options)
        weight = torch.randn(V, D, **options) / D**0.5
        target = torch.randint(V, (T,), device="cuda", generator=generator)
        target[-1] = V - 1
        hidden_leaf, weight_leaf = leaves(hidden, weight)
        logp, entropy = token_stats(hidden_leaf, weight_leaf, target, backend="triton")
        logp.sum().backward()
        last_rows = slice(T - 3, T)
        logp64, entropy64 = dense_stats(
            hidden[last_rows].double(), weight.double(), target[last_rows]
        )
        assert_close(logp[last_rows], logp64)
        assert_close(entropy[last_rows], entropy64)
        assert hidden_leaf.grad.isfinite().all()
        assert (hidden_leaf.grad[last_rows] != 0).any()


def test_why_not_names_value_and_fix(monkeypatch):
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    assert "cpu" in _triton.why_not(torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    reason = _triton.why_not(torch.device("cuda", 0), torch.bfloat16)
    assert "cuda:0 has 7.5" in reason
    assert "backend='torch'" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert _triton.why_not(torch.device("cuda", 0), torch.bfloat16) is None


@pytest.mark.skipif(not _triton.INTERPRETED, reason="the interpreter is for machines without a GPU")
@pytest.mark.slow
def test_the_head_runs_with_every_candidate(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    hidden, weight, target, _, _ = problem(40, 70, 16)
    exact = dense_stats(hidden.double(), weight.double(), target)
    candidates = _triton.candidates(None)
    assert len(set(candidates)) == 6
    assert candidates[0] == _triton.tiles_for(weight, None)
    for tiles in candidates:
        monkeypatch.setitem(_triton.TUNED, (70, 16, 4), tiles)
        assert _triton.tiles_for(weight, None) == tiles
        for actual, expected in zip(
            token_stats(hidden, weight, target, backend="triton"), exact, strict=True
        ):
            assert_close(actual, expected)
