"""How the FFN of a layer is cut into shards. The cut is a constant of the model: it does not depend on how many workers
there are, so the order of sums, and with it every bit of a stream, does not either.

    dense FFN     B slices: column blocks of gate and up with the matching rows of down. Every row goes to all of them,
                  with weight 1, and the answers are summed in the order of slices
    experts       whole; or each cut into S slices, where there are so few that a worker more or less would change much:
                  slice s of expert e is shard e * S + s, and has the weight of its expert

All shards of a layer have the same size: one kernel computes them together, and any slot can hold any of them. So B and
S divide the FFN's size, with slices that are multiples of what kernels compute at once, if there are such. More slices
cost traffic, because each answers with a row of its own; fewer leave less to divide. Published dense models have eight.
"""

from collections.abc import Iterable

from everserve.tables.calls import FfnCut, ShardKind

_SLICES, _MOST_SLICES = 8, 16  # of a dense FFN
_SHARDS = 16  # of a layer with experts, at least, if its experts may be cut
_ALIGNMENTS = (32, 8, 1)  # columns that kernels compute at once; 8 of two bytes are the least that a GPU's copies allow


def num_slices(intermediate_size: int) -> int:
    """The number of slices of a dense FFN: the smallest number from 8 to 16 that divides its size, else the largest
    below 8.
    """
    enough = _first_divisor(intermediate_size, range(_SLICES, _MOST_SLICES + 1))
    return enough or _first_divisor(intermediate_size, range(_SLICES - 1, 0, -1)) or 1


def slices_per_expert(num_experts: int, expert_size: int) -> int:
    """The fewest that give a layer 16 shards and divide an expert's size; 1 if the experts are enough, or none do."""
    return _first_divisor(expert_size, range(-(-_SHARDS // num_experts), _SHARDS + 1)) or 1


def _first_divisor(size: int, candidates: Iterable[int]) -> int | None:
    """The first of these that divides the size into aligned slices; into others, if none does."""
    dividing = [num for num in candidates if size % num == 0]
    return next((num for unit in _ALIGNMENTS for num in dividing if size // num % unit == 0), None)


def cut_dense(layer: int, intermediate_size: int, has_bias: bool = False) -> FfnCut:
    num = num_slices(intermediate_size)
    return FfnCut(layer, ShardKind.SLICE, num, num, intermediate_size // num, has_bias=has_bias)


def cut_experts(
    layer: int, num_experts: int, experts_per_token: int, expert_size: int, slices: int, has_bias: bool = False
) -> FfnCut:
    """Each expert in so many slices."""
    return FfnCut(
        layer,
        ShardKind.EXPERT,
        num_experts * slices,
        experts_per_token * slices,
        expert_size // slices,
        slices,
        has_bias,
    )
