"""The processes and workers of one serving instance."""

from enum import StrEnum

import msgspec

from everserve.tables.ids import NO_DEVICE, Epoch, Incarnation, Rank, Role

HOST_IS_SILENT = "H"  # in place of a process's state: nothing is heard of its host


class WorkerState(StrEnum):
    """starting -> ready -> gone, or starting -> ready -> leaving -> gone. A new process in the seat is a new
    incarnation, starting again."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"  # on request: it gives its streams back and exits
    GONE = "gone"


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is not a worker."""

    name: str
    pid: int
    host: int = 0


class HostState(StrEnum):
    """awaited -> serving -> lost -> serving ..."""

    AWAITED = "awaited"  # it has not joined yet
    SERVING = "serving"
    LOST = "lost"  # it may join again
    GONE = "gone"  # until an operator returns it


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the instance."""

    host: int
    state: HostState
    name: str = ""
    address: str = ""  # that it has joined from


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One seat and the process in it."""

    rank: Rank
    incarnation: Incarnation
    pid: int  # 0 while the process does not exist yet
    roles: tuple[Role, ...]
    state: WorkerState
    host: int = 0
    device: int = NO_DEVICE
    slots: int = 0  # per layer, shadows included
    shadow_slots: int = 0
    is_slow: bool = False  # demoted: asked last, and without new streams
    note: str = ""  # what an operator should know: "crashed 3 times; next start in 4 s"


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """All seats at one epoch."""

    epoch: Epoch
    goal: int = 0  # the version of the goal
    workers: tuple[Worker, ...]

    def __post_init__(self) -> None:
        ranks = [worker.rank for worker in self.workers]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"two workers share a rank: {sorted(ranks)}")


def gateway_name(number: int) -> str:
    """The name of a gateway's process; that of the first is what it is where there are no others."""
    return f"gateway-{number}" if number else "gateway"


def keeper_name(number: int) -> str:
    return f"keeper-{number}" if number else "keeper"
