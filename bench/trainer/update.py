"""The trainer's own update, `paw.learn.optimize`, on given samples: seconds of each part and peak memory.

The learning rate is 0, so AdamW does all its work and every update sees the same weights. The
weights are random, in a shape known to `paw.tools.plan.shapes`, and nothing is downloaded.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from paw import learn
from paw.algo import loss as losses
from paw.algo.world_model import select
from paw.config.recipe import load
from paw.run import Run, open_run
from paw.tools.evaluate.recorded import random_model
from paw.types import Sample

KEYS = {
    "env.data": "none",
    "engine.type": "transformers",
    "policy.kl_coef": "0.0",
    "policy.entropy_coef": "0.0",
    "policy.old_logp": "engine",
    "model.checkpointing": "none",
    "optim.minibatch_samples": "1000",
    "optim.name": "adamw",
}
"""Changes to alfworld-grpo-paw: GRPO as in TRL, with one optimizer step per update."""


class Meter:
    """Measures an update: time, peak memory, and the seconds of each part named by `watch`.

    Memory counts from when the meter is made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: dict[str, float] = {}
        """Seconds of each part, excluding the parts inside it."""
        self.base_gib = 0.0
        if device.type == "cpu":
            self.base_gib = _process_gib("VmRSS")
        else:
            self.base_gib = torch.cuda.memory_allocated() / 2**30

    def watch(self, owner: Any, function_name: str, part: str) -> None:
        """Wraps the function of `owner` in a clock whose time counts as `part`."""
        original = getattr(owner, function_name)

        @wraps(original)
        def timed(*args: Any, **options: Any) -> Any:
            started = self._now()
            counted_before = sum(self.parts.values())
            try:
                return original(*args, **options)
            finally:
                seconds = self._now() - started
                seconds_inside = sum(self.parts.values()) - counted_before
                self.parts[part] = self.parts.get(part, 0.0) + seconds - seconds_inside

        setattr(owner, function_name, timed)

    def measure(self, step: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Adds what `step()` took to what it returns.

        seconds: wall time. cpu_s: processor time. peak_gib: peak above the memory when the meter
        was made. PART_s: seconds of each part.
        """
        self.parts.clear()
        self._reset_peak()
        started = self._now()
        cpu_start = time.process_time()
        measured = step()
        measured["seconds"] = self._now() - started
        measured["cpu_s"] = time.process_time() - cpu_start
        measured["peak_gib"] = self._peak_gib() - self.base_gib
        for part, seconds in self.parts.items():
            measured[f"{part}_s"] = seconds
        return measured

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            # Sets VmHWM back to VmRSS.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def _peak_gib(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return _process_gib("VmHWM")

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _process_gib(wanted_name: str) -> float:
    """A size in /proc/self/status, which gives KiB, as GiB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == wanted_name:
            return int(value.split()[0]) / 2**20
    raise KeyError(wanted_name)


def make_folder(model: str, folder: Path) -> str:
    """Writes random weights of a known shape to the folder, unless it already has a model."""
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        random_model(load("alfworld-grpo-paw", KEYS | {"model.path": model}), folder)
    return str(folder)


@contextmanager
def trainer(
    folder: str, *, dtype: str = "float32", threads: int = 2, keys: dict[str, str] | None = None
) -> Iterator[tuple[Run, Meter]]:
    """A run of the model to measure updates on, and a meter made before the model was loaded.

    `keys` are additional keys of the configuration.
    """
    torch.set_num_threads(threads)
    meter = Meter(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with ExitStack() as stack:
        overrides = KEYS | {
            "model.path": folder,
            "model.dtype": dtype,
            "optim.micro_batch_tokens": "4096",
            "run.threads": str(threads),
            "run.dir": stack.enter_context(tempfile.TemporaryDirectory()),
        }
        config = load("alfworld-grpo-paw", overrides | (keys or {}))
        # A recipe refuses a learning rate of 0.
        config = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": 0.0})})
        run = stack.enter_context(open_run(config))

        meter.watch(run.policy.lm.get_decoder(), "forward", "body")
        meter.watch(torch.Tensor, "backward", "body")
        for name in ("token_loss", "token_stats"):
            meter.watch(losses, name, "head")
        meter.watch(learn, "clip_grad_norm_", "optimizer")
        meter.watch(warm(run.optimizer), "step", "optimizer")
        yield run, meter


def warm(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes the optimizer allocate its state, by a step with zero gradients, and returns it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def score(run: Run, samples: Sequence[Sample]) -> None:
    """The log-prob pass. Sets the samples' log-probs, and their entropies for the selection."""
    scores = run.log_probs(run.policy, list(samples))
    for sample, (logp, entropy) in zip(samples, scores.values(), strict=True):
        sample.sampled_logp = sample.old_logp = logp
        sample.entropy = entropy


def choose(samples: Sequence[Sample], *, alpha: float = 0.75) -> None:
    """Sets the samples' world-model weights by PaW's selection, with lambda 1."""
    groups = len({sample.group for sample in samples})
    selection = select(samples, alpha=alpha, weight=1.0, reward_max=1.0, n_groups=groups)
    for sample, weight in zip(samples, selection.weights, strict=True):
        sample.wm_weight = weight


def update(run: Run, samples: Sequence[Sample], *, paw: bool) -> dict[str, float]:
    """One update, with or without the world model. Returns the loss and the gradient norm."""
    weighted = [replace(sample, wm_weight=sample.wm_weight * paw) for sample in samples]
    wm = run.config.wm.model_copy(update={"enabled": paw})
    config = run.config.model_copy(update={"wm": wm})
    # This metric marks the sampler as compared already, so the update does not compare it again.
    scored = replace(run, config=config, metrics={"health/sampler_mismatch": 0.0})
    metrics = learn.optimize(scored, weighted)
    return {"loss": metrics["policy/loss"], "grad_norm": metrics["optim/grad_norm"]}
