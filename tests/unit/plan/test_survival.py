"""Which failures are survived, and what streams wait for: as the server says it at its start and at /cluster."""

import json

import msgspec
import pytest

from everserve.config.cluster import ClusterConfig
from everserve.config.kvlog import LogConfig
from everserve.control.hold.design import capacity_of, first_goal
from everserve.model.config import ModelConfig
from everserve.plan.survival import survivals
from everserve.tables.goal import Capacity, Goal
from everserve.tables.survival import Kv, Weights
from everserve.wire.messages import StartOrchestrator
from everserve_bench.shapes import SMALL
from tests.support.configs import worker_settings

AT_ONCE, SUCCESSOR, MAPPED, LOADED, RETURN = Weights


@pytest.fixture
def design(tmp_path):
    """Goal and capacity as the orchestrator makes them: heads, and experts or slices, over devices."""

    def make(shape: str, weights: str = "mapped", **cluster) -> tuple[Goal, Capacity]:
        (tmp_path / "config.json").write_text(json.dumps(SMALL[shape]))
        is_divided = "tensor_parallel_size" in cluster
        settings = worker_settings(
            directory=str(tmp_path), weights=weights, tensor_parallel=is_divided, divides_heads=is_divided
        )
        model = ModelConfig.from_source(settings.model)
        start = StartOrchestrator(cluster=ClusterConfig(**cluster).resolved(), worker=settings)
        goal = first_goal(start, model)
        return goal, capacity_of(start, model, goal)

    return make


def weights(goal: Goal, capacity: Capacity) -> list[Weights]:
    """Of one and two processes, one and two devices."""
    return [one.weights for one in survivals(goal, capacity, LogConfig(mode="mirror"))]


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        # heads wait for their worker; as many losses as slices have slots for
        ({"tensor_parallel_size": 8}, [SUCCESSOR, SUCCESSOR, LOADED, LOADED]),
        ({"tensor_parallel_size": 3}, [SUCCESSOR, SUCCESSOR, LOADED, RETURN]),
        ({"tensor_parallel_size": 3, "shadow_experts": 6}, [SUCCESSOR, SUCCESSOR, LOADED, LOADED]),
        ({"tensor_parallel_size": 3, "shadow_experts": 0}, [SUCCESSOR, SUCCESSOR, RETURN, RETURN]),
        ({"tensor_parallel_size": 1}, [SUCCESSOR, RETURN]),  # one worker
        # and where heads and slices have further places
        ({"tensor_parallel_size": 3, "shadow_shards": 1}, [AT_ONCE, SUCCESSOR, AT_ONCE, RETURN]),
        ({"tensor_parallel_size": 3, "shadow_shards": 2}, [AT_ONCE] * 4),
        ({"tensor_parallel_size": 8, "shadow_shards": 1}, [AT_ONCE, SUCCESSOR, AT_ONCE, LOADED]),
    ],
)
def test_divided_over_devices(design, cluster, expected):
    assert weights(*design("llama", **cluster)) == expected


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ({"data_parallel_size": 4, "enable_expert_parallel": True}, [AT_ONCE, LOADED, AT_ONCE, LOADED]),
        ({"data_parallel_size": 4, "enable_expert_parallel": True, "shadow_experts": 8}, [AT_ONCE] * 4),
        (
            {"data_parallel_size": 4, "enable_expert_parallel": True, "shadow_experts": 0},
            [SUCCESSOR, SUCCESSOR, RETURN, RETURN],
        ),
        ({"attention_workers": 3}, [AT_ONCE] * 4),  # each has everything
    ],
)
def test_experts_on_workers(design, cluster, expected):
    assert weights(*design("moe", **cluster)) == expected


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        # two of 8 experts each, and two slots for those of others
        ({"expert_workers": 4, "shadow_experts": 0}, [MAPPED, MAPPED, RETURN, RETURN]),
        ({"expert_workers": 3, "shadow_experts": 0}, [MAPPED, SUCCESSOR, RETURN, RETURN]),  # one cannot map all of two
        ({"expert_workers": 4}, [AT_ONCE, MAPPED, AT_ONCE, LOADED]),
        ({"expert_workers": 4, "map_experts": "off"}, [AT_ONCE, LOADED, AT_ONCE, LOADED]),
        ({"expert_workers": 2, "shadow_experts": 0}, [MAPPED, SUCCESSOR, RETURN, RETURN]),
        ({"expert_workers": 1}, [SUCCESSOR, SUCCESSOR, RETURN, RETURN]),
    ],
)
def test_experts_in_memory_that_others_reach(design, cluster, expected):
    assert weights(*design("mixtral", attention_workers=4, devices=4, weights="memory", **cluster)) == expected


def test_experts_on_another_gpu_are_not_reached(design):
    goal, capacity = design("mixtral", attention_workers=4, expert_workers=4, weights="memory", shadow_experts=0)
    for num_gpus, expected in ((2, [MAPPED, SUCCESSOR]), (4, [SUCCESSOR, SUCCESSOR])):
        seats = tuple(msgspec.structs.replace(seat, gpu=seat.rank % num_gpus) for seat in goal.seats)
        assert weights(msgspec.structs.replace(goal, seats=seats), capacity)[:2] == expected


def test_what_a_lost_device_leaves(design):
    """One device less: as many more losses as slots have room for, and no more."""
    goal, capacity = design("llama", tensor_parallel_size=3)
    assert weights(msgspec.structs.replace(goal, gone=(1,)), capacity) == [SUCCESSOR, SUCCESSOR, RETURN, RETURN]


@pytest.mark.parametrize(
    ("kv_log", "kv"),
    [
        ("off", [Kv.COMPUTED] * 4),
        ("anchor", [Kv.KEPT, Kv.KEPT, Kv.COMPUTED, Kv.COMPUTED]),
        ("mirror", [Kv.KEPT] * 4),
    ],
)
@pytest.mark.parametrize("shadow", [None, "off", "parity"])
def test_where_kv_outlives_its_worker(design, kv_log, shadow, kv):
    found = survivals(*design("llama", tensor_parallel_size=4), LogConfig(mode=kv_log, shadow=shadow))
    if shadow is not None and kv_log != "off":
        kv = [Kv.KEPT, Kv.KEPT, Kv.REBUILT if shadow == "parity" else Kv.COMPUTED, Kv.COMPUTED]
    assert [one.kv for one in found] == kv
    assert [one.failure for one in found] == [
        *("any one process", "any two processes"),
        *("any one device", "any two devices"),
    ]
    assert found[0].sentence == f"any one process: {found[0].weights.value}, {found[0].kv.value}"
