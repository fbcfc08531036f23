"""Guards of the training loop: no update from non-finite numbers, a word when the policy collapses."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paw.errors import UserError

if TYPE_CHECKING:
    from paw.run import Run


class TrainingStopped(UserError):
    """The run stopped itself, on all ranks at once; the message says why and what to change."""


class UpdateGuard:
    """Decides from the loss and the total gradient norm whether an optimizer step happens.

    One NaN gradient makes every parameter NaN, through clipping and AdamW. Give it all-reduced values, so that every
    rank decides alike: a NaN on one rank is a NaN in the sum.
    """

    def __init__(self, max_skipped: int, *, lr: str = "optim.lr") -> None:
        """`lr` is the key that the message names."""
        self.max_skipped, self.lr = max_skipped, lr
        self.skipped = self.in_a_row = 0

    def allows(self, *, loss: float, grad_norm: float) -> bool:
        """True: step. False: drop these gradients. Raises TrainingStopped at the `max_skipped`-th refusal in a row."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row < self.max_skipped:
            return False
        raise TrainingStopped(
            f"stopped: {self.in_a_row} optimizer steps in a row had a non-finite loss ({loss}) or gradient norm "
            f"({grad_norm}); the weights are those of the last good step: lower {self.lr}, or set "
            'model.dtype = "float32" (run.max_skipped sets the patience)'
        )

    def state(self) -> dict[str, int]:
        """JSON for the checkpoint."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is no state."""
        self.skipped, self.in_a_row = int(state["skipped"]), int(state["in_a_row"])


VLLM = "--engine.gpu_memory_utilization"
KNOBS = {
    "start": f"--optim.name flash-adamw, --policy.offload_reference true, {VLLM} or more --gpus",
    "rollout": f"{VLLM} or --engine.max_batch_tokens",
    "score": "--optim.micro_batch_tokens",
    "update": "--optim.micro_batch_tokens, --model.checkpointing full or --optim.offload true",
    "sync": VLLM,
    "eval": f"{VLLM} or --engine.max_batch_tokens",
}
"""What to turn when memory runs out, by phase."""
COLLAPSE_WINDOW = 5


def memory_message(phase: str, *, update: int, rank: int, peak_gib: float, saved: int) -> str:
    """One line for the user: where memory ran out, how much was in use, and what to change."""
    return (
        f"out of memory in phase '{phase}' of update {update} on rank {rank}, peak {peak_gib:.1f} GiB: lower or set"
        f" {KNOBS.get(phase, KNOBS['update'])} (`paw plan` finds settings that fit); {what_is_saved(saved)}"
    )


def what_is_saved(step: int) -> str:
    """What a user can go on from, `step` being that of the newest checkpoint."""
    return f"the checkpoint of update {step} is intact (--resume auto)" if step else "there is no checkpoint yet"


def alarms(run: "Run") -> Iterator[str]:
    """What rank 0 is to tell after an update."""
    history: Any = run.log.history if run.log else []
    if warning := collapse_warning(history, in_groups=run.config.advantage.type != "ppo"):
        yield warning
    largest, adaptive = run.factory.reward_max, run.config.wm.enabled and run.config.wm.weight == "adaptive"
    above = [line for line in history if (line.get("reward/mean") or 0.0) > largest]
    if adaptive and len(above) == 1 and above[0] is history[-1]:
        yield (
            f"warning: episodes return {above[0]['reward/mean']:g} in the mean, above the environment's reward_max = "
            f"{largest:g}: the adaptive weight of the world model is 0 there; raise reward_max, or set wm.weight"
        )


def collapse_warning(history: Sequence[Mapping[str, float | None]], *, in_groups: bool = True) -> str | None:
    """A message at the update on which the collapse signature completes, else None; `history` is oldest first.

    Over the last 5 updates: every action well-formed (>= 0.98), next to no success (<= 0.01) after there had been some,
    entropy under a tenth of its highest. It comes of groups in which all fail: only the invalid-action penalty varies,
    and the division by the standard deviation blows it up to full scale. `in_groups`: advantages are relative to the
    group, so that advantage.penalty_only applies.
    """
    if not _collapsed(history) or _collapsed(history[:-1]):
        return None
    penalty_only = 'advantage.penalty_only = "drop", ' if in_groups else ""
    return (
        f"warning: the policy looks collapsed: for {COLLAPSE_WINDOW} updates every action was well-formed, none "
        f"succeeded, and the entropy is near 0. Resume an earlier checkpoint with {penalty_only}a lower optim.lr or a "
        "smaller env.invalid_penalty"
    )


def _collapsed(history: Sequence[Mapping[str, float | None]]) -> bool:
    keys = ("health/valid_actions", "success/all", "policy/entropy")
    rows = [row for row in history if all(row.get(key) is not None for key in keys)]
    before, window = rows[:-COLLAPSE_WINDOW], rows[-COLLAPSE_WINDOW:]
    if len(window) < COLLAPSE_WINDOW or not before:
        return False
    valid, success, entropy = ([float(row[key] or 0.0) for row in window] for key in keys)
    had_success = max(float(row["success/all"] or 0.0) for row in before) > 0.01
    peak = max(float(row["policy/entropy"] or 0.0) for row in before)
    return had_success and min(valid) >= 0.98 and max(success) <= 0.01 and max(entropy) <= 0.1 * peak
