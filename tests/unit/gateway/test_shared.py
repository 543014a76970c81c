"""What many ask for at once: a few requests begin in each turn of the event loop, and each answer is written once."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from everserve.gateway.api.exposition import Metrics
from everserve.gateway.api.views import Views
from everserve.gateway.http.shared import Shared
from everserve.gateway.http.slices import Slices
from everserve.gateway.http.turns import Turns
from everserve.gateway.observe import prometheus_text
from everserve.tables.ids import Rank
from everserve.tables.slots import Fill
from everserve.wire.events import ProcessStarted
from tests.support.gateway_toy import ToyServer, member, settle, toy_server, until
from tests.unit.gateway.test_experts import change


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


class Watch:
    """How much of something happens between two turns of the event loop at most."""

    def __init__(self) -> None:
        self.most = self.num = 0
        self._task = asyncio.ensure_future(self._run())

    def note(self) -> None:
        self.num += 1

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.most, self.num = max(self.most, self.num), 0

    def end(self) -> int:
        self._task.cancel()
        return self.most


def test_a_few_in_each_turn_in_the_order_in_which_they_come() -> None:
    async def test() -> None:
        turns, done, watch = Turns(num_per_turn=3), [], Watch()
        await settle()

        def call(number: int) -> None:
            def what() -> None:
                done.append(number)
                watch.note()

            turns.call(what)

        call(0)
        assert done == [0], "at once while there are few"
        for number in range(1, 50):
            call(number)
        await turns.wait()
        assert done == list(range(50)), "who waits comes after those before it"
        await settle()
        call(50)
        assert done[-1] == 50 and watch.end() == 3

    run(test)


class Paper:
    """A shared answer of ten pieces, each of which takes a second by the clock of the test."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.watch = Watch()
        self.began_s: list[float] = []
        self.shared = Shared(self.write, Slices(), Turns(), lambda: self.now_s)

    def write(self) -> Iterator[bytes]:
        self.began_s.append(self.now_s)
        for number in range(10):
            self.now_s += 0.001
            self.watch.note()
            yield b"%d." % number


def test_all_who_ask_before_it_is_written_get_the_same_bytes() -> None:
    async def test() -> None:
        paper = Paper()
        first = asyncio.ensure_future(paper.shared.get())
        await until(lambda: paper.began_s != [])
        others = [asyncio.ensure_future(paper.shared.get()) for _ in range(200)]
        assert await first == b"0.1.2.3.4.5.6.7.8.9."
        for _ in range(10):
            await asyncio.sleep(0)
        assert paper.shared.num_written == 1, "it rests"
        paper.now_s += 1.0
        answers = await asyncio.gather(*others)
        assert len({id(answer) for answer in answers}) == 1 and paper.shared.num_written == 2
        assert paper.watch.end() == 1, "one slice in each turn"

    run(test)


def test_between_two_of_them_is_nine_times_as_much_but_not_more_than_a_quarter_of_a_second() -> None:
    async def test() -> None:
        paper, rests = Paper(), []

        async def sleep(seconds: float, plain: Any = asyncio.sleep) -> None:
            if seconds:
                rests.append(seconds)
                paper.now_s += seconds
            await plain(0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio, "sleep", sleep)
            for _ in range(3):
                await paper.shared.get()
            paper.now_s += 0.05
            await paper.shared.get()
        assert rests == pytest.approx([0.09, 0.09, 0.04])
        paper.watch.end()

    run(test)


def test_a_bug_in_writing_is_for_those_who_asked() -> None:
    async def test() -> None:
        shared = Shared(lambda: [b"a"], Slices(), Turns())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared, "_write", lambda: [b"%d" % (1 // 0)])
            failed = [asyncio.ensure_future(shared.get()) for _ in range(3)]
            assert [type(one) for one in await asyncio.gather(*failed, return_exceptions=True)] == [
                ZeroDivisionError
            ] * 3
        assert await shared.get() == b"a"

    run(test)


def test_a_client_that_leaves_while_it_waits() -> None:
    async def test() -> None:
        shared = Shared(lambda: [b"a"], Slices(), Turns())
        gone, there = (asyncio.ensure_future(shared.get()) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        assert await there == b"a" and await shared.get() == b"a"

    run(test)


# -- the gateway ---------------------------------------------------------------------------------

SHARED = {
    "/metrics": "metrics",
    "/cluster": "cluster",
    "/cluster/experts": "experts",
    "/cluster/experts?form=map": "experts_map",
}


async def with_experts(server: ToyServer) -> Views:
    server.orchestrator.channel.send(change(8.0, 2.0, 0.0, 5.04))
    server.orchestrator.publish(member(0), moves={Rank(4): (Fill(1, 3, 0),) * 1000})
    await until(lambda: server.gateway.cluster.num_moves == 1000)
    return server.app.state.views


@pytest.mark.parametrize("path", SHARED)
def test_many_who_ask_cost_as_much_as_one(path: str) -> None:
    async def test() -> None:
        async with toy_server() as server:
            shared: Shared = getattr(await with_experts(server), SHARED[path])
            answers = await asyncio.gather(*(server.request("GET", path) for _ in range(100)))
            assert {answer.status for answer in answers} == {200} and len({answer.body for answer in answers}) == 1
            assert shared.num_written == 1

    run(test)


def test_an_answer_is_not_older_than_its_question() -> None:
    async def test() -> None:
        async with toy_server() as server:
            for epoch in range(2, 6):
                server.orchestrator.publish(member(0))
                await until(lambda epoch=epoch: server.gateway.cluster.epoch == epoch)
                assert (await server.request("GET", "/cluster")).json["epoch"] == epoch
                metrics = (await server.request("GET", "/metrics")).body
                assert b"\neverserve_epoch %d.0\n" % epoch in metrics

    run(test)


def test_large_views_are_written_in_slices() -> None:
    async def test() -> None:
        async with toy_server() as server:
            views = await with_experts(server)
            cluster = server.gateway.cluster
            for shared, least in ((views.cluster, 1 + 2 + 2), (views.experts, 1 + 2 + 2), (views.metrics, 60)):
                before = server.gateway.slices.num_done
                await shared.get()
                assert server.gateway.slices.num_done - before >= least
            assert max(piece.count(b"\n") for piece in Metrics(server.gateway).pieces()) <= 65
            assert len((await server.request("GET", "/cluster")).json["moves"]) == 1000 == len(cluster.view().moves)

    run(test)


def test_watchers_in_the_same_place_get_the_same_bytes() -> None:
    """The dashboard's news are written once for all of them, and given to a few in each turn."""

    async def test() -> None:
        async with toy_server() as server:
            live, written = server.gateway.live, []
            plain = live._news
            live._news = lambda *position: written.append(position) or plain(*position)  # type: ignore[method-assign]
            begun = [server.begin("GET", "/cluster/live") for _ in range(40)]
            await until(lambda: all(answer.body.endswith(b"\n\n") for _, answer, _ in begun))
            assert len(written) == 1
            watch = Watch()
            for _ in range(3):
                live.tick(1000.0)
                before, sizes = len(written), [len(answer.body) for _, answer, _ in begun]
                await until(lambda sizes=sizes: all(len(one[1].body) > n for one, n in zip(begun, sizes, strict=True)))
                assert len(written) - before == 1
            watch.end()
            assert len({answer.body for _, answer, _ in begun}) == 1
            for task, _, gone in begun:
                gone.set()
                await asyncio.wait_for(task, 5)

    run(test)


@pytest.mark.parametrize("path", ["/events", "/cluster/live"])
def test_readers_are_sent_what_is_new_a_few_in_each_turn(path: str) -> None:
    async def test() -> None:
        async with toy_server() as server:
            begun = [server.begin("GET", path) for _ in range(40)]
            server.gateway.feed.publish(ProcessStarted(process="supervisor", child="x", child_pid=1))
            await until(lambda: all(answer.body.endswith(b"\n\n") for _, answer, _ in begun))
            sizes = [len(answer.body) for _, answer, _ in begun]
            server.gateway.feed.publish(ProcessStarted(process="supervisor", child="y", child_pid=2))
            server.gateway.live.tick(1000.0)
            told, most = 0, 0
            while told < len(begun):
                await asyncio.sleep(0)
                now = sum(len(answer.body) > size for (_, answer, _), size in zip(begun, sizes, strict=True))
                told, most = now, max(most, now - told)
            assert most <= 4
            for task, _, gone in begun:
                gone.set()
                await asyncio.wait_for(task, 5)

    run(test)


def test_the_text_is_what_the_clients_own_function_writes() -> None:
    gauge = GaugeMetricFamily("a:b", 'A "gauge"\nof two \\ lines.', labels=["x", "b"])
    gauge.add_metric(['1"\\\n', "é"], 1.5)
    gauge.add_metric(["1", ""], float("inf"))
    histogram = HistogramMetricFamily("h", "H.", labels=["engine"])
    for engine in map(str, range(50)):
        histogram.add_metric([engine], buckets=[("1.0", 2.0), ("+Inf", 1e7)], sum_value=0.1)
    families = [
        gauge,
        histogram,
        CounterMetricFamily("c", "C.", value=3),
        CounterMetricFamily("d_total", "D.", labels=["z"]),
    ]

    class Families:
        def collect(self) -> Any:
            return families

    registry = CollectorRegistry()
    registry.register(Families())  # type: ignore[arg-type]
    pieces = list(prometheus_text.pieces(families))
    assert b"".join(pieces) == generate_latest(registry) and len(pieces) > len(families)
