"""Files that comments and docstrings name are there.

A name is looked for by the end of its path, as in the documents: `cell.py`, `seam/trust.py`. The map of a folder, in
the docstring of its `__init__`, names files of that folder."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.project.test_docs_links import files

ROOT = Path(__file__).parents[3]
FOLDERS = ("src", "tests", "tools", "examples")

_NAMED = re.compile(r"(?<![\w/.*<-])((?:[a-z_]\w*/)*[a-z_]\w*\.(?:py|c|h))\b(?!\()")
_OF_OTHERS = {"cpuid.h", "linux/futex.h", "setup.py"}
_C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def python_comments(text: str) -> Iterator[str]:
    """Comments, and texts in three quotes."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""')):
            yield token.string


def comments(path: Path) -> str:
    text = path.read_text()
    if not _NAMED.search(text):
        return ""
    return "\n".join(python_comments(text) if path.suffix == ".py" else _C_COMMENT.findall(text))


def sources(folder: str) -> list[Path]:
    return sorted(path for ending in ("py", "c", "h") for path in (ROOT / folder).rglob(f"*.{ending}"))


def test_names_are_found() -> None:
    text = '"""As toy.py, or seam/trust.py."""\nx = "no.py"  # see lane.h\n'
    assert _NAMED.findall("\n".join(python_comments(text))) == ["toy.py", "seam/trust.py", "lane.h"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_that_comments_name_are_there(folder: str) -> None:
    known: dict[str, list[Path]] = {}
    for path in files():
        known.setdefault(path.name, []).append(path)
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(folder)
        for name in _NAMED.findall(comments(path))
        if name not in _OF_OTHERS and not any(found.match(name) for found in known.get(name.rpartition("/")[2], []))
    }
    assert sorted(missing) == []


_MAP_LINE = re.compile(r"^((?:[\w/]+\.(?:py|c|h)|\w+/)(?:,\s+(?:[\w/]+\.(?:py|c|h)|\w+/))*)\s{2,}", re.MULTILINE)


@pytest.mark.parametrize("folder", FOLDERS)
def test_maps_of_folders_name_their_files(folder: str) -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / folder).rglob("__init__.py")
        for line in _MAP_LINE.findall(comments(path))
        for name in re.split(r",\s+", line)
        if not (path.parent / name).exists()
    }
    assert sorted(missing) == []
