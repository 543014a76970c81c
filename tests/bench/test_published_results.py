"""What is published is what was measured: figures in the documents are those of the results in bench/results, results
are of a commit, and there is nothing in them that no document cites. `everserve bench publish` brings them in line."""

import importlib
import json
import shlex
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from everserve import provenance
from everserve.cli.app import app
from everserve_bench import cited, figures, report
from everserve_bench.publish import documents, published

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = documents(ROOT)
MEASURED = {ROOT / name for name in ("README.md", "docs/performance.md", "docs/papers.md", "docs/reliability.md")}

# Before results had a hash of their sources. None may be added; a new run takes its name out.
WITHOUT_SOURCES = {
    *("balance", "chaos", "chaos-tp3", "checkpoint", "cost", "degree", "engine", "failover", "grey"),
    *("grey-quiet", "mask", "overhead", "repair-enough", "restore", "scale", "trace"),
    *(f"x86-16-cores/{name}" for name in ("decline", "load", "prefill", "reshard")),
    *(f"gpu/chaos-{name}" for name in ("tp3", "tp4")),
    *(f"gpu/decode-{name}" for name in ("mixtral", "qwen3", "served")),
    *(f"gpu/degree{name}" for name in ("-70b", "-mixtral")),
    *(f"gpu/failover{name}" for name in ("", "-256", "-phases")),
    *(f"gpu/repair{name}" for name in ("", "-enough", "-host", "-join")),
    *(f"gpu/{name}" for name in ("checkpoint", "cost", "decline", "overhead", "overhead-mixtral", "prompts")),
    *(f"gpu/{name}" for name in ("reshard", "restore", "revive", "revive-switch", "start")),
}


@cache
def checked() -> tuple[dict[Path, figures.Checked], figures.Results]:
    results = figures.Results(RESULTS)
    return {path: figures.check(path.read_text(), results) for path in DOCUMENTS}, results


@cache
def environment(name: str) -> dict:
    return report.read_json(RESULTS / f"{name}.json")["environment"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_figures_are_those_of_the_results(document):
    found = checked()[0][document]
    assert [f"{document.name}:{each.line}: {each.what}" for each in found.wrong] == []
    if document in MEASURED:
        assert [f"{document.name}:{each.line}: {each.what}" for each in found.unsourced] == [], "no marker"


def test_results_have_what_is_cited_and_nothing_else():
    documents, results = checked()
    assert set(published(RESULTS)) == set(results.read) | results.runs, "no document cites it, or it is missing"
    assert set(results.read) <= results.runs, "no document says how it was measured (<!-- run: ... -->)"
    for name in published(RESULTS):
        result = results.load(name)
        assert result == cited.shorten(result, results.read[name]), f"{name}: everserve bench publish"
    plots = {path.relative_to(ROOT).as_posix() for path in RESULTS.rglob("*.png") if "local" not in path.parts}
    assert {plot for plot in plots if not any(plot in found.text for found in documents.values())} == set()


def test_the_readme_cites_no_result_with_uncommitted_changes():
    results = figures.Results(RESULTS)
    figures.check((ROOT / "README.md").read_text(), results)
    assert [name for name in results.read if environment(name)["dirty"]] == []


@pytest.mark.parametrize("name", published(RESULTS))
def test_results_are_of_a_commit(name):
    it = environment(name)
    assert it["commit"] and it["machine"] and it["cpu"] and it["num_cores"] and it["date"]
    if name in WITHOUT_SOURCES:
        assert "sources" not in it, "take it out of the list"
        return
    assert it["sources"] and it["dirty"] is False
    if provenance.git("cat-file", "-t", it["commit"]):  # a shallow clone lacks it
        assert provenance.sources_of(it["commit"]) == it["sources"]


def test_no_result_is_listed_that_is_not_there():
    assert set(published(RESULTS)) >= WITHOUT_SOURCES


def test_commands_repeat_them(monkeypatch, tmp_path):
    """Each is understood, with all its flags; it is not run."""
    monkeypatch.chdir(tmp_path)  # some look whether they can write there
    for module in ("bench", "chaos"):
        importlib.import_module(f"everserve.cli.{module}")
    group = get_command(app)
    for said in sorted({environment(name)["command"] for name in published(RESULTS)}):
        command, (program, *arguments) = group, shlex.split(said)
        while hasattr(command, "commands"):
            command = command.commands[arguments.pop(0)]
        assert program == "everserve" and "--out" not in said and "--json" not in said
        command.make_context(command.name, arguments)  # raises UsageError


def test_results_are_json_that_git_can_compare():
    for name in published(RESULTS):
        text = (RESULTS / f"{name}.json").read_text()
        assert text == report.as_text(json.loads(text)), name
