"""Child of test_flash.py: flash-adamw on emulated kernels. Usage: flash_worker.py FOLDER PORT.

One process and two ranks forked from it: importing all this takes seconds of a core.
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
    """Rows that 2 ranks share unevenly, norms of heads, a scalar head of one row, rows that are
    not whole groups."""
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


def step(model, optimizer, number):
    for position, parameter in enumerate(model.parameters()):
        gradient = torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(100 * number + position)
        ).bfloat16()
        parameter.grad = shard_like(parameter, rows_like(parameter, {"": gradient}, ""))
    optimizer.step()


def same(left, right):
    return all(
        torch.equal(full_tensor(ours.detach()), full_tensor(theirs.detach()))
        for ours, theirs in zip(left.parameters(), right.parameters(), strict=True)
    )


def resume(folder):
    """Training goes on bit for bit from files, offloaded or not; 24 bits are not loaded from 32."""
    finished = []
    for offloaded in (False, True):
        straight, optimizer = make(offload=offloaded)
        for number in range(2):
            step(straight, optimizer, number)
        model = {name: parameter.detach() for name, parameter in straight.named_parameters()}
        tensors = {
            "optimizer": train_state.optimizer_tensors(optimizer, straight.named_parameters()),
            "model": model,
        }
        path = checkpoint.save(folder, int(offloaded), tensors, {})
        assert (path / "optimizer.safetensors").stat().st_size < 6 * sum(
            parameter.numel() for parameter in model.values()
        )
        loaded = restore.load(path)[0]
        resumed, new_optimizer = make(offload=offloaded)
        with torch.no_grad():
            for name, parameter in resumed.named_parameters():
                parameter.copy_(loaded["model"][name])
        restore.load_optimizer(new_optimizer, resumed.named_parameters(), loaded["optimizer"])
        for number in range(2, 4):
            step(straight, optimizer, number)
            step(resumed, new_optimizer, number)
        assert same(resumed, straight)
        assert not same(resumed, make()[0])
        finished.append(resumed)
    assert same(*finished)
    smaller_model, smaller_optimizer = make(bits=24)
    try:
        restore.load_optimizer(
            smaller_optimizer, smaller_model.named_parameters(), loaded["optimizer"]
        )
    except checkpoint.CheckpointError as error:
        assert "optim.master_bits" in str(error)
    else:
        raise AssertionError("24 bits loaded from 32")


def bits():
    """With an lr of 1e-6 on weights of 0.02: the distance from fp32 AdamW, as a share of the way
    travelled."""
    from flashoptim.optimizers import reconstruct_fp32_param

    for master_bits in (24, 32):
        torch.manual_seed(0)
        start = torch.randn(64, 64) * 0.02
        drift = torch.randn(64, 64) * 0.3
        model = nn.Linear(64, 64, bias=False).bfloat16()
        exact_weight = nn.Parameter(start.bfloat16().float())
        model.weight.data = start.bfloat16()
        optimizer = make(model=model, lr=1e-6, bits=master_bits)[1]
        reference = torch.optim.AdamW(
            [exact_weight], lr=1e-6, betas=(0.9, 0.999), weight_decay=0.01
        )
        for _ in range(8):
            gradient = (torch.randn(64, 64) + drift).bfloat16()
            model.weight.grad = gradient
            exact_weight.grad = gradient.float()
            optimizer.step()
            reference.step()
        whole_weight = reconstruct_fp32_param(
            model.weight.detach(), optimizer.state[model.weight]["error_bits"]
        )
        travelled = exact_weight.detach() - start.bfloat16().float()
        share_off = float((whole_weight - exact_weight.detach()).norm() / travelled.norm())
        print(f"{master_bits} bits: {share_off:.2%} off")
        assert share_off < 0.02 if master_bits == 32 else share_off > 0.08


def plain():
    """Norms, biases and odd rows follow torch's AdamW on float32 copies, bit for bit."""
    model, optimizer = make()
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if not in_groups(parameter)
    ]
    assert [name for name, _ in named] == ["0.bias", "1.weight", "3.bias", "4.weight", "4.bias"]
    exact_copies = [nn.Parameter(parameter.detach().float()) for _, parameter in named]
    reference = torch.optim.AdamW(
        exact_copies, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01, foreach=False
    )
    for number in range(4):
        step(model, optimizer, number)
        for exact_copy, (_, parameter) in zip(exact_copies, named, strict=True):
            exact_copy.grad = parameter.grad.float()
        reference.step()
    for exact_copy, (_, parameter) in zip(exact_copies, named, strict=True):
        assert torch.equal(optimizer.state[parameter]["weight"], exact_copy.detach())
        assert torch.equal(parameter, exact_copy.detach().bfloat16())


def planned():
    """`paw plan` counts the bytes of the optimizer's state for a model with norms of heads."""
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
        state_bytes = 0
        for parameter in model.parameters():
            for name, tensor in optimizer.state_tensors(parameter).items():
                if name != "step":
                    state_bytes += tensor.nbytes
        keys = {
            "model": {"path": "here"},
            "optim": {"name": "flash-adamw", "master_bits": master_bits},
        }
        shape = from_config(settings.to_dict(), origin="here")
        planned_gib = Plan(validate(keys, origin="here"), shape, gpus=1, gpu_gib=80.0).phases[
            "update"
        ]["optimizer"]
        assert state_bytes == round(planned_gib * 2**30), (state_bytes, planned_gib * 2**30)


def shards(folder):
    """Two offloaded ranks give the bits of one process, and a checkpoint that any number of
    ranks can read."""
    group = join_ranks(torch.device("cpu"))
    plain, plain_optimizer = make()
    sharded = copy.deepcopy(plain)
    for layer in sharded:
        fully_shard(layer, mesh=init_device_mesh("cpu", (group.world_size,)))
    sharded, sharded_optimizer = make(model=sharded, offload=True)
    for number in range(2):
        step(plain, plain_optimizer, number)
        step(sharded, sharded_optimizer, number)
    assert same(plain, sharded)
    sharded_parts = train_state.optimizer_tensors(sharded_optimizer, sharded.named_parameters())
    tensors = {name: full_tensor(tensor) for name, tensor in sharded_parts}
    expected = dict(train_state.optimizer_tensors(plain_optimizer, plain.named_parameters()))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():  # as bytes: what travels as bfloat16 may be a NaN there
        assert tensor.shape == expected[name].shape, name
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)
        ), name
    resumed_optimizer = make(model=sharded)[1]
    restore.load_optimizer(resumed_optimizer, sharded.named_parameters(), expected)
    unsharded, unsharded_optimizer = make(model=copy.deepcopy(plain))
    restore.load_optimizer(unsharded_optimizer, unsharded.named_parameters(), tensors)
    for model, optimizer in (
        (plain, plain_optimizer),
        (sharded, resumed_optimizer),
        (unsharded, unsharded_optimizer),
    ):
        step(model, optimizer, 2)
    assert same(plain, sharded)
    assert same(plain, unsharded)
    group.close()


def fork_rank(rank, folder, port):
    """Forks one of two ranks that run `shards`; returns the id of its process."""
    process = os.fork()
    if process:
        return process
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    try:
        shards(folder)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # the interpreter's own way aborts now and then in a thread of gloo's


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ranks = [fork_rank(rank, folder, sys.argv[2]) for rank in range(2)]
    resume(folder)
    bits()
    plain()
    planned()
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    assert codes == [0, 0], f"exit codes of the ranks: {codes}"
