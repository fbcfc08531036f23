"""`paw train`: makes checks before loading torch, which takes seconds, and then trains."""

import argparse
import os

from paw.config.recipe import check_passwords, load_named, warnings
from paw.config.sections import Config
from paw.distributed.launcher import die_with_launcher, launch
from paw.envs import make_factory
from paw.errors import UserError, to_stderr, to_stdout
from paw.io.hub import check_hub
from paw.io.imports import no_collections
from paw.rundir.run_lock import check_free, run_names
from paw.tools.reference import explain


def run(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Train in --gpus processes, or print the configuration (--dry-run). Returns the exit code."""
    numbered = "run.name" not in overrides
    config = load_named(options.recipe, overrides)
    name = next(run_names(config, resume=options.resume, numbered=numbered))
    if options.dry_run:
        _explain(config, name)
        return 0
    check_passwords(config)
    if config.endpoint.url:
        raise UserError(
            f"endpoint.url = '{config.endpoint.url}': "
            "an endpoint can play in `paw eval`, but cannot be trained"
        )

    if "RANK" in os.environ:
        die_with_launcher()
    else:
        _check(config, name, options.resume)
        _announce_warmup(config, options.resume)
    if options.gpus != 1:
        return _launch(options, overrides, config)

    with no_collections():
        from paw.tools.train.train import train  # loads torch, which the checks above do without

    report = train(config, resume=options.resume, numbered=numbered)
    if os.environ.get("RANK", "0") == "0" and report.is_file():
        to_stdout(f"report: {report}")
    return 0


def _explain(config: Config, name: str) -> None:
    """Print the configuration with the run's final name, and its warnings to stderr."""
    run_section = config.run.model_copy(update={"name": name})
    print(explain(config.model_copy(update={"run": run_section})), end="")
    for line in warnings(config):
        to_stderr(line)


def _check(config: Config, name: str, resume: str) -> None:
    """Make the checks that need no model.

    Ranks make them later, once they are connected. If one of them, perhaps on another machine,
    lacks something, all must know.
    """
    check_free(config.run.dir / name, resume=resume)
    sections = config.environments.values()
    folders = [getattr(section, "data", None) for section in sections]
    if any(folder and not folder.expanduser().exists() for folder in folders):
        make_factory(config)  # says what is missing and how to get it
    # Report mistakes in a user's own environment before asking the hub.
    has_own = any(":" in section.name for section in sections)
    if config.model.path != "quickstart" and not has_own:
        check_hub(config.model.path)


def _announce_warmup(config: Config, resume: str) -> None:
    """Print that torch is being loaded, which is slow on a busy machine, and then the warm-up.

    This is only for environments that generate their tasks. Others are made quickly, and their
    mistakes are reported without this line.
    """
    generates = all(
        getattr(section, "data", "") is None for section in config.environments.values()
    )
    if config.model.path == "quickstart" and generates and not resume:
        make_factory(config)
        to_stdout(
            "warm-up: loading PyTorch; "
            "the quickstart's model is made first, unless the cache has it"
        )


def _launch(options: argparse.Namespace, overrides: dict[str, str], config: Config) -> int:
    """Train in one process for each GPU that the run's servers do not use."""
    ranks = options.gpus - config.engine.gpus
    if ranks < 1:
        reason = "at least 1"
        if config.engine.gpus:
            reason = f"engine.servers take {config.engine.gpus}, none is left"
        raise UserError(f"--gpus {options.gpus}: {reason}")

    arguments = ["train", options.recipe]
    for key, value in overrides.items():
        arguments += [f"--{key}", value]
    if options.resume:
        arguments += ["--resume", options.resume]
    return launch(ranks, arguments, device=config.model.device)
