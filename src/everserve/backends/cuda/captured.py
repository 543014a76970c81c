"""CapturedForward: a step is new contents for fixed addresses, and the replay of graphs.

Steps come in *buckets* of rows: a step goes into the smallest one that has room, the rest of it is padding. Everything
that may change between steps, or in one (which peers there are, where experts are), is read by the graphs from memory,
so nothing is ever captured again.

How steps end, and what is done about one that stops in the middle: step_queue.py.
"""

import torch
from torch import Tensor

from everserve.backends.cuda.ops.ops import CudaOps
from everserve.backends.cuda.recorder import Recorder
from everserve.backends.cuda.report import StepReport
from everserve.backends.cuda.staging import Staging
from everserve.backends.cuda.step_queue import Bucket, CapturedExperts, LaunchedStep, StepQueue
from everserve.backends.cuda.take_in import take_in
from everserve.engine.batching import Rows
from everserve.model.decoder import Decoder
from everserve.seam.heads import Heads
from everserve.worker.loading import Loading

_DECODING = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)  # rows
_MIXED = (64, 256, 512, 1024, 2048, 4096, 8192)


class CapturedForward:
    """`Forward` on a device. Captured when it is made, which is told bucket by bucket. `kv`: the pool, or the heads
    that have one."""

    chooses = True

    def __init__(
        self,
        decoder: Decoder,
        kv: Tensor | Heads,
        experts: CapturedExperts,
        recorder: Recorder,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_blocks: int,
        block_size: int,
        loading: Loading,
    ) -> None:
        assert isinstance(decoder.ops, CudaOps)
        self._decoder = decoder
        self._ops = decoder.ops
        self._kv = kv
        self._block_size = block_size
        self._experts = experts
        self._recorder = recorder
        self._stream = recorder.stream
        self._max_num_seqs = max_num_seqs
        self._max_blocks = max_blocks
        self._launches_ahead = self.draws = decoder.ops.launches_ahead
        self._report = StepReport(max_num_seqs, self._ops.device, num_places=2 if self._launches_ahead else 1)
        self._queue = StepQueue(
            self._stream, self._ops.words.stop, self._report, experts, decoder.logits, decoder.pooled
        )
        self._loading, progress = loading, loading.part("graphs")
        sizes = [(rows, False) for rows in _up_to(_DECODING, max_num_seqs)]
        sizes += [(rows, True) for rows in _up_to(_MIXED, max_num_batched_tokens)]
        self._buckets: list[Bucket] = []
        for done, (num_rows, is_mixed) in enumerate(
            reversed(sizes)
        ):  # the largest first: the others fit into its memory
            self._buckets.insert(0, self._capture(num_rows, is_mixed))
            progress(done + 1, len(sizes))

    @property
    def num_captures(self) -> int:
        return self._recorder.num_captures

    def use_mask(self, masked: bytes) -> None:
        self._decoder.masks.use(masked)

    @property
    def may_go_ahead(self) -> bool:
        return self._launches_ahead and self._experts.may_go_ahead

    def launch(self, rows: Rows) -> LaunchedStep:
        return self._queue.launch(self._bucket_for(rows), rows)

    def _bucket_for(self, rows: Rows) -> Bucket:
        num_rows, num_seqs = len(rows.tokens_T), len(rows.block_tables_SB)
        is_mixed = num_rows > num_seqs
        return next(
            bucket
            for bucket in self._buckets
            if bucket.staging.num_rows >= num_rows and (bucket.staging.is_mixed or not is_mixed)
        )

    def _capture(self, num_rows: int, is_mixed: bool) -> Bucket:
        config = self._decoder.config
        group = config.num_heads // config.num_kv_heads
        staging = Staging(
            num_rows, self._max_num_seqs, self._max_blocks, self._block_size, group, is_mixed, self._ops.device,
            self._launches_ahead,
        )  # fmt: skip
        with self._loading.phase("kernels"), torch.cuda.stream(self._stream):
            self._run(staging)  # a warm-up: they are compiled and loaded
            self._report.num_due += 1
            torch.cuda.synchronize()
        with self._loading.phase("graphs"):
            with self._recorder.record() as chain:
                hidden_TD, logits_LV = self._run(staging)
            with torch.cuda.stream(self._stream):
                self._report.num_due += chain.rehearse()  # a warm-up too
            torch.cuda.synchronize()
        return Bucket(staging, chain, hidden_TD, logits_LV)

    def _run(self, staging: Staging) -> tuple[Tensor, Tensor]:
        if self._launches_ahead:
            take_in(staging, self._report.chosen_L, self._ops.words.stop)
        hidden_TD = self._decoder.run(staging.batch, self._kv, self._experts)
        logits_LV = self._decoder.logits(hidden_TD, staging.batch.logits_rows_L)
        self._report.launch(self._ops.words, self._ops.choose_in_step(logits_LV, staging.draws_L5))
        return hidden_TD, logits_LV


def _up_to(sizes: tuple[int, ...], limit: int) -> list[int]:
    """Those below the limit, and the limit."""
    return [*(size for size in sizes if size < limit), limit]
