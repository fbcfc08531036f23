"""The command line: quick help, one line for a mistake, names for runs."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paw import __version__, cli
from paw.keys import meaning
from paw.recipe import dump, known_keys, load

COMMANDS = list(cli.COMMANDS)
HEAVY = ("torch", "transformers", "numpy", "vllm", "textworld", "matplotlib")


def mistake(capfd, *words) -> str:
    """The one line on stderr of a command that exits with 2."""
    assert cli.main(list(map(str, words))) == 2
    out, err = capfd.readouterr()
    assert err.startswith("paw: ") and err.endswith("\n") and err.count("\n") == 1
    assert "Traceback" not in err and not out
    return err


def shown(capsys, *words) -> str:
    assert cli.main(list(map(str, words))) == 0
    return capsys.readouterr().out


def make_run(folder, name):
    (folder / name).mkdir(parents=True)
    (folder / name / "metrics.jsonl").write_text('{"step": 0}\n')


def test_help_of_every_command_loads_nothing_heavy(paw_env):
    code = f"""
import contextlib, io, sys
from paw.cli import main
for words in [[], *([c] for c in {COMMANDS})]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    assert out.getvalue().startswith("usage: paw"), words
print(",".join(m for m in {HEAVY} if m in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=paw_env)
    assert done.stdout.strip() == ""


def test_help_takes_under_half_a_second_of_cpu_time(paw_env):
    def cpu_seconds() -> float:
        child = subprocess.Popen([sys.executable, "-m", "paw", "--help"], stdout=subprocess.DEVNULL, env=paw_env)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        return usage.ru_utime + usage.ru_stime

    assert min(cpu_seconds() for _ in range(2)) < 0.5  # the first may compile bytecode


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(f"\n    {command}" in text for command in COMMANDS)


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"paw {__version__}\n"


@pytest.mark.parametrize("name", ["quickstart", "search-zerosearch", "webshop-ppo-paw", "14b-low-memory"])
def test_a_dry_run_prints_the_resolved_recipe_and_explains_each_key(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    printed = shown(capsys, "train", name, "--dry-run")
    config = load(name, {"run.name": name})
    assert tomllib.loads(printed) == tomllib.loads(dump(config))
    lines = printed.splitlines()
    for key, (field, needs) in known_keys(config).items():
        explained = f"# {meaning(field)}" in lines
        assert explained == (not needs) and field.description, key
    assert "# similarity is not set" in shown(capsys, "train", "alfworld-gigpo", "--dry-run").splitlines()
    assert list(tmp_path.iterdir()) == []


def test_the_page_of_keys_is_up_to_date(capsys):
    page = Path(__file__).parents[2] / "docs" / "keys.md"
    assert page.read_text(encoding="utf-8") == shown(capsys, "keys"), "paw keys > docs/keys.md"


@pytest.mark.parametrize(
    "words", [["--optim.lr", "5e-4", "--wm.enabled=false"], ["--wm.enabled", "false", "--optim.lr=5e-4"]]
)
def test_overrides_reach_the_configuration(capsys, words):
    config = tomllib.loads(shown(capsys, "train", "quickstart", "--dry-run", *words))
    assert (config["optim"]["lr"], config["wm"]["enabled"]) == (5e-4, False)


def test_a_negative_value_is_a_value(capsys):
    assert tomllib.loads(shown(capsys, "train", "quickstart", "--dry-run", "--run.seed", "-3"))["run"]["seed"] == -3


MISTAKES = {
    "unknown recipe": (["train", "quikstart"], "did you mean 'quickstart'?"),
    "unknown key": (["train", "quickstart", "--optim.lrr", "1"], "unknown key '--optim.lrr'; did you mean 'optim.lr'?"),
    "wrong section": (["train", "quickstart", "--rollout.lr", "1"], "did you mean 'optim.lr'?"),
    "wrong value": (["train", "quickstart", "--optim.lr", "-1"], "command line: optim.lr = -1"),
    "no value": (["train", "quickstart", "--optim.lr"], "'--optim.lr' needs a value"),
    "stray word": (["train", "quickstart", "stray"], "'stray' is not an option"),
    "nothing to resume": (["train", "quickstart", "--resume"], "there is no run in"),
    "no games": (["train", "quickstart", "--env.data", "/nowhere"], "/nowhere is no folder"),
    "no such split": (["train", "quickstart", "--env.eval_split", "test"], "no split 'test'"),
    "no model": (["train", "quickstart", "--model.path", "."], "model.path = '.': there is no config.json"),
    "no run": (["eval", "."], "--recipe"),
    "no model to play": (["eval", ".", "--recipe", "quickstart"], "model.path = '.'"),
    "no report": (["report", "nowhere"], "nowhere: no such run directory"),
    "no checkpoint": (["export", "nowhere"], "nowhere: no run directory"),
    "not an override": (["report", ".", "--optim.lr", "1"], "unknown option '--optim.lr'"),
    "nothing to warm up": (["warmup", "nowhere"], "unknown recipe 'nowhere'"),
    "no such recipe file": (["train", "absent.toml"], "paw: absent.toml: no such file"),
    "resume before the recipe": (["train", "--resume", "quickstart", "quickstart"], "--resume quickstart: takes auto"),
    "no such checkpoint": (["train", "quickstart", "--resume", "step_000009"], "there is no run in"),
    "a model to plan that is none": (["plan", "quickstart"], "made on the spot: it fits any machine"),
    "no environment": (["train", "own-environment"], "env.name = '': it is not set: give"),
    "an endpoint to train": (["train", "quickstart", "--endpoint.url", "http://a"], "an endpoint plays in `paw eval`"),
    "no products": (["train", "webshop-grpo", "--env.data", "nowhere"], "nowhere/items_shuffle_1000.json is missing"),
    "no such file": (["train", "quickstart", "--env.name", "mine.py:Game"], "mine.py:Game': there is no file"),
    "one of a group": (
        ["train", "alfworld-gigpo-paw", "--rollout.group_size", "1"],
        "command line: rollout.group_size = 1 leaves gigpo without a baseline; use 2 or more, or advantage.type =",
    ),
}
RANGES = {
    "wm.alpha": ("0", "greater than 0"),
    "wm.rho": ("1.5", "less than or equal to 1"),
    "wm.scale": ("-1", "greater than or equal to 0"),
    "env.reward": ("0", "greater than 0"),
    "advantage.gamma": ("1.1", "less than or equal to 1"),
    "advantage.omega": ("-1", "greater than or equal to 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_users_mistake_is_one_line(capfd, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    words, reason = MISTAKES[name]
    assert reason in mistake(capfd, *words)


@pytest.mark.parametrize("key", RANGES)
def test_a_value_out_of_range_names_its_origin(capfd, key):
    value, reason = RANGES[key]
    error = mistake(capfd, "train", "alfworld-gigpo-paw", f"--{key}", value)
    assert error == f"paw: command line: {key} = {value}: Input should be {reason}\n"


def test_mistakes_that_need_no_model_are_found_without_torch(tmp_path, paw_env):
    code = """
import sys
from paw.cli import main
for words in (["--resume"], ["--env.data", "/nowhere"], ["--model.path", "."], ["--model.path", "a/b"]):
    assert main(["train", "quickstart", *words]) == 2, words
assert main(["plan", "--model", "a/b"]) == 2
sys.exit("torch" in sys.modules)
"""
    env = paw_env | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stderr.count("\n") == 5, done.stderr
    assert done.stderr.count("it is not in the hub's cache") == 2


def test_environment_data_that_are_not_there_are_one_line_everywhere(capfd):
    words = (["train", "quickstart"], ["play", "alfworld"], ["env", "check", "alfworld"])
    for command in words:
        assert cli.main([*command, "--env.data", "/nowhere"]) == 2, command
        error = capfd.readouterr().err.splitlines()[-1]
        assert error.startswith("paw: env.data: /nowhere is no folder") and "`paw data alfworld --download`" in error


def test_a_high_rate_of_a_pretrained_model_is_warned_of(capsys):
    for words, warned in ((["--model.path", "a/b"], 1), ([], 0), (["--model.path", "a/b", "--optim.lr", "1e-6"], 0)):
        assert cli.main(["train", "quickstart", "--dry-run", *words]) == 0
        assert capsys.readouterr().err.count("warning: optim.lr = 0.0005 is high for a pretrained model") == warned


def test_a_chosen_checkpoint_must_be_there(capfd, tmp_path):
    make_run(tmp_path, "quickstart")
    (tmp_path / "quickstart" / "checkpoints" / "step_000040").mkdir(parents=True)
    error = mistake(capfd, "train", "quickstart", "--run.dir", tmp_path, "--resume", "step_000100")
    assert "--resume step_000100: no such checkpoint in" in error and error.endswith("there are: step_000040\n")


@pytest.mark.parametrize("words", [[], ["nonesuch"], ["train"], ["train", "quickstart", "--resume", "never"]])
def test_wrong_usage_exits_with_2_and_no_traceback(capfd, words):
    with pytest.raises(SystemExit) as stopped:
        sys.exit(cli.main(words))
    err = capfd.readouterr().err
    assert stopped.value.code == 2
    assert "paw" in err.splitlines()[-1] and "Traceback" not in err


def test_a_mistake_in_a_process_of_its_own(paw):
    done = paw("train", "quickstart", {"optim.lrr": 1}, code=2)
    assert done.stdout == ""
    assert done.stderr == "paw: command line: unknown key '--optim.lrr'; did you mean 'optim.lr'?\n"


@pytest.mark.slow
def test_doctor_says_what_is_here(paw):
    done = paw("doctor")
    assert done.stdout.startswith(f"paw {__version__}, Python ")
    assert "  ok       torch " in done.stdout
    assert "pip install" in done.stdout or "vllm" in done.stdout
    assert done.stdout.endswith("ready: paw train quickstart\n")
    assert done.stderr == ""


def test_doctor_inspects_a_model(paw_here, tiny_llm, tmp_path):
    model = tiny_llm(tmp_path / "m", "qwen3")
    done = paw_here("doctor", "--model", model)
    assert re.search(r"difference float32 +\d\S+ nats\n +difference bfloat16 +\d\S+ nats\n", done.stdout)
    assert "chat template         usable" in done.stdout and done.stdout.endswith("can be trained\n")
    found = json.loads(paw_here("doctor", "--model", model, "--json").stdout)
    assert found["difference_float32"] < 1e-5 and found["layers"] == {"full_attention": 2} and not found["problems"]
    (model / "chat_template.jinja").unlink()
    done = paw_here("doctor", "--model", model, code=1)
    assert "has no chat template" in done.stdout and done.stdout.endswith("cannot be trained as it is\n")
    assert "there is no such folder" in paw_here("doctor", "--model", tmp_path / "none", code=2).stderr


def name_of(capsys, folder, recipe="quickstart", *words):
    return tomllib.loads(shown(capsys, "train", recipe, "--dry-run", "--run.dir", folder, *words))["run"]["name"]


def test_a_run_is_named_after_its_recipe_and_numbered(capsys, tmp_path):
    assert name_of(capsys, tmp_path) == "quickstart"
    make_run(tmp_path, "quickstart")
    assert name_of(capsys, tmp_path) == "quickstart-2"
    for name in ("quickstart-2", "quickstart-9", "quickstart-10"):  # by number, not by letter
        make_run(tmp_path, name)
    assert name_of(capsys, tmp_path) == "quickstart-11"
    assert name_of(capsys, tmp_path, "quickstart", "--resume", "auto") == "quickstart-10"


def test_other_names_do_not_count(capsys, tmp_path):
    for name in ("quickstart-copy", "quickstart-2-old", "my-quickstart", "quickstart2"):
        make_run(tmp_path, name)
    (tmp_path / "quickstart").mkdir()  # a folder without a run in it
    assert name_of(capsys, tmp_path) == "quickstart"


def test_a_name_that_was_given_stands(capsys, tmp_path):
    make_run(tmp_path, "mine")
    assert name_of(capsys, tmp_path, "quickstart", "--run.name", "mine") == "mine"


def test_a_recipe_file_names_its_runs(capsys, tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text('[model]\npath = "m"\n')
    assert name_of(capsys, tmp_path, path) == "sweep"
    path.write_text('[model]\npath = "m"\n[run]\nname = "chosen"\n')
    assert name_of(capsys, tmp_path, path) == "chosen"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_the_allocator_is_set_up_before_torch_unless_the_user_has(given, expected):
    code = (
        "import os, sys; from paw.cli import main; assert 'torch' not in sys.modules; main(['report', 'nowhere']);"
        " print(os.environ.get('PYTORCH_ALLOC_CONF'))"
    )
    clean = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run([sys.executable, "-c", code], env=clean | given, capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[-1] == str(expected)
