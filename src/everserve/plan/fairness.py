"""How streams share places: in the gateway, which request gets the next one; in a worker, which gives one back.

A *place* is what a stream needs to run: at a worker, and there in its batch. Places are shared by API key first, in
proportion to the keys' weights, and within a key by request, however many choices a request has. There is no clock and
no history in it, only how many places each has now:

    next        the key that will have the fewest places for its weight with one more; of its requests with the lowest
                priority the one with the fewest; among equals the one whose last turn is longest ago
    gives back  the key with the most places for its weight; of its requests with the highest priority the one with
                the most

No place stays free while something waits. A place is taken back for one purpose: a request without any place gets its
first one. It is taken only from a key that has more for its weight than the other key will have then, or within a key
from a request that has several or a higher priority, and never from one with a lower priority; so no place goes back
and forth. It follows that a request waits for its first place only while each request of its key has a lower priority,
or the same and one place at most, and no other key has more than its part. What priorities a key gives its requests
means nothing to other keys.
"""

import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from everserve.tables.requests import Flow

T = TypeVar("T")
_ROUNDING = 1e-9  # of sums of weights


class Places:
    """How many places each key and each request has."""

    def __init__(self) -> None:
        self._of_request: dict[Flow, int] = {}
        self._of_key: dict[str, int] = {}
        self._num_requests: dict[str, Counter[int]] = {}  # of each key, with a place, by priority
        self._weights: dict[str, float] = {}  # of keys that have places

    @classmethod
    def of(cls, nums: Mapping[Flow, int]) -> "Places":
        """Each request has so many."""
        places = cls()
        for flow, num in nums.items():
            for _ in range(num):
                places.take(flow)
        return places

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Places) and self._of_request == other._of_request and self._of_key == other._of_key

    __hash__ = None  # type: ignore[assignment]

    def take(self, flow: Flow) -> None:
        """One more."""
        num = self._of_request.get(flow, 0)
        self._of_request[flow] = num + 1
        self._of_key[flow.key] = self._of_key.get(flow.key, 0) + 1
        if not num:
            self._num_requests.setdefault(flow.key, Counter())[flow.priority] += 1
            self._weights[flow.key] = flow.weight

    def give(self, flow: Flow) -> None:
        """One less."""
        num = self._of_request[flow] - 1
        self._of_key[flow.key] -= 1
        if num:
            self._of_request[flow] = num
            return
        del self._of_request[flow]
        nums = self._num_requests[flow.key]
        nums[flow.priority] -= 1
        if not nums[flow.priority]:
            del nums[flow.priority]
        if not nums:
            del self._num_requests[flow.key], self._of_key[flow.key], self._weights[flow.key]

    def copy(self) -> "Places":
        """A copy, to try what would be."""
        other = Places()
        other._of_request, other._of_key = dict(self._of_request), dict(self._of_key)
        other._num_requests = {key: Counter(nums) for key, nums in self._num_requests.items()}
        other._weights = dict(self._weights)
        return other

    def of_request(self, flow: Flow) -> int:
        return self._of_request.get(flow, 0)

    def of_key(self, key: str) -> int:
        return self._of_key.get(key, 0)

    def num_requests(self, flow: Flow) -> int:
        """The number of requests of its key that have a place and no higher priority."""
        nums = self._num_requests.get(flow.key, Counter[int]())
        return sum(num for priority, num in nums.items() if priority <= flow.priority)

    @property
    def num_of_all(self) -> int:
        """The number of requests that have a place."""
        return len(self._of_request)

    def share(self, flow: Flow, more: int = 0) -> float:
        """What its key has for its weight, and with so many more."""
        return (self._of_key.get(flow.key, 0) + more) / flow.weight

    def loser(self, winner: Flow) -> Flow | None:
        """The request that gives a place to this one, which has none; None: it has to wait."""
        if self.of_request(winner):
            return None
        losers = [flow for flow in self._of_request if self._may_lose(flow, winner)]
        if not losers:
            return None
        key = max(losers, key=lambda flow: (self.share(flow), self._of_request[flow])).key
        of_key = (flow for flow in losers if flow.key == key)
        return max(of_key, key=lambda flow: (flow.priority, self._of_request[flow]))

    def _may_lose(self, flow: Flow, winner: Flow) -> bool:
        if flow.key == winner.key:
            is_equal = flow.priority == winner.priority
            return self._of_request[flow] > 1 if is_equal else flow.priority > winner.priority
        return self.share(flow) > self.share(winner, +1)

    def part(self, flow: Flow, num_places: int) -> int:
        """How many of so many places are this key's: those that this key would have if it wanted one more than it has,
        and all other keys what they have: the fewest that any key wants are granted first.
        """
        wanted = self._of_key | {flow.key: self.of_key(flow.key) + 1}
        weights = self._weights | {flow.key: flow.weight}
        left, sum_of_weights = float(num_places), sum(weights.values())
        for key in sorted(wanted, key=lambda key: wanted[key] / weights[key]):
            most = left * weights[key] / sum_of_weights
            if key == flow.key:
                return min(wanted[key], int(most + _ROUNDING))
            left -= min(wanted[key], most)
            sum_of_weights -= weights[key]
        raise AssertionError("the key is one of them")


class _Request(Generic[T]):
    """What of one request waits: what goes on first, then what is new, each in its order."""

    __slots__ = ("entry", "flow", "going_on", "new", "turn")

    def __init__(self, flow: Flow, turn: int) -> None:
        self.flow = flow
        self.turn = turn
        self.going_on: dict[T, None] = {}
        self.new: dict[T, None] = {}
        self.entry: _Entry | None = None


# Priority, places, whether nothing of it goes on, its last turn; by these they are ordered.
_Entry = tuple[int, int, bool, int, Flow]


class FairQueue(Generic[T]):
    """What waits for places. The places are counted by the caller, who says `moved` when a count has changed."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._requests: dict[Flow, _Request[T]] = {}
        self._orders: dict[str, list[_Entry]] = {}  # of each key's requests, next first
        self._turns = itertools.count()

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_keys(self) -> int:
        return len(self._orders)

    def add(self, item: T, flow: Flow, goes_on: bool = False) -> None:
        """Adds an item at the end of its request, or of what goes on of it."""
        request = self._requests.get(flow)
        if request is None:
            request = self._requests[flow] = _Request(flow, next(self._turns))
        (request.going_on if goes_on else request.new)[item] = None
        self._arrange(request)

    def remove(self, item: T, flow: Flow) -> None:
        """It waits no more."""
        request = self._requests[flow]
        del (request.going_on if item in request.going_on else request.new)[item]
        self._arrange(request)

    def end_turn(self, flow: Flow) -> None:
        """This request has been given a place: those that have as many come before it now."""
        request = self._requests.get(flow)
        if request is not None:
            request.turn = next(self._turns)
            self._arrange(request)

    def moved(self, flow: Flow) -> None:
        """It has another number of places."""
        request = self._requests.get(flow)
        if request is not None:
            self._arrange(request)

    def __iter__(self) -> Iterator[tuple[Flow, T]]:
        """The items in turn, by the places that there are now. It must not change meanwhile."""
        for key in self._keys():
            for *_, flow in self._orders[key]:
                yield from self._items(flow)

    def newcomers(self) -> Iterator[tuple[Flow, T]]:
        """The same of requests that have no place."""
        for key in self._keys():
            for _, num_places, *_, flow in self._orders[key]:
                if not num_places:
                    yield from self._items(flow)

    def pop(self) -> T | None:
        """The next, which waits no more. None: nothing does."""
        for flow, item in self:
            self.remove(item, flow)
            self.end_turn(flow)
            return item
        return None

    def _keys(self) -> Iterable[str]:
        if len(self._orders) <= 1:
            return list(self._orders)
        return sorted(
            self._orders, key=lambda key: (self.places.share(self._orders[key][0][-1], +1), self._orders[key][0][1:])
        )

    def _items(self, flow: Flow) -> Iterator[tuple[Flow, T]]:
        request = self._requests[flow]
        for item in itertools.chain(request.going_on, request.new):
            yield flow, item

    def _arrange(self, request: _Request[T]) -> None:
        """Where it belongs among the requests of its key."""
        flow, before = request.flow, request.entry
        is_there = bool(request.going_on or request.new)
        num_places = self.places.of_request(flow)
        entry = (flow.priority, num_places, not request.going_on, request.turn, flow) if is_there else None
        if entry == before:
            return
        order = self._orders.setdefault(flow.key, [])
        if before is not None:
            del order[bisect_left(order, before)]
        if entry is not None:
            insort(order, entry)
        else:
            del self._requests[flow]
        if not order:
            del self._orders[flow.key]
        request.entry = entry
