"""`paw env check`: checks whether an environment follows the rules that training relies on.

Episodes with oracle, random and garbage responses are replayed under conditions that must not
matter. docs/environments.md describes the rules. Each has a line in the output.
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
    short_repr,
    to_stderr,
    user_location,
)
from paw.tools.env_check.env_calls import valid_call
from paw.tools.env_check.env_replay import (
    GARBAGE,
    Broken,
    Episode,
    Subject,
    compare,
    difference,
    look,
    oracle_of,
    repeat,
)
from paw.tools.evaluate.played import load_played
from paw.types import Outcome, Reply, Task

TELL_S = 10.0
"""Seconds between two lines of progress on a rule that takes long."""
MEMBERS = ("name", "reward_max", "invalid_penalty", "may_block", "distinct_eval")
"""Members of a factory whose values are checked."""


class Finding(NamedTuple):
    """The result of checking a rule."""

    rule: str
    ok: bool
    seen: str
    """A remark (perhaps "") if the rule holds, otherwise what was seen and the fix."""
    seconds: float = 0.0


# ---- The rules, in the order in which they are checked. A rule has the name of its function. The
# function returns a remark, perhaps "", or raises Broken. Any other exception also breaks the rule.


def members(subject: Subject) -> str:
    for name in MEMBERS:
        value = getattr(subject.factory, name)
        if not _is_valid_member(name, value):
            raise Broken(
                f"{name} = {short_repr(value)}; "
                "for what it must be see EnvFactory in paw/envs/base.py"
            )

    factories = [subject.factory, subject.factory, subject.make_factory()]
    fingerprints = [factory.fingerprint() for factory in factories]
    if not isinstance(fingerprints[0], str) or len(set(fingerprints)) > 1:
        raise Broken(
            f"fingerprint() is {short_repr(fingerprints)}; it must be one text for the same tasks"
        )
    return fingerprints[0]


def _is_valid_member(name: str, value: Any) -> bool:
    if name in ("may_block", "distinct_eval"):
        return isinstance(value, bool)
    if name == "name":
        return isinstance(value, str) and value != ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value >= 0 if name == "invalid_penalty" else value > 0


def tasks(subject: Subject) -> str:
    sizes = []
    for split in dict.fromkeys((subject.env.train_split, subject.env.eval_split)):
        expected, task_count = _first_tasks(subject.factory, split)
        sizes.append(f"'{split}': {task_count or 'endless'}")
        for factory, when in (
            (subject.factory, "asked again"),
            (subject.make_factory(), "in a resumed run"),
        ):
            repeated, _ = _first_tasks(factory, split)
            if repeated != expected:
                raise Broken(
                    f"tasks('{split}', 0), {when}: {difference(expected, repeated)}; "
                    "derive them from the arguments alone"
                )
    return ", ".join(sizes)


def _first_tasks(factory: EnvFactory, split: str) -> tuple[list[tuple[str, str]], int | None]:
    """Return ((id, kind) of up to 64 tasks, number of tasks or None for endless ones).

    Raises Broken if one of them is not a task.
    """
    with read_tasks(factory, split, 0) as tasks:
        task_count = size(tasks)
        first = [tasks[i] for i in range(64 if task_count is None else min(64, task_count))]
    for task in first:
        is_task = isinstance(task, Task) and isinstance(task.id, str)
        if not is_task or not isinstance(task.kind, str) or not task.kind:
            raise Broken(
                f"{short_repr(task)} among the tasks; each must be a Task with texts as id and kind"
            )
    return [(task.id, task.kind) for task in first], task_count


def outcomes(subject: Subject) -> str:
    for episode in subject.episodes:
        if not all(context for context, _ in episode.looks):
            raise Broken("context() is empty")
    return f"{len(_outcomes(subject))} in {len(subject.episodes)} episodes"


def _outcomes(subject: Subject) -> list[Outcome]:
    outcomes = []
    for episode in subject.episodes:
        outcomes += episode.outcomes
    return outcomes


def task_ids(subject: Subject) -> str:
    eval_split = subject.env.eval_split
    evaluated = eval_tasks(subject.factory, eval_split, 0, 0)
    held_out = sorted(task.id for task in evaluated)
    for task_id, next_id in itertools.pairwise(held_out):
        if task_id == next_id:
            raise Broken(f"two tasks of '{eval_split}' have the id {task_id!r}; make ids unique")

    training = train_tasks(subject.factory, 0, 64, 0, split=subject.env.train_split)
    learnt = {"training": training}
    remark = ""
    try:
        learnt["the warm-up"] = warmup_tasks(subject.factory, 0, 16, 0)
    except (NoOracleError, UserError):
        remark = "no warm-up: it cannot be played with model.path = 'quickstart'"

    for task in itertools.chain(evaluated, *learnt.values()):
        if means_all_kinds(task.kind):
            raise Broken(
                f"{task.id!r} is of the kind {task.kind!r}, a name that reports use for all kinds; "
                "rename it"
            )
    for name, learnt_tasks in learnt.items():
        shared = {task.id for task in learnt_tasks} & set(held_out)
        if shared:
            raise Broken(f"{min(shared)!r} is in '{eval_split}' and in {name}; keep them apart")
    return remark


def deterministic(subject: Subject) -> str:
    factory = subject.make_factory()
    tasks = train_tasks(factory, 0, 4, 0, split=subject.env.train_split)
    fix = "made and played again; draw from random.Random(task.id), not from the global generator"
    for episode, task in zip(subject.episodes, tasks, strict=True):
        with subject.new_environment(factory) as environment:
            compare(episode, subject.play(environment, task, repeat(episode)), fix)
    return ""


def starts_afresh(subject: Subject) -> str:
    fix = "in an environment that played before; reset() must forget that"
    with subject.new_environment() as environment:
        for episode in [*subject.episodes, *subject.episodes]:
            replayed = subject.play(environment, episode.task, repeat(episode))
            compare(episode, replayed, fix)
    return ""


def group_shares_a_task(subject: Subject) -> str:
    for episode in subject.episodes:
        subject.replay(episode, "by another member of the group; Task.payload is read-only")
    return ""


def no_shared_state(subject: Subject) -> str:
    fix = "played in turns with another; keep state in self, not in the class or module"
    for pair in itertools.product(subject.episodes[:2], subject.episodes[2:]):
        replayed = [Episode(episode.task) for episode in pair]
        with subject.new_environment() as first, subject.new_environment() as second:
            playing = [
                subject.turns(first, replayed[0], repeat(pair[0])),
                subject.turns(second, replayed[1], repeat(pair[1])),
            ]
            while playing:  # one turn of each, until both episodes have ended
                playing = [turns for turns in playing if next(turns, None) is not None]
        for episode, replay in zip(pair, replayed, strict=True):
            compare(episode, replay, fix)
    return ""


def looking_changes_nothing(subject: Subject) -> str:
    for looks in (0, 3):
        fix = (
            f"looked at {looks} times a turn; "
            "context(), anchor(), oracle() and the like must change nothing"
        )
        for episode in subject.episodes:
            subject.replay(episode, fix, looks=looks)
    return ""


def observations(subject: Subject) -> str:
    for episode in subject.episodes:
        contexts_after = [context for context, _ in episode.looks[1:]]
        turns = zip(episode.outcomes, contexts_after, strict=False)
        for number, (outcome, context) in enumerate(turns):
            if isinstance(context, str) and context in outcome.observation:
                raise Broken(
                    f"turn {number}: the observation holds the next prompt; "
                    "return only what the environment said"
                )
    played = _outcomes(subject)
    empty = sum(not outcome.observation for outcome in played)
    if empty:
        return f"{empty} of {len(played)} are empty: no target of the world model"
    return ""


def rewards(subject: Subject) -> str:
    highest = -math.inf
    for episode in subject.episodes:
        highest = max(highest, sum(outcome.reward for outcome in episode.outcomes))
    reward_max = subject.factory.reward_max
    if highest > reward_max + 1e-6:
        raise Broken(
            f"the rewards of an episode sum to {highest:g}, reward_max is {reward_max:g}; raise it"
        )
    if any(outcome.won and not outcome.done for outcome in _outcomes(subject)):
        raise Broken("a turn is won and not done; a won episode ends")
    return f"returns up to {highest:g} of {reward_max:g}"


def garbage(subject: Subject) -> str:
    with subject.new_environment() as environment:
        for text in GARBAGE:
            environment.reset(subject.tasks[0])
            outcome = environment.step(text)
            if outcome.valid and not text.strip():
                raise Broken(f"the response {text!r} is valid; without an action: valid=False")
            if not outcome.done:
                look(environment)
    return f"{len(GARBAGE)} responses"


def well_formed_answers(subject: Subject) -> str:
    with subject.new_environment() as environment:
        environment.reset(subject.tasks[0])
        answers = environment.admissible_responses()[:20]
        response = oracle_of(environment)
        if response is not None:
            answers.append(response)
        for text in answers:
            environment.reset(subject.tasks[0])
            if not environment.step(text).valid:
                raise Broken(
                    f"{text!r}, of oracle() or format_action(), is not valid to step(); "
                    "let them agree"
                )
    return f"{len(answers)} tried" if answers else "none offered"


def tools(subject: Subject) -> str:
    called = 0
    valid = 0
    uncalled = []
    with subject.new_environment() as environment:
        environment.reset(subject.tasks[0])
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
                    f"the call {clean(call, 200)} raised {describe(error)}{user_location(error)}"
                ) from error
            called += 1
            valid += outcome.valid
            if outcome.done:
                environment.reset(subject.tasks[0])

    remark = f"{called} of {len(environment.tools)} called, {valid} of the calls valid"
    if uncalled:
        names = ", ".join(uncalled)
        remark += f"; not called: {names} (no arguments were found that fit the schema)"
    return remark


def closes(subject: Subject) -> str:
    with subject.new_environment() as environment:
        environment.reset(subject.tasks[0])
        environment.close()
    return ""


RULES: tuple[Callable[[Subject], str], ...] = (
    members,
    tasks,
    outcomes,
    task_ids,
    deterministic,
    starts_afresh,
    group_shares_a_task,
    no_shared_state,
    looking_changes_nothing,
    observations,
    rewards,
    garbage,
    well_formed_answers,
    tools,
    closes,
)
VITAL = (members, tasks, outcomes)
"""If one of these fails, the rules after it cannot be checked."""


def check(subject: Subject) -> list[Finding]:
    """Check all rules.

    Raises UserError if the environment itself asks its user to fix something.
    """
    return list(findings_of(subject, start=lambda rule: None))


def findings_of(subject: Subject, start: Callable[[str], object]) -> Iterator[Finding]:
    """Check all rules, yielding each finding at once. Calls `start` with each rule's name.

    Raises UserError if the environment itself asks its user to fix something.
    """
    for rule in RULES:
        name = rule.__name__.replace("_", " ")
        start(name)
        started = time.monotonic()
        ok = False
        try:
            result = rule(subject)
            ok = True
        except OthersCodeError as error:
            result = str(error)
        except OURS:
            raise
        except Broken as error:
            result = str(error)
        except BaseException as error:
            result = f"raised {describe(error)}{user_location(error)}"
        yield Finding(name, ok, result, seconds=time.monotonic() - started)
        if not ok and rule in VITAL:
            return


class Progress:
    """Reports the progress of a rule's check on stderr every TELL_S seconds."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._ended = threading.Event()
        self._rule = ""
        self._started = 0.0
        self._resets_before = 0
        self._turns_before = 0

    def start(self, rule: str) -> None:
        """Note that this rule is now being checked."""
        self._resets_before = self._subject.resets
        self._turns_before = self._subject.turns_played
        self._started = time.monotonic()
        self._rule = rule

    def __enter__(self) -> "Progress":
        threading.Thread(target=self._report, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _report(self) -> None:
        while not self._ended.wait(TELL_S):
            seconds = time.monotonic() - self._started
            if self._rule and seconds >= TELL_S:
                episodes = self._subject.resets - self._resets_before
                turns = self._subject.turns_played - self._turns_before
                to_stderr(
                    f"paw env check: {self._rule}: {episodes} episodes begun, {turns} turns, "
                    f"{seconds:.0f} s"
                )


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Check an environment and print the findings.

    Returns 0 if all rules hold, 1 if one does not, 130 at Ctrl-C.
    """
    config = load_played(
        options.recipe, {"env.name": options.env, **overrides}, {"env.data": "none"}
    )
    subject = Subject(lambda: make_factory(config), config.env)
    findings: list[Finding] = []
    stopped = False
    with Progress(subject) as progress:
        try:
            for finding in findings_of(subject, start=progress.start):
                findings.append(finding)
                if not options.json:
                    print(_line(finding), flush=True)
        except KeyboardInterrupt:
            stopped = True

    failed = sum(not finding.ok for finding in findings)
    speed = subject.steps / max(subject.seconds, 1e-9)
    if options.json:
        print(_json(options.env, findings, speed, stopped=stopped), flush=True)
    else:
        print(_summary(len(findings), failed, speed, stopped=stopped), flush=True)
    if stopped:
        return 130
    return 1 if failed else 0


def _json(env: str, findings: list[Finding], speed: float, *, stopped: bool) -> str:
    """Return the object that --json prints."""
    rules = []
    for finding in findings:
        rules.append(finding._asdict() | {"seconds": round(finding.seconds, 3)})
    result = {
        "env": env,
        "ok": not stopped and all(finding.ok for finding in findings),
        "stopped": stopped,
        "steps_per_second": round(speed),
        "rules": masked(rules),
    }
    return json.dumps(result)


def _line(finding: Finding) -> str:
    verdict = "ok" if finding.ok else "FAIL"
    return f"{verdict:<5}{finding.seconds:6.1f} s  {finding.rule:<25}{clean(finding.seen)}".rstrip()


def _summary(checked: int, failed: int, speed: float, *, stopped: bool) -> str:
    """Return the last line of the output. `checked` and `failed` count rules."""
    remark = f"; {speed:,.0f} steps/s"
    if checked < len(RULES):
        remark = f", {len(RULES) - checked} not checked"
    if stopped:
        return f"stopped: {failed} of {checked} rules failed{remark}"
    if failed:
        return f"{failed} of {checked} rules failed{remark}"
    return f"all {checked} rules hold{remark}"
