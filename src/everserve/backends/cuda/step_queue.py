"""StepQueue: steps on their way, from their launch to their end.

    fill -> launch -> (the host does what can wait) -> see it through: wait, heal and go on, or done

The device makes no decisions. A step stops in a layer if an expert does not answer: every later kernel finds the word
`stop` set and does nothing, so the index of that layer is all that is needed to go on. The `CapturedExperts` then
change the tables, send the rows again (the chain's aside) and launch the rest of the chain.

A step may be launched behind another one (engine/ahead.py). If that one stops, every kernel of this one finds the word
set too, from the first to the report: it was launched for nothing, and is launched again behind the rest of the other.

    N stops in a layer | N + 1, nothing | host: heal; zero `stop` | rest of N | N + 1 again
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from everserve.backends.cuda.recorder import Chain
from everserve.backends.cuda.report import ReportOf, StepReport
from everserve.backends.cuda.staging import Staging
from everserve.backends.cuda.waiting import load
from everserve.engine.batching import Rows
from everserve.errors import StepAbandoned
from everserve.seam.experts import Experts
from everserve.seam.outcomes import Outcome

_LOOK_EVERY_NS = 1_000_000_000


@dataclass
class Bucket:
    """Steps of up to so many rows: where these are put, what is launched, and what it writes."""

    staging: Staging
    chain: Chain
    hidden_TD: Tensor
    logits_LV: Tensor
    lasted_ns: int = 0  # the last step in it


class LaunchedStep:
    """A step that was launched, from its first layer to its report. It may stop in between, any number of times."""

    def __init__(self, queue: "StepQueue", bucket: Bucket, rows: Rows) -> None:
        self.rows = rows
        self.bucket = bucket
        self.launched_ns = time.monotonic_ns()
        self.due_ns = 0  # on the monotonic clock; known when all steps before it have ended
        self.report = ReportOf(queue.report, 0)  # its latest one
        self._queue = queue

    @property
    def is_last(self) -> bool:
        """No step was launched behind it."""
        return not self._queue.behind(self)

    def launch(self, first: int = 0) -> None:
        """Launches from this graph of its chain on, on the current stream."""
        self.bucket.chain.launch(first)
        self.report = self._queue.report.next()

    @property
    def due_s(self) -> float:
        return self._queue.due_ns(self) / 1e9

    def is_running_at(self, time_s: float) -> bool:
        return self._queue.is_running_at(self, round(time_s * 1e9))

    def read(self) -> Tensor | list[int]:
        return self._queue.read(self)

    def pooled(self, rows: list[int]) -> Tensor:
        return self._queue.pooled(self, rows)

    @contextmanager
    def stopped(self) -> Iterator[int]:
        """After a report that says so: the index of the MoE layer in which it stopped. Inside, kernels can be launched
        that do not belong to the step."""
        for behind in self._queue.behind(self):
            _await(behind.report)  # it does nothing, and waits for no flag: they are as this step has left them
        with torch.cuda.stream(self._queue.stream):
            self._queue.stop.zero_()
            yield self.report.stop - 1

    def go_on(self, moe_layer: int, send_again: bool) -> None:
        """Goes on from the answers of this layer on; `send_again`: its rows must be sent once more before that."""
        if send_again:
            self.bucket.chain.asides[moe_layer].replay()
        self.launch(moe_layer + 1)
        for behind in self._queue.behind(self):
            behind.launch()


class CapturedExperts(Experts, Protocol):
    """`Experts` with calls that are recorded once, and replayed in every step."""

    @property
    def may_go_ahead(self) -> bool:
        """Whether a step that is launched behind another one finds everything as it should be: nothing has changed
        since that one was launched."""

    def is_running_after(self, step: LaunchedStep, wait_ns: int) -> bool:
        """Wait so long. False, at once, when it has ended, or there is something to attend to."""

    def see_through(self, step: LaunchedStep) -> None:
        """Until it has ended as it should. StepAbandoned if it cannot; then it has stopped for good."""


class StepQueue:
    """One step, or one and the next. `logits(hidden_TD, rows_L)`: of more rows than a bucket has room for; `pooled`: of
    the rows that ask for it."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        stop: Tensor,
        report: StepReport,
        experts: CapturedExperts,
        logits: Callable[[Tensor, Tensor], Tensor],
        pooled: Callable[[Tensor, list[int]], Tensor],
    ) -> None:
        self.stream = stream
        self.stop = stop
        self.report = report
        self._experts = experts
        self._logits = logits
        self._pooled = pooled
        self._steps: list[LaunchedStep] = []
        self._ended_ns = 0  # the last one

    def launch(self, bucket: Bucket, rows: Rows) -> LaunchedStep:
        assert len(self._steps) < 2, "the step before the last one has not been read"
        step = LaunchedStep(self, bucket, rows)
        with torch.cuda.stream(self.stream):
            self._experts.begin_step(len(rows.tokens_T))
            bucket.staging.fill(rows)
            step.launch()
        self._steps.append(step)
        return step

    def behind(self, step: LaunchedStep) -> list[LaunchedStep]:
        """The steps that were launched behind this one."""
        return self._steps[self._steps.index(step) + 1 :]

    def due_ns(self, step: LaunchedStep) -> int:
        """When the first one should end: after as long as the last one of its size, which this one is like."""
        assert step is self._steps[0], "steps end in order"
        return max(step.launched_ns, self._ended_ns) + step.bucket.lasted_ns

    def is_running_at(self, step: LaunchedStep, time_ns: int) -> bool:
        return self._experts.is_running_after(step, max(time_ns - time.monotonic_ns(), 0))

    def read(self, step: LaunchedStep) -> Tensor | list[int]:
        """See it through."""
        step.due_ns = self.due_ns(step)
        began_ns = step.due_ns - step.bucket.lasted_ns
        try:
            self._experts.see_through(step)
        except StepAbandoned:  # it has stopped. After any other error the device may wait for a flag for ever
            self._steps.clear()
            self._experts.end_step()
            raise
        self._ended_ns = time.monotonic_ns()
        step.bucket.lasted_ns = self._ended_ns - began_ns
        self._steps.pop(0)
        if not self._steps:
            self._experts.end_step()
        return self._results(step)

    def pooled(self, step: LaunchedStep, rows: list[int]) -> Tensor:
        """What these rows of a step that was read say."""
        assert not self._steps, "the next step overwrites the hidden states"
        return self._pooled(step.bucket.hidden_TD, rows)

    def _results(self, step: LaunchedStep) -> Tensor | list[int]:
        rows, bucket = step.rows, step.bucket
        num_logits = len(rows.logits_rows_L)
        if rows.draws_L is not None:
            return step.report.tokens(num_logits)
        assert not self._steps, "the next step overwrites the logits"
        if num_logits > len(bucket.logits_LV):  # logprobs of prompts: rare
            wanted = torch.tensor(rows.logits_rows_L, dtype=torch.int32, device=self.stop.device)
            return self._logits(bucket.hidden_TD, wanted)
        return bucket.logits_LV[:num_logits]


def _await(report: ReportOf) -> None:
    """Waits for the report of a step that does nothing."""
    while load()(report.address, report.num_due, None, 0, None, 0, _LOOK_EVERY_NS, 0, 0) != Outcome.DONE:
        torch.cuda.current_stream().query()  # a device that is lost would say so
