"""Asking the anchor for memory. The anchor may die in between: its successor is asked again."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from everserve.runtime.channel import Channel
from everserve.runtime.messages import Allocate, Allocated, Release

Then = Callable[[int], None]  # gets the descriptor, which is closed afterwards


@dataclass(frozen=True)
class _Wish:
    num_bytes: int
    then: Then


class Memory:
    """What is asked of the anchor and not there yet."""

    def __init__(self) -> None:
        self.anchor: Channel | None = None
        self._wishes: dict[str, _Wish] = {}

    def attach(self, anchor: Channel) -> None:
        """A (new) anchor: what is mapped stays mapped, what is owed is asked for again."""
        self.anchor = anchor
        for name, wish in self._wishes.items():
            anchor.send(Allocate(name=name, num_bytes=wish.num_bytes))

    def detach(self) -> None:
        """The anchor is gone; the supervisor starts another."""
        if self.anchor is not None:
            self.anchor.close()
            self.anchor = None

    def allocate(self, name: str, num_bytes: int, then: Then) -> None:
        """`then` is called with the memory's descriptor, unless it is released before."""
        self._wishes[name] = _Wish(num_bytes, then)
        if self.anchor is not None:
            self.anchor.send(Allocate(name=name, num_bytes=num_bytes))

    def release(self, name: str) -> None:
        self._wishes.pop(name, None)
        if self.anchor is not None:
            self.anchor.send(Release(name=name))

    def read(self) -> None:
        """Handle what the anchor has sent; ChannelClosed if it is gone."""
        assert self.anchor is not None
        for message in self.anchor.receive_all():
            assert isinstance(message, Allocated), f"the anchor does not send {type(message).__name__}"
            fd = self.anchor.take_fd()
            wish = self._wishes.pop(message.name, None)
            if wish is not None:  # else: whom it was for is gone
                wish.then(fd)
            os.close(fd)
