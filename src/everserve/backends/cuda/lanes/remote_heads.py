"""CudaHeads: heads and their KV are in other processes, and rows go there and back without the host.

Recorded, once per step:   turn the page: positions, KV slots, tables and items of all rows into every lane
          for each layer:  all rows to all heads, as to experts (calls.py); attended rows, in the order of heads

What happens when a worker fails is up to `CudaExperts`, which sees the whole step through. A head's KV is in one place
only (head_kv.py).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from everserve.backends.cuda.device_batch import DeviceBatch
from everserve.backends.cuda.lanes.calls import Calls
from everserve.backends.cuda.lanes.page import PageShape
from everserve.backends.cuda.lanes.send_heads import collect_heads, turn_page
from everserve.backends.cuda.ops.ops import CudaOps
from everserve.seam.heads import StepRows


class CudaHeads:
    """`Heads` over lanes. `call_of`: the call of each layer's heads; `answer_size`: elements of one row of one head."""

    def __init__(
        self,
        calls: Calls,
        ops: CudaOps,
        call_of: Mapping[int, int],
        num_heads: int,
        answer_size: int,
        page: PageShape,
    ) -> None:
        self._calls = calls
        self._ops = ops
        self._call_of = dict(call_of)
        self._first_layer = min(call_of)
        self._num_heads = num_heads
        self._answer_size = answer_size
        self._page = page
        self._ids_TG = torch.empty(0)  # of the step at hand

    def __call__(self, layer: int, normed_TD: Tensor, batch: StepRows) -> Tensor:
        call = self._call_of[layer]
        if layer == self._first_layer:
            assert isinstance(batch, DeviceBatch)
            self._ops.use_rows(batch)
            self._ids_TG, _ = self._ops.all_slices(batch.positions_T, self._num_heads)
            turn_page(self._calls.state, batch, self._page)
        y_row_TG = self._calls(call, self._ids_TG, normed_TD, to_all=True)
        return collect_heads(self._calls.state, y_row_TG, self._answer_size, call)
