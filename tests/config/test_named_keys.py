"""Every key that a page names exists: `section.key` and `--section.key`."""

import re
from pathlib import Path

import pytest

from paw.config.sections import Config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAME = re.compile(
    rf"(?<![\w./])((?:{'|'.join(Config.model_fields)})\.[a-z_]+(?:\.[a-z_]+)*)(?![\w./(])"
)
OTHER = {
    "agent.words", "reward.bonus", "reward.per_turn", "policy.width", "advantage.floor",  # in the pages' examples
    "advantage.scale", "engine.at_once",
    "env.done", "env.observation", "env.task", "env.instruction",  # members of an EnvHandle
    "wm.balance", "wm.horizon", "optim.clip",  # a removed key, which experiments.md names as such
    "advantage.scal",  # a typo, which shows the error message
    "env.simulator", "model.chat_template_kwargs.enable_thinking",
    "run.json", "run.py", "model.safetensors", "rewards.py",
    "envs.household.share", "rewards.brief.weight",  # keys of entries, addressed by label
    "run.step",  # a member of a Run, in the loop on the landing page
    "envs.agent", "envs.rewards", "envs.household.agent.type", "envs.tools.rewards.judge.weight",
}  # fmt: skip


@pytest.fixture(scope="module")
def keys():
    # test_cli.py checks this page against the configuration.
    page = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([^`]+)`", page, re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_keys_that_a_page_names_exist(page, keys):
    text = page.read_text(encoding="utf-8")
    if page.name == "coming-from.md":  # its first column lists options of other trainers
        text = re.sub(r"^\|[^|]*\|", "", text, flags=re.M)
        assert len(set(NAME.findall(text))) > 60
    code_on_page = " ".join(re.findall(r"^```\w*\n.*?^```|`[^`\n]+`", text, re.S | re.M))
    assert set(NAME.findall(code_on_page)) - keys <= OTHER
