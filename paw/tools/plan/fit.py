"""Searches for settings that fit a machine, and refuses a configuration that cannot fit."""

import math
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from paw.config import plugins
from paw.config.recipe import as_set, known_keys, layered, validate
from paw.config.sections import Config
from paw.errors import UserError
from paw.rollouts.engines import find_engine
from paw.tools.plan.plan import GIB, USABLE, Plan
from paw.tools.plan.shapes import Shape, shape_of

BASE = "alfworld-gigpo-paw"
"""The recipe that `paw plan --model` uses if none is given."""
Change = dict[str, Any]
"""Values, by dotted key."""
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
"""Changes that save memory, each on top of those before it, in order of their cost in time.

The last two change what is learnt: no reference model, and adapters instead of all weights.
"""
OFFLOADS = {"policy.offload_reference", "optim.offload", "model.offload_activations"}
"""Fallbacks that take host memory. Each further fallback is also tried without one of them."""
ENGINE = ("engine.type", "engine.servers", "engine.tensor_parallel", "rollout.ahead")
"""Keys that put the engines on servers, in the order of `_with_server_keys`."""
SHARE = "engine.gpu_memory_utilization"
SEQUENCES = "engine.max_num_seqs"
COARSE = 20
"""Steps into which a card is divided to find a share that fits."""
FINE = 100
"""The same, used if nothing fits with coarse steps."""
LARGEST_SHARE = 0.9
"""Largest share of a card that the engine may get."""
Tried = list[tuple[str, Plan]]
"""The last change, and the plan with all changes so far. If any plan fits, the last one does."""


@dataclass(frozen=True)
class Machine:
    """The cards to plan for."""

    gpus: int
    """All of them."""
    gpu_gib: float
    """Memory of each."""
    host_gib: float | None = None
    """Memory of a host; None if it is not limited."""
    hosts: int = 1

    def plan(self, config: Config, shape: Shape) -> Plan:
        """Return the plan of a configuration for these cards."""
        return Plan(
            config,
            shape,
            gpus=self.gpus,
            gpu_gib=self.gpu_gib,
            host_gib=self.host_gib,
            hosts=self.hosts,
        )


def fit(config: Config, shape: Shape, machine: Machine, *, pinned: Collection[str] = ()) -> Tried:
    """Try settings until some fit. `pinned` keys stay as they are.

    It first tries fallbacks that keep what is learnt, then servers, then a finer share of the card
    for the engine. Last come changes to what is learnt.
    """
    tried = _with_fallbacks(config, shape, machine, pinned=pinned)
    if _keeps_learning(tried, config):
        return tried
    quickest = with_servers(config, shape, machine, pinned=pinned)
    if quickest:
        return [*tried, (words(quickest.config, config), quickest)]

    finer = _with_fallbacks(config, shape, machine, steps=FINE, pinned=pinned)
    only_finer_fits = bool(tried[-1][1].reasons()) and not finer[-1][1].reasons()
    if _keeps_learning(finer, config) or only_finer_fits:
        return finer
    if tried[-1][1].reasons():
        tried += with_adapters(config, shape, machine, pinned=pinned)
    return tried


def _keeps_learning(tried: Tried, config: Config) -> bool:
    """Whether the last plan fits and learns what `config` would."""
    best = tried[-1][1]
    return not best.reasons() and _same_learning(best.config, config)


def with_adapters(
    config: Config, shape: Shape, machine: Machine, *, pinned: Collection[str] = ()
) -> Tried:
    """Return the plan with adapters and only those fallbacks that it still needs, if that fits.

    The fallbacks that were tried without adapters are dropped, because they may not fit a host's
    memory. Returns [] if nothing fits, or if a pinned key would have to change.
    """
    if config.lora.rank or _contradicts(config, ADAPTERS, pinned):
        return []
    try:
        adapted = changed(config, ADAPTERS)
        tried = _with_fallbacks(adapted, shape, machine, steps=FINE, pinned={*pinned, *ADAPTERS})
    except UserError:  # this training does not support adapters
        return []
    best = tried[-1][1]
    return [] if best.reasons() else [(words(best.config, config), best)]


def _contradicts(config: Config, change: Change, pinned: Collection[str]) -> bool:
    """Whether a change gives a pinned key a different value."""
    return any(key in pinned and get(config, key) != value for key, value in change.items())


def with_servers(
    config: Config,
    shape: Shape,
    machine: Machine,
    *,
    ahead: int = 0,
    pinned: Collection[str] = (),
) -> Plan | None:
    """Return the quickest plan that fits with servers on some of the cards; None if none fits.

    Servers get a quarter, half or three quarters of the cards. They use the smallest
    engine.tensor_parallel that holds the model, or two or four times that.
    """
    replaceable = find_engine(config.engine.type).replaceable
    if machine.gpus == 1 or not replaceable or set(pinned) & set(ENGINE):
        return None

    one_server = machine.plan(_with_server_keys(config, 1, 1, ahead), shape)
    cards_of_host = -(-machine.gpus // machine.hosts)
    least = one_server.engine.least_cards
    splits = set()
    for cards_each in (least, 2 * least, 4 * least):
        if not 0 < cards_each <= cards_of_host:
            continue
        for quarters in (1, 2, 3):
            server_count = quarters * machine.gpus // 4 // cards_each
            if server_count:
                splits.add((server_count, cards_each))

    fitting = []
    for server_count, cards_each in sorted(splits):
        with_keys = _with_server_keys(config, server_count, cards_each, ahead)
        tried = _with_fallbacks(with_keys, shape, machine, pinned={*pinned, *ENGINE})
        if _keeps_learning(tried, config):
            fitting.append(tried[-1][1])
    return min(fitting, key=lambda plan: plan.step_s, default=None)


def _with_server_keys(config: Config, count: int, size: int, ahead: int) -> Config:
    """Return the configuration with `count` servers of `size` cards."""
    values = (_type_of_servers(), count, size, ahead)
    return changed(config, dict(zip(ENGINE, values, strict=True)))


def _type_of_servers() -> str:
    """Return the `engine.type` of the built-in engine that starts servers."""
    for name in plugins.BUILT_IN["engines"]:
        if find_engine(name).starts_servers:
            return name
    raise ValueError("no built-in engine starts servers")


def _same_learning(one: Config, other: Config) -> bool:
    return one.policy.kl_coef == other.policy.kl_coef and one.lora == other.lora


def words(config: Config, before: Config) -> str:
    """Return the command-line options that turn `before` into `config`."""
    chosen_keys = as_set(config).keys() | as_set(before).keys()
    keys_before = known_keys(before)
    differing = []
    for key, state in known_keys(config).items():
        value_before = get(before, key) if key in keys_before else state.field.default
        if key in chosen_keys and get(config, key) != value_before:
            differing.append(key)
    return " ".join(f"--{key} {str(get(config, key)).lower()}" for key in differing)


def _with_fallbacks(
    config: Config,
    shape: Shape,
    machine: Machine,
    *,
    steps: int = COARSE,
    pinned: Collection[str] = (),
) -> Tried:
    """Add fallbacks, each on top of those before, until something fits. Drops those not needed."""

    def attempt(changes: Sequence[Change]) -> Plan:
        plan = machine.plan(changed(config, *changes), shape)
        if SHARE not in pinned:
            plan = _with_largest_share(plan, machine, steps)
        return with_sequences(plan, machine, pinned=pinned)

    best = attempt([])
    applied: list[Change] = []
    tried = [("as configured", best)]
    for change in FALLBACKS:
        if not best.reasons():
            break
        if _contradicts(config, change, pinned) or not _saves(best.config, change):
            continue
        try:
            best, applied = _first_that_fits(attempt, [*applied, change])
        except UserError:  # the change does not apply, or needs another value of a pinned key
            continue
        label = ", ".join(f"{key} = {value}" for key, value in change.items())
        tried.append((label, best))

    if not best.reasons():
        best = _drop_unneeded(attempt, best, applied)
    if best is not tried[-1][1]:
        tried.append(("only what is needed", best))
    return tried


Attempt = Callable[[Sequence[Change]], Plan]
"""The plan with some changes. Raises UserError if they cannot be made."""


def _first_that_fits(attempt: Attempt, changes: list[Change]) -> tuple[Plan, list[Change]]:
    """Return (a plan that fits, its changes): with all changes, or without one that takes host
    memory.

    Returns the first of these that fits. If none fits, returns the one with all changes.
    """
    options = [changes]
    for change in changes:
        if change.keys() <= OFFLOADS:
            options.append(_without(changes, change))
    plans = [(attempt(option), option) for option in options]
    for plan, option in plans:
        if not plan.reasons():
            return plan, option
    return plans[0]


def _drop_unneeded(attempt: Attempt, best: Plan, applied: list[Change]) -> Plan:
    """Return the plan without changes that it does not need to fit.

    A change is kept if the plan would be slower without it, unless that plan learns more.
    """
    for change in reversed(applied):
        fewer = _without(applied, change)
        with suppress(UserError):  # one change may need another
            plan = attempt(fewer)
            learns_more = not _same_learning(plan.config, best.config)
            if not plan.reasons() and (learns_more or plan.step_s <= best.step_s):
                best = plan
                applied = fewer
    return best


def _with_largest_share(plan: Plan, machine: Machine, steps: int) -> Plan:
    """Return the plan with the largest share of the card that the engine can have beside the
    trainer.

    The share is a multiple of 1 / `steps`. Returns the plan itself if it already fits, or if no
    share fits.
    """
    if not plan.engine_type.sized_by_share or not plan.reasons():
        return plan
    trainer_gib = 0
    for part, size in plan.phases["rollout"].items():
        if part not in ("engine", "KV cache"):
            trainer_gib += size
    free_share = (USABLE * plan.gpu_gib - trainer_gib) / plan.gpu_gib
    share = min(LARGEST_SHARE, math.floor(steps * free_share) / steps)
    if share <= 0:
        return plan
    shared = machine.plan(changed(plan.config, {SHARE: share}), plan.shape)
    fits_card = sum(shared.phases["rollout"].values()) <= USABLE * shared.gpu_gib
    fits_cache = shared.kv_tokens >= shared.kv_needed()
    if fits_card and fits_cache:
        return shared
    return plan


def with_sequences(plan: Plan, machine: Machine, *, pinned: Collection[str] = ()) -> Plan:
    """Return the plan with as many sequences decoded together as are useful.

    Returns the plan itself if its engine has no such key, or if the key is pinned.
    """
    if SEQUENCES in pinned or get(plan.config, SEQUENCES) in (None, plan.useful_sequences):
        return plan
    with suppress(UserError):  # servers that already run have their own number
        config = changed(plan.config, {SEQUENCES: plan.useful_sequences})
        return machine.plan(config, plan.shape)
    return plan


def _without(changes: list[Change], dropped: Change) -> list[Change]:
    return [change for change in changes if change is not dropped]


def _saves(config: Config, change: Change) -> bool:
    """Whether a fallback asks for less memory than the configuration takes anyway.

    The fallback's first key decides. A fallback that does not apply is left to `changed`, which
    refuses it.
    """
    key, value = next(iter(change.items()))
    present = get(config, key)
    if key == "optim.micro_batch_tokens":
        return value < present
    if config.lora.rank > 0 and key in ("policy.kl_coef", "lora.rank"):
        return False  # adapters need no reference model
    return present not in (value, "full")


def get(config: Config, key: str) -> Any:
    """Return the value of a dotted key; None if the configuration's plug-ins do not have it."""
    try:
        return attrgetter(key)(config)
    except AttributeError:
        return None


def changed(config: Config, *changes: Change) -> Config:
    """Return the configuration with dotted keys replaced. Defaults that were not set stay unset."""
    flat = as_set(config)
    for change in changes:
        flat = layered(flat, change)
    return validate(flat, origin="paw plan")


def check_machine(config: Config, *, gpus: int, gpu_gib: float | None, on_host: int) -> None:
    """Do `check_fits` for this host, which has `on_host` of `gpus` ranks. Servers use other cards.

    On CPUs (`gpu_gib` is None), weights, gradients and moments must fit. The quickstart's model
    passes, and so does a kind of model that the plan does not know.
    """
    if config.model.path == "quickstart":
        return
    try:
        shape = shape_of(config.model.path)
    except UserError:
        return
    host_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    machine = Machine(
        gpus=gpus + config.engine.gpus,
        gpu_gib=host_gib if gpu_gib is None else gpu_gib,
        host_gib=host_gib,
        hosts=-(-gpus // on_host),
    )
    if gpu_gib is not None:
        check_fits(config, shape, machine)
        return

    components = machine.plan(config, shape).phases["update"]
    needed = ("weights", "critic", "gradients", "optimizer")
    need = on_host * sum(components.get(part, 0.0) for part in needed)
    if need > host_gib:
        raise UserError(
            f"model.path = '{config.model.path}' does not fit: weights, gradients and optimizer"
            f" take {need:.0f} GiB, this machine has {host_gib:.0f} and no GPU is used;"
            " use a smaller model, or see `paw plan`"
        )


def check_fits(config: Config, shape: Shape, machine: Machine) -> None:
    """Raise UserError if the configuration cannot fit, even on the whole card.

    The KV cache is counted with a single sequence. The message has the plan's numbers, and the
    nearest settings that fit, ready to paste.
    """
    reasons = machine.plan(config, shape).reasons(usable=1.0, rows=1)
    if not reasons:
        return
    pinned = ENGINE if machine.hosts > 1 else ()  # a run on several machines starts no servers
    best = fit(config, shape, machine, pinned=pinned)[-1][1]
    advice = "nothing tried fits; use more GPUs or a smaller model"
    if not best.reasons():
        advice = f"what fits: {words(best.config, config)}"
    raise UserError(
        f"model.path = '{config.model.path}' does not fit: {'; '.join(reasons)}; {advice} (see "
        "`paw plan`)"
    )
