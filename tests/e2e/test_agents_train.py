"""Every agent trains, that of docs/agents.md with the reward there too: GRPO + PaW."""

import math
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SMALL = {
    "run.threads": 1, "model.dtype": "float32", "engine.type": "transformers", "rollout.tasks": 2,
    "rollout.group_size": 3, "rollout.max_response_tokens": 24, "rollout.max_prompt_tokens": 3000, "eval.games": 2,
    "env.max_turns": 3, "policy.kl_coef": 0,
}  # fmt: skip
SEARCH = {"run.updates": 2, "env.style": "paper", "env.entities": 20, "env.topk": 1}
REFLEXION = {"run.updates": 1, "env.style": "paper", "env.max_turns": 1, "agent.trials": 2}
OWN = {"run.updates": 1, "env.name": f"{DOCS}/example_environment.py:Guess", "agent.words": 5}
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
    (tmp_path / "mine.py").write_text("\n\n".join(BLOCK.findall((DOCS / "agents.md").read_text())))
    where = {"model.path": tiny_llm(tmp_path / "model"), "run.dir": tmp_path, "run.name": "run"}
    paw_here("train", recipe, SMALL, where, {"agent.type": agent, **more}, cwd=tmp_path)
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(more["run.updates"] + 1))
    for line in lines[1:]:
        assert line["health/env_failures"] == 0 and line["optim/skipped"] == 0 and math.isfinite(line["policy/loss"])
        if "reward.type" in more:
            assert -0.4 <= line["reward/mean"] < 0.0  # no win, a tenth for each of up to four turns
