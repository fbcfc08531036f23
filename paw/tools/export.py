"""`paw export`: writes a run's checkpoint in Hugging Face format, and can push it to the hub."""

import argparse
from functools import partial
from pathlib import Path

import torch

from paw.checkpoint import export as exported_model
from paw.checkpoint import push as hub
from paw.checkpoint import restore
from paw.config.recipe import load as load_config
from paw.config.sections import Config
from paw.errors import UserError, to_stderr
from paw.model.dtype import training_dtype, with_dtype
from paw.model.loading import load_policy, load_tokenizer
from paw.model.lora import add_adapters
from paw.model.policy import Policy, full_parameters, weights_dtype
from paw.rundir.resume import recorded_dtype
from paw.tools.train.preparation import start_model


def export(
    run: str | Path,
    *,
    checkpoint: str | None = None,
    out: str | Path | None = None,
    push: str = "",
    public: bool = False,
) -> Path:
    """Write a checkpoint of a run in Hugging Face format. Returns the folder.

    Args:
        run: the run's directory.
        checkpoint: its name, such as "step_000050". Default: the newest that verifies.
        out: folder to write. Default: `hf` in the run's directory.
        push: also send it to the Hugging Face hub under this USER/NAME, as a private model.
        public: with `push`, make the model public if it is new there.

    Raises UserError if `run` is not a run's directory, or the checkpoint is missing or damaged.
    """
    folder = None if out is None else Path(out)
    return export_run(Path(run), checkpoint_name=checkpoint, out=folder, push=push, public=public)


def export_run(
    run: Path,
    *,
    checkpoint_name: str | None = None,
    out: Path | None = None,
    push: str = "",
    public: bool = False,
) -> Path:
    """Export a checkpoint of a run directory. Returns the folder that was written.

    The default is the newest checkpoint that verifies. With `push`, sends it to the hub under this
    USER/NAME.
    """
    if not (run / "config.toml").is_file():
        raise UserError(f"{run}: no run directory (config.toml is missing)")
    if push:
        hub.check_push(push)
    config = load_config(run / "config.toml")
    folder = run / "checkpoints"
    _check_exists(run, checkpoint_name)

    start = start_model(run, config)
    policy = _start_policy(start, config, run)
    read = partial(restore.load, like={"model": policy.named_parameters_once()})
    if checkpoint_name:
        tensors, state = read(folder / checkpoint_name)
    else:
        newest = restore.read_newest(folder, read)
        assert newest, "there is a checkpoint, see _check_exists"
        _, (tensors, state) = newest
    policy.load(tensors["model"])

    written = exported_model.export(
        policy,
        load_tokenizer(start),
        out or run / "hf",
        dict(full_parameters(policy.lm, once=True)),
        config=config,
        step=state["step"],
    )
    if push:
        to_stderr(f"pushed to {hub.push(written, push, public=public)}")
    return written


def _check_exists(run: Path, checkpoint_name: str | None) -> None:
    """Raise UserError if the run has no checkpoint of this name, or no checkpoint at all."""
    folder = run / "checkpoints"
    if checkpoint_name:
        exists = (folder / checkpoint_name).is_dir()
        missing = f"checkpoint {checkpoint_name}"
    else:
        exists = any(folder.glob("step_*"))
        missing = "checkpoint"
    if not exists:
        raise UserError(f"{run}: no {missing} to export; see {folder}")


def _start_policy(start: str, config: Config, run: Path) -> Policy:
    """Return the run's policy with the weights of its start model, in host memory."""
    dtype = recorded_dtype(run) or training_dtype(config, torch.device("cpu"))
    config = with_dtype(config, dtype)
    policy = load_policy(start, weights=weights_dtype(config), dtype=config.model.dtype)
    if config.lora.rank:
        add_adapters(policy.lm, config.lora, seed=config.run.seed)
    return policy


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
