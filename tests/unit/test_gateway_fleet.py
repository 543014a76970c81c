"""The fleet: which worker gets which stream, and what happens when workers are lost."""

import msgspec
import pytest

from everserve.errors import OverloadedError, RequestError
from everserve.gateway.streams import StreamBroken
from everserve.plan.spread import Room
from everserve.runtime.events import RequestResumed, StaleDropped, StreamDiverged, StreamMoved
from everserve.tables.ids import Incarnation, LogId, Rank, Role
from everserve.tables.outputs import Output
from tests.unit.fleet_toy import LIE, Recorder, ToyFleet, whole_stream, with_fleet

CAPACITY = 4 + 4  # of a worker with 4 seats


def assert_complete(toy: ToyFleet, *indices: int) -> None:
    """These clients (all, if none is named) have their whole streams, and nothing else."""
    for stream in [toy.streams[i] for i in indices] or toy.streams:
        recorder = stream.listener
        assert isinstance(recorder, Recorder)
        assert recorder.tokens == whole_stream(stream.spec) and recorder.finish_reason == "length"
        assert not recorder.errors


# -- placement -----------------------------------------------------------------------------------


def test_streams_go_to_the_worker_that_owes_the_fewest_tokens() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(prompt=[1] * 5, max_tokens=30)  # 35 to a
        toy.submit(prompt=[1] * 30, max_tokens=4)  # 34 to b
        toy.submit(max_tokens=4)  # b has fewer: 41
        toy.submit(max_tokens=4)  # a
        await toy.settle()
        assert [list(w.specs) for w in (a, b)] == [["s0", "s3"], ["s1", "s2"]]
        b.step("s1")  # its 30 prompt tokens are answered
        await toy.settle()
        assert toy.fleet.link(Rank(1)).streams.num_owed == 3 + 7
        toy.submit(max_tokens=20)
        await toy.settle()
        assert "s4" in b.specs

    with_fleet(test)


def test_siblings_go_together() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(n=3)
        toy.submit(n=3)
        toy.submit(n=CAPACITY - 3)
        await toy.settle()
        assert list(a.specs) == ["s0", "s1", "s2", "s6", "s7", "s8", "s9", "s10"]
        assert list(b.specs) == ["s3", "s4", "s5"]

    with_fleet(test)


def test_those_that_are_given_together_are_announced() -> None:
    """Siblings, and streams of a lost worker, to each of those that get them."""

    async def test(toy: ToyFleet) -> None:
        lost = await toy.join(0)
        toy.submit(n=3)
        for _ in range(3):
            toy.submit()
        await toy.settle()
        assert lost.following == [2, 1, 0, 0, 0, 0]
        a, b = await toy.join(1), await toy.join(2)
        toy.lose(lost)
        await toy.settle()
        assert (a.following, b.following) == ([2, 1, 0], [2, 1, 0])
        for _ in range(4):
            a.step()
            b.step()
            await toy.settle()
        assert_complete(toy)

    with_fleet(test)


def test_siblings_wait_for_a_worker_with_room_for_all() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(n=CAPACITY - 1)
        toy.submit(n=CAPACITY - 2)
        toy.submit(n=3)
        await toy.settle()
        assert toy.fleet.num_waiting == 3
        toy.cancel(0)
        toy.cancel(1)
        await toy.settle()
        assert toy.fleet.num_waiting == 0
        first = 2 * CAPACITY - 3
        assert all(f"s{i}" in a.specs for i in range(first, first + 3)) and len(b.specs) == CAPACITY - 2

    with_fleet(test)


def test_too_many_siblings_for_any_worker_go_in_parts() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(n=2 * CAPACITY + 3, max_tokens=2)
        await toy.settle()
        assert len(a.tokens) == len(b.tokens) == CAPACITY and toy.fleet.num_waiting == 3
        for _ in range(4):
            a.step()
            b.step()
            await toy.settle()
        assert_complete(toy)

    with_fleet(test)


def test_what_the_workers_kv_has_room_for_is_known_from_their_reports_and_what_they_were_given_since() -> None:
    async def test(toy: ToyFleet) -> None:
        await toy.join(0, num_blocks=20)
        await toy.join(1, num_blocks=20)
        first, second = (toy.fleet.link(Rank(rank)) for rank in (0, 1))
        assert first.room == Room(rank=0, num_streams_free=8, capacity=8, num_free_blocks=20, num_owed_tokens=0)
        toy.submit(prompt=[1] * 40, max_tokens=4, n=2)  # 2 shared blocks, and one more each
        assert first.room == Room(rank=0, num_streams_free=6, capacity=8, num_free_blocks=16, num_owed_tokens=88)
        toy.workers[0].send([], kv_usage=0.25)
        await toy.settle()
        assert first.room.num_free_blocks == 15
        toy.submit(prompt=[1] * 33)
        assert (first.room.num_free_blocks, second.room.num_free_blocks) == (15, 17)

    with_fleet(test)


# -- back-pressure -------------------------------------------------------------------------------


def test_what_no_worker_has_room_for_waits_in_order() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        for _ in range(CAPACITY + 3):
            toy.submit(max_tokens=2)
        await toy.settle()
        assert list(a.specs) == [f"s{i}" for i in range(CAPACITY)] and toy.fleet.num_waiting == 3
        a.step("s5")
        await toy.settle()
        assert toy.fleet.num_waiting == 3
        a.step("s5")
        await toy.settle()
        assert list(a.specs)[CAPACITY:] == [f"s{CAPACITY}"], "first come, first served"
        b = await toy.join(1)
        assert list(b.specs) == [f"s{CAPACITY + 1}", f"s{CAPACITY + 2}"]
        for _ in range(2):
            a.step()
            b.step()
            await toy.settle()
        assert_complete(toy)

    with_fleet(test)


def test_a_stream_that_is_cancelled_while_it_waits_never_starts() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        for _ in range(CAPACITY + 2):
            toy.submit(max_tokens=1)
        toy.cancel(CAPACITY)
        toy.cancel(CAPACITY)
        assert toy.fleet.num_waiting == 1 and toy.fleet.num_streams == CAPACITY + 1
        await toy.settle()
        a.step()
        await toy.settle()
        assert list(a.specs)[CAPACITY:] == [f"s{CAPACITY + 1}"]

    with_fleet(test)


def test_all_streams_in_flight_are_bounded() -> None:
    async def test(toy: ToyFleet) -> None:
        await toy.join(0)
        toy.fleet.check_room(12)
        with pytest.raises(RequestError, match="at most 12"):
            toy.fleet.check_room(13)
        toy.submit(n=4)
        toy.submit(n=CAPACITY - 1)
        assert (toy.fleet.num_streams, toy.fleet.num_waiting) == (11, 7)
        toy.fleet.check_room(1)
        with pytest.raises(OverloadedError, match="11 of 12"):
            toy.fleet.check_room(2)

    with_fleet(test, max_queue=12)


def test_how_long_a_stream_waited_here() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        for _ in range(CAPACITY + 1):
            toy.submit(max_tokens=1)
        toy.now_s += 3.0
        a.step("s0")
        await toy.settle()
        assert [stream.waited_s for stream in toy.streams] == [0.0] * CAPACITY + [3.0]

    with_fleet(test)


# -- losses --------------------------------------------------------------------------------------


def test_a_worker_that_dies_costs_a_stall() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(max_tokens=6)
        toy.submit(max_tokens=6)
        await toy.settle()
        a.step()
        a.step()
        b.step()
        a.die()
        await toy.settle()
        assert toy.streams[0].tokens == whole_stream(toy.streams[0].spec)[:2], "what it had sent counts"
        assert b.specs["s0"] == msgspec.structs.replace(toy.streams[0].spec, known=toy.streams[0].tokens)
        assert b.specs["s1"].known == [], "the other stream was not touched"
        (event,) = toy.events
        assert isinstance(event, RequestResumed)
        assert (event.request_id, event.from_rank, event.to_rank) == ("s0", 0, 1)
        assert (event.num_known, event.stalled_s, event.process) == (2, 0.0, "gateway")
        toy.now_s += 0.125
        for _ in range(5):
            b.step()
            await toy.settle()
        assert_complete(toy)
        totals = toy.fleet.totals
        assert totals.num_resumed == 1
        assert (sum(totals.stall_s.counts), totals.stall_s.total) == (1, 0.125)
        assert toy.fleet.num_streams == 0

    with_fleet(test)


def test_a_worker_that_is_declared_gone_is_fenced() -> None:
    """A stopped process wakes up late: it speaks, and nobody listens."""

    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(max_tokens=3)
        await toy.settle()
        a.step()
        await toy.settle()
        toy.lose(a)
        await toy.settle()
        assert b.specs["s0"].known == toy.streams[0].tokens != []
        a.is_liar = True
        a.step()
        a.say_ready()
        a.step()
        await toy.settle()
        assert toy.fleet.totals.num_stale == 3
        assert toy.kinds() == ["request_resumed"]
        b.step()
        b.step()
        a.die()
        await toy.settle()
        assert_complete(toy)
        stale = toy.events[-1]
        assert isinstance(stale, StaleDropped)
        assert (stale.rank, stale.incarnation, stale.count) == (0, 1, 3)
        assert toy.fleet.totals.failovers["attention", "hang"] == 1
        assert [link.rank for link in toy.fleet.ready_links()] == [1]

    with_fleet(test)


def test_a_fenced_worker_that_says_nothing_is_no_news() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        toy.lose(a)
        a.die()
        await toy.settle()
        assert toy.events == [] and toy.fleet.totals.num_stale == 0

    with_fleet(test)


def test_a_loss_is_counted_once_whoever_notices_first() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        a.die()
        await toy.settle()
        toy.lose(a, "crash")
        toy.lose(a, "crash")
        toy.lose(b, "exit")
        b.die()
        await toy.settle()
        toy.fleet.lose(Rank(2), Incarnation(1), (Role.ATTENTION, Role.EXPERT), "crash")  # never attached
        counts = {key: count for key, count in toy.fleet.totals.failovers.items() if count}
        assert counts == {("attention", "crash"): 2, ("attention", "exit"): 1, ("expert", "crash"): 1}

    with_fleet(test)


def test_without_an_orchestrator_losses_are_counted_when_channels_end() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.fleet.has_orchestrator = False
        toy.submit(max_tokens=1)
        a.die()
        await toy.settle()
        b.step()
        await toy.settle()
        assert_complete(toy)
        assert toy.fleet.totals.failovers["attention", "closed"] == 1

    with_fleet(test)


def test_a_newer_incarnation_fences_the_older_one() -> None:
    async def test(toy: ToyFleet) -> None:
        old = await toy.join(0)
        toy.submit(max_tokens=2)
        await toy.settle()
        old.step()
        await toy.settle()
        new = await toy.join(0, 2)
        assert list(new.specs) == ["s0"]
        old.is_liar = True
        old.step()
        await toy.settle()
        assert toy.fleet.totals.num_stale == 1
        toy.lose(old)  # old news: the new one stays
        new.step()
        await toy.settle()
        assert_complete(toy)
        assert toy.fleet.link(Rank(0)).incarnation == 2

    with_fleet(test)


def test_a_worker_that_was_declared_gone_before_it_is_attached_gets_nothing() -> None:
    """Two channels bring the news, in any order."""

    async def test(toy: ToyFleet) -> None:
        await toy.join(1)
        toy.fleet.lose(Rank(0), Incarnation(2), (Role.ATTENTION,), "crash")
        dead, older = toy.attach(0, 2), toy.attach(0, 1)
        for worker in (dead, older):
            worker.say_ready()
        await toy.settle()
        assert [link.rank for link in toy.fleet.ready_links()] == [1]
        newer = await toy.join(0, 3)
        late = toy.attach(0, 2)
        late.say_ready()
        await toy.settle()
        assert toy.fleet.link(Rank(0)).incarnation == 3
        toy.submit(n=2)
        toy.submit()
        await toy.settle()
        assert len(newer.specs) == 2 and not dead.specs and not older.specs and not late.specs

    with_fleet(test)


def test_losing_the_only_worker_is_survived_by_waiting() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        toy.submit(max_tokens=4, n=2)
        await toy.settle()
        a.step()
        a.die()
        await toy.settle()
        assert toy.fleet.limits is not None, "requests are still accepted"
        toy.submit(max_tokens=4)
        assert toy.fleet.num_waiting == 3 and not toy.fleet.ready_links()
        toy.now_s += 2.0
        b = await toy.join(0, 2)
        assert [len(spec.known) for spec in b.specs.values()] == [1, 1, 0], "lost streams go first"
        assert [event.stalled_s for event in toy.events if isinstance(event, RequestResumed)] == [2.0, 2.0]
        for _ in range(4):
            b.step()
            await toy.settle()
        assert_complete(toy)

    with_fleet(test)


def test_lost_streams_go_before_those_that_wait_longer() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        for _ in range(2 * CAPACITY + 2):
            toy.submit(max_tokens=3)
        await toy.settle()
        a.step()
        b.step()
        a.die()
        await toy.settle()
        assert toy.fleet.num_waiting == CAPACITY + 2
        for _ in range(2):
            b.step()
            await toy.settle()
        resumed = list(b.specs)[CAPACITY:]
        assert resumed == list(a.specs), "all of them, in order, and no new one"
        for _ in range(8):
            b.step()
            await toy.settle()
        assert_complete(toy)

    with_fleet(test)


def test_two_losses_in_a_row_are_one_stall() -> None:
    """The worker that it was given to dies before it sent a token."""

    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(max_tokens=3)
        await toy.settle()
        a.step()
        a.die()
        await toy.settle()
        toy.now_s += 1.0
        toy.lose(b)
        await toy.settle()
        assert toy.fleet.num_waiting == 1
        toy.now_s += 1.0
        c = await toy.join(0, 2)
        toy.now_s += 1.0
        c.step()
        await toy.settle()
        assert toy.fleet.totals.stall_s.total == 3.0 and toy.fleet.totals.num_resumed == 2
        resumed = [event for event in toy.events if isinstance(event, RequestResumed)]
        assert [(e.from_rank, e.to_rank, e.stalled_s) for e in resumed] == [(0, 1, 0.0), (1, 0, 2.0)]
        toy.lose(c)
        d = await toy.join(0, 3)
        d.step()
        await toy.settle()
        assert_complete(toy)
        assert sum(toy.fleet.totals.stall_s.counts) == 2, "it went on in between, so this was another one"

    with_fleet(test)


def test_resumed_siblings_stay_together() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b, c = await toy.join(0), await toy.join(1), await toy.join(2)
        toy.submit(n=3)
        toy.submit()
        toy.submit()
        await toy.settle()
        assert (len(a.specs), len(b.specs), len(c.specs)) == (3, 1, 1)
        toy.lose(a)
        await toy.settle()
        assert sorted((len(b.specs), len(c.specs))) == [1, 4]

    with_fleet(test)


def test_cancelled_streams_are_not_resumed() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        toy.submit(n=3)
        await toy.settle()
        toy.cancel(0)
        toy.lose(a)
        toy.cancel(1)
        b = await toy.join(1)
        assert list(b.specs) == ["s2"]

    with_fleet(test)


def test_an_end_that_was_lost_with_its_worker_is_computed_again() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(max_tokens=1)
        await toy.settle()
        toy.lose(a)
        a.step()  # it had finished, but too late
        await toy.settle()
        b.step()
        await toy.settle()
        assert_complete(toy)

    with_fleet(test)


def test_a_channel_out_of_step_is_a_lost_worker() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(max_tokens=1)
        await toy.settle()
        a.send_raw(b"\xff" * 8)
        await toy.settle()
        b.step()
        await toy.settle()
        assert_complete(toy)

    with_fleet(test)


def test_a_worker_that_rejects() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        first, second = toy.submit()[0], toy.submit()[0]
        await toy.settle()
        a.reject("s0")
        b.step()
        toy.lose(b)
        await toy.settle()
        a.receive()
        a.reject("s1")
        await toy.settle()
        assert [type(error) for error in (*first.errors, *second.errors)] == [RequestError, RequestError]

    with_fleet(test)


def test_a_resumed_stream_that_is_rejected_is_our_fault() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        (listener,) = toy.submit()
        await toy.settle()
        a.step()
        a.die()
        await toy.settle()
        b.reject("s0")
        await toy.settle()
        assert [type(error) for error in listener.errors] == [StreamBroken]
        assert toy.fleet.num_streams == 0

    with_fleet(test)


def test_unknown_bytes_are_said_once() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        toy.submit(max_tokens=1)
        await toy.settle()
        for _ in range(3):
            a.send_raw(b"\x03\0\0\0abc")
            await toy.settle()
        other = toy.attach(1)
        other.incarnation = Incarnation(9)
        other.say_ready()  # not who it should be
        await toy.settle()
        a.step()
        await toy.settle()
        assert_complete(toy)
        assert toy.kinds() == ["bad_bytes", "bad_bytes"] and len(toy.fleet.ready_links()) == 1

    with_fleet(test)


def test_closing_ends_running_and_waiting_streams() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        for _ in range(2 * CAPACITY):
            toy.submit()
        toy.lose(b)
        assert toy.fleet.num_waiting == CAPACITY
        toy.fleet.close(OverloadedError("over"))
        assert all(len(stream.listener.errors) == 1 for stream in toy.streams)
        assert toy.fleet.num_streams == 0 and toy.events == []
        a.receive()
        await toy.settle()

    with_fleet(test)


def test_limits_are_those_of_the_smallest_worker_and_are_remembered() -> None:
    async def test(toy: ToyFleet) -> None:
        assert toy.fleet.limits is None
        a = await toy.join(0, max_model_len=64)
        b = await toy.join(1, max_model_len=32)
        assert toy.fleet.limits.max_total_tokens == 32 and toy.fleet.limits.vocab_size == 50_000
        a.die()
        b.die()
        await toy.settle()
        assert toy.fleet.limits.max_total_tokens == 32
        await toy.join(0, 2, max_model_len=64)
        assert toy.fleet.limits.max_total_tokens == 64

    with_fleet(test)


def test_counters_of_engines_go_on_over_incarnations() -> None:
    async def test(toy: ToyFleet) -> None:
        for incarnation in (1, 2, 3):
            worker = await toy.join(0, incarnation)
            worker.send([], num_known_tokens=10)
            await toy.settle()
            worker.die() if incarnation == 1 else toy.lose(worker)
            await toy.settle()
        engine = toy.fleet.engines[Rank(0)]
        assert engine.total("num_known_tokens", toy.fleet.stats(Rank(0))) == 30

    with_fleet(test)


def test_a_token_that_contradicts_what_the_client_has_is_told() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        toy.submit(max_tokens=2)
        await toy.settle()
        a.step()
        a.send([Output(id="s0", index=0, token=LIE)])
        a.step()
        await toy.settle()
        assert_complete(toy)
        (event,) = toy.events
        assert isinstance(event, StreamDiverged)
        assert (event.request_id, event.rank, event.index) == ("s0", 0, 0)
        assert (event.token, event.delivered) == (LIE, toy.streams[0].tokens[0])
        assert (toy.fleet.totals.num_diverged, toy.fleet.totals.num_stale) == (1, 1)

    with_fleet(test)


def test_a_late_output_of_another_streams_former_self_is_dropped() -> None:
    """A worker sends tokens of a stream that has been moved away from it and ended elsewhere."""

    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        (listener,) = toy.submit(max_tokens=1)
        await toy.settle()
        b.send([Output(id="s0", index=0, token=LIE, finish_reason="stop")])  # never asked for it
        await toy.settle()
        assert listener.tokens == []
        a.step()
        await toy.settle()
        assert_complete(toy)

    with_fleet(test)


# -- workers that leave --------------------------------------------------------------------------


def test_streams_of_a_worker_that_leaves_are_moved() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(max_tokens=3)
        toy.submit(max_tokens=3)
        await toy.settle()
        a.step()
        a.give_back()
        await toy.settle()
        assert b.specs["s0"].known == toy.streams[0].tokens == whole_stream(toy.streams[0].spec)[:1]
        assert b.sources == {"s1": None, "s0": (0, 1)}
        (event,) = toy.events
        assert isinstance(event, StreamMoved)
        assert (event.request_id, event.from_rank, event.to_rank) == ("s0", 0, 1)
        assert (event.num_known, event.paused_s, event.process) == (1, 0.0, "gateway")
        toy.submit(max_tokens=3)  # 0 owes nothing, but takes nothing either
        await toy.settle()
        assert "s2" in b.specs and [link.rank for link in toy.fleet.ready_links()] == [1]
        toy.now_s += 1.0
        for _ in range(3):
            b.step()
            await toy.settle()
        assert_complete(toy)
        totals = toy.fleet.totals
        assert (totals.num_moved, totals.num_resumed, totals.num_stale) == (1, 0, 0)
        assert sum(totals.stall_s.counts) == 0 and not any(totals.failovers.values())
        assert toy.settled == [], "it is still there"
        a.die()
        await toy.settle()
        toy.lose(a, "left")
        assert toy.settled == [(0, 1)] and not any(totals.failovers.values())

    with_fleet(test)


def test_a_stream_that_crosses_the_goodbye_of_its_worker_is_moved_too() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        toy.submit(max_tokens=2)
        await toy.settle()
        a.give_back()
        toy.submit(max_tokens=2)  # nobody has read the goodbye yet
        b = await toy.join(1)
        await toy.settle()
        assert a.specs.keys() == {"s0", "s1"} == b.specs.keys()
        assert toy.fleet.num_streams == 2 and toy.fleet.totals.num_moved == 2
        for _ in range(2):
            b.step()
            await toy.settle()
        assert_complete(toy)
        assert toy.fleet.totals.num_stale == 0, "the second goodbye is no lie"

    with_fleet(test)


def test_moved_streams_wait_in_front_if_nobody_is_left() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        toy.submit(max_tokens=3, n=2)
        await toy.settle()
        a.step()
        a.give_back()
        await toy.settle()
        toy.submit(max_tokens=3)
        assert toy.fleet.num_waiting == 3 and not toy.fleet.ready_links()
        toy.now_s += 2.0
        new = await toy.join(0, 2)
        assert list(new.specs) == ["s0", "s1", "s2"]
        assert [event.paused_s for event in toy.events if isinstance(event, StreamMoved)] == [2.0, 2.0]
        a.send([])  # the seat has a new process, but what the old one says was not forbidden
        a.say_ready()
        a.give_back()
        await toy.settle()
        a.die()
        for _ in range(3):
            new.step()
            await toy.settle()
        assert_complete(toy)
        assert toy.fleet.totals.num_stale == 0 and "stale_dropped" not in toy.kinds()
        assert toy.fleet.link(Rank(0)).incarnation == 2 and toy.settled == [(0, 1)]

    with_fleet(test)


def test_a_goodbye_that_the_orchestrator_overtakes() -> None:
    """The worker has given back and ended; the orchestrator's word of that comes first."""

    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(max_tokens=3)
        await toy.settle()
        a.step()
        a.give_back()
        a.die()
        toy.lose(a, "left")
        assert toy.fleet.link(Rank(0)) is None
        await toy.settle()
        assert len(b.specs["s0"].known) == 1, "its last token counts"
        totals = toy.fleet.totals
        assert (totals.num_moved, totals.num_resumed, totals.num_stale) == (1, 0, 0)
        assert not any(totals.failovers.values())

    with_fleet(test)


def test_a_worker_that_is_said_to_have_left_and_speaks_is_fenced() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(max_tokens=1)
        await toy.settle()
        toy.lose(a, "left")
        a.is_liar = True
        a.step()
        await toy.settle()
        b.step()
        await toy.settle()
        assert_complete(toy)
        assert toy.fleet.totals.num_stale == 1

    with_fleet(test)


def test_a_move_that_ends_in_a_loss_is_a_stall_from_the_loss_on() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(max_tokens=3)
        await toy.settle()
        a.step()
        a.give_back()
        await toy.settle()
        toy.now_s += 1.0
        toy.lose(b)
        toy.now_s += 1.0
        c = await toy.join(2)
        c.give_back()
        toy.now_s += 1.0
        d = await toy.join(3)
        toy.now_s += 1.0
        d.step()
        await toy.settle()
        assert toy.kinds() == ["stream_moved", "request_resumed", "stream_moved"]
        assert [getattr(e, "paused_s", None) for e in toy.events] == [0.0, None, 0.0]
        assert toy.fleet.totals.stall_s.total == 3.0 and sum(toy.fleet.totals.stall_s.counts) == 1

    with_fleet(test)


# -- whose log is needed -------------------------------------------------------------------------


def test_a_lost_streams_next_worker_is_told_whose_log_has_it() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(max_tokens=6)
        toy.submit(max_tokens=6)
        await toy.settle()
        a.step()
        a.die()
        await toy.settle()
        assert b.sources == {"s1": None, "s0": (0, 1)}
        assert toy.fleet.logs_in_use() == [(0, 1), (1, 1)]
        assert toy.settled == []
        b.step("s1")
        await toy.settle()
        assert toy.settled == []
        b.step("s0")
        await toy.settle()
        assert toy.settled == [(0, 1)] and toy.fleet.logs_in_use() == [(1, 1)]
        toy.lose(a, "crash")
        assert toy.settled == [(0, 1)], "said once"

    with_fleet(test)


def test_an_older_log_is_kept_until_the_newer_worker_has_said_something() -> None:
    """The newer one may have restored only a part before it died."""

    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.submit(max_tokens=6)
        await toy.settle()
        a.step()
        toy.lose(a)
        await toy.settle()
        assert b.sources == {"s0": (0, 1)}
        toy.lose(b)
        assert toy.settled == [(1, 1)]
        c = await toy.join(2)
        assert c.sources == {"s0": (0, 1)}
        c.step()
        await toy.settle()
        assert toy.settled == [(1, 1), (0, 1)]
        c.give_back()
        d = await toy.join(3)
        assert d.sources == {"s0": (2, 1)}

    with_fleet(test)


@pytest.mark.parametrize("ending", ["cancel while it waits", "cancel while it runs", "reject", "gap"])
def test_a_log_is_settled_by_the_end_of_the_last_stream_that_needs_it(ending: str) -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        toy.submit(n=2)
        await toy.settle()
        a.die()
        await toy.settle()
        toy.cancel(0)
        assert toy.settled == []
        if ending == "cancel while it waits":
            toy.cancel(1)
        b = await toy.join(1)
        assert toy.settled == ([(0, 1)] if ending == "cancel while it waits" else [])
        if ending == "cancel while it runs":
            toy.cancel(1)
        elif ending == "reject":
            b.reject("s1")
        elif ending == "gap":
            b.send([Output(id="s1", index=3, token=1)])
        await toy.settle()
        assert toy.settled == [(0, 1)]

    with_fleet(test)


def test_a_lost_worker_without_streams_is_settled_at_once() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.join(0), await toy.join(1)
        toy.lose(a)
        assert toy.settled == [(0, 1)]
        b.die()
        await toy.settle()
        assert toy.settled == [(0, 1), (1, 1)]
        toy.lose(b)
        toy.fleet.lose(Rank(2), Incarnation(1), (Role.ATTENTION,), "crash")  # never attached
        toy.fleet.lose(Rank(3), Incarnation(1), (Role.EXPERT,), "crash")  # has no log
        late = toy.attach(2, 1)
        late.die()
        await toy.settle()
        assert toy.settled == [(0, 1), (1, 1), (2, 1)]
        await toy.join(0, 2)
        await toy.join(0, 3)
        assert toy.settled[3:] == [(0, 2)]

    with_fleet(test)


def test_what_was_settled_while_there_was_no_orchestrator() -> None:
    async def test(toy: ToyFleet) -> None:
        toy.fleet.has_orchestrator = False
        toy.fleet.logs.report_to(None)
        a, b, c = await toy.join(0), await toy.join(1), await toy.join(2)
        toy.submit(max_tokens=6)
        await toy.settle()
        a.die()
        b.die()
        await toy.settle()
        assert toy.fleet.logs_in_use() == [(0, 1), (2, 1)], "of the others, a new orchestrator may drop the logs"
        toy.fleet.has_orchestrator = True
        toy.fleet.logs.report_to(toy.settled.append)
        c.step()
        await toy.settle()
        assert toy.settled == [(0, 1)]
        toy.lose(b, "crash")  # it may hear of the death after our report
        toy.lose(b, "crash")
        toy.lose(a, "crash")
        assert toy.settled == [(0, 1), (1, 1)]
        counts = {key: count for key, count in toy.fleet.totals.failovers.items() if count}
        assert counts == {("attention", "closed"): 2}, "counted once"
        later: list[LogId] = []
        toy.fleet.logs.report_to(later.append)
        toy.lose(b, "crash")
        assert later == [(1, 1)], "what was said to an orchestrator that is gone may have been said to nobody"

    with_fleet(test)


# -- clients that may come back ------------------------------------------------------------------


def test_a_suspended_stream_takes_nobodys_place_and_goes_on_in_front() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        (listener,) = toy.submit(max_tokens=3)
        toy.submit(n=CAPACITY - 1)
        toy.submit(max_tokens=1)
        await toy.settle()
        a.step("s0")
        await toy.settle()
        stream = toy.streams[0]
        toy.fleet.suspend(stream)
        await toy.settle()
        assert "s0" not in a.tokens and f"s{CAPACITY}" in a.tokens, "its place is taken by who waits"
        assert toy.fleet.num_streams == CAPACITY
        toy.submit(max_tokens=1)
        toy.fleet.resume([stream])
        assert toy.fleet.num_waiting == 2
        a.step(f"s{CAPACITY}")
        await toy.settle()
        assert a.specs["s0"].known == listener.tokens == whole_stream(stream.spec)[:1]
        a.step("s0")
        a.step("s0")
        await toy.settle()
        assert_complete(toy, 0)
        assert toy.fleet.totals.num_resumed == toy.fleet.totals.num_moved == 0 and toy.events == []

    with_fleet(test, max_queue=CAPACITY + 2)


def test_a_suspended_stream_needs_no_log() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        toy.submit(max_tokens=3, n=2)
        await toy.settle()
        a.step()
        a.die()
        await toy.settle()
        for stream in toy.streams:
            toy.fleet.suspend(stream)
            toy.fleet.suspend(stream)
        assert toy.settled == [(0, 1)] and toy.fleet.num_streams == 0
        b = await toy.join(0, 2)
        toy.fleet.resume(toy.streams)
        await toy.settle()
        assert b.sources == {"s0": None, "s1": None}
        b.step()
        b.step()
        await toy.settle()
        assert_complete(toy)
        assert sum(toy.fleet.totals.stall_s.counts) == 0, "nobody waited"

    with_fleet(test)
