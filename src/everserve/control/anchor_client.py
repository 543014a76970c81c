"""Asking the anchor for memory. The anchor may die in between: its successor is asked again, and is given what exists.

Memory that must outlive the anchor (cells, logs, weights) is *held* here too. Lanes are not: both ends map them.
"""

import os
from collections.abc import Callable

from everserve.tables.memory import Memory
from everserve.wire.channel import Channel
from everserve.wire.messages import Adopt, Allocate, Allocated, AllocationFailed, Release

Then = Callable[[int], None]  # gets the descriptor, which is closed afterwards
Otherwise = Callable[[str], None]  # gets the reason why there is no such memory


class AnchorClient:
    """What is asked of the anchor and not there yet, and what is held."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self._waiting: dict[Memory, list[tuple[Then, Otherwise]]] = {}
        self._held: dict[Memory, int] = {}

    def attach(self, anchor: Channel) -> None:
        """A (new) anchor: what exists is its own from now on, what is owed is asked for again."""
        self.channel = anchor
        for memory, fd in self._held.items():
            anchor.send(Adopt(memory=memory), fds=[fd])
        for memory in self._waiting:
            anchor.send(Allocate(memory=memory))

    def detach(self) -> None:
        """The anchor is gone; the supervisor starts another."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def allocate(self, memory: Memory, then: Then, otherwise: Otherwise) -> None:
        """`then` is called with the memory's descriptor, or `otherwise` if it cannot be had; neither of them if it is
        released before."""
        if memory in self._waiting:
            self._waiting[memory].append((then, otherwise))
            return
        self._waiting[memory] = [(then, otherwise)]
        if self.channel is not None:
            self.channel.send(Allocate(memory=memory))

    def hold(self, memory: Memory, fd: int) -> int:
        """Memory that exists, until it is released. The descriptor is ours from now on; returns the one that is held
        (there may be one already)."""
        if memory in self._held:
            os.close(fd)
            return self._held[memory]
        self._held[memory] = fd
        if self.channel is not None:
            self.channel.send(Adopt(memory=memory), fds=[fd])
        return fd

    def held(self, memory: Memory | None) -> int | None:
        """The descriptor; None if it is not held."""
        return self._held.get(memory) if memory is not None else None

    def release(self, memory: Memory) -> None:
        self._waiting.pop(memory, None)
        fd = self._held.pop(memory, None)
        if fd is not None:
            os.close(fd)
        if self.channel is not None:
            self.channel.send(Release(memory=memory))

    def read(self) -> None:
        """Handle what the anchor has sent; ChannelClosed if it is gone."""
        assert self.channel is not None
        for message, fds in self.channel.receive_frames():
            if isinstance(message, Allocated):
                (fd,) = fds.take()
                for then, _ in self._waiting.pop(message.memory, ()):  # it may have been released meanwhile
                    then(fd)
                os.close(fd)
            elif isinstance(message, AllocationFailed):
                for _, otherwise in self._waiting.pop(message.memory, ()):
                    otherwise(message.reason)
            else:
                raise AssertionError(f"the anchor does not send {type(message).__name__}")
