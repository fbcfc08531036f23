"""Child of test_flash.py: flash-adamw on emulated kernels. Usage: flash_worker.py CASE,...

FOLDER.
"""

import copy
import os
import sys
from pathlib import Path

import flash_on_cpu  # noqa: F401  (before Triton)
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from paw.build import join_ranks
from paw.checkpoint import files as checkpoint
from paw.checkpoint import restore, train_state
from paw.config.recipe import validate
from paw.config.sections import OptimConfig
from paw.distributed.ranks import full_tensor, rows_like, shard_like
from paw.model.flash import in_groups
from paw.model.optim import make_optimizer
from paw.tools.plan.plan import Plan
from paw.tools.plan.shapes import from_config


def make(*, offload=False, lr=1e-2, bits=32, model=None):
    """Rows that 2 ranks share unevenly, norms of heads, a scalar head of one row, rows that are not whole groups."""
    if model is None:
        torch.manual_seed(0)
        layers = [
            nn.Linear(64, 64),
            nn.RMSNorm(16),
            nn.Linear(64, 7, bias=False),
            nn.Linear(64, 1),
            nn.Linear(24, 5),
        ]
        model = nn.Sequential(*layers).bfloat16()
    config = OptimConfig(name="flash-adamw", offload=offload, lr=lr, master_bits=bits)
    return model, make_optimizer(model.parameters(), config)


def step(model, optimizer, i):
    for n, p in enumerate(model.parameters()):
        gradient = torch.randn(
            p.shape, generator=torch.Generator().manual_seed(100 * i + n)
        ).bfloat16()
        p.grad = shard_like(p, rows_like(p, {"": gradient}, ""))
    optimizer.step()


def same(a, b):
    return all(
        torch.equal(full_tensor(x.detach()), full_tensor(y.detach()))
        for x, y in zip(a.parameters(), b.parameters(), strict=True)
    )


def resume(folder):
    """From files, and offloaded or not the same; 24 bits are not loaded from 32."""
    ends = []
    for offloaded in (False, True):
        straight, optimizer = make(offload=offloaded)
        for i in range(2):
            step(straight, optimizer, i)
        model = {name: p.detach() for name, p in straight.named_parameters()}
        tensors = {
            "optimizer": train_state.optimizer_tensors(optimizer, straight.named_parameters()),
            "model": model,
        }
        path = checkpoint.save(folder, int(offloaded), tensors, {})
        assert (path / "optimizer.safetensors").stat().st_size < 6 * sum(
            p.numel() for p in model.values()
        )
        files = restore.load(path)[0]
        again, fresh = make(offload=offloaded)
        with torch.no_grad():
            for name, p in again.named_parameters():
                p.copy_(files["model"][name])
        restore.load_optimizer(fresh, again.named_parameters(), files["optimizer"])
        for i in range(2, 4):
            step(straight, optimizer, i)
            step(again, fresh, i)
        assert same(again, straight) and not same(again, make()[0])
        ends.append(again)
    assert same(*ends)
    other, fewer = make(bits=24)
    try:
        restore.load_optimizer(fewer, other.named_parameters(), files["optimizer"])
    except checkpoint.CheckpointError as error:
        assert "optim.master_bits" in str(error)
    else:
        raise AssertionError("24 bits loaded from 32")


def bits(_):
    """An lr of 1e-6 on weights of 0.02: how far from fp32 AdamW the way travelled is."""
    from flashoptim.optimizers import reconstruct_fp32_param

    for master_bits in (24, 32):
        torch.manual_seed(0)
        start, slope = torch.randn(64, 64) * 0.02, torch.randn(64, 64) * 0.3
        model, exact = (
            nn.Linear(64, 64, bias=False).bfloat16(),
            nn.Parameter(start.bfloat16().float()),
        )
        model.weight.data = start.bfloat16()
        optimizer = make(model=model, lr=1e-6, bits=master_bits)[1]
        reference = torch.optim.AdamW([exact], lr=1e-6, betas=(0.9, 0.999), weight_decay=0.01)
        for _ in range(20):
            gradient = (torch.randn(64, 64) + slope).bfloat16()
            model.weight.grad, exact.grad = gradient, gradient.float()
            optimizer.step()
            reference.step()
        whole_weight = reconstruct_fp32_param(
            model.weight.detach(), optimizer.state[model.weight]["error_bits"]
        )
        way = exact.detach() - start.bfloat16().float()
        off = float((whole_weight - exact.detach()).norm() / way.norm())
        print(f"{master_bits} bits: {off:.2%} off")
        assert off < 0.02 if master_bits == 32 else off > 0.08


def plain(_):
    """Norms, biases and odd rows go the way of torch's AdamW on float32 copies, bit for bit."""
    model, optimizer = make()
    named = [(name, p) for name, p in model.named_parameters() if not in_groups(p)]
    assert [name for name, _ in named] == ["0.bias", "1.weight", "3.bias", "4.weight", "4.bias"]
    exact = [nn.Parameter(p.detach().float()) for _, p in named]
    reference = torch.optim.AdamW(
        exact, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01, foreach=False
    )
    for i in range(4):
        step(model, optimizer, i)
        for copy_, (_, p) in zip(exact, named, strict=True):
            copy_.grad = p.grad.float()
        reference.step()
    for copy_, (_, p) in zip(exact, named, strict=True):
        assert torch.equal(optimizer.state[p]["weight"], copy_.detach()) and torch.equal(
            p, copy_.detach().bfloat16()
        )


def planned(_):
    """`paw plan` counts the bytes of the state, of a model with norms of heads."""
    sizes = dict(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32
    )
    settings = Qwen3Config(
        **sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False
    )
    model = Qwen3ForCausalLM(settings).bfloat16()
    for master_bits in (24, 32):
        optimizer = make(model=model, bits=master_bits)[1]
        step(model, optimizer, 0)
        found = sum(
            t.nbytes
            for p in model.parameters()
            for k, t in optimizer.state_tensors(p).items()
            if k != "step"
        )
        tree = {
            "model": {"path": "here"},
            "optim": {"name": "flash-adamw", "master_bits": master_bits},
        }
        shape = from_config(settings.to_dict(), origin="here")
        wanted = Plan(validate(tree, origin="here"), shape, gpus=1, gpu_gib=80.0).phases["update"][
            "optimizer"
        ]
        assert found == round(wanted * 2**30), (found, wanted * 2**30)


def shards(folder):
    """Several ranks, offloaded: the bits of one, and a checkpoint that any number can read."""
    ranks = join_ranks(torch.device("cpu"), episodes=8)
    one, first = make()
    two = copy.deepcopy(one)
    for layer in two:
        fully_shard(layer, mesh=init_device_mesh("cpu", (ranks.world_size,)))
    two, second = make(model=two, offload=True)
    for i in range(2):
        step(one, first, i)
        step(two, second, i)
    assert same(one, two)
    parts = train_state.optimizer_tensors(second, two.named_parameters())
    tensors = {name: full_tensor(tensor) for name, tensor in parts}
    expected = dict(train_state.optimizer_tensors(first, one.named_parameters()))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():  # as bytes: what travels as bfloat16 may be a NaN there
        assert tensor.shape == expected[name].shape, name
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)
        ), name
    third = make(model=two)[1]
    restore.load_optimizer(third, two.named_parameters(), expected)
    fewer, last = make(model=copy.deepcopy(one))
    restore.load_optimizer(last, fewer.named_parameters(), tensors)
    for model, optimizer in ((one, first), (two, third), (fewer, last)):
        step(model, optimizer, 2)
    assert same(one, two) and same(one, fewer)
    ranks.close()
    os._exit(0)


if __name__ == "__main__":
    for case in sys.argv[1].split(","):
        globals()[case](Path(sys.argv[2]))
