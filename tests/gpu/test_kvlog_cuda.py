"""KV in device memory that outlives its worker: one process logs and is killed, another one restores.

The process that runs the tests never uses CUDA itself.
"""

import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import numpy as np
import pytest

from everserve.kvlog.chains import START, chains, key_of
from everserve.kvlog.layout import LogShape
from everserve.kvlog.log import Log
from everserve.memory.device import Driver, Mapping
from everserve.memory.owned import create_memory
from tests.gpu.actors import Actor
from tests.gpu.needs import DEVICE
from tests.support.logs import Heir, kv_of, new_log

pytestmark = [*DEVICE, pytest.mark.timeout(180)]
SHAPE = LogShape(
    num_blocks=96, block_size=64, num_layers=6, num_planes=8, piece_bytes=256, num_records=4, max_blocks=64
)
LARGE = replace(SHAPE, num_blocks=160, num_layers=48, max_blocks=128)
TOKENS = [*range(1000, 3000)]


class Worker:
    """A pool on the device, and its log: the pool itself (`kv_fd`), or a mirror."""

    def __init__(self, fd: int, kv_fd: int | None, shape: LogShape) -> None:
        import torch  # noqa: PLC0415 (in the actors only)

        from everserve.backends.cuda.build import tensor_at  # noqa: PLC0415
        from everserve.backends.cuda.log.low_priority_stream import SideStream  # noqa: PLC0415
        from everserve.backends.cuda.log.registered_prefix import Reach  # noqa: PLC0415
        from everserve.backends.cuda.log.writer import CudaLogWriter  # noqa: PLC0415

        device = torch.device("cuda", 0)
        torch.zeros(1, device=device)
        self.shape = shape
        self.driver = Driver()
        self.log = self.open(fd, kv_fd)
        dims = (shape.num_blocks, shape.num_layers, shape.num_planes, shape.block_size, shape.piece_bytes // 2)
        if kv_fd is not None:
            pool = tensor_at(self.log.blocks_address, dims)
        else:
            pool = torch.zeros(dims, dtype=torch.bfloat16, device=device)
        self.pool = pool.view(torch.int16)
        head = self.driver.register_host(self.log.layout.base, shape.head_bytes)
        self.mirror = Reach(self.log, self.driver) if kv_fd is None else None
        if self.mirror is not None:
            self.mirror.wait()
        words = head + self.log.layout.words_at
        self.writer = CudaLogWriter(self.log, self.pool.data_ptr(), words, 4096, SideStream(device), self.mirror)

    def open(self, fd: int, kv_fd: int | None) -> Log:
        num_bytes = self.shape.num_blocks * self.shape.block_bytes
        return Log(fd, self.shape, Mapping(self.driver, kv_fd, num_bytes) if kv_fd is not None else None)

    def compute(self, tokens: list[int], blocks: list[int]) -> None:
        """One step, of one stream from its beginning."""
        import torch  # noqa: PLC0415

        size, chains_T = self.shape.block_size, chains(tokens)
        slots_T = np.array([blocks[i // size] * size + i % size for i in range(len(tokens))], np.int32)
        starts, before = np.array([0, len(tokens)], np.int32), np.array([START], np.uint64)
        self.writer.begin(np.array(tokens, np.int32), slots_T, starts, before)
        for first in range(0, len(tokens), size):
            kv = torch.from_numpy(kv_of(chains_T[first : first + size], self.shape).copy().view(np.int16)).cuda()
            self.pool[blocks[first // size], :, :, : len(kv)] = kv.permute(1, 2, 0, 3)
        torch.cuda.synchronize()
        assert self.writer.finish()[0] == chains_T[-1]

    def kv(self, block: int) -> np.ndarray:
        """uint8 [block_size, layers, planes, piece_bytes]."""
        return self.pool[block].permute(2, 0, 1, 3).contiguous().cpu().numpy().view(np.uint8)


def write_and_wait(pipe: Connection, shape: LogShape, has_kv: bool) -> None:
    """Log a stream in device memory that it makes itself, pass the memory on, and wait to be killed."""
    fd = recv_handle(pipe)
    kv_fd = Driver().create(shape.num_blocks * shape.block_bytes) if has_kv else None
    worker = Worker(fd, kv_fd, shape)
    blocks = [(7 * i + 3) % shape.num_blocks for i in range(-(-len(TOKENS) // shape.block_size))]
    worker.compute(TOKENS, blocks)
    worker.writer.commit(2, key_of("a"), len(TOKENS), blocks, 0)
    if kv_fd is not None:
        pipe.send(("said", "descriptor"))
        send_handle(pipe, kv_fd, os.getppid())
    pipe.send(("said", "written"))
    pipe.poll(60)


def restore(pipe: Connection, shape: LogShape, has_kv: bool) -> None:
    """Take the stream over from there; then from a log in which something is wrong."""
    fd = recv_handle(pipe)
    kv_fd = recv_handle(pipe) if has_kv else None
    own_kv = Driver().create(shape.num_blocks * shape.block_bytes) if has_kv else None
    worker = Worker(create_memory("log", shape.num_bytes), own_kv, shape)
    source, chains_T, num = worker.open(fd, kv_fd), chains(TOKENS), len(TOKENS)
    record = source.find(key_of("a"))
    assert record is not None and record.num_tokens == num
    blocks = list(range(len(record.blocks)))
    began_s = time.perf_counter()
    assert worker.writer.copy_in(source, record.blocks, num, chains_T, blocks) == num
    took_s = time.perf_counter() - began_s
    assert worker.writer.count_intact(blocks, num, chains_T) == num
    size = shape.block_size
    for block in (0, len(blocks) // 2, len(blocks) - 1):
        wanted = chains_T[block * size : (block + 1) * size]
        assert np.array_equal(worker.kv(block)[: len(wanted)], kv_of(wanted, shape)), "the same bytes"
    wrong = chains_T.copy()
    wrong[777] ^= np.uint64(1)
    assert worker.writer.copy_in(source, record.blocks, num, wrong, blocks) == 777
    worker.pool[5, 1, 3, 9, 17] ^= 64
    worker.driver.synchronize(0)  # the stream of torch
    assert worker.writer.count_intact(blocks, num, chains_T) == (5 * size + 9 if has_kv else num)
    token_bytes = shape.block_bytes // size
    print(f"{num} tokens, {num * token_bytes / 1e6:.0f} MB in {took_s * 1e3:.2f} ms")
    pipe.send(("said", took_s))


@pytest.mark.parametrize("shape", [SHAPE, LARGE], ids=["6 layers", "48 layers"])
@pytest.mark.parametrize("has_kv", [True, False], ids=["anchor", "mirror"])
def test_another_process_restores(shape, has_kv):
    num_bytes = shape.head_bytes if has_kv else shape.num_bytes
    fd = create_memory("log", num_bytes)
    writer = Actor(write_and_wait, shape, has_kv)
    heir = None
    try:
        writer.give(fd)
        kv_fd = writer.take() if has_kv else None
        assert writer.hear(120) == "written"
        writer.kill()
        heir = Actor(restore, shape, has_kv)
        heir.give(fd)
        if kv_fd is not None:
            heir.give(kv_fd)
        assert heir.hear(120) > 0
        assert heir.hear() == "done"
        if not has_kv:
            check_on_the_host(fd, shape)
    finally:
        writer.end()
        if heir is not None:
            heir.end()


def check_on_the_host(fd: int, shape: LogShape) -> None:
    """What the device wrote into a mirror is what the host would have written."""
    log = Log(fd, shape)
    heir = Heir(new_log(shape), in_log=False)
    assert heir.restore(log, "a", TOKENS) == len(TOKENS)
