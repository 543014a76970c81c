"""What is counted and measured, with vLLM's buckets.

Observations are plain additions, because some are made for every token; exposition.py makes Prometheus' text of them
when they are read.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from everserve.gateway.streams.cadence import Cadence
from everserve.tables.ids import Incarnation, Role
from everserve.tables.outputs import EngineStats
from everserve.tables.requests import SamplingParams

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
_STEP_TOKENS = tuple(float(2**e) for e in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_STALL_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_FIRST_GUESS = 128.0  # tokens of an answer, before any has ended
_LATELY = 64  # answers
FINISH_REASONS = ("stop", "length", "abort", "error")
ENGINE_COUNTERS = (
    *("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "num_known_tokens", "num_replayed_rows"),
    *("num_stale", "num_restored_tokens", "num_broken_tokens", "num_masked_tokens", "num_unmasked_tokens"),
    *("num_unreadable_logs", "prefill_cost"),
    *("num_regained_tokens", "num_lost_tokens", "num_regained_bytes", "num_taken_back"),
    *("num_drafts", "num_draft_tokens", "num_accepted_tokens"),
)


class Histogram:
    """Counts per bucket, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Many, of which most are equal."""
        for value, num in Counter(values).items():
            self.counts[bisect_left(self.bounds, value)] += num
            self.total += value * num

    def cumulative(self) -> list[tuple[str, float]]:
        """Counts as Prometheus wants them: (upper bound, how many are at most that)."""
        buckets: list[tuple[str, float]] = []
        so_far = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(so_far)))
        return buckets


class EngineMetrics:
    """What the gateway saw of one rank's streams. Outlives the rank's incarnations."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_cached_tokens = 0
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self.time_to_first_token_s = Histogram(_TTFT_S)
        self.inter_token_latency_s = Histogram(_TOKEN_S)
        self.mean_token_s = Histogram(_TOKEN_S)
        self.queue_s = Histogram(_REQUEST_S)
        self.latency_s = Histogram(_REQUEST_S)
        self.prefill_s = Histogram(_REQUEST_S)
        self.decode_s = Histogram(_REQUEST_S)
        self.inference_s = Histogram(_REQUEST_S)
        self.prompt_tokens = Histogram(_TOKENS)
        self.computed_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.most_generation_tokens = Histogram(_TOKENS)
        self.max_tokens = Histogram(_TOKENS)
        self.num_choices = Histogram(_CHOICES)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.past: Counter[str] = Counter()  # counters of the engines of incarnations that are gone
        self.before: tuple[Incarnation, dict[str, int]] | None = None  # what an earlier gateway had of the latest one

    def add_past(self, stats: EngineStats) -> None:
        """An incarnation is gone; its engine's counters go on from here."""
        self.past.update({field: getattr(stats, field) for field in ENGINE_COUNTERS})
        self.before = None

    def go_on(self, past: Mapping[str, int], incarnation: Incarnation, now: dict[str, int]) -> None:
        """An earlier gateway has known this."""
        self.past.update(past)
        self.before = (incarnation, now)

    def begin(self, incarnation: Incarnation) -> None:
        """The process that is in the seat now. If it is another one, it counts from 0."""
        if self.before is not None and self.before[0] != incarnation:
            self.past.update(self.before[1])
            self.before = None

    def note_steps(self, before: EngineStats | None, now: EngineStats) -> None:
        """The steps that its engine has made since. Of several at once only the mean is known; of those that a gateway
        was not there for, nothing."""
        num_steps = now.num_steps - (before.num_steps if before is not None else 0)
        if before is None and num_steps > 1:
            return
        num_tokens = _computed(now) - (_computed(before) if before is not None else 0)
        for _ in range(num_steps if num_tokens > 0 else 0):
            self.step_tokens.observe(num_tokens / num_steps)

    def total(self, field: str, now: EngineStats | None) -> int:
        """One of the engines' counters, over all incarnations."""
        if now is None and self.before is not None:
            return self.past[field] + self.before[1].get(field, 0)
        return self.past[field] + (getattr(now, field) if now is not None else 0)


def _computed(stats: EngineStats) -> int:
    return stats.num_prompt_tokens + stats.num_known_tokens + stats.num_generated_tokens


class AnswerLengths:
    """How many tokens streams have, lately."""

    def __init__(self) -> None:
        self.mean = _FIRST_GUESS

    def note(self, num_tokens: int) -> None:
        """Notes the tokens of a stream that has ended."""
        self.mean += (num_tokens - self.mean) / _LATELY

    def expect(self, params: SamplingParams, num_tokens: int) -> int:
        """How many more a stream with so many will have: exactly, if nothing but its limit can end it."""
        most = params.max_tokens - num_tokens
        if not params.stop_ids:
            return most
        return min(most, max(1, round(max(self.mean, params.min_tokens)) - num_tokens))


class FleetMetrics:
    """What the gateway saw of the fleet as a whole."""

    def __init__(self) -> None:
        self.answer_lengths = AnswerLengths()
        self.num_resumed = 0  # streams that lost their worker and were given to another one
        self.num_moved = 0  # streams that their worker gave back
        self.num_diverged = 0  # outputs that contradicted what clients had already
        self.num_stale = 0  # outputs that clients had already; messages of workers that were declared gone
        self.stall_s = Histogram(_STALL_S)
        self.cadence = Cadence()
        self.failovers: Counter[tuple[str, str]] = Counter()  # by role and cause, from 0 for those that are expected
        self.failovers.update({(role.value, cause): 0 for role in Role for cause in ("crash", "hang", "exit")})


class RestartingCounter:
    """A process' counter, which begins at 0 whenever the process is replaced, as one that never goes back."""

    def __init__(self) -> None:
        self._past = 0
        self._last = 0

    @property
    def total(self) -> int:
        return self._past + self._last

    @property
    def state(self) -> tuple[int, int]:
        """What an earlier process had counted, and the present one."""
        return self._past, self._last

    @state.setter
    def state(self, state: tuple[int, int]) -> None:
        self._past, self._last = state

    def update(self, value: int) -> None:
        if value < self._last:
            self._past += self._last
        self._last = value
