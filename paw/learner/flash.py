"""AdamW of flashoptim (arXiv 2602.23349): bf16 parameters, their further bits and 8-bit moments in its state.

Bytes a parameter: 2 the weight, 2 its gradient, 1 or 2 further bits of the weight (24 or 32 together), 2 the moments,
1/8 their scales, one for each 32 values. With `offload` the state lies in pinned host memory and comes to the device
for one parameter at a time, during the step.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flashoptim
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from paw.errors import UserError
from paw.learner.host import HostMemory

GROUP = 32
"""Values that share a scale."""


class FlashAdamW(flashoptim.FlashAdamW):
    """Its state tensors by name: `parts`; whole ones to save and load: `state_tensors`, `load_tensors`.

    Raises UserError for shards whose scales would straddle ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, master_bits: int, offload: bool, **options: Any):
        super().__init__(parameters, master_weight_bits=master_bits, **options)  # type: ignore[arg-type]
        self._offload = offload
        self._host = HostMemory()
        for parameter in self.param_groups[0]["params"]:
            if isinstance(parameter, DTensor):
                local, world = parameter.to_local().numel(), parameter.device_mesh.size()
                if local % GROUP or local * world != parameter.numel():
                    raise UserError(
                        f"optim.name = 'flash-adamw': a parameter of shape {list(parameter.shape)} does not divide into"
                        f" {world} ranks by {GROUP} values; use another number of --gpus, or --optim.name adamw"
                    )

    @torch.no_grad()
    def step_param(self, p: Any, group: dict[str, Any] | None = None) -> None:
        """The step of one parameter; its state comes and goes where it is offloaded."""
        homes = {}
        if self._offload:
            for name, owner, key in parts(self.state[p]):
                homes[name] = _get(owner, key)
                _set(owner, key, homes[name].to(p.device, non_blocking=True))
        super().step_param(p, group)
        if self._offload:
            self._send_home(p, homes)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self._offload and self.param_groups[0]["params"][0].is_cuda:
            torch.cuda.synchronize()  # the state has reached the host
        return loss

    def state_tensors(self, p: Tensor) -> dict[str, Tensor]:
        """The state of one parameter, sharded as it is."""
        tensors = {"step": self.state[p]["step"]}
        for name, owner, key in parts(self.state[p]):
            tensor = _portable(_get(owner, key))
            tensors[name] = _as_shard(tensor.to(p.device), p) if isinstance(p, DTensor) else tensor
        return tensors

    def load_tensors(self, p: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Put back whole tensors that `state_tensors` gave, on any number of ranks. KeyError where one is missing."""
        self._ensure_state_initialized(p, self._find_group(p))
        for name, owner, key in parts(self.state[p]):
            dtype = _get(owner, key).dtype
            if tensors[name].dtype != _portable(_get(owner, key)).dtype:
                raise KeyError(f"{name} as {dtype}")
            tensor = tensors[name].to(p.device, copy=True)
            if isinstance(p, DTensor):
                tensor = distribute_tensor(tensor, p.device_mesh, _placements(tensor, p)).to_local()
            tensor = tensor.view(dtype)
            _set(owner, key, tensor)
        self.state[p]["step"] = tensors["step"].clone()
        if self._offload:
            self._send_home(p, {})

    def _send_home(self, p: Tensor, homes: Mapping[str, Tensor]) -> None:
        pin = p.device.type == "cuda"
        for name, owner, key in parts(self.state[p]):
            tensor = _get(owner, key)
            home = homes.get(name)
            if home is None:
                home = self._host.empty_like(tensor, pin=pin)
            _set(owner, key, home.copy_(tensor, non_blocking=True))


def parts(state: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(name, owner, attribute or key) of each tensor of a parameter's state, but for the count of steps."""
    for key, value in list(state.items()):
        if isinstance(value, Tensor):
            if key != "step":
                yield key, state, key
        elif value.is_quantized():
            yield f"{key}::quantized", value, "_quantized"
            yield f"{key}::scales", value, "_scales"
        else:
            yield key, value, "_data"


def _get(owner: Any, key: str) -> Tensor:
    return owner[key] if isinstance(owner, dict) else getattr(owner, key)


def _set(owner: Any, key: str, tensor: Tensor) -> None:
    if isinstance(owner, dict):
        owner[key] = tensor
    else:
        setattr(owner, key, tensor)


def _portable(tensor: Tensor) -> Tensor:
    """Collectives know no int16: its bits travel, and are saved, as bfloat16."""
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def _as_shard(tensor: Tensor, p: DTensor) -> DTensor:
    shape = p.shape if tensor.shape == p.to_local().shape else torch.Size([len(tensor) * p.device_mesh.size()])
    stride = p.stride() if shape == p.shape else (1,)
    mesh, placements = p.device_mesh, p.placements if shape == p.shape else [Shard(0)]
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)


def _placements(tensor: Tensor, p: DTensor) -> Any:
    return p.placements if tensor.shape == p.shape else [Shard(0)]
