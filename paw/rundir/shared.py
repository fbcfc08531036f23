"""Checks that all machines of a run can see its directory."""

import secrets
from pathlib import Path

from paw.distributed.ranks import Ranks
from paw.errors import UserError
from paw.io.files import writing


def check_shared(directory: Path, ranks: Ranks) -> None:
    """Raise UserError on all ranks if one of them cannot see rank 0's `directory`.

    All ranks must call it.
    """
    marker = Path(ranks.broadcast_from_rank0(lambda: _make_marker(directory), str))
    is_seen_by = ranks.gather((directory / marker.name).exists())
    if ranks.first:
        marker.unlink(missing_ok=True)
    for rank, is_seen in enumerate(is_seen_by):
        if not is_seen:
            raise UserError(
                f"rank {rank} does not see the run directory {marker.parent} of rank 0: "
                "set --run.dir to a folder that all machines of the run share"
            )


def _make_marker(directory: Path) -> str:
    """Make a file with a new name in `directory` and return its path."""
    marker = directory / f".tmp_{secrets.token_hex(8)}_shared"
    with writing(marker):
        marker.touch()
    return str(marker)
