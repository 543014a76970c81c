"""A server from outside: what /cluster says, which processes it is, how much of the cores they use."""

import asyncio
import http.client
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from everserve.errors import EverserveError
from everserve.procs import process
from everserve.procs.local_server import LocalServer


def cluster(server: LocalServer) -> dict[str, Any]:
    """What /cluster says. The plainest client there is: it shares the cores with what it looks at."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=15.0)
    try:
        connection.request("GET", "/cluster")
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


def post(server: LocalServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """An operator's request; an error unless it is granted."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=15.0)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    finally:
        connection.close()
    if response.status >= 300:
        raise EverserveError(f"POST {path} {body}: {answer}")
    return answer


def counters(server: LocalServer) -> dict[str, float]:
    """All counters of /metrics, each with its labels."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=15.0)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs if name.partition("{")[0].endswith("_total")}


def is_whole(view: dict[str, Any]) -> bool:
    """Every seat is taken and ready, and every expert has all the places that it should have."""
    ready = all(worker["state"] == "ready" for worker in view["workers"])
    return ready and bool(view["workers"]) and not view["violations"] and not view["degraded"]


def worker(view: dict[str, Any], rank: int) -> dict[str, Any]:
    found: dict[str, Any] = next(worker for worker in view["workers"] if worker["rank"] == rank)
    return found


async def wait_whole(
    server: LocalServer, lost: Mapping[int, int] | None = None, every_s: float = 0.05, timeout_s: float = 60.0
) -> float:
    """Until the server is whole, with successors of the `lost` incarnations, by rank; returns when that was seen."""
    deadline = time.perf_counter() + timeout_s
    while time.perf_counter() < deadline:
        view = await asyncio.to_thread(cluster, server)
        successors = (worker(view, rank)["incarnation"] > incarnation for rank, incarnation in (lost or {}).items())
        if is_whole(view) and all(successors):
            return time.perf_counter()
        await asyncio.sleep(every_s)
    raise EverserveError(f"the server is not at full strength after {timeout_s:.0f} s: {view}")


async def wait_gone(pids: list[int], timeout_s: float = 10.0) -> float:
    """Until none of these processes lives; returns when that was."""
    deadline = time.perf_counter() + timeout_s
    while any(process.state_of(pid) not in (None, "Z", "X") for pid in pids):
        if time.perf_counter() > deadline:
            raise EverserveError(f"processes {pids} do not all die")
        await asyncio.sleep(0.001)
    return time.perf_counter()


def pids(view: dict[str, Any]) -> list[int]:
    """All processes of the server that `view` is about."""
    return [entry["pid"] for entry in (*view["processes"], *view["workers"]) if entry["pid"]]


def cpu_s(pids: list[int]) -> float:
    """Core time that all threads of these processes have used so far; time that the host took away does not count."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
