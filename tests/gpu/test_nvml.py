"""What NVML says of a real GPU: readings that mean something, and a healthy GPU that is called healthy."""

import queue
import threading

import pytest

from everserve.control.watch.nvml import NvmlSource, load
from everserve.memory.devices import look
from everserve.plan.health import Judge, Observation, Reading
from everserve.tables.health import Level

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")


@pytest.fixture(scope="module")
def uuids() -> list[str]:
    return [device.uuid for device in look()]


def readings_of(uuids: list[str], num: int) -> list[Observation]:
    """So many posts of a real source; devices 10 and 11 are shares of the first GPU."""
    posted: queue.SimpleQueue[Observation] = queue.SimpleQueue()
    source = NvmlSource(uuids, lambda gpu: [10, 11] if gpu == 0 else [20 + gpu], posted.put)
    source.start()
    try:
        return [posted.get(timeout=60) for _ in range(num)]
    finally:
        source.stop()
        assert not [thread for thread in threading.enumerate() if thread.name == "nvml"]


def test_the_drivers_uuids_are_those_of_nvml(uuids):
    nvml = load()
    assert nvml is not None and uuids
    known = {nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())}
    assert set(uuids) <= known


def test_a_gpu_is_read_for_every_device_that_shares_it(uuids):
    first, second = readings_of(uuids[:1], 2)
    assert isinstance(first, Reading) and isinstance(second, Reading)
    assert {first.device, second.device} == {10, 11}
    assert not first.is_lost and not first.needs_reset
    assert first.temperature is not None and 0 < first.temperature < 120
    assert first.throttles is not None
    if first.rows_pending is not None:
        assert first.ecc_uncorrected is not None, "a GPU that remaps rows counts errors"


def test_a_gpu_that_works_is_not_left(uuids):
    judge = Judge()
    found = [one for at, seen in enumerate(readings_of(uuids[:1], 2)) for one in judge.note(seen, float(at))]
    assert all(one.level < Level.DRAIN for one in found), found


def test_a_gpu_that_is_not_there_is_told(uuids):
    (told,) = readings_of(["GPU-00000000-0000-0000-0000-000000000000"], 2)[:1]
    assert "does not know GPU" in str(told)
