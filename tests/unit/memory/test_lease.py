"""How long the main thread may be away."""

import pytest

from everserve.memory.liveness.lease import FORGET_S, MARGIN, MOST_S, Lease


class _Warden:
    def __init__(self) -> None:
        self.seconds: float | None = None

    def renew(self, seconds: float | None = None) -> None:
        self.seconds = seconds


class _World:
    def __init__(self) -> None:
        self.now, self.warden = 0.0, _Warden()
        self.lease = Lease(self.warden, 5.0)

    def operate(self, size: int, seconds: float) -> float | None:
        """The lease that it got."""
        self.lease.begin(size, self.now)
        given = self.warden.seconds
        self.now += seconds
        self.lease.end(self.now)
        return given


def test_between_operations_it_is_short() -> None:
    world = _World()
    world.lease.renew()
    assert world.warden.seconds == 5.0


def test_an_operation_gets_a_multiple_of_what_its_like_took() -> None:
    world = _World()
    assert world.operate(1000, 1.0) == MOST_S, "nothing is known yet"
    assert world.operate(1000, 1.0) == MARGIN * 1.0
    assert world.operate(2000, 1.0) == 2 * MARGIN, "larger: in proportion"
    assert world.operate(10, 0.001) == MARGIN, "smaller: at most as long"
    assert world.operate(10, 0.001) == 5.0, "but never shorter than between operations"
    assert world.operate(1000, 1.0) == MARGIN, "small ones say nothing about large ones"
    assert world.operate(1 << 30, 1.0) == MOST_S


def test_one_long_operation_is_forgotten() -> None:
    world = _World()
    world.operate(10, 6.0)
    assert world.operate(10, 0.01) == MOST_S
    leases = [world.operate(10, FORGET_S / 100) for _ in range(1200)]
    assert leases == sorted(leases, reverse=True) and leases[-1] == pytest.approx(MARGIN * FORGET_S / 100)


def test_what_is_not_done_for_long_is_remembered() -> None:
    world = _World()
    world.operate(1 << 20, 8.0)
    for _ in range(1200):
        world.operate(10, FORGET_S / 100)
    assert world.operate(1 << 20, 8.0) == MOST_S


def test_an_abandoned_operation_counts_for_nothing() -> None:
    world = _World()
    world.operate(10, 0.01)
    world.lease.begin(10, world.now)
    world.now += 1000.0  # paused
    assert world.operate(10, 0.01) == 5.0


def test_what_the_shortest_lease_covers() -> None:
    world = _World()
    assert world.lease.quick_size == 0, "nothing is known yet"
    world.operate(40, 5.0 / MARGIN)
    assert world.lease.quick_size == 63, "what is as large, and what is smaller; twice as much may take longer"
    world.operate(40, 6.0 / MARGIN)
    assert world.lease.quick_size == 0
    world.operate(3, 0.001)
    assert world.lease.quick_size >= 3 and world.lease.quick_size < 40
