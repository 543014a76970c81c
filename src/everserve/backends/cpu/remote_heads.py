"""RemoteHeads: heads and their KV are in other processes (exchange.py says what happens when these fail).

The home of a stream keeps its block table; the workers that have its heads keep its KV, each in the blocks with the
same numbers. A layer is one call: all rows of the step go to every head, and attended rows come back, which are put
together in the order of heads. So bits do not depend on where heads are.

What all layers of a step have in common, positions, KV slots, block tables and chains, goes to each worker once per
step, before its first request (the *page*, csrc/lanes/lane.h).

If a head would have to be asked elsewhere than where its KV is, KvLost is raised (head_kv.py).
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from everserve.backends.cpu.exchange import Exchange
from everserve.backends.cpu.head_kv import HeadKv
from everserve.errors import KvLost
from everserve.seam.heads import StepRows


class RemoteHeads:
    """`Heads` over lanes. `call_of`: the call of each layer's heads; `answer_size`: floats of one row of one head;
    `row_bytes`: keys and values of one token in one head; `block_size`: tokens."""

    def __init__(
        self,
        exchange: Exchange,
        call_of: Mapping[int, int],
        num_heads: int,
        answer_size: int,
        *,
        row_bytes: int,
        block_size: int,
    ) -> None:
        self.kv = HeadKv(exchange, call_of, num_heads, row_bytes, block_size)
        self._exchange = exchange
        self._call_of = dict(call_of)
        self._num_heads = num_heads
        self._answer_size = answer_size
        self._index_of = {layer: index for index, layer in enumerate(call_of)}
        self._ids_TG = torch.empty(0, num_heads, dtype=torch.int32)
        self._batch: StepRows | None = None  # of the page; its tensors stay alive
        # Of the rows of the step at hand. Changed in place: C holds its address.
        self.chains_T = np.zeros(exchange.peers.shape.max_tokens, np.uint64)
        exchange.step.chains = self.chains_T.ctypes.data

    def __call__(self, layer: int, normed_TD: Tensor, batch: StepRows) -> Tensor:
        if batch is not self._batch:
            self._turn_page(batch)
        num_tokens = normed_TD.shape[0]
        if num_tokens > len(self._ids_TG):
            self._ids_TG = torch.arange(self._num_heads, dtype=torch.int32).repeat(num_tokens, 1)
        kv_at = self.kv.at.rank_LG[self._index_of[layer]].ctypes.data
        ids_TG = self._ids_TG[:num_tokens]
        try:
            self._exchange.call(self._call_of[layer], ids_TG, normed_TD, self._num_heads, self._answer_size, kv_at)
        except KvLost:
            self.kv.at.is_lost = True
            raise
        attended_TX = torch.empty(num_tokens, self._num_heads * self._answer_size)
        self._exchange.collect(attended_TX)
        return attended_TX

    def _turn_page(self, batch: StepRows) -> None:
        """Another step begins."""
        num_sequences, width = batch.block_tables_SB.shape
        num_rows = len(batch.positions_T)
        num_words = 4 * num_rows + num_sequences + 2 + num_sequences * width
        assert num_words <= self._exchange.peers.shape.page_words, "more sequences, or longer ones, than a page holds"
        for tensor in (batch.positions_T, batch.kv_slots_T, batch.query_starts_S, batch.block_tables_SB):
            assert tensor.dtype is torch.int32 and tensor.is_contiguous()
        step = self._exchange.step
        step.page += 1
        step.num_sequences, step.table_width = num_sequences, width
        step.positions, step.kv_slots = batch.positions_T.data_ptr(), batch.kv_slots_T.data_ptr()
        step.query_starts, step.block_tables = batch.query_starts_S.data_ptr(), batch.block_tables_SB.data_ptr()
        self._batch = batch
