"""Workers that are slow, at random: who is accused, and where routes lead then."""

import random

from hypothesis import given
from hypothesis import strategies as st

from everserve.control.decide.slowness import Slowness, Standing
from everserve.plan.placement import place_experts
from everserve.plan.routing import make_routes
from everserve.tables.ids import Epoch, Rank
from everserve.tables.work import Work
from tests.support.examples import examples
from tests.support.held_slots import have

NUM_EXPERTS = 12


@examples(15)
@given(
    st.integers(2, 6),
    st.sampled_from([None, 0, 2, 5]),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5)),
)
def test_demoted_workers_are_asked_last_and_nothing_else_changes(num_seats, shadows, away, leaving, demoted):
    ranks = [Rank(rank) for rank in range(num_seats)]
    placement = place_experts(NUM_EXPERTS, (0, 1), ranks, shadows)
    leave = {rank for rank in ranks if rank in leaving - away}
    ready = {rank for rank in ranks if rank not in away | leave}
    held = have(placement)
    routes = make_routes(Epoch(1), placement, held, ready, leave, demoted)
    before = make_routes(Epoch(1), placement, held, ready, leave)
    without = make_routes(Epoch(1), placement, held, ready - demoted, leave)
    for layer in range(2):
        for expert in range(NUM_EXPERTS):
            found = routes.candidates(layer, expert)
            assert set(found) == set(before.candidates(layer, expert)), "every place is still one"
            fast = tuple(place for place in found if place[0] not in demoted)
            assert found[: len(fast)] == fast, "also where only leaving workers serve"
            if fast and fast[0][0] in ready:
                assert found[: len(fast)] == fast == without.candidates(layer, expert), "as if they were not there"
            num_active = int(routes.num_active()[layer, expert]) if routes.active else 1
            kinds = {rank in demoted for rank, _ in found[:num_active]}
            assert len(kinds) <= 1, "rows are not dealt to slow workers beside others"


class _Fleet:
    """Attention workers report at intervals of their own. All of them slow down and recover with the host; on top of
    that each worker has some noise, and work of its own."""

    def __init__(self, chance: random.Random, num_attention: int, num_expert: int, rows: list[int]) -> None:
        self.slowness = Slowness()
        self.chance, self.rows = chance, rows
        self.attention = range(num_attention)
        self.experts = range(num_attention, num_attention + num_expert)
        self.due = {rank: chance.uniform(0, 0.5) for rank in self.attention}
        self.demoted: list[tuple[float, int]] = []
        self.now = 0.0

    def run(self, until_s: float, slow: int | None = None, times: float = 1.0) -> None:
        chance = self.chance
        while self.now < until_s:
            rank = min(self.due, key=lambda rank: self.due[rank])
            self.now, interval = self.due[rank], chance.uniform(0.4, 1.2)
            self.due[rank] = self.now + interval
            host = 1.0 + 5.0 * (self.now % 20 > 10)  # a busy host, half of the time
            own = self._work(80, rank, host, slow, times)
            peers = [(expert, self._work(300, expert, host, slow, times)) for expert in self.experts]
            self.slowness.report(Rank(rank), own, [(Rank(expert), work) for expert, work in peers], self.now)
            for verdict in self.slowness.decide(self.now, (*self.attention, *self.experts), ()):
                if verdict.level is Standing.DEMOTED:
                    self.demoted.append((self.now, verdict.rank))

    def _work(self, num: int, rank: int, host: float, slow: int | None, times: float) -> Work:
        chance = self.chance
        rows = chance.choice(self.rows)
        took_s = num * (0.001 + 0.0001 * rows) * host * chance.uniform(0.7, 1.4)
        return Work(took_s * (times if rank == slow else 1.0), (num, num * rows))


shapes = st.sampled_from([(2, 0), (2, 2), (2, 3), (3, 4)])


@examples(5)
@given(st.integers(0, 1 << 30), shapes)
def test_no_healthy_worker_is_accused(seed, shape):
    fleet = _Fleet(random.Random(seed), *shape, rows=[1, 8, 64, 1000])
    fleet.run(80.0)
    assert fleet.demoted == []


@examples(5)
@given(st.integers(0, 1 << 30), shapes, st.integers(0, 100), st.floats(8, 40))
def test_the_slow_one_is_found_and_no_other(seed, shape, victim, times):
    """A busy host hides no slow worker. Different work may hide some of it: here it differs threefold."""
    fleet = _Fleet(random.Random(seed), *shape, rows=[20, 40, 60])
    slow = victim % sum(shape)
    fleet.run(25.0)
    fleet.run(45.0, slow, times)
    assert {rank for _, rank in fleet.demoted} == {slow}
