"""What does an instance that is divided over devices give, while devices come and go as they did in a real cloud?

The trace of 64 spot A100s (availability.py), compressed in time: real losses and returns of devices of one server,
under running streams, every one of which is compared with the undisturbed run. The same instance serves one node of the
trace after the other: their sum is an emulation, and the output says so.

    measured         this server
    fault-free       the same server before the first loss
    fault-scaled     that, times the share of devices that are there: what no system can exceed if devices are all
    powers of two    derived from new servers with 1, 2, 4, ... devices, measured in the same run; changes are free
    restarts         derived: a new server at each change, as long as that takes, then what it gives
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, ClassVar

from everserve.config.base import Flag
from everserve.config.cluster import MAX_RANKS
from everserve.errors import ConfigError, EverserveError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import analysis, availability, divided, kill, options, processes, restarted, traced
from everserve_bench.availability import Point
from everserve_bench.divided import Divided
from everserve_bench.instance import Instance
from everserve_bench.load import Ask, Load
from everserve_bench.restarted import Restarted
from everserve_bench.scenario import Result
from everserve_bench.subject import Subject, is_for_gpu
from everserve_bench.tables import Table, bars, exactness, text
from everserve_bench.traced import Node

_TITLES = {
    "measured": "measured",
    "fault_free": "fault-free (measured before the first loss)",
    "fault_scaled": "fault-scaled (derived: times the share of devices)",
    "powers_of_two": "powers of two (derived from new servers)",
    "restarts": "restart at each change (derived from new servers)",
}
_SHARED_CORES = (
    "On CPUs all workers share the cores, so tokens/s hardly depend on the number of devices: fault-scaled is no bound"
    " there, and what counts are exactness and gaps."
)
_WAYS = [
    ("", text("title")),
    ("tokens/s, mean", text("mean", ",.0f")),
    ("of fault-scaled", text("share", ".0%")),
    ("over time", text("bars")),
]
_DEGREES = [
    ("devices", text("num_devices")),
    ("until every stream has a token, s", text("restart_s", ".2f")),
    ("tokens/s", text("tokens_per_s", ",.0f")),
]


@dataclass
class Found:
    """So far."""

    fault_free: list[float] = field(default_factory=list)  # tokens/s before each node's first loss
    nodes: list[Node] = field(default_factory=list)
    degrees: list[Restarted] = field(default_factory=list)


class Trace(Divided, frozen=True, kw_only=True):
    """Devices come and go as in a trace of spot A100s. Compressed in time; tokens/s beside four other ways to serve it.

    Exit status 1 if a stream lost a token or got a different one.
    """

    NAME: ClassVar[str] = "trace"

    num_devices: Annotated[
        int, Flag("Devices of a node: 2, 4, 8, 16 or 32.", name="devices", min=2, max=MAX_RANKS // 2)
    ] = 8
    fewest: Annotated[int, Flag("Devices that a node needs to serve.", min=2)] = 2
    num_nodes: Annotated[int, Flag("How many nodes of the trace, one after the other.", name="nodes", min=1)] = 1
    seconds: Annotated[float, Flag("In which each node's 27 hours are served.", min=5)] = 120.0
    warm_s: Annotated[float, Flag("Seconds without losses before that.", min=1)] = 5.0
    width_s: Annotated[float, Flag("Tokens/s are told in bins of so many seconds.", name="bin_s", min=0.1)] = 1.0
    seed: Annotated[int, Flag("Which instances end and begin.", min=0)] = 0
    kv_log: Annotated[str | None, options.KV_LOG] = None

    def check(self) -> None:
        if availability.NUM_INSTANCES % self.num_devices:
            raise ConfigError(f"--devices {self.num_devices}: nodes of the trace have 2, 4, 8, 16 or 32")
        there = availability.NUM_INSTANCES // self.num_devices
        if self.num_nodes > there:
            raise ConfigError(f"--nodes {self.num_nodes}: with {self.num_devices} devices there are {there}")

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        trace = availability.read()
        whole_s = trace[-1][0]
        histories = availability.nodes(trace, self.num_devices, self.seed)[: self.num_nodes]
        points = [availability.compress(one, whole_s, self.seconds, self.num_devices) for one in histories]
        how = {"compressed": whole_s / self.seconds, "is_on_gpu": is_for_gpu(self.shape)}
        for found in self._serve_all(served, points, progress):
            yield how | summarize(self, found)

    def _serve_all(self, served: Subject, histories: list[list[Point]], progress: Progress) -> Iterator[Found]:
        """The degrees last: they are servers of their own."""
        asks = self.asks(served)
        found = Found()
        sizes = {len(point.devices) for points in histories for point in points}
        sizes |= {1 << (size.bit_length() - 1) for size in sizes if size}
        wanted = sorted((size for size in sizes if size >= max(self.fewest, 2)), reverse=True)
        progress.begin(self.NAME, total=len(histories) + len(wanted))
        flags = self.flags(served, self.num_devices, self.fewest, self.kv_log)
        with contextlib.closing(Instance(served.model, flags)) as instance:
            expected = kill.undisturbed(instance.server, asks)
            for points in histories:
                rate, node = kill.run(_serve(instance.server, self, points, asks, expected))
                found.fault_free.append(rate)
                found.nodes.append(node)
                progress.advance(f"{node.num_changes} changes")
                yield found
        for size in wanted:
            flags = self.flags(served, size, size, self.kv_log)
            found.degrees.append(restarted.measure(served.model, flags, size, asks, expected, self.warm_s))
            progress.advance(f"a new server with {size} devices")
            yield found

    @staticmethod
    def is_passed(result: Result) -> bool:
        return not result["num_wrong"] and not result["errors"]

    @staticmethod
    def show(result: Result) -> Iterator[Table | str]:
        settings, num_nodes = result["settings"], len(result["nodes"])
        how = f"a trace of spot A100s, {result['compressed']:,.0f} times as fast"
        title = f"{result['model']}: {how}; {num_nodes} node(s) of {settings['num_devices']} devices"
        yield Table(title, _WAYS, [_way(name, result) for name in _TITLES])
        yield Table("New servers, measured in the same run", _DEGREES, result["degrees"])
        if num_nodes > 1:
            yield f"{num_nodes} nodes are emulated: one instance has served the history of one after the other."
        hours = result["compressed"] * settings["seconds"] / 3600
        yield f"Time is compressed, starts and repairs are not: {settings['seconds']:g} s stand for {hours:.0f} hours."
        if result["num_down_s"]:
            yield (
                f"For {result['num_down_s']:.1f} s of the histories fewer than {settings['fewest']} devices were there:"
                " the server kept that many, and what it gave then does not count."
            )
        if not result["is_on_gpu"]:
            yield _SHARED_CORES
        gap = f"largest gap of any stream: {result['largest_gap_ms']:,.0f} ms"
        yield f"{result['num_changes']} losses and returns; {gap}"
        yield from exactness(result)


def _way(name: str, result: Result) -> Result:
    mean, most = result["means"][name], result["means"]["fault_scaled"]
    over_time = bars(result["ways"][name]).partition(" ")[0]
    return {"title": _TITLES[name], "mean": mean, "share": mean / most if most else None, "bars": over_time}


def summarize(settings: Trace, found: Found) -> Result:
    """Over all nodes together, bin by bin."""
    width_s = settings.width_s
    degrees = {one.num_devices: one for one in found.degrees}
    nodes = [
        traced.ways(node.points, node.tokens_per_s, rate, settings.num_devices, settings.fewest, degrees, width_s)
        for node, rate in zip(found.nodes, found.fault_free, strict=True)
    ]
    all_nodes = traced.together(nodes)
    means = {name: round(traced.mean(getattr(all_nodes, name)), 1) for name in _TITLES}
    return {
        "ways": asdict(all_nodes),
        "means": means,
        "of_fault_scaled": means["measured"] / means["fault_scaled"] if means["fault_scaled"] else None,
        "degrees": [asdict(one) for one in found.degrees],
        "nodes": [
            {**asdict(node), "points": [[point.at_s, sorted(point.devices)] for point in node.points]}
            for node in found.nodes
        ],
        "num_changes": sum(node.num_changes for node in found.nodes),
        "num_down_s": sum(node.num_down_s for node in found.nodes),
        "largest_gap_ms": max(node.largest_gap_ms for node in found.nodes),
        "num_streams": sum(node.num_streams for node in found.nodes),
        "num_tokens": sum(node.num_tokens for node in found.nodes),
        "num_wrong": sum(node.num_wrong for node in found.nodes) + sum(one.num_inexact for one in found.degrees),
        "errors": sorted({error for node in found.nodes for error in node.errors}),
    }


async def _serve(
    server: LocalServer, settings: "Trace", points: list[Point], asks: list[Ask], expected: list[list[int]]
) -> tuple[float, Node]:
    """Tokens/s before the first loss, and one node's history."""
    await processes.wait_whole(server, timeout_s=divided.TIMEOUT_S)
    load = Load(server, asks)
    await load.flow()
    await asyncio.sleep(settings.warm_s)
    begin_s = time.perf_counter()
    served = availability.held_up(points, settings.fewest)
    there = served[0].devices
    num_changes = 0
    for point in served[1:]:
        await asyncio.sleep(begin_s + point.at_s - time.perf_counter())
        num_changes += await _become(server, there, point.devices)
        there = point.devices
    await asyncio.sleep(begin_s + settings.seconds - time.perf_counter())
    end_s = time.perf_counter()
    await _become(server, there, served[0].devices)
    await processes.wait_whole(server, timeout_s=divided.TIMEOUT_S)
    await load.finish()
    verdicts = load.verdicts(expected)
    series = analysis.series(load.arrivals_s, begin_s, 0.0, settings.seconds, settings.width_s)
    gaps = [gap for arrivals in load.arrivals_s for gap in analysis.gaps_between(arrivals, begin_s, end_s)]
    return analysis.rate(load.arrivals_s, begin_s - settings.warm_s, begin_s), Node(
        points=points,
        num_down_s=sum(_down(points, settings)),
        tokens_per_s=series.tokens_per_s,
        num_changes=num_changes,
        largest_gap_ms=round(1e3 * max(gaps, default=0.0), 1),
        num_streams=len(verdicts),
        num_tokens=sum(verdict.num_tokens for verdict in verdicts),
        num_wrong=sum(not verdict.is_exact for verdict in verdicts),
        errors=sorted({stream.error for streams in load.streams for stream in streams if stream.error}),
    )


def _down(points: list[Point], settings: "Trace") -> Iterator[float]:
    """Stretches in which the node has too few devices."""
    ends = [*(point.at_s for point in points[1:]), settings.seconds]
    for point, end_s in zip(points, ends, strict=True):
        if len(point.devices) < settings.fewest:
            yield end_s - point.at_s


async def _become(server: LocalServer, before: frozenset[int], after: frozenset[int]) -> int:
    """Devices come first, then those that go are lost all at once. Returns how many changed."""
    for device in sorted(after - before):
        await _insist(server, device, is_lost=False)
    await asyncio.gather(*(_insist(server, device, is_lost=True) for device in sorted(before - after)))
    return len(before ^ after)


async def _insist(server: LocalServer, device: int, *, is_lost: bool) -> None:
    """Ask until it is done, as an operator would: the orchestrator may be busy with another loss."""
    for _ in range(20):
        try:
            await divided.change(server, device, is_lost=is_lost)
        except EverserveError as error:
            last = error
            await asyncio.sleep(0.1)
        else:
            return
    raise last
