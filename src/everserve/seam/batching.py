"""When an expert worker starts computing, and what. A pure function: requests, positions and the time in, a layer out.

Weights are read once per batch, so requests of one layer are computed together. It is worth waiting a moment for a
request that is about to come, and never worth waiting for one that may not. Replays first, then the lowest layer:

    replay                  at once: a step stands still because a worker failed, or an expert has moved
    all are here       no attention worker is on its way to this layer
    enough                  more rows would not be computed any cheaper; the rest is the next batch
    waited long enough      the policy's patience has come to an end

A dead or silent attention worker is not in `positions`. One that has sent its last layer has the position -1, and one
that has passed a layer without a row for us has a higher position: none of these is waited for. Neither is one that
waits for us with another request.

Both kinds of devices follow this function, with different policies:

    CPUs      call it, between two batches. A layer that waits does not hold up another one.
    GPUs      have it as a kernel (backends/cuda/lanes/serve.py), which is tested against it. Reading all weights twice
              costs the most there, so attention workers are kept in step: only the most urgent layer counts, a
              request waits for workers at any earlier layer, and a worker that begins a step *stands back* while
              other workers are in the middle of theirs. It does not stand back for workers that have just begun: it
              can catch up with them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from everserve.tables.ids import Rank

ORDINARY = 1 << 15  # added to the layer of a request that is no replay: what is less is more urgent
JUST_BEGUN = 1  # a step that is on its way to this layer (an index), or a lower one, counts as just begun


class Request(NamedTuple):
    """Rows that an attention worker wants computed: on CPUs, struct request in csrc/lanes/serve.c."""

    rank: Rank
    box: int
    layer: int
    replay: int
    num_rows: int
    arrived_ns: int  # on the clock of time.monotonic_ns


class BatchPolicy(NamedTuple):
    """How long to wait for other requests, and for which attention workers."""

    hold_us: float = 200.0  # the longest that a request waits for others of its layer
    first_hold_us: float = 200.0  # likewise, in the first layer of a step
    enough_rows: int | None = 256  # None: it is never enough
    reach: int | None = 1  # how many layers behind an attention worker may be to be waited for; None: any
    keeps_step: bool = False  # only the most urgent layer counts, and steps begin together


ON_CPUS = BatchPolicy()
# In the middle of a step attention seldom takes longer than 0.2 ms; where one begins, tokens are chosen and handed
# over. A batch that waits too long loses that once; one that goes ahead too soon makes all weights be read once more in
# every layer until the step ends.
ON_GPUS = BatchPolicy(hold_us=614.4, first_hold_us=2457.6, enough_rows=None, reach=None, keeps_step=True)


class LayerChoice(NamedTuple):
    """The layer to compute now, or None, and why; if None, for how long at most unless something new comes."""

    layer: int | None
    reason: str
    wait_us: float = 0.0


_NOTHING_TO_DO = LayerChoice(None, "nothing to do")


class BatchChoice(NamedTuple):
    """What to compute now, of one layer, and why; if nothing, when to choose again unless something new comes."""

    batch: list[Request]
    reason: str
    wait_s: float = 0.0


def choose_layer(
    pending: Sequence[Request],
    positions: Mapping[Rank, int],
    now_ns: int,
    policy: BatchPolicy,
    beginners: Collection[Rank] = (),
) -> LayerChoice:
    """`pending` in order of arrival. `positions`: the layer that each healthy attention worker sends next, or -1.
    `beginners`: workers with a request that begins a step, and may have to stand back."""
    waiting = {request.rank: request.layer for request in pending}
    if beginners and any(waiting.get(rank, at) > JUST_BEGUN for rank, at in positions.items()):
        pending = [request for request in pending if request.rank not in beginners or request.replay]
    on_the_way = [at for rank, at in positions.items() if rank not in waiting]
    wait_us = math.inf
    for urgency in sorted({r.layer if r.replay else r.layer + ORDINARY for r in pending}):
        layer = urgency % ORDINARY
        if urgency < ORDINARY:
            return LayerChoice(layer, "replay")
        if not any(_is_coming(at, layer, policy) for at in on_the_way):
            return LayerChoice(layer, "all are here")
        asking = [request for request in pending if request.layer == layer]
        if policy.enough_rows is not None and sum(request.num_rows for request in asking) >= policy.enough_rows:
            return LayerChoice(layer, "enough")
        hold_us = policy.first_hold_us if layer == 0 else policy.hold_us
        wait_us = min(wait_us, hold_us - (now_ns - asking[0].arrived_ns) * 1e-3)
        if wait_us <= 0:
            return LayerChoice(layer, "waited long enough")
        if policy.keeps_step:
            break
    return LayerChoice(None, "waiting for company", wait_us) if wait_us < math.inf else _NOTHING_TO_DO


def choose(pending: Sequence[Request], positions: Mapping[Rank, int], now_ns: int, policy: BatchPolicy) -> BatchChoice:
    """What to compute now: requests of one layer, replays first, until they are enough. The others are as cheap in the
    next batch, and these need not wait for them."""
    layer, reason, wait_us = choose_layer(pending, positions, now_ns, policy) if pending else _NOTHING_TO_DO
    batch = [request for request in pending if request.layer == layer]
    if reason == "replay":
        batch.sort(key=lambda request: -request.replay)
    if policy.enough_rows is not None and len(batch) > 1:
        rows_before = accumulate((request.num_rows for request in batch), initial=0)
        batch = [request for request, before in zip(batch, rows_before, strict=False) if before < policy.enough_rows]
    return BatchChoice(batch, reason, wait_us * 1e-6)


def _is_coming(at: int, layer: int, policy: BatchPolicy) -> bool:
    """Whether to wait, in this layer, for a worker that is on its way to `at`."""
    if not 0 <= at <= layer:
        return False
    if policy.keeps_step and at <= JUST_BEGUN:
        return layer <= JUST_BEGUN
    return policy.reach is None or at >= layer - policy.reach
