"""Streams that may be what ends their workers.

A worker's death is no event for its streams; unless one of them is the cause, with something in it that no worker can
compute. Given to one worker after the other, it would end them all, again and again, and every stream beside it would
lose its worker each time. Who is it? Nobody can tell a death from the other. But the others get a token sooner or
later: a stream that has lost several workers in a row without one is a *suspect*.

    losses in a row      0 1 2    3   4   5   6   7   8   9    10
    suspects at once      all    32  16   8   4   2   1   1    given up

The more workers a suspect has lost, the fewer of them may run at once: so it is soon alone among streams that get their
tokens, and those that were suspected with it go on. Whoever gets a token is no suspect any more.
"""

from collections.abc import Iterable, Sequence

from everserve.gateway.streams.stream import Stream

MAX_LOSSES = 10
_FREE_LOSSES = 3
_AT_ONCE = 256


def may_run(siblings: Sequence[Stream], running: Iterable[Stream]) -> list[Stream]:
    """Those of them that may be given to a worker now; `running` are all streams that have one."""
    if max(stream.num_losses for stream in siblings) < _FREE_LOSSES:
        return list(siblings)
    num_suspects = sum(_is_suspect(stream) for stream in running)
    allowed = []
    for stream in siblings:
        if not _is_suspect(stream):
            allowed.append(stream)
        elif num_suspects < max(_AT_ONCE >> stream.num_losses, 1):
            allowed.append(stream)
            num_suspects += 1
    return allowed


def _is_suspect(stream: Stream) -> bool:
    return stream.num_losses >= _FREE_LOSSES
