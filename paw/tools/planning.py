"""`paw plan`: what `fit` finds as lines, tables, JSON or a recipe, and the same from Python."""

import argparse
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from rich.console import Console
from rich.table import Column, Table

from paw.config import Config
from paw.errors import UserError, masked
from paw.files import write_file, writing
from paw.recipe import load
from paw.tools.fit import (
    ADAPTERS,
    BASE,
    ENGINE,
    FALLBACKS,
    SHARE,
    Tried,
    as_set,
    changed,
    fit,
    get,
    with_adapters,
    with_servers,
    words,
)
from paw.tools.plan import SOURCES, Plan
from paw.tools.plan_memory import ENGINE_ROWS
from paw.tools.shapes import Shape, shape_of


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Print the plan; 0 where something fits, else 1."""
    machine: dict[str, Any] = {
        "gpus": options.gpus,
        "host_gib": options.host_gib,
        "hosts": options.hosts,
    }
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
        recipe: what is trained: a recipe's name or path, or a configuration. Default: that of `paw
            plan --model`.
        model: a model's folder or Hugging Face name, in place of the recipe's.
        gpus: all cards and the memory of each: "8x80GB".
        host_gib: memory of a host, in GiB; None: not limited.
        hosts: machines that the cards are in.
        changes: keys of the configuration; the search leaves them as they are: `{"lora.rank": 32}`.

    Returns the plan: `fits`, and `reasons()` why not; `config`, the settings that were found;
    `peak` and `host_total`, GiB of a GPU and of a host; `step_s` and `seconds` of an update. All of
    it is predicted. Raises UserError for a recipe, key or value that does not go, and for a kind of
    model that the plan does not know.
    """
    name = None if model is None else str(model)
    found = _search(
        recipe, dict(changes or {}), model=name, gpus=gpus, host_gib=host_gib, hosts=hosts
    )
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
        raise UserError(
            "command line: give a recipe or --model NAME, such as --model Qwen/Qwen2.5-14B-Instruct"
        )
    cards = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)(?:GB|GiB)?", gpus, re.IGNORECASE)
    if not cards:
        raise UserError(f"command line: --gpus '{gpus}': write it like 1x80GB or 8x80GB")
    if not 1 <= hosts <= int(cards[1]):
        raise UserError(f"command line: --hosts {hosts}: from 1 to the {cards[1]} cards of --gpus")
    given = ({} if recipe else {"model.checkpointing": "none"}) | overrides
    config = load(recipe or BASE, given | ({"model.path": model} if model else {}))
    shape = shape_of(config.model.path)
    machine = {
        "gpus": int(cards[1]),
        "gpu_gib": float(cards[2]),
        "host_gib": host_gib,
        "hosts": hosts,
    }
    return Search(config, shape, machine, fit(config, shape, pinned=overrides.keys(), **machine))


def _offer_adapters(found: Search, pinned: Collection[str]) -> str:
    """Options with which adapters would fit where nothing else does, if a pinned key rules them out; else ""."""
    if not found.tried[-1][1].reasons() or "lora.rank" in pinned:
        return ""
    tried = with_adapters(
        found.config, found.shape, pinned={*pinned} - {*ADAPTERS}, **found.machine
    )
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
    """The plan in a few lines, what would be quicker with episodes played ahead, and options with
    which `adapters` fit where nothing else does."""
    peak, cache = (
        max(sum(parts.values()) for name, parts in found.phases.items() if name != "server"),
        "",
    )
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
        return (
            {key: rounded(one) for key, one in value.items()}
            if isinstance(value, dict)
            else round(value, 2)
        )

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
        "settings": {
            key: get(found.config, key) for key in sorted({*ENGINE, *set().union(*FALLBACKS)})
        }
        | {SHARE: found.config.engine.memory_share},
        "quicker": {words(plan.config, found.config): round(plan.step_s, 1) for plan in quicker},
        "reasons": found.reasons(),
        "adapters": adapters,
    }


def tables(tried: Tried) -> Iterator[Table]:
    """What was tried, the components of the last attempt by phase, and its seconds with where they are from."""
    best, right = tried[-1][1], partial(Column, justify="right")
    title = f"{best.config.model.path} on {best.gpus} x {best.gpu_gib:g} GB"
    attempts = Table(
        "settings", *map(right, ("GPU GiB", "host GiB", "update s")), "fits", title=title
    )
    for label, one in tried:
        verdict = "no" if one.reasons() else "yes"
        attempts.add_row(
            label, f"{one.peak:.1f}", f"{one.host_total:.1f}", f"{one.step_s:.0f}", verdict
        )
    yield attempts
    for title, phases in (("GiB of one GPU", best.phases), ("GiB of host memory", best.host)):
        by_phase = Table("component", *map(right, phases), title=title)
        for part in dict.fromkeys(part for parts in phases.values() for part in parts):
            by_phase.add_row(
                part, *(f"{parts[part]:.1f}" if part in parts else "" for parts in phases.values())
            )
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
        write_file(path, heading + tomli_w.dumps(masked(as_set(found.config))))
