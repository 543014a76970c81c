"""Which workers are slow: reports in, levels out."""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest

from everserve.control.decide.slowness import Slowness, SlowPolicy, Standing
from everserve.tables.work import Work, slowdown, slowdown_at_most

POLICY = SlowPolicy()
ATTENTION, EXPERTS = (0, 1), (2, 3, 4)


class World:
    """Attention workers report twice a second. `speed` says how many times as long as usual a worker takes."""

    def __init__(self, policy: SlowPolicy = POLICY, attention: Iterable[int] = ATTENTION, experts=EXPERTS) -> None:
        self.slowness = Slowness(policy)
        self.attention, self.experts = tuple(attention), tuple(experts)
        self.now = 1000.0
        self.num_rows = dict.fromkeys(range(10), 30.0)
        self.may_leave: set[int] = set()
        self.levels: list[tuple[float, int, Standing]] = []
        self.reasons: list[str] = []
        self.num_steps = 40

    def run(self, seconds: float, speed: Callable[[int], float] = lambda rank: 1.0) -> list[tuple[int, Standing]]:
        """The new levels."""
        before = len(self.levels)
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for rank in self.attention:
                asked = [expert for expert in self.experts if expert not in self.slowness.demoted]
                self.slowness.report(rank, self.steps(rank, speed), self.answers(asked, speed), self.now)
                self._decide()
        return [(rank, level) for _, rank, level in self.levels[before:]]

    def _decide(self) -> None:
        for verdict in self.slowness.decide(self.now, (*self.attention, *self.experts), self.may_leave):
            self.levels.append((self.now, verdict.rank, verdict.level))
            self.reasons.append(verdict.reason)

    def steps(self, rank: int, speed: Callable[[int], float]) -> Work:
        num, rows = self.num_steps, self.num_rows[rank]
        took_s = num * (0.002 + 0.0001 * rows + 0.000001 * 100 * rows)
        return Work(took_s * speed(rank), (num, num * rows, num * 100 * rows))

    def answers(self, asked: Iterable[int], speed: Callable[[int], float]) -> list[tuple[int, Work]]:
        num = 6 * self.num_steps
        return [
            (rank, Work(num * (0.0003 + 0.00002 * self.num_rows[rank]) * speed(rank), (num, num * self.num_rows[rank])))
            for rank in asked
        ]


def only(slow: int, times: float) -> Callable[[int], float]:
    return lambda rank: times if rank == slow else 1.0


def test_more_work_is_not_slower() -> None:
    """Whatever a unit costs."""
    little, much = Work(0.1 + 0.2, (10, 20)), Work(0.1 + 20.0, (10, 2000))
    assert slowdown(much, little) <= 1 and slowdown(little, much) <= 1
    assert slowdown(Work(3 * 0.3, (10, 20)), little) == pytest.approx(3)
    assert slowdown(Work(1.0, (0, 0)), little) == 0, "nothing to compare"
    assert slowdown_at_most(much, little) >= 1 and slowdown_at_most(little, much) >= 1
    assert slowdown_at_most(Work(1.0, (0, 0)), little) == math.inf


@pytest.mark.parametrize(("times", "at_least_s", "at_most_s"), [(3.0, 6.0, 9.0), (10.0, 1.5, 3.0)])
def test_a_slow_expert_worker_is_demoted_the_sooner_the_slower(times, at_least_s, at_most_s) -> None:
    world = World()
    assert world.run(5) == []
    began = world.now
    assert world.run(at_most_s, only(3, times)) == [(3, Standing.DEMOTED)]
    assert at_least_s <= world.levels[0][0] - began <= at_most_s
    assert world.slowness.demoted == {3} and "times as long as its peers" in world.reasons[0]


def test_it_gets_a_trial_and_recovers() -> None:
    world = World()
    world.run(3, only(3, 10.0))
    assert world.slowness.demoted == {3}
    assert world.run(POLICY.trial_s) == [(3, Standing.TRIAL)] and not world.slowness.demoted
    assert world.levels[1][0] - world.levels[0][0] >= POLICY.trial_s
    assert world.run(4) == [(3, Standing.FINE)]
    assert world.reasons[-1] == "it is as fast as its peers again"


def test_still_slow_in_its_trial_it_is_drained_and_the_next_one_is_fine() -> None:
    world = World()
    world.may_leave = {3}
    assert world.run(14, only(3, 10.0)) == [(3, Standing.DEMOTED), (3, Standing.TRIAL), (3, Standing.DRAINED)]
    assert world.slowness.demoted == {3}
    world.slowness.end(3, world.now)
    assert world.slowness.level(3) is Standing.FINE
    assert world.run(30) == []


def test_a_place_that_stays_slow_is_drained_once_and_its_trials_become_rare() -> None:
    world = World()
    world.may_leave = {3}
    times: list[float] = []
    for _ in range(800):
        if world.run(0.5, only(3, 10.0)) == [(3, Standing.DRAINED)]:
            world.slowness.end(3, world.now)
        times += [at for at, _, level in world.levels[-1:] if level is Standing.TRIAL and at == world.now]
    assert [level for _, _, level in world.levels].count(Standing.DRAINED) == 1
    assert "so did its predecessor" in world.reasons[-1] or "trial" in world.reasons[-1]
    gaps = [after - before for before, after in pairwise(times[1:])]
    assert len(times) <= 8 and all(after > 1.5 * before for before, after in pairwise(gaps))


def test_if_all_are_slow_none_is() -> None:
    world = World()
    world.run(20)
    assert world.run(30, lambda rank: 8.0) == []


def test_a_majority_that_is_slow_is_the_host() -> None:
    world = World(attention=(0, 1, 5))
    assert world.run(30, lambda rank: 8.0 if rank in (0, 1, 3, 4) else 1.0) == []


def test_more_rows_or_fewer_are_no_reason() -> None:
    world = World()
    world.num_rows |= {0: 2000.0, 1: 1.0, 2: 1000.0, 3: 1.0}
    assert world.run(60) == []


def test_a_slow_attention_worker_is_demoted_and_drained_while_it_has_streams() -> None:
    world = World()
    world.may_leave = {0}
    assert world.run(12, only(0, 10.0)) == [(0, Standing.DEMOTED), (0, Standing.DRAINED)]
    assert all(level is Standing.FINE for level in map(world.slowness.level, EXPERTS)), "it is late for all of them"


def test_an_attention_worker_that_is_slow_sees_no_slow_expert_workers() -> None:
    """And what one of two attention workers sees alone is not held against an expert worker."""
    world = World()
    for _ in range(40):
        world.now += 0.5
        world.slowness.report(0, world.steps(0, only(0, 1.0)), world.answers(EXPERTS, only(3, 9.0)), world.now)
        world.slowness.report(1, world.steps(1, only(0, 1.0)), world.answers(EXPERTS, only(3, 1.0)), world.now)
        world._decide()
    assert world.levels == []


def test_the_last_one_is_never_demoted() -> None:
    world = World(experts=(2, 3))
    world.run(4, only(3, 10.0))
    assert world.slowness.demoted == {3}
    for _ in range(120):
        world.run(0.5, only(2, 10.0))
        assert len(world.slowness.demoted) <= 1
    assert world.slowness.demoted == {2}, "3 was given a trial"


def test_with_one_peer_a_worker_that_did_not_change_is_not_accused_because_the_peer_got_faster() -> None:
    world = World(experts=(2, 3))
    world.run(60)
    assert world.run(30, only(2, 0.2)) == []
    assert World(experts=(2, 3)).run(6, only(2, 0.2)) == [(3, Standing.DEMOTED)], "without history only the peer counts"


def test_too_little_work_is_little_evidence() -> None:
    world = World()
    world.num_steps = 0.1  # one step in five seconds
    assert world.run(20, only(3, 10.0)) == []


def test_switched_off_it_still_shows_how_slow_a_worker_is() -> None:
    world = World(SlowPolicy(factor=0.0))
    assert world.run(20, only(3, 10.0)) == []
    assert world.slowness.ratios[3] > 5 and world.slowness.ratios[2] < 1.5


def test_a_burst_is_forgotten() -> None:
    """A neighbour that takes a core for a few seconds, again and again."""
    world = World()
    for _ in range(20):
        assert world.run(3, only(4, 3.5)) == []
        world.run(3)


def test_a_worker_that_is_not_ready_has_no_deadline() -> None:
    world = World()
    world.run(3, only(3, 10.0))
    assert world.slowness.next_deadline(EXPERTS) is not None and world.slowness.next_deadline((2, 4)) is None


def test_streams_that_come_in_batches_do_not_hide_the_one_that_works_longest() -> None:
    """Stopped for 80 % of the time, it takes five times as long; its peer works for a second of eight."""
    world = World(experts=())
    began = world.now
    for i in range(32):
        world.now += 0.5
        world.slowness.report(0, world.steps(0, only(0, 5.0)), [], world.now)
        if i % 16 < 2:
            world.slowness.report(1, world.steps(1, only(0, 5.0)), [], world.now)
        world._decide()
    assert [(rank, level) for _, rank, level in world.levels][:1] == [(0, Standing.DEMOTED)]
    assert world.levels[0][0] - began <= 7.0, "within the first batch"


def test_a_worker_alone_is_not_accused() -> None:
    """What its peers did long ago says nothing about the host now."""
    world = World(experts=())
    world.run(20)
    for _ in range(100):
        world.now += 0.5
        if world.now - 1020.0 > POLICY.stale_s:
            world.slowness.report(0, world.steps(0, only(0, 10.0)), [], world.now)
            world._decide()
    assert world.levels == []


def test_a_time_in_which_all_are_slow_does_not_hide_the_one_that_stays_slow() -> None:
    """With one peer a worker must be slower than its role is used to: that is not what both did while expert workers
    were slow."""
    world = World(experts=())
    world.run(40)
    world.run(20, lambda rank: 5.0)
    began = world.now
    assert world.run(7, only(0, 5.0)) == [(0, Standing.DEMOTED)]
    assert world.levels[0][0] - began <= 6.0


def test_a_pace_that_only_the_peer_has_is_not_what_the_role_is_used_to() -> None:
    world = World(experts=())
    world.run(60)
    assert world.run(300, only(1, 0.2)) == []


def test_other_work_shows_neither_that_a_worker_is_slow_nor_that_it_is_not() -> None:
    """Its streams are long, and those of its peer have just begun: then a key seems cheap, and nothing is known."""
    world = World(experts=())
    assert world.run(2, only(0, 5.0)) == []
    for _ in range(4):  # for two seconds the peer's rows have a tenth of the keys
        world.now += 0.5
        rows = world.num_rows[1]
        world.slowness.report(1, Work(40 * (0.002 + 0.0001 * rows), (40, 40 * rows, 400 * rows)), [], world.now)
        world.slowness.report(0, world.steps(0, only(0, 5.0)), [], world.now)
        world._decide()
    assert world.levels == []
    assert world.run(3.5, only(0, 5.0)) == [(0, Standing.DEMOTED)], "what was known before still counts"
