"""What a server gives that is started anew with fewer devices: the baseline of those that go on with fewer."""

import asyncio
import contextlib
import time
from dataclasses import dataclass

from everserve_bench import analysis, kill
from everserve_bench.instance import Instance
from everserve_bench.load import Ask, Load

_DOWN_S = 0.5  # a load that has just begun is not steady


@dataclass(frozen=True)
class Restarted:
    """One server with so many devices."""

    num_devices: int
    restart_s: float  # from its start until each stream has its first token
    tokens_per_s: float
    num_tokens: int
    num_inexact: int


def measure(
    model: str, flags: tuple[str, ...], num_devices: int, asks: list[Ask], expected: list[list[int]], seconds: float
) -> Restarted:
    """Start it, give it all streams at once, and let them run for so long."""
    begin_s = time.perf_counter()
    with contextlib.closing(Instance(model, flags)) as instance:
        return kill.run(_measure(instance, num_devices, begin_s, asks, expected, seconds))


async def _measure(
    instance: Instance, num_devices: int, begin_s: float, asks: list[Ask], expected: list[list[int]], seconds: float
) -> Restarted:
    load = Load(instance.server, asks)
    await load.flow(num_tokens=1)
    first_s = max(streams[0].arrivals_s[0] for streams in load.streams)
    await asyncio.sleep(_DOWN_S + seconds)
    end_s = time.perf_counter()
    await load.finish()
    verdicts = load.verdicts(expected)
    return Restarted(
        num_devices=num_devices,
        restart_s=first_s - begin_s,
        tokens_per_s=analysis.rate(load.arrivals_s, end_s - seconds, end_s),
        num_tokens=sum(verdict.num_tokens for verdict in verdicts),
        num_inexact=sum(not verdict.is_exact for verdict in verdicts),
    )
