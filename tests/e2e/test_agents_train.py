"""Every agent trains, that of docs/agents.md with the reward there too: two updates of GRPO + PaW."""

import math
import re
from pathlib import Path

import pytest
import torch

from paw.agents.search_r1 import PROMPT, STOP
from paw.config import Config
from paw.envs import make_factory
from paw.envs.base import train_tasks
from paw.model.policy import load_policy, load_tokenizer, pick_device
from paw.rollout.chat import Chat
from paw.tools.player import open_player

DOCS = Path(__file__).parents[2] / "docs"
SMALL = {
    "run.updates": 2, "run.threads": 1, "model.dtype": "float32", "rollout.engine": "transformers", "rollout.tasks": 2,
    "rollout.group_size": 3, "rollout.max_response_tokens": 24, "rollout.max_prompt_tokens": 3000, "eval.games": 2,
    "env.max_turns": 3, "policy.kl_coef": 0,
}  # fmt: skip
SEARCH = {"env.style": "paper", "env.entities": 20, "env.topk": 1}
OWN = {"env.name": f"{DOCS}/example_environment.py:Guess", "agent.words": 5, "reward.type": "mine.py:brief"}
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def speaker(tiny_llm, tmp_path_factory):
    """A byte-level model that has learnt to search."""
    folder = tiny_llm(tmp_path_factory.mktemp("speaker"))
    chat, lm = Chat(load_tokenizer(folder)), load_policy(folder, dtype="float32", device=pick_device("cpu")).lm
    env = {"name": "search", "eval_split": "test", "entities": 20}
    factory = make_factory(Config.model_validate({"model": {"path": "-"}, "env": env}))
    answer = torch.tensor(chat.response_ids("<search>a</search>"))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    for task in train_tasks(factory, 0, 150, seed=1):
        head = torch.tensor(chat.prompt_ids(PROMPT.format(question=task.payload.text)))
        logits = lm(input_ids=torch.cat([head, answer])[None]).logits[0, len(head) - 1 : -1]
        torch.nn.functional.cross_entropy(logits, answer).backward()
        optimizer.step()
        optimizer.zero_grad()
    lm.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("agent", "recipe", "more"),
    [
        ("search-r1", "search-quickstart", SEARCH),
        ("reflexion", "quickstart", {"env.style": "paper", "env.max_turns": 1, "agent.trials": 2}),
        ("mine.py:plan_first", "quickstart", OWN),
    ],
)
def test_an_agent_trains(paw_here, read_metrics, speaker, tmp_path, agent, recipe, more):
    (tmp_path / "mine.py").write_text("\n\n".join(BLOCK.findall((DOCS / "agents.md").read_text())))
    words = {**SMALL, "model.path": speaker, "agent.type": agent, "run.dir": tmp_path, "run.name": "run", **more}
    paw_here("train", recipe, words, cwd=tmp_path)
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert line["health/env_failures"] == 0 and line["optim/skipped"] == 0
        assert math.isfinite(line["policy/loss"])
        if "brief" in more.get("reward.type", ""):
            assert -0.4 <= line["reward/mean"] < 0.0  # no win, a tenth for each of up to four turns


def test_search_r1_is_one_growing_answer(speaker):
    """Of a model of ours: the ids of each turn begin with all of the turns before."""
    env = {"name": "search", "entities": 20, "eval_split": "test", "max_turns": 4, "invalid_penalty": 0.01}
    sections = {"agent": {"type": "search-r1"}, "env": env}
    rollout = {"max_prompt_tokens": 3000, "max_response_tokens": 24, "temperature": 0.3}
    config = Config.model_validate(
        {"model": {"path": str(speaker), "dtype": "float32"}, "rollout": rollout, **sections}
    )
    with open_player(config, str(speaker)) as rollouts:
        groups, stats = rollouts.training(0, 4)
        chat = rollouts.chat
    assert stats.failures == []
    episodes = [episode for group in groups for episode in group.trajectories]
    searched = 0
    for episode in episodes:
        assert episode.turns[0].prompt_ids == chat.prompt_ids(episode.turns[0].prompt)
        assert episode.turns[0].prompt.startswith(PROMPT.partition("{")[0])
        for before, turn in zip(episode.turns, episode.turns[1:], strict=False):
            ids = before.prompt_ids + before.response_ids
            assert turn.prompt_ids[: len(ids)] == ids
            assert turn.prompt.startswith(before.prompt + before.response)
            if before.outcome.action.startswith("search["):
                searched += before.response.endswith(STOP[0])
                assert before.outcome.observation in turn.prompt
    assert searched > 4, [turn.response for turn in episodes[0].turns]
