"""The writer for pools on a device, without a device: kernels are interpreted, and what is queued on the side is done
as late as possible, when somebody waits for it."""

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from everserve.backends.cuda.log import kernels
from everserve.backends.cuda.log import registered_prefix as cuda_reach
from everserve.backends.cuda.log import writer as cuda_writer
from everserve.backends.cuda.log.registered_prefix import Reach
from everserve.backends.cuda.log.writer import CudaLogWriter
from everserve.kvlog.chains import chains, key_of
from everserve.kvlog.layout import LogShape
from everserve.kvlog.log import Log
from everserve.kvlog.writer import Copy
from everserve.memory.owned import create_memory
from everserve.tables.requests import RequestSpec
from tests.kernels.test_kvlog import SHAPE, words_address, words_of
from tests.support.logs import Heir, Owner, Stream, as_pool, kv_of, new_log
from tests.support.toy import LoggedToy, StepAbandoned, make_config, run_alone, spec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host's memory is not the device's")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch) -> None:
    """Those without a row cost time too."""
    monkeypatch.setattr(kernels, "NUM_PROGRAMS", 3)


class Late:
    """A side on which nothing happens until somebody waits."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.queued: list[Callable[[], None]] = []

    def record(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()
        return lambda: self.run(launch)

    def run(self, launch: Callable[[], None]) -> None:
        self.queued.append(launch)

    def wait(self) -> None:
        queued, self.queued = self.queued, []
        for launch in queued:
            launch()


class DeviceMemory:
    """Or what we take for it."""

    def __init__(self, shape: LogShape) -> None:
        self.bytes = np.zeros(shape.num_blocks * shape.block_bytes, np.uint8)
        self.address = self.bytes.ctypes.data
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def device_log(shape: LogShape = SHAPE) -> Log:
    fd = create_memory("log", shape.head_bytes)
    log = Log(fd, shape, DeviceMemory(shape))
    os.close(fd)
    return log


def make_writer(log: Log) -> CudaLogWriter:
    return CudaLogWriter(log, log.blocks_address, words_address(log), 64, Late())


class DeviceOwner(Owner):
    """A pool on the device, which is the log's blocks."""

    def make_pool(self, in_log: bool) -> np.ndarray:
        return as_pool(self.log.elsewhere.bytes, self.shape)

    def make_writer(self) -> CudaLogWriter:
        return make_writer(self.log)


def owners_of(*names: str) -> tuple[DeviceOwner, Owner]:
    owners = DeviceOwner(device_log(), True), Owner(new_log(SHAPE), False)
    for owner in owners:
        owner.streams = {name: Stream(index) for index, name in enumerate(names)}
    return owners


def test_a_log_without_blocks():
    log = device_log()
    assert len(log.blocks) == 0 and log.blocks_address == log.elsewhere.address
    with pytest.raises(AssertionError):
        log.count_intact([0], 1, chains([1]))
    log.close()
    log.close()
    assert log.elsewhere.is_closed
    with pytest.raises(AssertionError):
        log.words([0], 1)
    fd = create_memory("log", SHAPE.head_bytes - 4096)
    with pytest.raises(ValueError, match="this memory has"):
        Log(fd, SHAPE, DeviceMemory(SHAPE))
    os.close(fd)


def test_steps_are_logged_as_by_the_host():
    device, host = owners_of("a", "b")
    for tokens in ({"a": [1, 2, 3, 4, 5], "b": [6]}, {"b": [7]}, {}, {"a": [*range(9)], "b": [8, 9]}):
        for owner in (device, host):
            owner.step(tokens)
    for name in "ab":
        device.commit(name)
        host.commit(name)
    assert np.array_equal(words_of(device.log), words_of(host.log))
    assert device.log.records() == host.log.records()


def test_the_side_lags_by_one_step_at_most():
    device, host = owners_of("a")
    device.step({"a": [1, 2, 3]})
    host.step({"a": [1, 2, 3]})
    assert not words_of(device.log).any()
    device.step({"a": [4]})
    assert np.array_equal(words_of(device.log), words_of(host.log))
    device.commit("a")
    assert np.count_nonzero(words_of(device.log)) == 4


def test_an_abandoned_step():
    device, host = owners_of("a")
    for owner in (device, host):
        owner.step({"a": [1, 2]})
        owner.begin({"a": [3]})
        owner.writer.abandon()
        owner.step({"a": [3, 4]})
        owner.commit("a")
    assert np.array_equal(words_of(device.log), words_of(host.log))


@pytest.mark.parametrize("at_once", [4, 8, 8192])
@pytest.mark.parametrize("broken", [None, 0, 7, 8, 10])
def test_restoring(monkeypatch, at_once, broken):
    monkeypatch.setattr(cuda_writer, "_TOKENS_AT_ONCE", at_once)
    owner, _ = owners_of("a")
    owner.step({"a": [*range(11)]})
    owner.commit("a")
    blocks = owner.streams["a"].blocks
    if broken is not None:
        owner.pool[blocks[broken // 4], 2, 1, broken % 4, 31] ^= 1
    heir, chains_T = DeviceOwner(device_log(), True), chains(range(11))
    expected = 11 if broken is None else broken
    assert owner.writer.count_intact(blocks, 11, chains_T) == expected
    assert heir.writer.copy_in(owner.log, blocks, 11, chains_T, [5, 9, 2]) == expected
    assert heir.writer.count_intact([5, 9, 2], 11, chains_T) == expected
    for i in range(expected):
        assert np.array_equal(heir.pool[[5, 9, 2][i // 4], :, :, i % 4], kv_of(chains_T, SHAPE)[i])
    assert heir.writer.copy_in(owner.log, [], 0, chains_T, []) == 0


def test_a_host_reads_what_a_device_wrote():
    """The same log, byte for byte: only the place of its blocks differs."""
    device, host = owners_of("a")
    device.step({"a": [1, 2, 3, 4, 5]})
    device.commit("a")
    host.log.blocks[:] = device.log.elsewhere.bytes.tobytes()
    words_of(host.log)[:] = words_of(device.log)
    host.writer.commit(0, key_of("a"), 5, device.streams["a"].blocks, 0)
    assert Heir(new_log(SHAPE), in_log=False).restore(host.log, "a", [1, 2, 3, 4, 5]) == 5


@pytest.mark.parametrize("has_mirror", [False, True], ids=["anchor", "mirror"])
def test_a_new_writer_has_changed_nothing(has_mirror):
    """It has run all its kernels, perhaps over what a predecessor has left, or out of reach of its log."""
    log = new_log(SHAPE) if has_mirror else device_log()
    pool = log.elsewhere.bytes if not has_mirror else np.zeros(SHAPE.num_blocks * SHAPE.block_bytes, np.uint8)
    pool[:] = np.random.default_rng(1).integers(256, size=pool.size)
    before, side = pool.copy(), Late()
    mirror = SimpleNamespace(num_blocks=0) if has_mirror else None
    writer = CudaLogWriter(log, pool.ctypes.data, words_address(log), 64, side, mirror)
    assert not side.queued and np.array_equal(pool, before)
    assert not words_of(log).any() and not any(log.blocks) and not writer.log.records()


# with an engine


class DeviceToy(LoggedToy):
    """`old`: whose memory it has."""

    def __init__(self, old: "DeviceToy | None" = None, **overrides: object) -> None:
        self.elsewhere = old.elsewhere if old is not None else None
        memory = os.dup(old.memory) if old is not None else None
        super().__init__(make_config(**{"num_blocks": 64, **overrides}), True, memory)

    def open_log(self) -> Log:
        self.elsewhere = self.elsewhere or DeviceMemory(self.shape)
        return Log(self.memory, self.shape, self.elsewhere)

    def pool_memory(self) -> memoryview:
        return memoryview(self.elsewhere.bytes)

    def make_writer(self) -> CudaLogWriter:
        return make_writer(self.log)


def step(toy: LoggedToy, streams: dict[str, list[int]]) -> None:
    for output in toy.engine.step(meanwhile=toy.engine.log_step).outputs:
        streams.setdefault(output.id, []).append(output.token)


@pytest.mark.parametrize("is_in_place", [False, True], ids=["elsewhere", "in place"])
def test_streams_go_on(is_in_place):
    """With commits that come late, abandoned steps and shared prefixes; and on again after a second death."""
    specs = [spec(f"r{i}", [*range(10), *range(2 * i)], max_tokens=14, seed=i) for i in range(3)]
    streams: dict[str, list[int]] = {}
    toy = DeviceToy()
    for request in specs:
        toy.engine.add(request)
    for num_steps in (6, 5, 100):
        for i in range(num_steps):
            if not toy.engine.has_work:
                break
            if i == 2:
                toy.model.fail_next = True
                with pytest.raises(StepAbandoned):
                    toy.engine.step()
            step(toy, streams)
        toy.engine.check()
        if not toy.engine.has_work:
            break
        toy.engine.log_step()
        old, toy = toy, DeviceToy(toy if is_in_place else None)
        for request in specs:
            known = streams[request.id]
            toy.engine.add(request.after(known), toy.find(old.log, request.id))
        num_known = sum(len(request.prompt) + len(streams[request.id]) - 1 for request in specs)
        step(toy, streams)
        stats = toy.engine.stats()
        assert stats.num_broken_tokens == 0
        assert stats.num_restored_tokens + stats.prefix_cache_hits == num_known, "nothing is computed again"
    assert streams == {request.id: run_alone(request) for request in specs}


@pytest.mark.parametrize("at_once", [8, *(pytest.param(n, marks=pytest.mark.long) for n in (24, 1 << 20))])
def test_many_streams_in_few_launches(monkeypatch, at_once):
    """Streams of all lengths; one is damaged in the middle, which is nobody else's loss."""
    monkeypatch.setattr(cuda_writer, "_TOKENS_AT_ONCE", at_once)
    large = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_prefill_while_decoding": 64}
    old, new, streams = DeviceToy(**large), DeviceToy(**large, enable_prefix_caching=False), {}
    specs = [spec(f"r{i}", [*range(i, 3 * i + 5)], max_tokens=9, seed=i) for i in range(6)]
    for request in specs:
        old.engine.add(request)
    for _ in range(3):
        step(old, streams)
    old.engine.log_step()
    damaged = old.log.find(key_of("r4"))
    words_of(old.log)[damaged.blocks[1] * old.shape.block_size + 2] ^= 1
    launches, bring = [], kernels.bring
    monkeypatch.setattr(kernels, "bring", lambda *arguments: launches.append(bring(*arguments)))
    for request in specs:
        take_over(new, old, request, streams)
    num_known = {request.id: len(request.prompt) + len(streams[request.id]) - 1 for request in specs}
    step(new, streams)
    restored = {sequence.id: sequence.num_restored for sequence in new.engine.scheduler.running}
    assert restored == num_known | {"r4": old.shape.block_size + 2}
    assert len(launches) == 1 if at_once > 24 else len(launches) > 1
    while new.engine.has_work:
        step(new, streams)
    new.engine.log_step()
    new.engine.check()
    assert streams == {request.id: run_alone(request) for request in specs}


def four_copies(monkeypatch, broken: int) -> tuple[DeviceOwner, list[Copy]]:
    """Of streams of 8 tokens, two of which go together; of the third this token is broken."""
    monkeypatch.setattr(cuda_writer, "_TOKENS_AT_ONCE", 16)
    owner, _ = owners_of(*"abcd")
    owner.step({name: [*range(i, i + 8)] for i, name in enumerate("abcd")})
    for name in "abcd":
        owner.commit(name)
    third = owner.streams["c"].blocks
    owner.pool[third[broken // 4], 2, 1, broken % 4, 31] ^= 1
    copies = [
        Copy(owner.log, owner.streams[name].blocks, 8, chains(range(i, i + 8)), [2 * i, 2 * i + 1])
        for i, name in enumerate("abcd")
    ]
    return DeviceOwner(device_log(), True), copies


def test_the_next_batch_is_copied_while_the_caller_looks_at_the_last(monkeypatch):
    heir, copies = four_copies(monkeypatch, broken=5)
    side, results = heir.writer._side, heir.writer.copy_in_many(iter(copies))
    assert next(results) == 8 and len(side.queued) == 1, "the other two are on their way"
    assert heir.writer.copy_in(*copies[0][:4], [10, 11]) == 8, "with the same buffers"
    assert heir.writer.count_intact([10, 11], 8, copies[0].chains) == 8
    assert list(results) == [8, 5, 8]
    for copy, num_right in zip(copies, (8, 8, 5, 8), strict=True):
        assert heir.writer.count_intact(copy.blocks, 8, copy.chains) == num_right


def test_nothing_is_copied_after_the_caller_has_stopped(monkeypatch):
    heir, copies = four_copies(monkeypatch, broken=5)
    results = heir.writer.copy_in_many(iter(copies))
    next(results)
    results.close()
    assert heir.writer._side.queued == []
    assert heir.writer.copy_in(*copies[3]) == 8


@pytest.mark.parametrize("num_more", [0, 1, 3])
def test_streams_that_just_fit_come_back_in_one_step(monkeypatch, num_more):
    """The blocks that are taken for the next streams are not missed when these are admitted."""
    monkeypatch.setattr(cuda_writer, "_TOKENS_AT_ONCE", 16)
    large = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_prefill_while_decoding": 64}
    specs = [spec(f"r{i}", [*range(i, i + 9 + i % 4)], max_tokens=2, seed=i) for i in range(6)]
    old, streams = DeviceToy(**large), {}
    for request in specs:
        old.engine.add(request)
    step(old, streams)
    old.engine.log_step()
    num_needed = sum(-(-(len(request.prompt) + 1) // old.shape.block_size) for request in specs)
    new = DeviceToy(**large, num_blocks=num_needed + num_more, enable_prefix_caching=False)
    for request in specs:
        take_over(new, old, request, streams)
    step(new, streams)
    stats = new.engine.stats()
    assert stats.num_restored_tokens == sum(len(request.prompt) for request in specs) and stats.num_preemptions == 0
    assert streams == {request.id: run_alone(request) for request in specs}
    new.engine.check()


def test_what_is_restored_into_the_blocks_of_a_stream_that_has_just_ended_stays_in_the_log():
    """The end of that one is logged late: not so late that its words are written over those of the other."""
    old, toy, streams = DeviceToy(), DeviceToy(num_blocks=4, enable_prefix_caching=False), {}
    ended, moved = spec("a", [*range(11)], max_tokens=3), spec("b", [*range(20, 33)], max_tokens=3)
    old.engine.add(moved)
    step(old, streams)
    old.engine.log_step()
    toy.engine.add(ended)
    while toy.engine.has_work:
        step(toy, streams)  # what the last one has computed is not settled
    take_over(toy, old, moved, streams)
    step(toy, streams)
    toy.engine.log_step()
    assert toy.engine.stats().num_restored_tokens == 13 and toy.engine.stats().log_lag_tokens == 0
    toy.engine.check()


# a mirror


class MirrorToy(LoggedToy):
    """Its pool is on the device, its log is the host's; the device reaches as much of it as the test says."""

    def __init__(self, reach: int, **overrides: object) -> None:
        self.reach = SimpleNamespace(num_blocks=reach)
        super().__init__(make_config(**{"num_blocks": 64, **overrides}), False)

    def make_writer(self) -> CudaLogWriter:
        pool = self.model.pool.ctypes.data
        return CudaLogWriter(self.log, pool, words_address(self.log), 64, Late(), self.reach)


def take_over(toy: LoggedToy, old: LoggedToy, request: RequestSpec, streams: dict[str, list[int]]) -> None:
    known = streams.get(request.id, [])
    toy.engine.add(request.after(known), toy.find(old.log, request.id))


@pytest.mark.parametrize("bounce_bytes", [1, 1 << 20])
def test_streams_go_on_from_a_mirror(monkeypatch, bounce_bytes):
    """Which the device of the other worker does not reach."""
    monkeypatch.setattr(cuda_writer, "_BOUNCE_BYTES", bounce_bytes)
    monkeypatch.setattr(cuda_writer, "_MIRRORED_AT_ONCE", 24)
    old, new, streams = MirrorToy(64), MirrorToy(64), {}
    request = spec("a", [*range(30)], max_tokens=12)
    old.engine.add(request)
    for _ in range(6):
        step(old, streams)
    old.engine.log_step()
    assert old.log.find(key_of("a")).num_tokens == 30 + len(streams["a"]) - 1
    take_over(new, old, request, streams)
    step(new, streams)
    assert new.engine.stats().num_restored_tokens == 30 + len(streams["a"]) - 2
    while new.engine.has_work:
        step(new, streams)
    assert streams["a"] == run_alone(request)


def test_what_is_out_of_reach_is_not_logged():
    """Neither what is computed nor what is brought; and what comes after it in its stream does not count."""
    toy, streams = MirrorToy(2, enable_prefix_caching=False), {}
    first, second = spec("a", [*range(14)], max_tokens=9), spec("b", [*range(9)], max_tokens=9)
    toy.engine.add(first)
    step(toy, streams)
    toy.engine.log_step()
    assert toy.log.find(key_of("a")).num_tokens == 8 and toy.engine.stats().log_lag_tokens == 6
    assert not words_of(toy.log)[8:].any()
    toy.reach.num_blocks = 64
    toy.engine.add(second)
    for _ in range(3):
        step(toy, streams)
    toy.engine.log_step()
    assert toy.log.find(key_of("a")).num_tokens == 8, "of its fourth block the beginning is missing"
    assert toy.log.find(key_of("b")).num_tokens == 8 + len(streams["b"])
    heir = MirrorToy(1, enable_prefix_caching=False)
    for request in (first, second):
        take_over(heir, toy, request, streams)
    step(heir, streams)
    heir.engine.log_step()
    assert heir.engine.stats().num_restored_tokens == 8 + 8 + len(streams["b"]) - 1
    assert heir.log.find(key_of("a")).num_tokens == 4 and not words_of(heir.log)[4:].any()
    while heir.engine.has_work:
        step(heir, streams)
    assert streams == {request.id: run_alone(request) for request in (first, second)}


class Pages:
    """A driver that registers as much as it is allowed to."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.registered: list[tuple[int, int]] = []
        self.go_on = threading.Semaphore(0)

    def make_current(self) -> None: ...

    def register_host(self, address: int, num_bytes: int) -> int:
        self.go_on.acquire()
        if len(self.registered) == self.allowed:
            raise MemoryError("enough")
        self.registered.append((address, num_bytes))
        return address


@pytest.mark.parametrize("allowed", [0, 2, 99])
def test_memory_comes_into_reach(monkeypatch, allowed):
    monkeypatch.setattr(cuda_reach, "CHUNK_BYTES", 8192)
    log, pages = new_log(LogShape(**{**SHAPE.__dict__, "piece_bytes": 256})), Pages(allowed)
    reach = Reach(log, pages)
    assert reach.num_blocks == 0
    num_chunks = -(-len(log.blocks) // 8192)
    pages.go_on.release(num_chunks)
    reach.wait()
    num_bytes = sum(size for _, size in pages.registered)
    assert reach.num_blocks == min(num_bytes // log.shape.block_bytes, log.shape.num_blocks)
    assert (reach.num_blocks == log.shape.num_blocks) == (allowed == 99)
    at = log.blocks_address
    for address, size in pages.registered:
        assert address == at and size % 4096 == 0
        at += size
