"""Sources and documents name the process, the worker or the client that they mean."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENDINGS = {".py", ".c", ".h", ".js", ".css", ".md", ".yaml", ".json"}
STORY = ROOT / "src/everserve/chaos/requests.py"  # a text that prompts are taken from

_VAGUE = re.compile(r"\b(nobody|somebody|anybody|everybody|whoever|whomever)\b", re.IGNORECASE)


@pytest.mark.parametrize("folder", ["src", "docs", "deploy", "examples", "tools"])
def test_words_that_name_no_one_are_not_used(folder: str) -> None:
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS and path != STORY]
    found = {str(path.relative_to(ROOT)): _VAGUE.findall(path.read_text()) for path in paths}
    assert paths and {name: words for name, words in found.items() if words} == {}


def test_they_are_found() -> None:
    assert _VAGUE.findall("Nobody waits for whoever comes.") == ["Nobody", "whoever"]


_NO_SUBJECT = re.compile(r'"""(Of|That|As|Also|And|Or|But|Whose|Behind|Beside) [^"]*')


def test_docstrings_begin_with_what_they_are_about() -> None:
    paths = [path for path in (ROOT / "src").rglob("*.py") if path != STORY]
    found = {str(path.relative_to(ROOT)): [m[0][:60] for m in _NO_SUBJECT.finditer(path.read_text())] for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}
