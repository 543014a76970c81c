"""Drafts from what a stream has already: what came after its last tokens when they stood there before."""

import numpy as np

from everserve.tables.requests import Tokens


def continuation(tokens: Tokens, num: int, shortest: int, longest: int) -> tuple[int, ...]:
    """The `num` tokens that come next if it goes on as it did before: behind the latest place where as many of its last
    tokens stand as possible, at most `longest`. Empty if nowhere `shortest` of them do.

    What repeats itself goes on repeating itself: the place may be so near that its continuation comes round again.
    """
    all_T = np.frombuffer(tokens, np.int32)  # while this exists, tokens cannot be appended
    last = len(all_T) - 1
    places = np.flatnonzero(all_T[:-1] == all_T[last])
    found = places if shortest <= 1 else places[:0]
    for num_before in range(1, min(longest, last)):
        places = places[places >= num_before]
        places = places[all_T[places - num_before] == all_T[last - num_before]]
        if not len(places):
            break
        if num_before + 1 >= shortest:
            found = places
    if not len(found):
        return ()
    first = int(found[-1]) + 1
    return tuple(np.resize(all_T[first : first + num], num).tolist())
