"""The trainer's own update, `paw.learn.optimize`, on samples of one's own: seconds of each part, peak memory.

The learning rate is 0: AdamW does all its work and every update sees the same weights. Weights are
random, of a shape that `paw.tools.shapes` knows; nothing is downloaded.
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from paw import learn
from paw.algo import loss as losses
from paw.algo.world_model import select
from paw.recipe import load
from paw.run import Run, open_run
from paw.tools.recorded import random_model
from paw.types import Sample

KEYS = {
    "env.data": "none", "engine.type": "transformers", "policy.kl_coef": "0.0", "policy.entropy_coef": "0.0",
    "policy.old_logp": "engine", "model.checkpointing": "none", "optim.minibatch_samples": "1000",
    "optim.name": "adamw",
}  # fmt: skip
"""Beside those of alfworld-grpo-paw: GRPO as TRL has it, one optimizer step an update."""


class Meter:
    """What one update took, and its parts: what `watch` names, each without the parts inside it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.parts = device, dict[str, float]()
        self.base_gib = (
            _status("VmRSS") if device.type == "cpu" else torch.cuda.memory_allocated() / 2**30
        )

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count each call of owner.name, which stays a function of the same arguments, as `part`."""
        inner = getattr(owner, name)

        @wraps(inner)
        def timed(*args: Any, **options: Any) -> Any:
            began, inside = self._now(), sum(self.parts.values())
            try:
                return inner(*args, **options)
            finally:
                own = self._now() - began - (sum(self.parts.values()) - inside)
                self.parts[part] = self.parts.get(part, 0.0) + own

        setattr(owner, name, timed)

    def measure(self, step: Callable[[], dict[str, float]]) -> dict[str, float]:
        """`step()` and what it took: seconds by the clock and of processors, GiB over `base_gib`, seconds of parts."""
        self.parts.clear()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text(
                "5", encoding="ascii"
            )  # VmHWM begins at VmRSS again
        began, cpu = self._now(), time.process_time()
        found = step()
        found |= {"seconds": self._now() - began, "cpu_s": time.process_time() - cpu}
        peak = (
            torch.cuda.max_memory_allocated() / 2**30
            if self.device.type == "cuda"
            else _status("VmHWM")
        )
        parts = {f"{part}_s": value for part, value in self.parts.items()}
        return found | {"peak_gib": peak - self.base_gib} | parts

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _status(key: str) -> float:
    """GiB of this process, by Linux's own account."""
    lines = dict(
        line.split(":")
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    )
    return int(lines[key].split()[0]) / 2**20


def make_folder(model: str, folder: Path) -> str:
    """Random weights of a known shape, in a folder where they are not there already."""
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        random_model(load("alfworld-grpo-paw", KEYS | {"model.path": model}), folder)
    return str(folder)


@contextmanager
def trainer(
    folder: str, *, dtype: str = "float32", threads: int = 2, keys: dict[str, str] | None = None
) -> Iterator[tuple[Run, Meter]]:
    """A run with that model that updates are measured on, and the meter, which began before the model was there."""
    torch.set_num_threads(threads)
    meter = Meter(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    keys = {"model.path": folder, "model.dtype": dtype, "optim.micro_batch_tokens": "4096"} | (
        keys or {}
    )
    with ExitStack() as stack:
        keys |= {
            "run.threads": str(threads),
            "run.dir": stack.enter_context(tempfile.TemporaryDirectory()),
        }
        config = load("alfworld-grpo-paw", KEYS | keys)
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
    """The optimizer, with its state."""
    for parameter in (
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def score(run: Run, samples: Sequence[Sample]) -> None:
    """The log-prob pass: what the sampler would have said, and the entropies for the selection."""
    for sample, (logp, entropy) in zip(
        samples, run.log_probs(run.policy, list(samples)), strict=True
    ):
        sample.sampled_logp = sample.old_logp = logp
        sample.entropy = entropy


def choose(samples: Sequence[Sample], *, alpha: float = 0.75) -> None:
    """World-model weights of PaW, lambda 1."""
    groups = len({sample.group for sample in samples})
    chosen = select(samples, alpha=alpha, weight=1.0, reward_max=1.0, n_groups=groups)
    for sample, weight in zip(samples, chosen.weights, strict=True):
        sample.wm_weight = weight


def update(run: Run, samples: Sequence[Sample], *, paw: bool) -> dict[str, float]:
    """One update, with the world model or without; loss and norm of the gradient."""
    own = [replace(sample, wm_weight=sample.wm_weight * paw) for sample in samples]
    config = run.config.model_copy(update={"wm": run.config.wm.model_copy(update={"enabled": paw})})
    found = learn.optimize(
        replace(run, config=config, metrics={"health/sampler_mismatch": 0.0}), own
    )
    return {"loss": found["policy/loss"], "grad_norm": found["optim/grad_norm"]}
