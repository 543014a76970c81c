"""The process table: what the next supervisor must know, in shared memory that root holds (root.py).

Processes are here by pid, and all that they have with the supervisor by the number of its descriptor: root and all
supervisors have one table of descriptors, so nothing is handed over. Orchestrator, anchor and zygote are only listed to
be ended, because the messages that they had half sent died with the supervisor; workers and the gateway go on.

    recorded before    a process that streams depend on is told something; a descriptor that stands here is closed (its
                       number would be another file's); a child that has ended is reaped (its pid would be another
                       process's)
    recorded after     everything else: whatever the table does not name is ended or closed by the next supervisor

The whole table is written each time, beside the one before, and then a header that says where it is: so it is whole
whenever its writer dies. There is one writer, and it is dead when the next one reads.
"""

import os
import struct
from typing import Any, TypeVar

import msgspec

from everserve.config.events import EventLogConfig
from everserve.tables.goal import Goal
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.tables.memory import MemoryName
from everserve.wire.messages import StartCarrier, StartGateway, StartOrchestrator, StartWorker

_T = TypeVar("_T")

_HEADER = struct.Struct("=QQ")  # where the table begins, and its length
_FIRST = 4096  # where tables may begin
_STEP = 1 << 26  # ... or here; pages that were never written take no memory


class Row(msgspec.Struct, kw_only=True, array_like=True):
    """Base of all rows."""


class HeldRow(Row):
    """Device descriptors of one process (deferred_close.py)."""

    lifeline: int | None
    complete: list[int]
    arriving: list[int]
    is_for_this: bool


class WorkerRow(Row):
    start: msgspec.Raw  # a StartWorker
    pid: int
    memory: list[int]
    dropped: list[MemoryName]
    held: HeldRow  # with its lifeline
    rehearsed: HeldRow | None
    tokens: dict[int, int]  # by gateway: its end, until it has it


class OrderRow(Row):
    """A worker that is to be forked."""

    start: msgspec.Raw
    memory: list[int]
    dropped: list[MemoryName]


class WorkersTable(Row):
    """What the provisioner knows."""

    workers: list[WorkerRow] = []
    orders: list[OrderRow] = []
    kept: list[tuple[MemoryName, int]] = []
    latest: dict[Rank, tuple[Incarnation, tuple[Role, ...]]] = {}


class GatewayRow(Row):
    number: int
    pid: int
    control: int
    is_ready: bool
    status: int | None  # it has ended so, and that was not handled yet
    gateway_pid: int | None = None  # `pid` is its keeper's
    heir: int | None = None  # the next keeper
    version: str = ""


class MpsRow(Row):
    """The daemon of this instance (mps.py)."""

    environment: dict[str, str]
    lifeline: int
    report: int
    watcher: int


class StateRow(Row):
    """Where the instance keeps files (state_directory.py)."""

    path: str
    lock: int
    is_temporary: bool


class Instance(Row):
    """What `everserve serve` was asked for. It does not change."""

    model: str  # as it was named
    url: str
    start_gateway: StartGateway
    start_orchestrator: StartOrchestrator
    grace_s: float
    event_log: EventLogConfig
    environment: dict[str, str]  # of the first supervisor
    share_device: bool = False
    num_spares: int = 0  # for each device
    keeps: list[int] = []  # pids of processes beside the instance, which end by themselves
    state: StateRow | None = None
    start_carrier: StartCarrier | None = None  # None: there is one host


class ProcessTable(Row):
    instance: msgspec.Raw  # an Instance
    goal: msgspec.Raw  # a Goal, or None
    listen: int = -1  # for keepers, as the ledger
    ledgers: list[int] = []  # by gateway
    shared: int = -1  # what gateways know of each other
    gateways: list[GatewayRow] = []
    helpers: list[int] = []  # pids
    orchestrator: int | None = None  # its channel, in which may be what operators were told is kept
    workers: WorkersTable = msgspec.field(default_factory=WorkersTable)
    is_serving: bool = False
    restarts: dict[str, list[float]] = {}  # when; of each helper
    kill_at: float | None = None  # set while stopping
    num_stops: int = 0  # signals that asked for the end
    failure: str | None = None
    exit_status: int = 0
    mps: MpsRow | None = None

    def descriptors(self) -> frozenset[int]:
        """All that it names."""
        rows = self.workers
        named: list[int | None] = [
            self.listen,
            self.shared,
            *self.ledgers,
            self.orchestrator,
            *(fd for _, fd in rows.kept),
        ]
        named += [gateway.control for gateway in self.gateways]
        named += [self.mps.lifeline, self.mps.report] if self.mps is not None else []
        named += [fd for order in rows.orders for fd in order.memory]
        for worker in rows.workers:
            named += [*worker.tokens.values(), *worker.memory]
            for held in (worker.held, worker.rehearsed):
                named += [held.lifeline, *held.complete, *held.arriving] if held is not None else []
        return frozenset(fd for fd in named if fd is not None)


_encoder = msgspec.msgpack.Encoder()


def encode(value: Any) -> msgspec.Raw:
    """Encodes a value for a field that does not change, so that it is encoded once."""
    return msgspec.Raw(_encoder.encode(value))


def decode(raw: msgspec.Raw, kind: type[_T]) -> _T:
    return msgspec.msgpack.decode(raw, type=kind)


def start_of(raw: msgspec.Raw) -> StartWorker:
    return decode(raw, StartWorker)


def goal_of(table: ProcessTable) -> Goal | None:
    goal: Goal | None = msgspec.msgpack.decode(table.goal, type=Goal | None)
    return goal


class TableFile:
    """The shared memory that the table is in."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._written = b""
        self._begin = 0

    def read(self) -> ProcessTable | None:
        """None: nothing was written yet."""
        header = os.pread(self._fd, _HEADER.size, 0)
        if len(header) < _HEADER.size:
            return None
        self._begin, length = _HEADER.unpack(header)
        if not length:
            return None
        self._written = os.pread(self._fd, length, self._begin)
        return msgspec.msgpack.decode(self._written, type=ProcessTable)

    def write(self, table: ProcessTable) -> None:
        """If it says anything new."""
        data = _encoder.encode(table)
        if data == self._written:
            return
        begin = _FIRST + _STEP if self._begin == _FIRST else _FIRST
        assert len(data) < _STEP, "a process table of that size"
        os.pwrite(self._fd, data, begin)
        os.pwrite(self._fd, _HEADER.pack(begin, len(data)), 0)  # within one page: a signal ends no such write halfway
        self._begin, self._written = begin, data
