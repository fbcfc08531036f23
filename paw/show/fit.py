"""`paw plan`: the first settings that fit a machine, as table, JSON or recipe; and the refusal of what cannot."""

import argparse
import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.table import Table

from paw.config import Config, load, validate
from paw.errors import UserError
from paw.show.plan import GIB, MFU, USABLE, Plan, plan
from paw.show.shapes import Shape, shape_of

BASE = "alfworld-gigpo-paw"
"""What `--model` alone plans for."""
LADDER: tuple[dict[str, Any], ...] = (
    {"model.checkpointing": "selective"},
    {"model.checkpointing": "full"},
    {"rollout.sleep_level": 2},
    {"policy.offload_reference": True},
    {"optim.name": "flash-adamw"},
    {"optim.micro_batch_tokens": 8192},
    {"optim.offload": True},
    {"optim.micro_batch_tokens": 4096},
    {"model.offload_activations": True},
    {"policy.kl_coef": 0.0},
    {"lora.rank": 32, "optim.name": "adamw", "optim.offload": False},
)
"""Changes that save memory, each on top of those before it, cheapest in time first. The last two change what is
learnt: no reference model, and adapters instead of all weights."""
OFFLOADS = ("policy.offload_reference", "optim.offload", "model.offload_activations")
"""Those that take host memory: each rung is tried without one of them as well."""
STRENGTH = {"none": 0, "selective": 1, "full": 2}
SHARES = [share / 20 for share in range(18, 1, -1)]
"""Of the card for vLLM, tried where the configured share does not fit."""


@dataclass(frozen=True)
class Fit:
    rungs: list[tuple[str, Plan]]
    """What was changed last, and the plan with all changes so far; the first is the configuration itself."""

    @property
    def best(self) -> Plan:
        """The last one tried, which fits if any does."""
        return self.rungs[-1][1]

    @property
    def fits(self) -> bool:
        return not self.best.reasons()


def fit(config: Config, shape: Shape, *, pinned: Collection[str] = (), **machine: Any) -> Fit:
    """Climb the ladder until something fits; `pinned` keys stay as they are. `machine`: gpus, gpu_gib, host_gib."""

    def climb(changes: list[dict[str, Any]]) -> Plan:
        together = {key: value for change in changes for key, value in change.items()}
        return _with_engine_share(changed(config, together), shape, pinned, machine)

    rungs, applied = [("as configured", climb([]))], []
    for change in LADDER:
        if not rungs[-1][1].reasons():
            break
        if set(pinned) & change.keys() or not _saves(rungs[-1][1].config, change):
            continue
        more = [*applied, change]
        tried = [more, *(_without(more, key) for key in OFFLOADS if any(key in other for other in more))]
        try:
            plans = [(climb(changes), changes) for changes in tried]
        except UserError:  # it needs a change to a pinned key
            continue
        best, applied = next((pair for pair in plans if not pair[0].reasons()), plans[0])
        rungs.append((", ".join(f"{key} = {value}" for key, value in change.items()), best))
    best = rungs[-1][1]
    for change in reversed(applied) if not best.reasons() else ():
        with suppress(UserError):  # one change may need another
            fewer = climb([other for other in applied if other is not change])
            if not fewer.reasons() and fewer.step_s <= best.step_s:
                applied, best = [other for other in applied if other is not change], fewer
    if best is not rungs[-1][1]:
        rungs.append(("only what is needed", best))
    return Fit(rungs)


def _without(changes: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [change for change in changes if key not in change]


def _saves(config: Config, change: dict[str, Any]) -> bool:
    """Whether a rung asks for less memory than the configuration takes anyway."""
    for key, value in change.items():
        now = get(config, key)
        if key == "model.checkpointing":
            return STRENGTH[value] > STRENGTH[now]
        if key == "optim.micro_batch_tokens":
            return value < now
        if key == "rollout.sleep_level" and config.rollout.engine != "vllm":
            return False
        if key == "policy.offload_reference" and not config.policy.kl_coef:
            return False
        if key == "policy.kl_coef":
            return now > 0 and not config.lora.rank
        if key == "lora.rank":
            return not now
        if value != now:
            return True
    return False


def _with_engine_share(config: Config, shape: Shape, pinned: Collection[str], machine: dict[str, Any]) -> Plan:
    """The plan with vLLM's share of the card as configured, or else the largest that fits beside the trainer."""
    first = plan(config, shape, **machine)
    key = "rollout.gpu_memory_utilization"
    if config.rollout.engine != "vllm" or key in pinned or not first.reasons():
        return first
    plans = (plan(changed(config, {key: share}), shape, **machine) for share in SHARES)
    usable = USABLE * first.gpu_gib
    return next(
        (p for p in plans if sum(p.phases["rollout"].values()) <= usable and p.kv_tokens >= first.kv_needed()), first
    )


def get(config: Config, key: str) -> Any:
    section, leaf = key.split(".")
    return getattr(getattr(config, section), leaf)


def changed(config: Config, change: dict[str, Any]) -> Config:
    """The configuration with dotted keys replaced; what it left to defaults is still left to them."""
    tree = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    for key, value in change.items():
        section, leaf = key.split(".")
        tree.setdefault(section, {})[leaf] = value
    return validate(tree, origin="paw plan")


def differences(before: Config, after: Config) -> dict[str, Any]:
    """Dotted keys whose values differ, with those of `after`."""
    trees = before.model_dump(), after.model_dump()
    return {
        f"{section}.{leaf}": value
        for section, table in trees[1].items()
        for leaf, value in table.items()
        if value != trees[0][section][leaf]
    }


def check_machine(config: Config, *, gpus: int, gpu_gib: float | None) -> None:
    """`check_fits` for this machine; without a GPU (None) weights, gradients and moments against host memory.

    A model made on the spot, or of a kind the plan does not know, passes.
    """
    if config.model.path == "quickstart":
        return
    try:
        shape = shape_of(config.model.path)
    except UserError:
        return
    host_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    if gpu_gib is not None:
        return check_fits(config, shape, gpus=gpus, gpu_gib=gpu_gib, host_gib=host_gib)
    parts = plan(config, shape, gpus=gpus, gpu_gib=host_gib).phases["update"]
    need = gpus * sum(parts.get(part, 0.0) for part in ("weights", "gradients", "optimizer"))
    if need > host_gib:
        raise UserError(
            f"model.path = '{config.model.path}' does not fit: weights, gradients and optimizer take {need:.0f} GiB,"
            f" this machine has {host_gib:.0f} and no GPU is used; take a smaller model, or see `paw plan`"
        )


def check_fits(config: Config, shape: Shape, *, gpus: int, gpu_gib: float, host_gib: float | None) -> None:
    """Raise UserError for what cannot fit, with the plan's numbers and the nearest settings that do, to paste.

    A plan is an upper end: here the whole card counts as usable and one sequence of KV cache as enough.
    """
    machine: dict[str, Any] = {"gpus": gpus, "gpu_gib": gpu_gib, "host_gib": host_gib}
    reasons = plan(config, shape, **machine).reasons(usable=1.0, rows=1)
    if not reasons:
        return
    found = fit(config, shape, **machine)
    words = " ".join(f"--{key} {_word(value)}" for key, value in differences(config, found.best.config).items())
    advice = f"what fits: {words}" if found.fits else "nothing tried fits; use more GPUs or a smaller model"
    raise UserError(f"model.path = '{config.model.path}' does not fit: {'; '.join(reasons)}; {advice} (see `paw plan`)")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help=f"name of a packaged recipe, or a .toml file (default: {BASE})")
    parser.add_argument("--model", metavar="NAME", help="model folder or Hugging Face name, in place of the recipe's")
    parser.add_argument(
        "--gpus", default="1x80GB", metavar="NxGB", help="cards and their memory (default: %(default)s)"
    )
    parser.add_argument("--host-gib", type=float, metavar="N", help="host memory (default: not limited)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the recipe that fits")


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Print the plan; 0 where something fits, else 1."""
    if not options.recipe and not options.model:
        raise UserError("command line: give a recipe or --model NAME, such as --model Qwen/Qwen2.5-14B-Instruct")
    cards = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)(?:GB|GiB)?", options.gpus, re.IGNORECASE)
    if not cards:
        raise UserError(f"command line: --gpus '{options.gpus}': write it like 1x80GB or 8x80GB")
    given = overrides | ({"model.path": options.model} if options.model else {})
    config = load(options.recipe or BASE, given)
    if not options.recipe and "model.checkpointing" not in overrides:
        config = changed(config, {"model.checkpointing": "none"})
    machine = {"gpus": int(cards[1]), "gpu_gib": float(cards[2]), "host_gib": options.host_gib}
    found = fit(config, shape_of(config.model.path), pinned=overrides.keys(), **machine)
    if options.out and found.fits:
        _write(options.out, found.best)
    if options.json:
        print(json.dumps(summary(found.best), indent=1))
    else:
        for table in tables(found):
            Console().print(table)
        print(f"card by its memory; {MFU:.0%} of its peak in training, its bandwidth in decoding: a prediction")
    return 0 if found.fits else 1


def summary(found: Plan) -> dict[str, Any]:
    """What `--json` prints. Sizes in GiB."""

    def rounded(parts: dict[str, float]) -> dict[str, float]:
        return {name: round(value, 2) for name, value in parts.items()}

    return {
        "fits": not found.reasons(),
        "peak_gib": round(found.peak, 2),
        "host_gib": round(found.host_total, 2),
        "components": {phase: rounded(parts) for phase, parts in found.phases.items()},
        "host": {phase: rounded(parts) for phase, parts in found.host.items()},
        "step_s": round(found.step_s, 1),
        "seconds": rounded(found.seconds),
        "settings": {key: get(found.config, key) for key in sorted(_tunable())},
        "reasons": found.reasons(),
    }


def _tunable() -> set[str]:
    return {key for change in LADDER for key in change} | {"rollout.gpu_memory_utilization"}


def tables(found: Fit) -> Iterator[Table]:
    """The ladder as far as it was climbed, and the components of its last rung by phase."""
    best = found.best
    ladder = Table(title=f"{best.config.model.path} on {best.gpus} x {best.gpu_gib:g} GB")
    for column in ("settings", "GPU GiB", "host GiB", "update s", "fits"):
        ladder.add_column(column, justify="left" if column in ("settings", "fits") else "right")
    for label, rung in found.rungs:
        verdict = "no" if rung.reasons() else "yes"
        ladder.add_row(label, f"{rung.peak:.1f}", f"{rung.host_total:.1f}", f"{rung.step_s:.0f}", verdict)
    yield ladder
    for title, phases in (("GiB of one GPU", best.phases), ("GiB of host memory", best.host)):
        by_phase = Table(title=title)
        by_phase.add_column("component")
        for phase in phases:
            by_phase.add_column(phase, justify="right")
        for part in dict.fromkeys(part for parts in phases.values() for part in parts):
            by_phase.add_row(part, *(f"{parts[part]:.1f}" if part in parts else "" for parts in phases.values()))
        by_phase.add_row("sum", *(f"{sum(parts.values()):.1f}" for parts in phases.values()))
        yield by_phase


def _write(path: Path, found: Plan) -> None:
    """A recipe that `paw train` takes, with what was predicted in its first lines."""
    tree = found.config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    heading = (
        f"# Found by `paw plan` for {found.gpus} x {found.gpu_gib:g} GB. Predicted: {found.peak:.1f} GiB of a GPU,"
        f" {found.host_total:.1f} GiB of host memory, {found.step_s:.0f} s an update.\n"
    )
    try:
        path.write_text(heading + tomli_w.dumps(tree), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
