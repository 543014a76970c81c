"""`--survive-losses K`: the flags that it stands for, and that K losses then leave every shard a place."""

import json
from pathlib import Path

import pytest

from everserve.cli.survive_losses import with_places
from everserve.config.cluster import ClusterConfig
from everserve.config.kvlog import LogConfig
from everserve.control.hold.design import capacity_of, first_goal
from everserve.errors import ConfigError
from everserve.model.config import ModelConfig
from everserve.plan.survival import survivals
from everserve.tables.survival import Weights
from everserve.wire.messages import StartOrchestrator, WorkerSettings
from everserve_bench.shapes import SMALL
from tests.support.configs import worker_settings

DP_4 = {"data_parallel_size": 4, "enable_expert_parallel": True}
ANY_ONE, ANY_TWO = {"any one process", "any one device"}, {"any two processes", "any two devices"}


@pytest.fixture
def settings(tmp_path: Path):
    def make(shape: str, *, is_divided: bool = False) -> WorkerSettings:
        (tmp_path / "config.json").write_text(json.dumps(SMALL[shape]))
        return worker_settings(directory=str(tmp_path), tensor_parallel=is_divided, divides_heads=is_divided)

    return make


def resolved(settings: WorkerSettings, num_gpus: int = 0, **cluster: int | bool) -> ClusterConfig:
    return with_places(ClusterConfig(**cluster).resolved(), settings, num_gpus)


def waits(settings: WorkerSettings, cluster: ClusterConfig) -> dict[str, Weights]:
    model = ModelConfig.from_source(settings.model)
    start = StartOrchestrator(cluster=cluster, worker=settings)
    goal = first_goal(start, model)
    found = survivals(goal, capacity_of(start, model, goal), LogConfig(mode="mirror"))
    return {one.failure: one.weights for one in found}


@pytest.mark.parametrize(
    ("shape", "cluster", "expected"),
    [
        ("moe", {**DP_4, "survive_losses": 0}, set()),
        ("moe", {**DP_4, "survive_losses": 1}, ANY_ONE),
        ("moe", {**DP_4, "survive_losses": 2}, ANY_ONE | ANY_TWO),
        ("llama", {**DP_4, "survive_losses": 2}, ANY_ONE | ANY_TWO),
        ("llama", {"tensor_parallel_size": 4, "survive_losses": 1}, ANY_ONE),
        ("llama", {"tensor_parallel_size": 4, "survive_losses": 2}, ANY_ONE | ANY_TWO),
    ],
)
def test_so_many_losses_leave_every_shard_a_place(settings, shape, cluster, expected):
    found = settings(shape, is_divided="tensor_parallel_size" in cluster)
    at_once = {name for name, wait in waits(found, resolved(found, **cluster)).items() if wait is Weights.AT_ONCE}
    assert at_once == expected


def test_a_device_with_several_expert_workers_needs_more_shadows(settings):
    model = settings("moe")
    cluster = resolved(model, attention_workers=2, expert_workers=4, devices=2, survive_losses=1)
    assert waits(model, cluster)["any one device"] is Weights.AT_ONCE


def test_flags_that_are_given_go_first(settings):
    model, divided = settings("moe"), settings("llama", is_divided=True)
    assert resolved(model, **DP_4, survive_losses=2, shadow_experts=1).shadow_experts == 1
    assert resolved(divided, tensor_parallel_size=4, survive_losses=2, shadow_shards=0).shadow_shards == 0
    assert resolved(model, **DP_4).shadow_experts is None, "and where nothing is asked, nothing is set"


def test_on_gpus_others_have_room_too(settings):
    divided = settings("llama", is_divided=True)
    cluster = resolved(divided, num_gpus=4, tensor_parallel_size=4, survive_losses=2)
    assert (cluster.shadow_shards, cluster.max_lost_devices) == (2, 2)
    cluster = resolved(divided, num_gpus=4, tensor_parallel_size=4, survive_losses=2, max_lost_devices=0)
    assert (cluster.shadow_shards, cluster.max_lost_devices) == (2, 0)
    assert resolved(divided, tensor_parallel_size=4, survive_losses=2).max_lost_devices is None, "CPUs always have room"


def test_more_than_can_be_lost_is_refused(settings):
    with pytest.raises(ConfigError, match="--survive-losses 4: attention workers are on 4 devices, so at most 3"):
        resolved(settings("moe"), **DP_4, survive_losses=4)
    with pytest.raises(ConfigError, match="expert workers are on 1 device, so at most 0"):
        resolved(settings("moe"), attention_workers=2, expert_workers=1, survive_losses=1)
    assert resolved(settings("moe"), attention_workers=2, survive_losses=1).shadow_experts is None, (
        "each has everything"
    )
