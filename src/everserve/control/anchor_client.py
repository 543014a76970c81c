"""Asking the anchor for memory. The anchor may die in between: its successor is asked again, and is given what exists.

What must outlive the anchor (cells, logs, weights; lanes are mapped by both ends and need nobody) is *held* here too.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from everserve.memory.names import ON_HOST
from everserve.wire.channel import Channel
from everserve.wire.messages import Adopt, Allocate, Allocated, AllocationFailed, Release

Then = Callable[[int], None]  # gets the descriptor, which is closed afterwards
Otherwise = Callable[[str], None]  # gets the reason why there is no such memory


@dataclass(frozen=True)
class _Wish:
    """One piece of memory, and everybody who waits for it."""

    allocate: Allocate
    waiting: list[tuple[Then, Otherwise]]


class Memory:
    """What is asked of the anchor and not there yet, and what is held."""

    def __init__(self) -> None:
        self.anchor: Channel | None = None
        self._wishes: dict[str, _Wish] = {}
        self._held: dict[str, int] = {}

    def attach(self, anchor: Channel) -> None:
        """A (new) anchor: what exists is its own from now on, what is owed is asked for again."""
        self.anchor = anchor
        for name, fd in self._held.items():
            anchor.send(Adopt(name=name), fds=[fd])
        for wish in self._wishes.values():
            anchor.send(wish.allocate)

    def detach(self) -> None:
        """The anchor is gone; the supervisor starts another."""
        if self.anchor is not None:
            self.anchor.close()
            self.anchor = None

    def allocate(self, name: str, num_bytes: int, then: Then, otherwise: Otherwise, device: int = ON_HOST) -> None:
        """`then` is called with the memory's descriptor, or `otherwise` if it cannot be had; neither of them if it is
        released before."""
        if name in self._wishes:
            self._wishes[name].waiting.append((then, otherwise))
            return
        wish = _Wish(Allocate(name=name, num_bytes=num_bytes, device=device), [(then, otherwise)])
        self._wishes[name] = wish
        if self.anchor is not None:
            self.anchor.send(wish.allocate)

    def hold(self, name: str, fd: int) -> int:
        """Memory that exists, under this name until it is released. The descriptor is ours from now on; returns the one
        that is held (there may be one already)."""
        if name in self._held:
            os.close(fd)
            return self._held[name]
        self._held[name] = fd
        if self.anchor is not None:
            self.anchor.send(Adopt(name=name), fds=[fd])
        return fd

    def held(self, name: str) -> int | None:
        """The descriptor; None if it is not held."""
        return self._held.get(name)

    def release(self, name: str) -> None:
        self._wishes.pop(name, None)
        fd = self._held.pop(name, None)
        if fd is not None:
            os.close(fd)
        if self.anchor is not None:
            self.anchor.send(Release(name=name))

    def read(self) -> None:
        """Handle what the anchor has sent; ChannelClosed if it is gone."""
        assert self.anchor is not None
        for message, fds in self.anchor.receive_frames():
            if isinstance(message, Allocated):
                (fd,) = fds.take()
                self._on_allocated(message.name, fd)
            elif isinstance(message, AllocationFailed):
                wish = self._wishes.pop(message.name, None)
                for _, otherwise in wish.waiting if wish is not None else ():
                    otherwise(message.reason)
            else:
                raise AssertionError(f"the anchor does not send {type(message).__name__}")

    def _on_allocated(self, name: str, fd: int) -> None:
        wish = self._wishes.pop(name, None)
        for then, _ in wish.waiting if wish is not None else ():  # nobody: whom it was for is gone
            then(fd)
        os.close(fd)
