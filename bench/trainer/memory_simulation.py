"""An update on tensors without data, by the trainer's own code, counting every storage. For bench/trainer/memory.py.

The model is built on the meta device and materialised in FakeTensorMode. It is on the CPU, because
autograd of fake CUDA tensors fails in a CPU build of torch. FSDP2 shards it over a fake process
group. `LiveBytes` adds up the storages that are alive. To it, the fused head is a single operator,
so the head's workspace is added by `roofline.paw_memory`, a formula of the kernel benchmark.
Attention is torch's varlen operator, whose fake version has the outputs of the kernel on the card.
The kernels of flash-adamw need a GPU; here only the tensors of its state exist.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
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
from paw.algo.batches import collate
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
"""Tokens of a row. All of them except the first are targets."""


class LiveBytes(TorchDispatchMode):
    """The bytes of live storages, and their peak.

    Counts storages that operators return and those passed to `track`. Works inside FakeTensorMode
    and on real tensors. FSDP frees a storage by resizing it, which is not an operator, so `resize_`
    is patched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, tuple[Any, int]] = {}
        """Address of a storage -> (weak reference to it, which must be kept; its bytes)."""
        self._head: set[int] = set()
        """Addresses of the gradients that the head's operator returned."""

    def track(self, tensor: Any) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._sizes:

            def on_free(_: Any) -> None:
                _, size = self._sizes.pop(address)
                self.live -= size
                self._head.discard(address)  # another storage may get the same address

            self._sizes[address] = (weakref.ref(storage, on_free), 0)
        self._update_size(storage)

    def reset_peak(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten.mul.Tensor and args[0].untyped_storage()._cdata in self._head:
            # Backward multiplies the head's gradients by the gradient of the loss unless that is 1,
            # as it is with data. A fake gradient has no value, so the product would be counted.
            return args[0]
        outputs = func(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            self.track(output)
        if func is torch.ops.paw_kernels.token_loss.default:
            hidden, weight = args[:2]
            self._count_head(hidden, weight, gradients=outputs[5:8])
        return outputs

    def _count_head(self, hidden: Tensor, weight: Tensor, gradients: Sequence[Tensor]) -> None:
        """Raises the peak to what the fused head takes while it runs, including its results."""
        storages = [gradient.untyped_storage() for gradient in gradients]
        self._head = {storage._cdata for storage in storages}
        if hidden.dtype != torch.bfloat16:
            return
        memory = paw_memory(*hidden.shape, weight.shape[0])
        head_bytes = round((memory["peak"] + memory["total"]) * GIB)
        result_bytes = sum(storage.size() for storage in storages)
        self.peak = max(self.peak, self.live - result_bytes + head_bytes)

    def __enter__(self) -> "LiveBytes":
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._update_size(storage)
            return result

        self._undo: Callable[[], None] = lambda: setattr(torch.UntypedStorage, "resize_", resize)
        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._undo()
        super().__exit__(*exception)

    def _update_size(self, storage: Any) -> None:
        reference, size_before = self._sizes[storage._cdata]
        self._sizes[storage._cdata] = (reference, storage.size())
        self.live += storage.size() - size_before
        self.peak = max(self.peak, self.live)


class FakeRanks(DistributedRanks):
    """Rank 0 of `world` ranks. The other ranks do not exist."""

    def __init__(self, world: int) -> None:
        self.rank = 0
        self.world_size = world
        self._device = torch.device("cpu")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)

    def close(self) -> None:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Peaks:
    """GiB of live tensors."""

    update: float
    """Peak of the forward and backward passes."""
    step: float
    """Peak of the optimizer's step."""
    after: float
    """GiB after the step."""


def make_policy(
    config: Config, shape: Shape, *, attention: str, head_backend: str = "torch"
) -> Policy:
    """The policy of a configuration, on the meta device."""
    with torch.device("meta"):
        language_model = AutoModelForCausalLM.from_config(
            hf_config(shape), dtype=weights_dtype(config)
        )
        policy = Policy(
            language_model,
            dtype=config.model.dtype,
            checkpointing=config.model.checkpointing,
            offload_activations=config.model.offload_activations,
            attention=attention,
            head_backend=head_backend,
        )
    policy.device = torch.device("cpu")
    return policy


def make_rows(tokens: int) -> list[Sample]:
    """Rows of ROW tokens, or a single row if there are fewer tokens."""
    length = min(ROW, tokens)
    response_ids = [1] * (length - 1)
    logp = [0.0] * len(response_ids)
    rows = []
    for number in range(tokens // length):
        row = Sample(
            group=0,
            trajectory=number,
            step=0,
            prompt_ids=[0],
            response_ids=response_ids,
            sampled_logp=logp,
            old_logp=logp,
            ref_logp=logp,
        )
        rows.append(row)
    return rows


def run_updates(
    policy: Policy, config: Config, live_bytes: Any, *, place: Callable[[Tensor], Tensor]
) -> Peaks:
    """Makes two optimizer steps of two micro-batches each, like the trainer. Returns the second's
    peaks.

    `live_bytes` has reset_peak(), peak and live, in bytes. `place` puts a tensor on the model's
    device.
    """
    batch, tokens = make_batch(config)
    batch = _with_tensors(batch, place)
    tokens = _with_tensors(tokens, place)
    loss_function = losses.joint(
        losses.ppo,
        losses.ce,
        kl_coef=config.policy.kl_coef,
        entropy_coef=config.policy.entropy_coef,
    )
    optimizer = make_step(policy, config)

    update_peak = 0
    step_peak = 0
    for _ in range(2):
        live_bytes.reset_peak()
        for _ in range(2):
            result = losses.joint_loss(policy, batch, tokens, loss_function, temperature=1.0)
            result.loss.backward()
            del result
        update_peak = live_bytes.peak

        live_bytes.reset_peak()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), config.optim.grad_clip)
        optimizer.step()
        step_peak = live_bytes.peak
        optimizer.zero_grad(set_to_none=True)
    return Peaks(update=update_peak / GIB, step=step_peak / GIB, after=live_bytes.live / GIB)


def make_batch(config: Config) -> tuple[Any, Any]:
    """A full micro-batch of the configuration, and what the loss reads of its tokens, with data."""
    rows = make_rows(config.optim.micro_batch_tokens)
    each_alone = [[number] for number in range(len(rows))]
    with unset_fake_temporarily():
        batch = collate(rows, each_alone, with_observation=False, device=torch.device("cpu"))
        tokens = losses.token_batch(
            batch, rows, update_samples=len(rows), reference=config.policy.kl_coef > 0
        )
    return batch, tokens


def make_step(policy: Policy, config: Config) -> Any:
    """The optimizer of the configuration as on a GPU, or a stand-in for flash-adamw on a CPU."""
    if config.optim.name == "flash-adamw" and policy.device.type != "cuda":
        return FlashState(policy, config)
    optimizer: Any = make_optimizer(policy.parameters(), config.optim)
    if config.optim.name == "adamw":
        # make_optimizer sets these on a GPU.
        optimizer.param_groups[0].update(fused=True, foreach=False)
    return optimizer


def simulate(config: Config, shape: Shape, world: int = 1, *, attention: str = "varlen") -> Peaks:
    """Peaks of rank 0 of `world` fake ranks."""
    ranks = FakeRanks(world) if world > 1 else Ranks()
    policy = make_policy(config, shape, attention=attention)
    live_bytes = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, _without_values():
        policy = policy.to_empty(device="cpu")
        policy.lm.tie_weights()  # which to_empty forgets
        ranks.shard(policy, policy.dtype, layers=decoder_layers(policy))
        with live_bytes:
            for parameter in policy.parameters():
                live_bytes.track(parameter)
            peaks = run_updates(policy, config, live_bytes, place=fake.from_tensor)
    ranks.close()
    return peaks


@contextmanager
def _without_values() -> Iterator[None]:
    """Computes with real tensors what needs values (the bounds of rows, the mesh of ranks), and
    leaves out sending weights."""

    def with_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **options)

        return call

    def first_part(tensor: Tensor, mesh: Any, placements: Any) -> Any:
        part = tensor.tensor_split(mesh.size())[0]
        return DTensor.from_local(part, mesh, placements, run_check=False)

    replaced = {
        (model_module, "pack_rows"): with_real_tensors(model_module.pack_rows),
        (ranks_module, "init_device_mesh"): with_real_tensors(ranks_module.init_device_mesh),
        (ranks_module, "distribute_tensor"): first_part,
    }
    originals = {(module, name): getattr(module, name) for module, name in replaced}
    for (module, name), function in replaced.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name), function in originals.items():
            setattr(module, name, function)


def _with_tensors(item: Any, place: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a dataclass, with `place` applied to each of its tensors."""
    placed = {}
    for field in fields(item):
        value = getattr(item, field.name)
        if isinstance(value, Tensor):
            placed[field.name] = place(value)
    return replace(item, **placed)


class FlashState:
    """Stands in for flash-adamw, whose kernels need a GPU. Has only the tensors of its state."""

    def __init__(self, policy: Policy, config: Config) -> None:
        # Imported late because it imports Triton, whose kernels a test may want interpreted.
        from paw.model.flash import in_groups

        self._in_groups = in_groups
        self._parameters = list(policy.parameters())
        self._correction_dtype = torch.int16 if config.optim.master_bits == 32 else torch.int8
        self._offload = config.optim.offload
        self._state: list[list[Tensor]] = []

    def step(self) -> None:
        if self._state:
            return
        for parameter in self._parameters:
            self._state.append(self._state_of(parameter))
            if self._offload:
                self._state.clear()  # back in host memory

    def _state_of(self, parameter: Tensor) -> list[Tensor]:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not self._in_groups(parameter):
            return [torch.empty_like(local, dtype=torch.float32) for _ in range(3)]
        groups = -(-local.numel() // 32)
        return [
            local.new_empty(groups, dtype=torch.float16),
            local.new_empty(groups, dtype=torch.float16),
            torch.empty_like(local, dtype=torch.int8),
            torch.empty_like(local, dtype=torch.uint8),
            torch.empty_like(local, dtype=self._correction_dtype),
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class CudaPeaks:
    """The allocator's own counts on the card, with the interface of `LiveBytes`."""

    peak = property(lambda self: torch.cuda.max_memory_allocated())
    live = property(lambda self: torch.cuda.memory_allocated())

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def real_peak(config: Config, shape: Shape) -> float:
    """Peak GiB of `run_updates` with data on the CPU, from the allocator's events in torch's
    profiler."""
    policy = make_policy(config, shape, attention="sdpa")
    policy = policy.to_empty(device="cpu")
    _fill(policy)
    weights = sum(parameter.untyped_storage().size() for parameter in policy.parameters())
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run_updates(policy, config, LiveBytes(), place=lambda tensor: tensor)
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())

    allocated = 0
    peak_bytes = 0
    for event in events:
        allocated += event.nbytes()
        peak_bytes = max(peak_bytes, allocated)
    return (weights + peak_bytes) / GIB


def measured(config: Config, shape: Shape) -> Peaks:
    """Peaks of the real step on this card, with the fastest kernels for attention and head."""
    device = torch.device("cuda")
    kernel = pick_attention("auto", device, DTYPES[config.model.dtype])
    policy = make_policy(config, shape, attention=kernel, head_backend="auto")
    policy = policy.to_empty(device=device)
    policy.device = device
    policy.lm.tie_weights()
    _fill(policy)
    return run_updates(policy, config, CudaPeaks(), place=lambda tensor: tensor.to(device))


def _fill(policy: Policy) -> None:
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for buffer in policy.buffers():
        buffer.fill_(0.1)  # rotary frequencies
