"""User code in a run: callbacks, advantages and losses.

Callbacks are made by name and called at their hooks. A failure in user code becomes one line that
names the code.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from paw.away import AwayError
from paw.config.plugins import BUILT_IN, load
from paw.config.sections import Config
from paw.distributed.ranks import lost_peer, out_of_memory
from paw.errors import UserError, describe, nearest, others_code, short_repr
from paw.rundir.log import metrics_problem

HOOKS = ("on_start", "on_update", "on_evaluation", "on_end")


class HookedRun(Protocol):
    """The parts of a run needed to call a hook. The callbacks get the whole `paw.run.Run`."""

    callbacks: list[Any]
    metrics: dict[str, float]

    def say(self, text: str) -> None: ...


@contextmanager
def user_code(name: str, *, all_theirs: bool = False) -> Iterator[None]:
    """`others_code` for training: memory may run out, another rank may end, or have the rows."""

    def is_not_theirs(error: BaseException) -> bool:
        return out_of_memory(error) or lost_peer(error)

    try:
        with others_code(name, is_exempt=is_not_theirs, all_theirs=all_theirs):
            yield
    except AwayError as error:
        raise UserError(f"{name}: {error}") from error


def users_advantages(config: Config) -> AbstractContextManager[None]:
    name = config.advantage.type
    if name in BUILT_IN["advantages"]:
        return nullcontext()
    return user_code(f"advantage.type = '{name}'")


def users_losses(config: Config) -> AbstractContextManager[None]:
    losses = {"policy.loss": config.policy.loss, "wm.loss": config.wm.loss}
    theirs = [f"{key} = '{name}'" for key, name in losses.items() if name not in BUILT_IN["losses"]]
    return user_code(", ".join(theirs)) if theirs else nullcontext()


def make_callbacks(names: Sequence[str]) -> list[Any]:
    """Make the callbacks. Raises UserError if one cannot be loaded or made."""
    return [_make_callback(name) for name in names]


def _make_callback(name: str) -> Any:
    try:
        plugin = load("callbacks", name)
    except UserError as error:
        raise UserError(f"run.callbacks: {error}") from error
    callback = plugin
    if isinstance(plugin, type):
        with user_code(f"run.callbacks = '{name}'"):
            callback = plugin()
    if name not in BUILT_IN["callbacks"]:
        _check_hooks(callback)
    return callback


def _check_hooks(callback: Any) -> None:
    """Raise UserError if a callback has no hook, so that nothing would call it."""
    if any(hasattr(callback, hook) for hook in HOOKS):
        return
    named = [name for name in dir(callback) if name.startswith("on_")]
    hints = filter(None, (nearest(name, HOOKS) for name in named))
    hint = next(hints, f"it may have {', '.join(HOOKS)}")
    raise UserError(f"run.callbacks: {short_repr(callback)} has no hook: {hint}")


def needs_tokens(callback: Any) -> bool:
    """Whether a callback reads the turns of all ranks at an evaluation, in their memory."""
    return bool(getattr(callback, "tokens", False))


def call(run: HookedRun, hook: str, *arguments: Any) -> None:
    """Call a hook of all callbacks, with the run and `arguments`.

    Raises UserError if a user's callback raises anything, even SystemExit, or adds a metric that no
    log can hold. The run's metrics are then restored to those before the call.
    """
    for callback in run.callbacks:
        name = f"run.callbacks: {type(callback).__name__}.{hook}"
        is_theirs = not type(callback).__module__.startswith("paw.")
        metrics_before = dict(run.metrics)
        try:
            with user_code(name, all_theirs=is_theirs):
                function = getattr(callback, hook, None)
                if function is not None:
                    function(run, *arguments)
            if problem := metrics_problem(run.metrics):
                raise UserError(f"{name}: {problem}")
        except BaseException:
            run.metrics = metrics_before
            raise


def call_on_end(run: HookedRun) -> None:
    """Call `on_end` of all callbacks.

    If one fails, the failure is reported and the others are still called.
    """
    for callback in run.callbacks:
        try:
            on_end = getattr(callback, "on_end", None)
            if on_end is not None:
                on_end(run)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit as well
            run.say(f"run.callbacks: {type(callback).__name__}.on_end: {describe(error)}")
