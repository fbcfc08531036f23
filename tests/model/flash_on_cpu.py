"""flashoptim's kernels in Triton's interpreter. To be imported first, in a process of its own."""

import os
import types

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter


class Libdevice:
    @staticmethod
    def pow(x, y):
        return tl.exp2(tl.log2(x) * y)

    @staticmethod
    def copysign(x, sign):
        return tl.where(sign < 0, -tl.abs(x), tl.abs(x))


def emulate():
    # Autotuning asks for a device: take the first configuration.
    triton.autotune = lambda configs, key, **_: triton.heuristics(
        {name: lambda _, value=value: value for name, value in configs[0].kwargs.items()}
    )
    _round_bf16_to_nearest()
    import flashoptim.optimizers as flash

    class Torch:
        cuda = types.SimpleNamespace(is_available=lambda: True)

        def __getattr__(self, name):
            return getattr(torch, name)

    flash.torch = Torch()
    flash.libdevice = Libdevice
    flash._get_sm_count = lambda *_: 1
    set_data = flash._MaybeQuantizedTensor.set_data

    def quantized(self, data):
        genuine = torch.Tensor.is_cuda
        torch.Tensor.is_cuda = property(lambda _: True)
        try:
            set_data(self, data)
        finally:
            torch.Tensor.is_cuda = genuine

    flash._MaybeQuantizedTensor.set_data = quantized


def _round_bf16_to_nearest():
    """The interpreter cuts bits off, which a GPU does not."""
    convert = interpreter._convert_float

    def rounded(values, source, target, mode):
        if (str(source), str(target)) != ("fp32", "bf16"):
            return convert(values, source, target, mode)
        tensor = torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.uint16)
        return tensor.numpy().reshape(values.shape)

    interpreter._convert_float = rounded


emulate()
