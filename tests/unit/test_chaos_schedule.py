"""Faults from a seed: the same ones every time, all kinds, nobody beyond what an instance can take."""

from collections import Counter
from itertools import pairwise

import pytest

from everserve.chaos.schedule import BURST_S, HITS_WITHIN_S, KINDS, MAX_HITS, PROCESSES, Seats, Victim, make_schedule

SEATS = Seats(num_attention=2, num_expert=2)


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
            assert blow.victim in (*SEATS.workers, *map(Victim, PROCESSES)), "never the gateway, never the supervisor"
            assert (blow.wake_after_s is not None) == (blow.what == "STOP"), "whoever is stopped is woken"


@pytest.mark.parametrize("seed", range(20))
def test_no_process_is_hit_more_often_than_the_supervisor_forgives(seed):
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


@pytest.mark.parametrize(
    ("seats", "impossible"),
    [
        (Seats(2, 0), {"kill one of each role"}),
        (Seats(1, 0), {"kill one of each role", "kill two workers"}),
        (
            Seats(1, 1, processes=("anchor",)),
            {kind for kind in KINDS if "orchestrator" in kind or "zygote" in kind or "spare" in kind},
        ),
    ],
)
def test_only_what_the_seats_allow(seats, impossible):
    faults = make_schedule(1, 600, seats)
    assert {fault.kind for fault in faults} == set(KINDS) - impossible
    allowed = {*seats.workers, *map(Victim, seats.processes)}
    assert {blow.victim for fault in faults for blow in fault.blows} <= allowed
