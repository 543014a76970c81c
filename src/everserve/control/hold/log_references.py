"""Which KV logs exist, and when they can be released.

A log belongs to one incarnation of an attention worker, and is offered to all others (catalog.py). It is released when
both are true, in any order:

    the incarnation is lost        (the orchestrator's decision)
    it is settled                  (each gateway says that no stream of its needs the log)

Where the blocks are in device memory of their own, that memory is held before the log is added, offered before it, and
released after it: a log never exists without its blocks.
"""

from collections.abc import Callable, Iterable, Sequence

from everserve.control.hold.catalog import Catalog
from everserve.tables.ids import Rank, WorkerId
from everserve.tables.memory import Kind, MemoryName


class Logs:
    """The logs of all attention workers, live and lost."""

    def __init__(self, catalog: Catalog, num_gateways: int = 1) -> None:
        self._catalog = catalog
        self._known: dict[WorkerId, tuple[MemoryName, ...]] = {}  # the memory of its blocks first, if separate
        self._lost: set[WorkerId] = set()
        self._settled: dict[WorkerId, set[int]] = {}  # by which gateways
        self._gateways = frozenset(range(num_gateways))
        self.needed: dict[int, Sequence[WorkerId]] = {}  # by streams, as each gateway reported during a recovery

    def add(self, memory: MemoryName) -> None:
        """A log is held, and the memory of its blocks is."""
        (log,) = memory.owners
        blocks = self._catalog.beside(memory, Kind.KV)
        self._known[log] = (memory,) if blocks is None else (blocks, memory)
        for piece in self._known[log]:
            self._catalog.offer(piece)

    def has(self, log: WorkerId) -> bool:
        return log in self._known

    @property
    def has_lost(self) -> bool:
        """Whether streams may still be restored from the log of a worker that is lost."""
        return bool(self._lost)

    def descriptors(self, log: WorkerId) -> tuple[int, ...]:
        """The memory of its blocks, if separate, then that of the log."""
        held = [self._catalog.held(memory) for memory in self._known[log]]
        return tuple(fd for fd in held if fd is not None)

    def last_of(self, rank: Rank) -> WorkerId | None:
        """The log of the latest incarnation in this seat that has one."""
        return max((log for log in self._known if log[0] == rank), default=None)

    def lose(self, log: WorkerId) -> None:
        if log in self._known:
            self._lost.add(log)
            self._maybe_drop(log)

    def lose_all_but(self, is_current: Callable[[WorkerId], bool]) -> None:
        """A worker that was lost to the previous orchestrator, and has ended since, is not lost once more."""
        for log in sorted(self._known):
            if not is_current(log):
                self.lose(log)

    def settle(self, gateway: int, log: WorkerId) -> None:
        """No stream of this gateway needs it."""
        if log in self._known:
            self._settled.setdefault(log, set()).add(gateway)
            self._maybe_drop(log)

    def settle_all(self, log: WorkerId) -> None:
        """No stream ever had this worker."""
        for gateway in self._gateways:
            self.settle(gateway, log)

    def settle_lost_but(self, gateway: int, needed: Iterable[WorkerId]) -> None:
        """Settle all lost logs but those that this gateway needs: a LogSettled that it sent to the previous
        orchestrator is not sent again. Logs of live workers stay unsettled, because these may still get streams."""
        for log in sorted(self._lost - set(needed)):
            self.settle(gateway, log)

    def lose_device(self, device: int) -> None:
        """Logs in the memory of a lost device are gone, also those that streams still need."""
        for log, memory in list(self._known.items()):
            if any(piece.device == device for piece in memory):
                self._drop(log)

    def lose_host(self, host: int) -> None:
        """The same, of a host."""
        for log, memory in list(self._known.items()):
            if any(piece.host == host for piece in memory):
                self._drop(log)

    def _maybe_drop(self, log: WorkerId) -> None:
        if log in self._lost and self._settled.get(log, set()) >= self._gateways:
            self._drop(log)

    def _drop(self, log: WorkerId) -> None:
        for memory in reversed(self._known.pop(log)):
            self._catalog.release(memory)
        self._lost.discard(log)
        self._settled.pop(log, None)
