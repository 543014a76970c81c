"""Devices are lost at once under load, and perhaps returned: what `bench repair` does again and again."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everserve.errors import EverserveError
from everserve.procs.local_server import LocalServer
from everserve_bench import incident, kill, processes, repaired, report
from everserve_bench.load import Ask, Load
from everserve_bench.repair_cases import Case
from everserve_bench.repaired import Round, Times

_LOOK_EVERY_S = 0.25  # events are read from files, and reading takes CPU time from the repair that is measured


def lose_devices(
    server: LocalServer,
    case: Case,
    devices: Sequence[int],
    asks: list[Ask],
    expected: list[list[int]],
    warm_s: float,
    when_repaired: Callable[[], None] = lambda: None,
) -> Round:
    """Everything after the loss is the server's own doing. `when_repaired` is called before devices return."""
    return kill.run(_lose_devices(server, case, devices, asks, expected, warm_s, when_repaired))


async def _lose_devices(
    server: LocalServer,
    case: Case,
    devices: Sequence[int],
    asks: list[Ask],
    expected: list[list[int]],
    warm_s: float,
    when_repaired: Callable[[], None],
) -> Round:
    await processes.wait_whole(server, timeout_s=kill.WHOLE_TIMEOUT_S)
    workers = _workers_on(processes.cluster(server), devices)
    lost = {worker["rank"]: worker["incarnation"] for worker in workers}
    steal = report.Steal()
    load = Load(server, asks)
    await load.flow()
    await asyncio.sleep(warm_s)
    lost_s = time.perf_counter()
    await _lose(server, case.fault, devices, workers)
    await asyncio.sleep(incident.AT_ONCE_S)  # looking at the server takes CPU time from the repair that is measured
    returned_s = None
    if case.fault == "gone":
        settled_s = await _wait_redundant(server, lost, lost_s)
        await asyncio.sleep(max(lost_s + kill.AFTER_S, settled_s + kill.AFTER_S) - time.perf_counter())
        await asyncio.to_thread(when_repaired)
        returned_s = time.perf_counter()
        await _ask(server, "/cluster/return", [{"device": device} for device in devices])
    whole_s = await processes.wait_whole(server, lost, timeout_s=kill.WHOLE_TIMEOUT_S)
    if returned_s is None:
        await asyncio.to_thread(when_repaired)
    end_s = whole_s + kill.AFTER_S
    await asyncio.sleep(end_s - time.perf_counter())
    stolen = steal.share()
    await load.finish()
    repair = repaired.tell(server.events(), lost, lost_s, returned_s or whole_s)
    settled_s = lost_s + repair.redundant_s if returned_s is not None else whole_s
    return repaired.judge(
        case,
        devices,
        load.arrivals_s,
        times=Times(lost_s=lost_s, settled_s=settled_s, returned_s=returned_s, whole_s=whole_s, end_s=end_s),
        verdicts=load.verdicts(expected),
        stolen=stolen,
        warm_s=warm_s,
        repair=repair,
    )


def _workers_on(view: dict[str, Any], devices: Sequence[int]) -> list[dict[str, Any]]:
    return [worker for worker in view["workers"] if worker["device"] in devices]


async def _lose(server: LocalServer, fault: str, devices: Sequence[int], workers: list[dict[str, Any]]) -> None:
    """All at once, as nearly as signals and requests can be."""
    if fault == "processes":
        for worker in workers:
            os.kill(worker["pid"], signal.SIGKILL)
    else:
        await _ask(server, "/cluster/fault", [{"device": device, "gone": fault == "gone"} for device in devices])


async def _ask(server: LocalServer, path: str, bodies: list[dict[str, Any]]) -> None:
    await asyncio.gather(*(asyncio.to_thread(processes.post, server, path, body) for body in bodies))


async def _wait_redundant(server: LocalServer, lost: Mapping[int, int], lost_s: float) -> float:
    """Until everything is where it should be without the lost devices; returns when that was seen."""
    deadline_s = time.perf_counter() + kill.WHOLE_TIMEOUT_S
    while time.perf_counter() < deadline_s:
        if repaired.is_complete(await asyncio.to_thread(server.events, "orchestrator"), lost, lost_s):
            return time.perf_counter()
        await asyncio.sleep(_LOOK_EVERY_S)
    view = processes.cluster(server)
    raise EverserveError(
        f"the loss is not repaired after {kill.WHOLE_TIMEOUT_S:.0f} s: {view['violations'] + view['degraded']}"
    )
