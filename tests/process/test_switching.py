"""Workers change their roles under running streams, by hand and because a device is gone: every token as in an
undisturbed run."""

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from tests.support import cluster as c
from tests.support.shared_servers import CLUSTER

ASKS = c.asks(6, num_prompt=40, max_tokens=120)
ON_GONE = ("--shadow-experts", "0", "--on-lost-expert", "switch-role", "--enable-chaos", *c.PATIENT)


@pytest.fixture(scope="module")
def expected(server):
    return c.right_answers(server, ASKS)


@pytest.fixture(scope="module")
def shared(shared_servers):
    """Its workers have other roles in the end."""
    with shared_servers.lend(*CLUSTER) as running:
        yield running
        assert running.process.poll() is None, running.log_text()


def has(server, attention: int, expert: int) -> bool:
    roles = Counter(role for worker in c.cluster(server)["workers"] for role in worker["roles"])
    return roles == {"attention": attention, "expert": expert}


def switch(server, rank: int, role: str) -> None:
    answer = c.post(server, "/cluster/switch", {"rank": rank, "role": role})
    assert answer.status_code == 200, answer.text


def kill_orchestrator(server) -> None:
    """Until the next one has taken over: before that the gateway shows what the last one has told."""
    (pid,) = [process["pid"] for process in c.cluster(server)["processes"] if process["name"] == "orchestrator"]
    num_before = len(told(server, "orchestrator_recovered"))
    os.kill(pid, signal.SIGKILL)
    c.wait_until(lambda: len(told(server, "orchestrator_recovered")) > num_before, what="another orchestrator")


def wait_for(server, attention: int, expert: int) -> None:
    c.wait_until(lambda: has(server, attention, expert) and c.is_whole(server), what=f"{attention}+{expert} workers")


def told(server, name: str) -> list[dict]:
    return [event for event in server.events() if event["event"] == name]


def test_there_and_back_under_load(shared, expected):
    num_faults, num_switches = len(told(shared, "fault_detected")), len(told(shared, "switch_done"))

    def act() -> None:
        command = [sys.executable, "-m", "everserve.cli", "switch", "1", "--role", "expert", "--url", shared.url]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        assert said.stdout.splitlines()[-1].startswith("done after")
        wait_for(shared, 1, 3)
        switch(shared, 2, "attention")  # another one than came
        wait_for(shared, 2, 2)

    c.under_load(shared, ASKS, expected, act)
    assert {worker["rank"]: worker["roles"] for worker in c.cluster(shared)["workers"]} == {
        0: ["attention"], 1: ["expert"], 2: ["attention"], 3: ["expert"]
    }  # fmt: skip
    assert len(told(shared, "fault_detected")) == num_faults
    done = told(shared, "switch_done")[num_switches:]
    assert [(event["rank"], event["role"]) for event in done] == [(1, "expert"), (2, "attention")]


def test_processes_die_in_the_middle(shared, expected):
    """The worker before it has left, its successor, and the orchestrator."""

    def pid(rank: int, after: int) -> int:
        worker = c.worker(shared, rank)
        return worker["pid"] if worker["incarnation"] > after else 0

    def act() -> None:
        before = c.worker(shared, 0)
        os.kill(before["pid"], signal.SIGSTOP)  # it leaves within milliseconds
        switch(shared, 0, "expert")
        os.kill(before["pid"], signal.SIGKILL)
        c.wait_until(lambda: pid(0, before["incarnation"]), what="a successor")
        os.kill(pid(0, before["incarnation"]), signal.SIGKILL)
        kill_orchestrator(shared)
        wait_for(shared, 1, 3)
        switch(shared, 0, "attention")
        kill_orchestrator(shared)
        wait_for(shared, 2, 2)

    c.under_load(shared, ASKS, expected, act)
    started = [event for event in shared.events("supervisor") if event["event"] == "worker_started"]
    numbers = [(event["rank"], event["incarnation"]) for event in started]
    assert len(set(numbers)) == len(numbers), "an incarnation is never used again"


def test_what_cannot_be_is_refused(shared):
    for rank, role, reason in [(9, "expert", "no rank 9"), (0, "attention", "already")]:
        answer = c.post(shared, "/cluster/switch", {"rank": rank, "role": role})
        assert answer.status_code == 409 and reason in answer.json()["error"]["message"]


@pytest.mark.long
def test_an_attention_worker_stands_in_for_a_device_that_is_gone(start_server, expected):
    with start_server("--attention-workers", "3", "--expert-workers", "2", *ON_GONE) as server:

        def change(path: str, **body: object) -> None:
            answer = c.post(server, path, {"device": 4, **body})
            assert answer.status_code == 200, answer.text

        def act() -> None:
            change("/cluster/fault", gone=True)
            c.wait_until(lambda: not c.cluster(server)["violations"], what="a place for every expert")
            assert has(server, 2, 3)
            change("/cluster/return")
            wait_for(server, 3, 2)

        c.under_load(server, ASKS, expected, act)
        assert "Traceback" not in server.log_text(), server.log_text()
        began = [event["role"] for event in server.events() if event["event"] == "switch_began"]
        assert began == ["expert", "attention"]
