"""What `everserve serve` computes on."""

import msgspec
import pytest

from everserve.cli import devices
from everserve.cli.devices import choose, dtype_on, kv_cache_bytes
from everserve.config.cluster import ClusterConfig
from everserve.control.hold.design import capacity_of, first_goal
from everserve.control.hold.needs import Needs
from everserve.errors import ConfigError
from everserve.memory.device import is_available
from everserve.memory.devices import DeviceInfo
from everserve.model.bundled import DEMO_MODEL
from everserve.model.config import ModelConfig
from everserve.plan.placement import place_experts
from everserve.tables.goal import Goal
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.memory import MemoryName
from everserve.wire.messages import StartOrchestrator
from tests.support.configs import worker_settings

GIB = 1 << 30
GPU = DeviceInfo(name="toy", total_bytes=40 * GIB, free_bytes=40 * GIB)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(devices, "_missing_for_cuda", lambda: "")
    monkeypatch.setattr(devices, "look", lambda: [GPU, GPU])


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(devices, "is_available", lambda: False)


def test_hidden_devices_are_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not is_available()


def test_without_a_gpu(no_gpu):
    assert choose("auto", None, 4) == choose("cpu", None, 4) == choose("auto", False, 4) == devices.Chosen("cpu")
    with pytest.raises(ConfigError, match="--device cuda: there is no NVIDIA device"):
        choose("cuda", None, 1)
    with pytest.raises(ConfigError, match="--share-device is for GPUs"):
        choose("auto", True, 4)


def test_with_gpus(two_gpus):
    assert choose("auto", None, 2) == devices.Chosen("cuda", (GPU, GPU), share=False)
    assert choose("cuda", None, 3).share and choose("cuda", True, 1).share
    assert choose("cpu", None, 3) == devices.Chosen("cpu")
    with pytest.raises(ConfigError, match="3 workers need 3 devices, and there are 2"):
        choose("cuda", False, 3)


def test_dtype():
    assert [dtype_on("cpu", dtype) for dtype in ("auto", "float16")] == ["auto", "float16"]
    assert [dtype_on("cuda", dtype) for dtype in ("auto", "bfloat16")] == ["bfloat16", "bfloat16"]
    with pytest.raises(ConfigError, match="--dtype float32: on a GPU"):
        dtype_on("cuda", "float32")


def start(num_attention=2, num_expert=3, num_gpus=2, **settings) -> StartOrchestrator:
    values = {"directory": str(DEMO_MODEL), "dtype": "bfloat16", "max_model_len": 512, "kv_cache_bytes": 0}
    return StartOrchestrator(
        cluster=ClusterConfig(attention_workers=num_attention, expert_workers=num_expert),
        worker=worker_settings(**values | {"device": "cuda"} | settings),
        num_gpus=num_gpus,
    )


def test_kv_is_what_is_left(two_gpus):
    chosen = choose("cuda", None, 5)
    full = kv_cache_bytes(chosen, start(), None)
    assert 0 < kv_cache_bytes(chosen, start(), 0.5) < full < 36 * GIB
    assert kv_cache_bytes(chosen, start(max_num_batched_tokens=32768), None) < full, "lanes"
    mirrored = kv_cache_bytes(chosen, start(mode="mirror"), None)
    assert mirrored <= full, "a mirror is pinned memory of the host"


class Born:
    """The first goal of an instance, and what its workers are born with."""

    def __init__(self, start: StartOrchestrator) -> None:
        model = ModelConfig.from_directory(DEMO_MODEL)
        self.goal = first_goal(start, model)
        self.needs = Needs(model, start.worker, capacity_of(start, model, self.goal), start.cluster.detect_ms)

    def memory(self, rank: int, incarnation: int = 4) -> tuple[MemoryName, ...]:
        return self.needs.memory(self.goal, WorkerId(Rank(rank), Incarnation(incarnation)))

    def names(self, rank: int) -> list[str]:
        return [memory.name for memory in self.memory(rank)]

    def devices(self, rank: int) -> list[int]:
        return [memory.device for memory in self.memory(rank)]

    def gpus(self, rank: int) -> list[int]:
        return [memory.gpu for memory in self.memory(rank)]

    def owners(self) -> list[int]:
        return [self.needs.weights_owner(self.goal, seat.rank) for seat in self.goal.seats]


def test_what_a_worker_is_born_with():
    on_gpus = Born(start())
    assert on_gpus.names(3) == ["cell-3.4", "weights-3", "weights-state-3", "bell-3"]
    assert on_gpus.devices(3) == [-1, 1, 1, 1] and on_gpus.gpus(3) == [-1, 1, -1, 1]
    assert [seat.device for seat in on_gpus.goal.seats] == [0, 1, 0, 1, 0]
    anchored = Born(start(mode="anchor", kv_cache_bytes=1 << 24))
    assert anchored.names(1) == ["cell-1.4", "kv-1.4", "log-1.4", "weights-1", "weights-state-1"]
    assert anchored.devices(1) == [-1, 1, 1, 1, 1] and anchored.gpus(1) == [-1, 1, -1, 1, -1]
    capacity = anchored.needs.capacity
    assert capacity.kv_bytes <= 1 << 24 and capacity.log_bytes < 1 << 20, "the log is without its blocks"
    on_cpus = Born(start(num_gpus=0, device="cpu", mode="mirror", kv_cache_bytes=1 << 24))
    assert on_cpus.names(0) == ["cell-0.4", "log-0.4"]
    assert on_cpus.names(3) == ["cell-3.4"]
    assert on_cpus.devices(0) == [-1, -1], "a mirror outlives its device"
    assert [seat.device for seat in on_cpus.goal.seats] == [0, 1, 2, 3, 4], "each worker alone"
    in_place = Born(start(num_gpus=0, device="cpu", mode="anchor", kv_cache_bytes=1 << 24))
    assert in_place.devices(1) == [-1, 1], "its log is its KV cache"
    assert {*on_cpus.gpus(0), *in_place.gpus(1), *(seat.gpu for seat in on_cpus.goal.seats)} == {-1}


def test_seats_with_the_same_weights_on_one_device_share_them(two_gpus):
    shared = Born(start(num_attention=4))
    assert shared.owners() == [0, 1, 0, 1, 4, 5, 6]
    assert shared.names(2)[1:] == ["weights-0", "weights-state-0"]
    replicas = Born(start(num_attention=3, num_expert=0))
    assert replicas.owners() == [0, 1, 0], "all of the model"


def test_a_worker_may_have_any_rank_role_and_device():
    born = Born(start())
    seats = tuple(
        msgspec.structs.replace(seat, rank=Rank(9 - seat.rank), device=(0, 0, 1, 1, 1)[seat.rank], gpu=0)
        for seat in born.goal.seats
    )
    placement = place_experts(8, (0, 1), [seat.rank for seat in seats if Role.ATTENTION not in seat.roles], None)
    born.goal = Goal(version=2, seats=seats, placement=placement)
    assert born.names(9) == ["cell-9.4", "weights-9", "weights-state-9"] and born.devices(9) == [-1, 0, 0]
    assert born.names(8)[1] == "weights-9", "the same weights on the same device"
    assert born.names(5)[-1] == "bell-5" and born.devices(5) == [-1, 1, 1, 1] and born.gpus(5) == [-1, 0, -1, 0]
    told = born.needs.start(born.goal, WorkerId(Rank(9), Incarnation(1)))
    assert (told.device, told.num_attention_on_gpu, told.slots) == (0, 2, None)


def test_shared_weights_are_counted_once(two_gpus, monkeypatch):
    def kv(num_attention: int) -> int:
        return kv_cache_bytes(choose("cuda", None, num_attention), start(num_attention, num_expert=0), None)

    shared = 2 * kv(4)
    monkeypatch.setattr(Needs, "weights_owner", lambda self, goal, rank: rank)
    born = Born(start(2, 0))
    assert shared - 2 * kv(4) == born.needs.weights_bytes(born.goal, Rank(0))
