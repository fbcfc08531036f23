"""`paw doctor`: the devices that torch sees, and what training will use on them."""

import torch

from paw.config.sections import ModelConfig
from paw.model.attention import pick_attention
from paw.model.dtype import pick_dtype
from paw.model.fused import wanted_layers
from paw_kernels import best_backend, why_not_backend


def print_device() -> None:
    """Print the devices, and what `auto` settings choose on them."""
    if torch.cuda.is_available():
        device = torch.device("cuda")
        backends = ("triton", "cuda")
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            print(
                f"  ok       GPU {i}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            )
    else:
        device = torch.device("cpu")
        backends = ("cpu",)
        print(
            "  -        no GPU seen by torch; training runs on the CPU with "
            f"{torch.get_num_threads()} threads"
        )

    dtype_name = pick_dtype(device)
    dtype = getattr(torch, dtype_name)
    why = ""
    if dtype_name != "bfloat16":
        why = " (this CPU has no instructions for bfloat16)"
    print(f"  ok       model.dtype = 'auto' on {device.type}: {dtype_name}{why}")
    print(f"  ok       attention on {device.type}: {pick_attention('auto', device, dtype)}")
    print(f"  ok       decoder layers on {device.type}: {_decoder_layers(device)}")
    print(f"  ok       head backend on {device.type}: {best_backend(device, dtype)}")
    for backend in backends:
        reason = why_not_backend(backend, device, dtype)
        if reason:
            print(f"  -        head backend {backend}: {reason}")


def _decoder_layers(device: torch.device) -> str:
    """Say how a run with the defaults computes decoder layers."""
    wanted = wanted_layers(ModelConfig(path="quickstart"), device)
    if not wanted:
        return "eager"
    names = ", else ".join(map(str, wanted))
    return f"{names}, else eager: what passes its trial at the start of a run"
