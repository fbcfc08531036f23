"""`paw doctor --run DIR`: what happened to a run and the command that goes on from there. Reads files, writes none."""

import json
import shlex
import shutil
import tomllib
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paw.errors import UserError, clean, masked
from paw.state.checkpoint import ElsewhereError, saved
from paw.state.claim import holder
from paw.state.record import read_info
from paw.state.restore import verify
from paw.tools.callbacks import LINE
from paw.tools.rundir import Run, load_run

FAILURES = ("health/env_failures", "health/groups_dropped")
ENDS = {"finished": "finished", "stopped": "was told to stop", "failed": "ended with an error"}


def run(directory: Path, *, as_json: bool) -> int:
    """Print the findings; 1 where there are checkpoints and none of them can be used, else 0."""
    found = masked(examine(directory))  # an older version wrote passwords
    print(json.dumps(found, indent=1) if as_json else "\n".join(tell(found)))
    return 1 if found["checkpoints"] and found["resumes_from"] is None else 0


def examine(directory: Path) -> dict[str, Any]:
    """What the files of a run directory say, as JSON. UserError where there is no such folder, or none of a run's."""
    names = ("metrics.jsonl", "config.toml", "run.json", ".lock", "checkpoints")
    if not directory.is_dir() or not any((directory / name).exists() for name in names):
        raise UserError(f"--run {directory}: this is no run directory; give the folder that holds metrics.jsonl")
    info, by = read_info(directory), holder(directory)
    log: Run | None = None
    with suppress(UserError):
        log = load_run(directory)
    end: Any = info.get("ended")
    how, why = (end.get("how"), end.get("why")) if isinstance(end, dict) else (None, None)
    state = "running" if by else how if how in list(ENDS) else "killed" if log else "not begun"
    problems = {path.name: _problem(path) for path in saved(directory / "checkpoints")}
    written, last, resumed = None, log.updates if log else None, info.get("resumed")
    with suppress(OSError):
        mtime = (directory / "metrics.jsonl").stat().st_mtime
        written = datetime.fromtimestamp(mtime, UTC).isoformat(timespec="seconds")
    logged = {step for values in log.metrics.values() for step in values} if log else {}
    found = {
        "directory": str(directory),
        "state": state,
        "why": clean(why or "") if not by else "",
        "process": by,
        "started": info.get("started"),
        "last_written": written,
        "resumed": resumed if isinstance(resumed, list) else [],
        "update": last,
        "updates": log.config.get("run.updates") if log else None,
        "metrics": {key: log.at(key, last) for key in log.metrics if key in LINE} if log and last is not None else {},
        "evaluations": log.metrics.get("eval/success", {}) if log else {},
        "failures": {key: sum(log.metrics.get(key, {}).values()) for key in FAILURES} if log else {},
        "skipped_steps": log.last("optim/skipped") if log else None,
        "unreadable_lines": log.unreadable if log else 0,
        "missing_lines": log.updates + 1 - len(logged) if log else 0,
        "checkpoints": {name: problem for name, (problem, _) in problems.items()},
        "resumes_from": next((name for name, (_, usable) in problems.items() if usable), None),
        "free_gib": round(shutil.disk_usage(directory).free / 2**30, 2),
    }
    return found | {"command": _command(directory, found, info)}


def tell(found: dict[str, Any]) -> list[str]:
    """The findings in words."""
    planned = f" of {found['updates']}" if found["updates"] else ""
    at = f" at update {found['update']}{planned}" if found["update"] is not None else ""
    state, why = found["state"], found["why"] and f": {found['why']}"
    what = {
        "running": f"is running in process {found['process']}{at}",
        "killed": f"ended{at} without a word: killed (-9, or for want of memory), a power cut, or a full disk",
        "not begun": "has not begun: no update was written down",
    }.get(state) or f"{ENDS[state]}{at}{why}"
    lines = [f"{found['directory']} {what}"]
    if found["last_written"]:
        lines.append(f"  last line written {found['last_written']}, resumed {len(found['resumed'])} times")
    if found["metrics"]:
        values = {key: value for key, value in found["metrics"].items() if value is not None}
        lines.append("  last metrics: " + "  ".join(LINE[key].format(value) for key, value in values.items()))
    if found["evaluations"]:
        update, success = list(found["evaluations"].items())[-1]
        lines.append(f"  last evaluation: success {success:.1%} at update {update}")
    troubles = {
        "environment failures": found["failures"].get("health/env_failures"),
        "groups dropped": found["failures"].get("health/groups_dropped"),
        "optimizer steps skipped": found["skipped_steps"],
        "lines that cannot be read": found["unreadable_lines"],
        "lines missing": found["missing_lines"],
    }
    if trouble := [f"{count:.0f} {name}" for name, count in troubles.items() if count]:
        lines.append("  trouble: " + ", ".join(trouble))
    for name, problem in found["checkpoints"].items():
        lines.append(f"  {'ok     ' if problem is None else 'DAMAGED'}  {name}{(problem and f': {problem}') or ''}")
    if not found["checkpoints"]:
        lines.append("  no checkpoint")
    if found["free_gib"] < 1.0:
        lines.append(f"  the disk is nearly full: {found['free_gib']:.2f} GiB are free")
    return [*lines, _advice(found)]


def _advice(found: dict[str, Any]) -> str:
    command, source = found["command"], found["resumes_from"]
    if found["state"] == "running":
        return f"to stop it, saved: kill {found['process']}"
    if command is None:
        return "config.toml cannot be read: start `paw train` again as before, with --resume auto"
    if found["checkpoints"] and source is None:
        return "no checkpoint can be used: train anew under another --run.name"
    if found["state"] == "not begun":
        return f"to start it: {command}"
    if found["state"] == "finished":
        return f"to train on: {command} --run.updates {2 * (found['update'] or 1)}"
    return f"to go on from {source or 'the start, for want of a checkpoint'}: {command}"


def _command(directory: Path, found: dict[str, Any], info: dict[str, Any]) -> str | None:
    """`paw train` with the run's own configuration, wherever it lies now; None where that cannot be read."""
    config = directory / "config.toml"
    try:
        tomllib.loads(config.read_text(encoding="utf-8") if config.is_file() else "?")
    except (OSError, ValueError, RecursionError):
        return None
    place, began, there = directory.absolute(), info.get("folder"), ""
    if isinstance(began, str) and began != str(Path.cwd()):  # paths of its configuration count from there
        there, config = f"cd {shlex.quote(began)} && ", place / config.name
    words = ["paw", "train", str(config), "--run.dir", str(place.parent), "--run.name", place.name]
    if type(ranks := info.get("ranks")) is int and ranks > 1:
        words += ["--gpus", str(ranks)]
    return there + shlex.join([*words, *([] if found["state"] == "not begun" else ["--resume", "auto"])])


def _problem(path: Path) -> tuple[str | None, bool]:
    """What is wrong with a checkpoint, and whether it can be used all the same; reads all of it."""
    try:
        verify(path)
    except UserError as error:
        what = str(error).removeprefix(f"checkpoint {path}").removeprefix(" is damaged").lstrip(": ")
        return clean(what), isinstance(error, ElsewhereError)
    return None, True
