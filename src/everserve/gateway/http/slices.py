"""Large work for one request, done in slices, so that it does not hold up the streams of all other clients.

    a long text to tokenize, a long chat to render   in the tokenizer's threads (tokenizer.py)
    a large body to decode, a large answer to write  here: one slice in each turn of the event loop
    everything else                                  at once: it is bounded by the limits of requests.py

A thread would not help where Python's own lock is held all along, as it is while JSON is decoded or encoded.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

_T = TypeVar("_T")


class Slices:
    """The queue of all large work: however many requests have some to do, one slice of one of them is done per turn."""

    def __init__(self) -> None:
        self.num_done = 0
        self._turn = asyncio.Lock()  # first come, first served

    async def run(self, work: Iterable[_T]) -> list[_T]:
        """All that this iterator yields. Each step of it is one slice: about a millisecond of work."""
        steps = iter(work)
        results: list[_T] = []
        while True:
            async with self._turn:
                step = list(islice(steps, 1))
                self.num_done += 1
                await asyncio.sleep(0)
            if not step:
                return results
            results += step

    async def call(self, work: Callable[[], _T]) -> _T:
        """One slice: for what cannot be divided, such as decoding a body. The result does not wait for other slices."""
        async with self._turn:
            result = work()
            self.num_done += 1
            await asyncio.sleep(0)
        return result


def batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """The items, at most so many at a time."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
