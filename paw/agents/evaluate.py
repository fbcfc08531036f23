"""`paw eval --agent`, `--endpoint`: held-out tasks played by an agent, each written down as soon as it has ended.

DIR/settings.json says what is evaluated, DIR/episodes.jsonl holds one finished episode a line, results.json and
results.md follow from those. The same command again plays what is missing: episodes that could not be played (the
endpoint or the environment failed), and those that an interruption kept from ending.
"""

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from paw.agents import results
from paw.agents.agents import Agent, make_agent
from paw.agents.episode import Episode
from paw.agents.models import ChatModel, ContextFull, Local
from paw.config import Config
from paw.envs import make_factory
from paw.envs.base import EnvFactory
from paw.envs.guard import Guarded, make_threads
from paw.errors import OURS, UserError, describe, quietly, to_stderr
from paw.files import write_file
from paw.recipe import load_played
from paw.state.claim import lock
from paw.types import Task

LOCAL_THREADS = 64
GIVE_UP = 32
"""Episodes in a row that could not be played: the endpoint is gone."""
SETTINGS = ("env", "webshop", "search", "tau2", "agent", "eval")
FURTHER = {"rollout": ("max_prompt_tokens", "max_response_tokens"), "simulator": ("model", "noise_start")}
"""Sections and keys that decide the outcome. Where and how fast an endpoint answers does not."""


def evaluate(
    model: str | None, recipe: str | None, overrides: dict[str, str], *, out: Path | None, as_json: bool
) -> int:
    """Play `eval.games` tasks with a local `model` (run directory, folder, name) or the endpoint of the configuration.

    Returns 1 where episodes could not be played, else 0.
    """
    if model is None:
        config = load_played(recipe, overrides)
        if config.endpoint.url is None:
            raise UserError("say which model plays: paw eval MODEL, or paw eval --endpoint URL --model NAME")
        return _evaluate(config, None, out, as_json)
    from paw.tools.player import evaluate_model, resolve

    config, path = resolve(model, recipe, overrides)
    if config.endpoint.url is not None:
        raise UserError(f"{model} and endpoint.url = '{config.endpoint.url}': one model plays, leave one of them out")
    if config.agent.kind == "plain" and out is None:
        return evaluate_model(config, path, as_json=as_json)
    return _evaluate(config, path, out, as_json)


def _evaluate(config: Config, path: str | None, out: Path | None, as_json: bool) -> int:
    if config.agent.kind == "zerosearch":
        config = config.model_copy(update={"search": config.search.model_copy(update={"retriever": "zerosearch"})})
    name = path or str(config.endpoint.model)
    label = re.sub(r"[^\w.-]+", "-", f"eval-{config.env.name}-{config.agent.kind}-{name}").strip("-")
    folder = (out or config.run.dir / label).absolute()  # an environment may change the current folder
    threads: list[threading.Thread] = []
    with ExitStack() as stack:
        endpoint = None if path else stack.enter_context(closing(_endpoint(config)))
        factory = make_factory(config)
        agent = make_agent(config, factory)
        tasks = factory.eval_tasks(config.env.eval_split, config.eval.games, config.eval.seed)
        about = _open(stack, folder, {"model": name, "games": factory.fingerprint(), **_settings(config)})
        player = {"place": 0, "agent": config.agent.kind, "model": name, "seed": config.eval.seed}
        lines = _read(folder / "episodes.jsonl")
        todo = [place for place in range(len(tasks)) if lines.get(place, {"failure": True})["failure"] is not None]
        if lines:
            to_stderr(f"{folder}: {len(tasks) - len(todo)} of {len(tasks)} episodes are there, playing {len(todo)}")
        if path and todo:
            from paw.tools.player import open_player

            rollouts = stack.enter_context(open_player(config, path, factory))
            stack.callback(lambda: [thread.join() for thread in threads])  # after Local: then all have ended or failed
            local = Local(rollouts.engine, rollouts.chat, max_prompt_tokens=config.rollout.max_prompt_tokens)
            chat_model: Any = stack.enter_context(closing(local))
        else:
            chat_model = endpoint
        workers = min(len(todo), LOCAL_THREADS if path else config.endpoint.concurrency)

        def play(place: int, environment: Any) -> dict[str, Any]:
            return player | _play(agent, tasks[place], environment, chat_model, config, place)

        started, in_a_row = time.monotonic(), 0
        try:
            with (folder / "episodes.jsonl").open("a", encoding="utf-8") as file:
                for line in _in_threads(todo, play, factory, config, workers, threads):
                    for key in results.SPENT if line["place"] in lines else ():  # a try that failed was paid for too
                        line[key] += lines[line["place"]][key]
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    lines[line["place"]] = line
                    results.progress(lines, len(tasks))
                    in_a_row = 0 if line["failure"] is None else in_a_row + 1
                    if in_a_row == GIVE_UP:
                        to_stderr(f"{GIVE_UP} episodes in a row could not be played: giving up")
                        break
        except KeyboardInterrupt:
            to_stderr("")
            to_stderr(f"stopped: {len(lines)} of {len(tasks)} episodes are in {folder}; the same command goes on")
            raise
        if truncated := getattr(chat_model, "truncated", 0):
            to_stderr(f"{truncated} prompts were cut to rollout.max_prompt_tokens = {config.rollout.max_prompt_tokens}")
    summary = results.summarise(list(lines.values()), about, config.endpoint, time.monotonic() - started)
    table = results.table(summary)
    write_file(folder / "results.json", json.dumps(summary, indent=1) + "\n")
    write_file(folder / "results.md", table)
    print(json.dumps(summary) if as_json else f"{table}\n{folder}")
    failures = [line["failure"] for line in lines.values() if line["failure"] is not None]
    if failures:
        to_stderr(f"{len(failures)} episodes could not be played ({failures[0]}); the same command plays them again")
    return 1 if failures else 0


def _endpoint(config: Config) -> Any:
    from paw.agents.endpoint import Endpoint

    endpoint = Endpoint(config.endpoint, template_options=config.model.chat_template_kwargs)
    endpoint.check()
    return endpoint


def _play(agent: Agent, task: Task, environment: Any, model: ChatModel, config: Config, place: int) -> dict[str, Any]:
    """The line of one episode. Whatever the environment or the endpoint raises is its failure, not a loss."""
    episode = Episode(task, environment, model, config, place)
    started, failure, context_full = time.monotonic(), None, False
    try:
        agent.play(episode)
    except ContextFull:
        context_full = True
    except OURS:
        raise
    except BaseException as error:
        failure = describe(error)
    outcome, prices = episode.outcome, config.endpoint
    won = episode.won and not context_full
    cost = (episode.prompt_tokens * prices.input_price + episode.completion_tokens * prices.output_price) / 1e6
    return {
        "place": place,
        "task": task.id,
        "kind": task.kind,
        "success": won,
        "score": outcome.score if outcome and outcome.score is not None else None,
        "steps": sum(turn["trial"] == episode.trials for turn in episode.turns),
        "trials": episode.trials,
        "plans": episode.plans,
        "turns": episode.turns,
        "calls": episode.calls,
        "prompt_tokens": episode.prompt_tokens,
        "completion_tokens": episode.completion_tokens,
        "cost": cost,
        "seconds": round(time.monotonic() - started, 3),
        "context_full": context_full,
        "failure": failure,
    }


def _in_threads(
    places: list[int],
    play: Callable[[int, Any], dict[str, Any]],
    factory: EnvFactory,
    config: Config,
    workers: int,
    threads: list[threading.Thread],
) -> Iterator[dict[str, Any]]:
    """What `play` returns for every place, as they end; each of the `threads` keeps one environment while it is whole.

    They are daemons: after Ctrl-C nothing waits for an endpoint's answer. None begins a new episode then.
    """
    waiting: SimpleQueue[int] = SimpleQueue()
    ended: SimpleQueue[dict[str, Any] | BaseException] = SimpleQueue()
    for place in places:
        waiting.put(place)

    def work() -> None:
        with ExitStack() as made:
            try:
                environment = None
                while True:
                    place = waiting.get_nowait()
                    environment = environment or made.enter_context(_environment(factory, config))
                    line = play(place, environment)
                    if line["failure"] is not None:
                        made.close()
                        environment = None
                    ended.put(line)
            except Empty:
                return
            except BaseException as error:
                ended.put(error)

    threads += [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for _ in places:
            line = ended.get()
            if isinstance(line, BaseException):
                raise line
            yield line
    finally:
        with suppress(Empty):
            while True:
                waiting.get_nowait()


@contextmanager
def _environment(factory: EnvFactory, config: Config) -> Iterator[Guarded]:
    bounds = make_threads(factory, config.env)
    environment = Guarded(factory, config.env, bounds, bounded=True)
    yield environment
    with quietly():  # it may be broken
        environment.close()
    bounds.close()


def _settings(config: Config) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    sections = {**{section: tree[section] for section in SETTINGS}}
    sections |= {section: {key: tree[section][key] for key in keys} for section, keys in FURTHER.items()}
    return {f"{section}.{key}": value for section, table in sections.items() for key, value in table.items()}


def _open(stack: ExitStack, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Make the folder of an evaluation, or see that it holds this one, and lock it while `stack` lasts.

    Raises UserError where it holds another, or another process is at it.
    """
    path = folder / "settings.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(lock(folder))
        if not path.exists():
            write_file(path, json.dumps(settings, indent=1) + "\n")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--out {folder}: {path.name}: {error}") from None
    for key in itertools.chain(settings, found):
        if (old := found.get(key)) != (new := settings.get(key)):
            raise UserError(
                f"{folder} holds an evaluation with {key} = {old!r}, not {new!r}; name another folder with --out"
            )
    return settings


def _read(path: Path) -> dict[int, dict[str, Any]]:
    """The episodes of a file by their places, the last of each. A last line without its end is cut off the file."""
    if not path.exists():
        return {}
    whole, _, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        to_stderr(f"{path}: the last line is incomplete, its episode is played again")
        with path.open("r+b") as file:
            file.truncate(len(whole) + 1 if whole else 0)
    lines = {}
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            line = json.loads(text)
            lines[line["place"]] = line
            line["failure"]
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{path}:{number}: this is no episode; mend the line or remove it") from None
    return lines
