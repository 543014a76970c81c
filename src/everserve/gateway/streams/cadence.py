"""How the streams do right now: tokens, and the times between them, in ticks of a quarter of a second.

    stream.py, at each step --note--> Cadence --close, at each tick--> Tick --> live.py

A *gap* is the time that one stream has waited for tokens, as the gateway sees it. Tokens of several steps that come
together, because the gateway or the worker had to wait for a core, end one gap: each of them for itself would have
waited for nothing, and half of all gaps would be 0 ms beside a large p99. A gap counts in the tick in which it ends, so
a stall is a spike when it is over; while it lasts, `waiting_ms` shows how long it has lasted.
"""

from collections.abc import Sequence

import msgspec

TICK_S = 0.25
_MAX_GAPS = 1 << 16  # in one tick; beyond, only the largest counts
_MAX_STEPS = 1 << 12

Step = tuple[float, float]  # when a step's outputs came, and the largest gap that ended with them


class Tick(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A quarter of a second. Gaps are None if none has ended in it."""

    n: int  # counts ticks since the gateway began
    unix_s: float  # its end
    tokens_per_s: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None
    waiting_ms: float = 0.0  # since the last token of the stream that waits longest now
    num_streams: int = 0


def together(own: Tick, others: Sequence[Tick]) -> Tick:
    """With the last ticks of other gateways. Of gaps each has said only the middle and the ends: the middle of all is
    taken as their mean, by tokens."""
    ticks = [own, *others]
    if not others:
        return own
    num_gaps = [(tick.p50_ms, tick.tokens_per_s) for tick in ticks if tick.p50_ms is not None]
    weight = sum(tokens for _, tokens in num_gaps)
    return msgspec.structs.replace(
        own,
        tokens_per_s=round(sum(tick.tokens_per_s for tick in ticks), 1),
        p50_ms=round(sum(p50_ms * tokens for p50_ms, tokens in num_gaps) / weight, 2) if weight else own.p50_ms,
        p99_ms=max((tick.p99_ms for tick in ticks if tick.p99_ms is not None), default=None),
        max_ms=max((tick.max_ms for tick in ticks if tick.max_ms is not None), default=None),
        waiting_ms=max(tick.waiting_ms for tick in ticks),
        num_streams=sum(tick.num_streams for tick in ticks),
    )


class Cadence:
    """What this tick has seen so far, and the steps of the tick before it: a fault may be reported after its end."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._gaps: list[float] = []
        self._steps: list[Step] = []
        self._steps_before: list[Step] = []

    def note(self, now_s: float, num_tokens: int, gaps: list[float]) -> None:
        """One step's tokens, and the gaps that ended with them (a stream's first token ends none)."""
        self._num_tokens += num_tokens
        if gaps:
            largest = max(gaps)
            if len(self._gaps) < _MAX_GAPS:
                self._gaps += gaps
            if len(self._steps) < _MAX_STEPS:
                self._steps.append((now_s, largest))

    def close(self, n: int, elapsed_s: float, unix_s: float, waiting_s: float, num_streams: int) -> Tick:
        """The tick is over; the next one begins."""
        gaps = sorted(self._gaps)
        tick = Tick(
            n=n,
            unix_s=round(unix_s, 3),
            tokens_per_s=round(self._num_tokens / elapsed_s, 1),
            p50_ms=_ms(gaps[(len(gaps) - 1) // 2]) if gaps else None,
            p99_ms=_ms(gaps[-1 - len(gaps) // 100]) if gaps else None,
            max_ms=_ms(max(largest for _, largest in self._steps)) if gaps else None,
            waiting_ms=_ms(waiting_s),
            num_streams=num_streams,
        )
        self._num_tokens, self._gaps = 0, []
        self._steps, self._steps_before = [], self._steps
        return tick

    def pause_across(self, from_s: float, to_s: float) -> float | None:
        """The longest wait of a client between two tokens that fell into this time, or began before its end and ended
        after; None if there is none that ended in this tick or the one before."""
        steps = (*self._steps_before, *self._steps)
        return max((gap for ended_s, gap in steps if ended_s > from_s and ended_s - gap <= to_s), default=None)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
