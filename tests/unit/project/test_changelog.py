"""The changelog has one line for each change, and each section once: merges have doubled it before."""

from pathlib import Path

LINES = (Path(__file__).parents[3] / "CHANGELOG.md").read_text().splitlines()


def test_sections_come_once() -> None:
    release: list[str] = []
    for line in LINES:
        release = [] if line.startswith("## ") else release
        if line.startswith("### "):
            assert line not in release
            release.append(line)


def test_a_change_is_a_line() -> None:
    changes = [line for line in LINES if line.startswith("- ")]
    assert changes and len(set(changes)) == len(changes)
    assert [line for line in changes if len(line) > 320] == []
    between = [line for line in LINES if line and not line.startswith(("#", "- "))]
    assert len(between) <= 1, "what is told about a change stands in its line"
