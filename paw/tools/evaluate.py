"""`paw eval --agent`, `--endpoint`: held-out tasks played by an agent, each written down as soon as it has ended.

DIR/settings.json says what is evaluated, DIR/episodes.jsonl holds one finished episode a line, results.json and
results.md follow from those. The same command again plays what is missing or could not be played.
"""

import argparse
import json
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from paw import watcher
from paw.agents.endpoint import Endpoint, EndpointModel
from paw.config import Config
from paw.envs import make_factory
from paw.envs.base import check_kind, eval_tasks
from paw.errors import UserError, masked, to_stderr
from paw.files import json_object, write_file
from paw.keys import flatten
from paw.recipe import check_passwords
from paw.rollouts.episode import Episode, find_agent
from paw.rollouts.scheduler import THREADS, Rollouts
from paw.rollouts.success import more_context
from paw.state.claim import lock
from paw.tools import results
from paw.tools.played import load_played
from paw.types import Task, Trajectory

GIVE_UP = 32
"""Episodes in a row that could not be played: the endpoint is gone."""
SETTINGS = ("env.", "agent.", "eval.", "rollout.max_prompt_tokens", "rollout.max_response_tokens")
SIMULATOR = ("env.simulator.model", "env.simulator.noise_start")
"""Keys that decide the outcome, by how they begin, and of env.simulator. Where and how fast an endpoint answers does
not, nor where environments run."""
GROWS = "eval.games"
"""May be another when an evaluation goes on."""


class _GivenUp(Exception):
    pass


class Evaluation(NamedTuple):
    """What an evaluation came to."""

    summary: dict[str, Any]
    text: str
    """The summary for people."""
    played: int
    failed: int
    """Episodes that could not be played."""


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Play `eval.games` tasks with a local model, or the configuration's endpoint, and print what came out.

    Returns 1 if episodes could not be played, or if all of them ran out of context.
    """
    config, path = _who_plays(options.model, options.recipe, overrides)
    evaluation = _play(config, path, options.out)
    print(json.dumps(evaluation.summary) if options.json else evaluation.text)

    out_of_context = evaluation.summary.get("context_full", 0)
    if out_of_context and out_of_context == evaluation.played:
        to_stderr(f"all {out_of_context} episodes ran out of context: {more_context(config)}")
        return 1
    return 1 if evaluation.failed else 0


def evaluate(
    model: str | Path | None = None,
    recipe: str | Path | Config | None = None,
    *,
    out: str | Path | None = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Play held-out games, `eval.games` of them, and return success with its interval, as `paw eval --json` prints it.

    Args:
        model: a run's directory, a model's folder or a Hugging Face name; None: the model of `endpoint.url` plays.
        recipe: what is played and how: a recipe's name or path, or a configuration. Default: the run's own.
        out: folder of an agent's episodes and results; by default in run.dir. The same call plays what is missing.
        changes: keys of the configuration to change: `{"eval.games": 64, "eval.temperature": 0.0}`.

    Returns a dict: "success", its 95 % Wilson interval "ci_low" and "ci_high", "valid_actions", "kinds" (the same for
    each kind of task) and more. Raises UserError for a model, recipe, key or value that does not go.
    """
    config, path = _who_plays(model, recipe, dict(changes or {}))
    return _play(config, path, out).summary


def _who_plays(
    model: str | Path | None, recipe: str | Path | Config | None, overrides: dict[str, Any]
) -> tuple[Config, str | None]:
    """(configuration, path of the model); no path if an endpoint plays."""
    if model is None:
        config = load_played(recipe, overrides)
        if config.endpoint.url is None:
            raise UserError("say which model plays: paw eval MODEL, or paw eval --endpoint URL --model NAME")
        return config, None
    from paw.tools.player import resolve

    config, path = resolve(str(model), recipe, overrides)
    if url := config.endpoint.url:
        raise UserError(f"{model} and endpoint.url = '{url}': one model plays, leave one of them out")
    return config, path


def _play(config: Config, path: str | None, out: str | Path | None) -> Evaluation:
    """Play with the model of that path, or with the configuration's endpoint."""
    if path and config.agent.type == "plain" and out is None:
        from paw.tools.player import evaluate_model, evaluation_text

        summary = evaluate_model(config, path)
        played = round(summary["games"] - summary["failures"])
        return Evaluation(summary, evaluation_text(summary), played=played, failed=round(summary["failures"]))
    summary, folder = _play_agent(config, path, out)
    text = f"{results.table(summary)}\n{folder}"
    return Evaluation(summary, text, played=summary["episodes"], failed=summary["not_played"])


def _play_agent(config: Config, path: str | None, out: str | Path | None) -> tuple[dict[str, Any], Path]:
    """Play the tasks that are not in the folder of the evaluation yet; returns (results, folder)."""
    check_passwords(config)
    if config.agent.type == "zerosearch":
        config = config.model_copy(update={"env": config.env.model_copy(update={"retriever": "zerosearch"})})
    agent, name, started = find_agent(config), path or str(config.endpoint.model), time.monotonic()
    label = re.sub(r"[^\w.-]+", "-", f"eval-{config.env.name}-{config.agent.type}-{name}").strip("-")
    folder = Path(out or config.run.dir / label).absolute()  # an environment may change the current folder
    with ExitStack() as stack:
        endpoint = Endpoint(config.endpoint, template_options=config.model.chat_template_kwargs) if not path else None
        if endpoint:
            endpoint.check()
        factory = make_factory(config)
        tasks = eval_tasks(factory, config.env.eval_split, config.eval.games, config.eval.seed)
        for task in tasks:
            check_kind(task, factory)
        about = masked({"model": name, "games": factory.fingerprint(), **_updates(path), **_settings(config)})
        _open(stack, folder, about)
        player = {"place": 0, "agent": config.agent.type, "model": name, "seed": config.eval.seed}
        lines = _of_this_draw(_read(folder / "episodes.jsonl"), tasks, folder)
        todo = [place for place in range(len(tasks)) if place not in lines or lines[place]["failure"] is not None]
        if lines:
            to_stderr(f"{folder}: {len(tasks) - len(todo)} of {len(tasks)} episodes are there, playing {len(todo)}")
        seed, temperature = config.eval.seed, config.eval.temperature
        episodes = [Episode(Trajectory(tasks[place], 0), place, seed, "eval", temperature) for place in todo]
        in_a_row = 0
        file = stack.enter_context((folder / "episodes.jsonl").open("a", encoding="utf-8"))

        def ended(episode: Episode) -> None:
            nonlocal in_a_row
            line = player | results.episode_line(episode, config.endpoint)
            for key in results.SPENT if line["place"] in lines else ():  # a try that failed was paid for too
                line[key] += lines[line["place"]][key]
            file.write(json.dumps(line) + "\n")
            file.flush()
            lines[line["place"]] = line
            results.progress(lines, len(tasks))
            in_a_row = 0 if line["failure"] is None else in_a_row + 1
            if in_a_row == GIVE_UP:
                raise _GivenUp

        try:
            if episodes and endpoint:
                rollouts = stack.enter_context(closing(Rollouts(factory, None, None, config, agent=agent)))
                at_once = config.endpoint.concurrency
                if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, watcher.interrupt):
                    stack.enter_context(_interrupting(rollouts))
                rollouts.run(episodes, lambda env: EndpointModel(env, config, endpoint), at_once=at_once, ended=ended)
            elif episodes and path:
                from paw.tools.player import open_player

                rollouts = stack.enter_context(open_player(config, path, factory))
                rollouts.run(episodes, at_once=THREADS, ended=ended)
        except _GivenUp:
            to_stderr(f"{GIVE_UP} episodes in a row could not be played: giving up")
        except KeyboardInterrupt:
            to_stderr("")
            to_stderr(f"stopped: {len(lines)} of {len(tasks)} episodes are in {folder}; the same command goes on")
            raise
    if cut := sum(episode.stats.prompts_truncated for episode in episodes):
        to_stderr(f"{cut} prompts were cut to rollout.max_prompt_tokens = {config.rollout.max_prompt_tokens}")
    summary = results.summarise(list(lines.values()), about, config.endpoint, time.monotonic() - started)
    write_file(folder / "results.json", json.dumps(summary, indent=1) + "\n")
    write_file(folder / "results.md", results.table(summary))
    failures = [line["failure"] for line in lines.values() if line["failure"] is not None]
    if failures:
        to_stderr(f"{len(failures)} episodes could not be played ({failures[0]}); the same command plays them again")
    return summary, folder


@contextmanager
def _interrupting(rollouts: Rollouts) -> Iterator[None]:
    """Ctrl-C ends the play in this block. Raised inside a library's task it would become another error.

    Not by the loop's own `add_signal_handler`, which takes the wake-up descriptor from the parent that watches.
    """

    def end(*_: object) -> None:
        watcher.say_heard()
        rollouts.loop.call_soon_threadsafe(rollouts.end, KeyboardInterrupt())

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _settings(config: Config) -> dict[str, Any]:
    flat = {key: value for key, value in flatten(config.model_dump(mode="json")).items() if key.startswith(SETTINGS)}
    del flat["env.processes"]
    return {key: value for key, value in flat.items() if key in SIMULATOR or not key.startswith("env.simulator.")}


def _updates(path: str | None) -> dict[str, Any]:
    """Those behind a model that we exported, by its card: trained on, it is another one in the same folder."""
    card = Path(path, "README.md") if path else None
    text = card.read_text(encoding="utf-8") if card and card.is_file() else ""
    return {"updates": int(found[1])} if (found := re.search(r": (\d+) updates of$", text, re.M)) else {}


def _open(stack: ExitStack, folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder of an evaluation, or see that it holds this one (else UserError); locked while `stack` lasts."""
    path = folder / "settings.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(lock(folder))
        if not path.exists():
            write_file(path, json.dumps(settings, indent=1) + "\n")
        found = json_object(path.read_bytes())
    except OSError as error:
        raise UserError(f"--out {folder}: {path.name}: {error}") from None
    if found is None:
        raise UserError(f"--out {folder}: {path.name} is none of an evaluation; name another folder")
    for key in (*settings, *found):
        if (old := found.get(key)) != (new := settings.get(key)) and key != GROWS:
            other = f"{folder} holds an evaluation with {key} = {old!r}, not {new!r}"
            raise UserError(f"{other}; name another folder with --out")
    if found[GROWS] != settings[GROWS]:
        to_stderr(f"{folder}: {GROWS} = {found[GROWS]} becomes {settings[GROWS]}")
        write_file(path, json.dumps(settings, indent=1) + "\n")


def _of_this_draw(lines: Sequence[dict[str, Any]], tasks: Sequence[Task], folder: Path) -> dict[int, dict[str, Any]]:
    """The line of each place of `tasks` that has one. A draw of another size can have the same task in another place;
    what it has not is left in the file, for when it is drawn again."""
    found, spare = {}, defaultdict(list)
    for line in lines:
        place = line["place"]
        if place < len(tasks) and tasks[place].id == line["task"]:
            found[place] = line
        else:
            spare[line["task"]].append(line)
    for place, task in enumerate(tasks):
        if place not in found and spare[task.id]:
            found[place] = spare[task.id].pop()
    if left := sum(map(len, spare.values())):
        to_stderr(f"{folder}: {left} episodes are not of these {len(tasks)} games; they stay there and count nowhere")
    return found


def _read(path: Path) -> list[dict[str, Any]]:
    """The episodes of a file, the last of each place and task. A last line without its end is cut off the file."""
    whole, _, torn = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
    if torn:
        to_stderr(f"{path}: the last line is incomplete, its episode is played again")
        with path.open("r+b") as file:
            file.truncate(len(whole) + 1 if whole else 0)
    lines = {}
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            line = json.loads(text)
            lines[line["place"], line["task"]] = line
            line["failure"]
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{path}:{number}: this is no episode; fix the line or remove it") from None
    return list(lines.values())
