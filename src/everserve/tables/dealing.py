"""Which of its active places each home asks for a shard that has several: about as many homes for each place.

    a home with one of the places beside it, on its device    asks there
    each other home, in order                                 asks the place that the fewest ask so far; of equals, the
                                                              first one from place number (shard) mod (places) on

So a shard that is on every device is computed by each home's own device. When a device is lost, or its worker is away
for a moment, all homes but its own go on asking where they asked, and the KV of such a head stays where it is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from everserve.tables.ids import NO_RANK, Rank


class Dealer(NamedTuple):
    """An attention worker, and the shard worker on its device (NO_RANK: none)."""

    home: Rank
    beside: Rank = NO_RANK


def deal(
    dealers: Sequence[Dealer],
    ranks_NC: NDArray[np.integer],
    num_active_N: NDArray[np.integer],
    shard_N: NDArray[np.integer],
) -> NDArray[np.int64]:
    """[dealer][shard]: the number of the active place that it asks first. `ranks_NC`: of the places of each shard, the
    `num_active_N` active ones first. `shard_N`: its number in its layer."""
    num, width = ranks_NC.shape
    place_C, row_N = np.arange(width), np.arange(num)
    is_active_NC = place_C < num_active_N[:, None]
    from_first_NC = (place_C - shard_N[:, None]) % np.maximum(num_active_N, 1)[:, None]
    asked_NC = np.zeros((num, width), np.int64)
    most_N = -(-len(dealers) // np.maximum(num_active_N, 1))
    choice_DN = np.full((len(dealers), num), -1, np.int64)
    for chosen_N, (_, beside) in zip(choice_DN, dealers, strict=True):
        is_here_NC = is_active_NC & (ranks_NC == beside) & (asked_NC < most_N[:, None])
        is_here_N = is_here_NC.any(axis=1) & (beside != NO_RANK)
        chosen_N[is_here_N] = is_here_NC[is_here_N].argmax(axis=1)
        asked_NC[row_N[is_here_N], chosen_N[is_here_N]] += 1
    for chosen_N in choice_DN:
        order_NC = np.where(is_active_NC, asked_NC * width + from_first_NC, np.iinfo(np.int64).max)
        is_open_N = chosen_N < 0
        chosen_N[is_open_N] = order_NC[is_open_N].argmin(axis=1)
        asked_NC[row_N[is_open_N], chosen_N[is_open_N]] += 1
    return choice_DN
