"""Every agent trains with GRPO + PaW, including the agent of docs/agents.md with its reward. So
does a recipe of Table 2."""

import json
import math
import re
from pathlib import Path

import pytest
from jsonl import write_jsonl

DOCS = Path(__file__).parents[2] / "docs"
SMALL = {
    "run.threads": 1, "model.dtype": "float32", "engine.type": "transformers", "rollout.tasks": 2,
    "rollout.group_size": 3, "rollout.max_response_tokens": 24, "rollout.max_prompt_tokens": 3000, "eval.games": 2,
    "env.max_turns": 3, "policy.kl_coef": 0,
}  # fmt: skip
SEARCH = {"run.updates": 2, "env.style": "paper", "env.entities": 20, "env.topk": 1}
REFLEXION = {
    "run.updates": 1, "env.style": "paper", "env.max_turns": 1, "agent.trials": 2, "rollout.tasks": 1,
    "rollout.group_size": 2, "eval.games": 1,
}  # fmt: skip
GUESS = DOCS.with_name("examples") / "number_game.py"
OWN = {"run.updates": 1, "env.name": f"{GUESS}:Guess", "agent.words": 5}
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("agent", "recipe", "more"),
    [
        ("search-r1", "search-quickstart", SEARCH),
        ("reflexion", "quickstart", REFLEXION),
        ("mine.py:plan_first", "quickstart", OWN | {"reward.type": "mine.py:brief"}),
    ],
)
def test_an_agent_trains(paw_here, read_metrics, tiny_llm, tmp_path, agent, recipe, more):
    blocks = BLOCK.findall((DOCS / "agents.md").read_text())
    (tmp_path / "mine.py").write_text("\n\n".join(blocks))
    settings = {
        "agent.type": agent, "model.path": tiny_llm(tmp_path / "model"), "run.dir": tmp_path, "run.name": "run",
        **more,
    }  # fmt: skip
    paw_here("train", recipe, SMALL, settings, cwd=tmp_path)
    _, *updates = read_metrics(tmp_path / "run")
    assert [metrics["step"] for metrics in updates] == [*range(1, more["run.updates"] + 1)]
    for metrics in updates:
        assert metrics["health/env_failures"] == 0
        assert metrics["optim/skipped"] == 0
        assert math.isfinite(metrics["policy/loss"])
        if "reward.type" in more:  # not won, and a penalty of a tenth for each of up to four turns
            assert -0.4 <= metrics["reward/mean"] < 0.0


SETS = {"nq": "NQ", "triviaqa": "TriviaQA", "popqa": "PopQA", "hotpotqa": "HotpotQA"}
SETS |= {"2wikimultihopqa": "2Wiki", "musique": "MuSiQue", "bamboogle": "Bamboogle"}
PAPER = Path(__file__).parents[3] / "shared" / "data" / "paper" / "tables.json"
MODEL = {
    "engine.type": "transformers",
    "model.dtype": "float32",
    "run.threads": 1,
    "env.max_turns": 2,
}
TABLE_2 = MODEL | {
    "run.updates": 1, "rollout.tasks": 2, "rollout.group_size": 4, "rollout.max_prompt_tokens": 1500,
    "rollout.max_response_tokens": 8, "eval.every": 0, "model.checkpointing": "none",
}  # fmt: skip


def test_a_recipe_of_table_2_trains(paw_here, read_metrics, tiny_llm, says_only, tmp_path):
    """One update on questions from a file. Then the table of the seven sets and their average is
    printed in the paper's order."""
    questions = []
    for number, source in enumerate(SETS):
        question = {"question": f"Where is {number}?", "golden_answers": ["Tuk"]}
        questions.append(question | {"data_source": source})
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", questions)
    corpus = tmp_path / "corpus.jsonl"
    write_jsonl(corpus, [{"id": "0", "contents": '"Tuk"\\nIt is in Tuk.'}])
    model = says_only(
        tiny_llm(tmp_path / "model"), "<search>where is it</search>", "<answer>Tuk</answer>"
    )
    settings = {
        "env.data": tmp_path, "env.retriever": "bm25", "env.corpus": corpus, "model.path": model,
        "run.dir": tmp_path, "run.name": "run",
    }  # fmt: skip
    paw_here("train", "search-r1", TABLE_2, settings)
    run_folder = tmp_path / "run"
    _, metrics = read_metrics(run_folder)
    assert metrics["health/env_failures"] == 0
    assert metrics["optim/skipped"] == 0
    assert metrics["optim/grad_norm"] > 0
    assert metrics["optim/lr"] > 0
    assert 0 < metrics["success/all"] < 1

    evaluated = paw_here("eval", run_folder, "--json", "--out", tmp_path / "out").stdout
    model_card = run_folder / "hf" / "README.md"  # a card after further training
    model_card.write_text(model_card.read_text().replace(": 1 updates", ": 2 updates"))
    errors = paw_here("eval", run_folder, "--out", tmp_path / "out", code=2).stderr
    assert "holds an evaluation with updates = 1, not 2" in errors

    rows_by_kind = json.loads(evaluated)["kinds"]
    assert list(rows_by_kind) == [*SETS.values(), "Avg."]
    average = sum(rows_by_kind[name]["success"] for name in SETS.values()) / len(SETS)
    assert rows_by_kind["Avg."]["success"] == pytest.approx(average)
    if PAPER.exists():
        columns = list(json.loads(PAPER.read_text())["table2"][0])[3:]
        assert [name.lower().rstrip(".") for name in rows_by_kind] == columns
