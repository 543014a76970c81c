"""What the machine wants done, and the decision that carries it. The host does these in the order given."""

from dataclasses import dataclass
from typing import Literal

from everserve.tables.goal import Goal
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.tables.members import Members
from everserve.tables.routes import Routes
from everserve.tables.validity import Conditions

Cause = Literal["crash", "hang", "exit", "left"]  # left: it was asked to, and did


@dataclass(frozen=True, slots=True)
class Lost:
    """This incarnation is gone. Fence it: tell it if it can hear, its peers, the gateway; drop what it still says.

    An orchestrator that resumes may say so of one that was lost before its time.
    """

    rank: Rank
    incarnation: Incarnation
    roles: tuple[Role, ...]
    cause: Cause
    reason: str
    is_expected: bool  # not a fault: it left, the instance stops, or it was lost to the orchestrator before us


@dataclass(frozen=True, slots=True)
class Publish:
    """Tables of a new epoch: for the gateway and the workers."""

    members: Members
    routes: Routes | None
    conditions: Conditions
    degraded: tuple[str, ...]

    @property
    def violations(self) -> tuple[str, ...]:
        return self.conditions.violations


@dataclass(frozen=True, slots=True)
class Show:
    """Nothing is published, but a condition of validity has changed: for the gateway alone."""

    tables: Publish


@dataclass(frozen=True, slots=True)
class Keep:
    """A new version of the goal. The supervisor keeps it before anything is done about it."""

    goal: Goal


@dataclass(frozen=True, slots=True)
class Resumed:
    """This orchestrator has taken over from another one."""

    num_reports: int
    num_missing: int


@dataclass(frozen=True, slots=True)
class Provision:
    """Start a process for this seat. Answered by Started; or by Exited, if it could not be started."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class BackOff:
    """This seat's processes end soon after they start: the next one waits."""

    rank: Rank
    num_crashes: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Look at this process. Always answered, by Silent or Answered."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Kill:
    """Make an end of a process that has had its time: a lost one to notice, a leaving one to leave."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class AskToLeave:
    """Ask this worker to give its streams to others and to exit. Answered by SaidLeaving."""

    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class AllReady:
    """Every seat is ready for the first time since this orchestrator came: the instance serves. Said once."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The instance cannot come up. Said at most once, and never if it was up before."""

    reason: str
    user_error: bool


AnyEffect = Lost | Publish | Show | Keep | Resumed | Provision | BackOff | Probe | Kill | AskToLeave | AllReady | GiveUp


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why: one line for the event log."""

    effects: tuple[AnyEffect, ...]
    reason: str
