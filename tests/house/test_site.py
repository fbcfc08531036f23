"""The site of docs/: what each page begins with, that it loads nothing from elsewhere, and that its
landing page shows lines of the source."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

mkdocs = pytest.importorskip("mkdocs.config")
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINE_LENGTH = 100
"""Characters that docs/site/paw.css leaves room for at 1,280 px; `python docs/site/layout.py` looks
at the pages in a browser."""


@pytest.fixture(scope="module")
def config() -> Any:
    return mkdocs.load_config(str(ROOT / "mkdocs.yml"))


@pytest.fixture(scope="module")
def site(config, tmp_path_factory) -> Path:
    """The built site."""
    from mkdocs.commands.build import build

    config.site_dir = str(tmp_path_factory.mktemp("site"))
    build(config)
    return Path(config.site_dir)


def pages_of(nav: Any) -> Iterator[str]:
    """The files that a part of the navigation names, in its order."""
    for entry in nav if isinstance(nav, list) else nav.values():
        if isinstance(entry, str):
            yield entry
        else:
            yield from pages_of(entry)


def test_the_navigation_has_each_page_once(config):
    assert sorted(pages_of(config.nav)) == sorted(page.name for page in DOCS.glob("*.md"))


def test_a_page_begins_with_what_its_reader_can_do(config):
    without = []
    for page in pages_of(config.nav):
        text = (DOCS / page).read_text(encoding="utf-8")
        _, _, body = text.partition("\n# " if not text.startswith("# ") else "# ")
        _, _, body = body.partition("\n")
        body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
        first_paragraph = " ".join(body.strip().partition("\n\n")[0].split())
        if "you can " not in first_paragraph:
            without.append(page)
    assert not without, "the first paragraph does not say what you can do after reading the page"


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_no_line_of_code_is_cut(page):
    """Text, which is output, may be longer: it is wrapped."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for language, block in blocks if language != "text" for line in block.split("\n")]
    assert not [line for line in lines if len(line) > LINE_LENGTH and "{source" not in line]


@pytest.mark.slow
def test_the_landing_page_shows_lines_of_the_source(site):
    spec = importlib.util.spec_from_file_location("source", DOCS / "site" / "source.py")
    assert spec and spec.loader
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    page = source.with_source((DOCS / "index.md").read_text(encoding="utf-8"))
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)

    code = ""
    lines = [line for line in block.split("\n") if line]
    for line in lines:
        if file := re.match(r"# (paw/\w+\.py): \w+\(\)$", line):
            code = (ROOT / file[1]).read_text(encoding="utf-8")
        else:
            assert re.search(rf"^ *{re.escape(line)}$", code, re.M), line
    assert 20 <= len(lines) <= 30

    with pytest.raises(Exception, match="no line of update"):
        source.with_source('{source paw/trainer.py update "nothing" "at all"}')
    landing = (site / "index.html").read_text(encoding="utf-8")
    for name in ("accumulate_gradients", "update.svg", "learning_curve.png", "make train"):
        assert name in landing


def test_the_site_loads_nothing_from_elsewhere(site):
    loads = re.compile(
        r'<(?:script|link|img|source|iframe)\b[^>]*\b(?:src|href|srcset)="(?:https?:)?//'
    )
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<[^>]+>", page.read_text(encoding="utf-8")):
            if loads.match(tag):
                assert re.search(r'rel="(canonical|prev|next)"', tag), f"{page.name}: {tag}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?https?:", style.read_text(encoding="utf-8"))
    assert (site / "search" / "search_index.js").exists()  # for pages that are opened as files
