"""What the machine is told. All but the last ones name a rank and the incarnation that they are about.

The host asks and looks; it does not judge. Of one incarnation the machine may be told anything at any time, also twice
and long after it was replaced.
"""

from dataclasses import dataclass

from everserve.tables.ids import Epoch, Incarnation, Rank, WorkerId
from everserve.tables.slots import HeldSlots


@dataclass(frozen=True, slots=True)
class SeatEvent:
    """Base of all events about one process."""

    rank: Rank
    incarnation: Incarnation


# -- what it says --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started(SeatEvent):
    """The process exists."""

    pid: int


@dataclass(frozen=True, slots=True)
class SaidHello(SeatEvent):
    """Its pulse goes: from now on its silence means something. It loads."""


@dataclass(frozen=True, slots=True)
class SaidReady(SeatEvent):
    """It has its weights and can serve."""


@dataclass(frozen=True, slots=True)
class SaidHolds(SeatEvent):
    """What its slots hold now. Said before it is ready, and after every change."""

    slots: HeldSlots


@dataclass(frozen=True, slots=True)
class SaidUses(SeatEvent):
    """An attention worker: no request of mine that follows routes older than this epoch is under way."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SaidReport(SeatEvent):
    """It was there before this orchestrator, and says what it knows. If it is ready, it says so too."""

    epoch: Epoch  # of the latest routes that it has
    is_leaving: bool
    slots: HeldSlots | None


@dataclass(frozen=True, slots=True)
class SaidLeaving(SeatEvent):
    """It was asked to leave, by us or by a signal, and exits as soon as nobody needs it."""


@dataclass(frozen=True, slots=True)
class SaidFailed(SeatEvent):
    """It cannot go on and is about to exit."""

    reason: str
    user_error: bool = False


@dataclass(frozen=True, slots=True)
class Answered(SeatEvent):
    """Its pulse goes on after a silence, or a probe found nothing wrong."""


# -- what is seen of it --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exited(SeatEvent):
    """It was reaped. Negative status: the signal that killed it."""

    exit_status: int


@dataclass(frozen=True, slots=True)
class Died(SeatEvent):
    """The kernel marked its life word."""


@dataclass(frozen=True, slots=True)
class ChannelEnded(SeatEvent):
    """End of file on its control channel."""


@dataclass(frozen=True, slots=True)
class Silent(SeatEvent):
    """No pulse for the detection time, and the host has looked at the process.

    `process_state` is the letter in /proc/PID/stat: R runnable, D in the kernel, S asleep, T or t stopped, Z or X
    dead; None where it could not be read.
    """

    process_state: str | None


@dataclass(frozen=True, slots=True)
class Suspected(SeatEvent):
    """A peer suspects it and routes around it. `reason` is a Symptom: some of them only who asks can see."""

    by: Rank
    reason: str


# -- about no process in particular --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """An operator wants whoever sits there to leave and to be replaced."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class GatewayReported:
    """The gateway says what it knows from an orchestrator before this one."""

    epoch: Epoch  # of the latest tables that it has
    lost: tuple[WorkerId, ...]  # it was told that these are gone, which is never taken back


@dataclass(frozen=True, slots=True)
class Stopping:
    """The instance shuts down: nobody is started any more, and that workers end is as it should be."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline that the machine named may have passed."""


# signs of life
Said = Started | SaidHello | SaidHolds | SaidReady | SaidUses | SaidReport | SaidLeaving | SaidFailed | Answered
Seen = Exited | Died | ChannelEnded | Silent | Suspected  # by others
AnyEvent = Said | Seen | DrainAsked | GatewayReported | Stopping | Tick
