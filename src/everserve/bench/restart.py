"""The baseline of `bench failover` and `bench repair`: everything is killed under load and started again."""

import asyncio
import time

from everserve.bench import analysis, incident, kill, processes, report
from everserve.bench.incident import Round
from everserve.bench.instance import Instance
from everserve.bench.load import Ask, Load, send_all
from everserve.procs.local_server import LocalServer

_GONE_TIMEOUT_S = 60.0  # the driver of a GPU takes its time to let a killed process die


def kill_everything(instance: Instance, asks: list[Ask], expected: list[list[int]], warm_s: float) -> Round:
    """SIGKILL to the supervisor, which ends all processes; a new server; the same requests from their prompts."""
    steal = report.Steal()
    killed_s, load = kill.run(_kill_under_load(instance.server, asks, warm_s))
    instance.restart()
    whole_s = kill.run(processes.wait_whole(instance.server, timeout_s=kill.WHOLE_TIMEOUT_S))
    replays = kill.run(send_all(instance.server, asks))
    stolen = steal.share()
    broken = [streams[-1] for streams in load.streams]
    arrivals = [stream.arrivals_s for streams in load.streams for stream in streams[:-1]]
    news = [analysis.with_replay(old.arrivals_s, new.arrivals_s) for old, new in zip(broken, replays, strict=True)]
    verdicts = [analysis.compare(stream.token_ids, tokens) for stream, tokens in zip(replays, expected, strict=True)]
    continued_s = [next(iter(new[len(old.arrivals_s) :]), whole_s) for old, new in zip(broken, news, strict=True)]
    return incident.judge(
        "restart",
        arrivals + news,
        killed_s=killed_s,
        rank=None,
        verdicts=verdicts,
        end_s=max(continued_s) + kill.CALM_S,
        whole_s=whole_s,
        stolen=stolen,
        warm_s=warm_s,
        told=None,
    )


async def _kill_under_load(server: LocalServer, asks: list[Ask], warm_s: float) -> tuple[float, Load]:
    """Returns when no process and no stream is left."""
    await processes.wait_whole(server, timeout_s=kill.WHOLE_TIMEOUT_S)
    pids = processes.pids(processes.cluster(server))
    assert server.process is not None
    load = Load(server, asks)
    await load.flow()
    await asyncio.sleep(warm_s)
    killed_s = time.perf_counter()
    server.process.kill()
    server.process.wait()
    await processes.wait_gone(pids, _GONE_TIMEOUT_S)
    await load.finish()
    return killed_s, load
