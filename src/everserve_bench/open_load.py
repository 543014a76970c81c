"""What does a client see at rising rates of requests, with the protections on and off, and while workers die?

An *open* load: requests come at random times at a given rate, however busy the server is, with lengths from a public
trace (traces.py). So queues grow when the rate is more than the server can take, and the time to the first token says
so. Each rate is measured on every variant, one variant after the other, with the same requests at the same times:

    protected       2+2 workers as `everserve serve` starts them
    unprotected     the same without detection, shadows and KV log
    under kills     the protected server, of which a worker of each kind is killed once a minute, the first after a
                    quarter of that time

All variants get the same requests, so their tokens must be the same: a stream that differs is counted.
"""

import asyncio
import contextlib
import gc
import itertools
import os
import random
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everserve.client import Stream
from everserve.errors import ConfigError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import kill, open_load_report, processes, report
from everserve_bench.instance import Instance, flags_for
from everserve_bench.load import Ask
from everserve_bench.subject import BUNDLED, Subject, subject
from everserve_bench.traces import Arrival, poisson, read, scaled

PROTECTED, UNPROTECTED, UNDER_KILLS = "protected", "unprotected", "under kills"
VARIANTS = (PROTECTED, UNPROTECTED, UNDER_KILLS)
_OFF = ("--detect-ms", "0", "--shadow-experts", "0", "--kv-log", "off")
_SHARES = (0.5, 0.95, 0.99)
_DRAIN_S = 300.0  # most time for the requests that are left when the last has come
_WHOLE_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    rates: tuple[float, ...]  # requests per second
    duration_s: float  # of each rate on each variant
    trace: str
    scale: float  # of all lengths
    variants: tuple[str, ...]
    kill_every_s: float
    num_attention: int = 2
    num_expert: int = 2
    shape: str = BUNDLED
    num_layers: int | None = None
    serve: tuple[str, ...] = ()  # more flags of the servers
    max_seqs: int = 128


@dataclass(frozen=True)
class Point:
    """One variant at one rate. Percentiles are the median, 95th and 99th, in milliseconds."""

    variant: str
    per_s: float
    num_requests: int
    num_refused: int  # the queue was full
    num_failed: int
    num_kills: int
    first_token_ms: list[float]
    between_tokens_ms: list[float]
    tokens_per_s: float  # of answers, from the first request to the last token
    drained_s: float  # from the last request to the last token


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether all variants answered the same tokens."""
    unknown = [name for name in settings.variants if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"--variant {unknown[0]!r}: choose from {', '.join(map(repr, VARIANTS))}")
    steal = report.Steal()
    with subject(settings.shape, settings.num_layers) as served:
        lengths = scaled(read(settings.trace), settings.scale, served.max_context)
        longest = max(one.num_prompt + one.num_output for one in lengths)
        gc.collect()
        gc.freeze()  # this process measures arrival times: no long collections in between
        points: list[Point] = []
        num_different = 0
        with Progress() as progress:
            progress.begin("load", total=len(settings.rates) * len(settings.variants))
            for i, per_s in enumerate(settings.rates):
                arrivals = poisson(lengths, per_s, settings.duration_s, seed=i)
                answers: list[list[Stream]] = []
                for variant in settings.variants:
                    point, streams = _measure(settings, served, longest, variant, per_s, arrivals)
                    points.append(point)
                    answers.append(streams)
                    progress.advance()
                num_different += _num_different(answers)
    result: dict[str, Any] = {
        "model": served.title,
        "settings": asdict(settings),
        "points": [asdict(point) for point in points],
        "num_different": num_different,
        "stolen": steal.share(),
    }
    open_load_report.show(result, report.write("load", result, out))
    return num_different == 0 and not any(point.num_failed for point in points)


def _measure(
    settings: Settings, served: Subject, longest: int, variant: str, per_s: float, arrivals: list[Arrival]
) -> tuple[Point, list[Stream]]:
    flags = flags_for(
        served,
        num_attention=settings.num_attention,
        num_expert=settings.num_expert,
        num_streams=settings.max_seqs,
        longest=longest,
    )
    flags += settings.serve + (_OFF if variant == UNPROTECTED else ())
    asks = make_asks(arrivals, served.vocab_size)
    with contextlib.closing(Instance(served.model, flags)) as instance:
        return kill.run(_open_load(instance.server, settings, variant, per_s, arrivals, asks))


def make_asks(arrivals: list[Arrival], vocab_size: int) -> list[Ask]:
    """Half greedy, half sampled with a seed of their own; no two prompts alike."""
    generator = random.Random("open load")
    sampled = {"temperature": 0.9, "top_p": 0.95}
    return [
        Ask(
            prompt=[generator.randrange(1, vocab_size) for _ in range(arrival.lengths.num_prompt)],
            max_tokens=arrival.lengths.num_output,
            params=sampled | {"seed": i} if i % 2 else {},
        )
        for i, arrival in enumerate(arrivals)
    ]


async def _open_load(
    server: LocalServer, settings: Settings, variant: str, per_s: float, arrivals: list[Arrival], asks: list[Ask]
) -> tuple[Point, list[Stream]]:
    await processes.wait_whole(server, timeout_s=_WHOLE_TIMEOUT_S)
    streams = [Stream() for _ in asks]
    begin_s = time.perf_counter()
    killing = asyncio.create_task(_kill_workers(server, settings)) if variant == UNDER_KILLS else None
    running = []
    for arrival, ask, stream in zip(arrivals, asks, streams, strict=True):
        await asyncio.sleep(begin_s + arrival.at_s - time.perf_counter())
        running.append(asyncio.create_task(ask.send(server, stream)))
    last_s = time.perf_counter()
    _, unfinished = await asyncio.wait(running, timeout=_DRAIN_S) if running else (None, set())
    for task in unfinished:
        task.cancel()
    num_kills = 0
    if killing is not None:
        killing.cancel()
        num_kills = await _result_of(killing)
    return _point(variant, per_s, streams, asks, begin_s, last_s, num_kills), streams


async def _kill_workers(server: LocalServer, settings: Settings) -> int:
    """One of each kind in turn, until cancelled; returns how many."""
    num_ranks = (settings.num_attention, settings.num_expert)
    kinds = ("attention", "expert") if settings.num_expert else ("attention",)
    await_s = settings.kill_every_s / len(kinds)
    num_kills = 0
    try:
        await asyncio.sleep(await_s / 2)
        for i in itertools.count():
            kind = kinds[i % len(kinds)]
            victims = kill.victims(i // len(kinds), *num_ranks)
            view = await asyncio.to_thread(processes.cluster, server)
            os.kill(processes.worker(view, victims[kind])["pid"], signal.SIGKILL)
            num_kills += 1
            await asyncio.sleep(await_s)
    except asyncio.CancelledError:
        pass
    return num_kills


async def _result_of(task: asyncio.Task[int]) -> int:
    try:
        return await task
    except asyncio.CancelledError:  # before it had begun
        return 0


def _point(
    variant: str, per_s: float, streams: list[Stream], asks: list[Ask], begin_s: float, last_s: float, num_kills: int
) -> Point:
    complete = [stream for stream, ask in zip(streams, asks, strict=True) if len(stream.token_ids) == ask.max_tokens]
    refused = [stream for stream in streams if stream.error and stream.error.startswith("HTTP 503")]
    end_s = max((stream.arrivals_s[-1] for stream in streams if stream.arrivals_s), default=last_s)
    return Point(
        variant=variant,
        per_s=per_s,
        num_requests=len(streams),
        num_refused=len(refused),
        num_failed=len(streams) - len(complete) - len(refused),
        num_kills=num_kills,
        first_token_ms=_percentiles([stream.first_token_s for stream in complete]),
        between_tokens_ms=_percentiles([gap for stream in complete for gap in stream.gaps_s]),
        tokens_per_s=round(sum(len(stream.token_ids) for stream in streams) / max(end_s - begin_s, 1e-9), 1),
        drained_s=round(max(end_s - last_s, 0.0), 3),
    )


def _percentiles(seconds: list[float]) -> list[float]:
    ordered = sorted(seconds)
    return [round(1e3 * ordered[int(share * (len(ordered) - 1))], 2) for share in _SHARES] if ordered else []


def _num_different(answers: list[list[Stream]]) -> int:
    """Requests whose complete answers are not the same on all variants."""
    num_different = 0
    for streams in zip(*answers, strict=True):
        tokens = {tuple(stream.token_ids) for stream in streams if stream.error is None and stream.finish_reason}
        num_different += len(tokens) > 1
    return num_different
