"""flashoptim's AdamW (arXiv 2602.23349): bf16 parameters, extra bits and 8-bit moments.

Bytes per parameter: 2 for the weight, 2 for its gradient, 1 or 2 for the weight's extra bits (24 or
32 in all), 2 for the moments and 1/8 for their scales, one for every 32 values. With `offload`, the
state stays in pinned host memory and moves to the device during the step, one parameter at a time.

AdamW updates parameters whose rows are not a multiple of 32 values (norms, biases, ...) in float32,
with 12 bytes of state each, because a group of 32 would straddle two ranks. It does so for any
number of ranks.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import flashoptim
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from paw.distributed.ranks import local_tensor, shard_like
from paw.model.host import HostMemory

GROUP = 32
"""Number of values that share a scale."""


class FlashAdamW(flashoptim.FlashAdamW):
    """flashoptim's optimizer, with state that can be offloaded, and saved and loaded by name."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        master_bits: Literal[24, 32],
        offload: bool,
        **options: Any,
    ):
        trained: Any = parameters
        super().__init__(trained, master_weight_bits=master_bits, **options)
        self._offload = offload
        self._host = HostMemory()

    @torch.no_grad()
    def step_param(self, p: Any, group: dict[str, Any] | None = None) -> None:
        """Update one parameter. Offloaded state moves to the device and back."""
        host_tensors = {}
        if self._offload:
            for name, owner, key in parts(self.state[p]):
                host_tensors[name] = owner[key]
                owner[key] = host_tensors[name].to(p.device, non_blocking=True)
        super().step_param(p, group)
        if self._offload:
            self._move_to_host(p, host_tensors)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self._offload and self.param_groups[0]["params"][0].is_cuda:
            torch.cuda.synchronize()  # the state has reached the host
        return loss

    def state_tensors(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state tensors of one parameter by name, sharded like the parameter."""
        tensors = {"step": self.state[p]["step"]}
        for name, owner, key in parts(self.state[p]):
            tensor = _portable(owner[key]).view(-1, *_row(name, p))
            if isinstance(p, DTensor):
                tensor = shard_like(p, tensor)
            tensors[name] = tensor
        return tensors

    def load_tensors(self, p: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Load this rank's rows of the tensors that `state_tensors` returned.

        Raises KeyError if one is missing or has a different dtype.
        """
        self._ensure_state_initialized(p, self._find_group(p))
        for name, owner, key in parts(self.state[p]):
            current = owner[key]
            if tensors[name].dtype != _portable(current).dtype:
                raise KeyError(f"{name} as {current.dtype}")
            tensor = tensors[name].to(p.device, copy=True)
            owner[key] = tensor.view(current.dtype).view(current.shape)
        self.state[p]["step"] = tensors["step"].clone()
        if self._offload:
            self._move_to_host(p, {})

    def _ensure_state_initialized(self, p: Tensor, hparams: dict[str, Any]) -> None:
        if in_groups(p):
            return super()._ensure_state_initialized(p, hparams)
        if not self.state[p]:
            weight = local_tensor(p).detach().float()
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            self.state[p].update(step=torch.tensor(0), weight=weight, **moments)

    def _do_step(
        self, param: Tensor, grad: Tensor, errors: Any, param_state: dict[str, Any], hparams: Any
    ) -> None:
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

    def _move_to_host(self, p: Tensor, host_tensors: Mapping[str, Tensor]) -> None:
        """Copy the state of a parameter into its host tensors, which the first call allocates."""
        on_gpu = p.device.type == "cuda"
        for name, owner, key in parts(self.state[p]):
            host_tensor = host_tensors.get(name)
            if host_tensor is None:
                host_tensor = self._host.empty_like(owner[key], pin=on_gpu)
            owner[key] = host_tensor.copy_(owner[key], non_blocking=True)


def in_groups(p: Tensor) -> bool:
    """Whether a parameter's rows are multiples of GROUP values, so that no group straddles two
    ranks."""
    return p.ndim > 1 and math.prod(p.shape[1:]) % GROUP == 0


def parts(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (name, dict that holds it, key in that dict) of each tensor except the step count."""
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
    """Return the tensor. View int16 as bfloat16, because collective calls do not support int16."""
    if tensor.dtype == torch.int16:
        return tensor.view(torch.bfloat16)
    return tensor


def _row(name: str, p: Tensor) -> torch.Size | tuple[int]:
    """Return the shape of one row of `p` in the state tensor `name`."""
    if name.endswith("::scales"):
        return (math.prod(p.shape[1:]) // GROUP,)
    return p.shape[1:]
