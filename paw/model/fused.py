"""Chooses the decoder layers' code: compiled, Liger's kernels or eager.

Between its matrix products an eager layer reads and writes every intermediate result. On a GPU that
takes at least a third of the time of the products. `model.compile` and `model.liger` fuse these
operations. The choice is first tried in its own process (`fused_trial`) with a time limit. Its
results and gradients must be those of eager layers, up to rounding.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paw.config.sections import Config, ModelConfig
from paw.distributed.ranks import Ranks
from paw.errors import UserError, clean
from paw.model.fused_trial import Request, Verdict
from paw.model.patches import import_liger
from paw.model.policy import weights_dtype

TRIAL_S = 300.0
"""Maximum seconds of a trial, including the import of torch and all compilation."""


@dataclass(frozen=True)
class Layers:
    """How decoder layers are computed."""

    compiled: bool = False
    liger: bool = False

    def __str__(self) -> str:
        if self.compiled and self.liger:
            return "compiled with Liger's kernels"
        if self.compiled:
            return "compiled"
        return "Liger's kernels" if self.liger else "eager"


EAGER = Layers()


def wanted_layers(config: ModelConfig, device: torch.device) -> list[Layers]:
    """Return what to try, the best first. If the list is empty, layers are eager.

    "auto" means compiled layers on a GPU, or Liger's kernels if these are refused.
    """
    if config.compile is True:
        return [Layers(compiled=True, liger=config.liger is True)]
    if config.liger is True:
        return [Layers(liger=True)]
    if config.compile is False or device.type != "cuda":
        return []
    compiled = [Layers(compiled=True)]
    if config.liger is False:
        return compiled
    return [*compiled, Layers(liger=True)]


def is_required(config: ModelConfig) -> bool:
    """Whether the configuration names what is wanted, so that nothing else may take its place."""
    return config.compile is True or config.liger is True


def choose_layers(
    config: Config, path: str, device: torch.device, *, attention: str, ranks: Ranks
) -> tuple[Layers, list[str]]:
    """Return (how decoder layers are computed, lines to report). All ranks must call it.

    If a way fails its trial on any machine, no rank uses it, and a line says why. Raises UserError
    if the configuration names that way.
    """
    faults: list[str] = []
    for layers in wanted_layers(config.model, device):
        fault = _fault_anywhere(layers, config, path, device, attention=attention, ranks=ranks)
        if not fault:
            return layers, _report(layers, faults)
        faults.append(f"{layers}: {fault}")
        if is_required(config.model):
            key = "model.compile" if layers.compiled else "model.liger"
            raise UserError(f"{key} = true: {fault}; use --{key} false")
    return EAGER, _report(EAGER, faults)


def _report(layers: Layers, faults: list[str]) -> list[str]:
    if not faults:
        return []
    return [
        f"decoder layers are {layers}, because others were refused: {'; '.join(faults)} "
        "(--model.compile false skips the trials)"
    ]


def _fault_anywhere(
    layers: Layers, config: Config, path: str, device: torch.device, *, attention: str, ranks: Ranks
) -> str:
    """Return the first fault on any machine, or "". One rank on each machine makes the trial."""
    fault = why_not(layers, config, device)
    if not fault and ranks.rank % ranks.on_host == 0:
        fault = fault_of(make_request(layers, config, path, device, attention))
    for rank, rank_fault in enumerate(ranks.gather(fault)):
        if rank_fault:
            return f"rank {rank}: {rank_fault}" if rank else rank_fault
    return ""


def why_not(layers: Layers, config: Config, device: torch.device) -> str:
    """Return why layers are refused without a trial; "" if no reason is known."""
    model = config.model
    if layers.compiled and model.compile == "auto" and model.checkpointing == "selective":
        return (
            "model.checkpointing = 'selective' chooses among matrix products, "
            "which compiled layers hide"
        )
    if layers.liger:
        try:
            import_liger(device)
        except UserError as error:
            return str(error)
    return ""


def make_request(
    layers: Layers, config: Config, path: str, device: torch.device, attention: str
) -> Request:
    name = str(device)
    if device.type == "cuda" and device.index is None:
        name = f"cuda:{torch.cuda.current_device()}"
    lora: dict[str, Any] | None = None
    if config.lora.rank:
        lora = {key: getattr(config.lora, key) for key in ("rank", "alpha", "targets")}
    return Request(
        path=str(path),
        device=name,
        dtype=config.model.dtype,
        weights=str(weights_dtype(config)).removeprefix("torch."),
        attention=attention,
        checkpointing=config.model.checkpointing,
        offload_activations=config.model.offload_activations,
        lora=lora,
        compiled=layers.compiled,
        liger=layers.liger,
        parent=os.getpid(),
    )


def fault_of(request: Request, limit_s: float = TRIAL_S) -> str:
    """Try fused layers in their own process. Returns what is wrong with them, or ""."""
    with tempfile.TemporaryDirectory(prefix="paw-trial-") as folder:
        result = Path(folder) / "verdict.json"
        output = Path(folder) / "output.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "paw.model.fused_trial"),
                    *(json.dumps(asdict(request)), str(result)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                exit_code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return f"no result of the trial in {limit_s:g} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it started
                process.wait()
        if exit_code != 0 or not result.exists():
            return f"the trial failed ({_last_words(exit_code, output)})"
        verdict = Verdict(**json.loads(result.read_text(encoding="utf-8")))
    return judged(verdict)


def judged(verdict: Verdict) -> str:
    """Return the fault that a verdict names; "" if the results are right."""
    if verdict.share <= 1:
        return ""
    return f"{verdict.worst} is off by {verdict.share:.3g} times what rounding explains"


def _last_words(code: int, output: Path) -> str:
    """Return the signal that ended a process, or the last line of its output."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    text = output.read_text(encoding="utf-8", errors="replace").strip()
    return clean(text.splitlines()[-1], 200) if text else f"exit code {code}"
