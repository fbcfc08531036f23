"""The result of an evaluation: rows as in the paper's tables, intervals, tokens, dollars, time."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from paw.config.sections import EndpointConfig
from paw.envs.base import kind_name
from paw.envs.search.data import SETS
from paw.errors import clean, masked, to_stderr
from paw.rollouts.attempts import (
    Game,
    attempt_lines,
    attempt_metrics,
    metrics_by_environment,
    share_interval,
)
from paw.rollouts.episode import Episode

COLUMNS = {
    "pick": "Pick",
    "look": "Look",
    "clean": "Clean",
    "heat": "Heat",
    "cool": "Cool",
    "two": "Pick2",
}
"""ALFWorld's task types in the order of the paper's Table 1, and their headings there."""
MAX_CHARS = 10_000
"""Maximum characters of a line, because the environment chooses the names of kinds and games."""
SPENT = ("calls", "prompt_tokens", "completion_tokens", "cost", "seconds")
"""Keys for the cost of an episode. Sums include failed episodes, which cost money too."""


def episode_line(episode: Episode, prices: EndpointConfig, *, attempts: int = 1) -> dict[str, Any]:
    """Return the line of an ended episode for the file of episodes.

    With several `attempts` at each task, the attempts at a task have neighbouring places.
    """
    trajectory = episode.trajectory
    last_outcome = episode.outcome
    stats = episode.stats
    turns = []
    for trial, response, outcome in episode.steps:
        turns.append({
            "trial": trial,
            "response": response,
            "action": outcome.action,
            "valid": outcome.valid,
            "observation": outcome.observation,
            "reward": outcome.reward,
        })  # fmt: skip
    won = last_outcome is not None and last_outcome.won
    cost = stats.prompt_tokens * prices.input_price + stats.response_tokens * prices.output_price
    return {
        "place": episode.index * attempts + trajectory.member,
        "task": trajectory.task.id,
        "kind": trajectory.task.kind,
        "success": won and not episode.context_full,
        "score": last_outcome.score if last_outcome else None,
        "return": trajectory.episode_return,
        "steps": sum(turn["trial"] == episode.trials for turn in turns),
        "trials": episode.trials,
        "plans": episode.notes,
        "turns": turns,
        "calls": len(trajectory.turns),
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.response_tokens,
        "cost": cost / 1e6,  # prices are per million tokens
        "seconds": round(episode.seconds, 3),
        "context_full": episode.context_full,
        "failure": masked(trajectory.failure),
    }


def summarise(
    lines: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    prices: EndpointConfig,
    wall_s: float,
) -> dict[str, Any]:
    """Return success of the played episodes with its 95 % interval, and what they took.

    Success is given overall and by kind of task. With several `eval.attempts`, success is over
    games, and pass@k and best-of-k are added (`attempt_metrics`), with [[envs]] also of each
    environment. `settings` are those in settings.json. `wall_s` is the time of this run alone.
    `seconds` in the result is the sum over all episodes, even if they ran at the same time.
    """
    played = [line for line in lines if line["failure"] is None]
    labels = [table["label"] for table in settings.get("envs", [])]
    turns = [turn for line in played for turn in line["turns"]]
    summary: dict[str, Any] = {
        "environment": settings["env.name"],
        "agent": _agent_names(settings),
        "model": settings["model"],
        "games": settings["games"],
        "temperature": settings["eval.temperature"],
        "episodes": len(played),
    }
    summary |= _outcomes(played, labels, attempts=settings.get("eval.attempts", 1))
    summary["steps"] = sum(line["steps"] for line in played) / max(1, len(played))
    summary["valid_actions"] = sum(turn["valid"] for turn in turns) / max(1, len(turns))
    summary["context_full"] = sum(line["context_full"] for line in played)
    summary["not_played"] = len(lines) - len(played)

    for key in SPENT:
        summary[key] = sum(line[key] for line in lines)
    summary["priced"] = bool(prices.input_price or prices.output_price)
    summary["wall_s"] = round(wall_s, 1)
    return summary


def _outcomes(
    played: Sequence[dict[str, Any]], labels: Sequence[str], *, attempts: int
) -> dict[str, Any]:
    """Return success, scores and kinds of played episodes. `labels` are of several environments."""
    outcomes: dict[str, Any] = {}
    scored_envs = {_env_of(line, labels) for line in played if line["score"] is not None}
    shares = [(line["kind"], float(line["success"])) for line in played]
    if attempts > 1:
        games = _games_of(played, attempts, labels, scored_envs)
        shares = [(game.kind, game.success) for game in games]
        outcomes |= _without_games(attempt_metrics(games)) | metrics_by_environment(games)
    outcomes |= success_of([share for _, share in shares])
    if scored_envs:
        scores = [line["score"] or 0.0 for line in played if _env_of(line, labels) in scored_envs]
        outcomes["score"] = sum(scores) / len(scores)

    if labels:
        outcomes["envs"] = list(labels)
        shares += [(kind.partition("/")[0], share) for kind, share in shares]
    outcomes["kinds"] = kind_rows(shares)
    return outcomes


def _agent_names(settings: dict[str, Any]) -> str:
    """Return the type of the agent, or of all that several environments have."""
    default = settings["agent.type"]
    tables = settings.get("envs", [{}])
    names = [table.get("agent", {}).get("type", default) for table in tables]
    return " + ".join(dict.fromkeys(names))


def _env_of(line: dict[str, Any], labels: Sequence[str]) -> str:
    """Return the label of an episode's environment, which its kind begins with; "" if only one."""
    return line["kind"].partition("/")[0] if labels else ""


def _games_of(
    played: Sequence[dict[str, Any]], attempts: int, labels: Sequence[str], scored_envs: set[str]
) -> list[Game]:
    """Return the games of played episodes. The attempts at a game have neighbouring places.

    `labels` are those of several environments. Environments not in `scored_envs` have no scores, so
    their returns are used instead.
    """
    lines_by_game: dict[int, list[dict[str, Any]]] = {}
    for line in played:
        lines_by_game.setdefault(line["place"] // attempts, []).append(line)

    games: list[Game] = []
    for lines in lines_by_game.values():
        env = _env_of(lines[0], labels)
        scores: list[float] = []
        for line in lines:
            scores.append((line["score"] or 0.0) if env in scored_envs else line["return"])
        games.append(
            Game(
                kind=lines[0]["kind"],
                attempts=len(lines),
                successes=sum(line["success"] for line in lines),
                scores=tuple(scores),
                env=env,
            )
        )
    return games


def _without_games(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return `attempt_metrics` for results.json, whose games are the source of the tasks."""
    return {name: value for name, value in metrics.items() if name != "games"}


def table(summary: dict[str, Any]) -> str:
    """Return a one-row Markdown table with the columns of the paper's tables, and then the rest."""
    cells = _cells(summary)
    shares = [f"{100 * value:.1f}" for value in cells.values()]
    row = [summary["model"], summary["agent"], *shares]
    cost = f", ${summary['cost']:.2f}" if summary["priced"] else ""
    lines = [
        *markdown(["Model", "Agent", *cells], [row]).split("\n"),
        "",
        f"{summary['games']}, temperature {summary['temperature']:g}: "
        f"success {summary['success']:.1%} of {summary['episodes']} episodes "
        f"(95 % interval {summary['ci_low']:.1%} to {summary['ci_high']:.1%})",
        *attempt_lines(summary),
        f"{summary['steps']:.1f} turns an episode, valid actions {summary['valid_actions']:.1%}; "
        f"{summary['calls']} calls, {summary['prompt_tokens']} prompt and "
        f"{summary['completion_tokens']} completion tokens{cost}; "
        f"{summary['seconds']:.0f} s of episodes, "
        f"{summary['wall_s']:.0f} s by the clock in this run",
    ]
    if summary["context_full"]:
        lines.append(
            f"{summary['context_full']} episodes were lost because the model's context was full"
        )
    if summary["not_played"]:
        lines.append(
            f"{summary['not_played']} episodes could not be played and are not counted above"
        )
    return "\n".join(clean(line, MAX_CHARS) for line in lines) + "\n"


def _cells(summary: dict[str, Any]) -> dict[str, float]:
    """Return shares by heading: the columns of Table 1, the environment's other kinds, and all."""
    if summary["environment"] == "webshop":
        return {"Score": summary.get("score", 0.0), "Succ.": summary["success"]}
    success = {kind: row["success"] for kind, row in summary["kinds"].items()}
    cells = {heading: success[kind] for kind, heading in COLUMNS.items() if kind in success}
    cells |= {kind: share for kind, share in success.items() if kind not in COLUMNS}
    if "Avg." not in success:
        cells["All"] = summary["success"]
    return cells


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table. "-" stands for None.

    >>> print(markdown(["model", "success"], [["a|b", None]]))
    | model | success |
    | --- | --- |
    | a\\|b | - |
    """

    def text(cell: object) -> str:
        if cell is None:
            return "-"
        return str(cell).replace("|", r"\|").replace("\n", " ")

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    lines = [line(map(text, header)), line(["---"] * len(header))]
    for row in rows:
        lines.append(line(map(text, row)))
    return "\n".join(lines)


def success_of(shares: Sequence[float]) -> dict[str, float]:
    """Return the mean of the games' shares of attempts won, with its 95 % interval over games."""
    low, high = share_interval(shares)
    return {"success": sum(shares) / max(1, len(shares)), "ci_low": low, "ci_high": high}


def kind_rows(games: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
    """Return success, its interval and the number of games by kind.

    `games` are (kind, share of attempts won), which is 0 or 1 if there was one attempt.

    Search QA's sets have the names and the order of the paper's Table 2, and a row "Avg." with the
    mean over these sets.
    """
    shares_by_name: dict[str, list[float]] = {}
    for kind, share in games:
        name = kind_name(kind)
        shares_by_name.setdefault(SETS.get(name, name), []).append(share)

    set_names = [name for name in SETS.values() if name in shares_by_name]
    other_names = sorted(shares_by_name.keys() - set(SETS.values()))
    rows: dict[str, dict[str, float]] = {}
    for name in [*set_names, *other_names]:
        shares = shares_by_name[name]
        rows[name] = success_of(shares) | {"games": len(shares)}

    if set_names:
        success_sum = sum(rows[name]["success"] for name in set_names)
        rows["Avg."] = {"success": success_sum / len(set_names), "sets": len(set_names)}
    return rows


def kind_lines(table: dict[str, dict[str, float]]) -> list[str]:
    """Return `kind_rows` as text for people, one line per row."""
    rows = {clean(name): row for name, row in table.items()}
    width = max(map(len, rows), default=0)
    lines = []
    for name, row in rows.items():
        if "games" in row:
            games_text = f"{row['games']} ({row['ci_low']:.1%} to {row['ci_high']:.1%})"
        else:
            games_text = f"{row['sets']} sets"
        lines.append(f"  {name:<{width}}  {row['success']:6.1%} of {games_text}")
    return lines


def progress(lines: dict[int, dict[str, Any]], total: int) -> None:
    """Show an evaluation's progress on stderr. Without a terminal, only after each 10 %."""
    ended = len(lines)
    won = sum(line["success"] for line in lines.values() if line["failure"] is None)
    text = f"{ended}/{total} episodes, {won} won"
    if sys.stderr.isatty():
        print(f"\r{text}", end="\n" if ended == total else "", file=sys.stderr, flush=True)
    elif ended == total or ended % max(1, total // 10) == 0:
        to_stderr(text)
