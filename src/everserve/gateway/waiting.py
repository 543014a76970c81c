"""The gateway's own queue: streams without a worker.

First come, first served; but streams that go on stand before new ones: their clients are in the middle of an answer.
Siblings (the choices of one prompt) stand together, because on one worker they compute their prompt once.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator

from everserve.gateway.streams import Stream


class WaitingLine:
    """Groups of siblings, in order. A stream does not become first, or new, while it waits."""

    def __init__(self) -> None:
        self._first: OrderedDict[int, list[Stream]] = OrderedDict()
        self._new: OrderedDict[int, list[Stream]] = OrderedDict()
        self._num_streams = 0

    def __len__(self) -> int:
        return self._num_streams

    def __iter__(self) -> Iterator[Stream]:
        for line in (self._first, self._new):
            for siblings in line.values():
                yield from siblings

    def add(self, stream: Stream) -> None:
        """At the end of its line, or beside its siblings if they wait there."""
        self._line_of(stream).setdefault(stream.group, []).append(stream)
        self._num_streams += 1

    def remove(self, stream: Stream) -> bool:
        """Bound, cancelled or suspended. False if it does not wait."""
        line = self._line_of(stream)
        siblings = line.get(stream.group, [])
        if stream not in siblings:
            return False
        siblings.remove(stream)
        if not siblings:
            del line[stream.group]
        self._num_streams -= 1
        return True

    def group(self, index: int = 0) -> list[Stream]:
        """The siblings whose turn it is, after so many groups that are passed over; empty if there are none."""
        groups = itertools.chain(self._first.values(), self._new.values())
        return list(next(itertools.islice(groups, index, None), []))

    def remove_all(self) -> list[Stream]:
        """Everybody, in order."""
        streams = list(self)
        for stream in streams:
            self.remove(stream)
        return streams

    def _line_of(self, stream: Stream) -> OrderedDict[int, list[Stream]]:
        return self._first if stream.is_first else self._new
