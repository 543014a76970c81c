"""One device is gone under load, with its worker: what `bench revive` does again and again."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from everserve.client import Stream
from everserve.errors import EverserveError
from everserve.procs.local_server import LocalServer
from everserve_bench import analysis, kill, processes, report, revived
from everserve_bench.incident import AT_ONCE_S, Victim
from everserve_bench.load import Ask, Load
from everserve_bench.restart import Restarted
from everserve_bench.revive_variants import RESTART, Variant
from everserve_bench.revived import Round, Told

_LOOK_EVERY_S = 0.2  # events are read from files, and reading takes CPU time from what is measured
_SETTLE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Times:
    """When the rest happened."""

    settled_s: float
    returned_s: float | None
    whole_s: float | None


def lose(
    server: LocalServer, variant: Variant, nth: int, asks: list[Ask], expected: list[list[int]], warm_s: float
) -> Round:
    """The device of the nth worker of the variant's role. Everything after the loss is the server's own doing."""
    return kill.run(_lose(server, variant, nth, asks, expected, warm_s))


async def _lose(
    server: LocalServer, variant: Variant, nth: int, asks: list[Ask], expected: list[list[int]], warm_s: float
) -> Round:
    await processes.wait_whole(server, timeout_s=kill.WHOLE_TIMEOUT_S)
    steal = report.Steal()
    load = Load(server, asks)
    await load.flow()
    await asyncio.sleep(warm_s)
    seat = _choose(await asyncio.to_thread(processes.cluster, server), variant, nth)
    victim = Victim(seat["rank"], seat["incarnation"], seat["pid"], killed_s=time.perf_counter())
    os.kill(victim.pid, signal.SIGKILL)  # seen at once; that the device is gone too, is said right after
    await asyncio.to_thread(processes.post, server, "/cluster/fault", {"device": seat["device"], "gone": True})
    await asyncio.sleep(AT_ONCE_S)
    settled_s = await _wait_settled(server, variant, victim)
    times = Times(settled_s, None, None)
    if not variant.needs_new_server:
        returned_s = time.perf_counter()
        await asyncio.to_thread(processes.post, server, "/cluster/return", {"device": seat["device"]})
        lost = {victim.rank: victim.incarnation}
        times = Times(settled_s, returned_s, await processes.wait_whole(server, lost, timeout_s=kill.WHOLE_TIMEOUT_S))
    stolen = steal.share()
    await load.finish()
    told = Told(server.events(), victim, times.returned_s or time.perf_counter())
    return judge(variant, told, load.streams, expected, times, stolen)


def _choose(view: dict[str, Any], variant: Variant, nth: int) -> dict[str, Any]:
    """An attention worker that has streams: one that was slow lately may have none."""
    seats: list[dict[str, Any]] = [seat for seat in view["workers"] if variant.role in seat["roles"]]
    busy = [seat for seat in seats if variant.role == "expert" or seat["requests"]]
    if not busy:
        raise EverserveError(f"no {variant.role} worker has streams")
    return busy[nth % len(busy)]


async def _wait_settled(server: LocalServer, variant: Variant, victim: Victim) -> float:
    """Until the server has done what it can without the device; returns when that was seen."""
    deadline_s = time.perf_counter() + _SETTLE_TIMEOUT_S
    while time.perf_counter() < deadline_s:
        told = Told(await asyncio.to_thread(server.events), victim)
        if is_settled(variant, told):
            return time.perf_counter()
        await asyncio.sleep(_LOOK_EVERY_S)
    raise EverserveError(f"{variant.name}: not repaired after {_SETTLE_TIMEOUT_S:.0f} s")


def is_settled(variant: Variant, told: Told) -> bool:
    if variant.role == "attention":
        return bool(told.times("request_resumed", from_rank=told.victim.rank))
    is_redundant = bool(told.times("repair_phase", phase="redundant"))
    is_switched = not variant.switches or bool(told.times("switch_done"))
    return is_redundant and is_switched and (not variant.is_masked or bool(told.times("mask_lifted")))


# -- what it was ---------------------------------------------------------------------------------


def judge(
    variant: Variant,
    told: Told,
    streams: Sequence[Sequence[Stream]],
    expected: Sequence[Sequence[int]],
    times: Times,
    stolen: float,
) -> Round:
    """`streams`: of each request, one after the other."""
    fault_s = told.victim.killed_s
    ends = revived.ends_of(variant, told)
    until_s = revived.last_end(ends, fault_s)
    every = [stream for same in streams for stream in same]
    pauses = {id(stream): revived.pause_of(stream.arrivals_s, fault_s, until_s) for stream in every}
    resumed, moved = (revived.names_of(told, event) for event in ("request_resumed", "stream_moved"))
    touched = [stream for stream in every if variant.role == "expert" or stream.id in resumed]
    untouched = [stream for stream in every if stream not in touched]
    moving = [stream for stream in every if stream.id in moved] if variant.switches else []
    after_touched = revived.seen((pauses[id(stream)] for stream in touched), fault_s)
    if after_touched.next_last_ms is None:
        raise EverserveError("no stream was running at the time of the loss: give --tokens a larger value")
    next_s = fault_s + after_touched.next_last_ms / 1e3
    verdicts = [verdict_of(one, tokens) for same, tokens in zip(streams, expected, strict=True) for one in same]
    lifted = told.times("mask_lifted")
    redundant = told.times("repair_phase", phase="redundant")
    return Round(
        variant=variant.name,
        rank=told.victim.rank,
        phases_ms=revived.phases_ms(ends, fault_s, next_s),
        touched=after_touched,
        untouched=revived.seen_unhurt([stream.arrivals_s for stream in untouched], fault_s, until_s),
        moved=revived.seen((_later(stream, next_s, times.settled_s) for stream in moving), fault_s),
        background_gap_ms=revived.seen((_later(one, next_s, times.settled_s) for one in every), fault_s).gap_ms,
        lifted_s=lifted[0] - fault_s if lifted else None,
        redundant_s=redundant[-1] - fault_s if redundant else None,
        whole_s=times.whole_s - fault_s if times.whole_s is not None else None,
        returned_s=times.returned_s - fault_s if times.returned_s is not None else None,
        num_streams=len(verdicts),
        num_tokens=sum(verdict.num_tokens for verdict in verdicts),
        num_marked=sum(end - first for stream in every for first, end in stream.masked),
        num_lost=sum(verdict.num_lost for verdict in verdicts),
        num_different=sum(verdict.num_different for verdict in verdicts),
        others_lost=sum(event["rank"] != told.victim.rank for event in told.named("fault_detected")),
        stolen=stolen,
    )


def _later(stream: Stream, next_s: float, until_s: float) -> tuple[float, float] | None:
    """Its longest pause after all streams have gone on."""
    return revived.pause_of([at_s for at_s in stream.arrivals_s if at_s >= next_s], next_s, until_s)


def verdict_of(stream: Stream, expected: Sequence[int]) -> analysis.Verdict:
    """Tokens from the first mark on may be any, but none may be missing. (That they are exact again, given those before
    them, is what `everserve chaos` compares.)"""
    whole = analysis.compare(stream.token_ids, expected)
    if not stream.masked:
        return whole
    first = stream.masked[0][0]
    before = analysis.compare(stream.token_ids[:first], expected[:first])
    return analysis.Verdict(whole.num_tokens, whole.num_lost, before.num_different)


def judge_restart(found: Restarted, events: revived.Events) -> Round:
    """`events`: of the new server. All streams broke."""
    ends = revived.ends_of_restart(events, found.gone_s)
    pauses = [revived.pause_of(arrivals, found.killed_s, found.gone_s) for arrivals in found.arrivals_s]
    return Round(
        variant=RESTART,
        rank=-1,
        phases_ms=revived.phases_ms(ends, found.killed_s, max(found.continued_s)),
        touched=revived.seen(pauses, found.killed_s, found.continued_s),
        untouched=revived.seen((), found.killed_s),
        moved=revived.seen((), found.killed_s),
        background_gap_ms=None,
        lifted_s=None,
        redundant_s=None,
        whole_s=found.whole_s - found.killed_s,
        returned_s=None,
        num_streams=len(found.verdicts),
        num_tokens=sum(verdict.num_tokens for verdict in found.verdicts),
        num_marked=0,
        num_lost=sum(verdict.num_lost for verdict in found.verdicts),
        num_different=sum(verdict.num_different for verdict in found.verdicts),
        others_lost=0,
        stolen=found.stolen,
    )
