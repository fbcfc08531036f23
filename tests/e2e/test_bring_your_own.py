"""docs/bring-your-own.md: its files and its commands, one after another, with a small model and few
episodes."""

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
    folder = str(tiny_llm(Path("Qwen/Qwen3-0.6B")))  # in the place of the name on the hub
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template += "{% if enable_thinking is defined %}{% endif %}"
    tokenizer.save_pretrained(folder)
    text = PAGE.read_text(encoding="utf-8")
    for name, code in re.findall(r"^```python\n# (\S+)\n(.*?)^```", text, re.S | re.M):
        Path(name).write_text(code)
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands.append("paw env check sums.py:Sums")
    played = []
    for program, *words in map(shlex.split, commands):
        if program == "python":
            runpy.run_path(words[0])
        else:
            played.append(words[:2])
            paw_here(*words, *([SMALL] if words[0] == "train" else []))
    assert [words[0] for words in played] == ["env", "plan", "doctor", "train", "eval", "env"]
    _, line = read_metrics(Path("runs/mine"))
    assert line["health/env_failures"] == 0
    assert line["optim/grad_norm"] > 0
    assert line["wm/selected_frac"] > 0
