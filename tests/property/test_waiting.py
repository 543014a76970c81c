"""Sharing places: no request waits while another one has what is too much; weights are kept; no place stays free."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from everserve.gateway.streams.stream import Stream
from everserve.gateway.streams.waiting import WaitingLine
from everserve.plan.fairness import FairQueue, Places
from everserve.tables.requests import Flow, RequestSpec, SamplingParams, as_tokens
from tests.support.examples import examples
from tests.support.fleet_toy import Recorder

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0}
keys = st.sampled_from(list(WEIGHTS))
events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), keys, st.integers(1, 9)),
        st.tuples(st.just("submit"), keys, st.just(1)),
        st.tuples(st.just("submit"), keys, st.integers(1, 3), st.integers(-1, 1)),
        st.tuples(st.just("end"), st.integers(0, 50)),
        st.tuples(st.just("end"), st.integers(0, 50)),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
    ),
    max_size=80,
)


class Batch:
    """So many places, what waits for them, and what was given to whom."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.places = Places()
        self.queue: FairQueue[int] = FairQueue(self.places)
        self.waiting: dict[int, Flow] = {}
        self.running: dict[int, Flow] = {}  # last come last
        self.num_items = self.num_requests = 0
        self.turn: dict[Flow, int] = {}  # when a request came, or was given a place last
        self.going_on: set[int] = set()
        self.num_turns = 0

    def submit(self, key: str, num: int, priority: int = 0) -> None:
        self.num_requests += 1
        flow = Flow(key, self.num_requests, WEIGHTS[key], priority)
        self.end_turn(flow)
        for _ in range(num):
            self.num_items += 1
            self.wait(self.num_items, flow)

    def end_turn(self, flow: Flow) -> None:
        self.num_turns += 1
        self.turn[flow] = self.num_turns

    def wait(self, item: int, flow: Flow, goes_on: bool = False) -> None:
        if flow not in self.waiting.values():
            self.end_turn(flow)
        self.waiting[item] = flow
        self.going_on |= {item} if goes_on else set()
        self.queue.add(item, flow, goes_on)

    def cancel(self, number: int) -> None:
        if self.waiting:
            item = list(self.waiting)[number % len(self.waiting)]
            self.queue.remove(item, self.waiting.pop(item))

    def end(self, number: int) -> None:
        if self.running:
            item = list(self.running)[number % len(self.running)]
            self.leave(item)

    def leave(self, item: int) -> Flow:
        flow = self.running.pop(item)
        self.places.give(flow)
        self.queue.moved(flow)
        return flow

    def fill(self) -> None:
        """All places that are free, and those that are taken back."""
        num_taken_back = 0
        while self.waiting:
            if len(self.running) >= self.num_places:
                if not self.take_back():
                    return
                num_taken_back += 1
                assert num_taken_back <= 2 * self.num_places, "places go back and forth"
            self.serve()

    def serve(self) -> None:
        shares = {flow.key: self.places.share(flow, +1) for flow in self.waiting.values()}
        num_of = {flow: self.places.of_request(flow) for flow in self.waiting.values()}
        going_on = {flow for item, flow in self.waiting.items() if item in self.going_on}
        item = self.queue.pop()
        assert item is not None, "a place is free, and something waits"
        flow = self.waiting.pop(item)
        assert shares[flow.key] == min(shares.values()), "the key with the fewest places for its weight"
        of_key = [other for other in num_of if other.key == flow.key]
        assert flow.priority == min(other.priority for other in of_key), "its requests with the lowest priority"
        others = [other for other in of_key if other.priority == flow.priority]
        assert num_of[flow] == min(num_of[other] for other in others), "its request with the fewest"
        if num_of[flow] == 0:
            without = [(other not in going_on, self.turn[other]) for other in others if num_of[other] == 0]
            assert (flow not in going_on, self.turn[flow]) == min(without), "without any: whose turn is longest ago"
        self.places.take(flow)
        self.queue.moved(flow)
        self.running[item] = flow
        self.end_turn(flow)

    def take_back(self) -> bool:
        for flow, _ in self.queue.newcomers():
            loser = self.places.loser(flow)
            if loser is not None:
                before = self.places.share(loser)
                item = next(item for item in reversed(self.running) if self.running[item] == loser)
                self.leave(item)
                self.wait(item, loser, goes_on=True)
                assert loser.key == flow.key or before > self.places.share(flow, 1)
                is_left_one = self.places.of_request(loser) >= 1 and loser.priority == flow.priority
                assert loser.key != flow.key or is_left_one or loser.priority > flow.priority
                return True
        return False

    def check(self) -> None:
        assert Counter(self.running.values()) == {f: self.places.of_request(f) for f in set(self.running.values())}
        assert not self.waiting or len(self.running) == self.num_places, "a place is free"
        for flow in {flow for flow in self.waiting.values() if not self.places.of_request(flow)}:
            held = {other for other in self.running.values() if other.key == flow.key}
            assert all(other.priority <= flow.priority for other in held), "a higher priority has a place, it none"
            alike = {other for other in held if other.priority == flow.priority}
            assert all(self.places.of_request(other) == 1 for other in alike), "a request of its key has two, it none"
            for other in set(self.running.values()):
                assert other.key == flow.key or self.places.share(other) <= self.places.share(flow, 1)


@examples(60)
@given(events, st.integers(1, 12))
def test_places_are_shared(events: list[tuple], num_places: int) -> None:
    batch = Batch(num_places)
    for kind, *arguments in events:
        getattr(batch, kind)(*arguments)
        batch.fill()
        batch.check()
    while batch.running:
        batch.end(0)
        batch.fill()
        batch.check()
    assert not batch.waiting and batch.queue.pop() is None and not batch.places._of_key


@examples(60)
@given(st.permutations(["a"] * 12 + ["b"] * 12 + ["c"] * 20), st.lists(st.integers(0, 50), max_size=12))
def test_keys_that_always_wait_have_their_parts(order: list[str], ends: list[int]) -> None:
    """To the nearest place, whichever key came first and whatever ends, as soon as each place was given again."""
    batch = Batch(10)
    for key in order:
        batch.submit(key, 1)
    batch.fill()
    for number in ends:
        batch.end(number)
        batch.fill()
        assert (batch.places.of_key("a"), batch.places.of_key("b"), batch.places.of_key("c")) == (2, 2, 6)


@examples(60)
@given(st.dictionaries(keys, st.integers(1, 20)), keys, st.integers(1, 12))
def test_a_part_is_what_sharing_gives(running: dict[str, int], key: str, num_places: int) -> None:
    """A worker that is given a stream because its key has a part there does give it a place: `part` is never more than
    what a batch of these streams, each of its own request, comes to."""
    places, batch = Places(), Batch(num_places)
    for other, num in running.items():
        for i in range(num):
            places.take(Flow(other, i, WEIGHTS[other]))
            batch.submit(other, 1)
    batch.submit(key, 1)
    batch.fill()
    part = places.part(Flow(key, -1, WEIGHTS[key]), num_places)
    assert part <= batch.places.of_key(key)


def make_stream(group: int, index: int, flow: Flow) -> Stream:
    spec = RequestSpec(id=f"{group}-{index}", prompt=as_tokens([1]), params=SamplingParams(max_tokens=1), flow=flow)
    stream = Stream(spec, Recorder())
    stream.group = group
    return stream


@examples(60)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=6), st.integers(1, 30))
def test_siblings_stay_together_where_there_is_room(requests: list[tuple[int, int]], num_free: int) -> None:
    """Of each request so many prompts, each with so many choices."""
    line, groups = WaitingLine(), list[list[Stream]]()
    for number, (num_prompts, n) in enumerate(requests):
        for _ in range(num_prompts):
            flow = Flow("", number)
            groups.append([make_stream(len(groups), i, flow) for i in range(n)])
            for stream in groups[-1]:
                line.add(stream)
    assert line.num_streams_of("") == len(line) == sum(map(len, groups))
    while num_free and len(line):
        is_enough, portion = len(line) <= num_free, line.portion(num_free)
        bound = next(line.turns())[:portion]
        assert not is_enough or bound in groups, "all siblings at once"
        num_free -= len(bound)
        line.bind(bound)
        for stream in bound:
            line.take_place(stream.spec.flow)
    counts = Counter(stream.spec.flow.request for stream in line)
    given = {i: prompts * n - counts[i] for i, (prompts, n) in enumerate(requests)}
    if len(requests) > 1:
        waiting = [num for i, num in given.items() if counts[i]]
        assert not waiting or max(given.values()) <= min(waiting) + 1, "no request has two more than one that waits"
