"""The programs of examples/ that need no server run as they are, with few episodes.

The others are tested in test_openenv.py, test_vllm_server.py and envs/test_verifiers.py.
"""

import json
import re
import sys

import pytest
from jsonl import read_jsonl
from run_examples import EXAMPLES, SMALL, SMALL_WARMUP, in_their_folder, run_example

LINES = 60
"""Maximum number of lines of an example."""


@pytest.fixture
def example(paw_env, tmp_path, monkeypatch, capfd):
    """`example(name, **settings)` runs an example and returns (exit code, output, errors)."""
    in_their_folder(monkeypatch, paw_env["PAW_CACHE"], tmp_path)

    def run(name, settings):
        capfd.readouterr()
        code = run_example(monkeypatch, name, settings)
        printed, errors = capfd.readouterr()
        return code, printed, errors

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("own_environment", {}, r"Cups fetched from unseen places: \d+% -> \d+%\."),
        ("own_reward_and_loss", {"policy.width": 0.3}, r"moves: \d+\.\d\d -> \d+\.\d\d"),
        ("tool_conversation", {"env.max_turns": 3}, r"Held-out goals reached: \d+% -> \d+%\."),
        (
            "question_set",
            {"eval.games": 16},
            r"eval/success_large: \d+% -> \d+% of the held-out questions",
        ),
    ],
)
def test_an_example_trains(example, read_metrics, tmp_path, name, more, said):
    exit_code, printed, errors = example(name, SMALL | SMALL_WARMUP | more)
    assert exit_code == 0, errors
    run_folder = tmp_path / "runs" / name.replace("_", "-")
    assert re.search(said, printed)
    assert printed.endswith(f"{run_folder / 'report.html'}\n")
    _, metrics = read_metrics(run_folder)
    assert metrics["health/env_failures"] == 0
    assert metrics["optim/skipped"] == 0
    if name == "own_reward_and_loss":  # a penalty of a tenth for each of twelve turns
        assert -1.21 < metrics["reward/mean"] < metrics["success/all"] - 0.09
    if name == "tool_conversation":
        turns = [
            turn for sample in read_jsonl(run_folder / "samples.jsonl") for turn in sample["turns"]
        ]
        assert any(turn["action"].startswith('add({"n": ') for turn in turns)
        assert any(turn["observation"].endswith(" left.") for turn in turns)


@pytest.mark.slow
def test_the_notebook_runs(paw_env, tmp_path, monkeypatch):
    """The cells run in order, in IPython. The output of the cell that trains has one plot for both
    runs, and the notebook is stored with it."""
    pytest.importorskip("IPython", reason="pip install 'paw-trainer[test]'")
    monkeypatch.syspath_prepend(EXAMPLES.with_name("bench"))
    from notebook import run_notebook

    in_their_folder(monkeypatch, paw_env["PAW_CACHE"], tmp_path)
    path = EXAMPLES / "compare.ipynb"
    settings = SMALL | SMALL_WARMUP
    notebook, variables = run_notebook(path, [f"{key}={value}" for key, value in settings.items()])
    with_plots = []
    for stored in (notebook, json.loads(path.read_text(encoding="utf-8"))):
        for cell in stored["cells"]:
            outputs = cell.get("outputs", [])
            if plots := [output for output in outputs if "image/png" in output.get("data", {})]:
                with_plots.append(("".join(cell["source"]), len(plots)))
    assert hasattr(sys.modules["__main__"], "__spec__")  # multiprocessing reads it
    training_cell, image_count = with_plots[0]
    assert "paw.train(" in training_cell
    assert image_count == 1
    assert with_plots[0] == with_plots[1]
    assert len(with_plots) == 2
    assert sorted(variables["reports"]) == ["grpo", "paw"]
    logged = read_jsonl(tmp_path / "runs" / "paw" / "metrics.jsonl")
    assert logged[-1]["step"] == 1


def test_a_mistake_is_one_line(example):
    exit_code, printed, errors = example("own_environment", {"run.update": 3})
    assert exit_code == 2
    assert printed == ""
    assert errors == (
        "paw: command line: unknown key '--run.update'; did you mean 'run.updates'?\n"
    )


def test_examples_are_short():
    for file in EXAMPLES.glob("*.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= LINES, file.name
