"""Code of a user's own in a run: callbacks, made by name and called at their hooks, advantages and
losses. What goes wrong in it is one line that names it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from paw.config import Config
from paw.errors import UserError, describe, others_code
from paw.model.ranks import lost_peer, out_of_memory
from paw.plugins import BUILT_IN, load
from paw.state.log import metrics_problem

if TYPE_CHECKING:
    from paw.run import Run


def users_code(what: str, *, all_theirs: bool = False) -> AbstractContextManager[None]:
    """`others_code` that runs inside training, where memory may run out and another rank may end."""
    return others_code(
        what, spare=lambda error: out_of_memory(error) or lost_peer(error), all_theirs=all_theirs
    )


def users_advantages(config: Config) -> AbstractContextManager[None]:
    name = config.advantage.type
    if name in BUILT_IN["advantages"]:
        return nullcontext()
    return users_code(f"advantage.type = '{name}'")


def users_losses(config: Config) -> AbstractContextManager[None]:
    losses = {"policy.loss": config.policy.loss, "wm.loss": config.wm.loss}
    own = [f"{key} = '{name}'" for key, name in losses.items() if name not in BUILT_IN["losses"]]
    return users_code(", ".join(own)) if own else nullcontext()


def make_callbacks(names: Sequence[str]) -> list[Any]:
    """Raises UserError if one cannot be loaded or made."""
    return [_make_callback(name) for name in names]


def _make_callback(name: str) -> Any:
    try:
        plugin = load("callbacks", name)
    except UserError as error:
        raise UserError(f"run.callbacks: {error}") from error
    if not isinstance(plugin, type):
        return plugin
    with users_code(f"run.callbacks = '{name}'"):
        return plugin()


def call(run: "Run", hook: str, *given: Any) -> None:
    """Call a hook of all callbacks. Raises UserError for what one of a user's own raises,
    SystemExit included, and for a metric that it added and no log can hold: the run's metrics then
    are those from before.
    """
    for callback in run.callbacks:
        what = f"run.callbacks: {type(callback).__name__}.{hook}"
        metrics_before = dict(run.metrics)
        try:
            with users_code(what, all_theirs=not type(callback).__module__.startswith("paw.")):
                getattr(callback, hook, lambda *_: None)(run, *given)
            if problem := metrics_problem(run.metrics):
                raise UserError(f"{what}: {problem}")
        except BaseException:
            run.metrics = metrics_before
            raise


def call_on_end(run: "Run") -> None:
    """Call `on_end` of all callbacks.

    One that fails is reported: the others are still to hear of the end.
    """
    for callback in run.callbacks:
        try:
            getattr(callback, "on_end", lambda _: None)(run)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit as well
            run.say(f"run.callbacks: {type(callback).__name__}.on_end: {describe(error)}")
