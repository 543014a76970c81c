"""Places for shards on any number of workers: slices, heads, and experts that are cut.

Every row of a step goes to every slice and every head, so what counts is how many of them a worker has:

    contiguous    the first workers have one more than the others, in every layer
    cyclic        shard i of a call goes to worker (offset + i) mod N, and the next call begins where this one ended:
                  over all layers no worker has more than one shard more than another. In one layer some have one more
    and dealt     floor(n / N) shards of each call on each worker, cyclic; each of the remaining n mod N ones on every
                  worker, its rows dealt among them by home: every worker has as much to do, in every layer. (For heads
                  this is FailSafe's hybrid attention.) It costs the memory of n mod N shards per layer and worker

N needs no relation to the number of shards. `plan/repair.py` goes on from here when workers come and go.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from everserve.errors import ConfigError
from everserve.plan.dealing import Dealing, work_of
from everserve.plan.placement import even_shares, place_shadows
from everserve.tables.calls import Call, ShardKind
from everserve.tables.dealing import Dealer
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement, SeatExperts


class Spread(StrEnum):
    """How shards are spread over workers; the picture is above."""

    CONTIGUOUS = "contiguous"
    CYCLIC = "cyclic"
    DEALT = "cyclic and dealt"


class _Pattern(NamedTuple):
    """One call, by index of the worker."""

    active: tuple[tuple[int, ...], ...]
    shadows: tuple[tuple[int, ...], ...]


def place_shards(
    calls: Sequence[Call],
    ranks: Sequence[Rank],
    num_shadows: int | None,
    spread: Spread = Spread.DEALT,
    num_copies: int = 0,
) -> Placement:
    """Active places for all shards, and up to `num_shadows` copies per worker and call of shards that other workers
    serve. None: the fewest that give every shard a second place. At least `num_copies` of each, and so many of each
    head: a copy of a head's weights has not its KV, and by default the replacement of a dead worker finds that."""
    assert ranks and len(set(ranks)) == len(ranks), ranks
    _check_shadows(calls, len(ranks), num_shadows, num_copies)
    offset = dict.fromkeys(ShardKind, 0)
    found: dict[tuple[int, int, int | None], _Pattern] = {}
    patterns = []
    for call in calls:
        shadows = 0 if call.kind is ShardKind.HEAD else num_shadows
        key = call.num_shards, offset[call.kind] % len(ranks), shadows
        if key not in found:
            found[key] = _pattern(*key[:2], len(ranks), shadows, num_copies, spread)
        patterns.append(found[key])
        offset[call.kind] += call.num_shards
    seats = tuple(
        SeatExperts(
            rank=rank, active=tuple(p.active[i] for p in patterns), shadows=tuple(p.shadows[i] for p in patterns)
        )
        for i, rank in enumerate(ranks)
    )
    deals = spread is Spread.DEALT
    return Placement(calls=tuple(calls), seats=seats, deals_remainder=deals, head_copies=num_copies)


def _pattern(
    num_shards: int, offset: int, num_seats: int, num_shadows: int | None, num_copies: int, spread: Spread
) -> _Pattern:
    num_dealt = num_shards % num_seats if spread is Spread.DEALT and num_seats <= num_shards else 0
    num_single = num_shards - num_dealt
    if spread is Spread.CONTIGUOUS:
        singles = [tuple(share) for share in even_shares(num_single, num_seats)]
    else:
        turns = [(offset + shard) % num_seats for shard in range(num_single)]
        singles = [tuple(s for s, turn in enumerate(turns) if turn == seat) for seat in range(num_seats)]
    most = max(map(len, singles))
    wanted = max(most if num_shadows is None else num_shadows, num_copies * most)
    shadows = place_shadows(singles, min(wanted, num_single - num_single // num_seats) if num_seats > 1 else 0)
    dealt = tuple(range(num_single, num_shards))
    return _Pattern(tuple(share + dealt for share in singles), tuple(map(tuple, shadows)))


def _check_shadows(calls: Sequence[Call], num_seats: int, num_shadows: int | None, num_copies: int) -> None:
    if not 0 <= num_copies < num_seats:
        raise ConfigError(
            f"--shadow-shards {num_copies}: on {num_seats} devices a shard has at most {num_seats - 1} further places"
        )
    widest = max((call.num_shards for call in calls), default=0)
    most_useful = widest - widest // num_seats
    if num_shadows is not None and not 0 <= num_shadows <= most_useful:
        raise ConfigError(
            f"--shadow-experts {num_shadows}: with {widest} shards per layer on {num_seats} workers it must be between"
            f" 0 and {most_useful}"
        )


def largest_power_of_two(num_workers: int) -> int:
    """The workers that systems use which can only divide by powers of two."""
    return 1 << (num_workers.bit_length() - 1)


class Evenness(NamedTuple):
    """How evenly a placement uses its workers: the largest over the mean."""

    work: float  # over a whole step, all calls together: where homes are in different layers at a time
    work_in_step: float  # where all homes are in the same layer: the sum over calls of the busiest worker
    memory: float  # of active places


def evenness(
    placement: Placement, dealers: Sequence[Dealer], costs: Mapping[ShardKind, float], sizes: Mapping[ShardKind, float]
) -> Evenness:
    """`costs`: of one shard for one row; `sizes`: of its weights. `dealers`: homes, which send as many rows each."""
    work, memory = work_per_worker(placement, dealers, costs), memory_per_worker(placement, sizes)
    dealing = Dealing(dealers)
    busiest = total = 0.0
    for index, call in enumerate(placement.calls):
        here = work_of(placement, index, (costs[call.kind],) * call.num_shards, dealing)
        busiest, total = busiest + max(here.values()), total + sum(here.values()) / len(here)
    return Evenness(_max_over_mean(work), busiest / total, _max_over_mean(memory))


def work_per_worker(
    placement: Placement, dealers: Sequence[Dealer], costs: Mapping[ShardKind, float]
) -> dict[Rank, float]:
    """The work of each worker in a step with one row of each home. With the cost of a head's KV per token it is KV
    memory.
    """
    work = {seat.rank: 0.0 for seat in placement.seats}
    for index, call in enumerate(placement.calls):
        loads = (costs[call.kind],) * call.num_shards
        for rank, part in work_of(placement, index, loads, Dealing(dealers)).items():
            work[rank] += part
    return work


def memory_per_worker(
    placement: Placement, sizes: Mapping[ShardKind, float], *, with_shadows: bool = False
) -> dict[Rank, float]:
    """Weights of active places, and of shadows if they are asked for."""
    memory = {seat.rank: 0.0 for seat in placement.seats}
    for seat in placement.seats:
        for index, call in enumerate(placement.calls):
            held = seat.experts(index) if with_shadows else seat.active[index]
            memory[seat.rank] += len(held) * sizes[call.kind]
    return memory


def _max_over_mean(numbers: Mapping[Rank, float]) -> float:
    return max(numbers.values()) * len(numbers) / sum(numbers.values())
