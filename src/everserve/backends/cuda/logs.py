"""The KV log of an attention worker on a GPU, and the logs of other workers as its device reaches them.

anchor   the pool is device memory that outlives us; the log without its blocks is host memory, into which kernels
         write words
mirror   the pool is our own; kernels copy into the log, all of which is host memory, as far as that is registered
off      the pool is our own

Where heads are divided, their KV is in memory of expert seats, and so are its words: a log has records only. A mirror
is memory of its own (log/head_mirror.py).

Logs of other workers are mapped as soon as they are announced: a stream that needs one must not wait for that.
"""

import logging
import os
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from everserve.backends.cuda.build import make_pool
from everserve.backends.cuda.device import Device, tensor_at
from everserve.backends.cuda.lanes.head_kv import CudaHeadKv
from everserve.backends.cuda.log.head_fetcher import HeadFetcher
from everserve.backends.cuda.log.head_writer import HeadLogWriter
from everserve.backends.cuda.log.low_priority_stream import SideStream
from everserve.backends.cuda.log.registered_prefix import Reach
from everserve.backends.cuda.log.writer import CudaLogWriter
from everserve.backends.cuda.predecessor import Predecessor, own
from everserve.backends.cuda.reaching import make_head_fetcher
from everserve.engine.journal import Journal
from everserve.kvlog.layout import LogShape
from everserve.kvlog.log import Log, LogMismatch, NoBlocks, open_own
from everserve.memory.device import CudaError, Mapping
from everserve.model.decoder import Decoder
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Rank
from everserve.tables.memory import Kind
from everserve.worker.logs import KeptLogs, close_fds

log = logging.getLogger(__name__)


class CudaLogs:
    """`memory`: by kind; the descriptors of the log and of its blocks are ours."""

    def __init__(self, device: Device, memory: dict[Kind, int]) -> None:
        self._device = device
        self._divides = device.model.divides_heads
        self._shape = device.sizes.log if not self._divides else _records(device)
        self._own: Log | None = None
        if Kind.LOG in memory:
            fds = memory[Kind.LOG], memory.get(Kind.KV)
            self._own = open_own(lambda: self._open(*fds), fds[0], self._shape)
            close_fds(*fds)
            self._predecessor = Predecessor(self._own)

    def make_pool(self, decoder: Decoder) -> Tensor:
        if self._own is None or self._own.elsewhere is None:
            return make_pool(self._device, decoder)
        return tensor_at(self._own.blocks_address, decoder.kv_shape(self._shape.num_blocks, self._shape.block_size))

    def make_journal(self, kv_pool: Tensor) -> Journal | None:
        """When the pool is as it shall be, and before anything is computed in it."""
        own_log, device = self._own, self._device
        if own_log is None:
            return None
        self._predecessor.wait()
        own(own_log)
        head = device.driver.register_host(own_log.layout.base, self._shape.head_bytes)
        words, max_rows = head + own_log.layout.words_at, device.start.settings.engine.max_num_batched_tokens
        side = SideStream(device.torch_device)
        mirror = Reach(own_log, device.driver) if own_log.elsewhere is None else None
        return Journal(CudaLogWriter(own_log, kv_pool.data_ptr(), words, max_rows, side, mirror))

    def make_head_journal(self, kv: CudaHeadKv, fetcher: HeadFetcher) -> Journal:
        """The same where heads are divided."""
        assert self._own is not None, "without a log nothing is fetched"
        self._predecessor.wait()
        own(self._own)
        max_rows = self._device.start.settings.engine.max_num_batched_tokens
        return Journal(HeadLogWriter(self._own, kv, fetcher, max_rows))

    @property
    def is_on(self) -> bool:
        return self._own is not None

    def keep(self) -> KeptLogs:
        """What keeps the logs of other workers."""
        open_log = self._open_if_possible if self._own is not None else None
        shared_with = self._device.start.rank if self._divides else None
        return KeptLogs(open_log, self._own, opens_early=True, shares_blocks_with=shared_with)

    def _open_if_possible(self, fd: int, kv_fd: int | None) -> Log | None:
        """Memory of another device may be out of reach: then its streams are computed again."""
        try:
            return self._open(fd, kv_fd)
        except CudaError as error:
            log.warning("a KV cache cannot be reached, so its streams cannot be restored here: %s", error)
            return None

    def _open(self, fd: int, kv_fd: int | None) -> Log:
        shape = self._shape
        if self._divides:
            return Log(fd, shape, NoBlocks())
        if kv_fd is None:
            return Log(fd, shape)
        blocks = Mapping(self._device.driver, kv_fd, shape.num_blocks * shape.block_bytes)
        try:
            return Log(fd, shape, blocks)
        except LogMismatch:
            blocks.close()
            raise


def _records(device: Device) -> LogShape:
    assert device.start.capacity.devices is not None, "divided heads have devices"
    return device.sizes.records(device.start.capacity.devices)


@dataclass
class _Pool:
    """Instead of a `Mapping`: memory that torch owns."""

    address: int

    def close(self) -> None: ...


class _OutOfReach:
    """A mirror that is never touched."""

    num_blocks = 0


def rehearse_log(device: Device) -> None:
    """Load the kernels that a worker like this needs for its log, over one block. They depend on what a block is like,
    and on whether there is a mirror; where everything is does not matter. Nothing is right or in reach, so no kernel
    writes into the log."""
    kind = device.start.settings.log.mode
    if kind == "off":
        return
    if device.model.divides_heads:
        _rehearse_head_log(device)
        return
    shape = replace(device.sizes.log, num_blocks=1, num_records=1, max_blocks=1)
    pool = torch.zeros(shape.block_bytes, dtype=torch.uint8, device=device.torch_device)
    fd = os.memfd_create("everserve-rehearsal")
    os.ftruncate(fd, shape.num_bytes)
    rehearsed = Log(fd, shape, _Pool(pool.data_ptr()) if kind == "anchor" else None)
    os.close(fd)
    head = device.driver.register_host(rehearsed.layout.base, shape.head_bytes)
    CudaLogWriter(
        rehearsed,
        pool.data_ptr(),
        head + rehearsed.layout.words_at,
        device.start.settings.engine.max_num_batched_tokens,
        SideStream(device.torch_device),
        _OutOfReach() if kind == "mirror" else None,
    )
    torch.cuda.synchronize()
    device.driver.unregister_host(rehearsed.layout.base)
    rehearsed.close()


class _NoPeers:
    """No worker has any head."""

    num_changes = 0

    def __init__(self, num_calls: int, num_heads: int) -> None:
        self.owner_LN = np.full((num_calls, num_heads), -1, np.int32)

    def pool_of(self, rank: Rank) -> int:
        return 0

    def has_answered(self, rank: Rank) -> bool:
        return True


def _rehearse_head_log(device: Device) -> None:
    """Heads are nowhere, so nothing is touched."""
    model, shape, has_mirror = device.model, _records(device), device.start.settings.log.mode == "mirror"
    log_fd = _some_memory(shape.head_bytes)
    mirror_fd = _some_memory(device.sizes.mirror().num_bytes) if has_mirror else None
    rehearsed = Log(log_fd, shape, NoBlocks())
    fetcher = make_head_fetcher(device, mirror_fd, is_rehearsal=True)
    peers = _NoPeers(len(model.calls), model.num_kv_heads)
    kv = CudaHeadKv(peers, model.numbers_of(ShardKind.HEAD), model.num_kv_heads, fetcher)
    HeadLogWriter(rehearsed, kv, fetcher, device.start.settings.engine.max_num_batched_tokens)
    torch.cuda.synchronize()
    rehearsed.close()
    close_fds(log_fd, mirror_fd)


def _some_memory(num_bytes: int) -> int:
    """Memory that is paid for only where it is touched."""
    fd = os.memfd_create("everserve-rehearsal")
    os.ftruncate(fd, num_bytes)
    return fd
