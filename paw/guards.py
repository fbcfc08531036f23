"""Guards of the training loop: skip steps that are not finite, and warn of a collapse."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paw.config.sections import Config
from paw.errors import UserError


class TrainingStopped(UserError):
    """The run stopped itself, on all ranks. The message says why and what to change."""


class UpdateGuard:
    """Decides from the loss and the total gradient norm whether an optimizer step is taken.

    After clipping and AdamW, a single NaN gradient makes every parameter NaN. Pass all-reduced
    values, so that every rank makes the same decision: a NaN on one rank makes the sum NaN.
    """

    def __init__(self, max_skipped: int, *, lr: str = "optim.lr") -> None:
        """`lr` is the learning rate's key, for the error message."""
        self.max_skipped = max_skipped
        self.lr = lr
        self.skipped = 0
        self.in_a_row = 0

    def allows(self, *, loss: float, grad_norm: float) -> bool:
        """Whether to take the step. If not, drop these gradients.

        Raises TrainingStopped after `max_skipped` refusals in a row.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row < self.max_skipped:
            return False
        raise TrainingStopped(
            f"stopped: {self.in_a_row} optimizer steps in a row had a non-finite loss ({loss}) "
            f"or gradient norm ({grad_norm}); the weights are those of the last good step: "
            f"lower {self.lr}, or set "
            'model.dtype = "float32" (run.max_skipped sets the patience)'
        )

    def state(self) -> dict[str, int]:
        """Return the state to save in a checkpoint, as JSON."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        If it is malformed, raises KeyError, TypeError or ValueError and changes nothing.
        """
        skipped = int(state["skipped"])
        in_a_row = int(state["in_a_row"])
        self.skipped = skipped
        self.in_a_row = in_a_row


MEMORY_SETTINGS = {
    "start": ("--optim.name flash-adamw", "--policy.offload_reference true", "more --gpus"),
    "score": ("--optim.micro_batch_tokens",),
    "update": (
        "--optim.micro_batch_tokens",
        "--model.checkpointing full",
        "--optim.offload true",
    ),
}
"""Settings of the trainer to change if memory runs out, by phase."""
ENGINE_PHASES = ("start", "rollout", "sync", "eval")
"""Phases in which the engine has memory too."""
COLLAPSE_WINDOW = 5
"""Number of updates that the signature of a collapse must last."""


def memory_message(
    phase: str,
    *,
    update: int,
    rank: int,
    peak_gib: float,
    saved: int,
    engine_keys: Sequence[str],
) -> str:
    """Return one line for the user: where memory ran out, how much was in use, what to change.

    `engine_keys` are the engine's `memory_keys`.
    """
    settings: list[str] = []
    if phase in ENGINE_PHASES:
        settings += [f"--engine.{key}" for key in engine_keys]
    settings += MEMORY_SETTINGS.get(phase, ())
    if not settings:
        settings += MEMORY_SETTINGS["update"]
    *others, last_setting = settings
    advice = f"{', '.join(others)} or {last_setting}" if others else last_setting
    return (
        f"out of memory in phase '{phase}' of update {update} on rank {rank}, "
        f"peak {peak_gib:.1f} GiB: lower or set {advice} (`paw plan` finds settings that fit); "
        f"{what_is_saved(saved)}"
    )


def what_is_saved(step: int) -> str:
    """Say what a user can resume. `step` is that of the newest checkpoint, 0 if there is none."""
    if step:
        return f"the checkpoint of update {step} is intact (--resume auto)"
    return "there is no checkpoint yet"


def alarms(
    history: Sequence[Mapping[str, Any]], config: Config, *, reward_max: float
) -> Iterator[str]:
    """Return the warnings after an update. `history` has all updates' metrics, oldest first."""
    if warning := collapse_warning(history, in_groups=config.advantage.traits.needs_groups):
        yield warning

    is_adaptive = config.wm.enabled and config.wm.weight == "adaptive"
    above_max = [line for line in history if (line.get("reward/mean") or 0.0) > reward_max]
    # Warn only once, at the first such update.
    if is_adaptive and len(above_max) == 1 and above_max[0] is history[-1]:
        yield (
            f"warning: the mean return of episodes is {above_max[0]['reward/mean']:g}, "
            f"above the environment's reward_max = {reward_max:g}: the adaptive weight of "
            "the world model is 0 there; raise reward_max, or set wm.weight"
        )


def collapse_warning(
    history: Sequence[Mapping[str, float | None]], *, in_groups: bool = True
) -> str | None:
    """Return a warning at the update that completes the signature of a collapse, else None.

    `history` is oldest first. The signature, over the last 5 updates: nearly every action is
    well-formed (>= 0.98), almost none succeeds (<= 0.01) though some did before, and the entropy is
    below a tenth of its maximum. The cause is groups in which every episode fails. In them only the
    invalid-action penalty varies, and dividing by the standard deviation scales it up to full size.
    `in_groups` says whether advantages are relative to the group, so that advantage.penalty_only
    applies.
    """
    if not _collapsed(history) or _collapsed(history[:-1]):
        return None
    penalty_only = 'advantage.penalty_only = "drop", ' if in_groups else ""
    return (
        f"warning: the policy looks collapsed: for {COLLAPSE_WINDOW} updates every action was "
        "well-formed, none succeeded, and the entropy is near 0. Resume an earlier checkpoint "
        f"with {penalty_only}a lower optim.lr or a smaller env.invalid_penalty"
    )


def _collapsed(history: Sequence[Mapping[str, float | None]]) -> bool:
    keys = ("health/valid_actions", "success/all", "policy/entropy")
    complete_rows = [
        update for update in history if all(update.get(key) is not None for key in keys)
    ]
    before = complete_rows[:-COLLAPSE_WINDOW]
    window = complete_rows[-COLLAPSE_WINDOW:]
    if len(window) < COLLAPSE_WINDOW or not before:
        return False

    had_success = max(_column(before, "success/all")) > 0.01
    all_valid = min(_column(window, "health/valid_actions")) >= 0.98
    none_succeeds = max(_column(window, "success/all")) <= 0.01
    entropy_is_low = max(_column(window, "policy/entropy")) <= 0.1 * max(
        _column(before, "policy/entropy")
    )
    return had_success and all_valid and none_succeeds and entropy_is_low


def _column(rows: Sequence[Mapping[str, float | None]], key: str) -> list[float]:
    return [float(update[key] or 0.0) for update in rows]
