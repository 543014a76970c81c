"""Copies of device descriptors that processes sent to the supervisor (procs/device_descriptors.py), and when it closes
them."""

import time
from collections import deque
from collections.abc import Callable, Iterable

from everserve.errors import ProtocolError
from everserve.procs.device_descriptors import CLOSE_AFTER_S, warn
from everserve.procs.process_table import HeldRow
from everserve.wire.channel import Channel, ChannelClosed, Descriptors
from everserve.wire.messages import DeviceDescriptors


class Held:
    """The copies of one process. `lifeline`: the channel to read them from, if that carries nothing else to us.
    `is_for_this`: nor anything from us, so that it is closed when the process has closed its end. `record`: called when
    something is about to be closed that stood in the process table."""

    def __init__(
        self,
        owner: str,
        lifeline: Channel | None = None,
        is_for_this: bool = False,
        record: Callable[[], None] = lambda: None,
    ) -> None:
        self._record = record
        self._owner = owner
        self.lifeline = lifeline
        self._is_for_this = is_for_this
        self._held: list[Descriptors] = []
        self._arriving: list[Descriptors] = []  # the next set, which is not complete yet
        self._is_unprotected = False  # some descriptors were lost

    @property
    def is_complete(self) -> bool:
        """Whether a complete set has arrived."""
        return bool(self._held)

    def read(self) -> None:
        """Read what has arrived."""
        if self.lifeline is None:
            return  # everything has
        try:
            for message, fds in self.lifeline.receive_frames():
                if isinstance(message, DeviceDescriptors):
                    self.add(message, fds)
        except ChannelClosed:  # a process that exits is handled elsewhere
            if self._is_for_this:
                lifeline, self.lifeline = self.lifeline, None
                self._record()
                lifeline.close()
        except ProtocolError as error:
            if not self._is_unprotected:
                warn(f"{self._owner}: {error}")
            self._is_unprotected = True

    def add(self, message: DeviceDescriptors, fds: Descriptors) -> None:
        """The last message of a set replaces the set held before, which is closed."""
        self._arriving.append(fds)
        if not message.num_following:
            before, self._held, self._arriving = self._held, self._arriving, []
            if before:
                self._record()
            for old in before:
                old.close()

    def row(self) -> HeldRow:
        """What the process table has of it."""
        return HeldRow(
            lifeline=self.lifeline.fileno() if self.lifeline is not None else None,
            complete=[fd for fds in self._held for fd in fds.numbers],
            arriving=[fd for fds in self._arriving for fd in fds.numbers],
            is_for_this=self._is_for_this,
        )

    @classmethod
    def of_fds(cls, fds: Iterable[int]) -> "Held":
        """The descriptors of any processes that have ended."""
        held = cls("what has ended")
        held._held = [Descriptors(fds)]
        return held

    @classmethod
    def of_row(cls, row: HeldRow, owner: str, record: Callable[[], None]) -> "Held":
        """Descriptors as the supervisor before has left it."""
        lifeline = Channel.of_fd(row.lifeline, waits_for_room=True) if row.lifeline is not None else None
        held = cls(owner, lifeline, row.is_for_this, record)
        held._held = [Descriptors(row.complete)] if row.complete else []
        held._arriving = [Descriptors(row.arriving)] if row.arriving else []
        return held

    def let_go(self) -> None:
        if self.lifeline is not None:
            self.lifeline.close()
        for fds in (*self._held, *self._arriving):
            fds.close()
        self._held, self._arriving = [], []


class DeferredClose:
    """The copies of processes that have ended, kept for CLOSE_AFTER_S."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, Held]] = deque()  # when to close it

    def close_later(self, held: Held) -> None:
        """Its process has just ended."""
        self._ended.append((time.monotonic() + CLOSE_AFTER_S, held))

    def tend(self) -> None:
        """Close what is due."""
        while self._ended and self._ended[0][0] <= time.monotonic():
            self._ended.popleft()[1].let_go()

    def close(self) -> None:
        """Close everything."""
        while self._ended:
            self._ended.popleft()[1].let_go()
