"""What passes between host and device: one copy per batch, and no reads while micro-batches run."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from test_update import make_config, start  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from paw.algo import loss as losses
from paw.algo.device import ALIGNMENT, pack, unpack
from paw.learn import Objective, PolicyUpdate
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.sync import push_weights
from paw.run import open_run
from paw.trainer import prepare

ATEN = torch.ops.aten
READING_OPERATORS = {
    ATEN._local_scalar_dense.default,
    ATEN.nonzero.default,
    ATEN.masked_select.default,
    ATEN.equal.default,
}
"""Operators whose result or shape the host needs."""
SCALE_READ = "aten._local_scalar_dense.default"
"""What the head's backward pass does."""
READING_METHODS = ("tolist", "numpy", "cpu")
"""Methods that do not need an operator to read a tensor in host memory, as in these tests."""


class DeviceReads(TorchDispatchMode):
    """Collects what would make the host wait if the tensors were on a GPU."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.reads = []
        self.pauses = 0
        self._monkeypatch = monkeypatch

    def __enter__(self):
        for name in READING_METHODS:
            self._monkeypatch.setattr(torch.Tensor, name, self._noting(name))
        return super().__enter__()

    def __exit__(self, *error):
        self._monkeypatch.undo()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func is ATEN.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in READING_OPERATORS or by_mask:
            self._note(str(func))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self):
        self.pauses += 1
        yield
        self.pauses -= 1

    def _noting(self, name):
        original = getattr(torch.Tensor, name)

        def method(tensor, *args, **kwargs):
            self._note(name)
            return original(tensor, *args, **kwargs)

        return method

    def _note(self, name):
        if not self.pauses:
            self.reads.append(name)


@pytest.mark.parametrize(
    "read",
    [
        float,
        lambda tensor: tensor.item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.numpy(),
        lambda tensor: bool(tensor.isnan().any()),
        lambda tensor: tensor[None][tensor[None] > 0],
    ],
)
def test_every_read_is_seen(read, monkeypatch):
    with DeviceReads(monkeypatch) as device_reads:
        read(torch.tensor(1.0) + 1.0)
    assert len(device_reads.reads) == 1


def test_an_optimizer_step_reads_from_the_device_once_and_its_micro_batches_never(
    start,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """The head is not counted. Its forward pass reads the number of tokens with a gradient, because
    the shapes of its matmuls depend on it. Its backward pass reads once whether its gradients have
    to be scaled."""
    options = {"policy_kl_coef": 0.01, "policy_tis_cap": 2.0, "optim_micro_batch_tokens": 1000}
    config = make_config(start, tmp_path, **options)
    with open_run(config) as run:
        push_weights(run.policy.lm, run.engine, version=0)
        rollouts = Rollouts(run.factory, run.engine, run.chat, config)
        samples = prepare(run, rollouts.training(0, 4)[0])
        rollouts.close()
        update = PolicyUpdate(run, Objective.from_config(config), update_samples=len(samples))

        passes = 0
        with DeviceReads(monkeypatch) as device_reads:
            original_token_loss = losses.token_loss

            def token_loss(*args, **kwargs):
                nonlocal passes
                passes += 1
                with device_reads.paused():
                    return original_token_loss(*args, **kwargs)

            monkeypatch.setattr(losses, "token_loss", token_loss)
            loss = update.accumulate_gradients(samples)
        assert passes > 2
        assert device_reads.reads == [SCALE_READ] * passes

        with DeviceReads(monkeypatch) as device_reads:
            update.optimizer_step(loss)
        assert device_reads.reads == ["tolist"]
        with DeviceReads(monkeypatch) as device_reads:
            metrics = update.metrics()
        assert device_reads.reads == ["tolist"]
        assert metrics["optim/grad_norm"] > 0
        assert metrics["policy/tis_capped_frac"] == 0.0


def test_arrays_of_any_dtype_come_out_of_a_buffer_as_they_went_in():
    arrays = [
        np.arange(5),
        np.array([True, False, True]),
        np.empty(0, np.float32),
        np.array([0.1, -0.0, np.nan], np.float32),
        np.arange(7, dtype=np.int32),
    ]
    tensors = [torch.from_numpy(array) for array in arrays]
    buffer, starts = pack(tensors, pin_memory=False)
    assert all(offset % ALIGNMENT == 0 for offset in starts)
    for array, tensor in zip(arrays, unpack(buffer, starts, like=tensors), strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert tensor.numpy().tobytes() == array.tobytes()
