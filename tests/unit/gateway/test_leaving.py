"""The fleet: streams whose worker leaves, or whose client does; and whose log they need."""

import pytest

from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.outputs import Output
from everserve.wire.events import StreamMoved
from tests.support.fleet_toy import CAPACITY, ToyFleet, assert_complete, whole_stream, with_fleet

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
        assert list(b.specs["s0"].known) == toy.streams[0].tokens == whole_stream(toy.streams[0].spec)[:1]
        assert b.sources == {"s1": None, "s0": (0, 1)}
        (event,) = toy.events
        assert isinstance(event, StreamMoved)
        assert (event.request_id, event.from_rank, event.to_rank) == ("s0", 0, 1)
        assert (event.num_known, event.paused_s, event.process) == (1, 0.0, "gateway")
        toy.submit(max_tokens=3)  # 0 owes nothing, but takes nothing either
        await toy.settle()
        assert "s2" in b.specs and [link.rank for link in toy.fleet.ready_links()] == [1]
        toy.now_s += 1.0
        await toy.run(b, num_steps=3)
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
        await toy.run(b, num_steps=2)
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
        await toy.run(new, num_steps=3)
        assert_complete(toy)
        assert toy.fleet.totals.num_stale == 0 and "stale_dropped" not in toy.kinds()
        assert toy.fleet.link(Rank(0)).incarnation == 2 and toy.settled == [(0, 1)]

    with_fleet(test)


def test_a_goodbye_that_the_orchestrator_overtakes() -> None:
    """The worker has given back and ended; the orchestrator's word of that comes first."""

    async def test(toy: ToyFleet) -> None:
        a, b = await toy.pair(max_tokens=3)
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
        a, b = await toy.pair(max_tokens=1)
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
        a, b = await toy.pair(max_tokens=3)
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
        a, b = await toy.pair(max_tokens=6)
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
        later: list[WorkerId] = []
        toy.fleet.logs.report_to(later.append)
        toy.lose(b, "crash")
        assert later == [(1, 1)], "what was said to an orchestrator that is gone may have been said to nobody"

    with_fleet(test)


# -- clients that may come back ------------------------------------------------------------------


def test_a_suspended_stream_takes_nobodys_place_and_goes_on_in_front() -> None:
    async def test(toy: ToyFleet) -> None:
        a = await toy.join(0)
        (listener,) = toy.submit(max_tokens=3)
        for _ in range(CAPACITY - 1):
            toy.submit()
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
        assert list(a.specs["s0"].known) == listener.tokens == whole_stream(stream.spec)[:1]
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
