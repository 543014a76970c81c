"""Devices are lost under running streams, with their workers and everything in their memory; survivors take over the
experts, streams go on elsewhere, and every stream is what it would have been."""

import itertools
import os
import signal

import pytest

from tests.support import cluster as c
from tests.support.cluster import DECODE

NUM_DEVICES = 4
FLAGS = ("-dp", str(NUM_DEVICES), "--enable-expert-parallel", "--enable-chaos", "--kv-log", "mirror", *c.PATIENT)


def lose(server, *devices: int, gone: bool) -> None:
    for device in devices:
        answer = c.post(server, "/cluster/fault", {"device": device, "gone": gone})
        assert answer.status_code == 200, answer.text


def give_back(server, *devices: int) -> None:
    for device in devices:
        assert c.post(server, "/cluster/return", {"device": device}).status_code == 200


def states(server) -> list[str]:
    return [device["state"] for device in c.cluster(server)["devices"]]


def wait_repaired(server) -> None:
    """Every expert has a place, nothing moves, and all attention workers know it. Without an orchestrator that is what
    was true before."""

    def is_repaired() -> bool:
        now = c.cluster(server)
        is_away = any("orchestrator" in reason for reason in now["degraded"])
        return not (is_away or now["violations"] or now["moves"] or any(now["conditions"].values()))

    c.wait_until(is_repaired, what="the repair")


def test_a_lost_device_comes_back_by_itself(whole, expected):
    before = [worker["incarnation"] for worker in c.cluster(whole)["workers"]]
    streams = c.run_with(whole, DECODE, c.in_decode, lambda: lose(whole, 1, gone=False))
    c.assert_equal(streams, expected)
    c.wait_whole(whole)
    after = [worker["incarnation"] for worker in c.cluster(whole)["workers"]]
    assert [new - old for old, new in zip(before, after, strict=True)] == [0, 1, 0, 0] * 2


@pytest.mark.parametrize("devices", [pytest.param((2,), marks=pytest.mark.long), (0, 3)])
def test_survivors_take_over_what_is_gone_until_it_returns(whole, expected, devices):
    """Two of four are more than shadows make up for: some experts have no place, and get one."""
    streams = c.run_with(whole, DECODE, c.in_decode, lambda: lose(whole, *devices, gone=True))
    c.assert_equal(streams, expected)
    wait_repaired(whole)
    assert states(whole) == ["gone" if device in devices else "serving" for device in range(NUM_DEVICES)]
    assert c.run_all(whole, DECODE) == expected
    streams = c.run_with(whole, DECODE, c.in_decode, lambda: give_back(whole, *devices))
    c.assert_equal(streams, expected)
    c.wait_whole(whole)
    assert states(whole) == ["serving"] * NUM_DEVICES


@pytest.mark.long
def test_logs_in_the_memory_of_a_device_are_lost_with_it(start_server, expected):
    """With an anchor: streams are computed again, and are what they would have been."""
    with start_server(*FLAGS, "--kv-log", "anchor") as running:
        c.wait_whole(running)
        streams = c.run_with(running, DECODE, c.in_decode, lambda: lose(running, 0, 3, gone=True))
        c.assert_equal(streams, expected)
        wait_repaired(running)
        give_back(running, 0, 3)
        c.wait_whole(running)
        assert "Traceback" not in running.log_text(), running.log_text()


def test_the_next_device_is_lost_during_the_repair_of_the_first(whole, expected):
    def one_after_the_other() -> None:
        lose(whole, 0, gone=True)
        c.wait_until(lambda: c.cluster(whole)["moves"] or not c.cluster(whole)["violations"], what="the repair")
        lose(whole, 1, gone=True)

    streams = c.run_with(whole, DECODE, c.in_decode, one_after_the_other)
    c.assert_equal(streams, expected)
    wait_repaired(whole)
    give_back(whole, 0, 1)


@pytest.mark.parametrize("num_lost", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_orchestrator_dies_in_the_middle(whole, expected, num_lost):
    """The next one goes on from what it finds: what is gone stays gone."""

    def lose_with_orchestrator() -> None:
        lose(whole, *range(num_lost), gone=True)
        process = next(p for p in c.cluster(whole)["processes"] if p["name"] == "orchestrator")
        os.kill(process["pid"], signal.SIGKILL)

    streams = c.run_with(whole, DECODE, c.in_decode, lose_with_orchestrator)
    c.assert_equal(streams, expected)
    c.wait_until(lambda: states(whole).count("gone") == num_lost, what="the next orchestrator")
    wait_repaired(whole)
    give_back(whole, *range(num_lost))


def test_nothing_of_a_lost_device_is_kept(whole):
    """By any process: a log in the memory of the host is dropped as soon as no stream needs it, others at once."""
    lose(whole, 3, gone=True)
    dead = {(worker["rank"], worker["incarnation"]) for worker in c.cluster(whole)["workers"] if worker["device"] == 3}

    def kept() -> set[str]:
        now = c.cluster(whole)
        pids = [p["pid"] for p in now["processes"]] + [w["pid"] for w in now["workers"] if w["pid"]]
        wanted = {f"{kind}-{rank}.{incarnation}" for kind in ("log", "kv") for rank, incarnation in dead}
        return c.memory_names(pids, "") & wanted

    c.wait_until(lambda: not kept(), what="the end of its memory")
    give_back(whole, 3)


def test_what_an_operator_cannot_do_is_refused(whole):
    for path, body, reason in [
        ("/cluster/fault", {"device": 9, "gone": True}, "there is no device 9"),
        ("/cluster/return", {"device": 9}, "there is no device 9"),
        ("/cluster/return", {"device": 1}, "device 1 is not gone"),
    ]:
        answer = c.post(whole, path, body)
        assert answer.status_code == 409 and reason in answer.json()["error"]["message"]
    for body in (
        {"device": 1, "rank": 1},
        {"device": 1, "signal": "KILL"},
        {"rank": 1, "signal": "KILL", "gone": True},
    ):
        assert c.post(whole, "/cluster/fault", body).status_code == 400


def test_a_repair_is_told_phase_by_phase(whole):
    lose(whole, 1, 2, gone=True)
    wait_repaired(whole)

    def phases() -> list[str]:
        told = [event for event in whole.events("orchestrator") if event["event"] in ("device_lost", "repair_phase")]
        last = list(itertools.takewhile(lambda event: event["event"] == "repair_phase", reversed(told)))
        return [event["phase"] for event in reversed(last)]

    c.wait_until(lambda: phases()[-1:] == ["redundant"], what="the last phase")
    # When the second is lost, the repair of the first may have come so far that every expert has a place.
    found = [phase for phase in phases() if phase != "first slot"]
    assert found[-3:] == ["planned", "covered", "redundant"]
    give_back(whole, 1, 2)
