"""`paw doctor --run DIR`: what happened to a run, and the command that resumes it.

Reads files, writes none.
"""

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
"""How a run says that it ended, in run.json -> in words."""
FILES = ("metrics.jsonl", "config.toml", "run.json", ".lock", "checkpoints")
"""A run directory has at least one of these."""


def run(directory: Path, *, as_json: bool) -> int:
    """Print the findings.

    Returns 1 if there are checkpoints and none of them can be used, else 0.
    """
    findings = masked(examine(directory))  # an older version wrote passwords
    print(json.dumps(findings, indent=1) if as_json else "\n".join(tell(findings)))
    return 1 if findings["checkpoints"] and findings["resumes_from"] is None else 0


def examine(directory: Path) -> dict[str, Any]:
    """The findings in a run directory, JSON-able.

    Raises UserError if there is no such folder, or it is not a run's.
    """
    if not directory.is_dir() or not any((directory / name).exists() for name in FILES):
        raise UserError(
            f"--run {directory}: this is no run directory; give the folder that holds metrics.jsonl"
        )
    info = read_info(directory)
    process = holder(directory)
    log: Run | None = None
    with suppress(UserError):
        log = load_run(directory)

    state, why = _state(info, process, has_log=log is not None)
    checkpoints = {path.name: _problem(path) for path in saved(directory / "checkpoints")}
    usable = [name for name, (_, is_usable) in checkpoints.items() if is_usable]
    last_written = None
    with suppress(OSError):
        mtime = (directory / "metrics.jsonl").stat().st_mtime
        last_written = datetime.fromtimestamp(mtime, UTC).isoformat(timespec="seconds")
    resumed = info.get("resumed")

    findings = {
        "directory": str(directory),
        "state": state,
        "why": clean(why or "") if not process else "",
        "process": process,
        "started": info.get("started"),
        "last_written": last_written,
        "resumed": resumed if isinstance(resumed, list) else [],
        **_log_findings(log),
        "checkpoints": {name: problem for name, (problem, _) in checkpoints.items()},
        "resumes_from": usable[0] if usable else None,
        "free_gib": round(shutil.disk_usage(directory).free / 2**30, 2),
    }
    return findings | {"command": _command(directory, findings, info)}


def _state(info: dict[str, Any], process: str | None, *, has_log: bool) -> tuple[str, Any]:
    """(running, finished, stopped, failed, killed or not begun; the reason that the run gave when it ended)."""
    ended: Any = info.get("ended")
    how, why = (ended.get("how"), ended.get("why")) if isinstance(ended, dict) else (None, None)
    if process:
        return "running", why
    if how in list(ENDS):
        return how, why
    return ("killed" if has_log else "not begun"), why


def _log_findings(log: Run | None) -> dict[str, Any]:
    """The findings in metrics.jsonl; the same keys without it."""
    if log is None:
        return {
            "update": None,
            "updates": None,
            "metrics": {},
            "evaluations": {},
            "failures": {},
            "skipped_steps": None,
            "unreadable_lines": 0,
            "missing_lines": 0,
        }
    last = log.updates
    logged_updates = {step for values in log.metrics.values() for step in values}
    return {
        "update": last,
        "updates": log.config.get("run.updates"),
        "metrics": {key: log.at(key, last) for key in log.metrics if key in LINE},
        "evaluations": log.metrics.get("eval/success", {}),
        "failures": {key: sum(log.metrics.get(key, {}).values()) for key in FAILURES},
        "skipped_steps": log.last("optim/skipped"),
        "unreadable_lines": log.unreadable,
        "missing_lines": log.updates + 1 - len(logged_updates),
    }


def tell(findings: dict[str, Any]) -> list[str]:
    """The findings in words, a line each."""
    lines = [_headline(findings)]
    if findings["last_written"]:
        lines.append(
            f"  last line written {findings['last_written']}, resumed {len(findings['resumed'])} times"
        )
    if findings["metrics"]:
        values = {key: value for key, value in findings["metrics"].items() if value is not None}
        lines.append(
            "  last metrics: " + "  ".join(LINE[key].format(value) for key, value in values.items())
        )
    if findings["evaluations"]:
        update, success = list(findings["evaluations"].items())[-1]
        lines.append(f"  last evaluation: success {success:.1%} at update {update}")

    counts = {
        "environment failures": findings["failures"].get("health/env_failures"),
        "groups dropped": findings["failures"].get("health/groups_dropped"),
        "optimizer steps skipped": findings["skipped_steps"],
        "lines that cannot be read": findings["unreadable_lines"],
        "lines missing": findings["missing_lines"],
    }
    troubles = [f"{count:.0f} {name}" for name, count in counts.items() if count]
    if troubles:
        lines.append("  trouble: " + ", ".join(troubles))

    for name, problem in findings["checkpoints"].items():
        verdict = "ok     " if problem is None else "DAMAGED"
        reason = f": {problem}" if problem else ""
        lines.append(f"  {verdict}  {name}{reason}")
    if not findings["checkpoints"]:
        lines.append("  no checkpoint")
    if findings["free_gib"] < 1.0:
        lines.append(f"  the disk is nearly full: {findings['free_gib']:.2f} GiB are free")
    return [*lines, _advice(findings)]


def _headline(findings: dict[str, Any]) -> str:
    """The directory, the state of its run and how far it came."""
    state = findings["state"]
    at = ""
    if findings["update"] is not None:
        planned = f" of {findings['updates']}" if findings["updates"] else ""
        at = f" at update {findings['update']}{planned}"
    if state == "running":
        text = f"is running in process {findings['process']}{at}"
    elif state == "killed":
        text = f"ended{at} without a word: killed (-9, or for want of memory), a power cut, or a full disk"
    elif state == "not begun":
        text = "has not begun: no update was written down"
    else:
        why = f": {findings['why']}" if findings["why"] else ""
        text = f"{ENDS[state]}{at}{why}"
    return f"{findings['directory']} {text}"


def _advice(findings: dict[str, Any]) -> str:
    """What to do next, with the command."""
    command = findings["command"]
    checkpoint = findings["resumes_from"]
    if findings["state"] == "running":
        return f"to stop it, saved: kill {findings['process']}"
    if command is None:
        return "config.toml cannot be read: start `paw train` again as before, with --resume auto"
    if findings["checkpoints"] and checkpoint is None:
        return "no checkpoint can be used: train anew under another --run.name"
    if findings["state"] == "not begun":
        return f"to start it: {command}"
    if findings["state"] == "finished":
        return f"to train on: {command} --run.updates {2 * (findings['update'] or 1)}"
    return f"to go on from {checkpoint or 'the start, for want of a checkpoint'}: {command}"


def _command(directory: Path, findings: dict[str, Any], info: dict[str, Any]) -> str | None:
    """`paw train` with the run's own configuration, from the run's current folder; None if it cannot be read."""
    config = directory / "config.toml"
    try:
        tomllib.loads(config.read_text(encoding="utf-8") if config.is_file() else "?")
    except (OSError, ValueError, RecursionError):
        return None

    run_dir = directory.absolute()
    start_folder = info.get("folder")
    change_folder = ""
    if isinstance(start_folder, str) and start_folder != str(
        Path.cwd()
    ):  # its configuration's paths count from there
        change_folder = f"cd {shlex.quote(start_folder)} && "
        config = run_dir / config.name

    words = [
        "paw",
        "train",
        str(config),
        "--run.dir",
        str(run_dir.parent),
        "--run.name",
        run_dir.name,
    ]
    ranks = info.get("ranks")
    if type(ranks) is int and ranks > 1:
        words += ["--gpus", str(ranks)]
    if findings["state"] != "not begun":
        words += ["--resume", "auto"]
    return change_folder + shlex.join(words)


def _problem(path: Path) -> tuple[str | None, bool]:
    """(what is wrong with a checkpoint or None, whether it can be used all the same).

    Reads all of it.
    """
    try:
        verify(path)
    except UserError as error:
        problem = (
            str(error).removeprefix(f"checkpoint {path}").removeprefix(" is damaged").lstrip(": ")
        )
        return clean(problem), isinstance(error, ElsewhereError)
    return None, True
