"""Figures in documents: markers say where they come from, and what has none is found."""

import json

import pytest

from everserve_bench import cited
from everserve_bench.figures import Results, check

RUN = {
    "environment": {
        "commit": "abc1234",
        "dirty": False,
        "date": "2026-11-18",
        "machine": "x86_64",
        "cpu": "Fast CPU @ 2 GHz",
        "num_cores": 2,
        "gpu": None,
        "command": "everserve bench failover --rounds 5 --serve '--detect-ms 100 --spares 1'",
    },
    "settings": {"rounds": 5},
    "faults": {
        "expert": {
            "gap_ms": {"median": 21.14, "min": 16.0, "max": 37.32},
            "detected_s": {"median": 0.00594, "max": 0.0183},
            "phases_ms": {"notice": {"median": 1.2, "max": 3.0}, "send again": {"median": 2.3, "max": 7.6}},
            "share": {"median": 0.986, "low": 0.979, "high": 1.008},
        },
        "restart": {"gap_ms": {"median": 5456.4, "min": 5434, "max": 5478.2}},
    },
    "points": [{"tokens": 64, "way": "log", "ms": 2.0}, {"tokens": 64, "way": "again", "ms": 17.1}],
    "found": [{"case": "slow", "after_s": 7.22, "gaps": [6, 11, 31]}, {"case": "idle", "after_s": None, "gaps": []}],
    "is_exact": True,
    "num_different": 3,
}


@pytest.fixture
def results(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    return Results(tmp_path)


def wrong(text, results):
    return [finding.what for finding in check(text, results).wrong]


def unsourced(text, results):
    return [finding.what for finding in check(text, results).unsourced]


@pytest.mark.parametrize(
    "text",
    [
        "A gap of 21 ms<!-- = run: faults.expert.gap_ms.median -->.\n",
        "A gap of 21.1 ms (37.3)<!-- = run faults.expert: worst(gap_ms) -->.\n",
        "Noticed after 5.9 ms (18.3)<!-- = run faults.expert: ms(detected_s) -->.\n",
        "It costs 1.4 % (-0.8 to 2.1 %)<!-- =\nrun faults.expert: less(share) -->.\n",
        "In 1.2 and 2.3 ms<!-- = run faults.expert: medians(phases_ms) -->.\n",
        "A restart takes 5,456 ms<!-- = run faults: restart.gap_ms.median -->, 258 times as long<!-- =\n"
        "run faults: restart.gap_ms.median / expert.gap_ms.median -->.\n",
        'From the log 2.0 ms, again 17<!-- = run points: it(way="log").ms, it(way="again").ms -->.\n',
        'Found after 7.2 s, with gaps of 6, 11 and 31 ms<!-- = run found(case="slow"): after_s, gaps -->.\n',
        "Of 8 streams 21.1 ms<!-- = run: _, faults.expert.gap_ms.median; run: is_exact -->.\n",
    ],
)
def test_right_figures(text, results):
    assert check(text, results).text == text
    assert (wrong(text, results), unsourced(text, results)) == ([], [])


@pytest.mark.parametrize(
    ("text", "right", "what"),
    [
        ("21 ms, at most 38<!-- = run faults.expert: worst(gap_ms) -->", "21 ms, at most 37<", "38 is 37"),
        ("once 5456 ms<!-- = run: faults.restart.gap_ms.median -->", "once 5,456 ms<", "5456 is 5,456"),
    ],
)
def test_a_wrong_figure_is_told_and_corrected(text, right, what, results):
    assert what in wrong(text, results)[0]
    corrected = check(text, results).text
    assert corrected.startswith(right)
    assert wrong(corrected, results) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("21 ms<!-- = run: faults.expert.gap.median -->", "KeyError: 'gap'"),
        ("21 ms<!-- = other: gap_ms -->", "FileNotFoundError"),
        ("21 ms<!-- = run: settings.rounds, num_different -->", "2 figures for 1 numbers"),
        ("21 ms<!-- = run: environment.date -->", "no number"),
        ("None is different<!-- = run: num_different == 0 -->", "not true"),
        ("2 ms<!-- = run: points(tokens=64).ms -->", "2 elements have"),
        ("21 ms<!-- = run: __import__('os') -->", "NameError"),
        ("21 ms<!-- = run -->", "SyntaxError"),
    ],
)
def test_markers_that_do_not_fit(text, what, results):
    found = check(text, results)
    assert what in found.wrong[0].what and found.wrong[0].is_broken
    assert found.text == text


def test_what_looks_measured_needs_a_source(results):
    text = (
        "It takes 21 ms, 3.5x as long, 12 % of 4 GB/s. Ratio 1.75. 719,494 tokens compared.\n\n"
        "Python 3.11, Figs. 3.2, p99, H200, 2+2 workers, `5 ms`, [a](b/6 s.md), 8 streams, 512 tokens, 64-bit.\n\n"
        "    everserve bench failover --detect-ms 100 ms\n"
    )
    assert len(unsourced(text, results)) == 6
    for marker in ("<!-- no result: others' -->", "<!-- no result:\nothers' -->"):
        assert unsourced(text.replace(".\n\nPy", f"{marker}.\n\nPy", 1), results) == []


def test_tables(results):
    text = (
        "<!-- columns without results: theirs -->\n"
        "<!-- each row: worst(gap_ms) -->\n"
        "| killed | gap, ms | streams | theirs |\n"
        "|---|--:|--:|--:|\n"
        "| an expert worker, after 3 s | 21.1 (37.3) <!-- = run faults.expert --> | 8 | 12 s |\n"
        "| everything | 5,456 (5,478) <!-- = run faults.restart --> | 8 | |\n"
        "| a device | 99 | 8 | |\n"
        "| another | 1.5 <!-- = run faults.restart: gap_ms.median --> | 8 | |\n\n"
        "theirs: 12 s\n"
    )
    assert [finding.line for finding in check(text, results).unsourced] == [7, 10]
    assert wrong(text, results) == ["1.5 is 5,456.4: <!-- = run faults.restart: gap_ms.median -->"]


def test_what_was_not_measured_has_no_figure(results):
    row = '| {} | 6 | <!-- = run found(case="{}") --> |\n'
    table = "<!-- each row: after_s -->\n| | found after, s | |\n|---|--:|---|\n"
    assert wrong(f'{table}| idle | not | <!-- = run found(case="idle") --> |\n', results) == []
    assert unsourced(table + row.format("idle", "idle"), results) != []


def test_how_it_was_measured_is_written(results):
    text = "<!-- run: run -->\nby hand\n<!-- end -->\n"
    found = check(text, results)
    assert found.wrong and not found.wrong[0].is_broken
    assert "    everserve bench failover --rounds 5 --serve '--detect-ms 100 --spares 1'\n" in found.text
    assert "`bench/results/run.json`: 2026-11-18, commit abc1234; Fast CPU, 2 x86_64 cores." in found.text
    assert wrong(found.text, results) == []
    results.load("run")["environment"]["dirty"] = True
    assert "commit abc1234, with uncommitted changes;" in check(text, results).text


def test_only_what_is_cited_is_kept(results):
    check("21.1 ms (37.3)<!-- = run faults.expert: worst(gap_ms) -->\n", results)
    check('17 ms, 7 s<!-- = run: points(way="again").ms, found(case="slow").after_s -->\n', results)
    short = cited.shorten(RUN, results.read["run"])
    assert short == {
        "environment": RUN["environment"],
        "settings": {"rounds": 5},
        "faults": {"expert": {"gap_ms": {"median": 21.14, "max": 37.32}}},
        "points": [{"way": "again", "ms": 17.1}],
        "found": [{"case": "slow", "after_s": 7.22}],
    }
    again = Results(results.folder)
    again.replace("run", short)
    check("21.1 ms (37.3)<!-- = run faults.expert: worst(gap_ms) -->\n", again)
    check('17 ms, 7 s<!-- = run: points(way="again").ms, found(case="slow").after_s -->\n', again)
    assert cited.shorten(short, again.read["run"]) == short
