"""What do streams see while an instance that is divided over devices loses one after the other, and gets them back?

    N ──lose──> N - 1 ──lose──> ... ──lose──> fewest ──return──> ... ──return──> N

Under running streams, on one server, without a restart. Each change is told from its request until everything is where
it should be: pauses of streams, time until tokens/s are what they stay at, and how many seconds of work were lost. The
baseline, in the same run, is to start a new server with as many devices at each change.

Every stream is compared, token by token, with the same request undisturbed.
"""

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everserve.bench import analysis, decline_report, divided, kill, processes, report, restarted
from everserve.bench.declined import Stage, judge
from everserve.bench.instance import Instance
from everserve.bench.load import Ask, Load, make_asks
from everserve.bench.on_gpu import check_gpu
from everserve.bench.restarted import Restarted
from everserve.bench.subject import Subject, subject
from everserve.errors import ConfigError, EverserveError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress

_TIMEOUT_S = 300.0
_BIN_S = 0.25
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Settings(divided.Load):
    """What is measured; all of it goes into the JSON."""

    num_devices: int
    fewest: int
    stay_s: float  # at each number of devices
    has_baseline: bool

    @property
    def sizes(self) -> list[int]:
        """One after the other."""
        down = [*range(self.num_devices, self.fewest - 1, -1)]
        return [*down, *reversed(down[:-1])]


@dataclass(frozen=True)
class Run:
    """What clients saw, and what was compared."""

    stages: list[Stage]
    series: analysis.Series
    num_streams: int
    num_tokens: int
    num_wrong: int
    errors: list[str]


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every stream was exact."""
    check_gpu(settings.shape)
    if not 1 < settings.fewest < settings.num_devices:
        raise ConfigError(f"--fewest {settings.fewest}: between 2 and {settings.num_devices - 1}")
    with subject(settings.shape, settings.num_layers) as served:
        if settings.num_prompt + settings.max_tokens > served.max_context:
            raise ConfigError(f"--tokens {settings.max_tokens}: the context is {served.max_context}, prompt included")
        result: dict[str, Any] = {"model": served.title, "settings": asdict(settings)}
        for found, restarts in _measure(settings, served):
            result |= decline_report.summarize(found.stages, restarts)
            result |= {name: value for name, value in asdict(found).items() if name != "stages"}
            report.keep("decline", result, out)
    decline_report.show(result, report.write("decline", result, out))
    return decline_report.is_passed(result)


def _measure(settings: Settings, served: Subject) -> Iterator[tuple[Run, list[Restarted]]]:
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    asks = make_asks(settings.num_streams, settings.num_prompt, settings.max_tokens, served.vocab_size)
    sizes = range(settings.num_devices - 1, settings.fewest - 1, -1) if settings.has_baseline else ()
    restarts: list[Restarted] = []
    with Progress() as progress:
        progress.begin("decline", total=len(settings.sizes) + len(sizes))
        flags = settings.flags(served, settings.num_devices, settings.fewest)
        with contextlib.closing(Instance(served.model, flags)) as instance:
            expected = kill.undisturbed(instance.server, asks)
            progress.advance("undisturbed")
            found = kill.run(_decline(instance.server, settings, asks, expected, progress))
        yield found, restarts
        for num in sizes:
            flags = settings.flags(served, num, num)
            restarts.append(restarted.measure(served.model, flags, num, asks, expected, settings.stay_s))
            progress.advance(f"a new server with {num} devices")
            yield found, restarts


async def _decline(
    server: LocalServer, settings: Settings, asks: list[Ask], expected: list[list[int]], progress: Progress
) -> Run:
    await processes.wait_whole(server, timeout_s=_TIMEOUT_S)
    load = Load(server, asks)
    await load.flow()
    begin_s = time.perf_counter()
    marks: list[tuple[float, float]] = []  # of each change: asked, and settled
    await asyncio.sleep(settings.stay_s)
    for before, size in itertools.pairwise(settings.sizes):
        asked_s = time.perf_counter()
        await change(server, max(before, size) - 1, is_lost=size < before)
        marks.append((asked_s, await wait_settled(server, size)))
        await asyncio.sleep(settings.stay_s)
        progress.advance(f"{before} -> {size}")
    end_s = time.perf_counter()
    await load.finish()
    verdicts = load.verdicts(expected)
    return Run(
        stages=judge(settings.sizes, load.arrivals_s, begin_s, marks, end_s),
        series=analysis.series(load.arrivals_s, begin_s, 0.0, end_s - begin_s, _BIN_S),
        num_streams=len(verdicts),
        num_tokens=sum(verdict.num_tokens for verdict in verdicts),
        num_wrong=sum(not verdict.is_exact for verdict in verdicts),
        errors=sorted({stream.error for streams in load.streams for stream in streams if stream.error}),
    )


async def change(server: LocalServer, device: int, *, is_lost: bool) -> None:
    """A device is gone, or comes back."""
    path, body = ("/cluster/fault", {"device": device, "gone": True}) if is_lost else ("/cluster/return", {})
    await asyncio.to_thread(processes.post, server, path, {"device": device, **body})


async def wait_settled(server: LocalServer, num_devices: int) -> float:
    """Until so many devices serve, everything has its place and nothing moves; returns when that was seen."""
    deadline = time.perf_counter() + _TIMEOUT_S
    while time.perf_counter() < deadline:
        view = await asyncio.to_thread(processes.cluster, server)
        if is_settled(view, num_devices):
            return time.perf_counter()
        await asyncio.sleep(_LOOK_EVERY_S)
    raise EverserveError(f"not settled on {num_devices} devices in {_TIMEOUT_S:.0f} s: {view}")


def is_settled(view: dict[str, Any], num_devices: int) -> bool:
    """All workers but those of devices that are gone are ready."""
    gone = {rank for device in view["devices"] if device["state"] == "gone" for rank in device["workers"]}
    are_ready = all(worker["state"] == "ready" for worker in view["workers"] if worker["rank"] not in gone)
    has_moved = not view["violations"] and not view["moves"] and not any(view["conditions"].values())
    num_serving = sum(device["state"] == "serving" for device in view["devices"])
    return are_ready and has_moved and num_serving == num_devices
