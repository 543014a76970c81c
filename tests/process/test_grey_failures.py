"""Workers that live and do not do their work: one that is stopped most of the time, and main threads that hang."""

import contextlib
import threading
from collections.abc import Iterator

from everserve_bench.duty import DutyCycle
from tests.support import cluster as c
from tests.support.cluster import DECODE

# Silence is longer than any stop of a duty cycle, also where a busy machine makes stops longer than they should be.
FLAGS = ("--attention-workers", "2", "--expert-workers", "3", "--enable-chaos", "--detect-ms", "2000")


@contextlib.contextmanager
def load(server, expected) -> Iterator[None]:
    """The same streams again and again, each compared."""
    is_over, answers = threading.Event(), []

    def run() -> None:
        while not is_over.is_set():
            answers.append(c.run_all(server, DECODE))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert answers and all(answer == expected for answer in answers)


def told(server, name: str, rank: int) -> list[dict]:
    return [event for event in server.events() if event["event"] == name and event["rank"] == rank]


def test_a_worker_that_is_stopped_most_of_the_time_is_asked_last_until_it_is_not(shared, expected):
    c.wait_whole(shared)
    before = c.worker(shared, 3)
    with load(shared, expected):
        with DutyCycle(before["pid"], period_s=0.05, stopped=0.85) as cycle:
            c.wait_until(lambda: told(shared, "worker_slow", 3), what="the demotion")
            c.wait_until(lambda: c.worker(shared, 3)["slowness"] > 1.5, what="the number")
            assert c.metric(shared, "everserve_worker_slowness") > 0
            assert c.process_state(before["pid"]) is not None and cycle.num_seen_stopped > 0, "it did not land"
        (slow,) = told(shared, "worker_slow", 3)
        assert slow["level"] == "demoted" and slow["ratio"] > 2
        assert c.cluster(shared)["violations"] == []
        c.wait_until(lambda: told(shared, "worker_recovered", 3), what="the recovery")
    after = c.worker(shared, 3)
    assert (after["slow"], after["incarnation"]) == (False, before["incarnation"]), "neither lost nor replaced"
    assert not told(shared, "fault_detected", 3)
    c.wait_whole(shared)


def test_main_threads_that_hang_in_living_processes_are_found(shared, expected):
    """An attention and an expert worker at once; all other threads of theirs go on."""
    c.wait_whole(shared)
    before = {rank: c.worker(shared, rank) for rank in (0, 3)}

    def hang() -> None:
        for rank in before:
            answer = c.post(shared, "/cluster/fault", {"rank": rank, "signal": "HANG"})
            assert answer.status_code == 200, answer.text

    streams = c.run_with(shared, DECODE, c.in_decode, hang)
    c.assert_equal(streams, expected)
    for rank, victim in before.items():
        found: list[dict] = []
        is_found = lambda: found.extend(c.detected(shared, rank, victim["incarnation"])) or found  # noqa: B023, E731
        c.wait_until(is_found, what="the detection")
        assert found[0]["cause"] == "hang" and "its main thread hangs" in found[0]["reason"], found
        assert c.worker(shared, rank)["incarnation"] > victim["incarnation"]
    c.wait_whole(shared)
    assert c.run_all(shared, DECODE) == expected


def test_only_a_worker_can_be_told_to_hang(shared):
    answer = c.post(shared, "/cluster/fault", {"process": "orchestrator", "signal": "HANG"})
    assert answer.status_code == 400 and "Only a worker" in answer.text
