"""The fleet: what its clients see of workers that are lost, or lie, or are wrong."""

from everserve.errors import OverloadedError, RequestError
from everserve.gateway.streams.stream import StreamBroken
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.tables.outputs import Output
from everserve.wire.events import RequestResumed, StaleDropped, StreamDiverged
from tests.support.fleet_toy import CAPACITY, LIE, ToyFleet, assert_complete, whole_stream, with_fleet


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
        assert b.specs["s0"] == toy.streams[0].spec.after(toy.streams[0].tokens)
        assert not b.specs["s1"].known, "the other stream was not touched"
        (event,) = toy.events
        assert isinstance(event, RequestResumed)
        assert (event.request_id, event.from_rank, event.to_rank) == ("s0", 0, 1)
        assert (event.num_known, event.stalled_s, event.process) == (2, 0.0, "gateway")
        toy.now_s += 0.125
        await toy.run(b, num_steps=5)
        assert_complete(toy)
        totals = toy.fleet.totals
        assert totals.num_resumed == 1
        assert (sum(totals.stall_s.counts), totals.stall_s.total) == (1, 0.125)
        assert toy.fleet.num_streams == 0

    with_fleet(test)


def test_a_worker_that_is_declared_gone_is_fenced() -> None:
    """A stopped process wakes up late: it speaks, and nobody listens."""

    async def test(toy: ToyFleet) -> None:
        a, b = await toy.pair(max_tokens=3)
        a.step()
        await toy.settle()
        toy.lose(a)
        await toy.settle()
        assert list(b.specs["s0"].known) == toy.streams[0].tokens != []
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
        await toy.run(b)
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
        await toy.run(b, num_steps=2)
        resumed = list(b.specs)[CAPACITY:]
        assert resumed == list(a.specs), "all of them, in order, and no new one"
        await toy.run(b, num_steps=8)
        assert_complete(toy)

    with_fleet(test)


def test_two_losses_in_a_row_are_one_stall() -> None:
    """The worker that it was given to dies before it sent a token."""

    async def test(toy: ToyFleet) -> None:
        a, b = await toy.pair(max_tokens=3)
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
        a, b = await toy.pair(max_tokens=1)
        toy.lose(a)
        a.step()  # it had finished, but too late
        await toy.settle()
        b.step()
        await toy.settle()
        assert_complete(toy)

    with_fleet(test)


def test_a_channel_out_of_step_is_a_lost_worker() -> None:
    async def test(toy: ToyFleet) -> None:
        a, b = await toy.pair(max_tokens=1)
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
