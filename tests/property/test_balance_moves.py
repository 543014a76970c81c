"""Experts that move for their load, in any order of events: the world of test_moves.py with rows. Its invariants hold,
and once loads are constant and the faults have ended, the goal comes to rest."""

from hypothesis import given
from hypothesis import strategies as st

from everserve.control.decide.effects import Decision
from everserve.control.decide.inputs import Said
from everserve.plan.balance import BalancePolicy
from everserve.plan.dealing import imbalance
from everserve.wire.events import BalanceDecided
from everserve.wire.messages import LoadReported
from everserve.wire.operators import ReturnRequest
from tests.property import test_moves as moves
from tests.property.test_moves import LAYERS, NUM_EXPERTS, check_healed
from tests.support.decisions import ask
from tests.support.examples import examples

ROWS = st.lists(st.sampled_from([0, 1, 10, 100]), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)


class World(moves.World):
    """Every ready expert worker reports the rows of what it holds, as if every expert were used by this pattern."""

    balance = BalancePolicy(expert_bytes=1, min_rows=1.0)

    def __init__(self, num_devices: int, num_slots: int, rows: list[list[int]]) -> None:
        self.rows = rows  # by layer and expert
        self.num_accepted = 0
        super().__init__(num_devices, num_slots)

    def apply(self, decision: Decision) -> None:
        self.num_accepted += sum(isinstance(e, BalanceDecided) and e.is_accepted for e in decision.effects)
        super().apply(decision)

    def report(self, n: int) -> None:
        """The first worker that holds an expert has computed its rows."""
        self.now += 1.0
        done: set[tuple[int, int]] = set()
        for process in self.processes.values():
            if process.id.rank < self.num_devices or not process.is_ready:
                continue
            rows: dict[int, dict[int, int]] = {}
            for layer in range(len(LAYERS)):
                for expert in process.experts[layer]:
                    if (num := self.rows[layer][expert]) and expert >= 0 and (layer, expert) not in done:
                        done.add((layer, expert))
                        rows.setdefault(layer, {})[expert] = num
            if rows:
                process.says.append(Said(*process.id, LoadReported(rows=rows)))

    def change_load(self, n: int) -> None:
        self.rows = [row[n % NUM_EXPERTS :] + row[: n % NUM_EXPERTS] for row in self.rows]

    def run(self, seconds: int) -> None:
        """Without faults, and with the same rows every second."""
        for _ in range(seconds):
            self.report(0)
            self.settle()

    @property
    def max_over_mean(self) -> float:
        routes = self.machine.routes
        assert routes is not None
        loads = self.machine.balancer.loads.by_layer(self.now)
        return imbalance(routes, loads).max_over_mean


ACTIONS = [*moves.ACTIONS, *[World.report] * 4, World.change_load, *[World.tick] * 2]


@examples(13)
@given(
    st.lists(st.tuples(st.integers(0, len(ACTIONS) - 1), st.integers(0, 1000)), min_size=10, max_size=100),
    st.sampled_from([(2, 6), (3, 4), (3, 3), (4, 3), (3, 2), (4, 6)]),
    st.tuples(ROWS, ROWS),
)
def test_balancing_breaks_nothing_and_comes_to_rest(schedule, shape, rows):
    world = World(*shape, [*rows])
    for action, n in schedule:
        ACTIONS[action](world, n)
    world.settle()
    check_healed(world)
    for device in world.machine.goal.gone:
        world.tell(ask(ReturnRequest(device=device)))
    world.settle()
    world.run(40)  # older rows fade
    check_healed(world)
    before, version = world.num_accepted, world.machine.goal.version
    ratio = world.max_over_mean
    world.run(30)
    assert (world.num_accepted, world.machine.goal.version) == (before, version), (
        "the loads are the same, nothing moves"
    )
    assert world.max_over_mean <= ratio * 1.01
    check_healed(world)
    assert world.machine.degraded == ()


class Unbalanced(World):
    balance = None


def test_skew_is_levelled_and_without_the_policy_only_counted():
    """Six experts on three devices with four slots each: two places for everyone, and rows for a few."""
    rows = [[100, 100, 1, 1, 1, 1], [1, 1, 1, 1, 1, 100]]
    world, same = World(3, 4, rows), Unbalanced(3, 4, rows)
    version = world.machine.goal.version
    world.run(30)
    same.run(30)
    assert (same.num_accepted, same.machine.goal.version) == (0, version)
    assert world.num_accepted >= 1 and world.machine.goal.version > version
    assert world.max_over_mean < same.max_over_mean - 0.3
    check_healed(world)
    steady = world.machine.goal.version
    world.run(60)
    assert world.machine.goal.version == steady
