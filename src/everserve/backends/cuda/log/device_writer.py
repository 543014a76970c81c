"""DeviceLogWriter: what writers of logs have in common whose streams' KV is on a device.

    step N      |============|
    step N + 1                |============|     meanwhile: finish() of step N, which is one launch on the side, for its
                                                 words; commits, when these are there; begin() of step N + 1

What a step has computed stays as it is until a later step writes there, and the words of that one are written after
these. So the side may lag, by one step at most: the next `finish` waits for it, and so does `commit_many`. Should a
slot be written again before its KV was summed, its word fits nothing: what is restored is shorter, never wrong.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from everserve.backends.cuda.log.low_priority_stream import Side
from everserve.kvlog.log import Log
from everserve.kvlog.writer import Commit, LogWriter


class Shared:
    """An array that the host fills and the device reads, or the other way round."""

    def __init__(self, size: int, dtype: torch.dtype, side: Side) -> None:
        self._tensor = torch.zeros(size, dtype=dtype, pin_memory=side.device.type == "cuda")
        self.view = self._tensor.numpy()
        self.address = self._tensor.data_ptr()


class DeviceLogWriter(LogWriter):
    """Records are written as by any other writer. A step has at most `max_rows` rows; `_log_rows` is what queues the
    launches for those that are staged."""

    is_on_device = True
    follows = False
    _log_rows: Callable[[], None]

    def __init__(self, log: Log, pool_address: int, max_rows: int, side: Side) -> None:
        super().__init__(log, pool_address)
        self._side = side
        self._count = Shared(1, torch.int32, side)
        self._slots_T = Shared(max_rows, torch.int32, side)
        self._chains_T = Shared(max_rows, torch.int64, side)

    def finish(self) -> NDArray[np.uint64]:
        assert not self.log.closed, "the log is closed"
        num_rows, num_seqs = int(self._writer.num_rows), self._num_seqs
        assert num_rows <= len(self._slots_T.view), "more rows than in any step"
        self._side.wait()
        if num_rows:
            step = self._writer  # C knows where the arrays are
            self._library.brief.es_log_chains_of_rows(
                step.tokens, step.query_starts, num_seqs, step.chains, self._chains_T.address
            )
            self._stage_rows(self._slots[:num_rows])
            self._count.view[0] = num_rows
            self._log_rows()
        self._writer.num_rows = 0
        return self._chains[:num_seqs].copy()

    def _stage_rows(self, slots_T: NDArray[np.int32]) -> None:
        """Where the rows of the step are, for the device."""
        is_reached_T = slots_T < self.reach * self.log.shape.block_size
        self._slots_T.view[: len(slots_T)] = np.where(is_reached_T, slots_T, -1)

    def commit_many(self, commits: Iterable[Commit]) -> None:
        self._side.wait()
        super().commit_many(commits)


def num_leading(is_right: NDArray[np.bool_]) -> int:
    """How many are, before the first that is not."""
    return len(is_right) if is_right.all() else int(is_right.argmin())
