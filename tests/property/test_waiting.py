"""The gateway's queue: no request waits for ever, and none is held up by how many choices another one has."""

from hypothesis import given
from hypothesis import strategies as st

from everserve.gateway.streams.stream import Stream
from everserve.gateway.streams.waiting import WaitingLine
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens
from tests.unit.fleet_toy import Recorder

events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 9)),
        st.tuples(st.just("submit"), st.just(1)),
        st.tuples(st.just("places"), st.integers(1, 3)),
        st.tuples(st.just("places"), st.just(1)),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
    ),
    max_size=60,
)


def make_stream(group: int, index: int) -> Stream:
    spec = RequestSpec(id=f"{group}-{index}", prompt=as_tokens([1]), params=SamplingParams(max_tokens=1))
    stream = Stream(spec, Recorder())
    stream.group = group
    return stream


class Life:
    """A queue, and who was served when."""

    def __init__(self) -> None:
        self.line = WaitingLine()
        self.waiting: dict[int, list[Stream]] = {}  # by group
        self.parted: set[int] = set()  # groups that have been served, and wait for more
        self.order: list[int] = []  # of these, longest since they were served first
        self.num_groups = 0
        self.turns: list[str] = []  # "new" or "parted", while both waited

    def submit(self, num: int) -> None:
        self.num_groups += 1
        self.waiting[self.num_groups] = [make_stream(self.num_groups, i) for i in range(num)]
        for stream in self.waiting[self.num_groups]:
            self.line.add(stream)

    def give_places(self, num_free: int) -> None:
        while num_free and (siblings := self.line.group()):
            bound = siblings[:num_free]
            num_free -= len(bound)
            self.note_turn(bound)
            self.line.bind(bound)
            self.drop(bound)

    def note_turn(self, bound: list[Stream]) -> None:
        group = bound[0].group
        new = [other for other in self.waiting if other not in self.parted]
        if group in self.parted:
            assert group == self.oldest_turn(), "those that were served in part take turns"
            assert len(bound) == 1 or not new
        else:
            assert group == min(new), "first come, first served"
        if new and self.parted:
            self.turns.append("parted" if group in self.parted else "new")
            assert self.turns[-2:] != [self.turns[-1]] * 2, "neither line is served twice while the other waits"
        else:
            self.turns.clear()
        self.parted.discard(group)
        self.order = [other for other in self.order if other != group]
        if len(bound) < len(self.waiting[group]):
            self.parted.add(group)
            self.order.append(group)

    def oldest_turn(self) -> int:
        return next(group for group in self.order if group in self.parted)

    def cancel(self, number: int) -> None:
        streams = [stream for siblings in self.waiting.values() for stream in siblings]
        if streams:
            stream = streams[number % len(streams)]
            assert self.line.remove(stream)
            self.drop([stream])
            self.turns.clear()

    def drop(self, streams: list[Stream]) -> None:
        for stream in streams:
            self.waiting[stream.group].remove(stream)
            if not self.waiting[stream.group]:
                del self.waiting[stream.group]
                self.parted.discard(stream.group)


@given(events)
def test_turns(events: list[tuple[str, int]]) -> None:
    life = Life()
    for kind, number in events:
        {"submit": life.submit, "places": life.give_places, "cancel": life.cancel}[kind](number)
        assert len(life.line) == sum(map(len, life.waiting.values()))
    while life.waiting:
        life.give_places(1)
    assert not life.line and life.line.group() == []
