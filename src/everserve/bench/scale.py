"""What does a client see while devices come and go?

Streams run side by side, and those that end begin again, while the instance is scaled from size to size. A size is a
number of devices with an attention and an expert worker each. Every change is told from its request until there are
exactly the workers that were asked for: how long it took, the largest gap of any stream in that time beside the gaps of
the stretch before, and tokens per second before and after.

Every stream is compared, token by token, with the same request on an instance that is not scaled: a benchmark that
loses tokens has failed.
"""

import asyncio
import contextlib
import gc
import http.client
import itertools
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from everserve.bench import analysis, kill, processes, report, scale_report
from everserve.bench.instance import Instance, flags_for
from everserve.bench.load import Ask, Load, make_asks
from everserve.bench.subject import BUNDLED, Subject, subject
from everserve.errors import ConfigError, EverserveError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress

_TIMEOUT_S = 300.0
_BIN_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    sizes: tuple[int, ...]
    num_streams: int
    max_tokens: int
    stay_s: float  # at each size
    shape: str = BUNDLED
    num_layers: int | None = None
    num_prompt: int = 32
    spares: int | None = None  # None, here and below: as the server does by itself
    kv_log: str | None = None

    def flags(self, served: Subject) -> tuple[str, ...]:
        first, most = self.sizes[0], max(self.sizes)
        flags = flags_for(
            served,
            num_attention=first,
            num_expert=first,
            num_streams=self.num_streams,
            longest=self.num_prompt + self.max_tokens,
            spares=self.spares,
            kv_log=self.kv_log,
        )
        return (*flags, "--devices", str(first), "--max-workers", str(2 * most))


@dataclass(frozen=True)
class Change:
    """From one size to the next, as clients saw it."""

    devices_before: int
    devices: int
    asked_s: float  # after the beginning of the load
    took_s: float  # until there were exactly the workers that were asked for
    largest_gap_ms: float  # of any stream, from the request until then
    gaps_before_ms: list[float]  # median, 99th percentile and largest, in the stretch before
    tokens_per_s_before: float
    tokens_per_s: float  # in the stretch after


@dataclass(frozen=True)
class Run:
    changes: list[Change]
    series: analysis.Series
    num_streams: int
    num_tokens: int
    num_wrong: int  # streams that lost a token or got a different one
    errors: list[str]


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every stream was exact."""
    with subject(settings.shape, settings.num_layers) as served:
        if settings.num_prompt + settings.max_tokens > served.max_context:
            raise ConfigError(f"--tokens {settings.max_tokens}: the context is {served.max_context}, prompt included")
        asks = make_asks(settings.num_streams, settings.num_prompt, settings.max_tokens, served.vocab_size)
        steal = report.Steal()
        found = _measure(settings, served, asks)
    result: dict[str, Any] = {"model": served.title, "settings": asdict(settings), **asdict(found)}
    result["stolen"] = steal.share()
    path = report.write("scale", result, out)
    scale_report.show(result, path)
    return not found.num_wrong and not found.errors


def _measure(settings: Settings, served: Subject, asks: list[Ask]) -> Run:
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    with contextlib.ExitStack() as stack:
        instance = stack.enter_context(contextlib.closing(Instance(served.model, settings.flags(served))))
        progress = stack.enter_context(Progress())
        progress.begin("scale", total=1 + len(settings.sizes))
        expected = kill.undisturbed(instance.server, asks)
        progress.advance()
        return kill.run(_scale_under_load(instance.server, settings, asks, expected, progress))


async def _scale_under_load(
    server: LocalServer, settings: Settings, asks: list[Ask], expected: list[list[int]], progress: Progress
) -> Run:
    await processes.wait_whole(server, timeout_s=_TIMEOUT_S)
    load = Load(server, asks)
    await load.flow()
    begin_s = time.perf_counter()
    marks: list[tuple[float, float]] = []  # of each change: asked, and done
    await asyncio.sleep(settings.stay_s)
    progress.advance()
    for size in settings.sizes[1:]:
        asked_s = time.perf_counter()
        await asyncio.to_thread(_ask, server, size)
        marks.append((asked_s, await _wait_for(server, size)))
        await asyncio.sleep(settings.stay_s)
        progress.advance()
    end_s = time.perf_counter()
    await load.finish()
    verdicts = load.verdicts(expected)
    return Run(
        changes=_changes(settings, load.arrivals_s, begin_s, marks),
        series=analysis.series(load.arrivals_s, begin_s, 0.0, end_s - begin_s, _BIN_S),
        num_streams=len(verdicts),
        num_tokens=sum(verdict.num_tokens for verdict in verdicts),
        num_wrong=sum(not verdict.is_exact for verdict in verdicts),
        errors=sorted({stream.error for streams in load.streams for stream in streams if stream.error}),
    )


def _changes(
    settings: Settings, arrivals_s: list[list[float]], begin_s: float, marks: list[tuple[float, float]]
) -> list[Change]:
    found = []
    calm_s = begin_s  # the end of the change before
    for (before, after), (asked_s, done_s) in zip(itertools.pairwise(settings.sizes), marks, strict=True):
        gaps = [analysis.largest_gap(stream, asked_s, done_s - asked_s) for stream in arrivals_s]
        quiet = sorted(gap for stream in arrivals_s for gap in analysis.gaps_between(stream, calm_s, asked_s))
        found.append(
            Change(
                devices_before=before,
                devices=after,
                asked_s=round(asked_s - begin_s, 3),
                took_s=round(done_s - asked_s, 3),
                largest_gap_ms=_ms(max((gap for gap in gaps if gap is not None), default=0.0)),
                gaps_before_ms=[_ms(quiet[int(share * (len(quiet) - 1))]) for share in (0.5, 0.99, 1.0)]
                if quiet
                else [],
                tokens_per_s_before=_rate(arrivals_s, calm_s, asked_s),
                tokens_per_s=_rate(arrivals_s, done_s, done_s + settings.stay_s),
            )
        )
        calm_s = done_s
    return found


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def _rate(arrivals_s: list[list[float]], begin_s: float, end_s: float) -> float:
    num_tokens = sum(begin_s < arrival <= end_s for stream in arrivals_s for arrival in stream)
    return round(num_tokens / (end_s - begin_s), 1)


def _ask(server: LocalServer, size: int) -> None:
    body = {"devices": size}
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=15.0)
    try:
        connection.request("POST", "/cluster/scale", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise EverserveError(f"the server does not scale to {body}: {text}")


async def _wait_for(server: LocalServer, size: int) -> float:
    """Until there are exactly these workers, all ready; returns when that was seen."""
    deadline = time.perf_counter() + _TIMEOUT_S
    while time.perf_counter() < deadline:
        view = await asyncio.to_thread(processes.cluster, server)
        roles = Counter(role for worker in view["workers"] for role in worker["roles"])
        if processes.is_whole(view) and roles == {"attention": size, "expert": size}:
            return time.perf_counter()
        await asyncio.sleep(0.02)
    raise EverserveError(f"the server has not scaled to {size} in {_TIMEOUT_S:.0f} s: {view}")
