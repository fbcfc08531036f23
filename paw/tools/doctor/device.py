"""`paw doctor`: the devices that torch sees, and what training will use on them."""

import torch

from paw.config.sections import ModelConfig
from paw.model.attention import pick_attention
from paw.model.dtype import pick_dtype
from paw.model.fused import wanted_layers
from paw.tools.doctor.check import Check
from paw_kernels import best_backend, why_not_backend


def device_checks() -> list[Check]:
    """Check the devices, and what `auto` settings choose on them."""
    checks: list[Check] = []
    if torch.cuda.is_available():
        device = torch.device("cuda")
        backends = ("triton", "cuda")
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            gib = properties.total_memory / 2**30
            checks.append(Check("ok", f"GPU {i}: {properties.name}, {gib:.0f} GiB"))
    else:
        device = torch.device("cpu")
        backends = ("cpu",)
        threads = torch.get_num_threads()
        text = f"no GPU seen by torch; training runs on the CPU with {threads} threads"
        checks.append(Check("absent", text))

    dtype_name = pick_dtype(device)
    dtype = getattr(torch, dtype_name)
    why = ""
    if dtype_name != "bfloat16":
        why = " (this CPU has no instructions for bfloat16)"
    where = f"on {device.type}"
    checks += [
        Check("ok", f"model.dtype = 'auto' {where}: {dtype_name}{why}"),
        Check("ok", f"attention {where}: {pick_attention('auto', device, dtype)}"),
        Check("ok", f"decoder layers {where}: {_decoder_layers(device)}"),
        Check("ok", f"head backend {where}: {best_backend(device, dtype)}"),
    ]
    for backend in backends:
        reason = why_not_backend(backend, device, dtype)
        if reason:
            checks.append(Check("absent", f"head backend {backend}: {reason}"))
    return checks


def _decoder_layers(device: torch.device) -> str:
    """Say how a run with the defaults computes decoder layers."""
    wanted = wanted_layers(ModelConfig(path="quickstart"), device)
    if not wanted:
        return "eager"
    names = ", else ".join(map(str, wanted))
    return f"{names}, else eager: the first that passes its trial at the start of a run"
