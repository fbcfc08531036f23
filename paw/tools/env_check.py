"""`paw env check`: whether an environment keeps what training relies on (docs/environments.md), one line a rule.

Episodes by the oracle, by chance and of garbage are played again in circumstances that must not
matter.
"""

import argparse
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from paw.envs import make_factory
from paw.envs.base import (
    EnvFactory,
    admissible_responses,
    eval_tasks,
    means_all_kinds,
    read_tasks,
    size,
    train_tasks,
    warmup_tasks,
)
from paw.errors import (
    OURS,
    NoOracleError,
    OthersCodeError,
    UserError,
    clean,
    describe,
    masked,
    place,
    shown,
    to_stderr,
)
from paw.tools.env_calls import valid_call
from paw.tools.env_replay import (
    GARBAGE,
    Broken,
    Episode,
    Subject,
    compare,
    differ,
    look,
    oracle_of,
    repeat,
)
from paw.tools.played import load_played
from paw.types import Outcome, Reply, Task

TELL_S = 10.0
"""Seconds between two lines of progress, while a rule takes long."""


class Finding(NamedTuple):
    rule: str
    ok: bool
    seen: str
    seconds: float = 0.0


# ---- the rules, as they are checked and named. Each returns a remark, or raises.


def members(s: Subject) -> str:
    def fits(name: str, value: Any) -> bool:
        if name in ("may_block", "distinct_eval"):
            return isinstance(value, bool)
        if name == "name":
            return isinstance(value, str) and value != ""
        number = (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
        return number and (value > 0 or (value == 0 and name == "invalid_penalty"))

    for name in ("name", "reward_max", "invalid_penalty", "may_block", "distinct_eval"):
        if not fits(name, value := getattr(s.factory, name)):
            raise Broken(
                f"{name} = {shown(value)}; for what it must be see EnvFactory in paw/envs/base.py"
            )
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
    evaluated = eval_tasks(s.factory, s.env.eval_split, 0, 0)
    held_out = sorted(task.id for task in evaluated)
    if twice := [one for one, two in itertools.pairwise(held_out) if one == two]:
        raise Broken(f"two tasks of '{s.env.eval_split}' have the id {twice[0]!r}; make ids unique")
    streams, remark = {"training": train_tasks(s.factory, 0, 64, 0, split=s.env.train_split)}, ""
    try:
        streams["the warm-up"] = warmup_tasks(s.factory, 0, 16, 0)
    except (NoOracleError, UserError):
        remark = "no warm-up: it cannot be played with model.path = 'quickstart'"
    for task in itertools.chain(evaluated, *streams.values()):
        if means_all_kinds(task.kind):
            raise Broken(
                f"{task.id!r} is of the kind {task.kind!r}, which reports call all kinds together; rename it"
            )
    for name, listed in streams.items():
        if shared := {task.id for task in listed} & {*held_out}:
            raise Broken(
                f"{min(shared)!r} is in '{s.env.eval_split}' and in {name}; keep them apart"
            )
    return remark


def deterministic(s: Subject) -> str:
    factory = s.make_factory()
    for episode, task in zip(
        s.episodes, train_tasks(factory, 0, 4, 0, split=s.env.train_split), strict=True
    ):
        fix = (
            "made and played again; draw from random.Random(task.id), not from the global generator"
        )
        with s.made(factory) as environment:
            compare(episode, s.play(environment, task, repeat(episode)), fix)
    return ""


def starts_afresh(s: Subject) -> str:
    with s.made() as environment:
        for episode in [*s.episodes, *s.episodes]:
            again = s.play(environment, episode.task, repeat(episode))
            compare(
                episode, again, "in an environment that played before; reset() must forget that"
            )
    return ""


def group_shares_a_task(s: Subject) -> str:
    for episode in s.episodes:
        s.again(episode, "by another member of the group; Task.payload is read-only")
    return ""


def no_shared_state(s: Subject) -> str:
    for pair in [(one, two) for one in s.episodes[:2] for two in s.episodes[2:]]:
        played = [Episode(episode.task) for episode in pair]
        with s.made() as one, s.made() as two:
            turns = [
                s.turns(e, new, repeat(old))
                for e, old, new in zip((one, two), pair, played, strict=True)
            ]
            while turns:
                turns = [playing for playing in turns if next(playing, None)]
        for old, new in zip(pair, played, strict=True):
            compare(
                old,
                new,
                "played in turns with another; keep state in self, not in the class or module",
            )
    return ""


def looking_changes_nothing(s: Subject) -> str:
    for looks in (0, 3):
        for episode in s.episodes:
            fix = f"looked at {looks} times a turn; context(), anchor(), oracle() and the like must change nothing"
            s.again(episode, fix, looks=looks)
    return ""


def observations(s: Subject) -> str:
    for episode in s.episodes:
        for n, (outcome, (prompt, _)) in enumerate(
            zip(episode.outcomes, episode.looks[1:], strict=False)
        ):
            if isinstance(prompt, str) and prompt in outcome.observation:
                raise Broken(
                    f"turn {n}: the observation holds the next prompt; return only what the environment said"
                )
    empty = sum(not outcome.observation for outcome in _outcomes(s))
    return (
        f"{empty} of {len(_outcomes(s))} are empty: no target of the world model" if empty else ""
    )


def rewards(s: Subject) -> str:
    highest = max(sum(outcome.reward for outcome in episode.outcomes) for episode in s.episodes)
    if highest > s.factory.reward_max + 1e-6:
        raise Broken(
            f"the rewards of an episode sum to {highest:g}, reward_max is {s.factory.reward_max:g}; raise it"
        )
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
                raise Broken(
                    f"{text!r}, of oracle() or format_action(), is not valid to step(); let them agree"
                )
    return f"{len(answers)} tried" if answers else "none offered"


def tools(s: Subject) -> str:
    called = 0
    valid = 0
    uncalled = []
    with s.made() as environment:
        environment.reset(s.tasks[0])
        if not environment.tools:
            return "none offered: no call was tried"
        for number, tool in enumerate(environment.tools):
            call = valid_call(tool, number)
            if call is None:
                uncalled.append(tool["function"]["name"])
                continue
            try:
                outcome = environment.step(Reply.of("", call))
            except OURS:
                raise
            except BaseException as error:
                raise Broken(
                    f"the call {clean(call, 200)} raised {describe(error)}{place(error)}"
                ) from error
            called += 1
            valid += outcome.valid
            if outcome.done:
                environment.reset(s.tasks[0])
    remark = f"{called} of {len(environment.tools)} called, {valid} of the calls valid"
    if uncalled:
        remark += (
            f"; not called: {', '.join(uncalled)} (no arguments were found that fit the schema)"
        )
    return remark


def closes(s: Subject) -> str:
    with s.made() as environment:
        environment.reset(s.tasks[0])
        environment.close()
        environment.close()
    return ""


RULES: tuple[Callable[[Subject], str], ...] = (
    members, tasks, outcomes, task_ids, deterministic, starts_afresh, group_shares_a_task, no_shared_state,
    looking_changes_nothing, observations, rewards, garbage, well_formed_answers, tools, closes,
)  # fmt: skip
VITAL = RULES[:3]
"""Where one of them fails, those after it cannot be checked."""


def check(subject: Subject) -> list[Finding]:
    """What is found, rule by rule. UserError: what the environment itself tells its user to fix."""
    return list(findings_of(subject, lambda rule: None))


def findings_of(subject: Subject, start: Callable[[str], object]) -> Iterator[Finding]:
    """`check`, each finding as soon as it is there; `start` is told the name of a rule before it is checked.

    UserError: what the environment itself tells its user to fix.
    """
    for rule in RULES:
        name = rule.__name__.replace("_", " ")
        start(name)
        began = time.monotonic()
        ok = False
        try:
            seen = rule(subject)
            ok = True
        except OthersCodeError as error:
            seen = str(error)
        except OURS:
            raise
        except Broken as error:
            seen = str(error)
        except BaseException as error:
            seen = f"raised {describe(error)}{place(error)}"
        yield Finding(name, ok, seen, time.monotonic() - began)
        if not ok and rule in VITAL:
            return


class Progress:
    """Says on stderr how far a rule is, every TELL_S seconds that it takes."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._ended = threading.Event()
        self._rule = ""
        self._began = 0.0
        self._resets = 0
        self._turns = 0

    def start(self, rule: str) -> None:
        self._resets = self._subject.resets
        self._turns = self._subject.turns_played
        self._began = time.monotonic()
        self._rule = rule

    def __enter__(self) -> "Progress":
        threading.Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _tell(self) -> None:
        while not self._ended.wait(TELL_S):
            seconds = time.monotonic() - self._began
            if self._rule and seconds >= TELL_S:
                played = f"{self._subject.resets - self._resets} episodes begun"
                turns = f"{self._subject.turns_played - self._turns} turns"
                to_stderr(f"paw env check: {self._rule}: {played}, {turns}, {seconds:.0f} s")


def run(args: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Check an environment and print what is found; returns 1 if a rule does not hold, 130 at Ctrl-C."""
    config = load_played(args.recipe, {"env.name": args.env, **overrides}, {"env.data": "none"})
    subject = Subject(lambda: make_factory(config), config.env)
    findings: list[Finding] = []
    stopped = False
    with Progress(subject) as progress:
        try:
            for finding in findings_of(subject, progress.start):
                findings.append(finding)
                if not args.json:
                    print(_line(finding), flush=True)
        except KeyboardInterrupt:
            stopped = True
    failed = sum(not finding.ok for finding in findings)
    speed = subject.steps / max(subject.seconds, 1e-9)
    if args.json:
        rules = masked(
            [finding._asdict() | {"seconds": round(finding.seconds, 3)} for finding in findings]
        )
        ok = not failed and not stopped
        result = {
            "env": args.env,
            "ok": ok,
            "stopped": stopped,
            "steps_per_second": round(speed),
            "rules": rules,
        }
        print(json.dumps(result), flush=True)
    else:
        print(_summary(len(findings), failed, speed, stopped=stopped), flush=True)
    return 130 if stopped else min(failed, 1)


def _line(finding: Finding) -> str:
    verdict = "ok" if finding.ok else "FAIL"
    return f"{verdict:<5}{finding.seconds:6.1f} s  {finding.rule:<25}{clean(finding.seen)}".rstrip()


def _summary(checked: int, failed: int, speed: float, *, stopped: bool) -> str:
    left = (
        f", {len(RULES) - checked} not checked"
        if checked < len(RULES)
        else f"; {speed:,.0f} steps/s"
    )
    if stopped:
        return f"stopped: {failed} of {checked} rules failed{left}"
    return (f"{failed} of {checked} rules failed" if failed else f"all {checked} rules hold") + left


def _keys(factory: EnvFactory, split: str) -> tuple[list[tuple[str, str]], int | None]:
    """((id, kind) of the first ones, number of tasks); Broken if these are no tasks."""
    with read_tasks(factory, split, 0) as tasks:
        n = size(tasks)
        first = [tasks[i] for i in range(64 if n is None else min(64, n))]
    for task in first:
        if not (
            isinstance(task, Task)
            and isinstance(task.id, str)
            and isinstance(task.kind, str)
            and task.kind
        ):
            raise Broken(
                f"{shown(task)} among the tasks; each must be a Task with texts as id and kind"
            )
    return [(task.id, task.kind) for task in first], n


def _outcomes(s: Subject) -> list[Outcome]:
    return [outcome for episode in s.episodes for outcome in episode.outcomes]
