"""Answers that many may ask for at once: written once for all of them, in slices, and not all the time.

    the first asks ---> rest ---> is written, slice by slice ---> all that had asked before get the same bytes
                          ^--- others have asked meanwhile ---------------'

An answer is never older than its question. What makes one ask cheap is that the second of two that ask one after the
other may have to wait: writing takes a tenth of the time at most, or, if it takes long, happens four times a second.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from everserve.gateway.http.slices import Slices
from everserve.gateway.http.turns import Turns

_MAX_REST_S = 0.25
_REST = 9  # times as long as the writing took


class Shared:
    """One such answer. `write` yields its bytes, about a millisecond of work at a time."""

    def __init__(
        self,
        write: Callable[[], Iterable[bytes]],
        slices: Slices,
        turns: Turns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_written = 0
        self._write = write
        self._slices = slices
        self._turns = turns
        self._clock = clock
        self._spent_s = 0.0  # on the latest one
        self._rested_s = 0.0  # when the next one may begin
        self._waiters: list[asyncio.Future[bytes]] = []
        self._writing: asyncio.Task[None] | None = None

    async def get(self) -> bytes:
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._run())
        return await waiter

    async def _run(self) -> None:
        """Write answers as long as requests wait for one."""
        try:
            while self._waiters:
                if (rest_s := self._rested_s - self._clock()) > 0:
                    await asyncio.sleep(rest_s)
                waiters, self._waiters = self._waiters, []
                try:
                    give = partial(_give, b"".join(await self._slices.run(self._timed())))
                except Exception as error:  # our own bug: each of them gets a 500
                    give = partial(_fail, error)
                self.num_written += 1
                self._rested_s = self._clock() + min(_REST * self._spent_s, _MAX_REST_S)
                for waiter in waiters:
                    self._turns.call(partial(give, waiter))
        finally:
            self._writing = None

    def _timed(self) -> Iterator[bytes]:
        """The same pieces. What else the loop does between two of them does not count."""
        self._spent_s, began_s = 0.0, self._clock()
        for piece in self._write():
            self._spent_s += self._clock() - began_s
            yield piece
            began_s = self._clock()


def _give(data: bytes, waiter: "asyncio.Future[bytes]") -> None:
    if not waiter.done():
        waiter.set_result(data)


def _fail(error: Exception, waiter: "asyncio.Future[bytes]") -> None:
    if not waiter.done():
        waiter.set_exception(error)
