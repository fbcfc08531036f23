"""Every file and folder of the tree that a page names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
FOLDERS = sorted(folder.name for folder in ROOT.glob("paw/*/") if (folder / "__init__.py").exists())
NAMED = re.compile(
    rf"`((?:paw|kernels|csrc|bench|tests|docs|examples|{'|'.join(FOLDERS)})/[\w./-]*(?:\.py|/))`"
)
"""A path in a code span; those of rooms count from paw/."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_paths_of_a_page_exist(page):
    if page.name == "CHANGELOG.md":
        pytest.skip("it names files as they were")
    for path in NAMED.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists() or (ROOT / "paw" / path).exists(), path
