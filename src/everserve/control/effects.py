"""The actions that the machine orders, and the decision that carries them. The host runs them in the given order."""

from dataclasses import dataclass
from typing import Literal

from everserve.control.slowness import Verdict
from everserve.tables.goal import Goal, Mask
from everserve.tables.health import DeviceHealth, Level
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.tables.members import Members
from everserve.tables.routes import Routes
from everserve.tables.slots import Fill, Place
from everserve.tables.validity import Conditions

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

    @property
    def violations(self) -> tuple[str, ...]:
        return self.conditions.violations


@dataclass(frozen=True, slots=True)
class Show:
    """A condition of validity has changed within the epoch: update the gateway only."""

    tables: Publish


@dataclass(frozen=True, slots=True)
class Keep:
    """A new version of the goal. The supervisor stores it before any other effect of it."""

    goal: Goal


@dataclass(frozen=True, slots=True)
class Resumed:
    """This orchestrator has taken over from its predecessor."""

    num_reports: int
    num_missing: int


@dataclass(frozen=True, slots=True)
class FillSlots:
    """Put these experts into these slots of a worker. Answered by SaidHolds."""

    rank: Rank
    incarnation: Incarnation
    fills: tuple[Fill, ...]


@dataclass(frozen=True, slots=True)
class ClearSlots:
    """Empty these slots of a worker. Answered by SaidHolds."""

    rank: Rank
    incarnation: Incarnation
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class StopChanges:
    """Of what a worker was told to fill, some is not needed any more, or would fail. What it has not begun is dropped.
    Answered by SaidHolds."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class BalanceDecided:
    """Whether experts change places because of their load, for the event log."""

    is_accepted: bool
    reason: str
    max_over_mean: float  # now
    expected: float  # the same when it is done
    num_moves: int


@dataclass(frozen=True, slots=True)
class LevelChanged:
    """A device has another health level, or the same for another reason."""

    health: DeviceHealth
    before: Level
    done: str  # what follows


@dataclass(frozen=True, slots=True)
class SlownessDecided:
    """A worker's level of slowness has changed (slowness.py), for the event log."""

    incarnation: Incarnation
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class DropDevice:
    """A device was lost: let go of everything that is kept in its memory."""

    device: int


@dataclass(frozen=True, slots=True)
class Provision:
    """Start a process for this seat. Answered by Started; or by Exited, if it could not be started."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class BackOff:
    """The processes of this seat end soon after they start: the next start is delayed."""

    rank: Rank
    num_crashes: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Check this process now. Always answered, by Died, Silent or Answered."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a process whose time is over: a lost one that has not exited, or a leaving one that has not left."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class AskToLeave:
    """Ask this worker to give its streams to others and to exit. Answered by SaidLeaving."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Retire:
    """This seat is empty and will not be filled again: release the memory that belongs to it."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class BeginScaling:
    """An operator's request was accepted: these workers start, and these leave."""

    added: tuple[Rank, ...]
    retired: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class EndScaling:
    """There are exactly the workers that were asked for, all ready."""

    began_s: float


@dataclass(frozen=True, slots=True)
class BeginSwitch:
    """This worker shall leave, and its seat have this role from the next process on."""

    rank: Rank
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """This seat has another role from now on: release memory that only its earlier role needs."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class EndSwitch:
    """The worker is ready in its new role."""

    rank: Rank
    role: Role
    began_s: float


@dataclass(frozen=True, slots=True)
class ChangeMask:
    """Other experts are masked from this epoch on; none, if the mask was lifted. For the event log."""

    mask: Mask
    reason: str


@dataclass(frozen=True, slots=True)
class AllReady:
    """Every seat is ready for the first time since this orchestrator started: the instance serves. Issued once."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The instance cannot start. Issued at most once, and never after all seats were ready."""

    reason: str
    user_error: bool


# Effects that are only told: the machine has done all that there is to do.
Told = (
    BalanceDecided | LevelChanged | SlownessDecided | BackOff | BeginScaling | EndScaling | BeginSwitch | EndSwitch
    | ChangeMask
)  # fmt: skip

AnyEffect = (
    Lost | Publish | Show | Keep | Resumed | FillSlots | ClearSlots | StopChanges | DropDevice | Provision | Probe
    | Kill | AskToLeave | Retire | ChangeRole | AllReady | GiveUp | Told
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why: one line for the event log."""

    effects: tuple[AnyEffect, ...]
    reason: str
