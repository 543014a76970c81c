"""The actions that the machine orders, and the decision that carries them. The executor runs them in the given order.

What other processes should be told is the message itself (wire/messages.py). What is only told is an event, as it
stands in `/events` and in event logs (wire/events.py).
"""

from dataclasses import dataclass
from typing import Literal

from everserve.tables.health import DeviceHealth
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.tables.members import Host, Members
from everserve.tables.routes import Routes
from everserve.tables.validity import Conditions
from everserve.wire.events import AnyEvent
from everserve.wire.messages import (
    AdmitHost,
    Answered,
    ClearSlots,
    ComputeRow,
    EvictHost,
    FillSlots,
    KeepGoal,
    Leave,
    StopChanges,
)

Cause = Literal["crash", "hang", "exit", "left"]  # left: it was asked to leave, and has ended


@dataclass(frozen=True, slots=True)
class Lost:
    """This incarnation is gone. Fence it: notify it, its peers and the gateway; drop the messages that it still sends.

    A resuming orchestrator may issue it again for an incarnation that the orchestrator before it has lost.
    """

    rank: Rank
    incarnation: Incarnation
    roles: tuple[Role, ...]
    cause: Cause
    reason: str
    is_expected: bool  # not a fault: it left, the instance stops, or an earlier orchestrator lost it


@dataclass(frozen=True, slots=True)
class Publish:
    """Tables of a new epoch, for the gateway and the workers."""

    members: Members
    routes: Routes | None
    conditions: Conditions
    degraded: tuple[str, ...]
    gone: tuple[int, ...] = ()  # devices
    health: tuple[DeviceHealth, ...] = ()  # of devices that are not healthy
    hosts: tuple[Host, ...] = ()  # empty: there is only one

    @property
    def violations(self) -> tuple[str, ...]:
        return self.conditions.violations


@dataclass(frozen=True, slots=True)
class Show:
    """A condition of validity has changed within the epoch: update the gateway only."""

    tables: Publish


# A worker answers each: SlotsReported, RowComputedAgain, or Leaving.
ToWorker = FillSlots | ClearSlots | StopChanges | ComputeRow | Leave


@dataclass(frozen=True, slots=True)
class Tell:
    """A message to this worker."""

    rank: Rank
    incarnation: Incarnation
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Resumed:
    """This orchestrator has taken over from its predecessor."""

    num_reports: int
    num_missing: int


@dataclass(frozen=True, slots=True)
class Trust:
    """An operator says that a device is healthy: what its sources have said until now does not count."""

    device: int


@dataclass(frozen=True, slots=True)
class DropDevice:
    """A device was lost: let go of everything that is kept in its memory."""

    device: int


@dataclass(frozen=True, slots=True)
class DropHost:
    """A host was lost: let go of all its memory."""

    host: int


@dataclass(frozen=True, slots=True)
class Provision:
    """Start a process for this seat. Answered by Started; or by Exited, if it could not be started."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Probe:
    """Check this process now. Always answered, by Died, Silent or Alive."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a process whose time is over: a lost one that has not exited, or a leaving one that has not left."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Retire:
    """This seat is empty and will not be filled again: release the memory that belongs to it."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """This seat has another role from now on: release memory that only its earlier role needs."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class AllReady:
    """Every seat is ready for the first time since this orchestrator started: the instance serves. Issued once."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The instance cannot start. Issued at most once, and never after all seats were ready."""

    reason: str
    user_error: bool


# KeepGoal: a new version of the goal. The supervisor stores it before any other effect of it.
AnyEffect = (
    Lost | Publish | Show | KeepGoal | Resumed | Tell | DropDevice | DropHost | Provision | Probe | Kill | Retire
    | ChangeRole | AllReady | GiveUp | Trust | Answered | EvictHost | AdmitHost | AnyEvent
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why, in one line."""

    effects: tuple[AnyEffect, ...]
    reason: str
