"""The command line: help is quick, a mistake is one line, and runs get names."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from paw import __version__, cli
from paw.config.recipe import dump, known_keys, load
from paw.tools.reference import meaning

COMMANDS = list(cli.COMMANDS)
HEAVY = ("torch", "transformers", "vllm", "textworld", "matplotlib")


def mistake(capfd, *words) -> str:
    """Run a command that exits with 2. Returns the line that it writes to stderr."""
    assert cli.main(list(map(str, words))) == 2
    printed, errors = capfd.readouterr()
    assert errors.startswith("paw: ")
    assert errors.endswith("\n")
    assert errors.count("\n") == 1
    assert "Traceback" not in errors
    assert not printed
    return errors


def printed_by(capsys, *words) -> str:
    assert cli.main(list(map(str, words))) == 0
    return capsys.readouterr().out


def make_run(folder, name):
    (folder / name).mkdir(parents=True)
    (folder / name / "metrics.jsonl").write_text('{"step": 0}\n')


def test_what_needs_no_torch_loads_none(paw_env, tmp_path):
    """True for the help of every command and for mistakes that are found without a model. The
    allocator is set up before torch is imported."""
    program = f"""
import contextlib, io, os, sys
from paw.cli import main
for words in [[], *([c] for c in {COMMANDS})]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    assert out.getvalue().startswith("usage: paw"), words
    assert words or all(f"\\n    {{command}}" in out.getvalue() for command in {COMMANDS})
for words in (["--resume"], ["--env.data", "/nowhere"], ["--model.path", "."], ["--model.path", "a/b"]):
    assert main(["train", "quickstart", *words]) == 2, words
assert main(["plan", "--model", "a/b"]) == 2
with contextlib.suppress(SystemExit):
    main(["--version"])
print(os.environ["PYTORCH_ALLOC_CONF"], *(m for m in {HEAVY} if m in sys.modules))
"""
    variables = {name: value for name, value in paw_env.items() if "ALLOC_CONF" not in name} | {
        "HF_HUB_OFFLINE": "1"
    }
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=variables
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"paw {__version__}\nexpandable_segments:True\n", result.stderr
    assert result.stderr.count("\n") == 5
    assert result.stderr.count("it is not in the hub's cache") == 2


def test_help_loads_nothing_but_the_standard_library(paw_env):
    """This keeps help quick; `python bench/speed.py` measures it."""
    program = """
import contextlib, io, sys
from paw.cli import main
before = {*sys.modules}  # what .pth files load
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["--help"])
print(*{name.partition(".")[0] for name in sys.modules if name not in before} - sys.stdlib_module_names - {"paw"})
print(*(name for name in sys.modules if name.startswith("paw.")))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=paw_env
    )
    loaded, our_modules = result.stdout.splitlines()
    assert not loaded, result.stderr
    assert {*our_modules.split()} == {
        "paw.cli",
        "paw.commands",
        "paw.errors",
        "paw.io",
        "paw.io.imports",
        "paw.processes",
        "paw.processes.lifeline",
        "paw.processes.watcher",
        "paw.version",
    }, result.stderr


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_the_user_has_set_stays(monkeypatch, name):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert cli.main(["report", "nowhere"]) == 2
    assert os.environ.get("PYTORCH_ALLOC_CONF") == (
        "max_split_size_mb:64" if "CUDA" not in name else None
    )


def test_a_dry_run_prints_the_resolved_recipe_and_explains_each_key(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for recipe in ("search-zerosearch", "webshop-ppo-paw"):
        printed = printed_by(
            capsys, "train", recipe, "--dry-run", "--optim.lr", "5e-4", "--run.seed=-3"
        )
        config = load(recipe, {"run.name": recipe, "optim.lr": "5e-4", "run.seed": "-3"})
        assert tomllib.loads(printed) == tomllib.loads(dump(config))
        lines = printed.splitlines()
        for key, (field, requirement) in known_keys(config).items():
            explained = f"# {meaning(field)}" in lines
            assert explained == (not requirement), key
            assert field.description, key
    assert (
        "# similarity is not set"
        in printed_by(capsys, "train", "alfworld-gigpo", "--dry-run").splitlines()
    )
    assert list(tmp_path.iterdir()) == []


def test_the_page_of_keys_is_up_to_date(capsys):
    page = Path(__file__).parents[2] / "docs" / "keys.md"
    assert page.read_text(encoding="utf-8") == printed_by(capsys, "keys"), "paw keys > docs/keys.md"


TRAIN = ["train", "quickstart"]
MISTAKES = [
    ([], "required: COMMAND"),
    (["nonesuch"], "invalid choice: 'nonesuch'"),
    (["train"], "required: recipe"),
    (["train", "absent.toml"], "paw: absent.toml: No such file"),
    ([*TRAIN, "--optim.lr"], "'--optim.lr' needs a value"),
    ([*TRAIN, "stray"], "'stray' is not an option"),
    ([*TRAIN, "--learning-rate", "1"], "unknown option '--learning-rate'; it is 'optim.lr' here"),
    ([*TRAIN, "--resume"], "there is no run in"),
    ([*TRAIN, "--resume", "never"], "--resume never: use auto"),
    ([*TRAIN, "--env.eval_split", "test"], "no split 'test'"),
    ([*TRAIN, "--model.path", "."], "model.path = '.': there is no config.json"),
    ([*TRAIN, "--endpoint.url", "http://a"], "an endpoint can play in `paw eval`"),
    ([*TRAIN, "--env.name", "mine.py:Game"], "mine.py:Game': there is no file"),
    (["train", "own-environment"], "env.name = '': it is not set: give"),
    (
        ["train", "webshop-grpo", "--env.data", "nowhere"],
        "nowhere/items_shuffle_1000.json is missing",
    ),
    (["eval", "."], "--recipe"),
    (
        ["eval", "nowhere"],
        "nowhere is not a folder; if it is a model on the hub, name its environment with --recipe",
    ),
    (["eval", ".", "--recipe", "quickstart"], "model.path = '.'"),
    (["rollout", "nowhere", "--recipe", "quickstart", "--tasks", "0"], "--tasks 0"),
    (["report", "nowhere"], "nowhere: no such run directory"),
    (["report", "."], "no metrics.jsonl in it"),
    (["doctor", "--kernels", "--json"], "prints no JSON; leave --json out"),
    (["doctor", "--fix"], "unknown option '--fix'"),
    (["doctor", "--kernel"], "unknown option '--kernel'"),  # options cannot be abbreviated
    (["experiment", "compare", "quickstart", "--report"], "unknown option '--report'"),
    (["report", ".", "--optim.lr", "1"], "unknown option '--optim.lr'; see --help"),
    (["export", "nowhere"], "nowhere: no run directory"),
    (["warmup", "nowhere"], "unknown recipe 'nowhere'"),
    (["plan", "quickstart"], "made on the spot: it fits any machine"),
]


def test_a_users_mistake_is_one_line(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, reason in MISTAKES:
        assert reason in mistake(capfd, *arguments), arguments


def test_an_export_without_a_checkpoint_says_which_is_missing(capfd, tmp_path):
    (tmp_path / "config.toml").write_text('[model]\npath = "quickstart"\n')
    assert f"{tmp_path}: no checkpoint to export; see " in mistake(capfd, "export", str(tmp_path))
    arguments = ("export", str(tmp_path), "--checkpoint", "step_000007")
    assert f"{tmp_path}: no checkpoint step_000007 to export; see " in mistake(capfd, *arguments)


def test_environment_data_that_are_not_there_are_one_line_everywhere(capfd):
    for command in (TRAIN, ["play", "alfworld"], ["env", "check", "alfworld"]):
        assert cli.main([*command, "--env.data", "/nowhere"]) == 2, command
        error = capfd.readouterr().err.splitlines()[-1]
        assert error.startswith("paw: env.data: /nowhere is not a folder")
        assert "`paw data alfworld --download`" in error


def test_a_high_rate_of_a_pretrained_model_is_warned_of(capsys):
    for arguments, warned in (
        (["--model.path", "a/b"], 1),
        ([], 0),
        (["--model.path", "a/b", "--optim.lr", "1e-6"], 0),
    ):
        assert cli.main([*TRAIN, "--dry-run", *arguments]) == 0
        assert (
            capsys.readouterr().err.count(
                "warning: optim.lr = 0.001 is high for a pretrained model"
            )
            == warned
        )


def test_a_chosen_checkpoint_must_be_there(capfd, tmp_path):
    make_run(tmp_path, "quickstart")
    (tmp_path / "quickstart" / "checkpoints" / "step_000040").mkdir(parents=True)
    error = mistake(capfd, *TRAIN, "--run.dir", tmp_path, "--resume", "step_000100")
    assert "--resume step_000100: no such checkpoint in" in error
    assert error.endswith("available: step_000040\n")


@pytest.mark.slow
def test_a_mistake_in_a_process_of_its_own(paw):
    result = paw(*TRAIN, {"optim.lrr": 1}, code=2)
    assert result.stdout == ""
    assert (
        result.stderr == "paw: command line: unknown key '--optim.lrr'; did you mean 'optim.lr'?\n"
    )


@pytest.mark.slow
def test_doctor_says_what_is_here_and_inspects_a_model(paw_here, tiny_llm, tmp_path):
    result = paw_here("doctor")
    assert result.stdout.startswith(f"paw {__version__}, Python ")
    assert "  ok       torch " in result.stdout
    assert result.stdout.endswith("ready: paw train quickstart\n")
    report = json.loads(paw_here("doctor", "--json").stdout)
    assert report["paw"] == __version__
    assert report["ready"]
    assert {"state": "ok", "text": f"torch {metadata.version('torch')}"} in report["checks"]
    model = tiny_llm(tmp_path / "m", "qwen3")
    result = paw_here("doctor", "--model", model)
    assert re.search(
        r"difference float32 +\d\S+ nats\n +difference bfloat16 +\d\S+ nats\n", result.stdout
    )
    assert "chat template         usable" in result.stdout
    assert result.stdout.endswith("can be trained\n")
    report = json.loads(paw_here("doctor", "--model", model, "--json").stdout)
    assert report["difference_float32"] < 1e-5
    assert report["layers"] == {"full_attention": 2}
    assert not report["problems"]
    (model / "chat_template.jinja").unlink()
    result = paw_here("doctor", "--model", model, code=1)
    assert "has no chat template" in result.stdout
    assert result.stdout.endswith("cannot be trained as it is\n")
    assert (
        "there is no such folder" in paw_here("doctor", "--model", tmp_path / "none", code=2).stderr
    )


def test_a_run_is_named_after_its_recipe_and_numbered(capsys, tmp_path):
    def name_of(recipe="quickstart", *words):
        return tomllib.loads(
            printed_by(capsys, "train", recipe, "--dry-run", "--run.dir", tmp_path, *words)
        )["run"]["name"]

    for name in ("quickstart-copy", "quickstart-2-old", "my-quickstart", "quickstart2"):
        make_run(tmp_path, name)
    (tmp_path / "quickstart").mkdir()  # a folder that contains no run
    assert name_of() == "quickstart"
    (tmp_path / "quickstart").rmdir()
    # Sorted as numbers, not as text.
    for name in ("quickstart", "quickstart-2", "quickstart-9", "quickstart-10"):
        make_run(tmp_path, name)
    assert name_of() == "quickstart-11"
    assert name_of("quickstart", "--resume", "auto") == "quickstart-10"
    assert name_of("quickstart", "--run.name", "quickstart") == "quickstart"
    path = tmp_path / "sweep.toml"
    path.write_text('[model]\npath = "m"\n')
    assert name_of(path) == "sweep"
    path.write_text('[model]\npath = "m"\n[run]\nname = "chosen"\n')
    assert name_of(path) == "chosen"
