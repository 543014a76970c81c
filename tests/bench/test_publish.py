"""From which sources a result was measured, and what is published of it."""

import json
import shutil
import subprocess

import pytest

from everserve import provenance
from everserve.errors import ConfigError
from everserve_bench import publish


def git(where, *arguments):
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(where), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a package, a document and results, of one commit; processes begin in it."""
    top = tmp_path / "checkout"
    files = {
        "src/everserve/__init__.py": "",
        "src/everserve/ops/matrix.c": "int one;\n",
        "src/everserve_bench/load.py": "",
        ".gitignore": "__pycache__/\nbench/results/local/\n",
        "README.md": "It takes 20 ms<!-- = gpu/run: gap.median -->.\n\n<!-- run: gpu/run -->\n<!-- end -->\n",
        "bench/results/gpu/run.json": json.dumps(result(12.0, commit="0000000", sources="")),
    }
    for name, text in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-qm", "All of it")
    monkeypatch.chdir(top)
    begin_in(top, monkeypatch)
    yield top
    forget()


def begin_in(top, monkeypatch):
    monkeypatch.setattr(provenance, "PACKAGE", top / "src" / "everserve")
    forget()


def forget():
    """What a process keeps for as long as it lives."""
    provenance.state.cache_clear()
    provenance.sources_of.cache_clear()


def result(gap_ms, commit, sources):
    environment = {"commit": commit, "dirty": False, "sources": sources, "date": "2026-11-19", "machine": "x86_64"}
    environment |= {"cpu": "a CPU", "num_cores": 16, "gpu": "a GPU", "command": "everserve bench failover"}
    return {"environment": environment, "settings": {"rounds": 1}, "gap": {"median": gap_ms}, "rounds": [gap_ms] * 500}


def measured(path, gap_ms, **environment):
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"commit": provenance.state()["commit"], "sources": provenance.state()["sources"]}
    path.write_text(json.dumps(result(gap_ms, **(state | environment))))
    return path


def test_sources_are_those_of_the_commit(checkout):
    state = provenance.state()
    assert state["commit"] and not state["dirty"]
    assert state["sources"] == provenance.sources_of(state["commit"]) == provenance.sources_of("HEAD") != ""
    (checkout / "src/everserve/__pycache__").mkdir()
    (checkout / "src/everserve/__pycache__/ops.pyc").write_text("x")
    (checkout / "README.md").write_text("Other words.\n")
    forget()
    assert provenance.state() == state, "neither of them is a source"


@pytest.mark.parametrize("name", ["everserve/ops/matrix.c", "everserve/ops/new.c", "everserve_bench/load.py"])
def test_a_change_is_noticed(checkout, name):
    digest = provenance.state()["sources"]
    (checkout / "src" / name).write_text("int two;\n")
    assert provenance.state()["sources"] == digest, "a run is of what it began with"
    forget()
    assert provenance.state()["dirty"]
    assert provenance.find_commit(provenance.state()["sources"]) == ""
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "A change")
    forget()
    assert provenance.find_commit(provenance.state()["sources"]) == provenance.state()["commit"]
    assert provenance.find_commit(digest) not in ("", provenance.state()["commit"]), "the one before"


def test_a_copy_without_git_is_matched_with_its_commit(checkout, tmp_path, monkeypatch):
    commit = provenance.state()["commit"]
    copy = shutil.copytree(checkout, tmp_path / "copy", ignore=shutil.ignore_patterns(".git"))
    begin_in(copy, monkeypatch)
    path = measured(tmp_path / "run.json", 30.1)
    assert not provenance.state()["commit"] and not provenance.state()["dirty"]
    begin_in(checkout, monkeypatch)
    publish.publish([path], "gpu")
    assert json.loads((checkout / "bench/results/gpu/run.json").read_text())["environment"]["commit"] == commit


def test_what_documents_cite_is_published(checkout, capsys):
    measured(checkout / "bench/results/local/gpu/run.json", 30.1)
    publish.publish([checkout / "bench/results/local/gpu/run.json"], "")
    published = json.loads((checkout / "bench/results/gpu/run.json").read_text())
    assert published.keys() == {"environment", "settings", "gap"}
    text = (checkout / "README.md").read_text()
    assert text.startswith("It takes 30 ms<!-- = gpu/run: gap.median -->.\n")
    assert f"commit {published['environment']['commit']}; a GPU, 16 x86_64 cores.*" in text
    assert "README.md:1: 20 is 30" in capsys.readouterr().out
    publish.publish([], "")
    assert capsys.readouterr().out == "", "all is in line"


def test_what_is_not_published(checkout, capsys):
    local = checkout / "bench/results/local"
    before = (checkout / "bench/results/gpu/run.json").read_text()
    with pytest.raises(ConfigError, match="sources that no commit has"):
        publish.publish([measured(local / "gpu/run.json", 30.1, sources="0123456789abcdef")], "")
    with pytest.raises(ConfigError, match="sources that no commit has"):
        publish.publish([measured(local / "gpu/run.json", 30.1, sources="")], "")
    (local / "gpu/run.json").write_text("{}")
    with pytest.raises(ConfigError, match="cut short"):
        publish.publish([local / "gpu/run.json"], "")
    with pytest.raises(ConfigError, match="no such file"):
        publish.publish([local / "gone.json"], "")
    (checkout / "docs").mkdir()
    (checkout / "docs" / "performance.md").write_text("5 ms<!-- = gpu/run: gap.worst -->\n")
    with pytest.raises(ConfigError, match="do not fit"):
        publish.publish([measured(local / "gpu/run.json", 30.1)], "")
    assert (checkout / "bench/results/gpu/run.json").read_text() == before
    (checkout / "docs" / "performance.md").unlink()
    publish.publish([measured(local / "other.json", 30.1)], "")
    assert "other.json: no document cites anything of it" in capsys.readouterr().out
    assert not (checkout / "bench/results/other.json").exists()


def test_results_among_tracked_files_are_of_a_commit(checkout, tmp_path):
    results = checkout / "bench/results"
    (results / "local").mkdir()
    provenance.check_out(results, "--out")
    (checkout / "src/everserve/ops/matrix.c").write_text("int two;\n")
    forget()
    with pytest.raises(ConfigError, match=r"--out .*results: results there are of a commit"):
        provenance.check_out(results, "--out")
    provenance.check_out(results / "local", "--out")
    provenance.check_out(tmp_path, "--out")
