"""Devices that are about to fail are left before they do, under running streams: every stream is what it would have
been, no expert is ever without a place, and no worker is lost. When they are healthy again, they are used again."""

import os
import signal
from pathlib import Path

import pytest

from tests.support import cluster as c
from tests.support.cluster import DECODE

NUM_DEVICES = 3
LONG = c.asks(6, num_prompt=12, max_tokens=300)  # so that a device is busy for as long as it takes to ask
RANKS = {device: {device, NUM_DEVICES + device} for device in range(NUM_DEVICES)}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("health") / "devices"


@pytest.fixture(scope="module")
def shared(start_server, source):
    source.write_text("")
    flags = ("-dp", str(NUM_DEVICES), "--enable-expert-parallel", "--health-source", str(source), "--enable-chaos")
    flags = (*flags, "--check-rows-s", "0.02", *c.PATIENT)
    with c.unharmed(start_server(*flags)) as running:
        yield running


def say(server, device: int, level: int, reason: str = "") -> str:
    answer = c.post(server, "/cluster/health", {"device": device, "level": level, "reason": reason})
    assert answer.status_code == 200, answer.text
    return answer.json()["done"]


def device(server, number: int) -> dict:
    return c.cluster(server)["devices"][number]


def are_gone(server, ranks: set[int]) -> bool:
    return {w["rank"] for w in c.cluster(server)["workers"] if w["state"] == "gone"} == ranks


def seen_since(server, at_s: float, *names: str) -> list[dict]:
    processes = ("orchestrator", *(f"worker-{rank}" for rank in range(2 * NUM_DEVICES)))
    found = [event for process in processes for event in server.events(process)]
    return [event for event in found if event["event"] in names and event["at_s"] > at_s]


def now_s(server) -> float:
    return max(event["at_s"] for event in server.events("orchestrator"))


def check_harmless(server, since_s: float, ranks: set[int]) -> None:
    """Exactly these workers have left, in order; none was lost, and nothing was without a place meanwhile."""
    troubles = seen_since(server, since_s, "fault_detected", "streams_paused")
    assert troubles == [], server.log_text()
    assert {event["rank"] for event in seen_since(server, since_s, "worker_left")} == ranks
    assert [
        event["violations"] for event in seen_since(server, since_s, "epoch_published") if event["violations"]
    ] == []


def test_a_device_is_evacuated_and_used_again(whole, expected):
    since_s = now_s(whole)

    def evacuate() -> None:
        assert "evacuated" in say(whole, 1, 4, "double-bit error")
        c.wait_until(lambda: are_gone(whole, RANKS[1]), what="the evacuation")

    c.assert_equal(c.run_with(whole, DECODE, c.in_decode, evacuate), expected)
    check_harmless(whole, since_s, RANKS[1])
    left = device(whole, 1)
    assert (left["state"], left["level"], left["reason"]) == ("down", 4, "double-bit error")
    assert c.run_all(whole, DECODE) == expected
    c.assert_equal(c.run_with(whole, DECODE, c.in_decode, lambda: say(whole, 1, 0)), expected)
    c.wait_whole(whole)
    assert device(whole, 1)["level"] == 0
    check_harmless(whole, since_s, RANKS[1])
    levels = [(event["device"], event["level"]) for event in seen_since(whole, since_s, "device_health")]
    assert levels == [(1, 4), (1, 0)]


def test_what_a_file_says_outlives_the_orchestrator(whole, source, expected):
    since_s = now_s(whole)

    def lose_orchestrator() -> None:
        source.write_text("2 L3 fan 1 has stopped\nnonsense\n")
        c.wait_until(lambda: device(whole, 2)["level"] == 3, what="the level")
        process = next(p for p in c.cluster(whole)["processes"] if p["name"] == "orchestrator")
        os.kill(process["pid"], signal.SIGKILL)
        c.wait_until(lambda: are_gone(whole, RANKS[2]), what="the drain")

    c.assert_equal(c.run_with(whole, DECODE, c.in_decode, lose_orchestrator), expected)
    assert seen_since(whole, since_s, "fault_detected", "streams_paused") == []
    refused = c.post(whole, "/cluster/return", {"device": 2})
    assert refused.status_code == 409 and "fan 1 has stopped" in refused.json()["error"]["message"]
    metrics = c._http.get(f"{whole.url}/metrics").text
    assert 'everserve_device_health_level{device="2"} 3.0' in metrics
    source.write_text("")
    c.wait_whole(whole)


def test_a_busy_device_is_drained_when_it_is_quiet(whole, server):
    def wait_for_quiet() -> None:
        assert "quiet" in say(whole, 0, 2)
        c.wait_until(lambda: "quiet" in device(whole, 0)["note"], what="the note about it")
        assert device(whole, 0)["state"] == "serving"

    streams = c.run_with(whole, LONG, c.in_decode, wait_for_quiet)
    c.assert_equal(streams, c.right_answers(server, LONG))
    c.wait_until(lambda: are_gone(whole, RANKS[0]), what="the drain")
    assert c.post(whole, "/cluster/return", {"device": 0}).json()["ranks"] == sorted(RANKS[0])


def test_a_device_that_is_needed_is_used_on_until_it_is_not(whole, expected):
    say(whole, 0, 3)
    c.wait_until(lambda: are_gone(whole, RANKS[0]), what="the drain")
    assert "used on: the other expert workers cannot hold all experts" in say(whole, 1, 3)
    assert device(whole, 1)["state"] == "serving"
    assert c.run_all(whole, DECODE) == expected
    say(whole, 0, 0)
    c.wait_until(lambda: are_gone(whole, RANKS[1]), what="the drain of the next, when the first is back")
    say(whole, 1, 0)


def test_a_worker_that_computes_wrong_is_found_and_its_device_evacuated(whole, expected):
    c.wait_until(lambda: c.metric(whole, "everserve_rows_checked_total") > 50, what="rows that were computed twice")
    assert not seen_since(whole, 0, "rows_differ"), "all of them had the same bits"
    since_s = now_s(whole)
    rank = NUM_DEVICES + 1
    assert c.post(whole, "/cluster/fault", {"rank": rank, "signal": "FLIP"}).status_code == 200

    def wait_for_the_end() -> None:
        c.wait_until(lambda: are_gone(whole, RANKS[1]), what="the evacuation")

    c.run_with(whole, DECODE, c.in_decode, wait_for_the_end)  # with what tokens, is not known
    found = seen_since(whole, since_s, "rows_differ")
    assert {(event["rank"], event["device"], event["is_certain"]) for event in found} == {(rank, 1, True)}
    left = device(whole, 1)
    assert left["level"] == 4 and f"rank {rank} computes a row of expert" in left["reason"]
    assert c.run_all(whole, DECODE) == expected, "by the others"
    say(whole, 1, 0)
    c.wait_whole(whole)
    assert c.run_all(whole, DECODE) == expected


def test_an_isolated_device_is_gone_at_once(whole, expected):
    c.assert_equal(c.run_with(whole, DECODE, c.in_decode, lambda: say(whole, 2, 6, "fell off the bus")), expected)
    assert device(whole, 2)["state"] == "gone"
    assert c.post(whole, "/cluster/health", {"device": 7, "level": 3}).status_code == 409
    say(whole, 2, 0)
