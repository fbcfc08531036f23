"""Run directories of several machines, which need not see the same disk."""

import secrets
from contextlib import ExitStack
from pathlib import Path

from paw.errors import UserError
from paw.files import cause, fsync
from paw.model.ranks import Ranks
from paw.state.claim import check_free, lock


def claim_places(directory: Path, ranks: Ranks, stack: ExitStack, *, resume: str) -> list[int]:
    """For each rank the lowest one that sees the same run directory, of which each machine may have
    its own. Those of other machines than rank 0's are made, and locked until `stack` closes.

    A call of all ranks. Raises UserError where such a directory holds another run, or is in use.
    """
    token = ranks.broadcast_from_rank0(lambda: secrets.token_hex(8), str)
    marks = [directory / f".tmp_{token}_{rank}" for rank in range(ranks.world_size)]

    def mark() -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            fsync(directory.parent)
            marks[ranks.rank].touch()
        except OSError as error:
            raise UserError(
                f"cannot create the run directory {directory}: {cause(error)}; set --run.dir"
            ) from None

    ranks.together(mark)
    lowest = next(rank for rank, path in enumerate(marks) if path.exists())
    places = ranks.gather(lowest)
    marks[ranks.rank].unlink(missing_ok=True)

    def take() -> None:
        if 0 != lowest == ranks.rank:
            if not resume:
                check_free(directory, resume="")
            stack.enter_context(lock(directory))

    ranks.together(take)
    return places
