"""The input of the machine. Events are about one rank and incarnation, or about no process in particular.

The host only observes; the machine decides. Events about one incarnation may come in any order, twice, and long after
the incarnation was replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from everserve.tables.health import Diagnosis
from everserve.tables.ids import Epoch, Incarnation, Rank, Role, WorkerId
from everserve.tables.outputs import AttentionLoad
from everserve.tables.slots import FailedFill, HeldSlots
from everserve.tables.work import Work


@dataclass(frozen=True, slots=True)
class SeatEvent:
    """Base of all events about one process."""

    rank: Rank
    incarnation: Incarnation


# -- sent by the process --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started(SeatEvent):
    """The process exists."""

    pid: int


@dataclass(frozen=True, slots=True)
class SaidHello(SeatEvent):
    """Its pulse has started: from now on silence is a symptom. It loads its weights."""


@dataclass(frozen=True, slots=True)
class SaidReady(SeatEvent):
    """It has its weights and can serve."""


@dataclass(frozen=True, slots=True)
class SaidHolds(SeatEvent):
    """What its slots hold now. Sent before SaidReady, and during and after each FillSlots. `num_done`: changes so far,
    of all that this orchestrator has told it."""

    slots: HeldSlots
    failed: tuple[FailedFill, ...] = ()
    num_done: int = 0


@dataclass(frozen=True, slots=True)
class SaidUses(SeatEvent):
    """An attention worker uses the routes of this epoch; none of its requests in flight follows older routes."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SaidLoads(SeatEvent):
    """An expert worker's rows since its last report, by index of the layer and expert."""

    rows: Mapping[int, Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class SaidPace(SeatEvent):
    """How long an attention worker's work took since its last report, and that of the expert workers that it asked."""

    own: Work
    peers: tuple[tuple[WorkerId, Work], ...] = ()


@dataclass(frozen=True, slots=True)
class SaidReport(SeatEvent):
    """It was started before this orchestrator and reports its state. If it is ready, a SaidReady follows."""

    epoch: Epoch  # of the latest routes that it has
    is_leaving: bool
    slots: HeldSlots | None


@dataclass(frozen=True, slots=True)
class SaidLeaving(SeatEvent):
    """It was asked to leave, by the orchestrator or by a signal, and exits as soon as no peer needs it."""


@dataclass(frozen=True, slots=True)
class SaidFailed(SeatEvent):
    """It cannot continue and is about to exit."""

    reason: str
    user_error: bool = False


@dataclass(frozen=True, slots=True)
class Answered(SeatEvent):
    """Its pulse is back after a silence, or a probe found it alive."""


# -- observed from outside --------------------------------------------------------------------------


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
    """No pulse for the detection time; the host has read the process state.

    `process_state` is the letter in /proc/PID/stat: R runnable, D in the kernel, S asleep, T or t stopped, Z or X
    dead; None where it could not be read. `is_hung`: its warden says that the main thread's lease is over.
    """

    process_state: str | None
    is_hung: bool = False


@dataclass(frozen=True, slots=True)
class Suspected(SeatEvent):
    """A peer suspects it and routes around it. `reason` is a Symptom; some symptoms are visible only to that peer."""

    by: Rank
    reason: str


# -- about no process in particular --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """An operator wants the worker in this seat to leave and to be replaced."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class ScaleAsked:
    """An operator wants this many workers; None: as many as before. Or whole devices, with their workers."""

    attention: int | None = None
    expert: int | None = None
    devices: int | None = None


@dataclass(frozen=True, slots=True)
class SwitchAsked:
    """An operator wants the worker in this seat to have this role."""

    rank: Rank
    role: Role


@dataclass(frozen=True, slots=True)
class StreamsCounted:
    """What the attention workers have, by the gateway's report; about once a second while it changes."""

    loads: Mapping[Rank, AttentionLoad]


@dataclass(frozen=True, slots=True)
class GatewayReported:
    """The gateway reports what it knows from the previous orchestrator."""

    epoch: Epoch  # of the latest tables that it has
    lost: tuple[WorkerId, ...]  # declared lost to the gateway, which is never revoked


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """All workers of a device are gone, and everything that was kept in its memory. `is_gone`: it does not come back by
    itself."""

    device: int
    is_gone: bool


@dataclass(frozen=True, slots=True)
class DeviceReturned:
    """A device that was gone is there again, with empty memory."""

    device: int


@dataclass(frozen=True, slots=True)
class HealthSaid:
    """A source says how healthy a device is. A level of 0 by an operator ends what operators and events said."""

    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class Stopping:
    """The instance shuts down: no worker is started any more, and the end of a worker is not a fault."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline that the machine named may have passed."""


# sent by the process, or a sign of life
Said = (
    Started
    | SaidHello
    | SaidHolds
    | SaidReady
    | SaidUses
    | SaidLoads
    | SaidPace
    | SaidReport
    | SaidLeaving
    | SaidFailed
    | Answered
)
Seen = Exited | Died | ChannelEnded | Silent | Suspected  # observed from outside
Asked = DrainAsked | ScaleAsked | SwitchAsked | DeviceLost | Stopping  # by operators
AboutDevice = HealthSaid | DeviceReturned
AnyEvent = Said | Seen | Asked | AboutDevice | StreamsCounted | GatewayReported | Tick
