"""One worker is killed under load: what `bench failover` and `bench scaling` do again and again."""

import asyncio
import os
import signal
import time

import uvloop

from everserve.errors import EverserveError
from everserve.procs.local_server import LocalServer
from everserve_bench import incident, kill_phases, processes, report
from everserve_bench.incident import Round, Victim
from everserve_bench.load import FINISH_TIMEOUT_S, Ask, Load, patience_s, send_all

AFTER_S = 3.0  # observed at least so long after a kill ...
CALM_S = 1.0  # ... and so long after full strength
WHOLE_TIMEOUT_S = 180.0  # on a GPU a replacement without a spare captures its graphs first

# One process reads all streams and notes when each token came. On uvloop it takes less time for a token than the
# gateway does, so that it always keeps up; on asyncio's own loop it takes more.
run = uvloop.run


class Refused(EverserveError):
    """The server does not take a request of this load."""


def undisturbed(server: LocalServer, asks: list[Ask]) -> list[list[int]]:
    """The right answers."""
    timeout_s = FINISH_TIMEOUT_S + patience_s(asks)
    try:
        streams = run(asyncio.wait_for(send_all(server, asks), timeout_s))
    except TimeoutError:
        raise EverserveError(f"the streams take longer than {timeout_s:.0f} s without any fault") from None
    refusals = [stream.error for stream in streams if stream.error and stream.error.startswith("HTTP ")]
    if refusals:
        raise Refused(f"{len(refusals)} requests are refused: {refusals[0]}")
    broken = [stream.error for stream in streams if len(stream.token_ids) != asks[0].max_tokens]
    if broken:
        raise EverserveError(f"{len(broken)} streams are incomplete without any fault: {broken[0]}")
    return [stream.token_ids for stream in streams]


def victims(i: int, num_attention: int, num_expert: int) -> dict[str, int]:
    """Which ranks are killed in round `i`, one of each kind that there is."""
    attention = {"attention": i % num_attention}
    return {"expert": num_attention + i % num_expert} | attention if num_expert else attention


def kill_worker(
    server: LocalServer,
    fault: str,
    rank: int,
    asks: list[Ask],
    expected: list[list[int]],
    warm_s: float,
    *,
    repeats: bool = True,
) -> Round:
    """SIGKILL to one worker under full load; everything after that is the server's own doing.

    Streams that end after the kill begin again, unless `repeats` is false.
    """
    return run(_kill_worker(server, fault, rank, asks, expected, warm_s, repeats))


async def _kill_worker(
    server: LocalServer,
    fault: str,
    rank: int,
    asks: list[Ask],
    expected: list[list[int]],
    warm_s: float,
    repeats: bool,
) -> Round:
    await processes.wait_whole(server, timeout_s=WHOLE_TIMEOUT_S)
    seat = processes.worker(processes.cluster(server), rank)
    steal = report.Steal()
    load = Load(server, asks)
    await load.flow()
    await asyncio.sleep(warm_s)
    victim = Victim(rank, seat["incarnation"], seat["pid"], killed_s=time.perf_counter())
    os.kill(victim.pid, signal.SIGKILL)
    if not repeats:
        load.begin_nothing_more()
    await asyncio.sleep(incident.AT_ONCE_S)  # polling /cluster takes CPU time from the recovery that is measured
    whole_s = await processes.wait_whole(server, {rank: victim.incarnation}, timeout_s=WHOLE_TIMEOUT_S)
    end_s = max(victim.killed_s + AFTER_S, whole_s + CALM_S)
    await asyncio.sleep(end_s - time.perf_counter())
    stolen = steal.share()
    await load.finish()
    events = server.events()
    return incident.judge(
        fault,
        load.arrivals_s,
        killed_s=victim.killed_s,
        rank=rank,
        verdicts=load.verdicts(expected),
        end_s=end_s,
        whole_s=whole_s,
        stolen=stolen,
        warm_s=warm_s,
        told=incident.tell(events, victim, num_prompt=len(asks[0].prompt)),
        phases_ms=kill_phases.phases_ms(fault, events, rank, victim.killed_s, load.arrivals_s),
    )
