"""The glossary is short, and each of its words is one of the code."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ("py", "c", "h")


def glossary() -> list[str]:
    """The words of the first column; a row may have several."""
    section = (ROOT / "docs/architecture.md").read_text().split("\n## Glossary\n")[1].split("\n#")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")][2:]
    return [word.strip() for row in rows for word in row.split(",")]


@cache
def words_of_the_code() -> frozenset[str]:
    """Words of names and comments: `WorkerId` has two, `life_word` too."""
    text = "\n".join(path.read_text() for ending in SOURCES for path in (ROOT / "src").rglob(f"*.{ending}"))
    return frozenset(word.lower() for word in re.findall(r"[A-Z]?[a-z]+", text))


def test_it_is_short() -> None:
    words = glossary()
    assert 30 < len(words) <= 60 and len(set(words)) == len(words)


@pytest.mark.parametrize("word", glossary())
def test_a_word_is_one_of_the_code(word: str) -> None:
    assert word in words_of_the_code()
