"""What happens to the hosts and processes of a fleet, and when: from a trace, or drawn at rates.

Where hosts fail in a trace, each host of the fleet is one of its nodes, from some day on; what comes behind the trace's
end comes from its beginning. Racks and crashes of processes, which the trace does not have, are drawn.
"""

import csv
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from importlib import resources
from typing import NamedTuple

from everserve.simulate.settings import Settings

_DAY_S, _HOUR_S, _YEAR_S = 86_400.0, 3600.0, 365 * 86_400.0
_SHORTEST_S = 60.0  # of an outage: some of the trace end at the time when they begin
_NUM_NODES = 400  # of the trace; most of them without a fault


class What(StrEnum):
    """What happens."""

    LOST = "lost"  # a host, with all on it
    BACK = "back"  # ... is repaired
    CRASH = "crash"  # one process


class Fault(NamedTuple):
    """At a time, to the host of an instance with this number, or to the worker with this rank."""

    at_s: float
    what: What
    which: int


class Outage(NamedTuple):
    """A host is away."""

    begin_s: float
    end_s: float


def faults_of(settings: Settings) -> list[list[Fault]]:
    """For each instance of the fleet, in the order of time. The same for the same settings."""
    rng = random.Random(settings.seed)
    num_hosts = settings.instances * settings.num_hosts
    outages = (
        _from_trace(settings, num_hosts, rng) if settings.trace == "infinitehbd" else _drawn(settings, num_hosts, rng)
    )
    racks = range(0, num_hosts, settings.hosts_per_rack)
    for first in racks if settings.rack_years_per_fault else ():
        for outage in _at_random(rng, settings, settings.rack_years_per_fault * _YEAR_S, settings.rack_repair_hours):
            for host in range(first, min(first + settings.hosts_per_rack, num_hosts)):
                outages[host].append(outage)
    found = []
    for number in range(settings.instances):
        mine = outages[number * settings.num_hosts : (number + 1) * settings.num_hosts]
        faults = [fault for host, ones in enumerate(mine) for fault in _of_host(host, ones, settings)]
        found.append(sorted([*faults, *_crashes(settings, rng)]))
    return found


def _of_host(host: int, outages: Sequence[Outage], settings: Settings) -> Iterator[Fault]:
    """A host may be away for several reasons at once."""
    merged: list[Outage] = []
    for outage in sorted(Outage(begin_s, max(end_s, begin_s + _SHORTEST_S)) for begin_s, end_s in outages):
        if merged and outage.begin_s <= merged[-1].end_s:
            merged[-1] = Outage(merged[-1].begin_s, max(merged[-1].end_s, outage.end_s))
        else:
            merged.append(outage)
    for outage in merged:
        if outage.begin_s < settings.days * _DAY_S:
            yield Fault(outage.begin_s, What.LOST, host)
            if outage.end_s < settings.days * _DAY_S:
                yield Fault(outage.end_s, What.BACK, host)


def _crashes(settings: Settings, rng: random.Random) -> Iterator[Fault]:
    if not settings.gpu_hours_per_crash:
        return
    mean_s, at_s = settings.gpu_hours_per_crash * _HOUR_S / settings.num_pairs, 0.0
    while (at_s := at_s + rng.expovariate(1 / mean_s)) < settings.days * _DAY_S:
        yield Fault(at_s, What.CRASH, rng.randrange(settings.seats))


# -- hosts ---------------------------------------------------------------------------------------


def _drawn(settings: Settings, num_hosts: int, rng: random.Random) -> list[list[Outage]]:
    mean_s = settings.gpu_hours_per_fault * _HOUR_S / settings.gpus_per_host
    return [[*_at_random(rng, settings, mean_s, settings.repair_hours)] for _ in range(num_hosts)]


def _at_random(rng: random.Random, settings: Settings, mean_s: float, repair_hours: float) -> Iterator[Outage]:
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(1 / mean_s)) < settings.days * _DAY_S:
        end_s = at_s + rng.expovariate(1 / (repair_hours * _HOUR_S))
        yield Outage(at_s, end_s)
        at_s = end_s


def _from_trace(settings: Settings, num_hosts: int, rng: random.Random) -> list[list[Outage]]:
    by_node = outages_of_trace()
    length_s = max(outage.end_s for ones in by_node for outage in ones)
    found: list[list[Outage]] = []
    for first in range(0, num_hosts, _NUM_NODES):
        nodes = rng.sample(range(_NUM_NODES), _NUM_NODES)
        from_s = rng.uniform(0, length_s)
        for node in nodes[: num_hosts - first]:
            found.append([*_from_there(by_node[node], from_s, length_s, settings.days * _DAY_S)])
    return found


def _from_there(outages: Sequence[Outage], from_s: float, length_s: float, until_s: float) -> Iterator[Outage]:
    """Yields what one sees who comes at that time; again and again, for as long as it takes."""
    for turn in range(int(until_s // length_s) + 2):
        for outage in outages:
            begin_s = outage.begin_s + turn * length_s - from_s
            if 0 < begin_s < until_s:
                yield Outage(begin_s, begin_s + outage.end_s - outage.begin_s)


def outages_of_trace() -> list[list[Outage]]:
    """By node."""
    begun: dict[int, list[float]] = defaultdict(list)
    found: list[list[Outage]] = [[] for _ in range(_NUM_NODES)]
    with resources.files("everserve.simulate").joinpath("data/infinitehbd_gpu_faults.csv").open() as lines:
        for row in csv.DictReader(lines):
            at_s, node = float(row["time_days"]) * _DAY_S, int(row["node"])
            if row["event"] == "start":
                begun[node].append(at_s)
            else:
                found[node].append(Outage(begun[node].pop(0), at_s))
    assert not any(begun.values()), "every fault of the trace has an end"
    return found
