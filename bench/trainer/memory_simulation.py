"""An update on tensors without data: the trainer's own code, every storage counted. Used by bench/trainer/memory.py.

The model is built on the meta device and made in FakeTensorMode (on the CPU: autograd of fake CUDA
tensors fails in a CPU build of torch); FSDP2 shards it over a fake process group. `LiveBytes` adds
up the storages that are alive. The fused head is one operator to it, so its workspace is added by
`roofline.paw_memory`, a formula of the kernels' own benchmark. Attention is torch's varlen
operator, whose fake has the outputs of the kernel on the card. flash-adamw needs a GPU for its
kernels; here it is the tensors of its state.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

import paw.distributed.parallel as ranks_module
import paw.model.policy as model_module
from bench.kernels.roofline import paw_memory
from paw.algo import loss as losses
from paw.algo.samples import collate
from paw.config.sections import Config
from paw.distributed.parallel import DistributedRanks
from paw.distributed.ranks import Ranks
from paw.model.attention import decoder_layers, pick_attention
from paw.model.optim import make_optimizer
from paw.model.policy import DTYPES, Policy, weights_dtype
from paw.tools.evaluate.recorded import hf_config
from paw.tools.plan.plan import GIB
from paw.tools.plan.shapes import Shape
from paw.types import Sample

ROW = 2048
"""Tokens of a row, all of them targets but the first."""


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages alive that operators returned (or `track` was told of), and the largest sum so far.

    Seen from inside FakeTensorMode or over real tensors. FSDP frees by resizing, which no operator
    tells: patched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._head: set[int] = set()

    def track(self, tensor: Any) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:

            def gone(_: Any) -> None:
                self.live -= self._sizes.pop(key)[1]
                self._head.discard(key)  # the next storage may have the same address

            self._sizes[key] = (weakref.ref(storage, gone), 0)
        self._resized(storage)

    def reset_peak(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten.mul.Tensor and args[0].untyped_storage()._cdata in self._head:
            # Backward multiplies fake gradients by the loss's, which has no value; real ones not by
            # 1.
            return args[0]
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self.track(leaf)
        if func is torch.ops.paw_kernels.token_loss.default:
            hidden, weight = args[:2]
            self._head = {d.untyped_storage()._cdata for d in out[5:8]}
            if hidden.dtype == torch.bfloat16:
                memory = paw_memory(*hidden.shape, weight.shape[0])
                results = sum(d.untyped_storage().size() for d in out[5:8])
                self.peak = max(
                    self.peak, self.live - results + round((memory["peak"] + memory["total"]) * GIB)
                )
        return out

    def __enter__(self) -> "LiveBytes":
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._resized(storage)
            return result

        self._undo: Callable[[], None] = lambda: setattr(torch.UntypedStorage, "resize_", resize)
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._undo()
        super().__exit__(*exception)

    def _resized(self, storage: Any) -> None:
        ref, before = self._sizes[storage._cdata]
        self._sizes[storage._cdata] = ref, storage.size()
        self.live += storage.size() - before
        self.peak = max(self.peak, self.live)


class FakeRanks(DistributedRanks):
    """Rank 0 among `world` that are not there."""

    def __init__(self, world: int) -> None:
        self.rank, self.world_size, self._device = 0, world, torch.device("cpu")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)

    def close(self) -> None:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Peaks:
    """GiB: the largest sum in forward and backward passes, in the optimizer's step, and what is alive after it."""

    update: float
    step: float
    after: float


def make_policy(
    config: Config, shape: Shape, *, attention: str, head_backend: str = "torch"
) -> Policy:
    """The policy of a configuration, without data."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(hf_config(shape), dtype=weights_dtype(config))
        policy = Policy(
            lm,
            dtype=config.model.dtype,
            checkpointing=config.model.checkpointing,
            offload_activations=config.model.offload_activations,
            attention=attention,
            head_backend=head_backend,
        )
    policy.device = torch.device("cpu")
    return policy


def make_rows(tokens: int) -> list[Sample]:
    """Rows of ROW tokens, or one of what there is."""
    length = min(ROW, tokens)
    logp = [0.0] * (length - 1)
    known = {"sampled_logp": logp, "old_logp": logp, "ref_logp": logp}
    return [Sample(0, i, 0, [0], [1] * (length - 1), **known) for i in range(tokens // length)]


def run_updates(
    policy: Policy, config: Config, live: Any, *, place: Callable[[Tensor], Tensor]
) -> Peaks:
    """Two optimizer steps of two micro-batches each, as `train.optimize` makes them; peaks of the second.

    `live` has reset_peak(), peak and live, in bytes.
    """
    rows = make_rows(config.optim.micro_batch_tokens)
    kl_coef, entropy_coef = config.policy.kl_coef, config.policy.entropy_coef
    loss = losses.joint(losses.ppo, losses.ce, kl_coef=kl_coef, entropy_coef=entropy_coef)
    with unset_fake_temporarily():
        batch = collate(
            rows,
            [[i] for i in range(len(rows))],
            with_observation=False,
            device=torch.device("cpu"),
        )
        tokens = losses.token_batch(batch, rows, update_samples=len(rows), reference=kl_coef > 0)
    batch, tokens = _placed(batch, place), _placed(tokens, place)
    flash = config.optim.name == "flash-adamw" and policy.device.type != "cuda"
    optimizer: Any = (
        FlashState(policy, config) if flash else make_optimizer(policy.parameters(), config.optim)
    )
    if config.optim.name == "adamw":
        # As make_optimizer has it on a GPU.
        optimizer.param_groups[0].update(fused=True, foreach=False)
    update = step = 0
    for _ in range(2):
        live.reset_peak()
        for _ in range(2):
            out = losses.joint_loss(policy, batch, tokens, loss, temperature=1.0)
            out.loss.backward()
            del out
        update = live.peak
        live.reset_peak()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), config.optim.grad_clip)
        optimizer.step()
        step = live.peak
        optimizer.zero_grad(set_to_none=True)
    return Peaks(update / GIB, step / GIB, live.live / GIB)


def simulate(config: Config, shape: Shape, world: int = 1, *, attention: str = "varlen") -> Peaks:
    """Peaks of rank 0 among `world` fake ranks."""
    ranks = FakeRanks(world) if world > 1 else Ranks()
    policy = make_policy(config, shape, attention=attention)
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, _without_values():
        policy = policy.to_empty(device="cpu")
        policy.lm.tie_weights()  # which to_empty forgets
        ranks.shard(policy, policy.dtype, layers=decoder_layers(policy))
        with live:
            for parameter in policy.parameters():
                live.track(parameter)
            peaks = run_updates(policy, config, live, place=fake.from_tensor)
    ranks.close()
    return peaks


@contextmanager
def _without_values() -> Iterator[None]:
    """What needs values is done with real tensors (rows' bounds, the mesh of ranks) or left out (sending weights)."""

    def really(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **options)

        return call

    def scattered(tensor: Tensor, mesh: Any, placements: Any) -> Any:
        part = tensor.tensor_split(mesh.size())[0]
        return DTensor.from_local(part, mesh, placements, run_check=False)

    replaced = {
        (model_module, "pack_rows"): really(model_module.pack_rows),
        (ranks_module, "init_device_mesh"): really(ranks_module.init_device_mesh),
        (ranks_module, "distribute_tensor"): scattered,
    }
    before = {place: getattr(*place) for place in replaced}
    for place, function in replaced.items():
        setattr(*place, function)
    try:
        yield
    finally:
        for place, function in before.items():
            setattr(*place, function)


def _placed(item: Any, place: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass with its tensors replaced."""
    values = {field.name: getattr(item, field.name) for field in fields(item)}
    return replace(
        item, **{name: place(value) for name, value in values.items() if isinstance(value, Tensor)}
    )


class FlashState:
    """In place of flash-adamw, whose kernels need a GPU: the tensors of its state, without the arithmetic."""

    def __init__(self, policy: Policy, config: Config) -> None:
        from paw.model.flash import (
            in_groups,
        )  # imports Triton, whose kernels a test may want interpreted

        self._in_groups = in_groups
        self._parameters = list(policy.parameters())
        self._bits = torch.int16 if config.optim.master_bits == 32 else torch.int8
        self._offload = config.optim.offload
        self._state: list[list[Tensor]] = []

    def step(self) -> None:
        kept = bool(self._state)
        for parameter in self._parameters:
            p = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if (self._offload or not kept) and not self._in_groups(parameter):
                self._state.append([torch.empty_like(p, dtype=torch.float32) for _ in range(3)])
            elif self._offload or not kept:
                scales = [p.new_empty(-(-p.numel() // 32), dtype=torch.float16) for _ in range(2)]
                moments = [torch.empty_like(p, dtype=dtype) for dtype in (torch.int8, torch.uint8)]
                self._state.append([torch.empty_like(p, dtype=self._bits), *moments, *scales])
            if self._offload:
                self._state.clear()  # back in host memory

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class CudaPeaks:
    """The allocator's own count on the card, as `LiveBytes` gives it."""

    peak = property(lambda self: torch.cuda.max_memory_allocated())
    live = property(lambda self: torch.cuda.memory_allocated())

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def real_peak(config: Config, shape: Shape) -> float:
    """GiB at the peak of `run_updates` with data on the CPU, from the allocator's own events in torch's profiler."""
    policy = make_policy(config, shape, attention="sdpa").to_empty(device="cpu")
    _fill(policy)
    weights = sum(p.untyped_storage().size() for p in policy.parameters())
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run_updates(policy, config, LiveBytes(), place=lambda tensor: tensor)
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return (weights + peak) / GIB


def measured(config: Config, shape: Shape) -> Peaks:
    """Peaks of the real step on this card, attention and head by their fastest kernels."""
    device = torch.device("cuda")
    kernel = pick_attention("auto", device, DTYPES[config.model.dtype])
    policy = make_policy(config, shape, attention=kernel, head_backend="auto").to_empty(
        device=device
    )
    policy.device = device
    policy.lm.tie_weights()
    _fill(policy)
    return run_updates(policy, config, CudaPeaks(), place=lambda tensor: tensor.to(device))


def _fill(policy: Policy) -> None:
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for buffer in policy.buffers():
        buffer.fill_(0.1)  # rotary frequencies
