"""What is known of the process that holds a seat, from its start to its end: it is forgotten with it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from everserve.control.decide.policy import Policy
from everserve.tables.ids import Epoch, Rank
from everserve.tables.slots import Fill, HeldSlots, Place


@dataclass(slots=True)
class Changes:
    """The slots that a worker was told to fill or to clear: one thing at a time."""

    filling: tuple[Fill, ...] = ()  # what it has not answered
    clearing: tuple[Place, ...] = ()  # likewise
    num_told: int = 0  # slots, so far
    is_stopped: bool = False  # it was told to drop what it has not begun
    again_at: float | None = None  # after a fill that failed: when the next one may come

    @property
    def is_idle(self) -> bool:
        """It has changed all slots that it was told to change."""
        return not self.filling and not self.clearing

    def places(self) -> frozenset[Place]:
        """The slots that it has not answered."""
        return frozenset((*(Place(fill.call_index, fill.slot) for fill in self.filling), *self.clearing))

    def tell(self, fills: tuple[Fill, ...] = (), places: tuple[Place, ...] = ()) -> None:
        assert self.is_idle, self
        self.filling, self.clearing = fills, places
        self.num_told += len(fills) + len(places)

    def note_done(self, num_done: int) -> None:
        """So many of the slots that it was ever told. A report that it sent before it knew of the last ones does not
        answer them."""
        num_left = max(self.num_told - num_done, 0)
        self.filling = self.filling[max(len(self.filling) - num_left, 0) :]
        self.clearing = self.clearing[max(len(self.clearing) - num_left, 0) :]
        self.is_stopped &= num_left > 0


class Silence(NamedTuple):
    """The process has no pulse, though it is not stopped."""

    since: float
    until: float  # lost if it is still silent then


@dataclass(slots=True)
class Process:
    """One incarnation. Before its end it may be in doubt: silent, or reported by a peer. Doubt is not a state of the
    tables."""

    pid: int = 0  # 0: it is being forked
    held: HeldSlots | None = None  # what it reports to hold
    changes: Changes = field(default_factory=Changes)
    acknowledged: Epoch = field(default=Epoch(0))  # of the routes that an attention worker uses, by its report
    is_slow: bool = False  # slowness.py
    silence: Silence | None = None
    is_probed: bool = False  # a probe is not answered yet
    is_reported: bool = False  # a peer routes around it
    unserved_at: dict[Rank, list[float]] = field(default_factory=dict)  # by peer: when it did not serve that peer

    def did_not_serve(self, peer: Rank, now: float, policy: Policy) -> int:
        """A peer reports that it was not served. Returns how many times it did within `unserved_s`; between two reports
        the peer had trusted this worker again."""
        lately = [at for at in self.unserved_at.get(peer, []) if now - at < policy.unserved_s]
        self.unserved_at[peer] = [*lately, now]
        return len(lately) + 1

    def clear_doubt(self) -> None:
        self.silence = None
        self.is_probed = self.is_reported = False

    def look_at(self) -> float | None:
        """When to look at it again. While a probe is pending its answer decides, not the clock."""
        return self.silence.until if self.silence is not None and not self.is_probed else None
