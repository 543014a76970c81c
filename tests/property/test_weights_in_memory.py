"""Workers that copy experts out of each other's memory, and end, or lose their source, in the middle of a copy: no slot
that is served, and no slot that a table promises, ever has a wrong bit; and every slot can be filled in the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
from hypothesis import given

from everserve.memory.weights import copying
from everserve.memory.weights.backup_filling import BackupFilling
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.tables.slots import Fill, Filled, Place
from tests.support.examples import examples
from tests.support.experts import NUM_EXPERTS
from tests.support.seats import EXPERT_BYTES, IDENTITY, NUM_LAYERS, SeatInMemory, SharedWeights

NUM_SLOTS = 3
PLANNED = ((0, 1), (2, 3), (4, 5))

seats = st.integers(0, len(PLANNED) - 1)
layers = st.integers(0, NUM_LAYERS - 1)
slots = st.integers(0, NUM_SLOTS - 1)
experts = st.integers(0, NUM_EXPERTS - 1)
moments = st.integers(0, EXPERT_BYTES // 8).map(lambda word: 8 * word)
fills = st.tuples(seats, layers, slots, experts)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("fill"), fills),
        st.tuples(st.just("die"), fills, moments),
        st.tuples(st.just("meanwhile"), fills, moments, fills),
        st.tuples(st.just("clear"), st.tuples(seats, layers, slots)),
        st.tuples(st.just("restart"), st.tuples(seats)),
        st.tuples(st.just("damage"), st.tuples(layers, experts)),
    ),
    max_size=25,
)


class Died(BaseException):
    """The end of a process."""


@contextmanager
def at_moment(moment: int, act: Callable[[], None]) -> Iterator[None]:
    """Called once, when so many bytes of the next expert are copied."""
    copy = copying.copy

    def interrupted(to: int, source: int, num_bytes: int, *, first_word: int = 0, rest_percent: int = 0) -> int:
        at = moment - 8 * first_word
        if copying.copy is not interrupted or not 0 <= at <= num_bytes:
            return copy(to, source, num_bytes, first_word=first_word, rest_percent=rest_percent)
        first = copy(to, source, at, first_word=first_word)
        copying.copy = copy
        act()
        return (first + copy(to + at, source + at, num_bytes - at, first_word=first_word + at // 8)) % (1 << 64)

    copying.copy = interrupted
    try:
        yield
    finally:
        copying.copy = copy


class World:
    def __init__(self) -> None:
        self.seats = [SeatInMemory(rank, planned, NUM_SLOTS) for rank, planned in enumerate(PLANNED)]
        self.backup = SharedWeights(NUM_EXPERTS)
        for seat in self.seats:
            seat.backup = self.backup
            self.introduce(seat)
        memory = ExpertMemory(self.backup.plan, self.backup.descriptors())
        memory.table.claim(IDENTITY, owner=None)
        BackupFilling(memory, self.seats[0].memory.copy_out, first_layer=0)._pass(is_held=False)
        memory.close()

    def introduce(self, seat: SeatInMemory) -> None:
        for other in self.seats:
            if other is not seat:
                other.offer_to(seat)
                seat.offer_to(other)

    def do(self, action: str, what: tuple[int, ...], moment: int = 0, then: tuple[int, ...] = ()) -> None:
        if action == "damage":
            memory = ExpertMemory(self.backup.plan, self.backup.descriptors())
            memory.data[self.backup.plan.offset(Place(*what)) + 50] ^= 1
            memory.close()
            return
        seat = self.seats[what[0]]
        if action == "fill":
            self.fill(seat, Fill(*what[1:]))
        elif action == "clear":
            seat.slots.clear(Place(*what[1:]))
        elif action == "restart":
            self.restart(seat)
        elif action == "meanwhile":
            with at_moment(moment, lambda: self.fill(self.seats[then[0]], Fill(*then[1:]))):
                self.fill(seat, Fill(*what[1:]))
        else:
            self.end(seat, Fill(*what[1:]), moment)

    def fill(self, seat: SeatInMemory, fill: Fill) -> None:
        if not seat.is_filling and fill.expert not in seat.slots.held.experts[fill.call_index]:
            assert isinstance(seat.fill_in_this_thread(fill), Filled)

    def end(self, seat: SeatInMemory, fill: Fill, moment: int) -> None:
        """The process ends in the middle of a fill."""

        def die() -> None:
            raise Died

        if fill.expert in seat.slots.held.experts[fill.call_index]:
            return
        try:
            with at_moment(moment, die):
                self.fill(seat, fill)
        except Died:
            self.restart(seat)

    def restart(self, seat: SeatInMemory) -> None:
        seat.die()
        seat.start()
        self.introduce(seat)

    def check(self) -> None:
        for seat in self.seats:
            seat.check()

    def come_to_rest(self) -> None:
        for seat in self.seats:
            for index in range(NUM_LAYERS):
                for slot in range(NUM_SLOTS):
                    expert = (seat.rank + slot) % NUM_EXPERTS
                    if seat.slots.held.experts[index][slot] != expert:
                        seat.slots.clear(Place(index, slot))
                for slot in range(NUM_SLOTS):
                    self.fill(seat, Fill(index, slot, (seat.rank + slot) % NUM_EXPERTS))
            wanted = tuple((seat.rank + slot) % NUM_EXPERTS for slot in range(NUM_SLOTS))
            assert seat.slots.held.experts == (wanted,) * NUM_LAYERS
        self.check()

    def close(self) -> None:
        for seat in self.seats:
            seat.close()
        self.backup.close()


@examples(10)
@given(actions)
def test_never_a_wrong_bit(actions):
    world = World()
    try:
        for action in actions:
            world.do(*action)
            world.check()
        world.come_to_rest()
    finally:
        world.close()


def test_the_moment_is_in_the_middle_of_a_copy():
    """The schedule that leaves half an expert."""
    world = World()
    try:
        seat = world.seats[0]
        world.do("die", (0, 1, 2, 5), EXPERT_BYTES // 2)
        assert seat.incarnation == 2 and seat.slots.held.experts[1][:2] == (0, 1)
        world.check()
        look, place = seat.weights.look(), Place(1, 2)
        start = look.plan.offset(place)
        assert look.table.read(place) is None and look.data[start : start + EXPERT_BYTES].any(), "half of it is there"
        world.come_to_rest()
    finally:
        world.close()
