"""Clients that do not read what they asked for.

    unsent bytes --some leave within UNREAD_S--> watched for another UNREAD_S
        |  '--all leave--> nothing to watch
        '--none leaves--> the connection is aborted

Before that, such a client costs little: its task waits until all that it has written has left for the kernel, events
that wait for that task are bounded (outbox.py), and an answer that is not read yet holds a place (Gateway.check_room).
"""

import asyncio

UNREAD_S = 30.0


class UnreadWatch:
    """One connection's unsent bytes. The transport must call `begin` when there are any, and `end` when there are none:
    its upper limit of buffered bytes is 0."""

    def __init__(self, transport: asyncio.Transport) -> None:
        transport.set_write_buffer_limits(high=0)
        self._transport = transport
        self._num_unsent = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._num_unsent = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(UNREAD_S, self.look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Time is up. Nothing is added while bytes are unsent, so fewer of them means that the client reads."""
        self.end()
        if self._transport.get_write_buffer_size() < self._num_unsent:
            self.begin()
        else:
            self._transport.abort()
