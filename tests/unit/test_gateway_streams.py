"""Exactly once, by token index."""

import pytest

from everserve.errors import EverserveError, WorkerDied
from everserve.gateway.streams import StreamBroken, StreamTable
from everserve.tables.outputs import Output
from everserve.tables.requests import RequestSpec, SamplingParams


class Recorder:
    """A listener that writes everything down."""

    def __init__(self) -> None:
        self.tokens: list[int | None] = []
        self.errors: list[EverserveError] = []
        self.raises: Exception | None = None

    def on_output(self, output: Output, now_s: float) -> None:
        if self.raises is not None:
            raise self.raises
        self.tokens.append(output.token)

    def on_failure(self, error: EverserveError) -> None:
        self.errors.append(error)


def table_with(*ids: str) -> tuple[StreamTable, list[Recorder]]:
    table, recorders = StreamTable(), [Recorder() for _ in ids]
    for id, recorder in zip(ids, recorders, strict=True):
        table.add(RequestSpec(id=id, prompt=[1], params=SamplingParams(max_tokens=9)), recorder)
    return table, recorders


def token(id: str, index: int, finish: str | None = None) -> Output:
    return Output(id=id, index=index, token=100 + index, finish_reason=finish)


def test_tokens_arrive_in_order_and_the_last_one_ends_the_stream() -> None:
    table, (a, b) = table_with("a", "b")
    table.deliver([token("a", 0), token("b", 0)], 0.0)
    table.deliver([token("a", 1, "stop")], 0.0)
    assert (a.tokens, b.tokens) == ([100, 101], [100])
    assert "a" not in table and "b" in table


def test_a_duplicate_is_dropped_and_counted() -> None:
    table, (a,) = table_with("a")
    table.deliver([token("a", 0), token("a", 0), token("a", 1), token("a", 0)], 0.0)
    assert a.tokens == [100, 101]
    assert (table.num_duplicates, table.num_gaps) == (2, 0)


def test_a_gap_ends_the_stream_with_an_error() -> None:
    table, (a, b) = table_with("a", "b")
    broken = table.deliver([token("a", 0), token("a", 2), token("a", 3), token("b", 0)], 0.0)
    assert broken == ["a"]  # the worker is told to stop
    assert a.tokens == [100] and b.tokens == [100]
    assert [type(error) for error in a.errors] == [StreamBroken]
    assert table.num_gaps == 1 and "a" not in table


def test_outputs_of_a_stream_that_nobody_waits_for_are_dropped() -> None:
    table, (a,) = table_with("a")
    assert table.remove("a")
    assert not table.remove("a")
    table.deliver([token("a", 0)], 0.0)
    assert a.tokens == [] and table.num_duplicates == 0


def test_an_output_without_a_token_takes_no_index() -> None:
    """max_tokens=0: the only message carries the prompt's logprobs."""
    table, (a,) = table_with("a")
    table.deliver([Output(id="a", index=0, token=None, finish_reason="length")], 0.0)
    assert a.tokens == [None] and len(table) == 0


def test_a_dead_worker_fails_every_stream_once() -> None:
    table, (a, b) = table_with("a", "b")
    table.fail_all(WorkerDied("gone"))
    table.fail_all(WorkerDied("gone"))
    assert len(a.errors) == len(b.errors) == 1 and len(table) == 0


def test_a_bug_in_one_listener_costs_one_stream(capsys: pytest.CaptureFixture[str]) -> None:
    table, (a, b) = table_with("a", "b")
    a.raises = ValueError("a bug")
    assert table.deliver([token("a", 0), token("b", 0)], 0.0) == ["a"]
    assert len(a.errors) == 1 and b.tokens == [100]
    assert "a bug" in capsys.readouterr().err


def test_ids_are_unique() -> None:
    table, _ = table_with("a")
    with pytest.raises(AssertionError):
        table.add(RequestSpec(id="a", prompt=[1], params=SamplingParams(max_tokens=1)), Recorder())
