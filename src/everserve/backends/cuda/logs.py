"""The KV log of an attention worker on a GPU, and the logs of other workers as its device reaches them.

anchor   the pool is device memory that outlives us; the log without its blocks is host memory, into which kernels
         write words
mirror   the pool is our own; kernels copy into the log, all of which is host memory, as far as that is registered
off      the pool is our own

Logs of other workers are mapped as soon as they are announced: a stream that needs one must not wait for that.
"""

import logging
import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from everserve.backends.cuda.build import make_pool
from everserve.backends.cuda.device import Device, tensor_at
from everserve.backends.cuda.log.low_priority_stream import SideStream
from everserve.backends.cuda.log.registered_prefix import Reach
from everserve.backends.cuda.log.writer import CudaLogWriter
from everserve.backends.cuda.predecessor import Predecessor, own
from everserve.engine.journal import Journal
from everserve.kvlog.log import Log
from everserve.memory.device import CudaError, Mapping
from everserve.model.decoder import Decoder
from everserve.tables.memory import Kind
from everserve.worker.logs import KeptLogs, close_fds

log = logging.getLogger(__name__)


class CudaLogs:
    """`memory`: by kind; the descriptors of the log and of its blocks are ours."""

    def __init__(self, device: Device, memory: dict[Kind, int]) -> None:
        self._device = device
        self._shape = device.sizes.log
        self._own: Log | None = None
        if Kind.LOG in memory:
            fds = memory[Kind.LOG], memory.get(Kind.KV)
            self._own = self._open(*fds)
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

    def keep(self) -> KeptLogs:
        """For the logs of other workers."""
        open_log = self._open_if_possible if self._own is not None else None
        return KeptLogs(open_log, self._own, opens_early=True)

    def _open_if_possible(self, fd: int, kv_fd: int | None) -> Log | None:
        """Memory of another device may be out of reach: then its streams are computed again."""
        try:
            return self._open(fd, kv_fd)
        except CudaError as error:
            log.warning("a Kind.KV cache cannot be reached, so its streams cannot be restored here: %s", error)
            return None

    def _open(self, fd: int, kv_fd: int | None) -> Log:
        shape = self._shape
        if kv_fd is None:
            return Log(fd, shape)
        return Log(fd, shape, Mapping(self._device.driver, kv_fd, shape.num_blocks * shape.block_bytes))


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
