"""`paw plan`: shows the result of `fit` as lines, tables, JSON or a recipe. Also for Python."""

import argparse
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from rich.console import Console
from rich.table import Column, Table

from paw.config.keys import nested
from paw.config.recipe import as_set, known_keys, load
from paw.config.sections import Config
from paw.errors import UserError, masked
from paw.io.files import write_file, writing
from paw.tools.plan.fit import (
    ADAPTERS,
    BASE,
    ENGINE,
    FALLBACKS,
    SEQUENCES,
    SHARE,
    Machine,
    Tried,
    changed,
    fit,
    get,
    with_adapters,
    with_sequences,
    with_servers,
    words,
)
from paw.tools.plan.plan import SOURCES, Plan
from paw.tools.plan.plan_memory import ENGINE_ROWS
from paw.tools.plan.shapes import Shape, shape_of


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Print the plan. Returns 0 if something fits, else 1."""
    search = _search(
        options.recipe,
        overrides,
        model=options.model,
        gpus=options.gpus,
        host_gib=options.host_gib,
        hosts=options.hosts,
    )
    best = search.best
    if options.out and not best.reasons():
        _write(options.out, best)

    quicker = _quicker_ahead(search, overrides.keys())
    adapters = _offer_adapters(search, overrides.keys())

    if options.json:
        print(json.dumps(summary(best, quicker, adapters), indent=1))
    else:
        Console().print(*tables(search.tried))
        hint = "" if options.recipe else " (another: paw plan RECIPE --model NAME)"
        assumed = f"workload of {options.recipe or BASE}{hint}: {workload(best)}"
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
    """Predict memory and time of an update, and find settings that fit. Loads no model.

    Args:
        recipe: what is trained: a recipe's name or path, or a configuration. Default: the one that
            `paw plan --model` uses.
        model: a model's folder or Hugging Face name, instead of the recipe's.
        gpus: all cards and the memory of each: "8x80GB".
        host_gib: memory of a host, in GiB; None for no limit.
        hosts: machines that the cards are in.
        changes: keys of the configuration; the search leaves them as they are: `{"lora.rank": 32}`.

    Returns the plan. It has `fits`, and `reasons()` why not; `config`, the settings that were
    found; `peak` and `host_total`, GiB of a GPU and of a host; `step_s` and `seconds` of an update.
    All of it is predicted. Raises UserError for a recipe, key or value that cannot be used, and for
    a kind of model that the plan does not know.
    """
    name = None if model is None else str(model)
    search = _search(
        recipe, dict(changes or {}), model=name, gpus=gpus, host_gib=host_gib, hosts=hosts
    )
    return search.best


class Search(NamedTuple):
    """The search's input, and every plan that was tried."""

    config: Config
    shape: Shape
    machine: Machine
    tried: Tried

    @property
    def best(self) -> Plan:
        """Return the last plan that was tried. It fits if any does."""
        return self.tried[-1][1]


def _search(
    recipe: str | Path | Config | None,
    overrides: dict[str, Any],
    *,
    model: str | None,
    gpus: str,
    host_gib: float | None,
    hosts: int,
) -> Search:
    """Return what `fit` finds. Keys of `overrides` stay as they are.

    Raises UserError for command-line arguments that cannot be used.
    """
    if not recipe and not model:
        raise UserError(
            "command line: give a recipe or --model NAME, such as --model Qwen/Qwen2.5-14B-Instruct"
        )
    cards = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)(?:GB|GiB)?", gpus, re.IGNORECASE)
    if not cards:
        raise UserError(f"command line: --gpus '{gpus}': write it like 1x80GB or 8x80GB")
    if not 1 <= hosts <= int(cards[1]):
        raise UserError(f"command line: --hosts {hosts}: from 1 to the {cards[1]} cards of --gpus")

    changes: dict[str, Any] = {}
    if not recipe:
        changes["model.checkpointing"] = "none"
    changes |= overrides
    if model:
        changes["model.path"] = model
    config = load(recipe or BASE, changes)
    shape = shape_of(config.model.path)
    machine = Machine(gpus=int(cards[1]), gpu_gib=float(cards[2]), host_gib=host_gib, hosts=hosts)
    tried = fit(config, shape, machine, pinned=overrides.keys())
    return Search(config, shape, machine, tried)


def _quicker_ahead(search: Search, pinned: Collection[str]) -> list[Plan]:
    """Return plans that are quicker because servers play episodes ahead."""
    best = search.best
    machine = search.machine
    if best.config.engine.gpus and not set(ENGINE) & set(pinned):
        ahead = machine.plan(changed(best.config, {"rollout.ahead": 1}), search.shape)
        ahead = with_sequences(ahead, machine, pinned=pinned)
    else:
        ahead = with_servers(best.config, search.shape, machine, ahead=1, pinned=pinned)
    if ahead and ahead.step_s < best.step_s:
        return [ahead]
    return []


def _offer_adapters(search: Search, pinned: Collection[str]) -> str:
    """Return options with adapters that would fit if nothing else does; "" otherwise.

    Pinned keys stay as they are.
    """
    if not search.best.reasons() or "lora.rank" in pinned:
        return ""
    pinned_others = {*pinned} - {*ADAPTERS}
    tried = with_adapters(search.config, search.shape, search.machine, pinned=pinned_others)
    return tried[-1][0] if tried else ""


def workload(plan: Plan) -> str:
    """Say what an update is assumed to play and learn from."""
    limits = plan.config.rollout
    play = plan.play
    return (
        f"{limits.tasks} tasks x {limits.group_size} episodes,"
        f" of {play.longest} turns at most ({play.turns:.0f} on average),"
        f" prompts of {limits.max_prompt_tokens:,} tokens at most ({play.prompt:.0f}),"
        f" responses of {limits.max_response_tokens:,} ({play.response:.0f});"
        f" KV cache of {ENGINE_ROWS} sequences of full length at least"
    )


def lines(best: Plan, quicker: Sequence[Plan] = (), adapters: str = "") -> Iterator[str]:
    """Yield the plan in a few lines.

    `quicker` are plans with episodes played ahead. `adapters` are the options with which adapters
    would fit if nothing else does.
    """
    yield from _size_lines(best)
    for reason in best.reasons():
        yield f"does not fit: {reason}"
    if adapters:
        yield f"with adapters it would fit: {adapters}"
    ahead = ", the rollout beside the rest" if best.config.rollout.ahead else ""
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in best.seconds.items())
    yield f"{best.step_s:.0f} s an update{ahead}: {parts}"
    yield _layers_line(best)
    for plan in quicker:
        options = words(plan.config, best.config)
        yield f"{plan.step_s:.0f} s if episodes may be from the update before: {options}"
    yield from _waste_lines(best)
    if best.hosts > 1 and any(plan.config.engine.gpus for plan in (best, *quicker)):
        yield (
            "on several machines start servers by hand:"
            " --engine.servers 0 --engine.urls '[...]' (docs/scale.md)"
        )
    yield "All of this is a prediction: none of it was run on a GPU."


def _size_lines(best: Plan) -> Iterator[str]:
    """Yield what training and rollouts take of which cards."""
    engine = best.engine
    peaks = [sum(parts.values()) for phase, parts in best.phases.items() if phase != "server"]
    training = (
        f"{best.N} x {best.gpu_gib:g} GB, {max(peaks):.1f} GiB of each,"
        f" {best.host_total:.0f} GiB of a host's memory"
    )
    cache = ""
    if engine.cache_is_fixed:
        cache = f", KV cache of {best.kv_tokens / best.kv_needed(1):.0f} sequences of full length"
    if not best.served:
        yield f"training and rollouts: {training}{cache}"
    else:
        yield f"training: {training}"
        yield f"servers: {engine.engines}, {_servers_cards(best)}{cache}"

    starts_its_engines = bool(best.config.engine.gpus) or not best.served
    if math.isfinite(engine.sequences) and starts_its_engines:
        yield (
            f"{engine.sequences} responses at a time in each engine ({SEQUENCES}); the KV cache"
            f" holds {best.kv_tokens / best.play.length:,.0f} of average length"
        )


def _waste_lines(best: Plan) -> Iterator[str]:
    """Yield what more cards do not make quicker."""
    minibatch = best.config.optim.minibatch_samples
    if minibatch < best.N:
        yield (
            f"{best.N} cards train on {minibatch} turns a step, so {best.N - minibatch} have "
            f"nothing to do: --optim.minibatch_samples {best.N} or more "
            "(docs/scale.md#the-next-wall)"
        )
    own_s, everyones_s = best.host_seconds()
    if own_s < everyones_s:
        yield (
            f"host: {everyones_s:.2f} s an update for the numbers of all turns, which more cards "
            f"do not make less, and {own_s:.2f} s for a card's own tokens "
            "(docs/scale.md#the-next-wall)"
        )


def _layers_line(best: Plan) -> str:
    """Say how decoder layers are assumed to be computed, and what the other way would take."""
    fused = best.layers != "eager"
    machine = Machine(
        gpus=best.gpus, gpu_gib=best.gpu_gib, host_gib=best.host_gib, hosts=best.hosts
    )
    change = {"model.compile": not fused, "model.liger": False}
    other = machine.plan(changed(best.config, change), best.shape)
    if fused:
        return f"decoder layers: {best.layers}, assumed; {other.step_s:.0f} s an update if eager"
    return f"decoder layers: eager; {other.step_s:.0f} s an update if compiled"


def _servers_cards(plan: Plan) -> str:
    """Say in words which cards each server has."""
    if not plan.engine.own_card:
        return "on cards of their own"
    least = plan.engine.least_cards or "more than 64"
    card_gib = sum(plan.phases["server"].values())
    return (
        f"each {plan.engine.cards} x {plan.gpu_gib:g} GB (at least {least}),"
        f" {card_gib:.1f} GiB of each"
    )


def summary(best: Plan, quicker: Sequence[Plan] = (), adapters: str = "") -> dict[str, Any]:
    """Return what `--json` prints. Sizes are in GiB."""

    searched_keys = {*ENGINE, SHARE, SEQUENCES}.union(*FALLBACKS)
    known = known_keys(best.config).keys()
    settings = {key: get(best.config, key) for key in sorted(searched_keys & known)}
    return {
        "fits": best.fits,
        "workload": workload(best),
        "peak_gib": round(best.peak, 2),
        "host_gib": round(best.host_total, 2),
        "components": _rounded_table(best.phases),
        "host": _rounded_table(best.host),
        "step_s": round(best.step_s, 1),
        "seconds": _rounded(best.seconds),
        "layers": best.layers,
        "sources": SOURCES,
        "least_tensor_parallel": best.engine.least_cards,
        "settings": settings,
        "quicker": {words(plan.config, best.config): round(plan.step_s, 1) for plan in quicker},
        "reasons": best.reasons(),
        "adapters": adapters,
    }


def _rounded(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: round(size, 2) for name, size in sizes.items()}


def _rounded_table(phases: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {phase: _rounded(parts) for phase, parts in phases.items()}


def tables(tried: Tried) -> Iterator[Table]:
    """Yield tables of what was tried, and of the last attempt's memory by phase and seconds."""
    best = tried[-1][1]
    align_right = partial(Column, justify="right")

    attempts = Table(
        "settings",
        align_right("GPU GiB"),
        align_right("host GiB"),
        align_right("update s"),
        "fits",
        title=f"{best.config.model.path} on {best.gpus} x {best.gpu_gib:g} GB",
    )
    for label, plan in tried:
        attempts.add_row(
            label,
            f"{plan.peak:.1f}",
            f"{plan.host_total:.1f}",
            f"{plan.step_s:.0f}",
            "no" if plan.reasons() else "yes",
        )
    yield attempts

    yield _phase_table("GiB of one GPU", best.phases)
    yield _phase_table("GiB of host memory", best.host)

    times = Table("component", align_right("seconds"), "from", title="an update")
    for part, seconds in best.seconds.items():
        times.add_row(part, f"{seconds:.2f}", SOURCES[part])
    yield times


def _phase_table(title: str, phases: dict[str, dict[str, float]]) -> Table:
    """Make a table with a row for each component and a column for each phase."""
    columns = [Column(phase, justify="right") for phase in phases]
    table = Table("component", *columns, title=title)
    components = dict.fromkeys(part for parts in phases.values() for part in parts)
    for component in components:
        sizes = []
        for parts in phases.values():
            sizes.append(f"{parts[component]:.1f}" if component in parts else "")
        table.add_row(component, *sizes)
    table.add_row("sum", *(f"{sum(parts.values()):.1f}" for parts in phases.values()))
    return table


def _write(path: Path, best: Plan) -> None:
    """Write a recipe for `paw train`, with the predictions in its first lines."""
    heading = (
        f"# Found by `paw plan` for {best.gpus} x {best.gpu_gib:g} GB. Predicted:"
        f" {best.peak:.1f} GiB of a GPU,"
        f" {best.host_total:.1f} GiB of host memory, {best.step_s:.0f} s an update.\n"
    )
    with writing(path):
        write_file(path, heading + tomli_w.dumps(nested(masked(as_set(best.config)))))
