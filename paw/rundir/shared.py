"""The run directory is a folder that all machines of a run see."""

import secrets
from pathlib import Path

from paw.distributed.ranks import Ranks
from paw.errors import UserError
from paw.io.files import writing


def check_shared(directory: Path, ranks: Ranks) -> None:
    """Raises UserError, on all ranks, if one of them does not see rank 0's `directory`.

    A call of all ranks.
    """
    mark = Path(ranks.broadcast_from_rank0(lambda: _put_mark(directory), str))
    is_seen = ranks.gather((directory / mark.name).exists())
    if ranks.first:
        mark.unlink(missing_ok=True)
    for rank, seen in enumerate(is_seen):
        if not seen:
            raise UserError(
                f"rank {rank} does not see the run directory {mark.parent} of rank 0: "
                "set --run.dir to a folder that all machines of the run share"
            )


def _put_mark(directory: Path) -> str:
    """Make a file of a new name in `directory`; returns its path."""
    mark = directory / f".tmp_{secrets.token_hex(8)}_shared"
    with writing(mark):
        mark.touch()
    return str(mark)
