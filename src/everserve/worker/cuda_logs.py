"""The KV log of an attention worker on a GPU, and those of others as its device reaches them.

anchor   the pool is device memory that outlives us; the log without its blocks is host memory, into which kernels
         write words
mirror   the pool is our own; kernels copy into the log, all of which is host memory, as far as that is registered
off      the pool is our own
"""

from torch import Tensor

from everserve.engine.journal import Journal
from everserve.kvlog.cuda.reach import Reach
from everserve.kvlog.cuda.side import SideStream
from everserve.kvlog.cuda.writer import CudaLogWriter
from everserve.kvlog.log import Log
from everserve.model.decoder import Decoder
from everserve.runtime.cuda.driver import Mapping
from everserve.runtime.memories import KV, LOG
from everserve.worker.cuda_build import Device, make_pool, tensor_at
from everserve.worker.logs import KeptLogs, close_fds


class CudaLogs:
    """`memory`: by kind; the descriptors of the log and of its blocks are ours."""

    def __init__(self, device: Device, memory: dict[str, int]) -> None:
        self._device = device
        self._shape = device.sizes.log
        self._own: Log | None = None
        if LOG in memory:
            fds = memory[LOG], memory.get(KV)
            self._own = self._open(*fds)
            close_fds(*fds)

    def make_pool(self, decoder: Decoder) -> Tensor:
        if self._own is None or self._own.elsewhere is None:
            return make_pool(self._device, decoder)
        return tensor_at(self._own.blocks_address, decoder.kv_shape(self._shape.num_blocks, self._shape.block_size))

    def make_journal(self, kv_pool: Tensor) -> Journal | None:
        """When the pool is as it shall be, and before anything is computed in it."""
        log, device = self._own, self._device
        if log is None:
            return None
        head = device.driver.register_host(log.layout.base, self._shape.head_bytes)
        max_rows = device.start.settings.max_num_batched_tokens
        side = SideStream(device.torch_device)
        mirror = Reach(log, device.driver) if log.elsewhere is None else None
        return Journal(CudaLogWriter(log, kv_pool.data_ptr(), head + log.layout.words_at, max_rows, side, mirror))

    def keep(self) -> KeptLogs:
        """For those of others."""
        return KeptLogs(self._open if self._own is not None else None, self._own)

    def _open(self, fd: int, kv_fd: int | None) -> Log:
        shape = self._shape
        if kv_fd is None:
            return Log(fd, shape)
        return Log(fd, shape, Mapping(self._device.driver, kv_fd, shape.num_blocks * shape.block_bytes))
