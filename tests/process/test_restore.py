"""A dead attention worker costs its streams neither a token nor a prefill: their KV comes from the log."""

import asyncio
import os
import signal

import pytest

from everserve.client import Stream
from tests.support import cluster as c
from tests.support.cluster import DECODE, PREFILL, Fault
from tests.support.shared_servers import CLUSTER_OF_SMALL_STEPS

WORKERS = ("--attention-workers", "2", "--expert-workers", "2", *c.PATIENT)
NO_CACHE = "--no-enable-prefix-caching"
LONG = c.asks(6, num_prompt=400, max_tokens=120)
LONGER = c.asks(6, num_prompt=400, max_tokens=360)  # where two kills, one after the other, must find them running


@pytest.fixture(scope="module")
def expected(server):
    return {
        "long": c.right_answers(server, LONG),
        "longer": c.right_answers(server, LONGER),
        "decode": c.right_answers(server, DECODE),
        "prefill": c.right_answers(server, PREFILL),
    }


@pytest.fixture(scope="module", params=["mirror", pytest.param("anchor", marks=pytest.mark.long)])
def logged(request, shared_servers):
    """A mirror is the default on a CPU."""
    log = ("--kv-log", "anchor") if request.param == "anchor" else ()
    with shared_servers.lend(*CLUSTER_OF_SMALL_STEPS, *log) as running:
        yield running


def restored(server, since: int = 0) -> list[dict]:
    return [event for event in server.events("worker") if event["event"] == "stream_restored"][since:]


def resumed(server, since: int = 0) -> list[dict]:
    return [event for event in server.events("gateway") if event["event"] == "request_resumed"][since:]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_nothing_is_computed_twice(logged, expected, rank):
    c.wait_whole(logged)
    recomputed = c.metric(logged, "everserve_tokens_recomputed_total")
    broken = c.metric(logged, "everserve_log_broken_tokens_total")
    before, taken = len(restored(logged)), len(resumed(logged))
    c.until_it_hits(lambda: kill(logged, rank, expected["long"]) or resumed(logged, taken))
    found, moved = restored(logged, before), resumed(logged, taken)
    assert len(found) == len(moved), "every stream of the dead worker was restored"
    assert all(event["num_restored"] >= 400 and event["num_recomputed"] <= 2 for event in found), found
    assert c.metric(logged, "everserve_tokens_recomputed_total") - recomputed <= 2 * len(found)
    assert c.metric(logged, "everserve_log_broken_tokens_total") == broken


def kill(server, rank: int, expected: list[list[int]]) -> None:
    c.wait_whole(server)
    fault = Fault(server, rank, signal.SIGKILL)
    streams = c.run_with(server, LONG, c.in_decode, fault)
    fault.assert_landed()
    c.assert_equal(streams, expected)


def test_a_log_that_cannot_be_read(logged, expected):
    """One bit of its header is wrong: its streams are computed again, and no other worker dies of it."""
    c.wait_whole(logged)
    unreadable, other = c.metric(logged, "everserve_unreadable_logs_total"), c.worker(logged, 1)["incarnation"]
    c.until_it_hits(lambda: damage_its_log_and_kill_it(logged, expected))
    assert c.metric(logged, "everserve_unreadable_logs_total") > unreadable
    assert c.worker(logged, 1)["incarnation"] == other


def damage_its_log_and_kill_it(logged, expected) -> list[dict]:
    """Returns its streams that went on elsewhere."""
    before, fault = len(resumed(logged)), Fault(logged, 0, signal.SIGKILL)
    # The log is looked for before streams begin: on busy cores that takes longer than some streams.
    with c.memory_file(logged, "log-0").open("r+b", buffering=0) as memory:

        def damage_and_kill() -> None:
            (byte,) = os.pread(memory.fileno(), 1, 3)
            os.pwrite(memory.fileno(), bytes([byte ^ 1]), 3)
            fault()

        streams = c.run_with(logged, LONGER, c.in_decode, damage_and_kill)
    fault.assert_landed()
    c.assert_equal(streams, expected["longer"])
    c.wait_whole(logged)
    return resumed(logged, before)


def test_a_stream_in_the_middle_of_its_prompt(logged, expected):
    """What was computed of the prompt is not lost either."""
    c.until_it_hits(lambda: kill_in_prefill(logged, expected["prefill"]))


def kill_in_prefill(logged, expected: list[list[int]]) -> list[dict]:
    """Returns what was restored of prompts that were not whole."""
    c.wait_whole(logged)
    before = len(restored(logged))
    fault = Fault(logged, 0, signal.SIGKILL)
    streams = c.run_with(logged, PREFILL, well_into_prefill(logged, 0), fault)
    fault.assert_landed()
    c.assert_equal(streams, expected)
    return [event for event in restored(logged, before) if 0 < event["num_restored"] < len(PREFILL[0].prompt)]


def well_into_prefill(server, rank: int):
    """It has told of several steps: all but the last are in its log."""
    is_begun, seen = c.in_prefill(server, rank), set()

    def check(streams: list[Stream]) -> bool:
        lines = c.get(server, "/metrics").text.splitlines()
        name = f'everserve_prefill_cost_total{{rank="{rank}"}} '
        seen.update(line for line in lines if line.startswith(name))
        return is_begun(streams) and len(seen) > 2

    return check


def test_the_one_who_took_over_dies_too(logged, expected):
    """From log to log."""
    c.wait_whole(logged)
    before = len(restored(logged))
    first, second = Fault(logged, 0, signal.SIGKILL), Fault(logged, 1, signal.SIGKILL)

    def one_after_the_other() -> None:
        first()
        c.wait_until(lambda: len(restored(logged, before)) >= 1, what="a restored stream")
        second()

    streams = c.run_with(logged, LONGER, c.in_decode, one_after_the_other)
    first.assert_landed()
    second.assert_landed()
    c.assert_equal(streams, expected["longer"])


def test_logs_are_let_go(logged, expected):
    """A dead worker's log lives only until its streams go on elsewhere."""
    c.wait_whole(logged)
    for rank in (0, 1, 0):
        fault = Fault(logged, rank, signal.SIGKILL)
        streams = c.run_with(logged, DECODE, c.in_decode, fault)
        fault.assert_landed()
        c.assert_equal(streams, expected["decode"])
        c.wait_whole(logged)
    pids = [entry["pid"] for entry in (*c.cluster(logged)["processes"], *c.cluster(logged)["workers"])]
    c.wait_until(lambda: len(c.memory_names(pids, "log-")) <= 2, what="the end of old logs")


@pytest.mark.long
def test_the_only_attention_worker_adopts_what_its_predecessor_left(start_server, server):
    """Nobody else could take the streams; the successor finds their KV where it lies."""
    wanted = c.asks(4, num_prompt=400, max_tokens=100)
    right = c.right_answers(server, wanted)
    with start_server("--kv-log", "anchor", NO_CACHE) as running:
        fault = Fault(running, 0, signal.SIGKILL)
        streams = c.run_with(running, wanted, c.in_decode, fault)
        fault.assert_landed()
        c.assert_equal(streams, right)
        found = restored(running)
        assert len(found) == 4 and all(event["num_restored"] >= 400 for event in found), found
        assert "Traceback" not in running.log_text(), running.log_text()


@pytest.mark.long
def test_without_a_log_streams_are_computed_again(start_server, expected):
    with start_server(*WORKERS, NO_CACHE, "--kv-log", "off") as running:
        fault = Fault(running, 0, signal.SIGKILL)
        streams = c.run_with(running, LONG, c.in_decode, fault)
        fault.assert_landed()
        c.assert_equal(streams, expected["long"])
        assert not restored(running) and resumed(running)
        assert c.metric(running, "everserve_tokens_recomputed_total") >= 400


def test_survivors_with_little_room(start_server, server):
    """Streams that do not fit wait their turn, or others make way; none fails."""
    wanted = c.asks(6, num_prompt=300, max_tokens=200)
    right = c.right_answers(server, wanted)
    room = str(1800 * 6 * 2 * 4 * 32 * 2)  # about 1,800 tokens: three and a half of these streams
    with start_server(*WORKERS, "--max-model-len", "1024", "--kv-cache-memory-bytes", room) as running:
        fault = Fault(running, 0, signal.SIGKILL)
        streams = c.run_with(running, wanted, lambda streams: any(len(s.token_ids) > 5 for s in streams), fault)
        fault.assert_landed()
        c.assert_equal(streams, right)
        assert "Traceback" not in running.log_text(), running.log_text()


@pytest.mark.long
def test_choices_that_share_their_prompt_go_on_together(start_server):
    """`n` siblings, logprobs, stop strings and penalties continue exactly."""
    body = {"n": 3, "temperature": 0.9, "seed": 5, "logprobs": 2, "presence_penalty": 0.4}

    async def ask(server, stream: Stream) -> Stream:
        return await c.Ask(prompt=list(range(50, 250)), max_tokens=150, params=body).send(server, stream)

    with start_server(*WORKERS) as running:
        alone = asyncio.run(ask(running, Stream()))

        def attempt() -> list[dict]:
            for rank in (0, 1):  # one of them has it
                fault = Fault(running, rank, signal.SIGKILL)
                streams = c.run_streams(running, [ask], c.in_decode, fault)
                fault.assert_landed()
                assert streams[0].error is None and sorted(streams[0].token_ids) == sorted(alone.token_ids)
                c.wait_whole(running)
            return restored(running)

        c.until_it_hits(attempt)
