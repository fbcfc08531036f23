"""`paw env check`: whether an environment keeps what training relies on (docs/environments.md), one line a rule.

Episodes by the oracle, by chance and of garbage are played again in circumstances that must not matter.
"""

import argparse
import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from paw.envs import make_factory
from paw.envs.base import (
    EnvFactory,
    admissible_responses,
    eval_tasks,
    read_tasks,
    size,
    train_tasks,
    warmup_tasks,
)
from paw.errors import OURS, NoOracleError, OthersCodeError, UserError, clean, describe, place, shown
from paw.tools.env_replay import GARBAGE, Broken, Episode, Subject, compare, differ, look, oracle_of, repeat
from paw.tools.played import load_played
from paw.types import Outcome, Task


class Finding(NamedTuple):
    rule: str
    ok: bool
    seen: str


# ---- the rules, as they are checked and named. Each returns a remark, or raises.


def members(s: Subject) -> str:
    def fits(name: str, value: Any) -> bool:
        if name in ("may_block", "distinct_eval"):
            return isinstance(value, bool)
        if name == "name":
            return isinstance(value, str) and value != ""
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return number and (value > 0 or (value == 0 and name == "invalid_penalty"))

    for name in ("name", "reward_max", "invalid_penalty", "may_block", "distinct_eval"):
        if not fits(name, value := getattr(s.factory, name)):
            raise Broken(f"{name} = {shown(value)}; for what it must be see EnvFactory in paw/envs/base.py")
    prints = [factory.fingerprint() for factory in (s.factory, s.factory, s.make_factory())]
    if not isinstance(prints[0], str) or len({*prints}) > 1:
        raise Broken(f"fingerprint() is {shown(prints)}; it must be one text for the same tasks")
    return prints[0]


def tasks(s: Subject) -> str:
    sizes = []
    for split in dict.fromkeys((s.env.train_split, s.env.eval_split)):
        expected, count = _keys(s.factory, split)
        sizes.append(f"'{split}': {count or 'endless'}")
        for factory, when in ((s.factory, "asked again"), (s.make_factory(), "in a resumed run")):
            found, _ = _keys(factory, split)
            if found != expected:
                fix = "derive them from the arguments alone"
                raise Broken(f"tasks('{split}', 0), {when}: {differ(expected, found)}; {fix}")
    return ", ".join(sizes)


def outcomes(s: Subject) -> str:
    if not all(context for episode in s.episodes for context, _ in episode.looks):
        raise Broken("context() is empty")
    return f"{len(_outcomes(s))} in {len(s.episodes)} episodes"


def task_ids(s: Subject) -> str:
    held_out = sorted(task.id for task in eval_tasks(s.factory, s.env.eval_split, 0, 0))
    if twice := [one for one, two in pairwise(held_out) if one == two]:
        raise Broken(f"two tasks of '{s.env.eval_split}' have the id {twice[0]!r}; make ids unique")
    streams, remark = {"training": train_tasks(s.factory, 0, 64, 0, split=s.env.train_split)}, ""
    try:
        streams["the warm-up"] = warmup_tasks(s.factory, 0, 16, 0)
    except (NoOracleError, UserError):
        remark = "no warm-up: it cannot be played with model.path = 'quickstart'"
    for name, listed in streams.items():
        if shared := {task.id for task in listed} & {*held_out}:
            raise Broken(f"{min(shared)!r} is in '{s.env.eval_split}' and in {name}; keep them apart")
    return remark


def deterministic(s: Subject) -> str:
    factory = s.make_factory()
    for episode, task in zip(s.episodes, train_tasks(factory, 0, 4, 0, split=s.env.train_split), strict=True):
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
            if isinstance(prompt, str) and prompt in outcome.observation:
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


def well_formed_answers(s: Subject) -> str:
    with s.made() as environment:
        environment.reset(s.tasks[0])
        answers = admissible_responses(environment)[:20]
        answers += [] if (response := oracle_of(environment)) is None else [response]
        for text in answers:
            environment.reset(s.tasks[0])
            if not environment.step(text).valid:
                raise Broken(f"{text!r}, of oracle() or format_action(), is not valid to step(); let them agree")
    return f"{len(answers)} tried" if answers else "none offered"


def closes(s: Subject) -> str:
    with s.made() as environment:
        environment.reset(s.tasks[0])
        environment.close()
        environment.close()
    return ""


RULES: tuple[Callable[[Subject], str], ...] = (
    members, tasks, outcomes, task_ids, deterministic, starts_afresh, group_shares_a_task, no_shared_state,
    looking_changes_nothing, observations, rewards, garbage, well_formed_answers, closes,
)  # fmt: skip
VITAL = RULES[:3]
"""Where one of them fails, those after it cannot be checked."""


def check(subject: Subject) -> list[Finding]:
    """What was found, rule by rule. UserError: what the environment itself tells its user to fix."""
    findings = []
    for rule in RULES:
        name = rule.__name__.replace("_", " ")
        try:
            findings.append(Finding(name, True, rule(subject)))
        except OthersCodeError as error:
            findings.append(Finding(name, False, str(error)))
            if rule in VITAL:
                break
        except OURS:
            raise
        except BaseException as error:
            seen = f"raised {describe(error)}{place(error)}"
            findings.append(Finding(name, False, str(error) if isinstance(error, Broken) else seen))
            if rule in VITAL:
                break
    return findings


def run(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Check an environment and print what was found; returns 1 where a rule does not hold."""
    config = load_played(args.recipe, {"env.name": args.env, **overrides}, {"env.data": "none"})
    subject = Subject(lambda: make_factory(config), config.env)
    findings = check(subject)
    failed, speed = sum(not finding.ok for finding in findings), subject.steps / max(subject.seconds, 1e-9)
    if args.json:
        rules = [finding._asdict() for finding in findings]
        print(json.dumps({"env": args.env, "ok": not failed, "steps_per_second": round(speed), "rules": rules}))
        return min(failed, 1)
    for finding in findings:
        print(f"{'ok' if finding.ok else 'FAIL':<6}{finding.rule:<25}{clean(finding.seen)}".rstrip())
    left = f", {len(RULES) - len(findings)} not checked" if len(findings) < len(RULES) else f"; {speed:,.0f} steps/s"
    print((f"{failed} of {len(findings)} rules failed" if failed else f"all {len(findings)} rules hold") + left)
    return min(failed, 1)


def _keys(factory: EnvFactory, split: str) -> tuple[list[tuple[str, str]], int | None]:
    """((id, kind) of the first ones, number of tasks); Broken if these are no tasks."""
    with read_tasks(factory, split, 0) as tasks:
        n = size(tasks)
        first = [tasks[i] for i in range(64 if n is None else min(64, n))]
    for task in first:
        if not (isinstance(task, Task) and isinstance(task.id, str) and isinstance(task.kind, str) and task.kind):
            raise Broken(f"{shown(task)} among the tasks; each must be a Task with texts as id and kind")
    return [(task.id, task.kind) for task in first], n


def _outcomes(s: Subject) -> list[Outcome]:
    return [outcome for episode in s.episodes for outcome in episode.outcomes]
