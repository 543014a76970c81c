"""Faults as they land: real signals to real processes, whose parent is the test."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from everserve.chaos import faults
from everserve.chaos.faults import InjectedFault, Injector
from everserve.chaos.schedule import Blow, Device, Fault, Request, Victim
from everserve.chaos.target import Target, View, root_here
from everserve.errors import ConfigError
from everserve.procs import process
from tests.support.chaos_toy import Asked, json_answer, serving

ATTENTION, EXPERT, ANCHOR = Victim("attention", 0), Victim("expert", 0), Victim("anchor")


def worker(rank: int, role: str, pid: int) -> dict:
    return {
        **{"rank": rank, "incarnation": 3, "pid": pid, "roles": [role], "state": "ready", "note": ""},
        **{"requests": 0, "running": 0, "waiting": 0, "kv_cache_usage": 0.0, "slots": 0, "shadow_slots": 0},
    }


def cluster(attention: int, expert: int, anchor: int = 0) -> dict:
    processes = [{"name": "root", "pid": os.getpid()}, {"name": "anchor", "pid": anchor}]
    workers = [worker(1, "expert", expert), worker(0, "attention", attention)]
    return {"epoch": 1, "violations": [], "degraded": [], "processes": processes, "workers": workers}


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen]]:
    """Three processes that sleep."""
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    started = [subprocess.Popen(sleep, stdout=subprocess.PIPE) for _ in range(3)]
    for child in started:
        child.stdout.readline()
    yield started
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


def wait_for(pid: int, *states: str | None) -> None:
    deadline = time.monotonic() + 10
    while process.state_of(pid) not in states:
        assert time.monotonic() < deadline, process.state_of(pid)
        time.sleep(0.001)


def inject(view: dict, *blows: Blow, is_local: bool = True, while_it_runs=None, status=200, answer=None):
    """One fault with these blows; returns its record and what was posted."""
    posted: list[tuple[str, dict]] = []
    statuses = iter(status) if isinstance(status, list) else itertools.repeat(status)

    async def respond(asked: Asked) -> AsyncIterator[bytes]:
        if asked.path == "/cluster":
            yield json_answer(view)
        else:
            posted.append((asked.path, asked.body))
            yield json_answer(answer or {}, next(statuses))

    async def main() -> InjectedFault:
        async with serving(respond) as url:
            injector = Injector(Target(url), os.getpid() if is_local else None)
            until = asyncio.Event()
            run = asyncio.ensure_future(injector.run([Fault(0.01, "a kind", blows)], until))
            while not injector.records:
                await asyncio.sleep(0.001)
            if while_it_runs is not None:
                await asyncio.to_thread(while_it_runs)
            until.set()
            await run
            return injector.records[0]

    return asyncio.run(main()), posted


def test_kills_land(children):
    attention, expert, anchor = children
    record, posted = inject(
        cluster(attention.pid, expert.pid, anchor.pid), Blow(0, ATTENTION, "KILL"), Blow(0.01, ANCHOR, "TERM")
    )
    assert attention.wait() == -signal.SIGKILL and anchor.wait() == -signal.SIGTERM and expert.poll() is None
    assert record.is_injected and len(record.hit) == 2 and not record.missed and not posted
    assert f"KILL to attention 0 (pid {attention.pid}, incarnation 3)" in str(record)


def test_who_is_stopped_wakes_up_in_time(children):
    pid = children[0].pid
    stop = Blow(0, ATTENTION, "STOP", wake_after_s=0.05)

    def until_awake() -> None:
        wait_for(pid, "S")

    record, _ = inject(cluster(pid, children[1].pid), stop, while_it_runs=until_awake)
    assert "STOP for 0.050 s to attention 0" in record.hit[0]


def test_no_process_stays_stopped(children):
    pid = children[0].pid
    stop = Blow(0, ATTENTION, "STOP", wake_after_s=600)
    inject(cluster(pid, children[1].pid), stop, while_it_runs=lambda: wait_for(pid, "T"))
    wait_for(pid, "S")


def test_one_who_sleeps_and_is_killed_meanwhile(children):
    def kill() -> None:
        children[0].kill()
        children[0].wait()

    record, _ = inject(cluster(children[0].pid, children[1].pid), Blow(0, ATTENTION, "STOP", 600), while_it_runs=kill)
    assert record.is_injected


def test_a_fault_without_a_victim_is_missed(children):
    children[0].kill()
    wait_for(children[0].pid, "Z")  # dead, and not mourned yet
    stranger = os.getppid()  # alive, but none of the server's
    empty = cluster(children[0].pid, 0, stranger)
    record, _ = inject(empty, *(Blow(0, victim, "KILL") for victim in (ATTENTION, EXPERT, ANCHOR)))
    assert not record.is_injected and len(record.missed) == 3
    assert "no process" in str(record)
    children[0].wait()
    record, _ = inject(empty, Blow(0, ATTENTION, "KILL"))
    assert not record.is_injected


def test_to_hang_is_asked_for_also_here(children):
    view = cluster(children[0].pid, children[1].pid)
    record, posted = inject(view, Blow(0, EXPERT, "HANG"))
    assert posted == [("/cluster/fault", {"rank": 1, "signal": "HANG"})]
    assert f"HANG to expert 0 (pid {children[1].pid}, incarnation 3)" in record.hit[0]
    assert process.state_of(children[1].pid) == "S"


def test_the_worker_that_changes_its_role_is_the_one_that_changes_it_back(children):
    """By its rank: what number it has in its other role does not matter."""
    view = cluster(children[0].pid, children[1].pid)
    request, undo = (Request("/cluster/switch", {"role": role}) for role in ("attention", "expert"))
    switch = Blow(0, EXPERT, "role attention", wake_after_s=600, request=request, undo=undo)
    record, posted = inject(view, switch)
    assert posted == [
        ("/cluster/switch", {"role": "attention", "rank": 1}),
        ("/cluster/switch", {"role": "expert", "rank": 1}),
    ]
    assert "role attention for 600.000 s of expert 0" in record.hit[0]
    record, posted = inject(view, Blow(0, Victim("expert", 1), "role attention", 600, request, undo))
    assert not posted and "no such process" in record.missed[0]


def test_a_server_elsewhere_is_asked_to_do_it(children):
    view = cluster(children[0].pid, children[1].pid, children[2].pid)
    blows = (Blow(0, EXPERT, "KILL"), Blow(0, ANCHOR, "STOP", wake_after_s=600), Blow(0, ATTENTION, "drain"))
    record, posted = inject(view, *blows, is_local=False)
    assert len(record.hit) == 3
    assert posted == [
        ("/cluster/fault", {"rank": 1, "signal": "KILL"}),
        ("/cluster/fault", {"process": "anchor", "signal": "STOP"}),
        ("/cluster/drain", {"rank": 0}),
        ("/cluster/fault", {"process": "anchor", "signal": "CONT"}),
    ]
    record, _ = inject(view, *blows, is_local=False, status=409)
    assert not record.is_injected and all("409" in why for why in record.missed)


def test_who_was_hit_is_who_the_server_says():
    record, _ = inject(cluster(7, 8), Blow(0, EXPERT, "KILL"), is_local=False, answer={"incarnation": 4, "pid": 99})
    assert "KILL to expert 0 (pid 99, incarnation 4)" in record.hit[0]


def test_a_drain_is_asked_for_even_here(children):
    record, posted = inject(cluster(children[0].pid, children[1].pid), Blow(0, EXPERT, "drain"), status=202)
    assert posted == [("/cluster/drain", {"rank": 1})] and record.is_injected


# -- devices -------------------------------------------------------------------------------------


def on_devices(*states: str) -> dict:
    """A server with an attention and an expert worker on each device."""
    num = len(states)
    workers = [worker(i, "attention" if i < num else "expert", 0) for i in range(2 * num)]
    devices = [{"device": i, "state": state, "workers": [i, num + i]} for i, state in enumerate(states)]
    return cluster(0, 0) | {"workers": workers, "devices": devices}


def absence(device: int) -> Blow:
    request = Request("/cluster/fault", {"device": device, "gone": True})
    undo = Request("/cluster/return", {"device": device})
    return Blow(0, Victim("device", device), "absence", 600, request, undo, takes=(device,))


GONE, RETURN = ("/cluster/fault", {"device": 1, "gone": True}), ("/cluster/return", {"device": 1})


def test_a_device_that_is_gone_returns_at_the_end():
    record, posted = inject(on_devices(*["serving"] * 4), absence(1))
    assert posted == [GONE, RETURN]
    assert record.hit == ("absence for 600.000 s of device 1",)


def test_a_device_returns_as_soon_as_there_is_an_orchestrator():
    _, posted = inject(on_devices(*["serving"] * 4), absence(1), status=[200, 503, 409, 200])
    assert posted == [GONE, RETURN, RETURN, RETURN]


def test_a_device_that_may_be_gone_is_returned(monkeypatch):
    """The orchestrator dies before it answers: the next one says that the device is gone already."""
    monkeypatch.setattr(faults, "_PATIENCE_S", 0.1)
    statuses = itertools.chain([503], itertools.repeat(409, 20), itertools.repeat(200))
    posted: list[str] = []

    async def respond(asked: Asked) -> AsyncIterator[bytes]:
        if asked.path == "/cluster":
            yield json_answer(on_devices(*["serving"] * 4))
        elif asked.path == "/cluster/return":
            posted.append(asked.path)
            yield json_answer({})
        else:
            yield json_answer({}, next(statuses))

    async def main() -> InjectedFault:
        async with serving(respond) as url:
            injector, until = Injector(Target(url), None), asyncio.Event()
            run = asyncio.ensure_future(injector.run([Fault(0.01, "a kind", (absence(1),))], until))
            while not injector.records:
                await asyncio.sleep(0.001)
            until.set()
            await run
            return injector.records[0]

    record = asyncio.run(main())
    assert not record.is_injected and posted == ["/cluster/return"]


def test_devices_that_cannot_be_spared_stay():
    record, posted = inject(on_devices("gone", "serving", "serving", "down"), absence(1))
    assert not record.is_injected and not posted and "too few devices" in record.missed[0]


def test_a_worker_that_has_retired_is_missed(children):
    retired = Blow(0, Victim("attention", 1), "KILL")
    record, _ = inject(cluster(children[0].pid, children[1].pid), retired)
    assert not record.is_injected and children[0].poll() is None


def test_what_the_cluster_says_of_devices():
    view = View(on_devices("serving", "gone"))
    assert view.seats.devices == (Device(0, 1, 1), Device(1, 1, 1)) and view.devices_away == {1}


# -- the server from outside ---------------------------------------------------------------------


def test_what_the_cluster_says(children):
    view = View(cluster(children[0].pid, children[1].pid, children[2].pid))
    assert view.is_whole and not view.busy
    assert (view.seats.num_attention, view.seats.num_expert, view.seats.processes) == (1, 1, ("anchor",))
    assert root_here(view) == os.getpid()
    assert root_here(View(cluster(children[0].pid, children[1].pid, os.getppid()))) is None
    view.workers[0] |= {"state": "starting", "running": 1}
    assert not view.is_whole and "1 running" in view.busy[0]


@pytest.mark.parametrize(
    ("status", "says"), [(403, "--enable-chaos"), (401, "--api-key"), (200, "Everserve"), (404, None)]
)
def test_a_server_must_allow_faults(status, says):
    async def respond(asked: Asked) -> AsyncIterator[bytes]:
        yield json_answer({}, status)

    async def main() -> None:
        async with serving(respond) as url:
            await Target(url).check_chaos()

    if says is None:
        asyncio.run(main())
        return
    with pytest.raises(ConfigError, match=says):
        asyncio.run(main())


def test_which_key_is_sent():
    seen: list[str | None] = []

    async def respond(asked: Asked) -> AsyncIterator[bytes]:
        seen.append(asked.headers.get("authorization"))
        yield json_answer({}, 404)

    async def main() -> None:
        async with serving(respond) as url:
            for keys in (("client", "operator"), ("client", None), (None, "operator"), (None, None)):
                for method, path in (("GET", "/cluster"), ("POST", "/cluster/fault"), ("POST", "/cluster/return")):
                    await Target(url, *keys).ask(method, path)

    asyncio.run(main())
    client, operator = "Bearer client", "Bearer operator"
    assert seen == [client, operator, operator, client, client, client, operator, operator, operator, None, None, None]


def test_metrics_are_summed_over_labels():
    text = b'# HELP a b\na_total{x="1"} 2.0\na_total{x="2"} 3.0\nb 1e-05\n'

    async def respond(asked: Asked) -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n\r\n" + text

    async def main() -> dict[str, float]:
        async with serving(respond) as url:
            return await Target(url).metrics()

    assert asyncio.run(main()) == {"a_total": 5.0, "b": 1e-05}
