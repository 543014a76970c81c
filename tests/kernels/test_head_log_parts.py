"""What a home on a GPU is built with where heads are divided, for each kind of log: log, fetcher and journal; and what
a spare does of that ahead of need. Memory is the host's, kernels are interpreted."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from everserve.backends.cuda import logs, reaching
from everserve.backends.cuda.log import head_kernels
from everserve.cli.serve_settings import divide_heads
from everserve.config.cluster import ClusterConfig
from everserve.control.hold.design import capacity_of, first_goal
from everserve.control.hold.needs import Needs
from everserve.engine.sizing import KvSizes
from everserve.kvlog.log import LogMismatch
from everserve.memory.owned import create_memory
from everserve.model.config import ModelConfig
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.tables.memory import Kind
from everserve.wire.messages import StartOrchestrator
from everserve_bench.device_shapes import write_shape
from tests.kernels.host_device import HostDriver
from tests.kernels.toy_head_pools import Late, ToyDriver
from tests.support.configs import worker_settings
from tests.support.logs import SHAPE, offer_log
from tests.support.toy import spec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host's memory is not the device's")
HOME, WORKER = WorkerId(Rank(1), Incarnation(1)), WorkerId(Rank(4), Incarnation(1))
OTHER = WorkerId(Rank(2), Incarnation(1))  # a home


@pytest.fixture(params=["anchor", "mirror"])
def needs(tmp_path, request) -> tuple[Needs, object]:
    """Llama's shape with `-tp 3`."""
    directory = write_shape(tmp_path / "llama", "llama", num_layers=1)
    told = worker_settings(
        directory=str(directory), tensor_parallel=True, dtype="bfloat16", weights="memory", kv_cache_bytes=16 << 20,
        max_model_len=256, max_num_batched_tokens=64, mode=request.param, device="cuda",
    )  # fmt: skip
    cluster = structs.replace(ClusterConfig(tensor_parallel_size=3).resolved(), shadow_experts=0)
    settings = divide_heads(told, cluster)
    start = StartOrchestrator(cluster=cluster, worker=settings, num_gpus=1, gpus=("GPU",))
    model = ModelConfig.from_source(settings.model)
    goal = first_goal(start, model)
    return Needs(model, settings, capacity_of(start, model, goal), 50.0), goal


@pytest.fixture
def device(needs, monkeypatch) -> SimpleNamespace:
    monkeypatch.setattr(reaching, "SideStream", lambda device: Late())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(head_kernels, "NUM_PROGRAMS", 1)
    found, goal = needs
    sizes = KvSizes.of(found.model, found.settings.engine, found.settings.model.dtype)
    start = found.start(goal, HOME)
    cpu = torch.device("cpu")
    return SimpleNamespace(model=found.model, start=start, torch_device=cpu, driver=ToyDriver(), sizes=sizes)


def test_a_spare_rehearses_it(device):
    logs.rehearse_log(device)


def test_a_home_has_all_of_it(needs, device):
    memory = {piece.kind: create_memory(piece.name, piece.num_bytes) for piece in device.start.memory}
    has_mirror = device.start.settings.log.mode == "mirror"
    assert (Kind.KV_MIRROR in memory) == has_mirror
    own = logs.CudaLogs(device, memory)
    fetcher = reaching.make_head_fetcher(device, memory.get(Kind.KV_MIRROR))
    assert (fetcher.mirrors is not None) == has_mirror
    peers = logs._NoPeers(len(device.model.calls), device.model.num_kv_heads)
    journal = own.make_head_journal(reaching.make_head_kv(device, peers, fetcher), fetcher)
    assert own.is_on and journal.writer.is_elsewhere and not journal.adopted
    found, goal = needs
    pool = next(piece for piece in found.memory(goal, WORKER) if piece.kind is Kind.KV_PIECES)
    fetcher.pools.offer(WORKER.rank, Kind.KV_PIECES, create_memory(pool.name, pool.num_bytes))
    if has_mirror:
        fetcher.pools.offer(Rank(0), Kind.KV_MIRROR, create_memory("mirror", device.sizes.mirror().num_bytes))
        assert fetcher.mirrors.bounce([0]) == [0] and fetcher.mirrors.bounce([device.sizes.num_blocks]) is None
    fetcher.sweep()
    assert fetcher.pools.ranks == [WORKER.rank] and not fetcher.pools[WORKER.rank].pieces()


def flipped(piece) -> int:
    """The memory of a log with one wrong bit in its header."""
    fd = create_memory(piece.name, piece.num_bytes)
    os.pwrite(fd, b"\x01", 3)
    return fd


def test_logs_that_cannot_be_read(device, caplog):
    """Its own is begun anew; one of another home is no log."""
    piece = next(piece for piece in device.start.memory if piece.kind is Kind.LOG)
    own = logs.CudaLogs(device, {Kind.LOG: flipped(piece)})
    kept = own.keep()
    assert kept.num_unreadable == 1 and "is begun anew" in caplog.text
    offer_log(kept, OTHER, flipped(piece))
    for _ in range(2):
        kept.sweep(SimpleNamespace(waits_for=lambda log: False))
        assert kept.find(spec("a", [1, 2]), OTHER) is None and kept.num_unreadable == 2


def test_blocks_of_a_log_that_cannot_be_read_are_not_mapped():
    """Where heads are not divided blocks are in memory of their own, on the device."""
    model, sizes = SimpleNamespace(divides_heads=False), SimpleNamespace(log=SHAPE)
    reader = logs.CudaLogs(SimpleNamespace(model=model, sizes=sizes, driver=HostDriver()), {})
    piece = SimpleNamespace(name="log", num_bytes=SHAPE.num_bytes)
    kv_fd = create_memory("kv-blocks", SHAPE.num_bytes)
    for fd in (flipped(piece), os.open(os.devnull, os.O_RDONLY)):
        with pytest.raises(LogMismatch):
            reader._open(fd, kv_fd)
        assert "kv-blocks" not in Path("/proc/self/maps").read_text()
        os.close(fd)
    opened = reader._open(create_memory("log", SHAPE.num_bytes), kv_fd)
    assert "kv-blocks" in Path("/proc/self/maps").read_text()
    opened.close()
    os.close(kv_fd)


def test_without_a_log_there_is_none(device):
    assert not logs.CudaLogs(device, {}).is_on
