"""`paw export`: a checkpoint of a run as a model in Hugging Face format, which may be sent to the hub."""

import argparse
from pathlib import Path

from paw.state.restore import export_run


def export(
    run: str | Path,
    *,
    checkpoint: str | None = None,
    out: str | Path | None = None,
    push: str = "",
    public: bool = False,
) -> Path:
    """Write a checkpoint of a run in Hugging Face format; returns the folder.

    Args:
        run: the run's directory.
        checkpoint: its name, such as "step_000050". Default: the newest that verifies.
        out: folder to write. Default: `hf` in the run's directory.
        push: also send it to the Hugging Face hub under this USER/NAME, as a private model.
        public: with `push`: if the model is new there, everybody sees it.

    Raises UserError if `run` is no run's directory, or the checkpoint is missing or damaged.
    """
    folder = None if out is None else Path(out)
    return export_run(Path(run), checkpoint_name=checkpoint, out=folder, push=push, public=public)


def run(options: argparse.Namespace, _: dict[str, str]) -> int:
    """Export, and print the folder that was written."""
    written = export(
        options.run,
        checkpoint=options.checkpoint,
        out=options.out,
        push=options.push,
        public=options.public,
    )
    print(written)
    return 0
