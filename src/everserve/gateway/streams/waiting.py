"""The gateway's own queue: streams without a worker.

First come, first served; but streams that go on stand before new ones: their clients are in the middle of an answer.
Siblings (the choices of one prompt) stand together, because on one worker they compute their prompt once.

    first     streams that go on
    new       groups of siblings of which none has a worker yet
    parted    groups of which some have: there was not room for all of them

The lines `new` and `parted` take turns. A turn of `new` is its first group, as many streams of it as there is room for;
a turn of `parted` is one stream, while others wait. So a request with many choices delays those behind it by its first
part at most, however many of its kind there are; and it goes on itself, because every other turn is `parted`'s.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator

from everserve.gateway.streams.stream import Stream


class WaitingLine:
    """Groups of siblings, in order. A stream does not become first, or new, while it waits."""

    def __init__(self) -> None:
        self._first: OrderedDict[int, list[Stream]] = OrderedDict()
        self._new: OrderedDict[int, list[Stream]] = OrderedDict()
        self._parted: OrderedDict[int, list[Stream]] = OrderedDict()
        self._is_turn_of_parted = False
        self._num_streams = 0

    def __len__(self) -> int:
        return self._num_streams

    def __iter__(self) -> Iterator[Stream]:
        for line in (self._first, self._new, self._parted):
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
        """The siblings that are next, after skipping so many groups; empty if there are none."""
        parted = (siblings[:1] if self._new else siblings for siblings in self._parted.values())
        lines = (parted, self._new.values()) if self._is_turn_of_parted else (self._new.values(), parted)
        groups = itertools.chain(self._first.values(), *lines)
        return list(next(itertools.islice(groups, index, None), []))

    def bind(self, streams: list[Stream]) -> None:
        """These siblings, which were next, have a worker. The rest of their group waits for its next turn."""
        line, group = self._line_of(streams[0]), streams[0].group
        for stream in streams:
            self.remove(stream)
        if line is not self._first:
            self._is_turn_of_parted = line is self._new
            if group in line:
                self._parted[group] = line.pop(group)

    def remove_all(self) -> list[Stream]:
        """All streams, in order."""
        streams = list(self)
        for stream in streams:
            self.remove(stream)
        return streams

    def _line_of(self, stream: Stream) -> OrderedDict[int, list[Stream]]:
        if stream.is_first:
            return self._first
        return self._parted if stream.group in self._parted else self._new
