"""README on a package page, where no relative link leads anywhere, and the project's addresses, of
which pyproject.toml is the source."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOME = URLS["Homepage"]
RAW = HOME.replace("//github.com/", "//raw.githubusercontent.com/")

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<(?:img|a)\b[^>]*?(?:src|href)=\"([^\"]+)\"")
DEFINITION = re.compile(r"^\[([^\]]+)\]: (\S+)$", re.MULTILINE)
OURS = re.compile(
    r"https://(?:(?:raw\.)?github(?:usercontent)?\.com/[\w.-]+/paw|[\w.-]+\.github\.io/paw)\b[^\s)\"'>]*"
)
"""An address of a project of this name at GitHub, whoever owns it."""


def without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`", "", text)


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    words = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
    return words.replace(" ", "-")


def links_of(text: str) -> list[str]:
    text = without_code(text)
    inline = [first or second for first, second in LINK.findall(text)]
    return inline + [target for _, target in DEFINITION.findall(text)]


def missing_in_tree(target: str) -> str | None:
    """Why a link of ours does not lead to a file of this tree, or None. Others are not followed."""
    for prefix in (f"{HOME}/blob/main/", f"{RAW}/main/"):
        if target.startswith(prefix):
            path, _, anchor = target.removeprefix(prefix).partition("#")
            if not (ROOT / path).is_file():
                return "no such file"
            headings = (
                re.findall(r"^#+ (.+)$", (ROOT / path).read_text("utf-8"), re.M) if anchor else []
            )
            return None if not anchor or anchor in map(slug, headings) else "no such heading"
    if target.startswith("https://"):
        return None
    return f"a package page needs {HOME}/blob/main/ before it, an image {RAW}/main/"


def test_each_link_of_the_readme_is_absolute_and_leads_to_a_file_of_the_tree():
    faults = {target: missing_in_tree(target) for target in links_of(README)}
    assert {target: fault for target, fault in faults.items() if fault} == {}
    images = [target for target in faults if target.endswith(".png")]
    assert images
    assert all(image.startswith(f"{RAW}/main/") for image in images)
    assert len(faults) > 25

    assert missing_in_tree("docs/kernels.md")
    assert missing_in_tree(f"{HOME}/blob/main/docs/missing.md") == "no such file"
    assert missing_in_tree(f"{HOME}/blob/main/docs/kernels.md#missing") == "no such heading"


def test_each_short_link_of_the_readme_has_its_definition():
    """Markdown shows `[name]` as plain text if nothing defines it."""
    defined = dict(DEFINITION.findall(README))
    text = without_code(DEFINITION.sub("", README))
    used = set(re.findall(r"\]\[([^\]]+)\]", text))
    used |= set(re.findall(r"\[([\w-]+/[\w./-]+\.md|[A-Z]{4,})\](?![\[(])", text))
    assert used == set(defined)


def test_the_addresses_of_the_project_are_those_of_pyproject():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.*")]
    others = [
        ROOT / "mkdocs.yml",
        ROOT / "CITATION.cff",
        ROOT / "pyproject.toml",
        *ROOT.glob("paw/**/*.py"),
    ]
    allowed = (HOME, RAW, URLS["Documentation"].rstrip("/"))
    for path in [*pages, *others]:
        for address in OURS.findall(path.read_text(encoding="utf-8")):
            assert address.startswith(allowed), f"{path.relative_to(ROOT)}: {address}"

    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"site_url: {URLS['Documentation']}\n" in site
    assert f"repo_url: {HOME}\n" in site
    assert f"repository-code: {HOME}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
