"""The baseline of `bench failover`, `repair` and `revive`: everything is killed under load and started again."""

import asyncio
import time
from dataclasses import dataclass

from everserve.procs.local_server import LocalServer
from everserve_bench import analysis, incident, kill, processes, report
from everserve_bench.incident import Round
from everserve_bench.instance import Instance
from everserve_bench.load import Ask, Load, send_all

_GONE_TIMEOUT_S = 60.0  # the driver of a GPU takes its time to let a killed process die


@dataclass(frozen=True)
class Restarted:
    """What clients saw of a restart. Times of the machine's monotonic clock."""

    killed_s: float
    gone_s: float  # no process of the old server is left
    whole_s: float  # the new one is at full strength
    continued_s: list[float]  # of each stream that broke: the first token that its client did not have
    arrivals_s: list[list[float]]  # of all streams; those that broke go on with their replay
    verdicts: list[analysis.Verdict]
    stolen: float


def restart_under_load(instance: Instance, asks: list[Ask], expected: list[list[int]], warm_s: float) -> Restarted:
    """SIGKILL to the supervisor, which ends all processes; a new server; the same requests from their prompts."""
    steal = report.Steal()
    killed_s, gone_s, load = kill.run(_kill_under_load(instance.server, asks, warm_s))
    instance.restart()
    whole_s = kill.run(processes.wait_whole(instance.server, timeout_s=kill.WHOLE_TIMEOUT_S))
    replays = kill.run(send_all(instance.server, asks))
    broken = [streams[-1] for streams in load.streams]
    arrivals = [stream.arrivals_s for streams in load.streams for stream in streams[:-1]]
    news = [analysis.with_replay(old.arrivals_s, new.arrivals_s) for old, new in zip(broken, replays, strict=True)]
    verdicts = [analysis.compare(stream.token_ids, tokens) for stream, tokens in zip(replays, expected, strict=True)]
    return Restarted(
        killed_s=killed_s,
        gone_s=gone_s,
        whole_s=whole_s,
        continued_s=[next(iter(new[len(old.arrivals_s) :]), whole_s) for old, new in zip(broken, news, strict=True)],
        arrivals_s=arrivals + news,
        verdicts=verdicts,
        stolen=steal.share(),
    )


def kill_everything(instance: Instance, asks: list[Ask], expected: list[list[int]], warm_s: float) -> Round:
    """The same, judged as the death of one worker is."""
    found = restart_under_load(instance, asks, expected, warm_s)
    return incident.judge(
        "restart",
        found.arrivals_s,
        killed_s=found.killed_s,
        rank=None,
        verdicts=found.verdicts,
        end_s=max(found.continued_s) + kill.CALM_S,
        whole_s=found.whole_s,
        stolen=found.stolen,
        warm_s=warm_s,
        told=None,
    )


async def _kill_under_load(server: LocalServer, asks: list[Ask], warm_s: float) -> tuple[float, float, Load]:
    """Returns when the server was killed, when its last process was gone, and all streams."""
    await processes.wait_whole(server, timeout_s=kill.WHOLE_TIMEOUT_S)
    pids = processes.pids(processes.cluster(server))
    assert server.process is not None
    load = Load(server, asks)
    await load.flow()
    await asyncio.sleep(warm_s)
    killed_s = time.perf_counter()
    server.process.kill()
    server.process.wait()
    gone_s = await processes.wait_gone(pids, _GONE_TIMEOUT_S)
    await load.finish()
    return killed_s, gone_s, load
