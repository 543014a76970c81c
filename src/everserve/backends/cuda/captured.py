"""CapturedForward: a step is new contents for fixed addresses, and the replay of graphs.

    fill -> launch -> (meanwhile: the host does what can wait) -> see it through: wait, heal and go on, or done

Steps come in *buckets* of rows: a step goes into the smallest one that has room, the rest of it is padding. Everything
that may change between steps, or in one (which peers there are, where experts are), is read by the graphs from memory,
so nothing is ever captured again.

The device makes no decisions. A step stops in a layer if an expert does not answer: every later kernel finds the word
`stop` set and does nothing, so the index of that layer is all that is needed to go on. The `CapturedExperts` then
change the tables, send the rows again (the chain's aside) and launch the rest of the chain.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from everserve.backends.cuda.ops.ops import CudaOps
from everserve.backends.cuda.recorder import Chain, Recorder
from everserve.backends.cuda.report import StepReport
from everserve.backends.cuda.staging import Staging
from everserve.engine.batching import Rows
from everserve.errors import StepAbandoned
from everserve.model.decoder import Decoder
from everserve.seam.experts import Experts
from everserve.seam.heads import Heads
from everserve.worker.loading import Loading

_DECODING = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)  # rows
_MIXED = (64, 256, 512, 1024, 2048, 4096, 8192)


class _Bucket:
    def __init__(self, staging: Staging, chain: Chain, hidden_TD: Tensor, logits_LV: Tensor) -> None:
        self.staging = staging
        self.chain = chain
        self.hidden_TD = hidden_TD
        self.logits_LV = logits_LV
        self.lasted_ns = 0  # the last step in it


class LaunchedStep:
    """A step that was launched, from its first layer to its report. It may stop in between, any number of times."""

    def __init__(self, stream: torch.cuda.Stream, stop: Tensor, chain: Chain, report: StepReport, due_ns: int) -> None:
        self.report = report
        self.due_ns = due_ns  # on the monotonic clock
        self._stream = stream
        self._stop = stop
        self._chain = chain

    @contextmanager
    def stopped(self) -> Iterator[int]:
        """After a report that says so: the index of the MoE layer in which it stopped. Inside, kernels can be launched
        that do not belong to the step."""
        with torch.cuda.stream(self._stream):
            self._stop.zero_()
            yield self.report.stop - 1

    def go_on(self, moe_layer: int, send_again: bool) -> None:
        """From the answers of this layer on; `send_again`: its rows must be sent once more before that."""
        if send_again:
            self._chain.asides[moe_layer].replay()
        self._chain.launch(moe_layer + 1)
        self.report.num_due += 1


class CapturedExperts(Experts, Protocol):
    """`Experts` with calls that are recorded once, and replayed in every step."""

    def see_through(self, step: LaunchedStep) -> None:
        """Until it has ended as it should. StepAbandoned if it cannot; then it has stopped for good."""


class CapturedForward:
    """`Forward` on a device. Captured when it is made, which is told bucket by bucket. `kv`: the pool, or the heads
    that have one."""

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
        self._report = StepReport(max_num_seqs, self._ops.device)
        self._loading, progress = loading, loading.part("graphs")
        sizes = [(rows, False) for rows in _up_to(_DECODING, max_num_seqs)]
        sizes += [(rows, True) for rows in _up_to(_MIXED, max_num_batched_tokens)]
        self._buckets: list[_Bucket] = []
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

    def __call__(self, rows: Rows, meanwhile: Callable[[], None]) -> Tensor:
        bucket = self._bucket_for(rows)
        with torch.cuda.stream(self._stream):
            self._experts.begin_step(len(rows.tokens_T))
            bucket.staging.fill(rows)
            bucket.chain.launch()
            self._report.num_due += 1
        began_ns = time.monotonic_ns()
        meanwhile()
        due_ns = began_ns + bucket.lasted_ns
        try:
            self._experts.see_through(
                LaunchedStep(self._stream, self._ops.words.stop, bucket.chain, self._report, due_ns)
            )
            bucket.lasted_ns = time.monotonic_ns() - began_ns
        except StepAbandoned:  # it has stopped. After any other error the device may wait for a flag for ever
            self._experts.end_step()
            raise
        self._experts.end_step()
        num_logits = len(rows.logits_rows_L)
        if num_logits > len(bucket.logits_LV):  # logprobs of prompts: rare
            wanted = torch.tensor(rows.logits_rows_L, dtype=torch.int32, device=self._ops.device)
            return self._decoder.logits(bucket.hidden_TD, wanted)
        logits_LV = bucket.logits_LV[:num_logits]
        self._ops.note_greedy(logits_LV, self._report.tokens(num_logits))
        return logits_LV

    def _bucket_for(self, rows: Rows) -> _Bucket:
        num_rows, num_seqs = len(rows.tokens_T), len(rows.block_tables_SB)
        is_mixed = num_rows > num_seqs
        return next(
            bucket
            for bucket in self._buckets
            if bucket.staging.num_rows >= num_rows and (bucket.staging.is_mixed or not is_mixed)
        )

    def _capture(self, num_rows: int, is_mixed: bool) -> _Bucket:
        config = self._decoder.config
        group = config.num_heads // config.num_kv_heads
        staging = Staging(
            num_rows, self._max_num_seqs, self._max_blocks, self._block_size, group, is_mixed, self._ops.device
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
        return _Bucket(staging, chain, hidden_TD, logits_LV)

    def _run(self, staging: Staging) -> tuple[Tensor, Tensor]:
        hidden_TD = self._decoder.run(staging.batch, self._kv, self._experts)
        logits_LV = self._decoder.logits(hidden_TD, staging.batch.logits_rows_L)
        self._report.launch(self._ops.words, self._ops.greedy(logits_LV))
        return hidden_TD, logits_LV


def _up_to(sizes: tuple[int, ...], limit: int) -> list[int]:
    """Those below the limit, and the limit."""
    return [*(size for size in sizes if size < limit), limit]
