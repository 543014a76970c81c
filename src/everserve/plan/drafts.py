"""How many drafts each stream of a step gets, from how likely they are and what rows cost.

A draft is a token that may come next. It is a row more in the step, and a token more if it was right and all before it
were. Rows are not free: a step takes as long as `fixed_rows + rows` rows, where `fixed_rows` is what it takes before
the first one, in rows. So a draft pays as long as

    its chance  >  tokens of the step so far / (fixed_rows + rows so far)

which is what a row gives otherwise. Likely drafts come first; each makes what is left less worth its row.

Streams without drafts have nothing of longer steps: as long as there are any, a step becomes only a little longer.
"""

from collections.abc import Sequence

_MARGIN = 1.05  # what is expected and measured is never quite true
_LONGER = 0.25  # of a step in which some streams have no drafts


def least_chance(num_streams: int, fixed_rows: float) -> float:
    """No draft pays that is not more likely than this."""
    return _MARGIN * num_streams / (fixed_rows + num_streams)


def shares(chances: Sequence[float], limits: Sequence[int], fixed_rows: float, most: int) -> list[int]:
    """How many drafts each stream gets: of `limits[i]`, of which each is right with `chances[i]` if those before it
    are. `most`: of all of them together."""
    num_streams = len(chances)
    found = [
        (chance**number, number, i)
        for i, (chance, limit) in enumerate(zip(chances, limits, strict=True))
        for number in range(1, limit + 1)
    ]
    tokens, rows, chosen = float(num_streams), fixed_rows + num_streams, list[int]()
    for value, _, i in sorted(found, key=lambda one: (-one[0], one[1:])):
        if len(chosen) == most or value * rows <= _MARGIN * tokens:
            break
        tokens, rows = tokens + value, rows + 1
        chosen.append(i)
    if len(set(chosen)) < num_streams:
        del chosen[int(_LONGER * (fixed_rows + num_streams)) :]
    nums = [0] * num_streams
    for i in chosen:
        nums[i] += 1
    return nums
