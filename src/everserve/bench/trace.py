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
import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everserve.bench import (
    analysis,
    availability,
    decline,
    divided,
    kill,
    processes,
    report,
    restarted,
    trace_report,
)
from everserve.bench.availability import Point
from everserve.bench.instance import Instance
from everserve.bench.load import Ask, Load, make_asks
from everserve.bench.on_gpu import check_gpu, is_for_gpu
from everserve.bench.restarted import Restarted
from everserve.bench.subject import Subject, subject
from everserve.bench.traced import Node
from everserve.errors import ConfigError, EverserveError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress

_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Settings(divided.Load):
    """What is measured; all of it goes into the JSON."""

    num_devices: int  # of a node
    fewest: int  # with which a node can serve
    num_nodes: int  # of those that the trace has
    seconds: float  # in which each node's history is served
    warm_s: float  # without losses before that
    width_s: float  # of bins of time
    seed: int


@dataclass
class Found:
    """So far."""

    fault_free: list[float] = field(default_factory=list)  # tokens/s before each node's first loss
    nodes: list[Node] = field(default_factory=list)
    degrees: list[Restarted] = field(default_factory=list)


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every stream was exact."""
    check_gpu(settings.shape)
    if availability.NUM_INSTANCES % settings.num_devices:
        raise ConfigError(f"--devices {settings.num_devices}: nodes of the trace have 2, 4, 8, 16 or 32")
    trace = availability.read()
    histories = availability.nodes(trace, settings.num_devices, settings.seed)[: settings.num_nodes]
    if settings.num_nodes > len(histories):
        raise ConfigError(
            f"--nodes {settings.num_nodes}: with {settings.num_devices} devices there are {len(histories)}"
        )
    whole_s = trace[-1][0]
    points = [availability.compress(one, whole_s, settings.seconds, settings.num_devices) for one in histories]
    with subject(settings.shape, settings.num_layers) as served:
        if settings.num_prompt + settings.max_tokens > served.max_context:
            raise ConfigError(f"--tokens {settings.max_tokens}: the context is {served.max_context}, prompt included")
        result: dict[str, Any] = {
            "model": served.title,
            "settings": asdict(settings),
            "compressed": whole_s / settings.seconds,
            "is_on_gpu": is_for_gpu(settings.shape),
        }
        for found in _measure(settings, served, points):
            result |= trace_report.summarize(settings, found)
            report.keep("trace", result, out)
    trace_report.show(result, report.write("trace", result, out))
    return trace_report.is_passed(result)


def _measure(settings: Settings, served: Subject, histories: list[list[Point]]) -> Iterator[Found]:
    """The degrees last: they are servers of their own."""
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    asks = make_asks(settings.num_streams, settings.num_prompt, settings.max_tokens, served.vocab_size)
    found = Found()
    sizes = {len(point.devices) for points in histories for point in points}
    sizes |= {1 << (size.bit_length() - 1) for size in sizes if size}
    wanted = sorted((size for size in sizes if size >= max(settings.fewest, 2)), reverse=True)
    with Progress() as progress:
        progress.begin("trace", total=len(histories) + len(wanted))
        flags = settings.flags(served, settings.num_devices, settings.fewest)
        with contextlib.closing(Instance(served.model, flags)) as instance:
            expected = kill.undisturbed(instance.server, asks)
            for points in histories:
                rate, node = kill.run(_serve(instance.server, settings, points, asks, expected))
                found.fault_free.append(rate)
                found.nodes.append(node)
                progress.advance(f"{node.num_changes} changes")
                yield found
        for size in wanted:
            flags = settings.flags(served, size, size)
            found.degrees.append(restarted.measure(served.model, flags, size, asks, expected, settings.warm_s))
            progress.advance(f"a new server with {size} devices")
            yield found


async def _serve(
    server: LocalServer, settings: Settings, points: list[Point], asks: list[Ask], expected: list[list[int]]
) -> tuple[float, Node]:
    """Tokens/s before the first loss, and one node's history."""
    await processes.wait_whole(server, timeout_s=_TIMEOUT_S)
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
    await processes.wait_whole(server, timeout_s=_TIMEOUT_S)
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


def _down(points: list[Point], settings: Settings) -> Iterator[float]:
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
    """As an operator does it: once more, if the orchestrator was just busy with another loss."""
    for _ in range(20):
        try:
            await decline.change(server, device, is_lost=is_lost)
        except EverserveError as error:
            last = error
            await asyncio.sleep(0.1)
        else:
            return
    raise last
