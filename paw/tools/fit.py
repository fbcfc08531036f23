"""`paw plan`: the first settings that fit a machine, servers among them, as table, JSON or recipe; and the refusal of
what cannot."""

import argparse
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from rich.console import Console
from rich.table import Column, Table

from paw.config import Config
from paw.errors import UserError, masked
from paw.files import write_file, writing
from paw.keys import flatten
from paw.recipe import known_keys, layered, load, validate
from paw.tools.plan import GIB, SOURCES, USABLE, Plan
from paw.tools.plan_memory import ENGINE_ROWS
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
"""Changes that save memory, each on top of those before it, cheapest in time first. The last two change what is
learnt: no reference model, and adapters instead of all weights."""
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
    """Add fallbacks until something fits, and servers, or a share of the card found in finer steps, before what changes
    what is learnt; `pinned` keys stay as they are. `machine`: gpus, gpu_gib, ..."""
    tried = _with_fallbacks(config, shape, pinned=pinned, **machine)
    if _keeps_learning(tried, config):
        return tried
    for found in with_servers(config, shape, pinned=pinned, **machine):
        return [*tried, (words(found.config, config), found)]

    finer = _with_fallbacks(config, shape, steps=FINE, pinned=pinned, **machine)
    if _keeps_learning(finer, config) or (tried[-1][1].reasons() and not finer[-1][1].reasons()):
        return finer
    if tried[-1][1].reasons():
        tried += _with_adapters(config, shape, pinned=pinned, **machine)
    return tried


def _keeps_learning(tried: Tried, config: Config) -> bool:
    """Whether the last one fits and learns what `config` would."""
    best = tried[-1][1]
    return not best.reasons() and _same_learning(best.config, config)


def _with_adapters(config: Config, shape: Shape, *, pinned: Collection[str] = (), **machine: Any) -> Tried:
    """Adapters, and fallbacks on top of them alone, if that fits: what the fallbacks before them add may not fit a
    host's memory. Empty if it does not fit, or needs a change to a pinned key."""
    if config.lora.rank or _contradicts(config, ADAPTERS, pinned):
        return []
    try:
        adapted = changed(config, ADAPTERS)
        best = _with_fallbacks(adapted, shape, steps=FINE, pinned={*pinned, *ADAPTERS}, **machine)[-1][1]
    except UserError:  # what is trained takes no adapters
        return []
    return [] if best.reasons() else [(words(best.config, config), best)]


def _contradicts(config: Config, change: Change, pinned: Collection[str]) -> bool:
    """Whether a change gives a pinned key another value."""
    return any(key in pinned and get(config, key) != value for key, value in change.items())


def with_servers(
    config: Config, shape: Shape, *, ahead: int = 0, pinned: Collection[str] = (), **machine: Any
) -> list[Plan]:
    """The quickest plan that fits with a quarter, half or three quarters of the cards left to servers, if any does: of
    the smallest engine.tensor_parallel that holds the model, or twice or four times that."""
    gpus, on_host = machine["gpus"], -(-machine["gpus"] // machine.get("hosts", 1))
    if gpus == 1 or config.engine.type == "server" or set(pinned) & set(ENGINE):
        return []

    def split(count: int, size: int) -> Config:
        return changed(config, dict(zip(ENGINE, ("server", count, size, ahead), strict=True)))

    least = Plan(split(1, 1), shape, **machine).least
    sizes = [size for size in (least, 2 * least, 4 * least) if 0 < size <= on_host]
    splits = {(count, size) for size in sizes for part in (1, 2, 3) if (count := part * gpus // 4 // size)}
    plans = [_with_fallbacks(split(*one), shape, pinned={*pinned, *ENGINE}, **machine)[-1][1] for one in sorted(splits)]
    kept = [plan for plan in plans if not plan.reasons() and _same_learning(plan.config, config)]
    return sorted(kept, key=lambda plan: plan.step_s)[:1]


def _same_learning(one: Config, other: Config) -> bool:
    return (one.policy.kl_coef, one.lora) == (other.policy.kl_coef, other.lora)


def words(config: Config, before: Config) -> str:
    """The options of the command line that make the one configuration of the other."""
    differing = [key for key in known_keys(config) if get(config, key) != get(before, key)]
    return " ".join(f"--{key} {str(get(config, key)).lower()}" for key in differing)


def _with_fallbacks(
    config: Config, shape: Shape, *, steps: int = COARSE, pinned: Collection[str] = (), **machine: Any
) -> Tried:
    """Each fallback on top of those before it, until something fits; then without those that are not needed."""

    def attempt(changes: Sequence[Change]) -> Plan:
        """With vLLM's share of the card as configured, or else the largest that fits beside the trainer."""
        first = Plan(changed(config, *changes), shape, **machine)
        if first.config.engine.type != "vllm" or SHARE in pinned or not first.reasons():
            return first
        share = _largest_share(first, steps)
        if share <= 0:
            return first
        other = Plan(changed(first.config, {SHARE: share}), shape, **machine)
        fits = sum(other.phases["rollout"].values()) <= USABLE * other.gpu_gib and other.kv_tokens >= other.kv_needed()
        return other if fits else first

    best, applied = attempt([]), []
    tried = [("as configured", best)]
    for change in FALLBACKS:
        if not best.reasons():
            break
        if _contradicts(config, change, pinned) or not _saves(best.config, change):
            continue
        more = [*applied, change]
        options = [more, *(_without(more, offload) for offload in more if offload.keys() <= OFFLOADS)]
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
    """Whether a fallback asks for less memory than the configuration takes anyway; its first key decides. One that
    does not apply is left to `changed`, which refuses it."""
    key, value = next(iter(change.items()))
    now = get(config, key)
    if key == "optim.micro_batch_tokens":
        return value < now
    adapted = config.lora.rank > 0 and key in ("policy.kl_coef", "lora.rank")  # adapters need no reference model
    return now not in (value, "full") and not adapted


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
    """`check_fits` for this host, with `on_host` of `gpus` ranks; on CPUs (None) weights, gradients and moments must
    fit. Servers have other cards.

    A model made on the spot, or of a kind the plan does not know, passes.
    """
    if config.model.path == "quickstart":
        return
    try:
        shape = shape_of(config.model.path)
    except UserError:
        return
    host_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    machine: Any = {"gpus": gpus + config.engine.gpus, "host_gib": host_gib, "hosts": -(-gpus // on_host)}
    if gpu_gib is not None:
        return check_fits(config, shape, gpu_gib=gpu_gib, **machine)
    parts = Plan(config, shape, gpu_gib=host_gib, **machine).phases["update"]
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
    # A run on several machines starts no servers.
    best = fit(config, shape, pinned=ENGINE if machine.get("hosts", 1) > 1 else (), **machine)[-1][1]
    advice = "nothing tried fits; use more GPUs or a smaller model"
    if not best.reasons():
        advice = f"what fits: {words(best.config, config)}"
    raise UserError(f"model.path = '{config.model.path}' does not fit: {'; '.join(reasons)}; {advice} (see `paw plan`)")


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Print the plan; 0 where something fits, else 1."""
    machine: dict[str, Any] = {"gpus": options.gpus, "host_gib": options.host_gib, "hosts": options.hosts}
    found = _search(options.recipe, overrides, model=options.model, **machine)
    best, shape = found.tried[-1][1], found.shape
    if options.out and not best.reasons():
        _write(options.out, best)

    others = with_servers(best.config, shape, ahead=1, pinned=overrides.keys(), **found.machine)
    if best.config.engine.servers and not {*ENGINE} & overrides.keys():
        others = [Plan(changed(best.config, {"rollout.ahead": 1}), shape, **found.machine)]
    quicker = [plan for plan in others if plan.step_s < best.step_s]
    adapters = _offer_adapters(found, overrides.keys())

    if options.json:
        print(json.dumps(summary(best, quicker, adapters), indent=1))
    else:
        Console().print(*tables(found.tried))
        other = "" if options.recipe else " (another: paw plan RECIPE --model NAME)"
        assumed = f"workload of {options.recipe or BASE}{other}: {workload(best)}"
        print("", assumed, *lines(best, quicker, adapters), sep="\n")
    return 1 if best.reasons() else 0


def plan(
    recipe: str | Path | Config | None = None,
    *,
    model: str | Path | None = None,
    gpus: str = "1x80GB",
    host_gib: float | None = None,
    hosts: int = 1,
    changes: Mapping[str, Any] | None = None,
) -> Plan:
    """Predict memory and time of an update, and find settings that fit; loads no model.

    Args:
        recipe: what is trained: a recipe's name or path, or a configuration. Default: that of `paw plan --model`.
        model: a model's folder or Hugging Face name, in place of the recipe's.
        gpus: all cards and the memory of each: "8x80GB".
        host_gib: memory of a host, in GiB; None: not limited.
        hosts: machines that the cards are in.
        changes: keys of the configuration; the search leaves them as they are: `{"lora.rank": 32}`.

    Returns the plan: `fits`, and `reasons()` why not; `config`, the settings that were found; `peak` and `host_total`,
    GiB of a GPU and of a host; `step_s` and `seconds` of an update. All of it is predicted. Raises UserError for a
    recipe, key or value that does not go, and for a kind of model that the plan does not know.
    """
    name = None if model is None else str(model)
    found = _search(recipe, dict(changes or {}), model=name, gpus=gpus, host_gib=host_gib, hosts=hosts)
    return found.tried[-1][1]


class Search(NamedTuple):
    config: Config
    shape: Shape
    machine: dict[str, Any]
    tried: Tried


def _search(
    recipe: str | Path | Config | None,
    overrides: dict[str, Any],
    *,
    model: str | None,
    gpus: str,
    host_gib: float | None,
    hosts: int,
) -> Search:
    """What `fit` finds; keys of `overrides` stay as they are."""
    if not recipe and not model:
        raise UserError("command line: give a recipe or --model NAME, such as --model Qwen/Qwen2.5-14B-Instruct")
    cards = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)(?:GB|GiB)?", gpus, re.IGNORECASE)
    if not cards:
        raise UserError(f"command line: --gpus '{gpus}': write it like 1x80GB or 8x80GB")
    if not 1 <= hosts <= int(cards[1]):
        raise UserError(f"command line: --hosts {hosts}: from 1 to the {cards[1]} cards of --gpus")
    given = ({} if recipe else {"model.checkpointing": "none"}) | overrides
    config = load(recipe or BASE, given | ({"model.path": model} if model else {}))
    shape = shape_of(config.model.path)
    machine = {"gpus": int(cards[1]), "gpu_gib": float(cards[2]), "host_gib": host_gib, "hosts": hosts}
    return Search(config, shape, machine, fit(config, shape, pinned=overrides.keys(), **machine))


def _offer_adapters(found: Search, pinned: Collection[str]) -> str:
    """Options with which adapters would fit where nothing else does, if a pinned key rules them out; else ""."""
    if not found.tried[-1][1].reasons() or "lora.rank" in pinned:
        return ""
    tried = _with_adapters(found.config, found.shape, pinned={*pinned} - {*ADAPTERS}, **found.machine)
    return tried[-1][0] if tried else ""


def workload(found: Plan) -> str:
    """What the plan assumes to be played and learnt from in an update."""
    limits, play = found.config.rollout, found.play
    return (
        f"{limits.tasks} tasks x {limits.group_size} episodes,"
        f" of {play.most} turns at most ({play.turns:.0f} on average),"
        f" prompts of {limits.max_prompt_tokens:,} tokens at most ({play.prompt:.0f}),"
        f" responses of {limits.max_response_tokens:,} ({play.response:.0f});"
        f" KV cache of {ENGINE_ROWS} sequences of full length at least"
    )


def lines(found: Plan, quicker: Sequence[Plan] = (), adapters: str = "") -> Iterator[str]:
    """The plan in a few lines, what would be quicker with episodes played ahead, and options with which `adapters` fit
    where nothing else does."""
    peak, cache = max(sum(parts.values()) for name, parts in found.phases.items() if name != "server"), ""
    if found.vllm or found.served:
        cache = f", KV cache of {found.kv_tokens / found.kv_needed(1):.0f} sequences of full length"
    yield (
        f"training{'' if found.served else ' and rollouts'}: {found.N} x {found.gpu_gib:g} GB, {peak:.1f} GiB of each,"
        f" {found.host_total:.0f} GiB of a host's memory{'' if found.served else cache}"
    )
    if found.served:
        size = f"{found.tensor_parallel} x {found.gpu_gib:g} GB (at least {found.least or 'more than 64'})"
        yield f"servers: {found.engines}, each {size}, {sum(found.phases['server'].values()):.1f} GiB of each{cache}"
    yield from (f"does not fit: {reason}" for reason in found.reasons())
    if adapters:
        yield f"with adapters it would fit: {adapters}"
    ahead = ", the rollout beside the rest" if found.config.rollout.ahead else ""
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in found.seconds.items())
    yield f"{found.step_s:.0f} s an update{ahead}: {parts}"
    for plan in quicker:
        yield f"{plan.step_s:.0f} s where episodes may be of the update before: {words(plan.config, found.config)}"
    if found.hosts > 1 and any(plan.config.engine.servers for plan in (found, *quicker)):
        yield "on several machines start servers by hand: --engine.servers 0 --engine.urls '[...]' (docs/scale.md)"
    yield "All of this is a prediction: nothing of it was run on a GPU."


def summary(found: Plan, quicker: Sequence[Plan] = (), adapters: str = "") -> dict[str, Any]:
    """What `--json` prints. Sizes in GiB."""

    def rounded(value: Any) -> Any:
        return {key: rounded(one) for key, one in value.items()} if isinstance(value, dict) else round(value, 2)

    return {
        "fits": found.fits,
        "workload": workload(found),
        "peak_gib": rounded(found.peak),
        "host_gib": rounded(found.host_total),
        "components": rounded(found.phases),
        "host": rounded(found.host),
        "step_s": round(found.step_s, 1),
        "seconds": rounded(found.seconds),
        "sources": SOURCES,
        "least_tensor_parallel": found.least,
        "settings": {key: get(found.config, key) for key in sorted({*ENGINE, *set().union(*FALLBACKS)})}
        | {SHARE: found.config.engine.memory_share},
        "quicker": {words(plan.config, found.config): round(plan.step_s, 1) for plan in quicker},
        "reasons": found.reasons(),
        "adapters": adapters,
    }


def tables(tried: Tried) -> Iterator[Table]:
    """What was tried, the components of the last attempt by phase, and its seconds with where they are from."""
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
    times = Table("component", right("seconds"), "from", title="an update")
    for part, seconds in best.seconds.items():
        times.add_row(part, f"{seconds:.2f}", SOURCES[part])
    yield times


def _write(path: Path, found: Plan) -> None:
    """A recipe that `paw train` takes, with what was predicted in its first lines."""
    heading = (
        f"# Found by `paw plan` for {found.gpus} x {found.gpu_gib:g} GB. Predicted: {found.peak:.1f} GiB of a GPU,"
        f" {found.host_total:.1f} GiB of host memory, {found.step_s:.0f} s an update.\n"
    )
    with writing(path):
        write_file(path, heading + tomli_w.dumps(masked(_tree(found.config))))
