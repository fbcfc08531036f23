"""The second of two ranks measures the warm-up's models while the first continues to learn.

Both ranks communicate in the same order: the first sends weights, then asks for their success.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from paw.distributed.ranks import PeerLostError, Ranks
from paw.errors import UserError

NOTHING = b"."
"""The message of a rank that has nothing to send, because an empty one cannot be gathered."""
EXAMINER = 1
"""The number of the rank that measures."""


class Examiner:
    """The first rank's side. Call `dismiss` at the end."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._owes_success = False
        """Whether weights were sent whose success has not been asked for."""
        self._lost = False

    def send(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Send the weights after a step. The examiner starts to measure, and this returns."""
        head = json.dumps({"step": step}).encode()
        all_weights = torch.cat(
            [weights[name].detach().float().flatten() for name in sorted(weights)]
        )
        self._ranks.gather_bytes(head + b"\n" + all_weights.numpy().tobytes())
        self._owes_success = True

    def success(self) -> float:
        """Wait for the success of the weights that were sent last.

        Raises PeerLostError if the examiner could not measure it. It says why itself.
        """
        self._owes_success = False
        try:
            return self._ranks.gather_results(lambda: 0.0, float)[EXAMINER]
        except PeerLostError:
            self._lost = True
            raise

    def dismiss(self) -> None:
        """Let the examiner continue with its own work."""
        if self._lost:
            return
        if self._owes_success:
            self.success()
        self._ranks.gather_bytes(NOTHING)


def examine(ranks: Ranks, prepare: Callable[[], tuple[nn.Module, Callable[[int], float]]]) -> None:
    """Measure the models that the first rank sends, until it dismisses this one.

    `prepare` returns the model that gets their weights, and a function that measures it after a
    step. Raises UserError if `prepare` or a measurement does.
    """
    prepared: tuple[nn.Module, Callable[[int], float]] | UserError
    try:
        prepared = prepare()
    except UserError as error:  # the first rank does the same, and may have met it too
        prepared = error

    def success(message: bytes) -> float:
        if isinstance(prepared, UserError):
            raise prepared
        lm, measure = prepared
        head, _, data = message.partition(b"\n")
        _load(lm, torch.frombuffer(bytearray(data), dtype=torch.float32))
        return measure(json.loads(head)["step"])

    while True:
        message = ranks.gather_bytes(NOTHING)[0]
        if message == NOTHING:
            return
        ranks.gather_results(partial(success, message), float)


def _load(lm: nn.Module, flat: Tensor) -> None:
    """Fill the tensors of `lm`, in the order of their names, from one float32 tensor."""
    state = lm.state_dict()
    sizes = [state[name].numel() for name in sorted(state)]
    for name, values in zip(sorted(state), flat.split(sizes), strict=True):
        state[name].copy_(values.view_as(state[name]))
