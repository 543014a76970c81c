"""The gateway's own queue: streams without a worker.

Requests take turns, whatever number of choices they have (plan/fairness.py). Of a request those streams come first that
go on: its client is in the middle of an answer. Siblings (the choices of one prompt) stand together, because on one
worker they compute their prompt once; while others wait for the same places, they are bound one at a time.
"""

import zlib
from collections import Counter
from collections.abc import Iterator

from everserve.gateway.streams.others import Others, SharedPlaces
from everserve.gateway.streams.stream import Stream
from everserve.ledger.shared import Turn
from everserve.plan.fairness import FairQueue
from everserve.tables.requests import Flow


class _Siblings:
    """Those that wait in one line: all go on, or all are new."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []


class WaitingLine:
    """Groups of siblings, in turn. A stream does not become first, or new, while it waits."""

    def __init__(self, others: Others | None = None) -> None:
        self._others = others or Others()
        self._places = SharedPlaces(self._others)  # at all workers
        self._queue: FairQueue[_Siblings] = FairQueue(self._places)
        self._groups: dict[tuple[int, bool], _Siblings] = {}
        self._num_of_key: Counter[str] = Counter()
        self._num_streams = 0

    def __len__(self) -> int:
        return self._num_streams

    def __iter__(self) -> Iterator[Stream]:
        for siblings in self.turns():
            yield from siblings

    @property
    def num_keys(self) -> int:
        """The number of keys of the streams that wait."""
        return self._queue.num_keys

    def take_place(self, flow: Flow) -> None:
        """A stream of this request has a worker."""
        self._places.take(flow)
        self._queue.moved(flow)
        self._note(flow.key)

    def give_place(self, flow: Flow) -> None:
        """It has it no more."""
        self._places.give(flow)
        self._queue.moved(flow)
        self._note(flow.key)

    def num_streams_of(self, key: str) -> int:
        """Running and waiting, at all gateways."""
        return self._places.of_key(key) + self._num_of_key[key] + self._others.streams_of(key)

    def turn_of(self, stream: Stream) -> Turn:
        """Its place in the order of all gateways."""
        flow = stream.spec.flow
        share, num_places = self._places.share(flow, +1), self._places.of_request(flow)
        return Turn(share, zlib.crc32(flow.key.encode()), flow.priority, num_places, int(stream.submitted_s * 1e9))

    def _note(self, key: str) -> None:
        num_places = self._places.of_key(key)
        self._others.note_key(key, num_places + self._num_of_key[key], num_places)

    def add(self, stream: Stream) -> None:
        """Put a stream into the line, behind its siblings if they wait."""
        name = stream.group, stream.is_first
        siblings = self._groups.get(name)
        if siblings is None:
            siblings = self._groups[name] = _Siblings()
            self._queue.add(siblings, stream.spec.flow, goes_on=stream.is_first)
        siblings.streams.append(stream)
        self._num_streams += 1
        self._num_of_key[stream.spec.flow.key] += 1
        self._note(stream.spec.flow.key)

    def remove(self, stream: Stream) -> bool:
        """Bound, cancelled or suspended. False if it does not wait."""
        name = stream.group, stream.is_first
        siblings = self._groups.get(name)
        if siblings is None or stream not in siblings.streams:
            return False
        siblings.streams.remove(stream)
        if not siblings.streams:
            del self._groups[name]
            self._queue.remove(siblings, stream.spec.flow)
        self._num_streams -= 1
        self._num_of_key[stream.spec.flow.key] -= 1
        self._note(stream.spec.flow.key)
        return True

    def turns(self) -> Iterator[list[Stream]]:
        """Siblings in the order in which they get places. The line must not change meanwhile."""
        for _, siblings in self._queue:
            yield siblings.streams

    def newcomers(self) -> Iterator[list[Stream]]:
        """The same of requests that have no place."""
        for _, siblings in self._queue.newcomers():
            yield siblings.streams

    def portion(self, num_free: int) -> int:
        """How many siblings may be bound in a turn, if there are so many places: one, while others wait for them."""
        return num_free if self._queue.num_requests == 1 or self._num_streams <= num_free else 1

    def bind(self, streams: list[Stream]) -> None:
        """These siblings, which were next, have a worker. The rest of their request waits for its next turn."""
        for stream in streams:
            self.remove(stream)
        self._queue.end_turn(streams[0].spec.flow)

    def remove_all(self) -> list[Stream]:
        """All streams, in order."""
        streams = list(self)
        for stream in streams:
            self.remove(stream)
        return streams
