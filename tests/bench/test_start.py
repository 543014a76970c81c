"""`bench start`: how the events of a start divide its time, and what is shown."""

import json

from everserve_bench import show
from everserve_bench.micro.start import phases

EVENTS = [
    {"event": "process_started", "at_s": 101.0, "child": "gateway"},
    {"event": "process_started", "at_s": 101.1, "child": "zygote"},
    {"event": "worker_became_ready", "at_s": 104.0, "rank": 0, "load_s": 0.5, "phases": {"context": 0.25}},
    {
        "event": "worker_became_ready",
        "at_s": 106.0,
        "rank": 1,
        "load_s": 2.0,
        "phases": {"context": 0.5, "graphs": 1.25},
    },
    {"event": "serving", "at_s": 106.5},
    {"event": "worker_became_ready", "at_s": 107.0, "rank": 1, "load_s": 0.1, "phases": {}},
]


def test_phases_follow_each_other_up_to_the_token():
    found = phases(EVENTS, began_s=100.0, token_s=107.0)
    total = found.pop("total")
    assert found == {
        "command": 1.0,
        "imports": 3.0,
        "context": 0.5,
        "graphs": 1.25,
        "rest": 0.25,
        "serving": 0.5,
        "token": 0.5,
    }
    assert list(found) == ["command", "imports", "context", "graphs", "rest", "serving", "token"]
    assert sum(found.values()) == total == 7.0


def test_what_is_shown(tmp_path, capsys):
    found = phases(EVENTS, began_s=100.0, token_s=107.0)
    settings = {"num_attention": 2, "num_expert": 3}
    result = {"model": "mixtral, 16 layers", "settings": settings, "medians": {"cold": found, "warm": found}}
    path = tmp_path / "start.json"
    path.write_text(json.dumps(result | {"starts": {"cold": [found], "warm": [found, found | {"total": 9.0}]}}))
    show.show([path], is_markdown=True)
    told = capsys.readouterr().out
    assert "| kernels in the cache, 2 starts | 1.00 | 3.00 | 0.50 | 1.25 | 0.25 | 0.50 | 0.50 | 7.00 (9.00) |" in told
    assert "| no kernels compiled before, 1 start |" in told
