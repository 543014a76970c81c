"""Streams that may be poison: one that ends every worker that computes it.

When a worker dies, its streams go on elsewhere, unless one of them is the cause: it holds something that no worker can
compute. Given to one worker after the other it would end each of them, and all streams beside it would lose their
worker each time. One death does not show which stream caused it. But a harmless stream gets a token sooner or later: a
stream that has lost several workers in a row without a token is treated as *possible poison*.

    losses in a row             0 1 2    3   4   5   6   7   8   9    10
    possible poison at once      all    32  16   8   4   2   1   1    given up

The more workers such a stream has lost, the fewer of its kind may run at once. So the poison soon runs only beside
streams that do get tokens, and harmless ones that were isolated with it are cleared by their next token.
"""

from collections.abc import Iterable, Sequence

from everserve.gateway.streams.stream import Stream

MAX_LOSSES = 10
_FREE_LOSSES = 3
_AT_ONCE = 256


def may_run(siblings: Sequence[Stream], running: Iterable[Stream], elsewhere: int = 0) -> list[Stream]:
    """Those of them that may be given to a worker now; `running` are all streams that have one. `elsewhere`: how many
    that run at other gateways may be poison."""
    if max(stream.num_losses for stream in siblings) < _FREE_LOSSES:
        return list(siblings)
    num_possible = num_possible_of(running) + elsewhere
    allowed = []
    for stream in siblings:
        if not _may_be_poison(stream):
            allowed.append(stream)
        elif num_possible < max(_AT_ONCE >> stream.num_losses, 1):
            allowed.append(stream)
            num_possible += 1
    return allowed


def num_possible_of(streams: Iterable[Stream]) -> int:
    """How many of them may be poison."""
    return sum(map(_may_be_poison, streams))


def _may_be_poison(stream: Stream) -> bool:
    return stream.num_losses >= _FREE_LOSSES
