"""How far a worker is: events that are worth a look, and no others."""

from typing import Any

import msgspec
import pytest

from everserve.wire.event_log import EventLog
from everserve.wire.events import AnyEvent, WorkerLoading
from everserve.wire.messages import StartWorker
from everserve.worker import loading
from everserve.worker.loading import Loading


def start(incarnation: int = 1) -> StartWorker:
    fields: dict[str, Any] = {"rank": 3, "incarnation": incarnation, "roles": (), "settings": None, "num_workers": 1}
    return StartWorker(**fields, slots=None, detect_ms=50.0)


def load(monkeypatch: pytest.MonkeyPatch, num: int, seconds: float, incarnation: int = 1) -> list[AnyEvent]:
    """The events of a load of so many parts that takes so long."""
    now, told = [100.0], []
    monkeypatch.setattr(loading.time, "monotonic", lambda: now[0])
    progress = Loading(start(incarnation), EventLog("worker-3", None, told.append)).part("experts")
    for i in range(num):
        now[0] += seconds / num
        progress(i + 1, num)
    return told


def test_what_loads_at_once_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, 1000, 0.2) == []


def test_a_long_load_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    told = load(monkeypatch, 3000, 30.0)
    assert 40 <= len(told) <= 50 and all(isinstance(event, WorkerLoading) for event in told)
    shares = [event.done / event.total for event in told if isinstance(event, WorkerLoading)]
    assert shares == sorted(shares) and told[0].rank == 3 and told[0].what == "experts"  # type: ignore[union-attr]
    assert msgspec.json.decode(msgspec.json.encode(told[0]))["event"] == "worker_loading"


def test_lines_only_where_there_are_no_bars(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        monkeypatch.setenv(loading.START_BARS, "1")
        load(monkeypatch, 3000, 30.0)
        assert not caplog.records, "a bar shows the first process in a seat"
        load(monkeypatch, 3000, 30.0, incarnation=2)
        assert 8 <= len(caplog.records) <= 10 and "of 3000 experts" in caplog.text
        monkeypatch.delenv(loading.START_BARS)
        load(monkeypatch, 3000, 30.0)
    assert 16 <= len(caplog.records) <= 20
