"""The training-style checkpoint, as a baseline for `everserve bench checkpoint`: stand still and copy everything.

Nothing is ever restored from it.
"""

import ctypes

from everserve.engine.engine import Engine
from everserve.kvlog.log import Log


class PausingCheckpoint:
    """Every so many steps, all KV in use."""

    def __init__(self, engine: Engine, log: Log, pool_address: int, every: int) -> None:
        self._engine = engine
        self._log = log
        self._pool_address = pool_address
        self._every = every
        self._num_steps = 0

    def after_step(self) -> None:
        self._num_steps += 1
        if self._num_steps % self._every:
            return
        num_bytes = self._log.shape.block_bytes
        for block in {block for sequence in self._engine.scheduler.running for block in sequence.blocks}:
            at = block * num_bytes
            ctypes.memmove(self._log.blocks_address + at, self._pool_address + at, num_bytes)
