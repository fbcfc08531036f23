"""What an evaluation came to: rows as in the paper's tables, intervals, tokens, dollars, time."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from paw.config import EndpointConfig
from paw.envs.base import kind_name
from paw.envs.search.data import SETS
from paw.errors import clean, masked, to_stderr
from paw.rollouts.episode import Episode
from paw.rollouts.success import wilson

COLUMNS = {"pick": "Pick", "look": "Look", "clean": "Clean", "heat": "Heat", "cool": "Cool", "two": "Pick2"}
"""ALFWorld's task types in the order of Table 1, and their headings there."""
MOST_CHARS = 10_000
"""Of a line of the table: kinds of tasks and the games' name are an environment's own words."""
SPENT = ("calls", "prompt_tokens", "completion_tokens", "cost", "seconds")


def episode_line(episode: Episode, prices: EndpointConfig) -> dict[str, Any]:
    """The line of an episode that has ended."""
    trajectory, last, stats = episode.trajectory, episode.outcome, episode.stats
    said = ("action", "valid", "observation", "reward")
    turns = [
        {"trial": trial, "response": response, **{key: getattr(outcome, key) for key in said}}
        for trial, response, outcome in episode.steps
    ]
    return {
        "place": episode.index,
        "task": trajectory.task.id,
        "kind": trajectory.task.kind,
        "success": last is not None and last.won and not episode.context_full,
        "score": last.score if last else None,
        "steps": sum(turn["trial"] == episode.trials for turn in turns),
        "trials": episode.trials,
        "plans": episode.notes,
        "turns": turns,
        "calls": len(trajectory.turns),
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.response_tokens,
        "cost": (stats.prompt_tokens * prices.input_price + stats.response_tokens * prices.output_price) / 1e6,
        "seconds": round(episode.seconds, 3),
        "context_full": episode.context_full,
        "failure": masked(trajectory.failure),
    }


def summarise(
    lines: Sequence[dict[str, Any]], about: dict[str, Any], prices: EndpointConfig, wall_s: float
) -> dict[str, Any]:
    """Of the episodes that were played: success with its 95 % Wilson interval, overall and by kind, and what it took.
    `wall_s` is of this run alone, `seconds` the sum over all episodes, in parallel as they were."""
    played = [line for line in lines if line["failure"] is None]
    turns, scores = [turn for line in played for turn in line["turns"]], [line["score"] or 0.0 for line in played]
    scored = any(line["score"] is not None for line in played)
    return {
        "environment": about["env.name"],
        "agent": about["agent.type"],
        "model": about["model"],
        "games": about["games"],
        "temperature": about["eval.temperature"],
        "episodes": len(played),
        **success_of([line["success"] for line in played]),
        **({"score": sum(scores) / len(scores)} if scored else {}),
        "kinds": kind_rows((line["kind"], line["success"]) for line in played),
        "steps": sum(line["steps"] for line in played) / max(1, len(played)),
        "valid_actions": sum(turn["valid"] for turn in turns) / max(1, len(turns)),
        "context_full": sum(line["context_full"] for line in played),
        "not_played": len(lines) - len(played),
        **{key: sum(line[key] for line in lines) for key in SPENT},
        "priced": bool(prices.input_price or prices.output_price),
        "wall_s": round(wall_s, 1),
    }


def table(summary: dict[str, Any]) -> str:
    """A Markdown table with one row, in the columns of the paper's tables, and the rest in words below it."""
    if summary["environment"] == "webshop":
        cells = {"Score": summary.get("score", 0.0), "Succ.": summary["success"]}
    else:
        kinds = {kind: row["success"] for kind, row in summary["kinds"].items()}
        cells = {name: kinds.pop(kind) for kind, name in COLUMNS.items() if kind in kinds} | kinds
        cells |= {} if "Avg." in kinds else {"All": summary["success"]}
    shown = [summary["model"], summary["agent"], *(f"{100 * value:.1f}" for value in cells.values())]
    cost = f", ${summary['cost']:.2f}" if summary["priced"] else ""
    lines = [
        *markdown(["Model", "Agent", *cells], [shown]).split("\n"),
        "",
        f"{summary['games']}, temperature {summary['temperature']:g}: success {summary['success']:.1%} of "
        f"{summary['episodes']} episodes (95 % interval {summary['ci_low']:.1%} to {summary['ci_high']:.1%})",
        f"{summary['steps']:.1f} turns an episode, valid actions {summary['valid_actions']:.1%}; {summary['calls']} "
        f"calls, {summary['prompt_tokens']} prompt and {summary['completion_tokens']} completion tokens{cost}; "
        f"{summary['seconds']:.0f} s of episodes, {summary['wall_s']:.0f} s by the clock in this run",
    ]
    if summary["context_full"]:
        lines.append(f"{summary['context_full']} episodes were lost because the model's context was full")
    if summary["not_played"]:
        lines.append(f"{summary['not_played']} episodes could not be played and count nowhere above")
    return "\n".join(clean(line, MOST_CHARS) for line in lines) + "\n"


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; "-" for None.

    >>> print(markdown(["model", "success"], [["a|b", None]]))
    | model | success |
    | --- | --- |
    | a\\|b | - |
    """

    def text(cell: object) -> str:
        return "-" if cell is None else str(cell).replace("|", r"\|").replace("\n", " ")

    lines = [map(text, header), ["---"] * len(header), *(map(text, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def success_of(won: Sequence[bool]) -> dict[str, float]:
    low, high = wilson(sum(won), len(won))
    return {"success": sum(won) / max(1, len(won)), "ci_low": low, "ci_high": high}


def kind_rows(episodes: Iterable[tuple[str, bool]]) -> dict[str, dict[str, float]]:
    """Of (kind, whether won): success, its interval and the games of each kind, search QA's sets by name and order as
    in Table 2, with "Avg.", the mean over these sets."""
    won: dict[str, list[bool]] = {}
    for kind, success in episodes:
        name = kind_name(kind)
        won.setdefault(SETS.get(name, name), []).append(success)
    names = [*(name for name in SETS.values() if name in won), *sorted(won.keys() - {*SETS.values()})]
    table = {name: success_of(won[name]) | {"games": len(won[name])} for name in names}
    sets = [table[name]["success"] for name in SETS.values() if name in table]
    return table | ({"Avg.": {"success": sum(sets) / len(sets), "sets": len(sets)}} if sets else {})


def kind_lines(table: dict[str, dict[str, float]]) -> list[str]:
    """`kind_rows` for people, a line each."""
    named, lines = {clean(name): row for name, row in table.items()}, []
    for name, row in named.items():
        interval = f"{row['games']} ({row['ci_low']:.1%} to {row['ci_high']:.1%})" if "games" in row else ""
        of = interval or f"{row['sets']} sets"
        lines.append(f"  {name:<{max(map(len, named))}}  {row['success']:6.1%} of {of}")
    return lines


def progress(lines: dict[int, dict[str, Any]], total: int) -> None:
    """On stderr: after every episode at a terminal, else after every tenth of them."""
    played = [line for line in lines.values() if line["failure"] is None]
    text = f"{len(lines)}/{total} episodes, {sum(line['success'] for line in played)} won"
    if sys.stderr.isatty():
        print(f"\r{text}", end="\n" if len(lines) == total else "", file=sys.stderr, flush=True)
    elif len(lines) == total or len(lines) % max(1, total // 10) == 0:
        to_stderr(text)
