"""What a user gets wrong: one line that says so, exit code 2, and nothing left that is in the way of the next try."""

import json
import re
import resource
import shutil
import sys

import pytest
from safetensors.torch import load_file, save_file

from paw.cli import main
from paw.state import restore

LIMIT = 200_000
"""Bytes: room for every log, not for the weights."""


def assert_refused(done, message):
    assert done.returncode == 2
    assert done.stderr.startswith("paw: ") and done.stderr.endswith("\n") and done.stderr.count("\n") == 1, done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stdout


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """A generated ALFWorld folder."""
    folder = tmp_path_factory.mktemp("games") / "games"
    assert main(["data", "alfworld", "--generate", "12", "--out", str(folder), "--difficulty", "tiny"]) == 0
    return folder


def spoil_games(games, folder, how):
    """A copy of `games` with one thing wrong; returns it."""
    shutil.copytree(games, folder)
    train, unseen = (folder / "json_2.1.1" / split for split in ("train", "valid_unseen"))
    if how == "truncated":
        for file in train.rglob("game.tw-pddl"):
            file.write_bytes(file.read_bytes()[:-200])
    elif how == "not a game":
        for file in train.rglob("game.tw-pddl"):
            file.write_text(json.dumps({"pddl_domain": "", "pddl_problem": "(define)", "grammar": ""}))
    elif how == "empty":
        shutil.rmtree(unseen)
        unseen.mkdir()
    return folder


GAMES = [
    ("missing", {"env.data": "nowhere"}, "env.data: nowhere is no folder .*paw data alfworld --download"),
    ("truncated", {}, r"game file .*game.tw-pddl: Invalid JSON.*download the games again"),
    ("not a game", {}, r"game file .*game.tw-pddl: "),
    ("empty", {}, "valid_unseen holds no games"),
    ("split", {"env.eval_split": "test"}, "unknown ALFWorld split 'test'; there are: train"),
    ("kind", {"env.kinds": '["two"]'}, r"holds no game of env.kinds = \['two'\]"),
]


@pytest.mark.slow
def test_games_that_cannot_be_played(paw_here, quick, quick_model, games, tmp_path):
    for how, overrides, message in GAMES:
        data = {"env.data": spoil_games(games, tmp_path / how, how)} | overrides
        words = ["train", "quickstart", quick, {"model.path": quick_model, "run.name": "x"}, data]
        assert_refused(paw_here(*words, code=None, cwd=tmp_path), message)
        assert not (tmp_path / "runs" / "x" / "metrics.jsonl").exists()


MODELS = [
    ("no weights", "model.path = '.*': cannot be loaded: .*no file named"),
    ("cut weights", "model.path = '.*': cannot be loaded: "),
    ("missing weight", "model.path = '.*': 1 weights are missing in its files, first 'model.norm.weight'"),
    ("other shape", "model.path = '.*': .*shape"),
    ("no tokenizer", "model.path = '.*': no tokenizer found"),
    ("no template", "has no chat template"),
    ("short", "exceed the model's 64 positions; lower rollout.max_prompt_tokens"),
]


def spoil_model(model, how):
    weights, config = model / "model.safetensors", model / "config.json"
    if how == "no weights":
        weights.unlink()
    elif how == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "missing weight":
        save_file({k: v for k, v in load_file(weights).items() if k != "model.norm.weight"}, weights, {"format": "pt"})
    elif how == "other shape":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 32}))
    elif how == "no tokenizer":
        for file in model.glob("tokenizer*"):
            file.unlink()
    elif how == "no template":
        (model / "chat_template.jinja").unlink()


@pytest.mark.slow
def test_models_that_cannot_be_used(paw_here, quick, tiny_llm, tmp_path):
    words = ["train", "quickstart", quick, {"model.path": "model", "run.name": "x"}]
    run = tmp_path / "runs" / "x"
    for how, message in MODELS:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        spoil_model(tiny_llm(tmp_path / "model", positions=64 if how == "short" else 4096), how)
        assert_refused(paw_here(*words, code=None, cwd=tmp_path), message)
        assert not (run / "checkpoints").exists() and not (run / "hf").exists()
    assert (run / "config.toml").exists()  # the last got furthest, and the name must still be free
    tiny_llm(tmp_path / "model")
    paw_here(*words, {"run.updates": 1, "eval.games": 1, "env.max_turns": 2}, cwd=tmp_path)


@pytest.mark.slow
def test_extras_that_are_not_installed(paw_here, quick, quick_model, tmp_path, monkeypatch):
    words = ["train", "quickstart", quick, {"model.path": quick_model, "run.dir": tmp_path}]
    for package, overrides in (
        ("vllm", {"rollout.engine": "vllm"}),
        ("textworld", {"env.backend": "textworld"}),
        ("wandb", {"run.trackers": "wandb"}),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)  # as if it had never been installed
            done = paw_here(*words, overrides, code=None)
        assert_refused(done, rf"{package}.*pip install ('paw-trainer\[\w+\]'|wandb)")


@pytest.mark.slow
def test_run_directories_in_the_way(paw_here, quick, quick_run, tmp_path):
    (tmp_path / "file").write_text("")
    inside = {"run.dir": tmp_path / "file", "run.name": "x"}
    assert_refused(
        paw_here("train", "quickstart", quick, inside, code=None), "cannot create the run directory .*run.dir"
    )
    (tmp_path / "odd" / "config.toml").mkdir(parents=True)
    odd = {"run.dir": tmp_path, "run.name": "odd"}
    assert_refused(paw_here("train", "quickstart", quick, odd, code=None), "cannot write .*config.toml: Is a directory")
    before = {path: path.read_bytes() for path in quick_run.rglob("[!.]*") if path.is_file()}
    taken = {"run.dir": quick_run.parent, "run.name": quick_run.name}
    assert_refused(paw_here("train", "quickstart", quick, taken, code=None), "holds a run already; use --resume auto")
    assert before == {path: path.read_bytes() for path in quick_run.rglob("[!.]*") if path.is_file()}
    gone = {"run.dir": tmp_path, "run.name": "gone"}
    done = paw_here("train", "quickstart", quick, gone, "--resume", "auto", code=None)
    assert_refused(done, "there is no run in .*gone; start without --resume")


@pytest.mark.slow
def test_a_full_disk(paw_here, quick, quick_run, tmp_path):
    """A file size limit stands in for the disk: writing beyond it fails as ENOSPC does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = tmp_path / "run"
    shutil.copytree(quick_run, run)
    words = ["train", "quickstart", quick, {"run.dir": tmp_path, "run.name": "run", "run.updates": 3}]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
        done = paw_here(*words, "--resume", "auto", code=None)
        assert_refused(done, "cannot write checkpoint .*step_000003: File too large; earlier checkpoints are intact")
        done = paw_here("export", run, "--out", tmp_path / "hf", code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]
    restore.verify(run / "checkpoints" / "step_000002")
    assert done.stderr.splitlines()[-1].startswith(f"paw: cannot write the exported model to {tmp_path / 'hf'}: ")
    assert "Traceback" not in done.stderr and sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    paw_here(*words, "--resume", "auto")
    assert "step_000003" in [path.name for path in (run / "checkpoints").iterdir()]
