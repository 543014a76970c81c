"""Memory of others that this worker can open: what is done with it when it is offered, and when it is withdrawn.

Offer    -> the name can be opened -> its user is told
Withdraw -> its user is told       -> the name cannot be opened any more
"""

import os
from collections.abc import Iterable, Mapping
from typing import Protocol

from everserve.engine.engine import Engine
from everserve.memory.liveness import Cell
from everserve.memory.local import LocalMemory
from everserve.tables.ids import Rank
from everserve.tables.memory import Kind, MemoryName
from everserve.wire.channel import Descriptors
from everserve.wire.messages import Offer, PeerJoined, Withdraw
from everserve.worker.logs import KeptLogs
from everserve.worker.slot_changes import ChangeableSlots, SlotChanges

OF_PEERS = (Kind.CELL, Kind.LANE, Kind.BELL)
OF_LOG = (Kind.KV, Kind.LOG)
OF_HEADS = (Kind.KV_PIECES, Kind.KV_MIRROR, Kind.KV_PARITY)
OF_WEIGHTS = (Kind.WEIGHTS, Kind.WEIGHTS_STATE)


class User(Protocol):
    """What uses some kinds of memory."""

    def offer(self, memory: MemoryName) -> None:
        """It can be opened."""

    def withdraw(self, memory: MemoryName) -> None:
        """It must not be used any more."""


class Offered:
    """`users`: by kind. What no part of this worker uses is not kept. Memory of peers waits for their PeerJoined."""

    def __init__(self, memory: LocalMemory, users: Mapping[Kind, User]) -> None:
        self._memory = memory
        self._users: dict[Kind, User] = {**dict.fromkeys(OF_PEERS, _Unused()), **users}

    @property
    def names(self) -> list[MemoryName]:
        return [*self._memory]

    def take(self, message: Offer | Withdraw, fds: Descriptors) -> None:
        memory = message.memory
        user = self._users.get(memory.kind)
        if user is None:
            return  # descriptors that are not taken are closed with the message
        if isinstance(message, Offer):
            (fd,) = fds.take()
            self._memory.put(memory, fd)
            user.offer(memory)
        else:
            user.withdraw(memory)
            self._memory.drop(memory)

    def of_peer(self, message: PeerJoined) -> tuple[Cell, int, int | None]:
        """The cell of a peer, the lane, and the bell if there is one: descriptors that are the caller's."""
        cell_fd, lane_fd, *bell_fds = (self._memory.take(memory) for memory in message.memory)
        cell = Cell(cell_fd)
        os.close(cell_fd)
        return cell, lane_fd, bell_fds[0] if bell_fds else None


class _Unused:
    """Memory that is only taken."""

    def offer(self, memory: MemoryName) -> None: ...

    def withdraw(self, memory: MemoryName) -> None: ...


def users(kinds: Iterable[Kind], user: User) -> dict[Kind, User]:
    """The user of all these kinds."""
    return dict.fromkeys(kinds, user)


class Logs:
    """Uses the logs of other attention workers."""

    def __init__(self, logs: KeptLogs, engine: Engine) -> None:
        self._logs = logs
        self._engine = engine

    def offer(self, memory: MemoryName) -> None:
        self._logs.offer(memory)

    def withdraw(self, memory: MemoryName) -> None:
        self._logs.withdraw(memory, self._engine)


class FetchesKv(Protocol):
    """Fetches KV of heads out of the memory of other seats."""

    def offer(self, rank: Rank, kind: Kind, fd: int) -> None:
        """It is there, instead of what was there before. Takes over the descriptor."""

    def withdraw(self, rank: Rank, kind: Kind) -> None:
        """It is lost."""


class HeadsKv:
    """Uses the pools, mirrors and parities of other seats."""

    def __init__(self, memory: LocalMemory, kv: FetchesKv) -> None:
        self._memory = memory
        self._kv = kv

    def offer(self, memory: MemoryName) -> None:
        self._kv.offer(memory.owners[0].rank, memory.kind, self._memory.open(memory))

    def withdraw(self, memory: MemoryName) -> None:
        self._kv.withdraw(memory.owners[0].rank, memory.kind)


class Weights:
    """Uses the weights of other expert seats, each with its slot table."""

    def __init__(self, memory: LocalMemory, slots: ChangeableSlots, changes: SlotChanges) -> None:
        self._memory = memory
        self._slots = slots
        self._changes = changes

    def offer(self, memory: MemoryName) -> None:
        """Weights can be used when both are there."""
        weights, table = (self._memory.beside(memory, kind) for kind in OF_WEIGHTS)
        if weights is not None and table is not None:
            fds = [self._memory.open(weights), self._memory.open(table)]
            self._slots.offer(memory.owners[0].rank, weights, fds)

    def withdraw(self, memory: MemoryName) -> None:
        self._changes.withdraw(memory.owners[0].rank)
