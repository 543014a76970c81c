"""`everserve bench publish`: results become what documents cite.

A benchmark writes everything that it measured to bench/results/local. Published is what documents cite of it, and
where, with what and by which command it was measured; the figures in the documents then become those of the results.
tests/bench/test_published_results.py checks the same.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from everserve import provenance
from everserve.errors import ConfigError
from everserve.provenance import LOCAL
from everserve_bench import cited, figures, report

RESULTS = Path("bench/results")
DOCUMENTS = ("README.md", "docs/*.md")


def publish(files: list[Path], folder: str) -> None:
    """Publish these results, and shorten all that are there. Without files, figures and results are brought in line."""
    if not RESULTS.is_dir():
        raise ConfigError(f"there is no {RESULTS} here: run this in a checkout")
    results = figures.Results(RESULTS)
    for path in files:
        results.replace(_name(path, folder), _checked(path))
    broken = [document for document in documents(Path()) if _is_broken(document, results)]
    if broken:
        raise ConfigError("these markers do not fit the results; nothing was shortened")  # they may need more of them
    cited_names = results.read.keys() | results.runs
    for name in sorted(cited_names):
        _write(name, results)
    for path in files:
        _copy_plot(path, RESULTS / f"{_name(path, folder)}.png")
    known = {_name(path, folder) for path in files} | set(published(RESULTS))
    for name in sorted(known - cited_names):
        print(f"{RESULTS / name}.json: no document cites anything of it; write the markers first, or delete it")


def documents(root: Path) -> list[Path]:
    return sorted(path for pattern in DOCUMENTS for path in root.glob(pattern))


def published(folder: Path) -> list[str]:
    """Names of the results that git keeps."""
    local = folder / LOCAL.name
    paths = (path for path in folder.rglob("*.json") if local not in path.parents)
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in paths)


def _name(path: Path, folder: str) -> str:
    """bench/results/local/gpu/cost.json is gpu/cost; elsewhere the folder is said."""
    beside = path.resolve().parent
    local = LOCAL.resolve()
    inside = beside.relative_to(local) if beside.is_relative_to(local) else Path()
    return (inside / folder / path.stem).as_posix()


def _checked(path: Path) -> dict[str, Any]:
    """A result that is of a commit, which it names."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    result = report.read_json(path)
    environment = result.get("environment")
    if not environment:
        raise ConfigError(f"{path} has no environment: the run was cut short")
    digest = environment.get("sources", "")
    named = environment["commit"]
    commit = named if named and provenance.sources_of(named) == digest else provenance.find_commit(digest)
    if not digest or not commit:
        raise ConfigError(f"{path} was measured from sources that no commit has")
    return result | {"environment": environment | {"commit": commit, "dirty": False}}


def _copy_plot(path: Path, target: Path) -> None:
    """If a document shows it."""
    plot = path.with_suffix(".png")
    if plot.is_file() and any(str(target) in document.read_text() for document in documents(Path())):
        shutil.copyfile(plot, target)


def _is_broken(document: Path, results: figures.Results) -> bool:
    """After its figures were brought up to date."""
    before = document.read_text()
    checked = figures.check(before, results)
    for finding in checked.wrong:
        print(f"{document}:{finding.line}: {finding.what}")
    if checked.text != before:
        document.write_text(checked.text)
    return any(finding.is_broken for finding in checked.wrong)


def _write(name: str, results: figures.Results) -> None:
    whole = results.load(name)
    result = cited.shorten(whole, results.read.get(name, set()))
    text = report.as_text(result)
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
        print(f"written to {path}: {len(json.dumps(result)):,} of {len(json.dumps(whole)):,} bytes")
