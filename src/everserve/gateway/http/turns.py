"""A few things in each turn of the event loop, however many are due at once.

A turn of the loop runs everything that is ready, and only then are the workers' tokens read. So what hundreds of
clients can make ready in the same moment (requests that have arrived, answers that many wait for) goes through here,
first come, first served, and between two turns every stream goes on.
"""

import asyncio
from collections import deque
from collections.abc import Callable

_NUM_PER_TURN = 4  # a plain request takes a fifth of a millisecond


class Turns:
    """One queue. What is called here returns soon."""

    def __init__(self, num_per_turn: int = _NUM_PER_TURN) -> None:
        self._num_per_turn = self._num_left = num_per_turn  # in this turn
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_counting = False  # the next turn is announced

    def call(self, what: Callable[[], object]) -> None:
        """Now, if this turn has had few; otherwise in the next turn that has room."""
        if self._num_left and not self._waiting:
            self._num_left -= 1
            what()
        else:
            self._waiting.append(what)
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    async def wait(self) -> None:
        """For a task: until it is its turn."""
        is_due = asyncio.Event()
        self.call(is_due.set)
        await is_due.wait()

    def _begin_turn(self) -> None:
        self._num_left, waiting = self._num_per_turn, self._waiting
        while waiting and self._num_left:
            self._num_left -= 1
            waiting.popleft()()
        self._is_counting = self._num_left < self._num_per_turn
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin_turn)
