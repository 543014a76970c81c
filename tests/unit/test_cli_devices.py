"""What `everserve serve` computes on."""

import pytest

from everserve.cli import devices
from everserve.cli.devices import choose, dtype_on, kv_cache_bytes
from everserve.control.design import Design
from everserve.errors import ConfigError
from everserve.memory.device import is_available
from everserve.memory.devices import Device
from everserve.model.bundled import DEMO_MODEL
from everserve.tables.ids import Incarnation, Rank
from everserve.wire.messages import StartOrchestrator
from tests.configs import worker_settings

GIB = 1 << 30
GPU = Device(name="toy", total_bytes=40 * GIB, free_bytes=40 * GIB)


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


def start(num_attention=2, num_expert=3, num_devices=2, **settings) -> StartOrchestrator:
    values = {"directory": str(DEMO_MODEL), "dtype": "bfloat16", "max_model_len": 512, "kv_cache_bytes": 0}
    return StartOrchestrator(
        model=str(DEMO_MODEL),
        num_attention=num_attention,
        num_expert=num_expert,
        shadow_experts=None,
        detect_ms=50.0,
        worker=worker_settings(**values | {"device": "cuda"} | settings),
        event_log=None,
        num_devices=num_devices,
    )


def test_kv_is_what_is_left(two_gpus):
    chosen = choose("cuda", None, 5)
    full = kv_cache_bytes(chosen, start(), None)
    assert 0 < kv_cache_bytes(chosen, start(), 0.5) < full < 36 * GIB
    assert kv_cache_bytes(chosen, start(max_num_batched_tokens=32768), None) < full, "lanes"
    mirrored = kv_cache_bytes(chosen, start(mode="mirror"), None)
    assert mirrored <= full, "a mirror is pinned memory of the host"


def test_what_a_worker_is_born_with():
    seat = (Rank(3), Incarnation(4))
    on_gpus = Design.of(start())
    assert [needed.name for needed in on_gpus.memory_of(seat)] == ["cell-3.4", "weights-3", "weights-state-3", "bell-3"]
    assert [needed.device for needed in on_gpus.memory_of(seat)] == [-1, 1, -1, 1]
    assert [on_gpus.device_of(Rank(rank)) for rank in range(5)] == [0, 1, 0, 1, 0]
    anchored = Design.of(start(mode="anchor", kv_cache_bytes=1 << 24))
    names = ["cell-1.4", "kv-1.4", "log-1.4", "weights-1", "weights-state-1"]
    assert [needed.name for needed in anchored.memory_of((Rank(1), Incarnation(4)))] == names
    assert [needed.device for needed in anchored.memory_of((Rank(1), Incarnation(4)))] == [-1, 1, -1, 1, -1]
    assert anchored.kv_bytes <= 1 << 24 and anchored.log_bytes < 1 << 20, "the log is without its blocks"
    on_cpus = Design.of(start(num_devices=0, device="cpu", mode="mirror", kv_cache_bytes=1 << 24))
    assert [needed.name for needed in on_cpus.memory_of((Rank(0), Incarnation(4)))] == ["cell-0.4", "log-0.4"]
    assert [needed.name for needed in on_cpus.memory_of(seat)] == ["cell-3.4"]
    assert {needed.device for needed in on_cpus.memory_of(seat)} == {-1} == {on_cpus.device_of(Rank(3))}


def test_seats_with_the_same_weights_on_one_device_share_them(two_gpus):
    shared = Design.of(start(num_attention=4))
    assert [shared.weights_owner(Rank(rank)) for rank in range(7)] == [0, 1, 0, 1, 4, 5, 6]
    assert [needed.name for needed in shared.memory_of((Rank(2), Incarnation(1)))][1:] == [
        "weights-0",
        "weights-state-0",
    ]
    replicas = Design.of(start(num_attention=3, num_expert=0))
    assert [replicas.weights_owner(Rank(rank)) for rank in range(3)] == [0, 1, 0], "all of the model"


def test_shared_weights_are_counted_once(two_gpus, monkeypatch):
    def kv(num_attention: int) -> int:
        return kv_cache_bytes(choose("cuda", None, num_attention), start(num_attention, num_expert=0), None)

    shared = 2 * kv(4)
    monkeypatch.setattr(Design, "weights_owner", lambda self, rank: rank)
    assert shared - 2 * kv(4) == Design.of(start(2, 0)).weights_of(Rank(0)).num_bytes
