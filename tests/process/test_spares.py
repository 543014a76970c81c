"""Processes that wait to become workers: they do, they are replaced, and nobody trips over a bad one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everserve.procs import process
from tests.support import cluster as c
from tests.support.cluster import DECODE, Fault

FLAGS = ("--attention-workers", "2", "--expert-workers", "2", "--spares", "1", "--enable-chaos", *c.PATIENT,
         "--log-format", "json")  # fmt: skip


@pytest.fixture
def whole(shared):
    c.wait_whole(shared)
    wait_spare(shared)
    return shared


def spares(server) -> list[int]:
    return [p["pid"] for p in c.cluster(server)["processes"] if p["name"].startswith("spare-")]


def wait_spare(server, but: int = 0) -> int:
    """One that is ready, and not that one."""
    c.wait_until(lambda: spares(server) not in ([], [but]), what="a spare")
    return spares(server)[0]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def replaced(server, rank: int, incarnation: int) -> int:
    """The pid of the next one in this seat, which is ready."""
    c.wait_until(
        lambda: (w := c.worker(server, rank))["incarnation"] > incarnation and w["state"] == "ready", what="a successor"
    )
    return c.worker(server, rank)["pid"]


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.long)])
def test_a_spare_takes_the_seat(whole, expected, rank):
    spare = wait_spare(whole)
    assert name_of(spare) == "es-spare" and c.metric(whole, "everserve_spares") == 1
    assert c.cluster(whole)["spares"] == {"ready": 1, "wanted": 1}
    fault = Fault(whole, rank, signal.SIGKILL)
    streams = c.run_with(whole, DECODE, c.in_decode, fault)
    fault.assert_landed()
    c.assert_equal(streams, expected)
    assert replaced(whole, rank, fault.incarnation) == spare and name_of(spare) == f"es-worker-{rank}"
    assert wait_spare(whole, but=spare) != spare
    assert c.run_all(whole, DECODE) == expected, "the new one does its part"


def test_every_process_logs_json(whole):
    """After deaths of all kinds, or before: no line is anything else."""
    lines = [json.loads(line) for line in whole.log_text().splitlines()]
    assert all({"time", "level", "process", "pid", "logger", "message"} <= line.keys() for line in lines)
    workers = {f"worker-{rank}" for rank in range(4)}
    assert {line["process"] for line in lines} >= {"supervisor", "orchestrator", *workers}
    assert any("ready at http://" in line["message"] for line in lines if line["process"] == "supervisor")


def test_workers_die_first_when_memory_is_short(whole):
    """By what the kernel chooses with: its score of each process, besides its size."""
    base = int(Path("/proc/self/oom_score_adj").read_text())
    scores = {p["name"]: p["pid"] for p in c.cluster(whole)["processes"]}
    scores |= {f"worker {one['rank']}": one["pid"] for one in c.cluster(whole)["workers"]}
    for name, pid in scores.items():
        is_worker = name.startswith(("worker", "spare"))
        step = 2 if is_worker else 0 if name in ("root", "keeper") else 1
        expected = min(base + 300 * step, 1000)
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == expected, name
    assert len(scores) == 12, "root, a keeper, five that can be replaced, four workers, a spare"


def test_two_at_once(whole):
    """One gets the spare, the other one is forked as ever."""
    spare, faults = wait_spare(whole), [Fault(whole, rank, signal.SIGKILL) for rank in (0, 2)]
    for fault in faults:
        fault()
    pids = [replaced(whole, fault.rank, fault.incarnation) for fault in faults]
    assert spare in pids and len(set(pids)) == 2
    wait_spare(whole, but=spare)


def test_a_spare_that_dies_is_replaced(whole):
    spare = wait_spare(whole)
    os.kill(spare, signal.SIGKILL)
    c.wait_until(lambda: spare not in spares(whole), what="notice")
    wait_spare(whole, but=spare)
    assert process.state_of(spare) is None, "nobody mourned it"


def test_a_spare_that_dies_at_the_wrong_moment(whole, expected):
    spare, fault = wait_spare(whole), Fault(whole, 1, signal.SIGKILL)

    def both() -> None:
        os.kill(spare, signal.SIGKILL)
        fault()

    streams = c.run_with(whole, DECODE, c.in_decode, both)
    c.assert_equal(streams, expected)
    assert replaced(whole, 1, fault.incarnation) != spare


def test_a_spare_that_is_stopped_is_replaced(whole):
    spare = wait_spare(whole)
    os.kill(spare, signal.SIGSTOP)
    wait_spare(whole, but=spare)
    c.wait_until(lambda: not c.is_alive(spare), what="its end")


def test_a_stopped_spare_is_not_given_a_seat(whole):
    spare, fault = wait_spare(whole), Fault(whole, 3, signal.SIGKILL)
    os.kill(spare, signal.SIGSTOP)
    fault()
    assert replaced(whole, 3, fault.incarnation) != spare
    seats = {e["worker_pid"]: e["incarnation"] for e in whole.events() if e["event"] == "worker_started"}
    assert spare not in seats, "it was not tried first, until ten seconds without a hello were over"
    assert seats[c.worker(whole, 3)["pid"]] == fault.incarnation + 1
    c.wait_until(lambda: not c.is_alive(spare), what="its end")


def test_a_spare_that_stops_when_it_has_just_been_given_a_seat(whole):
    """It is a worker then, and is treated as one: after its hello by its pulse, before by a limit of ten seconds."""
    spare, fault = wait_spare(whole), Fault(whole, 0, signal.SIGKILL)
    fault()
    c.wait_until(lambda: c.started(whole, 0, after=fault.incarnation), what="a successor")
    os.kill(spare, signal.SIGSTOP)
    assert replaced(whole, 0, fault.incarnation + 1) != spare, "the stopped one is killed ten seconds later"


def test_a_spare_ends_with_its_zygote(whole, expected):
    def zygote() -> int:
        return next((p["pid"] for p in c.cluster(whole)["processes"] if p["name"] == "zygote"), 0)

    spare, old, fault = wait_spare(whole), zygote(), Fault(whole, 0, signal.SIGKILL)

    def both() -> None:
        os.kill(old, signal.SIGKILL)
        fault()

    streams = c.run_with(whole, DECODE, c.in_decode, both)
    c.assert_equal(streams, expected)
    c.wait_until(lambda: zygote() not in (0, old), what="a new zygote")
    c.wait_until(lambda: not c.is_alive(spare), what="its end")
    c.wait_whole(whole)
    new = wait_spare(whole, but=spare)
    fault = Fault(whole, 2, signal.SIGKILL)
    fault()
    assert replaced(whole, 2, fault.incarnation) == new


def test_a_drain_takes_one_too(whole):
    spare, old = wait_spare(whole), c.worker(whole, 1)
    assert c.post(whole, "/cluster/drain", {"rank": 1}).status_code == 202
    assert replaced(whole, 1, old["incarnation"]) == spare


def test_status_says_how_many_there_are(whole):
    command = [sys.executable, "-m", "everserve.cli", "status", "--url", whole.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "spares: 1 of 1 ready" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_nobody_is_left(start_server, signum):
    with start_server("--spares", "3") as server:
        c.wait_until(lambda: len(spares(server)) == 3, what="three spares")
        os.kill(spares(server)[0], signal.SIGSTOP)
        everybody = [server.process.pid, *process.children_of(server.process.pid)]
        server.process.send_signal(signum)
        assert server.process.wait(timeout=90) == (0 if signum == signal.SIGTERM else -signum)
        if signum == signal.SIGTERM:
            assert not any(c.is_alive(pid) for pid in everybody)
        c.wait_until(lambda: not any(c.is_alive(pid) for pid in everybody), what="the end of everybody")


def test_too_many_are_refused():
    command = [sys.executable, "-m", "everserve.cli", "serve", "demo", "--spares", "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--spares" in done.stderr
