"""Run by test_head_fsdp.py under torchrun: gradients of the fused head under FSDP2 against one process with all rows.

Each rank takes half of the rows in two micro-batches and gradient accumulation; the last one reduces.
"""

import copy
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paw.algo import loss
from paw_kernels import token_loss, token_stats

V, D, T = 61, 16, 48
LOSS = loss.joint(loss.ppo, partial(loss.cmae, rho=0.02), entropy_coef=0.02)


class Agent(nn.Module):
    """An embedding, two blocks and a head, tied or not; the head is used inside forward, where FSDP gathers it."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)) for _ in range(2)
        )
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, target: torch.Tensor, rows: loss.TokenBatch) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        stats = token_stats(hidden, self.head.weight, target)
        both = (stats.logp.float() * rows.weight).sum() + (stats.entropy * rows.weight).sum()
        return token_loss(hidden, self.head.weight, target, LOSS, rows).loss + 0.1 * both


def problem() -> tuple[torch.Tensor, torch.Tensor, loss.TokenBatch]:
    g = torch.Generator().manual_seed(1)
    ids, target = torch.randint(V, (2, T), generator=g)
    observation = torch.rand(T, generator=g) < 0.5
    numbers = [torch.rand(T, generator=g) / T, torch.randn(T, generator=g), -4 + 0.3 * torch.randn(T, generator=g)]
    return ids, target, loss.TokenBatch(numbers[0], observation, numbers[1], numbers[2], numbers[2])


def take(rows: loss.TokenBatch, part: torch.Tensor) -> loss.TokenBatch:
    return loss.TokenBatch(**{name: value[part] for name, value in vars(rows).items() if value is not None})


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def check(*, tied: bool, checkpointed: bool, half: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = Agent(tied=tied)
    agent = Agent(tied=tied)
    agent.load_state_dict(alone.state_dict())
    mesh = init_device_mesh("cpu", (world,))
    options = {"mesh": mesh}
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # the rows' weights and log-probs stay float32
        )
    for block in agent.blocks:
        if checkpointed:
            checkpoint(block)
        fully_shard(block, **options)
    fully_shard(agent, **options)

    ids, target, rows = problem()
    alone(ids, target, rows).backward()
    parts = torch.arange(T).chunk(2 * world)[2 * rank : 2 * rank + 2]
    for i, part in enumerate(parts):
        agent.set_requires_gradient_sync(i == len(parts) - 1)
        # times world: FSDP averages over ranks, while the weights of the rows are those of the whole batch
        (world * agent(ids[part], target[part], take(rows, part))).backward()

    bar = [1e-5] * len(list(alone.parameters()))
    if half:  # twice the error that the same model in bf16 makes without FSDP
        low = copy.deepcopy(alone).bfloat16()
        low.zero_grad()
        low(ids, target, rows).backward()
        bar = [2 * error(p.grad, q.grad) + 1e-4 for p, q in zip(low.parameters(), alone.parameters(), strict=True)]
    for (name, sharded), want, most in zip(agent.named_parameters(), alone.parameters(), bar, strict=True):
        found = error(sharded.grad.full_tensor(), want.grad)
        assert found <= most, f"{name}: relative error {found:.1e}, at most {most:.1e}"


def main() -> None:
    dist.init_process_group("gloo")
    for options in ("plain", "tied", "checkpointed", "tied checkpointed", "half"):
        check(**{name: name in options.split() for name in ("tied", "checkpointed", "half")})
        if dist.get_rank() == 0:
            print(options, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # one interpreter exit in about twenty aborts in a thread of gloo's, with any model under FSDP2


if __name__ == "__main__":
    main()
