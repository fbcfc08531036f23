"""AdamW of flashoptim (arXiv 2602.23349): bf16 parameters, their further bits and 8-bit moments in its state.

Bytes a parameter: 2 the weight, 2 its gradient, 1 or 2 further bits of the weight (24 or 32 together), 2 the moments,
1/8 their scales, one for each 32 values. With `offload` the state lies in pinned host memory and comes to the device
for one parameter at a time, during the step.

Norms, biases and whatever else has rows that are not whole groups of 32 are stepped by AdamW in float32, which keeps
12 bytes of state for each: their groups would straddle ranks. The number of ranks makes no difference to this.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flashoptim
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from paw.model.host import HostMemory
from paw.model.ranks import local_tensor, shard_like

GROUP = 32
"""Values that share a scale."""


class FlashAdamW(flashoptim.FlashAdamW):
    """Its state tensors by name: `parts`; to save and load: `state_tensors`, `load_tensors`."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, master_bits: int, offload: bool, **options: Any):
        super().__init__(parameters, master_weight_bits=master_bits, **options)  # type: ignore[arg-type]
        self._offload = offload
        self._host = HostMemory()

    @torch.no_grad()
    def step_param(self, p: Any, group: dict[str, Any] | None = None) -> None:
        """The step of one parameter; its state comes and goes where it is offloaded."""
        homes = {}
        if self._offload:
            for name, owner, key in parts(self.state[p]):
                homes[name] = owner[key]
                owner[key] = homes[name].to(p.device, non_blocking=True)
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
            tensor = _portable(owner[key]).view(-1, *_row(name, p))
            tensors[name] = shard_like(p, tensor) if isinstance(p, DTensor) else tensor
        return tensors

    def load_tensors(self, p: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_tensors` gave: this rank's rows. KeyError where one is missing."""
        self._ensure_state_initialized(p, self._find_group(p))
        for name, owner, key in parts(self.state[p]):
            like = owner[key]
            if tensors[name].dtype != _portable(like).dtype:
                raise KeyError(f"{name} as {like.dtype}")
            tensor = tensors[name].to(p.device, copy=True)
            owner[key] = tensor.view(like.dtype).view(like.shape)
        self.state[p]["step"] = tensors["step"].clone()
        if self._offload:
            self._send_home(p, {})

    def _ensure_state_initialized(self, p: Tensor, hparams: dict[str, Any]) -> None:
        if in_groups(p):
            return super()._ensure_state_initialized(p, hparams)
        if not self.state[p]:
            weight = local_tensor(p).detach().float()
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            self.state[p].update(step=torch.tensor(0), weight=weight, **moments)

    def _do_step(self, param: Tensor, grad: Tensor, errors: Any, param_state: dict[str, Any], hparams: Any) -> None:
        if "weight" not in param_state:
            return super()._do_step(param, grad, errors, param_state, hparams)
        adamw(
            [param_state["weight"]],
            [grad.float()],
            [param_state["exp_avg"]],
            [param_state["exp_avg_sq"]],
            [],
            [param_state["step"]],
            foreach=False,
            amsgrad=False,
            beta1=hparams["betas"][0],
            beta2=hparams["betas"][1],
            lr=hparams["lr"],
            weight_decay=hparams["weight_decay"],
            eps=hparams["eps"],
            maximize=False,
        )
        param.copy_(param_state["weight"])

    def _send_home(self, p: Tensor, homes: Mapping[str, Tensor]) -> None:
        pin = p.device.type == "cuda"
        for name, owner, key in parts(self.state[p]):
            home = homes.get(name)
            if home is None:
                home = self._host.empty_like(owner[key], pin=pin)
            owner[key] = home.copy_(owner[key], non_blocking=True)


def in_groups(p: Tensor) -> bool:
    """Whether each row of a parameter is whole groups of values, so that no rank's rows break one."""
    return p.ndim > 1 and math.prod(p.shape[1:]) % GROUP == 0


def parts(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, the dict that holds it, key there) of each tensor of a parameter's state, but for the count of steps."""
    for key, value in list(state.items()):
        if isinstance(value, Tensor):
            if key != "step":
                yield key, state, key
        elif value.is_quantized():
            yield f"{key}::quantized", vars(value), "_quantized"
            yield f"{key}::scales", vars(value), "_scales"
        else:
            yield key, vars(value), "_data"


def _portable(tensor: Tensor) -> Tensor:
    """Collectives know no int16: its bits travel, and are saved, as bfloat16."""
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def _row(name: str, p: Tensor) -> torch.Size | tuple[int]:
    """What one row of `p` has in the part `name` of its state."""
    return (math.prod(p.shape[1:]) // GROUP,) if name.endswith("::scales") else p.shape[1:]
