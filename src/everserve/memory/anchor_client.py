"""Requests to the anchor for memory. The anchor may die at any time: a new anchor gets all memory that exists, and all
pending requests again.

Memory that must outlive the anchor (cells, logs, weights) is *held* here too. Lanes are not: both workers map them.

What is on another host is asked of the carrier. What is held of it are notes (carrier/notes.py): the far end of the
link holds the memory itself.
"""

import os
from collections.abc import Callable

from everserve.memory.local import LocalMemory
from everserve.tables.ids import WorkerId
from everserve.tables.memory import MemoryName
from everserve.wire.channel import Channel, Descriptors
from everserve.wire.messages import Allocate, AnyMessage, Offer, Release, Withdraw

Then = Callable[[int], None]  # gets the descriptor, which is closed afterwards
Otherwise = Callable[[str], None]  # gets the reason why the allocation failed


class AnchorClient:
    """The pending allocations and the memory that is held."""

    def __init__(self, host: int = 0) -> None:
        self.host = host  # whose anchor it is
        self.channel: Channel | None = None
        self.carrier: Channel | None = None
        self._waiting: dict[MemoryName, list[tuple[Then, Otherwise]]] = {}
        self.memory = LocalMemory()  # that is held

    def attach(self, anchor: Channel) -> None:
        """A (new) anchor: send it the memory that exists, and repeat the pending requests."""
        self.channel = anchor
        for memory in self.memory:
            if memory.host == self.host:
                anchor.send(Offer(memory=memory), fds=[self.memory.descriptor(memory)])
        for memory in self._waiting:
            if memory.host == self.host:
                anchor.send(Allocate(memory=memory))

    def detach(self) -> None:
        """The anchor has died; the supervisor starts a new one."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def allocate(self, memory: MemoryName, then: Then, otherwise: Otherwise) -> None:
        """Calls `then` with the memory's descriptor, or `otherwise` if the allocation fails; neither if the memory is
        released before that."""
        if memory in self._waiting:
            self._waiting[memory].append((then, otherwise))
            return
        self._waiting[memory] = [(then, otherwise)]
        if (channel := self._channel_to(memory)) is not None:
            channel.send(Allocate(memory=memory))

    def hold(self, memory: MemoryName, fd: int) -> int:
        """Hold existing memory until it is released. Takes ownership of the descriptor; returns the one that is held,
        which is an earlier one if the memory was held already."""
        if memory in self.memory:
            os.close(fd)
            return self.memory.descriptor(memory)
        self.memory.put(memory, fd)
        if (channel := self._channel_to(memory)) is not None:
            channel.send(Offer(memory=memory), fds=[fd])
        return fd

    def find(self, need: MemoryName) -> MemoryName | None:
        """What is held for this need."""
        return next((memory for memory in self.memory if memory.need == need), None)

    def requested(self, need: MemoryName) -> MemoryName | None:
        """What was requested for this need, and is not there yet."""
        return next((memory for memory in self._waiting if memory.need == need), None)

    def held(self, memory: MemoryName | None) -> int | None:
        """The descriptor; None if it is not held."""
        return self.memory.descriptor(memory) if memory is not None and memory in self.memory else None

    def held_by(self, owner: WorkerId) -> list[MemoryName]:
        """The memory that is held and has no other owner."""
        return [memory for memory in self.memory if memory.owners == (owner,)]

    def release(self, memory: MemoryName) -> None:
        self._waiting.pop(memory, None)
        self.memory.drop(memory)
        if (channel := self._channel_to(memory)) is not None:
            channel.send(Release(memory=memory))

    def on_device(self, device: int) -> list[MemoryName]:
        """What is held of the memory of a device."""
        return [memory for memory in self.memory if memory.device == device]

    def on_host(self, host: int) -> list[MemoryName]:
        """What is held of the memory of a host."""
        return [memory for memory in self.memory if memory.host == host]

    def forget_requests(self, host: int) -> None:
        """The host is lost: nothing answers them."""
        for memory in [memory for memory in self._waiting if memory.host == host]:
            del self._waiting[memory]

    def read(self) -> None:
        """Handle the messages of the anchor; ChannelClosed if it has died."""
        assert self.channel is not None
        for message, fds in self.channel.receive_frames():
            self.handle(message, fds)

    def handle(self, message: AnyMessage, fds: Descriptors) -> None:
        """What was asked for is there, or cannot be had."""
        if isinstance(message, Offer):
            (fd,) = fds.take()
            for then, _ in self._waiting.pop(message.memory, ()):  # none if it was released meanwhile
                then(fd)
            os.close(fd)
        elif isinstance(message, Withdraw):
            for _, otherwise in self._waiting.pop(message.memory, ()):
                otherwise(message.reason)
        else:
            raise AssertionError(f"the anchor does not send {type(message).__name__}")

    def flush(self) -> None:
        if self.channel is not None:
            self.channel.flush()

    def _channel_to(self, memory: MemoryName) -> Channel | None:
        return self.channel if memory.host == self.host else self.carrier
