"""What does a client see of a worker that answers, but slowly: with the mechanism that finds it, and without?

One worker at a time loses its CPU for a while: it is stopped for a share of every 40 ms (SIGSTOP, SIGCONT), or gets a
quota where cgroups allow that. It never falls silent, so nothing but its pace gives it away. Each case runs on two
servers, one of which has `--slow-factor 0`: the time until the worker is demoted, and until it is asked to leave; the
times between tokens from the beginning of the disturbance to its end, beside those before it.

`quiet`: nothing is done to any worker; neighbours take the CPU of all of them now and then, and alarms are counted.

Every stream is compared, token by token, with the same request undisturbed.
"""

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import duty, grey_report, kill, processes, report
from everserve_bench.instance import Instance, flags_for
from everserve_bench.load import Ask, Load, make_asks
from everserve_bench.subject import BUNDLED, Subject, subject

_PERIOD_S = 0.04
_WHOLE_TIMEOUT_S = 120.0
_TRIALS_S = 60.0  # after a disturbance: until the worker is trusted again


@dataclass(frozen=True)
class Case:
    """Which worker loses how much of its CPU time, and how."""

    role: str
    how: str  # "duty" or "quota"
    lost: float

    def __str__(self) -> str:
        what = "stopped" if self.how == "duty" else "a quota takes"
        return f"{self.role} worker, {what} {100 * self.lost:.0f} %"


CASES = tuple(
    Case(role, how, lost) for role in ("expert", "attention") for how in ("duty", "quota") for lost in (0.5, 0.8)
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    num_attention: int = 2
    num_expert: int = 3
    num_streams: int = 8
    num_prompt: int = 32
    max_tokens: int = 400
    calm_s: float = 5.0
    disturbed_s: float = 20.0
    quiet_s: float = 0.0  # more than 0: only count false alarms, for so long
    detect_ms: float = 500.0  # a stop that is a little too long is no silence
    cases: tuple[Case, ...] = CASES
    num_neighbours: int = field(default_factory=lambda: 2 * len(os.sched_getaffinity(0)))

    def flags(self, served: Subject, is_on: bool) -> tuple[str, ...]:
        flags = flags_for(
            served,
            num_attention=self.num_attention,
            num_expert=self.num_expert,
            num_streams=self.num_streams,
            longest=self.num_prompt + self.max_tokens,
        )
        return (*flags, "--detect-ms", f"{self.detect_ms:g}", *(() if is_on else ("--slow-factor", "0")))


@dataclass(frozen=True)
class Found:
    """One case on one server."""

    case: str
    is_on: bool
    demoted_s: float | None  # from the beginning of the disturbance; None: never
    drained_s: float | None
    gaps_before_ms: list[float]  # median, 99th percentile and largest
    gaps_ms: list[float]  # the same, while it was disturbed
    num_faults: int  # workers that were declared gone: then it was not only slow
    num_wrong: int  # streams that lost a token or got a different one


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every stream was exact, and in quiet no worker was accused."""
    why_not = duty.why_no_quota()
    with subject(BUNDLED, None) as served:
        asks = make_asks(settings.num_streams, settings.num_prompt, settings.max_tokens, served.vocab_size)
        steal = report.Steal()
        result: dict[str, Any] = {"model": served.title, "settings": asdict(settings), "no_quota": why_not}
        gc.collect()
        gc.freeze()  # this process measures arrival times: no long collections in between
        if settings.quiet_s:
            result["quiet"] = _quiet(settings, served, asks)
        else:
            cases = [case for case in settings.cases if case.how == "duty" or why_not is None]
            result["found"] = [asdict(found) for found in _measure(settings, served, asks, cases)]
    result["stolen"] = steal.share()
    path = report.write("grey-quiet" if settings.quiet_s else "grey", result, out)
    grey_report.show(result, path)
    if settings.quiet_s:
        return not result["quiet"]["alarms"] and not result["quiet"]["num_wrong"]
    return not any(found["num_wrong"] for found in result["found"])


def _measure(settings: Settings, served: Subject, asks: list[Ask], cases: list[Case]) -> list[Found]:
    found = []
    with Progress() as progress:
        progress.begin("grey", total=2 * len(cases))
        for is_on in (True, False):
            with contextlib.closing(Instance(served.model, settings.flags(served, is_on))) as instance:
                expected = kill.undisturbed(instance.server, asks)
                for case in cases:
                    found.append(kill.run(_disturb(instance.server, settings, asks, expected, case, is_on)))
                    progress.advance()
    return found


async def _disturb(
    server: LocalServer, settings: Settings, asks: list[Ask], expected: list[list[int]], case: Case, is_on: bool
) -> Found:
    await processes.wait_whole(server, timeout_s=_WHOLE_TIMEOUT_S)
    load = Load(server, asks)
    await load.flow()
    calm_s = time.perf_counter()
    await asyncio.sleep(settings.calm_s)
    workers = (await asyncio.to_thread(processes.cluster, server))["workers"]
    victim = [worker for worker in workers if case.role in worker["roles"]][-1]
    begin_s = time.perf_counter()
    with _taking(case, victim["pid"]):
        await asyncio.sleep(settings.disturbed_s)
    end_s = time.perf_counter()
    await _recover(server, victim["rank"])
    await load.finish()
    told = [event for event in server.events("orchestrator") if begin_s <= event["at_s"] <= end_s]
    slow = [event for event in told if event["event"] == "worker_slow" and event["rank"] == victim["rank"]]
    first = {event["level"]: round(event["at_s"] - begin_s, 2) for event in reversed(slow)}
    return Found(
        case=str(case),
        is_on=is_on,
        demoted_s=first.get("demoted"),
        drained_s=first.get("drained"),
        gaps_before_ms=_gaps_ms(load.arrivals_s, calm_s, begin_s),
        gaps_ms=_gaps_ms(load.arrivals_s, begin_s, end_s),
        num_faults=sum(event["event"] == "fault_detected" for event in told),
        num_wrong=sum(not verdict.is_exact for verdict in load.verdicts(expected)),
    )


@contextlib.contextmanager
def _taking(case: Case, pid: int) -> Iterator[None]:
    if case.how == "quota":
        with duty.quota(pid, 1 - case.lost):
            yield
        return
    with duty.DutyCycle(pid, _PERIOD_S, case.lost):
        yield


async def _recover(server: LocalServer, rank: int) -> None:
    """While streams go on: without them nothing would show that it is fast again."""
    deadline = time.perf_counter() + _TRIALS_S
    while time.perf_counter() < deadline:
        workers = (await asyncio.to_thread(processes.cluster, server))["workers"]
        if not any(worker["slow"] for worker in workers if worker["rank"] == rank):
            return
        await asyncio.sleep(0.2)


def _gaps_ms(arrivals_s: list[list[float]], begin_s: float, end_s: float) -> list[float]:
    """A gap that begins in the interval counts, however long it is."""
    gaps = sorted(b - a for stream in arrivals_s for a, b in pairwise(stream) if begin_s <= a <= end_s)
    return [round(1e3 * gaps[int(share * (len(gaps) - 1))], 2) for share in (0.5, 0.99, 1.0)] if gaps else []


# -- no worker is slow -----------------------------------------------------------------------------


def _quiet(settings: Settings, served: Subject, asks: list[Ask]) -> dict[str, Any]:
    with contextlib.closing(Instance(served.model, settings.flags(served, is_on=True))) as instance:
        expected = kill.undisturbed(instance.server, asks)
        with duty.neighbours(settings.num_neighbours):
            return kill.run(_watch(instance.server, settings, asks, expected))


async def _watch(server: LocalServer, settings: Settings, asks: list[Ask], expected: list[list[int]]) -> dict[str, Any]:
    load = Load(server, asks)
    await load.flow()
    until_s = time.perf_counter() + settings.quiet_s
    highest: dict[int, float] = {}
    while time.perf_counter() < until_s:
        for worker in (await asyncio.to_thread(processes.cluster, server))["workers"]:
            highest[worker["rank"]] = max(highest.get(worker["rank"], 0.0), worker["slowness"] or 0.0)
        await asyncio.sleep(1.0)
    await load.finish()
    told = server.events("orchestrator")
    return {
        "seconds": settings.quiet_s,
        "alarms": [event for event in told if event["event"] == "worker_slow"],
        "num_faults": sum(event["event"] == "fault_detected" for event in told),
        "highest_slowness": highest,
        "num_wrong": sum(not verdict.is_exact for verdict in load.verdicts(expected)),
    }
