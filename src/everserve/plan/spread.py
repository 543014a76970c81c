"""Which attention worker gets which streams: new ones, and those of a worker that is lost or leaves.

Siblings (the choices of one prompt) go together if a worker has room for all of them, because one worker holds
their prompt only once. Otherwise they are split: no room stays unused while a stream waits.
"""

from collections.abc import Sequence
from typing import NamedTuple

from everserve.tables.ids import Rank


class Room(NamedTuple):
    """The free capacity of an attention worker, as far as the gateway knows."""

    rank: Rank
    num_streams_free: int  # more streams that it may be given now
    num_free_blocks: int  # of its KV pool; negative if overcommitted
    owed: int  # what its streams have still to compute, as a cost (prefill.py)
    is_slow: bool = False  # it gets streams only if no other worker has room
    saved: int = 0  # what it need not compute of these siblings' prompt, because it has the beginning

    @property
    def cost(self) -> int:
        """What it has to compute before it is done with these siblings, beside what any worker has to."""
        return self.owed - self.saved


def choose(workers: Sequence[Room], num_siblings: int, num_blocks: int) -> Rank | None:
    """The worker that gets these siblings, which need `num_blocks` blocks; None: no worker has room, they wait.

    Of the workers with room for all siblings (for one of them, if none has room for all), those that have the blocks;
    of these, the one with the least to compute: one that has the beginning of the prompt is worth waiting for as long
    as it saves. If none has the blocks, the one that lacks the fewest: its
    scheduler queues or preempts by its own rules. It gets as many siblings as it has room for. All of that first among
    workers that are not slow.
    """
    fast = [worker for worker in workers if not worker.is_slow]
    rank = _choose(fast, num_siblings, num_blocks)
    return rank if rank is not None or len(fast) == len(workers) else _choose(workers, num_siblings, num_blocks)


def _choose(workers: Sequence[Room], num_siblings: int, num_blocks: int) -> Rank | None:
    num_wanted = num_siblings if any(worker.num_streams_free >= num_siblings for worker in workers) else 1
    fitting = [worker for worker in workers if worker.num_streams_free >= num_wanted]
    if not fitting:
        return None
    roomy = [worker for worker in fitting if worker.num_free_blocks >= num_blocks]
    if roomy:
        return min(roomy, key=lambda worker: (worker.cost, worker.rank)).rank
    return min(fitting, key=lambda worker: (-worker.num_free_blocks, worker.cost, worker.rank)).rank
