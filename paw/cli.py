"""The command line: `paw train | eval | rollout | ...`, see `paw --help`.

A command's modules are imported when it is the one: `paw --help` is quick. A user's mistake is one line on stderr and
exit code 2.
"""

import argparse
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from paw import __version__
from paw.errors import LINE_CHARS, UserError, clean, shown, to_stderr

OVERRIDES = "any key of the configuration can be set: --optim.lr 5e-4 --wm.enabled false (docs/keys.md has all keys)"
SHORT = {
    "--agent": "--agent.type",
    "--env": "--env.name",
    "--endpoint": "--endpoint.url",
    "--model": "--endpoint.model",
}
SHORT_FORMS = (
    "an agent plays: --agent TYPE --env NAME --endpoint URL --model NAME (short for " + " ".join(SHORT.values()) + ")"
)
COMMANDS = {
    "train": "train a recipe and write a run directory with a report",
    "eval": "play held-out games with a model or a run and print success with its interval",
    "rollout": "play episodes and write every turn as JSON lines",
    "profile": "time and memory of an update with and without the world model",
    "plan": "predict memory and time, and find settings that fit",
    "experiment": "repeat the paper's comparisons, sweeps and curves, over seeds",
    "rwml": "world-model learning by RL: collect triplets, filter out easy ones, or fine-tune on them",
    "play": "play a game in the terminal and see what the agent sees",
    "report": "write report.html and plots of one run, or of several to compare",
    "serve": "serve a corpus: a retriever behind HTTP",
    "export": "write a checkpoint of a run in Hugging Face format",
    "warmup": "make the quickstart model of a recipe (cached)",
    "env": "check that an environment keeps the rules of the protocol",
    "data": "say where an environment's files are, check them, or generate some",
    "keys": "print the reference of all keys (docs/keys.md)",
    "doctor": "say what is installed and what is missing, or inspect a model",
}
MODULES = {
    "plan": "paw.tools.fit",
    "experiment": "paw.tools.experiment.command",
    "play": "paw.tools.play",
    "report": "paw.tools.report",
    "env": "paw.tools.env_check",
    "data": "paw.tools.data",
}
"""Commands whose module has its own `add_arguments(parser)` and `run(options, overrides)`."""
NO_OVERRIDES = {"report", "export", "data", "doctor", "keys"}
Overrides = dict[str, str]


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY"):  # nothing phones home
        os.environ.setdefault(name, "1")
    # Less memory lost to fragments; vLLM's sleeping allocator turns it off for its own pool. Read when torch is loaded.
    if not any(f"PYTORCH_{kind}ALLOC_CONF" in os.environ for kind in ("", "CUDA_", "HIP_")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # OpenMP threads that wait spin, which makes a step many times slower on a machine with other work; a short spin
    # costs little when it is idle. To be set before torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    try:
        words, overrides = _split_overrides(sys.argv[1:] if argv is None else argv)
        options, rest = _parser(words).parse_known_args(words)
        takes_none = options.name in NO_OVERRIDES or not getattr(options, "overrides", True)
        if overrides and takes_none:
            rest = [f"--{key}" for key in overrides]
        if rest:
            raise UserError(_unknown(rest[0], overrides=not takes_none))
        known = (signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler)
        if options.name != "train" and signal.getsignal(signal.SIGINT) not in known:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # training leaves at once until it has begun
        try:
            return options.command(options, overrides)
        except SystemExit as error:  # not ours: of an environment's file, or of a library
            raise UserError(f"stopped: something called sys.exit({shown(error.code)})") from error
    except UserError as error:
        to_stderr(f"paw: {clean(error, LINE_CHARS)}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away (`paw rollout | head`)
        return 141
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        to_stderr(f"paw: {shown(error.filename)}: {error.strerror}")
        return 2


def entry() -> NoReturn:
    """`main` for the shell. Ranks and interrupted commands skip the interpreter's own end, in which threads of C++
    libraries abort now and then.
    """
    try:
        code = main()
    except BaseException as error:
        if "RANK" not in os.environ or isinstance(error, SystemExit):
            raise
        traceback.print_exc()
        code = 1
    if code == 130 or "RANK" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see {self.prog} --help")


def _parser(words: list[str]) -> argparse.ArgumentParser:
    """All commands by name, with the arguments of the one that `words` begin with."""
    parser = _Parser(prog="paw", description="Policy and world-model co-training for language agents.")
    parser.add_argument("--version", action="version", version=f"paw {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for name, help in COMMANDS.items():
        sub = commands.add_parser(name, help=help, description=help, epilog=OVERRIDES)
        if name in NO_OVERRIDES:
            sub.epilog = None
        if words[:1] == [name]:
            sub.set_defaults(command=_arguments(name, sub))
    return parser


def _arguments(name: str, sub: argparse.ArgumentParser) -> Callable[[argparse.Namespace, Overrides], int]:
    """Add a command's arguments to its parser; returns what runs it."""
    if name in MODULES:
        module = importlib.import_module(MODULES[name])
        module.add_arguments(sub)
        return (lambda options, _: module.run(options)) if name in NO_OVERRIDES else module.run
    add = sub.add_argument
    if name in ("train", "profile"):
        add("recipe", help="name of a packaged recipe, or a .toml file")
    if name == "train":
        resume = "continue this run (of the name's highest number), from its newest checkpoint or from step_NNNNNN"
        add("--resume", nargs="?", const="auto", metavar="CHECKPOINT", help=resume)
        add("--gpus", type=int, default=1, metavar="N", help="processes to train in, one a GPU (CPUs too)")
        add("--dry-run", action="store_true", help="print the resolved configuration, each key explained, and stop")
    if name in ("eval", "rollout"):
        # an endpoint may play in place of a model
        add("model", nargs="?" if name == "eval" else None, help="run directory, model folder or Hugging Face name")
        add("--recipe", help="environment and sampling (default: the run's own configuration)")
    if name == "eval":
        sub.epilog = f"{SHORT_FORMS}; {OVERRIDES}"
        add("--json", action="store_true", help="print one JSON object")
        add("--out", type=Path, help="agents: folder of the episodes and results (default: in run.dir)")
    if name == "rollout":
        add("--tasks", type=int, default=4, help="tasks to play (default: %(default)s)")
        add("--out", default="-", help="file for the episodes (default: standard output)")
    if name == "profile":
        add("--repeats", type=int, default=10, metavar="N", help="passes of each variant (default: %(default)s)")
        add("--out", type=Path, default=Path("profile"), help="folder to write (default: %(default)s)")
        add("--trace", action="store_true", help="write profiler traces (on a GPU: memory snapshots too)")
        source = sub.add_mutually_exclusive_group()
        source.add_argument(
            "--rollouts", type=Path, metavar="FILE", help="episodes of `paw rollout` instead of playing"
        )
        source.add_argument(
            "--synthetic", action="store_true", help="play nothing: random tokens of the recipe's sizes"
        )
    if name == "rwml":
        add("stage", choices=["collect", "filter", "sft"])
        add("source", help="collect: the model that plays; filter, sft: the triplets")
        add("--recipe", required=True, help="collect: the games; filter, sft: a next-state recipe")
        add("--model", help="filter, sft: the model that learns")
        add("--tasks", type=int, default=256, help="collect: games to play (default: %(default)s)")
        add("--share", type=float, default=1.0, help="sft: share of the training triplets (default: all)")
        add("--out", type=Path, required=True, help="file (sft: folder) to write")
    if name == "serve":
        add("what", choices=["retriever"])
        add("--corpus", metavar="FILE", help="JSON lines {id, contents} (default: the generated world)")
        add("--retriever", help="bm25 or dense (default: bm25)")
        add("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
        add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    if name == "export":
        add("run", type=Path, help="run directory")
        add("--checkpoint", help="folder name, such as step_000050 (default: the newest that verifies)")
        add("--out", type=Path, help="folder to write (default: RUN/hf)")
    if name == "warmup":
        add("recipe", nargs="?", default="quickstart")
    if name == "doctor":
        add("--model", metavar="PATH", help="a model's folder or Hugging Face name: can it be trained?")
        add("--run", type=Path, metavar="DIR", help="a run's directory: what happened to it, how to go on?")
        add("--json", action="store_true", help="with --model or --run: as JSON")
    return globals()[f"_{name}"]


def _train(options: argparse.Namespace, overrides: Overrides) -> int:
    from paw.hub import check_hub
    from paw.model import launcher
    from paw.recipe import explain, load_named, warnings
    from paw.state import signals
    from paw.state.claim import check_claim, run_names

    resume, numbered = options.resume or "", "run.name" not in overrides
    config = load_named(options.recipe, overrides)
    if options.dry_run:
        name = next(run_names(config, resume=bool(resume))) if numbered else config.run.name
        print(explain(config.model_copy(update={"run": config.run.model_copy(update={"name": name})})), end="")
        for line in warnings(config):
            to_stderr(line)
        return 0
    if config.endpoint.url:
        raise UserError(
            f"endpoint.url = '{config.endpoint.url}': an endpoint plays in `paw eval`, it cannot be trained"
        )
    # What needs no model is checked before torch is loaded, which takes seconds.
    if "RANK" not in os.environ:  # a rank's directory is that of rank 0, maybe of another machine
        check_claim(config, resume=resume, numbered=numbered)
    data = getattr(config.env, "data", None)
    if data and not data.expanduser().exists():
        from paw.envs import make_factory

        make_factory(config)  # says what is missing and how to get it
    path = Path(config.model.path).expanduser()
    own = ":" in config.env.name  # its own mistakes come first, and it is made once
    if path.is_dir() and not own and not (path / "config.json").is_file():
        raise UserError(f"model.path = '{config.model.path}': there is no config.json in it")
    if config.model.path != "quickstart" and not own:
        check_hub(config.model.path)
    launcher.die_with_launcher()
    with signals.leaving_at_once():
        if options.gpus != 1:
            words = [word for key, value in overrides.items() for word in (f"--{key}", value)]
            words += ["--resume", resume] if resume else []
            return launcher.launch(options.gpus, ["train", options.recipe, *words])
        from paw.train import train

        report = train(config, resume=resume, numbered=numbered)
    if os.environ.get("RANK", "0") == "0" and report.is_file():
        print(f"report: {report}")
    return 0


def _eval(options: argparse.Namespace, overrides: Overrides) -> int:
    from paw.agents.evaluate import evaluate

    return evaluate(options.model, options.recipe, overrides, out=options.out, as_json=options.json)


def _rollout(options: argparse.Namespace, overrides: Overrides) -> int:
    from paw.tools.player import rollout_model

    return rollout_model(options.model, options.recipe, overrides, tasks=options.tasks, out=options.out)


def _profile(options: argparse.Namespace, overrides: Overrides) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler talks of its stages; read when torch is loaded
    from paw.tools.profile import profile

    choices = {name: getattr(options, name) for name in ("repeats", "out", "trace", "rollouts", "synthetic")}
    return profile(options.recipe, overrides, **choices)


def _rwml(options: argparse.Namespace, overrides: Overrides) -> int:
    from paw.tools import rwml

    if options.stage == "collect":
        return rwml.collect(options.source, options.recipe, overrides, tasks=options.tasks, out=options.out)
    if options.model is None:
        raise UserError(f"paw rwml {options.stage}: say which model learns with --model")
    start = (Path(options.source), options.model, options.recipe, overrides)
    if options.stage == "filter":
        return rwml.filter_easy(*start, out=options.out)
    return rwml.supervise(*start, share=options.share, out=options.out)


def _doctor(options: argparse.Namespace, _: Overrides) -> int:
    from paw.tools import doctor, postmortem

    if options.run:
        return postmortem.run(options.run, as_json=options.json)
    return doctor.run_model(options.model, as_json=options.json) if options.model else doctor.run()


def _serve(options: argparse.Namespace, overrides: Overrides) -> int:
    from paw.envs.search.retrieval.server import serve
    from paw.recipe import load

    given = {"env.corpus": options.corpus, "env.retriever": options.retriever or "bm25"}
    given = {key: value for key, value in given.items() if value is not None}
    config: Any = load("search-grpo", {"env.data": "none", **given, **overrides})
    return serve(config.env, host=options.host, port=options.port)


def _export(options: argparse.Namespace, _: Overrides) -> int:
    from paw.state.export import export_run

    print(export_run(options.run, checkpoint_name=options.checkpoint, out=options.out))
    return 0


def _warmup(options: argparse.Namespace, overrides: Overrides) -> int:
    from paw.envs import make_factory
    from paw.recipe import load

    config = load(options.recipe, overrides)
    from paw.tools.warmup import ensure_warm_model

    print(ensure_warm_model(config, make_factory(config), to_stderr))
    return 0


def _keys(_: argparse.Namespace, __: Overrides) -> int:
    from paw.config import Config
    from paw.keys import page

    print(page(Config), end="")
    return 0


def _unknown(word: str, *, overrides: bool) -> str:
    if not word.startswith("--"):
        return f"command line: '{clean(word)}' is not an option; overrides look like --optim.lr 5e-4"
    if not overrides:
        return f"command line: unknown option '{clean(word)}'; see --help"
    from paw.recipe import nearest

    return f"command line: unknown option '{clean(word)}'{nearest(word.removeprefix('--').replace('-', '_'))}"


def _split_overrides(words: list[str]) -> tuple[list[str], Overrides]:
    """Take `--a.b value` and `--a.b=value` out of the command line, short forms too: (the other words, overrides)."""
    others: list[str] = []
    overrides: Overrides = {}
    rest = iter(words)
    own_model = words[:1] in (["rwml"], ["plan"], ["doctor"])
    for word in rest:
        key, equals, value = word.partition("=")
        key = key if key == "--model" and own_model else SHORT.get(key, key)
        if not key.startswith("--") or "." not in key:
            others.append(word)
            continue
        if not equals and (value := next(rest, None)) is None:
            raise UserError(f"command line: '{key}' needs a value")
        overrides[key.removeprefix("--")] = value
    return others, overrides
