"""One keeper follows another: at an upgrade, or because it has died and its gateway lives.

    supervisor     starts the next keeper, and gives the gateway a channel to it (Succeed)
    next keeper    imports everything, and says that it is ready
    gateway        gives it its channel to the supervisor and each connection; notes in the ledger that it has; ends
    next keeper    reads that when the channel ends, notes that it follows, and makes a gateway, as after a death
    supervisor     reads who follows: when the new gateway says that it has begun, or the next keeper has died already

The note decides who goes on, also if one of them dies before or after it. Without it the next keeper ends, and the
gateway, or its successor of the same keeper, serves as before.
"""

import asyncio
import contextlib
import logging
import os
import socket
from typing import NamedTuple

from everserve.ledger.ledger import Ledger
from everserve.ledger.sockets import connections_of
from everserve.wire.channel import AsyncChannel
from everserve.words import count

_GIVEN = 0  # the exit status then
_READY = b"r"
_AT_ONCE = 200  # descriptors; the kernel takes 253
_PATIENCE_S = 5.0
_SOON_S = 0.005
_GIVES_WITHIN_S = 30.0  # a gateway, once the next keeper is ready: longer, and it hangs

log = logging.getLogger(__name__)


class Giver:
    """The gateway's part."""

    def __init__(self, control: AsyncChannel, ledger: Ledger, listen: socket.socket) -> None:
        self._control = control
        self._ledger = ledger
        self._listen = listen

    def begin(self, channel: socket.socket) -> None:
        """Gives everything to the keeper at the other end, when that is ready, and ends this process. If that keeper
        dies before, nothing happens."""
        channel.setblocking(False)
        asyncio.get_running_loop().add_reader(channel, self._on_readable, channel)

    def _on_readable(self, channel: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(channel)
        if self._control.descriptors():  # connections that have come in messages, and are about to be handled
            loop.call_later(_SOON_S, self.begin, channel)
            return
        with channel, contextlib.suppress(OSError):
            channel.settimeout(_PATIENCE_S)
            if channel.recv(1) == _READY:
                self._give(channel)
                self._ledger.note_given()
                logging.shutdown()
                os._exit(_GIVEN)

    def _give(self, channel: socket.socket) -> None:
        fds = connections_of(self._listen)
        socket.send_fds(channel, [_READY], [self._control.channel.fileno()])
        for first in range(0, len(fds), _AT_ONCE):
            socket.send_fds(channel, [_READY], fds[first : first + _AT_ONCE])
        log.info("%s to the next keeper", count(len(fds), "connection", "go"))


class Given(NamedTuple):
    """What the next keeper has got."""

    control: int  # the channel to the supervisor
    connections: frozenset[int]


def take(channel: socket.socket, ledger: Ledger) -> Given | None:
    """Says that this keeper is ready, and waits for what it gets. None: the gateway has kept it."""
    num_given = ledger.num_given
    fds: list[int] = []
    with channel, contextlib.suppress(OSError):
        channel.settimeout(_GIVES_WITHIN_S)
        channel.send(_READY)
        said = _READY
        while said:
            said, some, _, _ = socket.recv_fds(channel, len(_READY), _AT_ONCE)
            fds += some
    if ledger.num_given > num_given:
        ledger.note_follower()
        return Given(fds[0], frozenset(fds[1:]))
    for fd in fds:
        os.close(fd)
    return None
