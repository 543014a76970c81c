"""Random lives of a fleet: clients come, leave and come back; workers join, work, leave, die, hang, wake up and lie;
orchestrators are replaced.

Whatever happens, each client sees the tokens 0..n-1 of its stream, each once, in order and with the right values; each
stream's next worker is told whose log has most of it; an orchestrator hears once of each lost log that nobody needs it,
and never while somebody does. Once things calm down, every client that stayed has its whole stream.
"""

import asyncio
from unittest.mock import patch

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from everserve.gateway.streams import poison
from everserve.gateway.streams.stream import Stream
from everserve.tables.ids import WorkerId
from tests.support.examples import examples
from tests.support.fleet_toy import Recorder, ToyFleet, ToyWorker, whole_stream

NUM_RANKS = 3
numbers = st.integers(0, 30)
events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 12), st.integers(1, 5)),
        st.tuples(st.just("submit"), st.integers(1, 12), st.just(1)),
        st.tuples(st.just("cancel"), numbers),
        st.tuples(st.just("suspend"), numbers),
        st.tuples(st.just("come back"), numbers),
        st.tuples(st.just("join"), st.integers(0, NUM_RANKS - 1), st.booleans()),
        st.tuples(st.just("ready"), numbers),
        st.tuples(st.just("step"), numbers, st.sets(numbers, max_size=3)),
        st.tuples(st.just("step"), numbers, st.just(set())),
        st.tuples(st.just("step"), numbers, st.just(set())),
        st.tuples(st.just("leave"), numbers),
        st.tuples(st.just("die"), numbers),
        st.tuples(st.just("lose"), numbers),
        st.tuples(st.just("wake"), numbers),
        st.tuples(st.just("orchestrator"), st.booleans()),
        st.tuples(st.just("settle")),
    ),
    min_size=5,
    max_size=60,
)


class Orchestrator:
    """What the latest one was told: first our report, then one settled log after the other."""

    def __init__(self, life: "Life") -> None:
        fleet = life.toy.fleet
        self.settled: list[WorkerId] = []
        reported = fleet.logs_in_use()
        assert len(set(reported)) == len(reported)
        self.needs_no_word = life.lost_logs() - set(reported)
        self._life = life
        fleet.has_orchestrator = True
        fleet.logs.report_to(self.on_settled)

    def on_settled(self, log: WorkerId) -> None:
        assert log not in self.settled, "said twice"
        assert log not in self._life.needed_logs(), "said too early"
        self.settled.append(log)


class Seen:
    """What was seen of a stream at the worker that it has, or had last."""

    def __init__(self, stream: Stream, log: WorkerId, source: WorkerId | None) -> None:
        self.log = log
        self.source = source
        self.num_known = len(stream.tokens)


class Life:
    """One random life. Who is lost becomes a liar: nothing that it says from then on may reach a client."""

    def __init__(self) -> None:
        self.toy = ToyFleet(max_queue=60)
        self.alive: list[ToyWorker] = []  # processes, lost ones included
        self.lost: set[ToyWorker] = set()
        self.cancelled: set[int] = set()
        self.suspended: set[int] = set()
        self.seen: dict[int, Seen] = {}
        self.incarnations = [0] * NUM_RANKS
        self.num_returns = 0
        self.orchestrator: Orchestrator | None = Orchestrator(self)

    # -- what happens ----------------------------------------------------------------------------

    def act(self, event: tuple) -> None:
        kind, *arguments = event
        toy = self.toy
        worker = self.alive[arguments[0] % len(self.alive)] if self.alive and arguments else None
        if kind == "submit":
            if toy.fleet.num_streams + arguments[1] <= toy.fleet.max_queue and toy.fleet.limits is not None:
                toy.submit(max_tokens=arguments[0], n=arguments[1])
        elif kind in ("cancel", "suspend", "come back") and toy.streams:
            self.act_of_client(kind, arguments[0] % len(toy.streams))
        elif kind == "join":
            self.join(*arguments)
        elif kind == "orchestrator":
            self.replace_orchestrator(*arguments)
        elif worker is not None:
            self.act_of_worker(kind, worker, *arguments[1:])

    def act_of_client(self, kind: str, index: int) -> None:
        stream = self.toy.streams[index]
        if not is_open(stream.listener) or index in self.cancelled:
            return
        if kind == "cancel":
            self.cancelled.add(index)
            self.suspended.discard(index)
            self.toy.cancel(index)
        elif kind == "suspend":
            self.suspended.add(index)
            self.toy.fleet.suspend(stream)
        elif index in self.suspended:
            self.suspended.remove(index)
            self.seen.pop(index, None)
            self.num_returns += 1
            stream.spec = msgspec.structs.replace(stream.spec, id=f"s{index}-{self.num_returns}")
            self.toy.fleet.resume([stream])

    def act_of_worker(self, kind: str, worker: ToyWorker, ids: frozenset[int] = frozenset()) -> None:
        if kind == "ready" and worker not in self.lost:
            worker.say_ready(shares_workers=True)
        elif kind == "step" and worker not in self.lost:
            worker.step(*(self.toy.streams[i].spec.id for i in ids if i < len(self.toy.streams)))
        elif kind == "wake" and worker in self.lost:
            worker.step()
        elif kind == "leave" and worker not in self.lost:
            worker.give_back()
        elif kind == "lose":
            self.mark_lost(worker)
            self.toy.lose(worker, "left" if worker.is_leaving else "hang")
        elif kind == "die":
            worker.die()
            self.alive.remove(worker)

    def join(self, rank: int, is_ready: bool) -> None:
        for other in self.alive:
            if other.rank == rank:
                self.mark_lost(other)
        self.incarnations[rank] += 1
        worker = self.toy.attach(rank, self.incarnations[rank])
        self.alive.append(worker)
        if is_ready:
            worker.say_ready(shares_workers=True)

    def mark_lost(self, worker: ToyWorker) -> None:
        worker.is_liar = True
        self.lost.add(worker)

    def replace_orchestrator(self, is_new: bool) -> None:
        self.toy.fleet.has_orchestrator = False
        self.toy.fleet.logs.report_to(None)
        self.orchestrator = Orchestrator(self) if is_new else None

    # -- what holds at every moment --------------------------------------------------------------

    def check(self) -> None:
        self.check_places()
        self.check_logs()
        for index, stream in enumerate(self.toy.streams):
            self.check_source(index, stream)
            assert stream.listener.tokens == whole_stream(stream.spec)[: len(stream.listener.tokens)]
            assert not stream.listener.errors

    def check_places(self) -> None:
        fleet = self.toy.fleet
        for link in fleet.ready_links():
            running = [stream for stream in self.toy.streams if stream.link is link]
            assert len(running) == len(link.streams) <= link.capacity + link.ready.max_num_seqs
            assert link.streams.prefill_cost == sum(stream.prefill_cost for stream in running)
            assert link._unseen_cost == link.streams.cost.of_all(link._unseen)
            assert (link.streams.decode_cost > 0) == bool(running) and link.room.owed >= 0
            assert not link.is_leaving and link.rank not in link.told
        here = self.here()
        waiting = [stream for stream in here if stream.link is None]
        if any(stream.num_losses < poison._FREE_LOSSES for stream in waiting):
            assert not any(link.num_free > 0 for link in fleet.ready_links()), "a place is free"
        self.check_shares(waiting)
        assert fleet.num_waiting == sum(stream.link is None for stream in here)
        assert fleet.num_streams == len(here)

    def check_shares(self, waiting: list[Stream]) -> None:
        """No request waits without a place where others have more than one. All have one key."""
        fleet = self.toy.fleet
        with_place = {stream.spec.flow for link in fleet.ready_links() for stream in link.streams}
        if any(s.spec.flow not in with_place and s.num_losses < poison._FREE_LOSSES for s in waiting):
            for link in fleet.ready_links():
                assert len({stream.spec.flow for stream in link.streams}) >= link.ready.max_num_seqs

    def check_logs(self) -> None:
        lost, needed = self.lost_logs(), self.needed_logs()
        assert self.toy.fleet.logs.unsettled == sorted(lost & needed)
        if self.orchestrator is not None:
            settled = set(self.orchestrator.settled)
            assert not settled & needed
            assert lost - needed == settled | (self.orchestrator.needs_no_word & lost)

    def check_source(self, index: int, stream: Stream) -> None:
        """At its second worker, it must know of its first; unless it went on at the second, also at its third."""
        seen = self.seen.get(index)
        if stream.link is None:
            return
        if seen is None or seen.log != stream.link.log:
            expected = stream.source  # if it is seen for the first time, others may have had it before we looked
            if seen is not None:
                went_on = len(stream.tokens) > seen.num_known
                expected = seen.log if went_on or seen.source is None else seen.source
            self.seen[index] = seen = Seen(stream, stream.link.log, expected)
        assert stream.source == (seen.source if len(stream.tokens) == seen.num_known else None)

    def here(self) -> list[Stream]:
        """Streams that run or wait."""
        away = self.cancelled | self.suspended
        return [s for i, s in enumerate(self.toy.streams) if is_open(s.listener) and i not in away]

    def needed_logs(self) -> set[WorkerId]:
        return {stream.source for stream in self.here() if stream.source is not None}

    def lost_logs(self) -> set[WorkerId]:
        """Of workers that the fleet knows to be gone."""
        links = [self.toy.fleet.link(rank) for rank in range(NUM_RANKS)]
        return {worker.log for worker in self.toy.workers} - {link.log for link in links if link is not None}

    # -- the end ---------------------------------------------------------------------------------

    async def calm_down(self) -> None:
        """One healthy worker and one orchestrator are there until the end, and all clients come back."""
        if self.orchestrator is None:
            self.replace_orchestrator(True)
        for worker in list(self.alive):
            self.mark_lost(worker)
            self.toy.lose(worker)
        for index in list(self.suspended):
            self.act_of_client("come back", index)
        self.incarnations[0] += 1
        last = await self.toy.join(0, self.incarnations[0])
        for _ in range(2000):
            if not self.toy.fleet.num_streams:
                return
            last.step()
            await self.toy.settle()
        raise AssertionError("a worker starves")


def is_open(recorder: Recorder) -> bool:
    return recorder.finish_reason is None and not recorder.errors


async def live(events: list[tuple]) -> None:
    life = Life()
    try:
        life.join(0, True)
        life.join(1, True)
        await life.toy.settle()
        for event in events:
            life.act(event)
            if event[0] == "settle":
                await life.toy.settle()
            life.check()
        await life.toy.settle()
        life.check()
        await life.calm_down()
        life.check()
        assert life.toy.fleet.logs.unsettled == []
        for i, stream in enumerate(life.toy.streams):
            if i not in life.cancelled:
                assert stream.listener.tokens == whole_stream(stream.spec)
                assert stream.listener.finish_reason == "length"
    finally:
        await life.toy.close()


@examples(50)
@given(events)
def test_every_client_sees_its_stream_exactly_once(events):
    asyncio.run(live(events))


@examples(25)
@given(events)
def test_also_if_streams_that_lost_a_worker_may_be_poison(events):
    """Only few of them may run at once; none is forgotten."""
    with patch.multiple(poison, _FREE_LOSSES=1, _AT_ONCE=4, MAX_LOSSES=1000):
        asyncio.run(live(events))
