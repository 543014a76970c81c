"""Ticks: tokens, the times between them, and what clients wait right now."""

import sys

from everserve.gateway.streams.cadence import Cadence
from everserve.gateway.streams.stream import StreamTable
from tests.support.fleet_toy import ToyFleet, with_fleet
from tests.unit.gateway.test_streams import Table, token


def close(cadence: Cadence, waiting_s: float = 0.0, num_streams: int = 0):
    return cadence.close(n=1, elapsed_s=0.25, unix_s=10.0, waiting_s=waiting_s, num_streams=num_streams)


def test_a_tick_without_tokens() -> None:
    tick = close(Cadence())
    assert (tick.tokens_per_s, tick.p50_ms, tick.p99_ms, tick.max_ms) == (0.0, None, None, None)


def test_gaps_count_where_they_end() -> None:
    cadence = Cadence()
    cadence.note(1.0, 2, [])  # first tokens end no gap
    assert close(cadence).tokens_per_s == 8.0
    cadence.note(1.1, 199, [0.004] * 195 + [0.01] * 3 + [0.5])
    tick = close(cadence)
    assert (tick.tokens_per_s, tick.p50_ms, tick.p99_ms, tick.max_ms) == (796.0, 4.0, 10.0, 500.0)
    assert close(cadence).max_ms is None, "the next tick begins afresh"


def test_one_gap_is_all_of_them() -> None:
    cadence = Cadence()
    cadence.note(1.0, 1, [0.02])
    tick = close(cadence)
    assert (tick.p50_ms, tick.p99_ms, tick.max_ms) == (20.0, 20.0, 20.0)


def test_the_pause_that_a_fault_has_cost() -> None:
    """Streams had tokens at 1.00 and 1.01; the worker died at 1.015; they went on at 1.05. At 1.30 somebody else waits
    longer, for another reason."""
    cadence = Cadence()
    cadence.note(1.01, 4, [0.01] * 4)
    cadence.note(1.05, 4, [0.01, 0.04])
    close(cadence)  # news of the fault come a tick later
    cadence.note(1.3, 1, [0.2])
    assert cadence.pause_across(1.015, 1.015) == 0.04
    assert cadence.pause_across(1.005, 1.015) == 0.04, "it was asked for before it happened"
    assert cadence.pause_across(2.0, 2.0) is None
    close(cadence)
    close(cadence)
    assert cadence.pause_across(1.015, 1.015) is None, "only what is recent is remembered"


def test_nothing_grows_if_nobody_ticks() -> None:
    cadence = Cadence()
    for _ in range(10_000):
        cadence.note(1.0, 16, [0.01] * 16)
    assert len(cadence._gaps) < 70_000 and len(cadence._steps) < 5_000
    assert close(cadence).tokens_per_s == 640_000


def test_streams_tell_their_gaps() -> None:
    toy = Table("a", "b")
    toy.table.deliver([token("a", 0), token("b", 0)], 1.0)
    toy.table.deliver([token("a", 1)], 1.1)
    toy.table.deliver([token("a", 1), token("b", 1)], 1.3)  # the first of these is a duplicate
    tick = close(toy.totals.cadence)
    assert tick.tokens_per_s == 16.0 and (tick.p50_ms, tick.max_ms) == (100.0, 300.0)


def test_tokens_that_come_together_end_one_gap() -> None:
    """Three steps of a worker are read in one turn, after 90 ms: its clients have waited once."""

    async def test(toy: ToyFleet) -> None:
        worker = await toy.join(0)
        toy.submit(max_tokens=9)
        await toy.settle()
        worker.step()
        await toy.settle()
        ticking = toy.fleet.clock

        def clock() -> float:
            toy.now_s += 1e-4  # as a real one, which does not stand still while messages are handled
            return ticking()

        toy.fleet.clock = clock
        close(toy.fleet.totals.cadence)
        toy.now_s += 0.09
        for _ in range(3):
            worker.step()
        await toy.settle()
        tick = close(toy.fleet.totals.cadence)
        assert tick.tokens_per_s == 12.0
        assert tick.p50_ms == tick.p99_ms == tick.max_ms and 90.0 <= (tick.p50_ms or 0) < 95.0

    with_fleet(test)


def test_who_waits_longest_now() -> None:
    async def test(toy: ToyFleet) -> None:
        first, second = await toy.join(0), await toy.join(1)
        toy.submit(max_tokens=9)
        toy.submit(max_tokens=9)
        await toy.settle()
        assert toy.fleet.longest_wait_s(toy.now_s + 5) == 0.0, "a first token is another matter"
        for worker in (first, second):
            worker.step()
        await toy.settle()
        toy.now_s += 2.0
        second.step()
        await toy.settle()
        toy.now_s += 1.0
        assert toy.fleet.longest_wait_s(toy.now_s) == 3.0
        first.die()
        second.die()
        await toy.settle()
        assert toy.fleet.num_waiting == 2
        assert toy.fleet.longest_wait_s(toy.now_s) == 3.0, "without a worker it waits all the same"
        for index in range(2):
            toy.cancel(index)
        assert toy.fleet.longest_wait_s(toy.now_s) == 0.0

    with_fleet(test)


def test_a_step_costs_as_many_calls_however_many_tokens_it_has() -> None:
    """Nothing of ours runs for each token: what must be done for all of them, `list` and `max` do."""

    def num_calls(num_tokens: int) -> int:
        cadence, gaps, calls = Cadence(), [0.01] * num_tokens, []
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        try:
            cadence.note(1.0, num_tokens, gaps)
            close(cadence)
        finally:
            sys.setprofile(None)
        return calls.count("call") + calls.count("c_call")

    assert num_calls(1) == num_calls(10_000) > 0


def test_a_broken_stream_is_told() -> None:
    toy = Table("a")
    told = []
    table = StreamTable(toy.totals, toy.logs, lambda *_: None, lambda stream, error: told.append((stream, str(error))))
    table.add(toy.streams[0])
    table.deliver([token("a", 5)], 0.0)
    assert told == [(toy.streams[0], "Token 0 of this stream was lost.")]
