"""`paw plan`: the first settings that fit a machine, as table, JSON or recipe; and the refusal of what cannot."""

import argparse
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.table import Column, Table

from paw.config import Config
from paw.errors import UserError
from paw.files import write_file, writing
from paw.keys import flatten
from paw.recipe import known_keys, layered, load, validate
from paw.tools.plan import GIB, MFU, USABLE, Plan
from paw.tools.shapes import Shape, shape_of

BASE = "alfworld-gigpo-paw"  # what `--model` alone plans for
Change = dict[str, Any]  # values by dotted key
FALLBACKS: tuple[Change, ...] = (
    {"model.checkpointing": "selective"},
    {"model.checkpointing": "full"},
    {"engine.sleep_level": 2},
    {"policy.offload_reference": True},
    {"optim.name": "flash-adamw"},
    {"optim.micro_batch_tokens": 8192},
    {"optim.offload": True},
    {"optim.micro_batch_tokens": 4096},
    {"model.offload_activations": True},
    {"policy.kl_coef": 0.0},
    {"lora.rank": 32, "optim.name": "adamw"},
)
"""Changes that save memory, each on top of those before it, cheapest in time first. The last two change what is
learnt: no reference model, and adapters instead of all weights."""
OFFLOADS = {"policy.offload_reference", "optim.offload", "model.offload_activations"}
"""Those that take host memory: each fallback is tried without one of them as well."""
SHARE = "engine.gpu_memory_utilization"
SHARES = [share / 20 for share in range(18, 1, -1)]  # tried where the configured one does not fit


def fit(config: Config, shape: Shape, *, pinned: Collection[str] = (), **machine: Any) -> list[tuple[str, Plan]]:
    """Add fallbacks until something fits; `pinned` keys stay as they are. `machine`: gpus, gpu_gib, ...

    What was tried: what was changed last, and the plan with all changes so far; the last one fits if any does.
    """

    def attempt(changes: Sequence[Change]) -> Plan:
        """With vLLM's share of the card as configured, or else the largest that fits beside the trainer."""
        first = Plan(changed(config, *changes), shape, **machine)
        if first.config.engine.type != "vllm" or SHARE in pinned or not first.reasons():
            return first
        usable, need = USABLE * first.gpu_gib, first.kv_needed()
        plans = (Plan(changed(config, *changes, {SHARE: share}), shape, **machine) for share in SHARES)
        return next((p for p in plans if sum(p.phases["rollout"].values()) <= usable and p.kv_tokens >= need), first)

    best, applied = attempt([]), []
    tried = [("as configured", best)]
    for change in FALLBACKS:
        if not best.reasons():
            break
        if set(pinned) & change.keys() or not _saves(best.config, change):
            continue
        more = [*applied, change]
        options = [more, *(_without(more, offload) for offload in more if offload.keys() <= OFFLOADS)]
        try:
            plans = [(attempt(changes), changes) for changes in options]
        except UserError:  # it needs a change to a pinned key
            continue
        best, applied = next((pair for pair in plans if not pair[0].reasons()), plans[0])
        tried.append((", ".join(f"{key} = {value}" for key, value in change.items()), best))
    for change in reversed(applied) if not best.reasons() else ():
        with suppress(UserError):  # one change may need another
            fewer = attempt(_without(applied, change))
            if not fewer.reasons() and fewer.step_s <= best.step_s:
                best, applied = fewer, _without(applied, change)
    if best is not tried[-1][1]:
        tried.append(("only what is needed", best))
    return tried


def _without(changes: list[Change], one: Change) -> list[Change]:
    return [change for change in changes if change is not one]


def _saves(config: Config, change: Change) -> bool:
    """Whether a fallback asks for less memory than the configuration takes anyway; its first key decides."""
    key, value = next(iter(change.items()))
    if key == "optim.micro_batch_tokens":
        return value < config.optim.micro_batch_tokens
    useless = {
        "model.checkpointing": config.model.checkpointing == "full",
        "engine.sleep_level": config.engine.type != "vllm",
        "policy.offload_reference": not config.policy.kl_coef,
        "policy.kl_coef": config.lora.rank > 0,
        "lora.rank": config.lora.rank > 0,
    }
    return get(config, key) != value and not useless.get(key, False)


def get(config: Config, key: str) -> Any:
    return attrgetter(key)(config)


def _tree(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def changed(config: Config, *changes: Change) -> Config:
    """The configuration with dotted keys replaced; what it left to defaults is still left to them."""
    flat = flatten(_tree(config))
    for change in changes:
        flat = layered(flat, change)
    return validate(flat, origin="paw plan")


def check_machine(config: Config, *, gpus: int, gpu_gib: float | None, on_host: int) -> None:
    """`check_fits` for this host, with `on_host` of the ranks; on CPUs (None) weights, gradients and moments must fit.

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
        return check_fits(config, shape, gpus=gpus, gpu_gib=gpu_gib, host_gib=host_gib, hosts=-(-gpus // on_host))
    parts = Plan(config, shape, gpus=gpus, gpu_gib=host_gib).phases["update"]
    need = on_host * sum(parts.get(part, 0.0) for part in ("weights", "critic", "gradients", "optimizer"))
    if need > host_gib:
        raise UserError(
            f"model.path = '{config.model.path}' does not fit: weights, gradients and optimizer take {need:.0f} GiB,"
            f" this machine has {host_gib:.0f} and no GPU is used; take a smaller model, or see `paw plan`"
        )


def check_fits(config: Config, shape: Shape, **machine: Any) -> None:
    """UserError for what cannot fit, even on the whole card with one sequence of KV cache: the plan's numbers, and the
    nearest settings that fit, to paste."""
    reasons = Plan(config, shape, **machine).reasons(usable=1.0, rows=1)
    if not reasons:
        return
    best = fit(config, shape, **machine)[-1][1]
    differing = [key for key in known_keys(best.config) if get(best.config, key) != get(config, key)]
    words = " ".join(f"--{key} {str(get(best.config, key)).lower()}" for key in differing)
    advice = "nothing tried fits; use more GPUs or a smaller model" if best.reasons() else f"what fits: {words}"
    raise UserError(f"model.path = '{config.model.path}' does not fit: {'; '.join(reasons)}; {advice} (see `paw plan`)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", nargs="?", help=f"name of a packaged recipe, or a .toml file (default: {BASE})")
    add("--model", metavar="NAME", help="model folder or Hugging Face name, in place of the recipe's")
    add("--gpus", default="1x80GB", metavar="NxGB", help="cards and their memory (default: %(default)s)")
    add("--host-gib", type=float, metavar="N", help="memory of a host (default: not limited)")
    add("--hosts", type=int, default=1, metavar="N", help="hosts the cards are in (default: 1)")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, metavar="FILE", help="write the recipe that fits")


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Print the plan; 0 where something fits, else 1."""
    if not options.recipe and not options.model:
        raise UserError("command line: give a recipe or --model NAME, such as --model Qwen/Qwen2.5-14B-Instruct")
    cards = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)(?:GB|GiB)?", options.gpus, re.IGNORECASE)
    if not cards:
        raise UserError(f"command line: --gpus '{options.gpus}': write it like 1x80GB or 8x80GB")
    if not 1 <= options.hosts <= int(cards[1]):
        raise UserError(f"command line: --hosts {options.hosts}: from 1 to the {cards[1]} cards of --gpus")
    given = overrides | ({"model.path": options.model} if options.model else {})
    config = load(options.recipe or BASE, given)
    if not options.recipe and "model.checkpointing" not in overrides:
        config = changed(config, {"model.checkpointing": "none"})
    machine = {"gpus": int(cards[1]), "gpu_gib": float(cards[2]), "host_gib": options.host_gib}
    tried = fit(config, shape_of(config.model.path), pinned=overrides.keys(), hosts=options.hosts, **machine)
    best = tried[-1][1]
    if options.out and not best.reasons():
        _write(options.out, best)
    if options.json:
        print(json.dumps(summary(best), indent=1))
    else:
        Console().print(*tables(tried))
        print(f"card by its memory; {MFU:.0%} of its peak in training, its bandwidth in decoding: a prediction")
    return 1 if best.reasons() else 0


def summary(found: Plan) -> dict[str, Any]:
    """What `--json` prints. Sizes in GiB."""

    def rounded(value: Any) -> Any:
        return {key: rounded(one) for key, one in value.items()} if isinstance(value, dict) else round(value, 2)

    return {
        "fits": not found.reasons(),
        "peak_gib": rounded(found.peak),
        "host_gib": rounded(found.host_total),
        "components": rounded(found.phases),
        "host": rounded(found.host),
        "step_s": round(found.step_s, 1),
        "seconds": rounded(found.seconds),
        "settings": {key: get(found.config, key) for key in sorted(set().union(*FALLBACKS))}
        | {SHARE: found.config.engine.memory_share},
        "reasons": found.reasons(),
    }


def tables(tried: list[tuple[str, Plan]]) -> Iterator[Table]:
    """What was tried, and the components of the last attempt by phase."""
    best, right = tried[-1][1], partial(Column, justify="right")
    title = f"{best.config.model.path} on {best.gpus} x {best.gpu_gib:g} GB"
    attempts = Table("settings", *map(right, ("GPU GiB", "host GiB", "update s")), "fits", title=title)
    for label, one in tried:
        verdict = "no" if one.reasons() else "yes"
        attempts.add_row(label, f"{one.peak:.1f}", f"{one.host_total:.1f}", f"{one.step_s:.0f}", verdict)
    yield attempts
    for title, phases in (("GiB of one GPU", best.phases), ("GiB of host memory", best.host)):
        by_phase = Table("component", *map(right, phases), title=title)
        for part in dict.fromkeys(part for parts in phases.values() for part in parts):
            by_phase.add_row(part, *(f"{parts[part]:.1f}" if part in parts else "" for parts in phases.values()))
        by_phase.add_row("sum", *(f"{sum(parts.values()):.1f}" for parts in phases.values()))
        yield by_phase


def _write(path: Path, found: Plan) -> None:
    """A recipe that `paw train` takes, with what was predicted in its first lines."""
    heading = (
        f"# Found by `paw plan` for {found.gpus} x {found.gpu_gib:g} GB. Predicted: {found.peak:.1f} GiB of a GPU,"
        f" {found.host_total:.1f} GiB of host memory, {found.step_s:.0f} s an update.\n"
    )
    with writing(path):
        write_file(path, heading + tomli_w.dumps(_tree(found.config)))
