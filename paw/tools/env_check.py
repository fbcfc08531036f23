"""`paw env check`: whether an environment keeps what training relies on (docs/environments.md), one line a rule.

A few episodes are played: by the expert, by chance, with garbage, and a mixture. Each is then played again, with the
same responses, in circumstances that must not matter.
"""

import argparse
import json
import math
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paw.envs import make_factory
from paw.envs.base import Env, EnvFactory
from paw.envs.load import find_class, is_own, missing
from paw.errors import OURS, UserError, clean, describe, shown
from paw.recipe import load_played
from paw.tools.env_replay import (
    GARBAGE,
    Broken,
    Episode,
    Subject,
    answers_of,
    compare,
    differ,
    expert_of,
    look,
    repeat,
)
from paw.types import Outcome, Task

BASE = "paw/envs/base.py"


@dataclass(frozen=True)
class Finding:
    rule: str
    ok: bool
    seen: str


# ---- the rules, as they are checked and named. Each returns a remark, or raises.


def members(s: Subject) -> str:
    _lacks_nothing(s.factory, EnvFactory)
    with s.made() as environment:
        _lacks_nothing(environment, Env)
    _fits(
        s.factory,
        f"EnvFactory in {BASE}",
        name=lambda value: isinstance(value, str) and value,
        reward_max=lambda value: _number(value) and value > 0,
        invalid_penalty=lambda value: _number(value) and value >= 0,
        may_block=lambda value: isinstance(value, bool),
    )
    prints = [factory.fingerprint() for factory in (s.factory, s.factory, s.make_factory())]
    if not isinstance(prints[0], str) or len({*prints}) > 1:
        raise Broken(f"fingerprint() is {shown(prints)}; it must be one text for the same games")
    return f"{type(s.factory).__name__} and {type(environment).__name__}: {prints[0]}"


def training_tasks(s: Subject) -> str:
    expected = [_keys(s.tasks, 4), _keys(s.factory.train_tasks(3, 4, 0), 4)]
    for factory, when in ((s.factory, "asked again"), (s.make_factory(), "in a resumed run")):
        later = _keys(factory.train_tasks(3, 4, 0))
        found = [_keys(factory.train_tasks(0, 4, 0)), later]
        if found != expected:
            raise Broken(f"train_tasks, {when}: {differ(expected, found)}; derive them from the arguments alone")
    return f"the first is {s.tasks[0].id}"


def evaluation_tasks(s: Subject) -> str:
    split, fresh = s.env.eval_split, s.make_factory()
    expected = [_keys(s.factory.eval_tasks(split, 4, 7), 4), _keys(s.held_out)]
    for factory in (s.factory, fresh):
        found = [_keys(factory.eval_tasks(split, 4, 7)), _keys(fresh.eval_tasks(split, 0, 0))]
        if found != expected:
            raise Broken(f"eval_tasks, asked again: {differ(expected, found)}; derive them from the arguments alone")
    return f"{len(s.held_out)} in '{s.env.eval_split}'"


def warmup_tasks(s: Subject) -> str:
    try:
        expected = _keys(s.factory.warmup_tasks(0, 4, 0), 4)[2:]
    except (NotImplementedError, UserError):
        return "none: it cannot be played with model.path = 'quickstart'"
    if (found := _keys(s.factory.warmup_tasks(2, 2, 0))) != expected:
        raise Broken(f"warmup_tasks(2, 2, 0): {differ(expected, found)}; they must begin with number `start`")
    return ""


def task_ids(s: Subject) -> str:
    held_out = sorted(task.id for task in s.held_out)
    if twice := [one for one, two in pairwise(held_out) if one == two]:
        raise Broken(f"two tasks of '{s.env.eval_split}' have the id {twice[0]!r}; make ids unique")
    streams = {"training": s.factory.train_tasks(0, 64, 0)}
    if not warmup_tasks(s):
        streams["the warm-up"] = s.factory.warmup_tasks(0, 16, 0)
    for name, tasks in streams.items():
        if shared := {task.id for task in tasks} & {*held_out}:
            raise Broken(f"{min(shared)!r} is in '{s.env.eval_split}' and in {name}; keep them apart")
    return ""


def outcomes(s: Subject) -> str:
    for outcome in _outcomes(s):
        _fits(
            outcome,
            "Outcome in paw/types.py",
            observation=lambda value: isinstance(value, str),
            reward=_number,
            done=lambda value: isinstance(value, bool),
            won=lambda value: isinstance(value, bool),
            action=lambda value: isinstance(value, str),
            valid=lambda value: isinstance(value, bool),
            score=lambda value: value is None or (_number(value) and 0 <= value <= 1),
        )
    for episode in s.episodes:
        texts = [episode.first, *(text for seen in episode.looks for text in seen)]
        if not all(isinstance(text, str) for text in texts) or not all(prompt for prompt, _ in episode.looks):
            raise Broken("reset(), context() or anchor() returned something else than text, or a prompt is empty")
    return f"{len(_outcomes(s))} in {len(s.episodes)} episodes"


def length(s: Subject) -> str:
    for episode in s.episodes:
        if not episode.outcomes[-1].done or len(episode.outcomes) > s.env.max_turns:
            raise Broken(
                f"not done after env.max_turns = {s.env.max_turns} turns; end there: turns >= config.max_turns"
            )
    return f"{max(len(episode.outcomes) for episode in s.episodes)} turns at most"


def deterministic(s: Subject) -> str:
    factory = s.make_factory()
    for episode, task in zip(s.episodes, factory.train_tasks(0, 4, 0), strict=True):
        fix = "made and played again; draw from random.Random(task.id), not from the global generator"
        with s.made(factory) as environment:
            compare(episode, s.play(environment, task, repeat(episode)), fix)
    return ""


def starts_afresh(s: Subject) -> str:
    with s.made() as environment:
        for episode in [*s.episodes, *s.episodes]:
            again = s.play(environment, episode.task, repeat(episode))
            compare(episode, again, "in an environment that played before; reset() must forget that")
    return ""


def group_shares_a_task(s: Subject) -> str:
    for episode in s.episodes:
        s.again(episode, "by another member of the group; Task.payload is read-only")
    return ""


def no_shared_state(s: Subject) -> str:
    for pair in [(one, two) for one in s.episodes[:2] for two in s.episodes[2:]]:
        played = [Episode(episode.task) for episode in pair]
        with s.made() as one, s.made() as two:
            turns = [s.turns(e, new, repeat(old)) for e, old, new in zip((one, two), pair, played, strict=True)]
            while turns:
                turns = [playing for playing in turns if next(playing, None)]
        for old, new in zip(pair, played, strict=True):
            compare(old, new, "played in turns with another; keep state in self, not in the class or module")
    return ""


def looking_changes_nothing(s: Subject) -> str:
    for looks in (0, 3):
        for episode in s.episodes:
            fix = f"looked at {looks} times a turn; context(), anchor(), oracle() and the like must change nothing"
            s.again(episode, fix, looks=looks)
    return ""


def observations(s: Subject) -> str:
    for episode in s.episodes:
        for n, (outcome, (prompt, _)) in enumerate(zip(episode.outcomes, episode.looks[1:], strict=False)):
            if prompt in outcome.observation:
                raise Broken(f"turn {n}: the observation holds the next prompt; return only what the environment said")
    empty = sum(not outcome.observation for outcome in _outcomes(s))
    return f"{empty} of {len(_outcomes(s))} are empty: no target of the world model" if empty else ""


def rewards(s: Subject) -> str:
    highest = max(sum(outcome.reward for outcome in episode.outcomes) for episode in s.episodes)
    if highest > s.factory.reward_max + 1e-6:
        raise Broken(f"the rewards of an episode sum to {highest:g}, reward_max is {s.factory.reward_max:g}; raise it")
    if any(outcome.won and not outcome.done for outcome in _outcomes(s)):
        raise Broken("a turn is won and not done; a won episode ends")
    return f"returns up to {highest:g} of {s.factory.reward_max:g}"


def garbage(s: Subject) -> str:
    with s.made() as environment:
        for text in GARBAGE:
            environment.reset(s.tasks[0])
            outcome = environment.step(text)
            if outcome.valid and not text.strip():
                raise Broken(f"the response {text!r} is valid; without an action: valid=False")
            if not outcome.done:
                look(environment)
    return f"{len(GARBAGE)} responses"


def after_the_end(s: Subject) -> str:
    episode = s.episodes[0]
    with s.made() as environment:
        s.play(environment, episode.task, repeat(episode))
        try:
            outcome = environment.step(episode.responses[-1])
        except OURS:
            raise
        except BaseException:
            return "step() raises"
    if not outcome.done or outcome.reward:
        raise Broken(f"step() answers {shown(outcome)}; raise, or stay done without reward")
    return "step() stays done"


def well_formed_answers(s: Subject) -> str:
    with s.made() as environment:
        environment.reset(s.tasks[0])
        if hasattr(environment, "task"):
            _fits(environment, f"Playable in {BASE}", task=lambda value: isinstance(value, str))
        expert = expert_of(environment)
        answers = answers_of(environment)[:20] + ([expert] if expert is not None else [])
        for text in answers:
            environment.reset(s.tasks[0])
            if not environment.step(text).valid:
                raise Broken(f"{text!r}, of oracle() or format_action(), is not valid to step(); let them agree")
    return f"{len(answers)} tried" if answers else "none offered"


def closes(s: Subject) -> str:
    environment = s.factory.make()
    environment.reset(s.tasks[0])
    environment.close()
    environment.close()
    return ""


RULES: tuple[Callable[[Subject], str], ...] = (
    members, training_tasks, evaluation_tasks, outcomes, length, warmup_tasks, task_ids, deterministic, starts_afresh,
    group_shares_a_task, no_shared_state, looking_changes_nothing, observations, rewards, garbage, after_the_end,
    well_formed_answers, closes,
)  # fmt: skip
VITAL = RULES[:5]
"""Where one of them fails, those after it cannot be checked."""


def check(subject: Subject) -> list[Finding]:
    """What was found, rule by rule. UserError: what the environment itself tells its user to mend."""
    findings = []
    for rule in RULES:
        name = rule.__name__.replace("_", " ")
        try:
            findings.append(Finding(name, True, rule(subject)))
        except OURS:
            raise
        except BaseException as error:
            findings.append(Finding(name, False, str(error) if isinstance(error, Broken) else _raised(error)))
            if rule in VITAL:
                break
    return findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check"], help="play a few episodes and say which rules hold")
    parser.add_argument("env", metavar="NAME|FILE.py:Class", help="a built-in environment, or one of your own")
    parser.add_argument("--recipe", help="settings to check it with (default: NAME-grpo, or the defaults)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Check an environment and print what was found; returns 1 where a rule does not hold."""
    config = load_played(args.recipe, {"env.name": args.env, **overrides}, {"env.data": "none"})
    # Imported anew each time: the factory of a new process shares nothing with the one before.
    subject = Subject(
        lambda: find_class(args.env)(config.env) if is_own(args.env) else make_factory(config), config.env
    )
    findings = check(subject)
    failed, speed = sum(not finding.ok for finding in findings), subject.steps / max(subject.seconds, 1e-9)
    if args.json:
        rules = [vars(finding) for finding in findings]
        print(json.dumps({"env": args.env, "ok": not failed, "steps_per_second": round(speed), "rules": rules}))
        return min(failed, 1)
    for finding in findings:
        print(f"{'ok' if finding.ok else 'FAIL':<6}{finding.rule:<25}{clean(finding.seen)}".rstrip())
    left = f", {len(RULES) - len(findings)} not checked" if len(findings) < len(RULES) else f"; {speed:,.0f} steps/s"
    print((f"{failed} of {len(findings)} rules failed" if failed else f"all {len(findings)} rules hold") + left)
    return min(failed, 1)


def _lacks_nothing(made: object, protocol: type) -> None:
    if lacks := missing(made, protocol):
        raise Broken(f"{type(made).__name__} lacks {', '.join(lacks)}; see {protocol.__name__} in {BASE}")


def _fits(made: object, where: str, **fits: Callable[..., object]) -> None:
    for name, fit in fits.items():
        if not fit(value := getattr(made, name)):
            raise Broken(f"{type(made).__name__}.{name} = {shown(value)}; for what it must be see {where}")


def _keys(tasks: Iterable[Task], count: int = 0) -> list[tuple[str, str]]:
    """(id, kind) of each; Broken if these are no tasks, or not `count` of them."""
    tasks = [*tasks]
    for task in tasks:
        if not (isinstance(task, Task) and isinstance(task.id, str) and isinstance(task.kind, str) and task.kind):
            raise Broken(f"{shown(task)} among the tasks; each must be a Task with texts as id and kind")
    if not tasks or (count and len(tasks) != count):
        raise Broken(f"{len(tasks)} tasks instead of {count or 'all'}; give as many as asked for")
    return [(task.id, task.kind) for task in tasks]


def _outcomes(s: Subject) -> list[Outcome]:
    return [outcome for episode in s.episodes for outcome in episode.outcomes]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _raised(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if isinstance(error, SyntaxError) else f" ({Path(frame.filename).name}, line {frame.lineno})"
    return f"raised {describe(error)}{where}"
