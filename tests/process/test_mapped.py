"""Expert workers without shadows die under running streams: others serve the experts out of the memory that the dead
ones left, without a copy, until their successors are there. Every stream is what it would have been."""

import os
import signal

from tests.support import cluster as c
from tests.support.cluster import DECODE

NUM_DEVICES = 3  # of 64 experts one has 22, two have 21 and an empty slot
FLAGS = (
    *("--attention-workers", "2", "--expert-workers", str(NUM_DEVICES), "--devices", str(NUM_DEVICES)),
    *("--shadow-experts", "0", "--weights", "memory", "--enable-chaos", *c.PATIENT),
)
EXPERTS = [2, 3, 4]


def moved(server) -> list[tuple[str, int, int]]:
    """Source, experts, bytes of all fills so far."""
    events = [event for event in server.events() if event["event"] == "experts_moved"]
    return [(event["source"], event["num_experts"], event["num_bytes"]) for event in events]


def wait_own(server) -> None:
    """Every expert is where it is planned, in memory of the worker that serves it, and nothing moves."""
    c.wait_whole(server)
    num_own = max(worker["slots"] for worker in c.cluster(server)["workers"])

    def is_own() -> bool:
        layers = c.get(server, "/cluster/experts").json()["layers"]
        places = [expert["places"] for layer in layers for expert in layer["experts"]]
        return all(len(one) == 1 and one[0]["slot"] < num_own for one in places)

    c.wait_until(is_own, what="no expert in borrowed memory")


def kill(server, *ranks: int) -> None:
    for rank in ranks:
        os.kill(c.worker(server, rank)["pid"], signal.SIGKILL)


def test_what_a_dead_worker_left_is_mapped(whole, expected):
    fault, before = c.Fault(whole, 3, signal.SIGKILL), len(moved(whole))
    streams = c.run_with(whole, DECODE, c.in_decode, fault)
    c.assert_equal(streams, expected)
    fault.assert_landed()
    wait_own(whole)
    # Later experts may change places, from peers, to make work even.
    sources = moved(whole)[before:]
    assert sources[0][0] == "mapped" and all(one[2] == 0 for one in sources if one[0] == "mapped"), sources
    assert {source for source, _, _ in sources} <= {"mapped", "peer"}, sources


def test_one_that_is_stopped_wakes_up_when_others_have_mapped_its_memory(whole, expected):
    """It was declared gone: whatever it does then, it does not change what others compute with."""
    fault, before = c.Fault(whole, 4, signal.SIGSTOP), len(moved(whole))
    streams = c.run_with(whole, DECODE, c.in_decode, fault)
    fault.wake()
    c.assert_equal(streams, expected)
    fault.assert_landed()
    wait_own(whole)
    sources = {source for source, _, _ in moved(whole)[before:]}
    assert "mapped" in sources and sources <= {"mapped", "peer"}


def test_two_die_with_the_orchestrator(whole, expected):
    """The next one finds who is there, and what is mapped. One worker is left, with slots for some of their experts,
    and copies one of each layer; nothing of that stays."""

    def kill_all() -> None:
        kill(whole, 2, 4)
        os.kill(next(p["pid"] for p in c.cluster(whole)["processes"] if p["name"] == "orchestrator"), signal.SIGKILL)

    streams = c.run_with(whole, DECODE, c.in_decode, kill_all)
    c.assert_equal(streams, expected)
    wait_own(whole)


def test_memory_that_is_mapped_goes_with_its_device(whole, expected):
    """A worker dies, and its device is lost while others have its memory mapped: its experts come from elsewhere."""
    before = len(moved(whole))

    def kill_then_lose() -> None:
        kill(whole, 3)
        c.wait_until(lambda: "mapped" in {source for source, _, _ in moved(whole)[before:]}, what="mapped experts")
        device = c.worker(whole, 3)["device"]
        assert c.post(whole, "/cluster/fault", {"device": device, "gone": False}).status_code == 200

    streams = c.run_with(whole, DECODE, c.in_decode, kill_then_lose)
    c.assert_equal(streams, expected)
    wait_own(whole)
    names = [worker["rank"] for worker in c.cluster(whole)["workers"]]
    assert names == [0, 1, *EXPERTS]
