"""The command line as users run it: subprocesses, and one quickstart model that a whole test
session shares."""

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

# Before torch is loaded: on a busy machine OpenMP threads that spin for their turn make a test 80
# times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# The cores are taken by other workers, and by children.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read at import; a name that is no folder is tried for a minute else.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Before FSDP or vLLM imports Triton, which settles whether its own functions are interpreted. The
# variable does not stay: the children that tests start would inherit it.
import torch
from forked import Child

from paw.cli import main
from paw.config.plugins import CALLBACKS
from paw.config.recipe import load
from paw.envs import make_factory

collect_ignore = ["e2e/openenv_client.py", "e2e/openenv_server.py"]
"""Programs of other Python environments, which no doctest is looked for in."""

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # started by `&` in a script, or by nohup
        signal.signal(number, usual)
if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401

ROOT = Path(__file__).parents[1]
PACK = ROOT.parent / "shared" / "data" / "alfworld" / "games.jsonl.xz"
QUICK = {  # env.* and warmup.* are part of the cached model's key: the same for every quickstart run of a session
    "run.threads": 1,
    "run.updates": 2,
    "warmup.max_steps": 40,
    "env.invalid_penalty": 0.1,
    "advantage.penalty_only": "keep",  # the barely trained model never wins: penalties are what the policy learns from
    "rollout.tasks": 4,
    "rollout.group_size": 4,
    "eval.games": 8,
}


TOGETHER = ("test_smollm2.py", "test_vllm_engine.py", "test_vllm_server.py", "test_vllm_train.py")
"""Files of one process: they import vLLM in it, which takes twenty seconds of a core."""


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in TOGETHER)  # what takes longest comes first


def pytest_collection_finish() -> None:
    gc.freeze()  # gc.collect() leaves out what is imported: 0.2 s each time


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a test session have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def paw_env(shared: Path) -> dict[str, str]:
    """Environment of a child: the checkout, one thread, offline, a warm-up cache of this
    session."""
    path = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "PAW_CACHE": str(shared / "cache"),
        "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles the rank of a token, which nothing reads: seconds, g++ included
    }


@pytest.fixture(scope="session")
def paw(paw_env: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`paw(*words, code=0)` runs the command line, without a report; a mapping among the words is
    overrides."""

    def run(*words: Any, code: int | None = 0, env: dict[str, str] | None = None):
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            files = {"out": out.fileno(), "err": err.fileno()}
            child = Child(
                command(*words)[3:], env={**paw_env, **(env or {})}, cwd=str(Path.cwd()), **files
            )
            try:
                returned = child.wait()
            finally:
                child.kill()
            out.seek(0)
            err.seek(0)
            done = subprocess.CompletedProcess(words, returned, out.read(), err.read())
        return checked(done, code)

    return run


def checked(
    done: subprocess.CompletedProcess[str], code: int | None
) -> subprocess.CompletedProcess[str]:
    assert code is None or done.returncode == code, (
        f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done


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
    """vLLM in this process, its engine too: a fourth of the cache, which it fills with zeros, and
    no compiled rank of a token, which nothing reads."""
    with pytest.MonkeyPatch.context() as patch:
        from paw.rollouts.engines.vllm import import_vllm

        with pytest.MonkeyPatch.context() as eager:
            eager.setenv("TORCHDYNAMO_DISABLE", "1")
            vllm = import_vllm()
            importlib.import_module("vllm.v1.sample.ops.logprobs")
        patch.setattr("vllm.platforms.cpu.GiB_bytes", 1 << 28)
        yield vllm


@pytest.fixture
def paw_start(paw_env: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """`paw_start(*words)` starts the command line; whatever still runs at the end of the test is
    killed."""
    started: list[Child] = []

    def start(*words: Any) -> Child:
        ours, theirs = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        child = Child(command(*words)[3:], env=paw_env, cwd=str(tmp_path), out=nowhere, err=theirs)
        os.close(theirs)
        os.close(nowhere)
        child.stderr = os.fdopen(ours, errors="replace")
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.wait(60)
        child.stderr.close()


def command(*words: Any) -> list[str]:
    """The words of a command; {"a.b": 1} becomes --a.b 1. A model of one's own has no warm-up."""
    changes = [
        (key, value) for word in words if isinstance(word, dict) for key, value in word.items()
    ]
    own_model = dict(changes).get("model.path", "quickstart") != "quickstart"
    kept = [(key, value) for key, value in changes if not (own_model and key.startswith("warmup."))]
    plain = [str(word) for word in words if not isinstance(word, dict)]
    return [
        sys.executable,
        "-m",
        "paw",
        *plain,
        *(part for key, value in kept for part in (f"--{key}", str(value))),
    ]


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
            words = command("train", "quickstart", quick, {"run.dir": folder, "run.name": "first"})
            checked(subprocess.run(words, env=paw_env, capture_output=True, text=True), 0)
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
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [
            {k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))}
            for line in lines
        ]

    return read


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
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")]
    )
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

    def make(folder: Path, *says: str, template: str = "") -> Path:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        words = [*map(str, says)]
        tokenizer.add_tokens(words)
        tokenizer.chat_template = template or tokenizer.chat_template
        model.resize_token_embeddings(len(tokenizer))
        # The parameters themselves; dimension 0 is the same everywhere, says the words.
        weights = model.state_dict()
        weights["model.embed_tokens.weight"][:, 0] = 5.0
        weights["lm_head.weight"][:, 0] = 0.0
        weights["lm_head.weight"][tokenizer.convert_tokens_to_ids(words), 0] = 1.0
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def updated() -> Callable[[Any], Any]:
    """`updated(run)` trains one update of that run; what the agent played: (groups, statistics)."""

    def make(run: Any) -> Any:
        from paw.rollouts.scheduler import Rollouts
        from paw.rollouts.sync import push_weights
        from paw.trainer import update

        played = []
        rollouts = Rollouts(run.factory, run.engine, run.chat, run.config)
        rollouts.share = lambda *args, share=rollouts.share: (
            played.append(share(*args)) or played[-1]
        )
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
                yield (
                    game["id"],
                    {
                        "pddl_domain": rules["domain"],
                        "grammar": rules["grammar"].replace("UNKNOWN GOAL.", game["task"], 1),
                        "pddl_problem": game["problem"],
                        "solvable": True,
                        "walkthrough": game["walkthrough"],
                    },
                )

    return read
