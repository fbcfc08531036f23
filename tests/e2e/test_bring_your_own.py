"""The files and commands of docs/bring-your-own.md work one after another, with a small model and
few episodes."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from transformers import AutoTokenizer

PAGE = Path(__file__).parents[2] / "docs" / "bring-your-own.md"
SMALL = {
    "run.updates": 1, "run.threads": 1, "model.dtype": "float32", "rollout.tasks": 2,
    "rollout.group_size": 3, "rollout.max_response_tokens": 4, "rollout.max_prompt_tokens": 512, "env.max_turns": 2,
    "eval.games": 1,
}  # fmt: skip


@pytest.mark.slow
def test_the_page_runs(paw_here, read_metrics, tiny_llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = str(tiny_llm(Path("Qwen/Qwen3-0.6B")))  # a folder with the model's name on the hub
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template += "{% if enable_thinking is defined %}{% endif %}"
    tokenizer.save_pretrained(folder)
    text = PAGE.read_text(encoding="utf-8")
    for name, code in re.findall(r"^```python\n# (\S+)\n(.*?)^```", text, re.S | re.M):
        Path(name).write_text(code)
    commands = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M):
        commands += block.replace("\\\n", " ").splitlines()
    commands.append("paw env check sums.py:Sums")
    programs = []
    for program, *arguments in map(shlex.split, commands):
        if program == "python":
            runpy.run_path(arguments[0])
            continue
        programs.append(arguments[0])
        if arguments[0] == "train":
            arguments.append(SMALL)
        paw_here(*arguments)
    assert programs == ["env", "plan", "doctor", "train", "eval", "env"]
    _, metrics = read_metrics(Path("runs/mine"))
    assert metrics["health/env_failures"] == 0
    assert metrics["optim/grad_norm"] > 0
    assert metrics["wm/selected_frac"] > 0
