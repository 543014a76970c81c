"""Random lives of a fleet: clients come and leave, workers join, work, die, hang, wake up and lie.

Whatever happens, each client sees the tokens 0..n-1 of its stream, each once, in order and with the right values; and
once things calm down, every client that stayed has its whole stream.
"""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.fleet_toy import Recorder, ToyFleet, ToyWorker, whole_stream

NUM_RANKS = 3
numbers = st.integers(0, 30)
events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 12), st.integers(1, 5)),
        st.tuples(st.just("submit"), st.integers(1, 12), st.just(1)),
        st.tuples(st.just("cancel"), numbers),
        st.tuples(st.just("join"), st.integers(0, NUM_RANKS - 1), st.booleans()),
        st.tuples(st.just("ready"), numbers),
        st.tuples(st.just("step"), numbers, st.sets(numbers, max_size=3)),
        st.tuples(st.just("step"), numbers, st.just(set())),
        st.tuples(st.just("die"), numbers),
        st.tuples(st.just("lose"), numbers),
        st.tuples(st.just("wake"), numbers),
        st.tuples(st.just("settle")),
    ),
    min_size=5,
    max_size=60,
)


class Life:
    """One random life. Who is lost becomes a liar: nothing that it says from then on may reach a client."""

    def __init__(self) -> None:
        self.toy = ToyFleet(max_queue=60)
        self.alive: list[ToyWorker] = []  # processes, lost ones included
        self.lost: set[ToyWorker] = set()
        self.cancelled: set[int] = set()
        self.incarnations = [0] * NUM_RANKS

    def act(self, event: tuple) -> None:
        kind, *arguments = event
        toy = self.toy
        worker = self.alive[arguments[0] % len(self.alive)] if self.alive and arguments else None
        if kind == "submit":
            if toy.fleet.num_streams + arguments[1] <= toy.fleet.max_queue and toy.fleet.limits is not None:
                toy.submit(max_tokens=arguments[0], n=arguments[1])
        elif kind == "cancel" and toy.streams:
            index = arguments[0] % len(toy.streams)
            recorder = toy.streams[index].listener
            if recorder.finish_reason is None:
                self.cancelled.add(index)
                toy.cancel(index)
        elif kind == "join":
            self.join(*arguments)
        elif worker is not None:
            self.act_of(kind, worker, *arguments[1:])

    def act_of(self, kind: str, worker: ToyWorker, ids: frozenset[int] = frozenset()) -> None:
        if kind == "ready" and worker not in self.lost:
            worker.say_ready()
        elif kind == "step" and worker not in self.lost:
            worker.step(*(f"s{i}" for i in ids))
        elif kind == "wake" and worker in self.lost:
            worker.step()
        elif kind == "lose":
            self.mark_lost(worker)
            self.toy.lose(worker)
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
            worker.say_ready()

    def mark_lost(self, worker: ToyWorker) -> None:
        worker.is_liar = True
        self.lost.add(worker)

    def check(self) -> None:
        """What holds at every moment."""
        fleet = self.toy.fleet
        for link in fleet.ready_links():
            running = [stream for stream in self.toy.streams if stream.link is link]
            assert len(running) == len(link.streams) <= link.capacity
            assert link.streams.num_owed == sum(stream.num_owed for stream in running)
        open_streams = [stream for stream in self.toy.streams if is_open(stream.listener)]
        waiting = [
            stream
            for i, stream in enumerate(self.toy.streams)
            if is_open(stream.listener) and stream.link is None and i not in self.cancelled
        ]
        assert len(waiting) == fleet.num_waiting
        assert fleet.num_streams == len(open_streams) - sum(
            is_open(self.toy.streams[i].listener) for i in self.cancelled
        )
        for stream in self.toy.streams:
            assert stream.listener.tokens == whole_stream(stream.spec)[: len(stream.listener.tokens)]
            assert not stream.listener.errors

    async def calm_down(self) -> None:
        """One healthy worker is there until the end."""
        for worker in list(self.alive):
            self.mark_lost(worker)
            self.toy.lose(worker)
        self.incarnations[0] += 1
        last = await self.toy.join(0, self.incarnations[0])
        for _ in range(2000):
            if not self.toy.fleet.num_streams:
                return
            last.step()
            await self.toy.settle()
        raise AssertionError("somebody starves")


def is_open(recorder: Recorder) -> bool:
    return recorder.finish_reason is None and not recorder.errors


async def live(events: list[tuple]) -> None:
    life = Life()
    try:
        life.join(0, True)
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
        for i, stream in enumerate(life.toy.streams):
            if i not in life.cancelled:
                assert stream.listener.tokens == whole_stream(stream.spec)
                assert stream.listener.finish_reason == "length"
    finally:
        await life.toy.close()


@settings(max_examples=150, deadline=None)
@given(events)
def test_every_client_sees_its_stream_exactly_once(events):
    asyncio.run(live(events))
