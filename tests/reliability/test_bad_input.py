"""What a user gets wrong: one line that says so, exit code 2, and nothing left that is in the way of the next try."""

import json
import re
import resource
import shutil

import pytest

from paw.state import checkpoint

LIMIT = 200_000
"""Bytes: room for every log, not for the weights."""


def assert_refused(done, message):
    assert done.returncode == 2
    assert done.stderr.startswith("paw: ") and done.stderr.endswith("\n") and done.stderr.count("\n") == 1, done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "broken.toml"], "broken.toml: not valid TOML"),
        (["train", "latin.toml"], "latin.toml: not valid TOML"),
        (["train", "unknown.toml"], "unknown key 'wm.alhpa'; did you mean 'wm.alpha'"),
        (["train", "old.toml"], "old.toml: unknown key 'advantage.estimator'; it is 'advantage.type' now"),
        (["train", "nomodel.toml"], "'model.path' is missing"),
        (["report", "."], "no metrics.jsonl in it"),
        (["doctor", "--fix"], "unknown option '--fix'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_on_the_command_line(paw, tmp_path, words, message):
    (tmp_path / "broken.toml").write_text("[model\n")
    (tmp_path / "latin.toml").write_bytes(b'[model]\npath = "\xe9"\n')
    (tmp_path / "unknown.toml").write_text('[model]\npath = "quickstart"\n[wm]\nalhpa = 1.0\n')
    (tmp_path / "old.toml").write_text('[model]\npath = "quickstart"\n[advantage]\nestimator = "grpo"\n')
    (tmp_path / "nomodel.toml").write_text("[wm]\nalpha = 1.0\n")
    assert_refused(paw(*words, code=None, cwd=tmp_path), message)
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def games(paw, tmp_path_factory):
    """A generated ALFWorld folder."""
    folder = tmp_path_factory.mktemp("games") / "games"
    paw("data", "alfworld", "--generate", 12, "--out", folder, "--difficulty", "tiny")
    return folder


def spoil_games(games, folder, how):
    """A copy of `games` with one thing wrong; returns it."""
    shutil.copytree(games, folder)
    (folder / "json_2.1.1" / "paw-index.json").unlink()
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "overrides", "message"),
    [
        ("missing", {"env.data": "nowhere"}, "env.data: nowhere is no folder .*paw data alfworld --download"),
        ("truncated", {}, r"game file .*game.tw-pddl: not valid JSON .*download the games again"),
        ("not a game", {}, r"game file .*game.tw-pddl: "),
        ("empty", {}, "valid_unseen holds no games"),
        ("split", {"env.eval_split": "test"}, "unknown ALFWorld split 'test'; there are: train"),
        ("kind", {"env.kinds": '["two"]'}, r"holds no game of env.kinds = \['two'\]"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 16 else "",
)
def test_games_that_cannot_be_played(paw_here, quick, quick_model, games, tmp_path, how, overrides, message):
    data = {"env.data": spoil_games(games, tmp_path / "games", how)} | overrides
    words = ["train", "quickstart", quick, {"model.path": quick_model, "run.name": "x"}, data]
    assert_refused(paw_here(*words, code=None, cwd=tmp_path), message)
    assert not (tmp_path / "runs" / "x" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nowhere", "model.path = 'nobody/nothing': "),
        ("no weights", "model.path = '.*': cannot be loaded: .*no file named"),
        ("cut weights", "model.path = '.*': cannot be loaded: "),
        ("missing weight", "model.path = '.*': 1 weights are missing in its files, first 'model.norm.weight'"),
        ("other shape", "model.path = '.*': .*shape"),
        ("no tokenizer", "model.path = '.*': no tokenizer found"),
        ("no template", "has no chat template"),
        ("short", "exceed the model's 64 positions; lower rollout.max_prompt_tokens"),
    ],
    ids=lambda value: value if len(value) < 16 else "",
)
def test_models_that_cannot_be_used(paw, paw_here, quick, tiny_llm, tmp_path, how, message):
    from safetensors.torch import load_file, save_file

    model = tiny_llm(tmp_path / "model", positions=64 if how == "short" else 4096)
    weights = model / "model.safetensors"
    name = str(model)
    if how == "nowhere":
        name = "nobody/nothing"
    elif how == "no weights":
        weights.unlink()
    elif how == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "missing weight":
        save_file({k: v for k, v in load_file(weights).items() if k != "model.norm.weight"}, weights, {"format": "pt"})
    elif how == "other shape":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    elif how == "no tokenizer":
        for file in model.glob("tokenizer*"):
            file.unlink()
    elif how == "no template":
        (model / "chat_template.jinja").unlink()
    words = ["train", "quickstart", quick, {"model.path": name, "run.name": "x"}]
    run_it = paw if how == "nowhere" else paw_here  # a child is offline
    assert_refused(run_it(*words, code=None, cwd=tmp_path), message)
    run = tmp_path / "runs" / "x"
    assert not (run / "checkpoints").exists() and not (run / "hf").exists()
    if how == "short":  # it got furthest: the run directory exists, and the name must still be free
        assert (run / "config.toml").exists()
        tiny_llm(model)
        paw_here(*words, {"run.updates": 1, "eval.games": 1, "env.max_turns": 2}, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "overrides"),
    [
        ("vllm", {"rollout.engine": "vllm"}),
        ("textworld", {"env.backend": "textworld"}),
        ("wandb", {"run.trackers": "wandb"}),
    ],
)
def test_extras_that_are_not_installed(paw, paw_env, quick, quick_model, tmp_path, package, overrides):
    """The child's import system does not find `package`, as if it had never been installed."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] == "{package}" else self.finder.find_spec(name, *rest)

sys.meta_path[:] = map(Without, sys.meta_path)
"""
    )
    env = {"PYTHONPATH": f"{tmp_path}:{paw_env['PYTHONPATH']}"}
    words = ["train", "quickstart", quick, {"model.path": quick_model, "run.dir": tmp_path}, overrides]
    assert_refused(paw(*words, code=None, env=env), rf"{package}.*pip install ('paw-trainer\[\w+\]'|wandb)")


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
def test_a_full_disk(paw, quick, quick_run, tmp_path):
    """A file size limit stands in for the disk: writing beyond it fails as ENOSPC does."""
    full = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))}
    run = tmp_path / "run"
    shutil.copytree(quick_run, run)
    words = ["train", "quickstart", quick, {"run.dir": tmp_path, "run.name": "run", "run.updates": 3}]
    done = paw(*words, "--resume", "auto", code=None, **full)
    assert_refused(done, "cannot save checkpoint .*step_000003: File too large; earlier checkpoints are intact")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]
    checkpoint.verify(run / "checkpoints" / "step_000002")
    done = paw("export", run, "--out", tmp_path / "hf", code=None, **full)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"paw: cannot write the exported model to {tmp_path / 'hf'}: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    paw(*words, "--resume", "auto")
    assert "step_000003" in [path.name for path in (run / "checkpoints").iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "nowhere"], "nowhere is not a run directory; say what it plays with --recipe"),
        (["eval", "nowhere", "--recipe", "quickstart"], "model.path = 'nowhere'"),
        (["rollout", "nowhere", "--recipe", "quickstart", "--tasks", "0"], "--tasks 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_runs_that_are_not_there(paw_here, tmp_path, words, message):
    assert_refused(paw_here(*words, code=None, cwd=tmp_path), message)
    assert not list(tmp_path.iterdir())
