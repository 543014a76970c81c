"""Every relative link in our documents leads to a file that is there, every anchor to a heading, and every file that is
named is there."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for top in ("docs", "src", "tests") for path in ROOT.glob(f"{top}/**/*.md"))]
)

_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def links(path: Path) -> list[str]:
    """Those that stay in this repository."""
    text = _CODE.sub("", _FENCE.sub("", path.read_text()))
    return [link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link)]


@cache
def anchors(path: Path) -> set[str]:
    """As GitHub makes them: lower case, no punctuation, dashes for spaces."""
    headings = [heading.strip().lower() for heading in _HEADING.findall(_FENCE.sub("", path.read_text()))]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{link}: there is no {name}"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_links_are_found() -> None:
    assert "architecture.md#host-work" in links(ROOT / "docs" / "performance.md")


_FILE = re.compile(r"`([\w.*-][\w./*-]*\.(?:py|c|h|js|yaml|yml|json))\b[^`]*`")


@cache
def files() -> tuple[Path, ...]:
    """Ours, and not those of an environment beside them."""
    folders = ("src", "tests", "docs", "bench", "deploy", "examples", "tools", ".ci")
    return tuple(path for top in folders for path in (ROOT / top).rglob("*.*"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_are_there(document: Path) -> None:
    """By the end of their paths: `seam/trust.py`, or `trust.py` behind a name in the same folder."""
    named = set(_FILE.findall(_FENCE.sub("", document.read_text())))
    assert sorted(name for name in named if not any(path.match(name) for path in files())) == []
