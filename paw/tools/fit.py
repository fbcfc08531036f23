"""The first settings that fit a machine, servers among them; and the refusal of what cannot."""

import math
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from paw.config import Config
from paw.errors import UserError
from paw.keys import flatten
from paw.recipe import known_keys, layered, validate
from paw.rollouts.engines import find_engine
from paw.tools.plan import GIB, USABLE, Plan
from paw.tools.shapes import Shape, shape_of

BASE = "alfworld-gigpo-paw"  # what `--model` alone plans for
Change = dict[str, Any]  # values by dotted key
ADAPTERS: Change = {"lora.rank": 32, "optim.name": "adamw"}
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
    ADAPTERS,
)
"""Changes that save memory, each on top of those before it, cheapest in time first. The last two
change what is learnt: no reference model, and adapters instead of all weights."""
OFFLOADS = {"policy.offload_reference", "optim.offload", "model.offload_activations"}
"""Those that take host memory: each fallback is tried without one of them as well."""
ENGINE = ("engine.type", "engine.servers", "engine.tensor_parallel", "rollout.ahead")
SHARE = "engine.gpu_memory_utilization"
COARSE, FINE = 20, 100
"""Steps into which a card is divided to find a share that fits: twentieths, then hundredths."""
LARGEST_SHARE = 0.9


Tried = list[tuple[str, Plan]]
"""What was changed last, and the plan with all changes so far; the last one fits if any does."""


def fit(config: Config, shape: Shape, *, pinned: Collection[str] = (), **machine: Any) -> Tried:
    """Add fallbacks until something fits, and servers, or a share of the card found in finer steps,
    before what changes what is learnt; `pinned` keys stay as they are. `machine`: gpus, gpu_gib,
    ..."""
    tried = _with_fallbacks(config, shape, pinned=pinned, **machine)
    if _keeps_learning(tried, config):
        return tried
    for found in with_servers(config, shape, pinned=pinned, **machine):
        return [*tried, (words(found.config, config), found)]

    finer = _with_fallbacks(config, shape, steps=FINE, pinned=pinned, **machine)
    if _keeps_learning(finer, config) or (tried[-1][1].reasons() and not finer[-1][1].reasons()):
        return finer
    if tried[-1][1].reasons():
        tried += with_adapters(config, shape, pinned=pinned, **machine)
    return tried


def _keeps_learning(tried: Tried, config: Config) -> bool:
    """Whether the last one fits and learns what `config` would."""
    best = tried[-1][1]
    return not best.reasons() and _same_learning(best.config, config)


def with_adapters(
    config: Config, shape: Shape, *, pinned: Collection[str] = (), **machine: Any
) -> Tried:
    """Adapters, and fallbacks on top of them alone, if that fits: what the fallbacks before them
    add may not fit a host's memory. Empty if it does not fit, or needs a change to a pinned key."""
    if config.lora.rank or _contradicts(config, ADAPTERS, pinned):
        return []
    try:
        adapted = changed(config, ADAPTERS)
        best = _with_fallbacks(adapted, shape, steps=FINE, pinned={*pinned, *ADAPTERS}, **machine)[
            -1
        ][1]
    except UserError:  # what is trained takes no adapters
        return []
    return [] if best.reasons() else [(words(best.config, config), best)]


def _contradicts(config: Config, change: Change, pinned: Collection[str]) -> bool:
    """Whether a change gives a pinned key another value."""
    return any(key in pinned and get(config, key) != value for key, value in change.items())


def with_servers(
    config: Config, shape: Shape, *, ahead: int = 0, pinned: Collection[str] = (), **machine: Any
) -> list[Plan]:
    """The quickest plan that fits with a quarter, half or three quarters of the cards left to
    servers, if any does: of the smallest engine.tensor_parallel that holds the model, or twice or
    four times that."""
    gpus, on_host = machine["gpus"], -(-machine["gpus"] // machine.get("hosts", 1))
    replaceable = find_engine(config.engine.type).replaceable
    if gpus == 1 or not replaceable or set(pinned) & set(ENGINE):
        return []

    def split(count: int, size: int) -> Config:
        return changed(config, dict(zip(ENGINE, ("server", count, size, ahead), strict=True)))

    least = Plan(split(1, 1), shape, **machine).engine.least_cards
    sizes = [size for size in (least, 2 * least, 4 * least) if 0 < size <= on_host]
    splits = {
        (count, size) for size in sizes for part in (1, 2, 3) if (count := part * gpus // 4 // size)
    }
    plans = [
        _with_fallbacks(split(*one), shape, pinned={*pinned, *ENGINE}, **machine)[-1][1]
        for one in sorted(splits)
    ]
    kept = [plan for plan in plans if not plan.reasons() and _same_learning(plan.config, config)]
    return sorted(kept, key=lambda plan: plan.step_s)[:1]


def _same_learning(one: Config, other: Config) -> bool:
    return (one.policy.kl_coef, one.lora) == (other.policy.kl_coef, other.lora)


def words(config: Config, before: Config) -> str:
    """The options of the command line that make the one configuration of the other."""
    differing = [key for key in known_keys(config) if get(config, key) != get(before, key)]
    return " ".join(f"--{key} {str(get(config, key)).lower()}" for key in differing)


def _with_fallbacks(
    config: Config,
    shape: Shape,
    *,
    steps: int = COARSE,
    pinned: Collection[str] = (),
    **machine: Any,
) -> Tried:
    """Each fallback on top of those before it, until something fits; then without those that are not needed."""

    def attempt(changes: Sequence[Change]) -> Plan:
        """With vLLM's share of the card as configured, or else the largest that fits beside the trainer."""
        first = Plan(changed(config, *changes), shape, **machine)
        if not first.engine_type.sized_by_share or SHARE in pinned or not first.reasons():
            return first
        share = _largest_share(first, steps)
        if share <= 0:
            return first
        other = Plan(changed(first.config, {SHARE: share}), shape, **machine)
        fits = (
            sum(other.phases["rollout"].values()) <= USABLE * other.gpu_gib
            and other.kv_tokens >= other.kv_needed()
        )
        return other if fits else first

    best, applied = attempt([]), []
    tried = [("as configured", best)]
    for change in FALLBACKS:
        if not best.reasons():
            break
        if _contradicts(config, change, pinned) or not _saves(best.config, change):
            continue
        more = [*applied, change]
        options = [
            more,
            *(_without(more, offload) for offload in more if offload.keys() <= OFFLOADS),
        ]
        try:
            plans = [(attempt(changes), changes) for changes in options]
        except UserError:  # it does not apply, or needs a change to a pinned key
            continue
        best, applied = next((pair for pair in plans if not pair[0].reasons()), plans[0])
        tried.append((", ".join(f"{key} = {value}" for key, value in change.items()), best))
    for change in reversed(applied) if not best.reasons() else ():
        with suppress(UserError):  # one change may need another
            fewer = attempt(_without(applied, change))
            learns_more = not _same_learning(fewer.config, best.config)
            if not fewer.reasons() and (learns_more or fewer.step_s <= best.step_s):
                best, applied = fewer, _without(applied, change)
    if best is not tried[-1][1]:
        tried.append(("only what is needed", best))
    return tried


def _largest_share(plan: Plan, steps: int) -> float:
    """The largest share of the card, one of `steps`, that vLLM can have beside what the trainer keeps there."""
    rollout = plan.phases["rollout"]
    beside = sum(size for part, size in rollout.items() if part not in ("engine", "KV cache"))
    room = (USABLE * plan.gpu_gib - beside) / plan.gpu_gib
    return min(LARGEST_SHARE, math.floor(steps * room) / steps)


def _without(changes: list[Change], one: Change) -> list[Change]:
    return [change for change in changes if change is not one]


def _saves(config: Config, change: Change) -> bool:
    """Whether a fallback asks for less memory than the configuration takes anyway; its first key
    decides. One that does not apply is left to `changed`, which refuses it."""
    key, value = next(iter(change.items()))
    now = get(config, key)
    if key == "optim.micro_batch_tokens":
        return value < now
    adapted = config.lora.rank > 0 and key in (
        "policy.kl_coef",
        "lora.rank",
    )  # adapters need no reference model
    return now not in (value, "full") and not adapted


def get(config: Config, key: str) -> Any:
    return attrgetter(key)(config)


def as_set(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_unset=True, exclude_none=True)


def changed(config: Config, *changes: Change) -> Config:
    """The configuration with dotted keys replaced; what it left to defaults is still left to them."""
    flat = flatten(as_set(config))
    for change in changes:
        flat = layered(flat, change)
    return validate(flat, origin="paw plan")


def check_machine(config: Config, *, gpus: int, gpu_gib: float | None, on_host: int) -> None:
    """`check_fits` for this host, with `on_host` of `gpus` ranks; on CPUs (None) weights, gradients
    and moments must fit. Servers have other cards.

    A model made on the spot, or of a kind the plan does not know, passes.
    """
    if config.model.path == "quickstart":
        return
    try:
        shape = shape_of(config.model.path)
    except UserError:
        return
    host_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    machine: Any = {
        "gpus": gpus + config.engine.gpus,
        "host_gib": host_gib,
        "hosts": -(-gpus // on_host),
    }
    if gpu_gib is not None:
        return check_fits(config, shape, gpu_gib=gpu_gib, **machine)
    parts = Plan(config, shape, gpu_gib=host_gib, **machine).phases["update"]
    need = on_host * sum(
        parts.get(part, 0.0) for part in ("weights", "critic", "gradients", "optimizer")
    )
    if need > host_gib:
        raise UserError(
            f"model.path = '{config.model.path}' does not fit: weights, gradients and optimizer take {need:.0f} GiB,"
            f" this machine has {host_gib:.0f} and no GPU is used; take a smaller model, or see `paw plan`"
        )


def check_fits(config: Config, shape: Shape, **machine: Any) -> None:
    """UserError for what cannot fit, even on the whole card with one sequence of KV cache: the
    plan's numbers, and the nearest settings that fit, to paste."""
    reasons = Plan(config, shape, **machine).reasons(usable=1.0, rows=1)
    if not reasons:
        return
    # A run on several machines starts no servers.
    best = fit(config, shape, pinned=ENGINE if machine.get("hosts", 1) > 1 else (), **machine)[-1][
        1
    ]
    advice = "nothing tried fits; use more GPUs or a smaller model"
    if not best.reasons():
        advice = f"what fits: {words(best.config, config)}"
    raise UserError(
        f"model.path = '{config.model.path}' does not fit: {'; '.join(reasons)}; {advice} (see `paw plan`)"
    )
