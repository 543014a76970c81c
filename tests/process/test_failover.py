"""Workers die and hang under running streams; every stream is what it would have been."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from everserve_bench.load import Ask
from tests.support import cluster as c
from tests.support.cluster import DECODE, PREFILL, Fault
from tests.support.shared_servers import CLUSTER, CLUSTER_OF_SMALL_STEPS

NUM_ATTENTION, NUM_EXPERT = 2, 2
ATTENTION_RANKS = range(NUM_ATTENTION)
EXPERT_RANKS = range(NUM_ATTENTION, NUM_ATTENTION + NUM_EXPERT)
# One of each kind, one while streams decode and one while prompts are computed; more when there is time.
CASES = [("decode", ATTENTION_RANKS[0]), ("prefill", EXPERT_RANKS[-1])]
FURTHER = [("decode", ATTENTION_RANKS[1]), ("decode", EXPERT_RANKS[0]), ("prefill", ATTENTION_RANKS[0])]
CASES += [pytest.param(phase, rank, marks=pytest.mark.long) for phase, rank in FURTHER]


@pytest.fixture(scope="module")
def shared(shared_servers):
    """One cluster for all faults: it must be whole again after each."""
    with shared_servers.lend(*CLUSTER_OF_SMALL_STEPS) as running:
        yield running
        assert running.process.poll() is None, running.log_text()


@pytest.fixture(scope="module")
def expected(server):
    """The right answers, by one process that has all experts itself."""
    return {"decode": c.right_answers(server, DECODE), "prefill": c.right_answers(server, PREFILL)}


def test_a_cluster_answers_what_one_process_answers(whole, expected):
    assert c.run_all(whole, DECODE) == expected["decode"]
    assert c.run_all(whole, PREFILL) == expected["prefill"]


def prefilled_by(server, rank: int):
    """Whoever dies, it does so while it works on prompts."""
    return c.in_prefill(server, rank if rank in ATTENTION_RANKS else None)


@pytest.mark.parametrize(("phase", "rank"), CASES)
def test_sigkill(whole, expected, phase, rank):
    fault = Fault(whole, rank, signal.SIGKILL)
    wanted, when = (DECODE, c.in_decode) if phase == "decode" else (PREFILL, prefilled_by(whole, rank))
    streams = c.run_with(whole, wanted, when, fault)
    fault.assert_landed()
    c.assert_equal(streams, expected[phase])
    c.wait_whole(whole)


# Text that repeats itself: streams get several tokens in a step.
REPEATING = [
    Ask([(7 * i + 13 * j) % 4000 + 5 for j in range(8)] * 6, 96, params)
    for i, params in enumerate(
        ({}, {}, {"temperature": 0.5, "seed": 7}, {"temperature": 0.5, "seed": 8, "frequency_penalty": 0.3})
    )
]


def test_drafts_change_no_stream_of_a_worker_that_dies(whole, start_server):
    with start_server("--speculative-config", '{"num_speculative_tokens": 0}') as plain:
        right = c.run_all(plain, REPEATING)
        assert not c.metric(plain, "vllm:spec_decode_num_drafts_total")
    assert [c.run_all(whole, [ask])[0] for ask in REPEATING] == right
    assert c.metric(whole, "vllm:spec_decode_num_drafts_total") > 0
    fault = Fault(whole, ATTENTION_RANKS[0], signal.SIGKILL)
    streams = c.run_with(whole, REPEATING, c.in_decode, fault)
    fault.assert_landed()
    c.assert_equal(streams, right)
    c.wait_whole(whole)


@pytest.mark.parametrize(("phase", "rank"), CASES)
def test_sigstop_and_a_late_awakening(whole, expected, phase, rank):
    """A stopped worker is replaced; when it wakes up, nothing that it says counts, and it exits."""
    fault = Fault(whole, rank, signal.SIGSTOP)
    wanted, when = (DECODE, c.in_decode) if phase == "decode" else (PREFILL, prefilled_by(whole, rank))
    streams = c.run_with(whole, wanted, when, fault)
    fault.assert_landed()
    c.assert_equal(streams, expected[phase])
    c.wait_whole(whole)
    fault.wake()
    c.wait_until(lambda: not c.is_alive(fault.pid), what="the exit of the fenced worker")
    assert c.run_all(whole, DECODE) == expected["decode"]


def stop_until_fenced(fault: Fault) -> None:
    fault()
    fault.wake()


def test_what_a_fenced_worker_sends_is_counted(whole, expected):
    """An expert worker that is stopped while it computes, or with requests in its boxes: when it wakes up it answers
    too late, or says what it dropped."""
    before = c.metric(whole, "everserve_stale_messages_total")

    def attempt() -> bool:
        fault = Fault(whole, EXPERT_RANKS[0], signal.SIGSTOP)
        streams = c.run_with(whole, PREFILL, c.in_prefill(whole), lambda: stop_until_fenced(fault))
        fault.assert_landed()
        c.wait_until(lambda: not c.is_alive(fault.pid), what="the exit of the fenced worker")
        c.assert_equal(streams, expected["prefill"])
        c.wait_whole(whole)
        return c.metric(whole, "everserve_stale_messages_total") > before

    c.until_it_hits(attempt)  # it may be stopped between two batches: then it has nothing to say


def test_a_worker_and_then_its_replacement(whole, expected):
    """The second fault hits while the first replacement loads, which takes a fraction of a second."""

    def attempt() -> bool:
        incarnation = kill_with_replacement(whole, expected, EXPERT_RANKS[0])
        ready = [e for e in whole.events(f"worker-{EXPERT_RANKS[0]}") if e["event"] == "worker_became_ready"]
        return not any(event["incarnation"] == incarnation for event in ready)

    c.until_it_hits(attempt)


def kill_with_replacement(whole, expected, rank) -> int:
    """Returns the incarnation of the replacement."""
    first = Fault(whole, rank, signal.SIGKILL)
    second: list[dict] = []

    def twice() -> None:
        first()
        c.wait_until(lambda: c.started(whole, rank, after=first.incarnation), what="the replacement")
        second.append(c.started(whole, rank, after=first.incarnation))
        os.kill(second[0]["worker_pid"], signal.SIGKILL)

    streams = c.run_with(whole, DECODE, c.in_decode, twice)
    first.assert_landed()
    c.wait_until(lambda: c.detected(whole, rank, second[0]["incarnation"]), what="the second detection")
    c.assert_equal(streams, expected["decode"])
    c.wait_whole(whole)
    return second[0]["incarnation"]


def test_one_of_each_kind_at_once(whole, expected):
    faults = [Fault(whole, 0, signal.SIGKILL), Fault(whole, EXPERT_RANKS[-1], signal.SIGKILL)]
    streams = c.run_with(whole, DECODE, c.in_decode, lambda: [fault() for fault in faults])
    for fault in faults:
        fault.assert_landed()
    c.assert_equal(streams, expected["decode"])
    c.wait_whole(whole)


def test_all_attention_workers_at_once(whole, expected):
    """Nobody is left to take the streams; they wait for the replacements."""
    faults = [Fault(whole, rank, signal.SIGKILL) for rank in ATTENTION_RANKS]
    streams = c.run_with(whole, DECODE, c.in_decode, lambda: [fault() for fault in faults])
    for fault in faults:
        fault.assert_landed()
    c.assert_equal(streams, expected["decode"])
    c.wait_whole(whole)


@pytest.mark.long
@pytest.mark.parametrize("name", ["anchor", "zygote"])
def test_helpers_are_replaced(whole, expected, name):
    """Neither is needed to serve; both are needed to heal. (test_control_plane.py replaces all of them at once.)"""

    def pid() -> int:
        return next(p["pid"] for p in c.cluster(whole)["processes"] if p["name"] == name)

    old = pid()
    streams = c.run_with(whole, DECODE, c.in_decode, lambda: os.kill(old, signal.SIGKILL))
    c.wait_until(lambda: not c.is_alive(old))
    c.assert_equal(streams, expected["decode"])
    c.wait_until(lambda: pid() != old, what="a new one")
    fault = Fault(whole, EXPERT_RANKS[0], signal.SIGKILL)
    streams = c.run_with(whole, DECODE, c.in_decode, fault)
    fault.assert_landed()
    c.assert_equal(streams, expected["decode"])
    c.wait_whole(whole)


def test_kill_by_command(whole):
    victim = c.worker(whole, 1)
    command = [sys.executable, "-m", "everserve.cli", "kill", "1", "--url", whole.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    c.wait_until(lambda: not c.is_alive(victim["pid"]))
    assert any(event["event"] == "fault_injected" and event["rank"] == 1 for event in whole.events())
    c.wait_whole(whole)
    done = subprocess.run([*command[:-3], "77", "--url", whole.url], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "Traceback" not in done.stderr


@pytest.mark.long
def test_two_expert_workers_at_once(start_server, expected):
    """Three workers with every expert in three places survive the death of any two."""
    flags = ("--attention-workers", "1", "--expert-workers", "3", "--shadow-experts", "43")
    with start_server(*flags) as server:
        made = next(event for event in server.events() if event["event"] == "placement_made")
        assert made["survivable_deaths"] == 2
        faults = [Fault(server, rank, signal.SIGKILL) for rank in (1, 3)]
        streams = c.run_with(server, DECODE, c.in_decode, lambda: [fault() for fault in faults])
        for fault in faults:
            fault.assert_landed()
        c.assert_equal(streams, expected["decode"])
        assert not any(event["event"] == "streams_paused" for event in server.events())
        c.wait_whole(server)


@pytest.mark.long
def test_an_expert_without_a_place_makes_streams_wait(start_server, expected):
    """No shadows: clients see a pause, /cluster says why, and everything continues exactly."""
    flags = ("--attention-workers", "2", "--expert-workers", "2", "--shadow-experts", "0")
    with start_server(*flags) as server:
        made = next(event for event in server.events() if event["event"] == "placement_made")
        assert made["survivable_deaths"] == 0
        fault = Fault(server, 2, signal.SIGKILL)
        streams = c.run_with(server, DECODE, c.in_decode, fault)
        fault.assert_landed()
        c.assert_equal(streams, expected["decode"])
        c.wait_whole(server)
        events = server.events()
        assert any(event["event"] == "streams_paused" for event in events)
        assert any(event["event"] == "streams_continued" for event in events)
        told = [event for event in events if event["event"] == "epoch_published" and event["violations"]]
        assert any("no place" in violation for event in told for violation in event["violations"])


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_during_start_up(tmp_path, rank):
    """The instance starts anyway."""
    command = [
        *(sys.executable, "-m", "everserve.cli", "serve", "demo", "--port", "0", "--event-log", str(tmp_path)),
        *("--attention-workers", "1", "--expert-workers", "1"),
    ]

    def events() -> list[dict]:
        return [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]

    def named(name: str) -> list[dict]:
        return [event for event in events() if event["event"] == name]

    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            victim: list[int] = []

            def started() -> bool:
                victim[:] = [e["worker_pid"] for e in named("worker_started") if e["rank"] == rank]
                return bool(victim)

            c.wait_until(started, what="the start")
            assert not named("serving")
            os.kill(victim[0], signal.SIGKILL)
            c.wait_until(lambda: named("serving"), what="serving")
            assert any(e["rank"] == rank and e["incarnation"] == 1 for e in named("fault_detected"))
            url = named("serving")[0]["url"]
            assert httpx.get(f"{url}/health", timeout=None).status_code == 200
        finally:
            process.terminate()
            assert process.wait(timeout=90) == 0


@pytest.mark.long
def test_shutdown_with_a_stopped_worker(start_server):
    with start_server(*CLUSTER) as server:
        now = c.cluster(server)
        pids = [one["pid"] for one in now["processes"] + now["workers"]]
        os.kill(now["workers"][-1]["pid"], signal.SIGSTOP)
        server.process.terminate()
        assert server.process.wait(timeout=90) == 0
        assert not any(c.is_alive(pid) for pid in pids)


def test_a_crash_loop_backs_off_and_is_visible(whole):
    """Kill every incarnation of one seat as soon as it exists: the pause between them grows, and /cluster says so."""
    rank, began_s = EXPERT_RANKS[0], time.monotonic()

    def delays() -> list[float]:
        backed_off = [event for event in whole.events() if event["event"] == "worker_backed_off"]
        return [event["delay_s"] for event in backed_off if event["rank"] == rank and event["at_s"] > began_s]

    def backed_off() -> bool:
        pid = c.worker(whole, rank)["pid"]
        if pid:  # it may be ready already: that was not long ago
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(delays()) >= 2

    Fault(whole, rank, signal.SIGKILL)()
    c.wait_until(backed_off, what="backing off")
    first, *_, last = found = delays()
    assert found == sorted(found) and last > first
    c.wait_whole(whole)
