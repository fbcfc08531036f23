"""The command line as users run it, in child processes, and one quickstart model for a whole test
session."""

import fcntl
import gc
import importlib
import importlib.util
import json
import lzma
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

# Imports make many objects, none of them garbage. Looking through them would take a fifth of the
# time in which the tests are collected.
gc.disable()
# Before torch is loaded: on a busy machine OpenMP threads that spin for their turn make a test 80
# times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# The cores are taken by other workers, and by children.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read at import. Without it, a name that is not a folder is looked up for a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Before FSDP or vLLM imports Triton, which settles whether its own functions are interpreted. The
# variable does not stay: the children that tests start would inherit it.
import torch
from forked import Child, start_server
from jsonl import read_jsonl

from paw.cli import main
from paw.config.plugins import CALLBACKS
from paw.config.recipe import load
from paw.envs import make_factory

collect_ignore = ["e2e/openenv_client.py", "e2e/openenv_server.py"]
"""Programs of other Python environments: they are not searched for doctests."""

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # started by `&` in a script, or by nohup
        signal.signal(number, usual)
if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401

ROOT = Path(__file__).parents[1]
PACK = ROOT.parent / "shared" / "data" / "alfworld" / "games.jsonl.xz"
# env.* and warmup.* are part of the cached model's key: the same for every quickstart run of a
# session.
QUICK = {
    "run.threads": 1,
    "run.updates": 2,
    "warmup.max_steps": 40,
    "warmup.corpus_turns": 1500,
    "env.invalid_penalty": 0.1,
    "env.max_turns": 4,
    # The barely trained model never wins: penalties are what the policy learns from.
    "advantage.penalty_only": "keep",
    "rollout.tasks": 4,
    "rollout.group_size": 4,
    "eval.games": 4,
}


TOGETHER = ("test_smollm2.py", "test_vllm_engine.py", "test_vllm_server.py", "test_vllm_train.py")
"""Files that run in one process: they import vLLM there, which takes twenty seconds of a core."""
SLOW_BESIDE_VLLM = ("test_profile.py",)
"""Files whose tests take three times as long in a process that has imported vLLM."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "together" if Path(file).name in TOGETHER else file

    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)  # attack/conftest.py marks its tests before
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first: the files that import vLLM, then, in another process, those
    that it would slow down, then the rest of those with slow tests. The short files at the end keep
    all workers busy to the last."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        name = item.path.name
        return name not in TOGETHER, name not in SLOW_BESIDE_VLLM, item.path not in slow

    items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.freeze()  # gc.collect() then skips what is imported already, which saves 0.2 s each time
    start_server()


@pytest.hookimpl(tryfirst=True)  # xdist's own loops are the last that is asked
def pytest_runtestloop() -> None:
    gc.enable()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a test session have in common."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def paw_env(shared: Path) -> dict[str, str]:
    """Environment of a child: the checkout, one thread, offline, a warm-up cache of this
    session."""
    folders = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "OMP_NUM_THREADS": "1",
        "PAW_CACHE": str(shared / "cache"),
        # vLLM would compile the rank of a token, which nothing reads: seconds, g++ included.
        "TORCHDYNAMO_DISABLE": "1",
    }


@pytest.fixture(scope="session")
def paw(paw_env: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`paw(*words, code=0)` runs the command line, without a report; a mapping among the words is
    overrides."""

    def run(*words: Any, code: int | None = 0, env: dict[str, str] | None = None):
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            child = Child(
                command(*words)[3:],
                env=paw_env | (env or {}),
                cwd=str(Path.cwd()),
                out=output.fileno(),
                err=errors.fileno(),
            )
            try:
                returned = child.wait()
            finally:
                child.kill()

            output.seek(0)
            errors.seek(0)
            finished = subprocess.CompletedProcess(words, returned, output.read(), errors.read())
        return checked(finished, code)

    return run


def checked(
    finished: subprocess.CompletedProcess[str], code: int | None
) -> subprocess.CompletedProcess[str]:
    """The same process, which must have ended with this exit code; None: with any."""
    assert code is None or finished.returncode == code, (
        f"exit {finished.returncode}\n{finished.stdout}\n{finished.stderr}"
    )
    return finished


@pytest.fixture(scope="session")
def run_here(paw_env: dict[str, str]) -> Callable[..., int]:
    """`paw_here` for fixtures that several tests share: the exit code."""

    def run(*words: Any, cwd: Path | None = None) -> int:
        threads = torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PAW_CACHE", paw_env["PAW_CACHE"])
            patch.setitem(CALLBACKS, "report", "builtins:object")
            if cwd:
                patch.chdir(cwd)
            code = main(command(*words)[3:])
        torch.set_num_threads(threads)
        return code

    return run


@pytest.fixture
def paw_here(run_here: Callable[..., int], capfd: pytest.CaptureFixture[str]):
    """`paw` in this process, without the seconds a child takes to load torch: for what needs no
    process of its own."""

    def run(
        *words: Any, code: int | None = 0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        returned = run_here(*words, cwd=cwd)
        return checked(subprocess.CompletedProcess(words, returned, *capfd.readouterr()), code)

    return run


@pytest.fixture(scope="session")
def vllm_here() -> Iterator[Any]:
    """vLLM and its engine in this process, with a fourth of the cache, which it fills with zeros,
    and without compiling the rank of a token, which nothing reads."""
    with pytest.MonkeyPatch.context() as patch:
        from paw.rollouts.engines.vllm_library import import_vllm

        with pytest.MonkeyPatch.context() as eager:
            eager.setenv("TORCHDYNAMO_DISABLE", "1")
            vllm = import_vllm()
            importlib.import_module("vllm.v1.sample.ops.logprobs")
        patch.setattr("vllm.platforms.cpu.GiB_bytes", 1 << 28)

        # Each engine looks for garbage seven times, and would go through everything imported, which
        # takes half a second each time.
        for module in ("vllm.entrypoints.llm", "vllm.v1.worker.gpu_model_runner"):
            importlib.import_module(module)
        gc.freeze()
        patch.setattr("vllm.v1.engine.core.freeze_gc_heap", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield vllm


@pytest.fixture
def paw_start(paw_env: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """`paw_start(*words)` starts the command line; whatever still runs at the end of the test is
    killed."""
    started: list[Child] = []

    def start(*words: Any) -> Child:
        reading_end, writing_end = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        child = Child(
            command(*words)[3:], env=paw_env, cwd=str(tmp_path), out=nowhere, err=writing_end
        )
        os.close(writing_end)
        os.close(nowhere)
        child.stderr = os.fdopen(reading_end, errors="replace")
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.wait(60)
        child.stderr.close()


def command(*words: Any) -> list[str]:
    """The words of a command; {"a.b": 1} becomes --a.b 1. A model of one's own has no warm-up."""
    arguments = [str(word) for word in words if not isinstance(word, dict)]
    overrides: dict[str, Any] = {}
    for word in words:
        if isinstance(word, dict):
            overrides |= word
    own_model = overrides.get("model.path", "quickstart") != "quickstart"
    for key, value in overrides.items():
        if not (own_model and key.startswith("warmup.")):
            arguments += [f"--{key}", str(value)]
    return [sys.executable, "-m", "paw", *arguments]


@pytest.fixture(scope="session")
def quick() -> dict[str, Any]:
    """Overrides that make a quickstart run a matter of seconds."""
    return dict(QUICK)


@pytest.fixture(scope="session")
def quick_run(paw_env: dict[str, str], quick: dict[str, Any], shared: Path) -> Path:
    """The directory of a finished quickstart run of two updates, as users start it, with its
    report; read only."""
    folder = shared / "quick"
    with (shared / "quick.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first process that needs it makes it for all
        if not (folder / "first" / "hf").exists():
            train = command("train", "quickstart", quick, {"run.dir": folder, "run.name": "first"})
            checked(subprocess.run(train, env=paw_env, capture_output=True, text=True), 0)
    return folder / "first"


@pytest.fixture(scope="session")
def quick_model(quick_run: Path, paw_env: dict[str, str]) -> Path:
    """Folder of the warmed-up quickstart model that `quick_run` started from."""
    from paw.tools.warmup.warmup import ensure_warm_model

    config = load(str(quick_run / "config.toml"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAW_CACHE", paw_env["PAW_CACHE"])
        return ensure_warm_model(config, make_factory(config), print)


@pytest.fixture(scope="session")
def read_metrics() -> Callable[[Path], list[dict[str, Any]]]:
    """Lines of a run's metrics.jsonl without what a clock or the machine decides."""

    def read(run: Path) -> list[dict[str, Any]]:
        return [reproducible(metrics) for metrics in read_jsonl(run / "metrics.jsonl")]

    return read


def reproducible(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if not key.startswith(("time/", "perf/"))}


@pytest.fixture(scope="session")
def tiny_llm() -> Callable[..., Path]:
    """`tiny_llm(folder, kind="llama")` writes a random causal LM with a byte-level tokenizer and a
    ChatML template."""
    return write_tiny_llm


def write_tiny_llm(folder: Path, kind: str = "llama", *, positions: int = 4096) -> Path:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "initializer_range": 0.1,
    }
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    control = [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    backend.add_special_tokens(control)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=kind == "qwen3",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **(experts if kind == "qwen3_moe" else {}),
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def says_only() -> Callable[..., Path]:
    """`says_only(folder, *words)` makes that model write these words, each as often as the others,
    whatever it reads: new tokens, or ones that it has."""

    def make(folder: Path, *words: object, template: str = "") -> Path:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        texts = [str(word) for word in words]
        tokenizer.add_tokens(texts)
        tokenizer.chat_template = template or tokenizer.chat_template
        model.resize_token_embeddings(len(tokenizer))
        # These are the parameters themselves. Dimension 0 is the same after every token, and it
        # alone leads to the words.
        weights = model.state_dict()
        weights["model.embed_tokens.weight"][:, 0] = 5.0
        weights["lm_head.weight"][:, 0] = 0.0
        weights["lm_head.weight"][tokenizer.convert_tokens_to_ids(texts), 0] = 1.0
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def updated() -> Callable[[Any], Any]:
    """`updated(run)` trains one update of that run and returns what the agent played: (groups,
    statistics)."""

    def make(run: Any) -> Any:
        from paw.rollouts.scheduler import Rollouts
        from paw.rollouts.sync import push_weights
        from paw.trainer import update

        played = []
        rollouts = Rollouts(run.factory, run.engine, run.chat, run.config)
        gather_groups = rollouts.gather_groups

        def remembering(*args: Any, **options: Any) -> Any:
            played.append(gather_groups(*args, **options))
            return played[-1]

        rollouts.gather_groups = remembering
        push_weights(run.policy.lm, run.engine, version=0)
        update(run, rollouts)
        return played[0]

    return make


@pytest.fixture
def official_games() -> Callable[..., Iterator[tuple[str, dict[str, Any]]]]:
    """A function of (stop, step): (id, decoded game file) of every step-th of the first `stop`
    games (None: of all)."""
    if not PACK.is_file():
        pytest.skip(f"the official games are not at {PACK}")

    def read(stop: int | None = None, step: int = 1) -> Iterator[tuple[str, dict[str, Any]]]:
        with lzma.open(PACK, "rt") as lines:
            rules = json.loads(next(lines))
            for line in islice(lines, 0, stop, step):
                game = json.loads(line)
                file = {
                    "pddl_domain": rules["domain"],
                    "grammar": rules["grammar"].replace("UNKNOWN GOAL.", game["task"], 1),
                    "pddl_problem": game["problem"],
                    "solvable": True,
                    "walkthrough": game["walkthrough"],
                }
                yield game["id"], file

    return read
