"""Host memory in slabs: tensors apart from each other, in as few allocations as they need."""

import torch
from safetensors.torch import load_file, save_file

from paw.model.host import HostMemory


def test_tensors_are_apart_and_share_slabs(tmp_path):
    memory = HostMemory(slab=4096)
    sizes = (3, 700, 0, 1000, 900, 5000)
    originals = [torch.full((size,), size, dtype=torch.float16) for size in sizes]
    copies = [memory.empty_like(tensor, pin=False).copy_(tensor) for tensor in originals]
    for actual, expected in zip(copies, originals, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
        assert actual.data_ptr() % 16 == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in copies[:2]}) == 1
    slab_sizes = {}
    for tensor in copies:
        storage = tensor.untyped_storage()
        slab_sizes[storage.data_ptr()] = storage.size()
    assert sorted(slab_sizes.values()) == [4096, 4096, 10000]
    named = {str(position): tensor for position, tensor in enumerate(copies) if tensor.numel()}
    save_file(named, tmp_path / "file.safetensors")  # which refuses tensors that overlap
    for name, tensor in load_file(tmp_path / "file.safetensors").items():
        assert torch.equal(tensor, named[name])
