"""`everserve status --watch` and the bars of a start: what is shown of which news."""

import io
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from everserve.cli.starting import FollowingBars, Row, StartBars, rows_of
from everserve.cli.watch import Watched, screen, watch
from everserve.errors import ConfigError
from tests.support.http_threads import QuietHandler, ServerThread
from tests.unit.cli.test_cluster import CLUSTER, EXPERT, WORKER

NOW = 1_700_000_000.0
HELLO = {"gateway": "g", "version": "1", "models": ["demo"], "enable_chaos": True, "tick_s": 0.25, "num_ticks": 1200}
DIED = {
    **{
        "id": 1,
        "unix_s": NOW - 8,
        "kind": "fault",
        "who": "expert worker 1",
        "title": "expert worker 1 died (SIGKILL)",
    },
    **{"parts": ["noticed in 2 ms", "0 tokens lost"], "is_open": True, "ended_unix_s": None, "pause_ms": 18.0},
}


def tick(n: int, **changes: Any) -> dict[str, Any]:
    return {"n": n, "unix_s": NOW, "tokens_per_s": 400.0, "p50_ms": 9.0, "p99_ms": 12.0, "max_ms": 14.0, **changes}


def watched(**changes: Any) -> Watched:
    found = Watched("http://here")
    news = {
        "hello": HELLO,
        "ticks": [tick(i, num_streams=4) for i in range(200)],
        "entries": [DIED],
        "cluster": CLUSTER,
    }
    found.add(news | changes)
    return found


def shown(found: Watched, width: int = 80, height: int = 24) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(screen(found, NOW, width, height))
    lines = out.getvalue().rstrip("\n").splitlines()
    assert len(lines) <= height and all(len(line) <= width for line in lines), out.getvalue()
    return lines


def test_all_of_it_fits_on_a_small_terminal() -> None:
    lines = shown(watched())
    text = "\n".join(lines)
    assert lines[0].startswith("everserve demo · epoch 7") and "degraded since" in lines[0] and "(8 s)" in lines[0]
    assert lines[1] == "400 tokens/s · 4 streams · inter-token p50 9 ms, p99 12 ms, largest 14 ms"
    assert "! rank 1 (expert) is starting" in text and "32 + 8 shadow" in text and "25 % KV" in text
    assert "expert worker 1 died (SIGKILL) · noticed in 2 ms · 0 tokens lost" in text
    assert " incarnation " in text


def test_health_in_one_word_and_since_when() -> None:
    found = watched(cluster={**CLUSTER, "degraded": []}, entries=[DIED | {"is_open": False, "ended_unix_s": NOW - 5}])
    assert found.health == "whole" and found.since_unix_s == NOW - 5
    found.add({"ticks": [], "cluster": {**CLUSTER, "violations": ["x"]}, "entries": [DIED]})
    assert found.health == "broken" and found.since_unix_s == NOW - 8
    assert "NOT VALID" in shown(found)[0]
    found.silent_since_s = NOW - 60
    assert found.health == "unknown" and "no answer from http://here since" in shown(found)[0]


def test_many_workers_and_much_that_happened() -> None:
    workers = [{**WORKER, "rank": i} for i in range(60)] + [{**EXPERT, "rank": 60}]
    entries = [DIED | {"id": i, "unix_s": NOW - i, "parts": ["a long story"] * 12} for i in range(30)]
    lines = shown(watched(cluster={**CLUSTER, "workers": workers}, entries=entries))
    assert any("starting" in line and " 60 " in line for line in lines), "who is not ready comes first"
    assert any("more" in line for line in lines)


def test_before_anything_is_known() -> None:
    assert "no answer" in shown(Watched("http://here"))[0]


def test_another_gateway_begins_afresh() -> None:
    found = watched()
    found.add({"hello": {**HELLO, "gateway": "h"}, "ticks": [tick(0)], "entries": []})
    assert len(found.ticks) == 1 and not found.entries
    found.add({"ticks": [tick(0), tick(1)]})
    assert [one["n"] for one in found.ticks] == [0, 1]


# -- bars ----------------------------------------------------------------------------------------


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, **fields}


STARTS = [
    event("process_started", child="gateway"),
    event("worker_provisioned", rank=0, incarnation=1, roles=["attention"]),
    event("worker_provisioned", rank=1, incarnation=1, roles=["expert"]),
    event("worker_started", rank=0, incarnation=1),
    event("worker_loading", rank=1, incarnation=1, what="experts", done=30, total=120),
    event("worker_became_ready", rank=0, incarnation=1, load_s=0.44),
]


def test_how_far_each_worker_is() -> None:
    assert rows_of(STARTS) == {
        0: Row("worker 0 attention", "ready in 0.4 s", 1.0, True),
        1: Row("worker 1 expert", "30 of 120 experts", 0.25),
    }
    again = rows_of([*STARTS, event("worker_exited", rank=0, incarnation=1)])
    assert not again[0].is_ready and again[0].share is None


def test_bars_on_a_terminal_and_elsewhere() -> None:
    out = io.StringIO()
    with StartBars(Console(file=out, force_terminal=True, width=80), "starting") as bars:
        bars.show(STARTS)
    assert "1 of 2 workers are ready" in out.getvalue() and "30 of 120 experts" in out.getvalue()
    out = io.StringIO()
    with StartBars(Console(file=out), "starting") as bars:
        bars.show(STARTS)
    assert out.getvalue() == ""


# -- over HTTP -----------------------------------------------------------------------------------


class Streaming(ServerThread):
    """Sends the same events to whoever asks, and then nothing more."""

    def __init__(self, events: list[dict[str, Any]], status: int = 200) -> None:
        self.asked: list[tuple[str, str | None]] = []
        streaming = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:  # noqa: N802 (the name is the library's)
                streaming.asked.append((self.path, self.headers["authorization"]))
                self.send_response(status)
                self.end_headers()
                for one in events:
                    self.wfile.write(b"event: news\ndata: " + json.dumps(one).encode() + b"\n\n")

        super().__init__(Handler)


@pytest.fixture
def news() -> Iterator[Streaming]:
    served = Streaming(
        [{"hello": HELLO, "ticks": [tick(7)], "entries": [DIED | {"is_open": False}], "cluster": CLUSTER}]
    )
    yield served
    served.close()


def test_without_a_terminal_there_are_lines(
    news: Streaming, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One per happening; and it comes back for more, where it was, until Ctrl-C."""

    def sleep(seconds: float) -> None:
        if len(news.asked) > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    watch(news.url, "key other", Console(file=io.StringIO()))
    out = capsys.readouterr().out
    assert out.count("expert worker 1 died (SIGKILL) · noticed in 2 ms") == 1
    assert "degraded: 400 tokens/s" in out and "unknown" in out
    assert news.asked == [("/cluster/live", "Bearer key"), ("/cluster/live?since=7", "Bearer key")]


def test_on_a_terminal_there_is_a_screen(news: Streaming, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    out = io.StringIO()
    watch(news.url, None, Console(file=out, force_terminal=True, width=80, height=24, color_system=None))
    text = out.getvalue()
    assert "everserve demo" in text and text.rindex("\x1b[?1049l") > text.rindex("\x1b[?1049h"), "it leaves its screen"


@pytest.mark.parametrize(("status", "says"), [(401, "--api-key"), (404, "/cluster/live")])
def test_a_server_that_refuses_is_one_line(status: int, says: str) -> None:
    served = Streaming([], status)
    try:
        with pytest.raises(ConfigError, match=says):
            watch(served.url, None, Console(file=io.StringIO()))
        if status == 401:
            with pytest.raises(ConfigError, match="this API key is wrong"):
                watch(served.url, "k", Console(file=io.StringIO()))
    finally:
        served.close()


def test_bars_follow_a_server_until_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Streaming([*STARTS, event("serving", url="u"), event("worker_exited", rank=0)])
    seen: list[int] = []
    bars = FollowingBars(served.url, ["key"], "everserve: demo", lines=-1)
    monkeypatch.setattr(bars, "show", lambda events: seen.append(len(events)))
    try:
        bars._follow()
    finally:
        served.close()
    assert seen == list(range(1, len(STARTS) + 2)) and served.asked == [("/events", "Bearer key")]
