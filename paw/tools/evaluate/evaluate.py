"""`paw eval`: a model or an endpoint plays held-out tasks.

With an agent or an endpoint, each episode is written as soon as it has ended. DIR/settings.json
says what is evaluated, DIR/episodes.jsonl has one finished episode per line, and results.json and
results.md are computed from those. Running the same command again plays the episodes that are
missing or could not be played.

paw.tools.evaluate.player, which loads torch, is imported only if a local model plays, because an
endpoint does not need it.
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
from typing import Any, NamedTuple, TextIO

from paw.agents.endpoint import Endpoint, EndpointModel
from paw.config.keys import flatten
from paw.config.recipe import check_passwords
from paw.config.sections import Config
from paw.envs import make_factory
from paw.envs.base import EnvFactory, check_kind, eval_tasks
from paw.errors import UserError, masked, to_stderr
from paw.io.files import json_object, write_file
from paw.processes import watcher
from paw.rollouts.episode import Episode, find_agent, find_own_agents
from paw.rollouts.scheduler import Rollouts
from paw.rollouts.success import more_context
from paw.rundir.run_lock import lock
from paw.tools.evaluate import results
from paw.tools.evaluate.played import load_played
from paw.types import Task, Trajectory

GIVE_UP = 32
"""Number of failed episodes in a row after which an evaluation ends. The endpoint seems to be down.
"""
SETTINGS = ("env.", "agent.", "eval.", "rollout.max_prompt_tokens", "rollout.max_response_tokens")
"""Prefixes of the keys that affect the outcome.

The address and speed of an endpoint do not affect it. Nor does the place where environments run.
"""
SIMULATOR = ("env.simulator.model", "env.simulator.noise_start")
"""The keys of env.simulator that affect the outcome."""
GROWS = "eval.games"
"""The key that may change when an evaluation is continued."""


class _GivenUp(Exception):
    """GIVE_UP episodes in a row could not be played."""


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    summary: dict[str, Any]
    text: str
    """The summary for people."""
    played: int
    """Number of episodes that were played to their end."""
    failed: int
    """Number of episodes that could not be played."""


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Play `eval.games` tasks with a local model or an endpoint, and print the result.

    Returns 1 if episodes could not be played, or if all of them ran out of context, else 0.
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
    """Play `eval.games` held-out games, each `eval.attempts` times.

    Returns what `paw eval --json` prints.

    Args:
        model: a run's directory, a model's folder or a Hugging Face name; None: the model of
            `endpoint.url`.
        recipe: what is played and how: a recipe's name or path, or a configuration. Default: the
            run's own.
        out: folder for the episodes and results of an agent. Default: one in run.dir. Repeating
            the call plays what is missing.
        changes: keys of the configuration to change: `{"eval.games": 64, "eval.temperature": 0.0}`.

    Returns a dict: "success", its 95 % interval "ci_low" and "ci_high", "valid_actions", "kinds"
    (the same for each kind of task) and more. With several attempts, also "pass_at_1",
    "pass_at_1_low", "pass_at_1_high", "best_at_1" and so on for k = 1, 2, 4, ... up to their
    number. Raises UserError if the model, the recipe, a key or a value cannot be used.
    """
    config, path = _who_plays(model, recipe, dict(changes or {}))
    return _play(config, path, out).summary


def _who_plays(
    model: str | Path | None, recipe: str | Path | Config | None, overrides: dict[str, Any]
) -> tuple[Config, str | None]:
    """Return (configuration, path of the model). The path is None if an endpoint plays.

    Raises UserError if neither or both are given.
    """
    if model is None:
        config = load_played(recipe, overrides)
        if config.endpoint.url is None:
            raise UserError(
                "say which model plays: paw eval MODEL, or paw eval --endpoint URL --model NAME"
            )
        return config, None
    from paw.tools.evaluate.player import resolve

    config, path = resolve(str(model), recipe, overrides)
    if config.endpoint.url:
        raise UserError(
            f"{model} and endpoint.url = '{config.endpoint.url}': "
            "only one model can play, so leave one of them out"
        )
    return config, path


def _play(config: Config, path: str | None, out: str | Path | None) -> Evaluation:
    """Play with the model at `path`, or with the configuration's endpoint if it is None."""
    is_plain = config.agent.type == "plain" and not config.own_agents
    if path and is_plain and out is None:
        return _play_model(config, path)

    summary, folder = _play_agent(config, path, out)
    text = f"{results.table(summary)}\n{folder}"
    return Evaluation(summary, text=text, played=summary["episodes"], failed=summary["not_played"])


def _play_model(config: Config, path: str) -> Evaluation:
    """Play as the evaluations of a training run do. No episodes are written."""
    from paw.tools.evaluate.player import evaluate_model, evaluation_text

    summary = evaluate_model(config, path)
    failed = round(summary["failures"])
    played = round(summary["games"]) * config.eval.attempts - failed
    return Evaluation(summary, text=evaluation_text(summary), played=played, failed=failed)


class _Episodes:
    """The finished episodes of an evaluation.

    `lines` has their lines by place among the tasks, at first those already in `file`. A new one is
    also appended to `file`.
    """

    def __init__(
        self,
        config: Config,
        file: TextIO,
        lines: dict[int, dict[str, Any]],
        *,
        model: str,
        tasks: int,
    ) -> None:
        self.config = config
        self.file = file
        self.lines = lines
        self.model = model
        self.tasks = tasks
        self.failures_in_a_row = 0

    def add(self, episode: Episode) -> None:
        """Write an episode that has ended. Raises _GivenUp after GIVE_UP failures in a row."""
        label = episode.trajectory.task.env
        line: dict[str, Any] = {
            "place": 0,  # makes it the first column; `episode_line` has its value
            "agent": self.config.own_agents.get(label, self.config.agent).type,
            "model": self.model,
            "seed": self.config.eval.seed,
        }
        line |= results.episode_line(
            episode, self.config.endpoint, attempts=self.config.eval.attempts
        )
        place = line["place"]
        if place in self.lines:
            for key in results.SPENT:  # a failed attempt also costs money
                line[key] += self.lines[place][key]
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        self.lines[place] = line
        results.progress(self.lines, self.tasks)

        if line["failure"] is None:
            self.failures_in_a_row = 0
        else:
            self.failures_in_a_row += 1
        if self.failures_in_a_row == GIVE_UP:
            raise _GivenUp


def _play_agent(
    config: Config, path: str | None, out: str | Path | None
) -> tuple[dict[str, Any], Path]:
    """Play the tasks that are not yet in the evaluation's folder. Returns (results, folder)."""
    check_passwords(config)
    if config.agent.type == "zerosearch":
        if config.envs:
            raise UserError("agent.type = 'zerosearch' plays [env], not several [[envs]]")
        env = config.env.model_copy(update={"retriever": "zerosearch"})
        config = config.model_copy(update={"env": env})
    find_agent(config)
    find_own_agents(config)
    model = path or str(config.endpoint.model)
    folder = Path(out or _default_folder(config, model))
    folder = folder.absolute()  # an environment may change the current folder
    started = time.monotonic()

    with ExitStack() as stack:
        endpoint = None if path else _checked_endpoint(config)
        factory = make_factory(config)
        tasks = _attempted_tasks(_checked_tasks(factory, config), config)

        settings = {"model": model, "games": factory.fingerprint()}
        settings = masked(settings | _updates(path) | _deciding_keys(config))
        _open(stack, folder, settings)
        lines = _lines_of_tasks(_read(folder / "episodes.jsonl"), tasks, folder)
        episodes = _episodes_to_play(config, tasks, lines)
        if lines:
            to_stderr(
                f"{folder}: {len(tasks) - len(episodes)} of {len(tasks)} episodes are there, "
                f"playing {len(episodes)}"
            )
        file = stack.enter_context((folder / "episodes.jsonl").open("a", encoding="utf-8"))
        finished = _Episodes(config, file, lines, model=model, tasks=len(tasks))

        with _early_end_reported(finished, folder):
            if episodes and endpoint:
                rollouts = Rollouts(factory, None, None, config)
                stack.enter_context(closing(rollouts))
                _play_with_endpoint(rollouts, episodes, finished, config, endpoint)
            elif episodes and path:
                from paw.tools.evaluate.player import open_player

                rollouts = stack.enter_context(open_player(config, path, factory))
                rollouts.run_episodes(episodes, at_once=config.env.threads, on_end=finished.add)

    _report_cut_prompts(episodes, config)
    seconds = time.monotonic() - started
    summary = _write_results(folder, list(lines.values()), settings, config, seconds=seconds)
    return summary, folder


def _checked_endpoint(config: Config) -> Endpoint:
    """Return the endpoint, once it has answered. Raises UserError if it does not."""
    endpoint = Endpoint(config.endpoint, template_options=config.model.chat_template_kwargs)
    endpoint.check()
    return endpoint


def _checked_tasks(factory: EnvFactory, config: Config) -> list[Task]:
    """Return the tasks to play. Raises UserError if reports cannot name the kind of one."""
    tasks = eval_tasks(factory, config.env.eval_split, config.eval.games, config.eval.seed)
    for task in tasks:
        check_kind(task, factory)
    return tasks


def _attempted_tasks(tasks: list[Task], config: Config) -> list[Task]:
    """Return each task as often as it is attempted, the attempts at a task next to each other."""
    return [task for task in tasks for _ in range(config.eval.attempts)]


@contextmanager
def _early_end_reported(finished: _Episodes, folder: Path) -> Iterator[None]:
    """Report on stderr if the play in this block is interrupted, or given up and so ended."""
    try:
        yield
    except _GivenUp:
        to_stderr(f"{GIVE_UP} episodes in a row could not be played: giving up")
    except KeyboardInterrupt:
        to_stderr("")
        to_stderr(
            f"stopped: {len(finished.lines)} of {finished.tasks} episodes are in {folder}; "
            "the same command continues"
        )
        raise


def _default_folder(config: Config, model: str) -> Path:
    """Return a folder in run.dir named after the environment, the agent and the model."""
    label = f"eval-{config.env.name}-{config.agent.type}-{model}"
    return config.run.dir / re.sub(r"[^\w.-]+", "-", label).strip("-")


def _episodes_to_play(
    config: Config, tasks: Sequence[Task], lines: dict[int, dict[str, Any]]
) -> list[Episode]:
    """Return the episodes without a line, or whose line is from a failed attempt."""
    return [
        _episode(config, task, place)
        for place, task in enumerate(tasks)
        if place not in lines or lines[place]["failure"] is not None
    ]


def _episode(config: Config, task: Task, place: int) -> Episode:
    task_index, attempt = divmod(place, config.eval.attempts)
    return Episode(
        Trajectory(task, member=attempt),
        index=task_index,
        seed=config.eval.seed,
        stream="eval",
        temperature=config.eval.temperature,
    )


def _play_with_endpoint(
    rollouts: Rollouts,
    episodes: list[Episode],
    finished: _Episodes,
    config: Config,
    endpoint: Endpoint,
) -> None:
    with ExitStack() as stack:
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, watcher.interrupt):
            stack.enter_context(_interrupting(rollouts))
        rollouts.run_episodes(
            episodes,
            make_model=lambda env: EndpointModel(env, config, endpoint),
            at_once=config.endpoint.concurrency,
            on_end=finished.add,
        )


def _report_cut_prompts(episodes: Sequence[Episode], config: Config) -> None:
    cut_prompts = sum(episode.stats.prompts_truncated for episode in episodes)
    if cut_prompts:
        limit = config.rollout.max_prompt_tokens
        to_stderr(f"{cut_prompts} prompts were cut to rollout.max_prompt_tokens = {limit}")


def _write_results(
    folder: Path,
    lines: list[dict[str, Any]],
    settings: dict[str, Any],
    config: Config,
    *,
    seconds: float,
) -> dict[str, Any]:
    """Write results.json and results.md, and report failures. Returns the summary."""
    summary = results.summarise(lines, settings, config.endpoint, wall_s=seconds)
    write_file(folder / "results.json", json.dumps(summary, indent=1) + "\n")
    write_file(folder / "results.md", results.table(summary))
    failures = [line["failure"] for line in lines if line["failure"] is not None]
    if failures:
        to_stderr(
            f"{len(failures)} episodes could not be played ({failures[0]}); "
            "the same command plays them again"
        )
    return summary


@contextmanager
def _interrupting(rollouts: Rollouts) -> Iterator[None]:
    """Make Ctrl-C end the play in this block.

    Inside a library's task, a KeyboardInterrupt would become another error. The loop's own
    `add_signal_handler` cannot be used, because it takes the wake-up descriptor from the parent
    that watches.
    """

    def end(*_: object) -> None:
        watcher.say_heard()
        rollouts.loop.call_soon_threadsafe(rollouts.end, KeyboardInterrupt())

    previous_handler = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _deciding_keys(config: Config) -> dict[str, Any]:
    """Return the dotted keys of the configuration that affect the outcome, with their values."""
    settings = {}
    for key, value in flatten(config.model_dump(mode="json")).items():
        if key == "env.processes" or not key.startswith(SETTINGS):
            continue
        if key.startswith("env.simulator.") and key not in SIMULATOR:
            continue
        settings[key] = value
    if config.envs:
        tables = [entry.model_dump(mode="json", exclude={"share"}) for entry in config.envs]
        settings["envs"] = [table | {"processes": 0} for table in tables]
    return settings


def _updates(path: str | None) -> dict[str, Any]:
    """Return `updates`, how long an exported PaW model was trained, from its card; otherwise {}.

    It distinguishes models that were exported to the same folder, one of them after further
    training.
    """
    if path is None:
        return {}
    card = Path(path, "README.md")
    if not card.is_file():
        return {}
    match = re.search(r": (\d+) updates of$", card.read_text(encoding="utf-8"), re.M)
    return {"updates": int(match[1])} if match else {}


def _open(stack: ExitStack, folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder of an evaluation, and lock it until `stack` closes.

    Raises UserError if the folder cannot be written, or holds episodes of another evaluation.
    """
    path = folder / "settings.json"
    episodes = folder / "episodes.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(lock(folder))
        if not path.exists():
            write_file(path, json.dumps(settings, indent=1) + "\n")
        stored = json_object(path.read_bytes())
    except OSError as error:
        raise UserError(f"--out {folder}: {path.name}: {error}") from None
    if stored is None:
        raise UserError(
            f"--out {folder}: {path.name} does not belong to an evaluation; name another folder"
        )
    if not (episodes.is_file() and episodes.stat().st_size):  # it failed before it played any
        write_file(path, json.dumps(settings, indent=1) + "\n")
        return
    for key in (*settings, *stored):
        stored_value = stored.get(key)
        value = settings.get(key)
        if stored_value != value and key != GROWS:
            raise UserError(
                f"{folder} holds an evaluation with {key} = {stored_value!r}, not {value!r}; "
                "name another folder with --out"
            )
    if stored[GROWS] != settings[GROWS]:
        to_stderr(f"{folder}: {GROWS} = {stored[GROWS]} becomes {settings[GROWS]}")
        write_file(path, json.dumps(settings, indent=1) + "\n")


def _lines_of_tasks(
    lines: Sequence[dict[str, Any]], tasks: Sequence[Task], folder: Path
) -> dict[int, dict[str, Any]]:
    """Return the lines of tasks that were already played, by place among `tasks`.

    With another eval.games, a task can have another place. Lines of tasks that are not among
    `tasks` stay in the file, in case those tasks are drawn again.
    """
    by_place: dict[int, dict[str, Any]] = {}
    unplaced: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        place = line["place"]
        if place < len(tasks) and tasks[place].id == line["task"]:
            by_place[place] = line
        else:
            unplaced[line["task"]].append(line)
    for place, task in enumerate(tasks):
        if place not in by_place and unplaced[task.id]:
            by_place[place] = unplaced[task.id].pop() | {"place": place}

    ignored = sum(len(task_lines) for task_lines in unplaced.values())
    if ignored:
        to_stderr(
            f"{folder}: {ignored} episodes are not of these {len(tasks)} games; "
            "they stay there and are not counted"
        )
    return by_place


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the episodes of a file: the last line of each place and task.

    An incomplete last line is removed from the file. Raises UserError if a line is not an episode.
    """
    content = path.read_bytes() if path.exists() else b""
    complete, _, incomplete_line = content.rpartition(b"\n")
    if incomplete_line:
        to_stderr(f"{path}: the last line is incomplete; its episode is played again")
        with path.open("r+b") as file:
            file.truncate(len(complete) + 1 if complete else 0)
    lines = {}
    for number, text in enumerate(complete.splitlines(), start=1):
        try:
            line = json.loads(text)
            lines[line["place"], line["task"]] = line
            line["failure"]  # must be there
        except (ValueError, LookupError, TypeError):
            raise UserError(
                f"{path}:{number}: this is not an episode; fix the line or remove it"
            ) from None
    return list(lines.values())
