"""ExpertMemory: expert weights in host memory, with the table that says what is there.

Any process that has the two descriptors can copy an expert out of it, while its owner changes slots:

    find the expert in the table -> copy and sum -> read its entry again -> compare entry and checksum

What fails the comparison was changed during the copy, or is damaged; the copy is not used.
"""

import mmap
import os
from collections.abc import Sequence

import numpy as np

from everserve.memory.weights import copying
from everserve.memory.weights.slot_table import SlotTable
from everserve.plan.expert_memory import ExpertMemoryPlan
from everserve.tables.slots import Place


class ExpertMemory:
    """The memory of one seat, or the backup. Takes over both descriptors: the weights, and their table."""

    def __init__(self, plan: ExpertMemoryPlan, fds: Sequence[int], *, read_only: bool = False) -> None:
        weights_fd, state_fd = fds
        try:
            size = os.fstat(weights_fd).st_size
            if size < plan.num_bytes:
                raise ValueError(f"these weights have {plan.num_bytes} bytes, this memory has {size}")
            self.plan = plan
            self.table = SlotTable(state_fd, plan.num_layers, plan.num_slots, read_only=read_only)
            access = mmap.ACCESS_READ if read_only else mmap.ACCESS_WRITE
            # Kept alive by every array of it.
            self.data = np.frombuffer(mmap.mmap(weights_fd, plan.num_bytes, access=access), dtype=np.uint8)
        finally:
            os.close(weights_fd)
            os.close(state_fd)

    def close(self) -> None:
        self.table.close()

    def address(self, place: Place) -> int:
        return int(self.data.ctypes.data) + self.plan.offset(place)

    def copy_out(self, call_index: int, expert: int, to: int, num_bytes: int, *, rest_percent: int = 0) -> int | None:
        """Copy an expert to this address. Returns its checksum; None if it is not here, or changed meanwhile."""
        found = self.table.find(call_index, expert)
        if found is None:
            return None
        place, entry = found
        checksum = copying.copy(to, self.address(place), num_bytes, rest_percent=rest_percent)
        return checksum if checksum == entry.checksum and self.table.read(place) == entry else None
