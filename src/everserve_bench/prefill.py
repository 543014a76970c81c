"""How long do clients wait for their first token while prompts of very different lengths come, and why?

    clients     `-tp N` under an open load with the lengths of public traces: streams go to the home with the least
                work, and prompt tokens are divided by cost (plan/prefill.py)
    lock-step   the same requests on paper, where the most loaded home holds all others: balanced so, and with streams
                in turn and tokens as they come (prefill_plan.py)
    engine      one engine alone: tokens/s by length and number of prompts, against what the machine allows
                (prefill_engine.py)

The rate is `load` times what the server computes of these prompts when all of them come at once. Requests are
scaled to a mean prompt that the machine can do in reasonable time; their distribution stays.
"""

import asyncio
import gc
import re
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from everserve.client import Stream
from everserve.errors import EverserveError
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.plan.prefill import TokenCost
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import kill, prefill_engine, prefill_plan, prefill_report, processes, report
from everserve_bench.load import Ask
from everserve_bench.open_load import make_asks
from everserve_bench.slices import Server, running
from everserve_bench.subject import Subject, check_gpu, is_for_gpu, subject
from everserve_bench.traces import Arrival, Lengths, poisson, read, with_mean_prompt

BALANCED, IN_TURN = "balanced", "in turn"
_SMALL_CACHE = ("--kv-cache-memory-bytes", str(128 << 20))
_BURST = 24  # requests that come at once, to see how fast they are computed
_SAMPLE_S = 0.1
_DRAIN_S = 120.0
_BLOCK = 64
_BUDGET = 512  # prompt tokens of a batch in lock-step
_HOMES = (3, 7)
_NUM_PLANNED = 1000  # requests
_METRIC = re.compile(r'^everserve_prefill_cost(_pending|_total)\{rank="(\d+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    traces: tuple[str, ...]
    num_homes: int
    mean_prompt: int
    max_prompt: int
    load: float
    seconds: float  # of each trace and round
    rounds: int
    shape: str
    points: tuple[tuple[int, int], ...]  # of the engine alone: tokens of a prompt, and prompts at once
    num_layers: int | None = None


@dataclass
class Tally:
    """Counts of one trace, over all rounds."""

    streams: list[Stream] = field(default_factory=list)
    num_unfinished: int = 0
    num_disturbed: int = 0  # rounds in which a process was replaced: nothing was to fail here
    work: dict[int, float] = field(default_factory=dict)  # prompt tokens computed, as costs, by home
    pending: list[float] = field(default_factory=list)  # samples of the home with the most to compute

    def add_work(self, before: dict[int, float], after: dict[int, float]) -> None:
        for rank, cost in after.items():
            self.work[rank] = self.work.get(rank, 0.0) + cost - before.get(rank, 0.0)

    def add_pending(self, pending: dict[int, float]) -> None:
        self.pending += [max(pending.values())] if pending else []

    def row(self, trace: str, mean_cost: float) -> dict[str, Any]:
        """`mean_cost`: of a prompt."""
        mean_work = sum(self.work.values()) / max(1, len(self.work))
        return {
            "trace": trace,
            "num_requests": len(self.streams),
            "num_unfinished": self.num_unfinished,
            "num_disturbed": self.num_disturbed,
            "first_token_ms": percentiles([stream.first_token_s for stream in self.streams if stream.token_ids]),
            "between_tokens_ms": percentiles([gap for stream in self.streams for gap in stream.gaps_s]),
            "work_max_over_mean": max(self.work.values()) / mean_work if mean_work else 1.0,
            "pending_most": sum(self.pending) / max(1, len(self.pending)) / mean_cost,
        }


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every request got all of its tokens."""
    check_gpu(settings.shape)
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    steal = report.Steal()
    with subject(settings.shape, settings.num_layers) as served:
        most = min(settings.max_prompt, served.max_context)
        lengths = {name: with_mean_prompt(read(name), settings.mean_prompt, most) for name in settings.traces}
        directory = str(DEMO_MODEL) if served.model == "demo" else served.model
        cost = TokenCost.of_model(ModelConfig.from_directory(directory))
        device = "cuda" if is_for_gpu(settings.shape) else "cpu"
        points = [point for point in settings.points if point[0] < served.max_context]
        alone = prefill_engine.measure_apart(directory, device, points, repeats=2)
        tallies, rates = _measure(settings, served, lengths)
        planned = [row for name in settings.traces for row in _plan(name, lengths[name], cost, settings.load)]
    result: dict[str, Any] = {
        "model": served.title,
        "settings": asdict(settings),
        "token_cost": cost.constant,
        "rates": rates,
        "clients": [tally.row(name, _mean_cost(lengths[name], cost)) for name, tally in tallies.items()],
        "lock_step": planned,
        "engine": alone,
        "stolen": steal.share(),
    }
    prefill_report.show(result, report.write("prefill", result, out))
    return not any(tally.num_unfinished for tally in tallies.values())


def _plan(name: str, lengths: list[Lengths], cost: TokenCost, load: float) -> list[dict[str, Any]]:
    rows = []
    for num_homes in _HOMES:
        for variant in (BALANCED, IN_TURN):
            found = prefill_plan.simulate(
                lengths[:_NUM_PLANNED], num_homes, _BUDGET, cost, variant == BALANCED, min(load, 0.9)
            )
            waits = [round(wait / _mean_cost(lengths, cost), 2) for wait in _at_shares(found.waits)]
            rows.append(
                {
                    "trace": name,
                    "num_homes": num_homes,
                    "variant": variant,
                    "max_over_mean": found.max_over_mean,
                    "waits": waits,  # in mean prompts
                }
            )
    return rows


def _mean_cost(lengths: list[Lengths], cost: TokenCost) -> float:
    """The mean cost of a prompt."""
    return sum(cost.of(0, one.num_prompt) for one in lengths) / len(lengths)


# -- clients -------------------------------------------------------------------------------------


def _measure(
    settings: Settings, served: Subject, lengths: dict[str, list[Lengths]]
) -> tuple[dict[str, Tally], dict[str, float]]:
    tallies = {trace: Tally() for trace in settings.traces}
    rates: dict[str, float] = {}
    total = len(tallies) * settings.rounds
    flags = (*served.flags, "-tp", str(settings.num_homes), *_room(settings, served))
    with Progress().begin("prefill", total) as progress, running(served, flags) as server:
        for round_ in range(settings.rounds):
            for i, trace in enumerate(settings.traces):
                if trace not in rates:
                    burst = make_asks([Arrival(0.0, one) for one in lengths[trace][:_BURST]], served.vocab_size)
                    rates[trace] = _rate(settings, server, lengths[trace], burst)
                arrivals = poisson(lengths[trace], rates[trace], settings.seconds, seed=1000 * i + round_)
                _measure_one(server, arrivals, make_asks(arrivals, served.vocab_size), tallies[trace])
                progress.advance()
    return tallies, rates


def _measure_one(server: Server, arrivals: list[Arrival], asks: list[Ask], tally: Tally) -> None:
    kill.run(_open_load(server.server, arrivals, asks, tally))
    kill.run(processes.wait_whole(server.server))
    pids = processes.pids(processes.cluster(server.server))
    tally.num_disturbed += pids != server.pids
    server.pids = pids


def _room(settings: Settings, served: Subject) -> tuple[str, ...]:
    flags = ("--no-enable-prefix-caching",)
    if not is_for_gpu(settings.shape):
        return (*flags, *_SMALL_CACHE)
    length = min(-(-settings.max_prompt // _BLOCK) * _BLOCK, served.max_context)
    return (*flags, "--max-model-len", str(length), "--kv-log", "off")


def _rate(settings: Settings, server: Server, lengths: list[Lengths], burst: list[Ask]) -> float:
    """Requests per second. The burst is computed twice: the first time warms up."""
    for _ in range(2):
        began = time.perf_counter()
        streams = kill.run(_send_all(server.server, burst))
        seconds = time.perf_counter() - began
        broken = [stream.error for stream in streams if stream.error]
        if broken:
            raise EverserveError(f"streams are incomplete: {broken}")
    mean_work = sum(one.num_prompt + one.num_output for one in lengths) / len(lengths)
    burst_work = sum(len(ask.prompt) + ask.max_tokens for ask in burst)
    return settings.load * burst_work / seconds / mean_work


async def _send_all(server: LocalServer, asks: list[Ask]) -> list[Stream]:
    return await asyncio.gather(*(ask.send(server, Stream()) for ask in asks))


async def _open_load(server: LocalServer, arrivals: list[Arrival], asks: list[Ask], tally: Tally) -> None:
    """Requests at their times, while homes are watched."""
    before = await asyncio.to_thread(_costs, server, "_total")
    watching = asyncio.create_task(_watch(server, tally))
    streams = [Stream() for _ in asks]
    begin_s, sending = time.perf_counter(), []
    for arrival, ask, stream in zip(arrivals, asks, streams, strict=True):
        await asyncio.sleep(begin_s + arrival.at_s - time.perf_counter())
        sending.append(asyncio.create_task(ask.send(server, stream)))
    if sending:
        _, unfinished = await asyncio.wait(sending, timeout=_DRAIN_S)
        for task in unfinished:
            task.cancel()
    watching.cancel()
    await asyncio.wait([watching])
    tally.streams += streams
    tally.num_unfinished += sum(
        len(stream.token_ids) < ask.max_tokens for stream, ask in zip(streams, asks, strict=True)
    )
    tally.add_work(before, await asyncio.to_thread(_costs, server, "_total"))


async def _watch(server: LocalServer, tally: Tally) -> None:
    while True:
        tally.add_pending(await asyncio.to_thread(_costs, server, "_pending"))
        await asyncio.sleep(_SAMPLE_S)


def _costs(server: LocalServer, kind: str) -> dict[int, float]:
    """By home, from /metrics."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=15.0) as answer:
        text = answer.read().decode()
    return {int(rank): float(value) for found, rank, value in _METRIC.findall(text) if found == kind}


def percentiles(seconds: list[float]) -> list[float]:
    """Median, 95th and 99th, in milliseconds."""
    return [round(1e3 * value, 2) for value in _at_shares(seconds)]


def _at_shares(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.95, 0.99)] if ordered else []
