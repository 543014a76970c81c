"""Exactly once, by token index; and the line of those that wait."""

import pytest

from everserve.errors import RequestError
from everserve.gateway.streams.log_references import LostLogs
from everserve.gateway.streams.metrics import AnswerLengths, EngineMetrics, FleetMetrics
from everserve.gateway.streams.stream import Stream, StreamBroken, StreamTable, count_blocks
from everserve.gateway.streams.waiting import WaitingLine
from everserve.tables.ids import Rank
from everserve.tables.outputs import Output
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens
from tests.support.fleet_toy import Recorder


class Table:
    """A table with some streams of 1 prompt token and 9 to come."""

    def __init__(self, *ids: str) -> None:
        self.totals = FleetMetrics()
        self.logs = LostLogs()
        self.diverged: list[tuple[str, int, int | None]] = []
        self.table = StreamTable(
            self.totals,
            self.logs,
            lambda stream, output: self.diverged.append((stream.spec.id, output.index, output.token)),
        )
        self.streams = [make_stream(id) for id in ids]
        for stream in self.streams:
            stream.link = object()  # type: ignore[assignment]
            self.table.add(stream)

    def recorders(self) -> list[Recorder]:
        return [stream.listener for stream in self.streams]  # type: ignore[misc]


def make_stream(id: str) -> Stream:
    stream = Stream(RequestSpec(id=id, prompt=as_tokens([1]), params=SamplingParams(max_tokens=9)), Recorder())
    stream.metrics = EngineMetrics()
    return stream


def token(id: str, index: int, finish: str | None = None) -> Output:
    return Output(id=id, index=index, token=100 + index, finish_reason=finish)


def test_tokens_arrive_in_order_and_the_last_one_ends_the_stream() -> None:
    toy = Table("a", "b")
    a, b = toy.recorders()
    toy.table.deliver([token("a", 0), token("b", 0)], 0.0)
    toy.table.deliver([token("a", 1, "stop")], 0.0)
    assert (a.tokens, b.tokens) == ([100, 101], [100])
    assert toy.streams[0].tokens == [100, 101], "what the client has is remembered"
    assert "a" not in toy.table and "b" in toy.table


def test_a_duplicate_is_dropped_and_counted() -> None:
    toy = Table("a")
    toy.table.deliver([token("a", 0), token("a", 0), token("a", 1), token("a", 0)], 0.0)
    assert toy.recorders()[0].tokens == [100, 101]
    assert toy.totals.num_stale == 2


def test_a_duplicate_that_contradicts_is_told_and_the_client_keeps_what_it_has() -> None:
    toy = Table("a")
    toy.table.deliver([token("a", 0), token("a", 1)], 0.0)
    wrong = Output(id="a", index=0, token=999)
    toy.table.deliver([wrong, token("a", 1), Output(id="a", index=0, finish_reason="length"), token("a", 2)], 0.0)
    assert toy.diverged == [("a", 0, 999)]
    assert toy.recorders()[0].tokens == [100, 101, 102] and toy.totals.num_stale == 3


def test_a_gap_ends_the_stream_with_an_error() -> None:
    toy = Table("a", "b")
    a, b = toy.recorders()
    broken = toy.table.deliver([token("a", 0), token("a", 2), token("a", 3), token("b", 0)], 0.0)
    assert broken == ["a"]  # the worker is told to stop
    assert a.tokens == [100] and b.tokens == [100]
    assert [type(error) for error in a.errors] == [StreamBroken]
    assert "a" not in toy.table and toy.totals.num_stale == 0


def test_outputs_of_a_stream_that_nobody_waits_for_are_dropped() -> None:
    toy = Table("a")
    toy.table.remove(toy.streams[0])
    toy.table.deliver([token("a", 0)], 0.0)
    assert toy.recorders()[0].tokens == [] and toy.totals.num_stale == 0


def test_an_output_without_a_token_takes_no_index() -> None:
    """max_tokens=0: the only message carries the prompt's logprobs."""
    toy = Table("a")
    toy.table.deliver([Output(id="a", index=0, token=None, finish_reason="length")], 0.0)
    assert toy.recorders()[0].tokens == [None] and len(toy.table) == 0
    assert toy.table.prefill_cost == toy.table.decode_cost == 0


def test_a_bug_in_one_listener_costs_one_stream(caplog: pytest.LogCaptureFixture) -> None:
    for finish in (None, "stop"):
        toy = Table("a", "b")
        a, b = toy.recorders()
        a.raises = ValueError("a bug")
        assert toy.table.deliver([token("a", 0, finish), token("b", 0)], 0.0) == ["a"]
        assert len(a.errors) == 1 and b.tokens == [100] and len(toy.table) == 1
        assert "a bug" in caplog.text


def test_ids_are_unique() -> None:
    toy = Table("a")
    with pytest.raises(AssertionError):
        toy.table.add(make_stream("a"))


def test_a_rejected_stream_is_the_clients_fault_only_before_its_first_token() -> None:
    for is_server_fault, num_tokens, kind in (
        (False, 0, RequestError),
        (True, 0, StreamBroken),
        (False, 1, StreamBroken),
    ):
        toy = Table("a")
        toy.table.deliver([token("a", index) for index in range(num_tokens)], 0.0)
        toy.table.reject("a", "no", is_server_fault)
        toy.table.reject("a", "no", is_server_fault)
        assert [type(error) for error in toy.recorders()[0].errors] == [kind]


def test_what_is_owed_is_the_prompt_until_it_is_answered_and_what_is_still_to_come() -> None:
    def owed() -> tuple[int, int]:
        return toy.table.prefill_cost, toy.table.decode_cost

    toy = Table("a", "b")  # one token each, and nine to come
    assert owed() == (2 * (1 + 1), (9 + 9) * (1 + 1))
    toy.table.deliver([token("a", 0)], 0.0)
    assert owed() == (2, (8 + 9) * (1 + 1)), "1.5 keys on average"
    toy.table.deliver([token("a", 1)], 0.0)
    assert owed() == (2, (7 + 9) * (1 + 2))
    toy.table.remove(toy.streams[1])
    assert owed() == (0, 7 * (1 + 3))
    (a,) = toy.table.remove_all()
    assert owed() == (0, 0)
    toy.table.add(a)
    assert owed() == (3 * 1 + 1 + 2 + 3, 7 * (1 + 3)), "known tokens are computed again"
    toy.table.deliver([token("a", 2, "stop")], 0.0)
    assert owed() == (0, 0)


def test_answers_are_expected_to_be_as_long_as_they_were_lately() -> None:
    lengths = AnswerLengths()
    exact, stops = SamplingParams(max_tokens=900), SamplingParams(max_tokens=900, stop_ids=(7,))
    for _ in range(1000):
        lengths.note(40)
    assert lengths.expect(exact, 100) == 800, "only its limit ends it"
    assert lengths.expect(stops, 0) == 40 and lengths.expect(stops, 30) == 10
    assert lengths.expect(stops, 500) == 1, "it has outlived all of them, and is not over"
    assert lengths.expect(SamplingParams(max_tokens=8, stop_ids=(7,)), 2) == 6
    assert lengths.expect(SamplingParams(max_tokens=900, min_tokens=300, stop_ids=(7,)), 100) == 200
    assert lengths.expect(SamplingParams(max_tokens=0, stop_ids=(7,)), 0) == 0


def test_siblings_share_the_blocks_that_their_prompt_fills() -> None:
    def siblings(num_prompt: int, *nums_tokens: int) -> list[Stream]:
        spec = RequestSpec(id="a", prompt=as_tokens([1] * num_prompt), params=SamplingParams(max_tokens=9))
        streams = [Stream(spec, Recorder()) for _ in nums_tokens]
        for stream, num_tokens in zip(streams, nums_tokens, strict=True):
            stream.tokens = [1] * num_tokens
        return streams

    assert count_blocks(siblings(3, 0), 4) == 1
    assert count_blocks(siblings(4, 0), 4) == 2, "the next token needs a place, too"
    assert count_blocks(siblings(4, 3, 4), 4) == 1 + 1 + 2
    assert count_blocks(siblings(11, 0, 0, 0), 4) == 2 + 3


def lose(stream: Stream) -> Stream:
    stream.mark_lost(Rank(0), 5.0)
    return stream


def test_the_line_is_in_order_with_lost_streams_in_front_and_siblings_together() -> None:
    line = WaitingLine()
    assert list(line.turns()) == [] and len(line) == 0
    new, lost = [make_stream(f"n{i}") for i in range(3)], [lose(make_stream(f"l{i}")) for i in range(3)]
    for i, stream in enumerate(new):
        stream.group = i
    for stream, group in zip(lost, (7, 8, 7), strict=True):
        stream.group = group
    for stream in (*new, *lost):
        line.add(stream)
    assert len(line) == 6
    assert next(line.turns()) == [lost[0], lost[2]]
    assert line.remove(lost[2]) and not line.remove(lost[2])
    assert list(line.turns()) == [[lost[0]], [lost[1]], [new[0]], [new[1]], [new[2]]]
    assert line.remove_all() == [lost[0], lost[1], *new]
    assert len(line) == 0 and list(line.turns()) == []
