"""When an expert worker starts computing, and what. A pure function: requests, positions and the time in, a batch out.

Weights are read once per batch, so requests of one layer are computed together. It is worth waiting a moment for a
request that is about to come, and never worth waiting for one that may not:

    replays                     at once: somebody's layer stands still because a worker failed
    everybody is here           every attention worker that was on its way to this layer has delivered
    enough                      more rows would not be computed any cheaper; the rest is the next batch
    waited long enough          `hold_us` since the first of them came

A dead or silent attention worker is not in `positions`. One that has sent its last layer has the position -1, and one
that has passed a layer without a row for us has a higher position: none of these is waited for.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from everserve.tables.ids import Rank


class Request(NamedTuple):
    """Rows that an attention worker wants computed: on CPUs, struct request in csrc/lanes/serve.c."""

    rank: Rank
    box: int
    layer: int
    replay: int
    num_rows: int
    arrived_ns: int  # on the clock of time.monotonic_ns


class BatchPolicy(NamedTuple):
    """How patient to be."""

    hold_us: float = 200.0  # the longest that a request waits for company
    enough_rows: int = 256
    reach: int = 1  # how many layers behind an attention worker may be to be waited for


class Choice(NamedTuple):
    """What to compute now, of one layer, and why; if nothing, when to choose again unless something new comes."""

    batch: list[Request]
    reason: str
    wait_s: float = 0.0


def choose(pending: Sequence[Request], positions: Mapping[Rank, int], now_ns: int, policy: BatchPolicy) -> Choice:
    """`pending` in order of arrival. `positions`: the layer that each healthy attention worker sends next, or -1."""
    for request in pending:
        if request.replay:
            return Choice(_together(request.layer, pending, policy), "replay")
    waits: dict[int, int] = {}  # layer -> how long its requests may still wait, in ns
    for request in pending:
        layer = request.layer
        if layer in waits:
            continue
        batch = _together(layer, pending, policy)
        here = {other.rank for other in batch}
        if not any(layer - policy.reach <= at <= layer and at >= 0 and r not in here for r, at in positions.items()):
            return Choice(batch, "everybody is here")
        if sum(other.num_rows for other in batch) >= policy.enough_rows:
            return Choice(batch, "enough")
        waits[layer] = request.arrived_ns + int(policy.hold_us * 1e3) - now_ns
        if waits[layer] <= 0:
            return Choice(batch, "waited long enough")
    return Choice([], "waiting for company" if waits else "nothing to do", min(waits.values(), default=0) * 1e-9)


def _together(layer: int, pending: Sequence[Request], policy: BatchPolicy) -> list[Request]:
    """Requests of one layer, replays first, until they are enough: the others are as cheap in the next batch, and these
    need not wait for them."""
    batch: list[Request] = []
    num_rows = 0
    for request in sorted((r for r in pending if r.layer == layer), key=lambda r: -r.replay):
        if num_rows < policy.enough_rows:
            batch.append(request)
            num_rows += request.num_rows
    return batch
