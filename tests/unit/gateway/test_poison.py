"""One request ends every worker that computes it. The others must not pay for that for long."""

import random

import msgspec
import pytest

from everserve.gateway.streams.poison import MAX_LOSSES, may_run
from everserve.gateway.streams.stream import Stream, StreamBroken
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens
from tests.support.fleet_toy import Recorder, ToyFleet, ToyWorker, whole_stream, with_fleet

NUM_WORKERS, CAPACITY = 2, 40


def make_streams(*num_losses: int) -> list[Stream]:
    streams = [
        Stream(RequestSpec(id=str(i), prompt=as_tokens([1]), params=SamplingParams(max_tokens=1)), Recorder())
        for i in range(20)
    ]
    for stream, num in zip(streams, num_losses, strict=False):
        stream.num_losses = num
    return streams[: len(num_losses)]


def test_the_more_workers_they_have_lost_the_fewer_at_once():
    streams = make_streams(0, 2, 3, 8, 9, 5)
    assert may_run(streams, []) == [streams[i] for i in (0, 1, 2, 5)], "one runs: the others are not alone"
    assert may_run(streams[3:5], []) == [streams[3]]
    assert may_run(streams[3:5], make_streams(3)) == []
    assert may_run(make_streams(5), make_streams(*[5] * 7)) != []
    assert may_run(make_streams(5), make_streams(*[5] * 8)) == []
    assert len(may_run(make_streams(*[0] * 9), make_streams(*[5] * 8))) == 9


class Incident:
    """Workers that end when they are to compute the stream `poison`, and are replaced."""

    def __init__(self, toy: ToyFleet, poison: str) -> None:
        self.toy, self.poison = toy, poison
        self.seats: list[ToyWorker] = []
        self.num_deaths = 0

    async def begin(self) -> None:
        self.seats = [await self.toy.join(rank, max_num_seqs=CAPACITY) for rank in range(NUM_WORKERS)]

    async def turn(self, rank: int) -> None:
        worker = self.seats[rank]
        worker.receive()
        if self.poison in worker.tokens:
            worker.die()
            await self.toy.settle()
            self.toy.lose(worker, "crash")
            self.num_deaths += 1
            self.seats[rank] = await self.toy.join(rank, worker.incarnation + 1, max_num_seqs=CAPACITY)
        elif worker.tokens:
            worker.step()
        await self.toy.settle()


@pytest.mark.parametrize("num_streams", [1, 5, 64])
@pytest.mark.parametrize("seed", range(6))
def test_who_ends_its_workers_is_found_and_the_others_go_on(seed, num_streams):
    async def test(toy: ToyFleet) -> None:
        rng = random.Random(seed)
        poison = rng.randrange(num_streams)
        incident = Incident(toy, f"s{poison}")
        await incident.begin()
        for _ in range(num_streams):
            toy.submit(max_tokens=5)
        for _ in range(300):
            await incident.turn(rng.randrange(NUM_WORKERS))
        for i, stream in enumerate(toy.streams):
            if i == poison:
                (error,) = stream.listener.errors
                assert isinstance(error, StreamBroken) and "10 workers in a row" in str(error)
            else:
                assert not stream.listener.errors and stream.listener.tokens == whole_stream(stream.spec)
        assert incident.num_deaths == MAX_LOSSES
        assert [event for event in toy.kinds() if event == "stream_broke"] == ["stream_broke"]
        assert toy.fleet.num_streams == 0 and not toy.fleet.logs.unsettled

    with_fleet(test)


def test_who_is_told_may_cancel_the_others():
    """As a request with several choices does when one of them fails."""

    async def test(toy: ToyFleet) -> None:
        worker = await toy.join(0)
        toy.submit(n=3)
        for stream in toy.streams:
            stream.num_losses = MAX_LOSSES - 1
        first, *others = toy.streams
        first.listener.on_failure = lambda error: [toy.fleet.cancel(stream) for stream in others]
        worker.die()
        await toy.settle()
        assert toy.fleet.num_streams == 0 and not toy.fleet.logs.unsettled
        assert all(not stream.listener.errors for stream in others), "they were cancelled before"

    with_fleet(test)


def test_a_client_that_breaks_off_does_not_clear_its_request():
    async def test(toy: ToyFleet) -> None:
        worker = await toy.join(0)
        (recorder,) = toy.submit()
        (stream,) = toy.streams
        for i in range(MAX_LOSSES):
            toy.fleet.suspend(stream)
            stream.spec = msgspec.structs.replace(stream.spec, id=f"again-{i}")
            toy.fleet.resume([stream])
            await toy.settle()
            worker.die()
            await toy.settle()
            worker = await toy.join(0, incarnation=i + 2)
        assert len(recorder.errors) == 1 and f"{MAX_LOSSES} workers in a row" in str(recorder.errors[0])

    with_fleet(test)


def test_new_requests_are_served_meanwhile():
    async def test(toy: ToyFleet) -> None:
        incident = Incident(toy, "s0")
        await incident.begin()
        toy.submit()
        for rank in [0, 1] * 4:  # it is alone with its like
            await incident.turn(rank)
        toy.submit(max_tokens=1)
        for _ in range(30):
            await incident.turn(1)
            await incident.turn(0)
        assert toy.streams[1].listener.tokens == whole_stream(toy.streams[1].spec)

    with_fleet(test)
