"""More and fewer workers under running streams: every token as in an undisturbed run."""

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from tests.support import cluster as c

FLAGS = ("--attention-workers", "1", "--expert-workers", "4", "--max-workers", "8", *c.PATIENT)
NO_PID = 1 << 30
ASKS = c.asks(6, num_prompt=40, max_tokens=120)


@pytest.fixture(scope="module")
def expected(server):
    return c.right_answers(server, ASKS)


def size(server) -> Counter[str]:
    return Counter(role for worker in c.cluster(server)["workers"] for role in worker["roles"])


def has(server, attention: int, expert: int) -> bool:
    return size(server) == {"attention": attention, "expert": expert} and c.is_whole(server)


def scale(server, attention: int, expert: int) -> dict:
    answer = c.post(server, "/cluster/scale", {"attention": attention, "expert": expert})
    assert answer.status_code == 200, answer.text
    return answer.json()


def incarnations(server) -> list[tuple[int, int]]:
    started = [e for e in server.events("supervisor") if e["event"] == "worker_started"]
    return [(event["rank"], event["incarnation"]) for event in started]


def test_up_and_down_under_load(shared, expected):
    def up_and_down() -> None:
        assert scale(shared, 2, 5)["added"] == [5, 6]
        c.wait_until(lambda: has(shared, 2, 5), what="more workers")
        c.wait_until(lambda: c.worker(shared, 5)["requests"] > 0, what="streams of the new attention worker")
        command = [sys.executable, "-m", "everserve.cli", "scale", "--attention", "1", "--expert", "2"]
        said = subprocess.run([*command, "--url", shared.url], check=True, capture_output=True, text=True, timeout=120)
        assert said.stdout.splitlines()[-1].startswith("done after")

    c.under_load(shared, ASKS, expected, up_and_down)
    assert has(shared, 1, 2)
    done = [event for event in shared.events() if event["event"] == "scale_done"]
    assert [(event["attention"], event["expert"]) for event in done[-2:]] == [(2, 5), (1, 2)]
    assert [event for event in shared.events() if event["event"] == "fault_detected"] == []
    assert not c.metric(shared, "everserve_failovers_total")
    moved = [event["rank"] for event in shared.events() if event["event"] == "experts_moved"]
    assert {1, 2} <= set(moved), "those that stay have taken over experts of those that left"


def test_workers_die_in_the_middle(shared, expected):
    """One that is there, one that is new, and one that should retire."""

    def pid(rank: int) -> int:
        found = [worker for worker in c.cluster(shared)["workers"] if worker["rank"] == rank]
        return found[0]["pid"] if found else 0

    def kill(rank: int) -> None:
        c.wait_until(lambda: pid(rank), what=f"a process in rank {rank}")
        os.kill(pid(rank), signal.SIGKILL)

    def act() -> None:
        scale(shared, 2, 4)
        kill(1)
        kill(5)
        c.wait_until(lambda: has(shared, 2, 4), what="more workers")
        scale(shared, 1, 2)
        with contextlib.suppress(ProcessLookupError):  # it may have left
            os.kill(pid(3) or NO_PID, signal.SIGKILL)
        c.wait_until(lambda: has(shared, 1, 2), what="fewer workers")

    c.under_load(shared, ASKS, expected, act)
    started = incarnations(shared)
    assert len(set(started)) == len(started), "an incarnation is never used again"


def test_a_new_orchestrator_goes_on(shared, expected):
    def act() -> None:
        scale(shared, 2, 3)
        (orchestrator,) = [p["pid"] for p in c.cluster(shared)["processes"] if p["name"] == "orchestrator"]
        os.kill(orchestrator, signal.SIGKILL)
        c.wait_until(lambda: has(shared, 2, 3), what="more workers")
        scale(shared, 1, 2)
        (orchestrator,) = [p["pid"] for p in c.cluster(shared)["processes"] if p["name"] == "orchestrator"]
        os.kill(orchestrator, signal.SIGKILL)
        c.wait_until(lambda: has(shared, 1, 2), what="fewer workers")

    c.under_load(shared, ASKS, expected, act)
    started = incarnations(shared)
    assert len(set(started)) == len(started), "an incarnation is never used again"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"attention": 5, "expert": 4}, "room for 8 workers"),
        ({"attention": 0}, "at least one attention worker"),
        ({"expert": 1}, "cannot hold"),
        ({"devices": 2}, "a device of its own"),
    ],
)
def test_what_cannot_be_is_refused(shared, body, reason):
    answer = c.post(shared, "/cluster/scale", body)
    assert answer.status_code == 409 and reason in answer.json()["error"]["message"]
    assert size(shared) == {"attention": 1, "expert": 2}


@pytest.mark.long
def test_whole_devices_come_and_go_and_one_is_lost(start_server, expected):
    """The device that is gone does not count; when it returns, no worker is on it."""
    flags = ("-dp", "2", "--enable-expert-parallel", "--max-workers", "8", "--enable-chaos", *c.PATIENT)
    with start_server(*flags) as server:

        def devices() -> set[int]:
            return {worker["device"] for worker in c.cluster(server)["workers"]}

        def scale_to(number: int) -> None:
            answer = c.post(server, "/cluster/scale", {"devices": number})
            assert answer.status_code == 200 and answer.json()["devices"] == number, answer.text
            c.wait_until(lambda: has(server, number, number), what=f"{number} devices")

        def act() -> None:
            scale_to(3)
            assert devices() == {0, 1, 2}
            assert c.post(server, "/cluster/fault", {"device": 1, "gone": True}).status_code == 200
            scale_to(3)
            assert devices() == {0, 2, 3}
            assert c.post(server, "/cluster/return", {"device": 1}).status_code == 200
            scale_to(2)
            assert devices() == {0, 2}

        c.under_load(server, ASKS, expected, act)
        started = incarnations(server)
        assert len(set(started)) == len(started), "an incarnation is never used again"
        assert "Traceback" not in server.log_text(), server.log_text()
