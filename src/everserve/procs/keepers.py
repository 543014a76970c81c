"""Gateways as the supervisor has them: each is a child of its keeper, which makes the next one when it dies
(gateway/keeper.py). The supervisor has one channel to both; a new gateway says there that it has begun.

    the keeper ends      its gateway lives: an heir is started, which gets all connections (gateway/succession.py)
                         its gateway has died, too: a new keeper gets listening socket and ledger
    another version      keepers are followed one after the other, in the same way
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from everserve import __version__
from everserve.config.gateway import GatewayConfig
from everserve.ledger.layout import Shape
from everserve.ledger.ledger import Ledger
from everserve.ledger.shared import SharedTable
from everserve.procs import process
from everserve.procs.children import Child, Children
from everserve.procs.process_table import GatewayRow
from everserve.procs.steps import Steps
from everserve.tables.members import gateway_name, keeper_name
from everserve.wire.channel import Channel
from everserve.wire.event_log import EventLog
from everserve.wire.events import ProcessEnded, ProcessStarted
from everserve.wire.messages import AnyMessage, GatewayBegun, StartGateway, Succeed

VERSION = f"{__version__} of {sys.executable}"

_CONNECTIONS = 1 << 14  # that the next gateway can go on with
_RING_BYTES = 256 << 20  # of answers that clients have not read yet
_OUTLIVES_S = 0.2  # for this long after its keeper a gateway that has died, too, may seem to live
_MAX_HEIRS = 5  # for one keeper: then one of another version stays, and a gateway without a keeper is killed

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Keeper(Child):
    """The process that is started for a gateway. Its name is the gateway's, whose channel it has."""

    number: int = 0  # of the gateway
    version: str = VERSION
    gateway_pid: int | None = None  # the gateway that it has made last
    generation: int | None = None  # of that gateway, once it was told everything
    heir: int | None = None  # the process that follows it, when it is ready
    num_heirs: int = 0  # that were started for it
    ended_s: float = 0.0  # when it was seen that it has ended

    @property
    def title(self) -> str:
        return keeper_name(self.number)

    def row(self) -> GatewayRow:
        return GatewayRow(
            number=self.number,
            pid=self.pid,
            control=self.control.fileno(),
            is_ready=self.is_ready,
            status=self.status,
            gateway_pid=self.gateway_pid,
            heir=self.heir,
            version=self.version,
        )


@dataclass(frozen=True)
class GatewayMemory:
    """What keepers get, and what outlives them: the listening socket, each gateway's ledger, the table of all."""

    listen: int
    ledgers: Sequence[int]
    shared: int

    @classmethod
    def new(cls, listen: int, config: GatewayConfig) -> "GatewayMemory":
        ledgers = [Ledger.create(_ledger_shape(config)) for _ in range(config.gateways)]
        return cls(listen, ledgers, SharedTable.create(config.gateways))

    def close(self) -> None:
        for fd in (self.listen, self.shared, *self.ledgers):
            os.close(fd)


def _ledger_shape(config: GatewayConfig) -> Shape:
    """Requests are there as long as they hold memory, and twice while their bodies are read; and so are streams whose
    clients may come back."""
    num_bytes = 2 * config.request_memory_bytes + config.resume_memory_bytes + _RING_BYTES
    return Shape.of(num_connections=_CONNECTIONS, num_requests=_CONNECTIONS, num_bytes=num_bytes)


class Keepers:
    """One for each of --gateways. `record`: writes the process table."""

    def __init__(
        self,
        children: Children,
        steps: Steps,
        start: StartGateway,
        memory: GatewayMemory,
        record: Callable[[], None],
        events: EventLog,
    ) -> None:
        self.names = tuple(gateway_name(number) for number in range(start.config.gateways))
        self.memory = memory
        self._children = children
        self._steps = steps
        self._start = start
        self._record = record
        self._events = events

    def there(self) -> list[Keeper]:
        """Those that are there, by the numbers of their gateways."""
        return [child for child in self._children.values() if isinstance(child, Keeper)]

    def pids(self) -> set[int]:
        """Processes that follow keepers, and gateways, whose keeper may have died."""
        pids = {pid for keeper in self.there() for pid in (keeper.heir, keeper.gateway_pid)}
        return {pid for pid in pids if pid is not None}

    @property
    def num_of_others(self) -> int:
        """Those of another version."""
        return sum(keeper.version != VERSION for keeper in self.there())

    # -- words -----------------------------------------------------------------------------------

    def send(self, message: AnyMessage) -> None:
        for name in self.names:
            self._children.send(name, message)

    def try_send(self, number: int, message: AnyMessage, fds: Sequence[int]) -> bool:
        """Whether this gateway has it now, or there is none that it would be for."""
        name = gateway_name(number)
        gateway = self._children.get(name)
        if gateway is None or gateway.end_by is not None:
            return _starting(name) not in self._steps
        return gateway.control.try_send(message, fds)

    # -- beginnings ------------------------------------------------------------------------------

    def owe_missing(self) -> None:
        """Those that are not there are to be started."""
        for number, name in enumerate(self.names):
            if name not in self._children:
                self._steps.owe(_starting(name), partial(self._spawn, number))

    def restore(self, row: GatewayRow) -> None:
        """One that the supervisor before has left."""
        control = Channel.of_fd(row.control, waits_for_room=True)
        keeper = Keeper(gateway_name(row.number), row.pid, control, row.status, row.is_ready, number=row.number)
        keeper.gateway_pid, keeper.heir, keeper.version = row.gateway_pid, row.heir, row.version
        self._children.restore(keeper)

    def _spawn(self, number: int) -> None:
        fds, start = self._what_it_gets(number)
        make = partial(Keeper, number=number)
        self._children.spawn(gateway_name(number), fds, start, make=make, are_packets=True)

    def _what_it_gets(self, number: int) -> tuple[dict[str, int], StartGateway]:
        memory = self.memory
        fds = {"--listen-fd": memory.listen, "--ledger-fd": memory.ledgers[number], "--table-fd": memory.shared}
        return fds, msgspec.structs.replace(self._start, number=number)

    def on_begun(self, keeper: Keeper, begun: GatewayBegun) -> bool:
        """A new gateway. Whether it must be told everything: another one has died."""
        if self._is_followed(keeper):
            self._on_followed(keeper)
        if keeper.generation == begun.generation and keeper.gateway_pid == begun.pid:
            return False  # it says so until it is told
        before, keeper.gateway_pid, keeper.generation = keeper.gateway_pid, begun.pid, begun.generation
        if before is not None:  # how: the keeper has said it in the log
            self._events.append(ProcessEnded(process="supervisor", child=keeper.name, exit_status=-signal.SIGKILL))
        self._events.append(ProcessStarted(process="supervisor", child=keeper.name, child_pid=begun.pid))
        return begun.generation > 1

    # -- one after the other -----------------------------------------------------------------------

    def owe_heirs(self) -> None:
        """A keeper whose gateway has outlived it, or which is of another version, is to be followed: one at a time."""
        keepers = [keeper for keeper in self.there() if keeper.end_by is None]
        if any(keeper.heir is not None for keeper in keepers):
            return
        needy = next((keeper for keeper in keepers if self._needs_heir(keeper)), None)
        if needy is not None:
            self._steps.owe(f"follow the {needy.title}", partial(self._start_heir, needy.number))

    def _needs_heir(self, keeper: Keeper) -> bool:
        if keeper.status is None:
            return keeper.version != VERSION and keeper.is_ready and keeper.num_heirs < _MAX_HEIRS
        now_s = time.monotonic()
        keeper.ended_s = keeper.ended_s or now_s
        if keeper.num_heirs < _MAX_HEIRS:
            return now_s > keeper.ended_s + _OUTLIVES_S  # else the gateway has died, too
        if keeper.gateway_pid is not None:
            log.warning("the %s gives its connections to no one: it is killed", keeper.name)
            process.kill(keeper.gateway_pid)
        return False

    def _start_heir(self, number: int) -> None:
        """A keeper that follows the one of this gateway, whose channel it will have."""
        keeper = self._children.get(gateway_name(number))
        if not isinstance(keeper, Keeper) or keeper.end_by is not None or keeper.heir is not None:
            return
        fds, start = self._what_it_gets(number)
        ours, theirs = Channel.pair(are_packets=True)
        to_gateway, to_heir = socket.socketpair()
        with ours, theirs, to_gateway, to_heir:
            fds |= {"--control-fd": theirs.fileno(), "--succession-fd": to_heir.fileno()}
            keeper.heir = self._children.start(keeper.name, fds)
            keeper.num_heirs += 1
            self._record()
            Channel(ours).send(start)
            self._children.give(keeper.name, Succeed(), [to_gateway.detach()])

    def _is_followed(self, keeper: Keeper) -> bool:
        """Whether its heir has everything. The ledger says so at once; what is told of it may come later, or never."""
        return keeper.heir is not None and keeper.heir == Ledger.follower(self.memory.ledgers[keeper.number])

    def _on_followed(self, keeper: Keeper) -> None:
        """The next keeper has everything. The one before has ended, or is about to."""
        assert keeper.heir is not None
        if keeper.status is None:  # it has nothing more to do, and would keep all connections open
            keeper.signal(signal.SIGKILL)
        status = keeper.status if keeper.status is not None else 0
        self._events.append(ProcessEnded(process="supervisor", child=keeper.title, exit_status=status))
        keeper.pid, keeper.status, keeper.heir, keeper.num_heirs, keeper.ended_s = keeper.heir, None, None, 0, 0.0
        keeper.version = VERSION
        self._events.append(ProcessStarted(process="supervisor", child=keeper.title, child_pid=keeper.pid))

    # -- ends --------------------------------------------------------------------------------------

    def note_exit(self, pid: int, status: int) -> bool:
        """Whether it was an heir that has got nothing. One that has everything is the keeper now, and a child."""
        keeper = next((keeper for keeper in self.there() if keeper.heir == pid), None)
        if keeper is not None and self._is_followed(keeper):
            self._on_followed(keeper)
        elif keeper is not None:
            keeper.heir = None
            log.warning("the %s could not be followed (%s)", keeper.title, process.how(status))
            return True
        return False

    def tend_stopped(self) -> None:
        """A keeper that is stopped (SIGSTOP) is woken, because its end would be that of all connections; and so is a
        gateway without one. Other gateways are their keepers' concern."""
        for keeper in self.there():
            if _is_stopped(keeper.pid):
                keeper.signal(signal.SIGCONT)
            if keeper.heir is not None and _is_stopped(keeper.heir):
                process.kill(keeper.heir)
            if keeper.status is not None and keeper.gateway_pid and _is_stopped(keeper.gateway_pid):
                process.kill(keeper.gateway_pid, signal.SIGCONT)


def _starting(name: str) -> str:
    return f"start the {name}"


def _is_stopped(pid: int) -> bool:
    return process.state_of(pid) == "T"
