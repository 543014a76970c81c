"""The input of the machine: what other processes say, in their own words (wire/messages.py), and what is observed.

The process around the machine only passes on. Inputs about one incarnation may come in any order, twice, and long after
the incarnation was replaced.
"""

from dataclasses import dataclass

from everserve.tables.health import Diagnosis
from everserve.tables.ids import Incarnation, Rank
from everserve.wire.messages import (
    Ask,
    Failed,
    GatewayReport,
    Hello,
    HostJoined,
    HostLeft,
    Leaving,
    LoadReported,
    PaceReported,
    Ready,
    Report,
    RoutesUsed,
    RowComputed,
    RowComputedAgain,
    Shutdown,
    SlotsReported,
    StreamsReported,
    Suspected,
)


@dataclass(frozen=True, slots=True)
class SeatInput:
    """Base of all inputs from or about one process."""

    rank: Rank
    incarnation: Incarnation


# What a worker says. `Ready` is passed on when it has opened its lanes, too (hold/worker_ends.py).
FromWorker = (
    Hello | SlotsReported | Ready | RoutesUsed | LoadReported | PaceReported | Report | Leaving | Failed | Suspected
)


@dataclass(frozen=True, slots=True)
class Said(SeatInput):
    """A message of this process."""

    message: FromWorker


@dataclass(frozen=True, slots=True)
class SaidRow(SeatInput):
    """Likewise, of a row that is computed twice."""

    message: RowComputed | RowComputedAgain


# -- observed from outside -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started(SeatInput):
    """The process exists."""

    pid: int


@dataclass(frozen=True, slots=True)
class Alive(SeatInput):
    """Its pulse is back after a silence, or a probe found it alive."""


@dataclass(frozen=True, slots=True)
class Exited(SeatInput):
    """It was reaped. Negative status: the signal that killed it."""

    exit_status: int


@dataclass(frozen=True, slots=True)
class Died(SeatInput):
    """The kernel marked its life word."""


@dataclass(frozen=True, slots=True)
class ChannelEnded(SeatInput):
    """End of file on its control channel."""


@dataclass(frozen=True, slots=True)
class Silent(SeatInput):
    """No pulse for the detection time; the state of the process has been read.

    `process_state` is the letter in /proc/PID/stat: R runnable, D in the kernel, S asleep, T or t stopped, Z or X
    dead; None where it could not be read; H: nothing is heard of its host. `is_hung`: its warden says that the main
    thread's lease is over.
    """

    process_state: str | None
    is_hung: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline that the machine named may have passed."""


OfWorker = Said | Started | Alive | Exited | Died | ChannelEnded | Silent
OfHost = HostJoined | HostLeft
AnyInput = OfWorker | OfHost | SaidRow | Ask | Diagnosis | StreamsReported | GatewayReport | Shutdown | Tick
