"""Which heads form a group, and which worker keeps its parity: after the loss of any one device every head that was on
it can be rebuilt from the others.

    device         0        1        2        3
    heads          a        b        c        -       parity of a, b, c on 3
                   d        e        -        f       parity of d, e, f on 2: each device is left out in turn

The members of a group are on different devices, and its parity is on one more. So a group of N - 1 heads on N devices
takes the memory of one: parities take 1/N of all that is used. A loss leaves no group as it was, so there is nothing
to gain by remembering earlier groups: they follow from where heads are now.
"""

from collections.abc import Mapping
from typing import NamedTuple

from everserve.tables.ids import Rank

Head = tuple[int, int]  # layer, number


class Group(NamedTuple):
    """Heads, and the worker that keeps their parity."""

    keeper: Rank
    members: tuple[Head, ...]


def parity_groups(places: Mapping[Head, Rank], device_of: Mapping[Rank, int]) -> tuple[Group, ...]:
    """For heads at these workers. `device_of`: of all workers that may keep a parity. None on a single device."""
    keeper_on = {device: rank for rank, device in sorted(device_of.items(), reverse=True)}  # the lowest rank
    left: dict[int, list[Head]] = {device: [] for device in keeper_on}
    for head, rank in sorted(places.items(), reverse=True):
        left[device_of[rank]].append(head)
    num_kept = dict.fromkeys(keeper_on, 0)
    groups: list[Group] = []
    while len(left) > 1 and any(left.values()):
        # The one with the fewest heads left: so devices come to their end together, and groups are as large as can be.
        keeper = min(left, key=lambda device: (len(left[device]), num_kept[device], device))
        members = [heads.pop() for device, heads in left.items() if device != keeper and heads]
        groups.append(Group(keeper_on[keeper], tuple(sorted(members))))
        num_kept[keeper] += 1
    return tuple(groups)
