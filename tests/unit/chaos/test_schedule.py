"""Faults from a seed: the same ones every time, all kinds, nobody beyond what an instance can take."""

from collections import Counter
from itertools import pairwise

import pytest

from everserve.chaos.schedule import (
    BURST_S,
    HITS_WITHIN_S,
    KINDS,
    MAX_HITS,
    PROCESSES,
    Device,
    Fault,
    Seats,
    Victim,
    make_schedule,
)

ALONE = tuple(Device(i, i < 2, i >= 2) for i in range(4))  # each worker on a device of its own
SEATS = Seats(num_attention=2, num_expert=2, devices=ALONE)
WIDE = Seats(num_attention=4, num_expert=4, devices=tuple(Device(i, 1, 1) for i in range(4)))
WITH_DEVICES = {kind for kind in KINDS if "device" in kind or "scale" in kind or "its role" in kind}


def test_the_same_seed_gives_the_same_faults():
    assert make_schedule(7, 120, SEATS) == make_schedule(7, 120, SEATS)
    assert make_schedule(7, 120, SEATS) != make_schedule(8, 120, SEATS)


def test_a_longer_run_begins_with_the_same_faults():
    short = make_schedule(7, 60, SEATS)
    assert short
    assert make_schedule(7, 600, SEATS)[: len(short)] == short


@pytest.mark.parametrize("seed", range(20))
def test_what_every_schedule_keeps_to(seed):
    faults = make_schedule(seed, 300, SEATS)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert all(0 < fault.at_s < 300 for fault in faults)
    gaps = [b.at_s - a.at_s for a, b in pairwise(faults)]
    assert min(gaps) < 0.3 and max(gaps) > 5, "in a rush now and then, and now and then time to heal"
    for fault in faults:
        assert fault.blows and fault.blows[0].after_s == 0
        assert [blow.after_s for blow in fault.blows] == sorted(blow.after_s for blow in fault.blows)
        assert fault.blows[-1].after_s <= BURST_S
        for blow in fault.blows:
            devices = [Victim("device", device.number) for device in SEATS.devices]
            known = (*SEATS.workers, *map(Victim, PROCESSES), *devices, Victim("instance"))
            assert blow.victim in known, "never root"
            is_undone = blow.what == "STOP" or blow.undo is not None
            assert (blow.wake_after_s is not None) == is_undone, "stopped processes are woken, devices return"


@pytest.mark.parametrize("seed", range(20))
def test_no_process_is_hit_more_often_than_is_forgiven(seed):
    faults = make_schedule(seed, 600, SEATS)
    for name in PROCESSES:
        times = [fault.at_s for fault in faults for blow in fault.blows if blow.victim.name == name]
        assert times
        for first, last in zip(times, times[MAX_HITS:], strict=False):
            assert last - first >= HITS_WITHIN_S - 0.001  # moments are rounded


def test_who_dies_together_are_different_ones():
    faults = make_schedule(3, 600, SEATS)
    for fault in faults:
        names = Counter(str(blow.victim) for blow in fault.blows)
        if fault.kind == "kill one of each role":
            assert {name.split()[0] for name in names} == {"attention", "expert"}
        if fault.kind in ("kill two workers", "kill the anchor and the orchestrator"):
            assert len(names) == 2


OTHER_PROCESSES = ("keeper", "gateway", "supervisor", "orchestrator", "zygote", "spare", "all that decide")


@pytest.mark.parametrize(
    ("seats", "impossible"),
    [
        (Seats(2, 0), {"kill one of each role", *WITH_DEVICES}),
        (Seats(1, 0), {"kill one of each role", "kill two workers", *WITH_DEVICES}),
        (
            Seats(1, 1, processes=("anchor",)),
            {kind for kind in KINDS if any(name in kind for name in OTHER_PROCESSES)} | WITH_DEVICES,
        ),
        (Seats(1, 1, devices=(Device(0, 1, 1),)), WITH_DEVICES),
    ],
)
def test_only_what_the_seats_allow(seats, impossible):
    faults = make_schedule(1, 600, seats)
    assert {fault.kind for fault in faults} == set(KINDS) - impossible
    allowed = {*seats.workers, *map(Victim, seats.processes)}
    assert {blow.victim for fault in faults for blow in fault.blows} <= allowed


# -- devices -------------------------------------------------------------------------------------


def gone_at_once(faults: list[Fault], seats: Seats) -> set[frozenset[int]]:
    """All sets of devices that are away at the same time, as the schedule has it."""
    away: list[tuple[float, float, int]] = []
    for fault in faults:
        for blow in fault.blows:
            at_s = fault.at_s + blow.after_s
            away += [(at_s, at_s + (blow.wake_after_s or 0.0), device) for device in blow.takes]
    return {frozenset(device for a, b, device in away if a <= at_s <= b) for at_s, _, _ in away}


@pytest.mark.parametrize("seats", [SEATS, WIDE], ids=["each worker alone", "wide"])
@pytest.mark.parametrize("seed", range(10))
def test_half_of_each_role_stays(seed, seats):
    found = gone_at_once(make_schedule(seed, 600, seats), seats)
    assert any(len(devices) == 2 for devices in found), "two at once, or the second while the first is away"
    assert all(seats.can_spare(devices) for devices in found), found


def test_how_many_devices_can_be_spared():
    assert WIDE.can_spare({0, 3}) and not WIDE.can_spare({0, 1, 2})
    assert SEATS.can_spare({0, 2}) and not SEATS.can_spare({0, 1}), "no attention worker would be left"


def test_a_device_that_is_gone_returns():
    faults = make_schedule(3, 600, WIDE)
    taken = [blow for fault in faults for blow in fault.blows if blow.what == "absence"]
    assert taken
    for blow in taken:
        device = blow.victim.number
        assert blow.request.body == {"device": device, "gone": True} and blow.undo.body == {"device": device}
        assert blow.undo.path == "/cluster/return"


def test_every_health_level_is_said_and_taken_back():
    faults = make_schedule(3, 2000, WIDE)
    ill = [blow for fault in faults for blow in fault.blows if blow.what.startswith("health level")]
    assert {blow.request.body["level"] for blow in ill} == set(range(1, 7))
    for blow in ill:
        device = blow.victim.number
        assert blow.request.path == blow.undo.path == "/cluster/health" and blow.takes == (device,)
        assert blow.request.body["device"] == device and blow.undo.body == {"device": device, "level": 0}


@pytest.mark.parametrize(
    ("seats", "few", "many", "retired"),
    [
        (SEATS, {"attention": 1, "expert": 1}, {"attention": 2, "expert": 2}, (1, 3)),
        (WIDE, {"devices": 2}, {"devices": 4}, (2, 3)),
        (Seats(3, 0, devices=tuple(Device(i, 1, 0) for i in range(3))), {"attention": 2}, {"attention": 3}, (2,)),
    ],
    ids=["each worker alone", "wide", "dense"],
)
def test_scaling_down_and_up_again(seats, few, many, retired):
    blows = [blow for fault in make_schedule(3, 600, seats) for blow in fault.blows if blow.victim.name == "instance"]
    assert blows
    for blow in blows:
        assert (blow.request.body, blow.undo.body, blow.takes) == (few, many, retired)


def test_a_worker_whose_main_thread_hangs():
    blows = [blow for fault in make_schedule(3, 600, SEATS) for blow in fault.blows if blow.what == "HANG"]
    assert blows and {blow.victim for blow in blows} <= set(SEATS.workers), "no other process can be told to"
    assert all(blow.wake_after_s is None for blow in blows), "it is replaced"


@pytest.mark.parametrize("seats", [SEATS, WIDE], ids=["each worker alone", "wide"])
def test_a_role_is_changed_and_changed_back(seats):
    faults = [fault for fault in make_schedule(3, 2000, seats) if "its role" in fault.kind]
    assert {fault.kind for fault in faults} == {kind for kind in KINDS if "its role" in kind}
    switches = [fault.blows[0] for fault in faults]
    assert {blow.victim.name for blow in switches} == {"attention", "expert"}
    for blow in switches:
        assert blow.request.path == blow.undo.path == "/cluster/switch" and blow.wake_after_s is not None
        assert blow.undo.body == {"role": blow.victim.name} != blow.request.body
        (device,) = blow.takes
        assert device in [one.number for one in seats.devices]
    if seats is SEATS:
        assert {(str(blow.victim), blow.takes[0]) for blow in switches} == {
            ("attention 0", 0), ("attention 1", 1), ("expert 0", 2), ("expert 1", 3)
        }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_roles_and_the_size_never_change_at_the_same_time(seed):
    """The number of workers that scaling asks for at its end would be wrong."""
    away = [
        (fault.at_s, fault.at_s + blow.wake_after_s, blow.request.path)
        for fault in make_schedule(seed, 2000, SEATS)
        for blow in fault.blows
        if blow.request is not None and blow.request.path in ("/cluster/switch", "/cluster/scale")
    ]
    assert {path for _, _, path in away} == {"/cluster/switch", "/cluster/scale"}
    for begin, end, path in away:
        assert not [other for a, b, other in away if other != path and a <= end and b >= begin]
