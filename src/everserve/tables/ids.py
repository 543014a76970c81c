"""Numbers and names that must not be mixed up."""

from enum import StrEnum
from typing import NamedTuple, NewType

from everserve.config.cluster import MAX_RANKS

__all__ = ["MAX_RANKS", "NO_DEVICE", "NO_RANK", "Epoch", "Incarnation", "Rank", "Role", "SlotId", "WorkerId"]

NO_DEVICE = -1  # instead of the number of a device: computed on CPUs, or in the host's memory

Rank = NewType("Rank", int)  # a numbered seat, never renumbered
NO_RANK = Rank(-1)  # where a table has no worker
Incarnation = NewType("Incarnation", int)  # counts the processes in that seat, from 1
Epoch = NewType("Epoch", int)  # the version of the tables
SlotId = NewType("SlotId", int)  # a physical place for one expert's weights in one layer of one worker


class WorkerId(NamedTuple):
    """One worker process: its cell, its KV log and its lanes are named by it."""

    rank: Rank
    incarnation: Incarnation


class Role(StrEnum):
    """The role of a worker; a worker may have both."""

    ATTENTION = "attention"  # owns requests and their KV
    EXPERT = "expert"  # owns expert slots; stateless
