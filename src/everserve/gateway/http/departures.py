"""Connections that are on their way to another gateway, until that one has them.

    here     marked in the ledger, and kept --> sent, again and again --> it says that it has it: closed here
                  |                                 '--> none takes it: closed
                  '-- this gateway dies: its successor finds the mark, and goes on sending
    there    it has this connection, or has had it: it says so, and what has come is closed
             else its own record begins, and it says so; the request is read

Each of the two may die at any moment, and so may the supervisor, which passes messages on: what was not heard of is
sent again. What comes a second time is known by the connection's number, or by more having been sent or received on it.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import NamedTuple

from everserve.ledger.connections import Connection
from everserve.wire.messages import HandedOver

SendOver = Callable[[HandedOver, int], None]  # takes the descriptor

_AGAIN_S, _AT_MOST_S = 0.25, 30.0


def _nowhere(message: HandedOver, fd: int) -> None:
    os.close(fd)
    raise AssertionError("there is no other gateway")


class Departing(NamedTuple):
    """A connection with a request of which nothing is answered."""

    sock: socket.socket
    record: Connection
    to: int  # the gateway that it goes to
    begin: int  # where the request begins ...
    received: int  # ... and how far it has come
    sent: int


class Departures:
    """`own`: the number of this gateway. `close`: a record that is not needed any more."""

    def __init__(self, own: int, close: Callable[[Connection], None]) -> None:
        self.send: SendOver = _nowhere  # set where there are other gateways
        self._own = own
        self._close = close
        self._left: dict[int, Departing] = {}  # by cookie

    def add(self, departing: Departing) -> None:
        cookie = departing.record.cookie
        self._left[cookie] = departing
        self._go_on(cookie, departing, 0.0)

    def arrived(self, cookie: int) -> None:
        """The other gateway has it, or has had it. Or it comes back."""
        departing = self._left.pop(cookie, None)
        if departing is not None:
            self._close(departing.record)  # before its descriptor is another connection's
            departing.sock.close()

    def _go_on(self, cookie: int, departing: Departing, waited_s: float) -> None:
        if self._left.get(cookie) is not departing:
            return
        if waited_s < _AT_MOST_S:
            self._send_once(cookie, departing)
            asyncio.get_running_loop().call_later(_AGAIN_S, self._go_on, cookie, departing, waited_s + _AGAIN_S)
            return
        self.arrived(cookie)  # without a word: the other one may have it, and we may be those who cannot be told

    def _send_once(self, cookie: int, departing: Departing) -> None:
        try:
            fd = os.dup(departing.sock.fileno())
        except OSError:  # too many are open
            return
        _, record, to, begin, received, sent = departing
        data = record.inbox.read(begin, received)
        self.send(HandedOver(gateway=to, by=self._own, cookie=cookie, begin=begin, data=data, sent=sent), fd)
