"""Places for experts: one active place each, and shadows elsewhere so that a death leaves no expert without a place."""

from collections import Counter
from collections.abc import Mapping, Sequence

from everserve.errors import ConfigError
from everserve.tables.calls import expert_calls
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement, SeatExperts
from everserve.words import count


def place_experts(
    num_experts: int, moe_layers: Sequence[int], expert_ranks: Sequence[Rank], shadow_experts: int | None
) -> Placement:
    """Active experts in even shares; then `shadow_experts` more slots per seat and layer for copies of other experts.

    None means: the fewest that give every expert a second place. All layers look alike: a layer is as slow as its
    fullest seat, so different patterns would gain nothing, and one pattern is easier to read.
    """
    num_seats = len(expert_ranks)
    assert num_seats > 0 and len(set(expert_ranks)) == num_seats, expert_ranks
    if num_experts < 1 or not moe_layers:
        raise ConfigError("this model has no experts: serve it without --expert-workers")
    if num_seats > num_experts:
        raise ConfigError(
            f"--expert-workers {num_seats}: the model has {num_experts} experts per layer, so at most {num_experts}"
        )
    num_active = -(-num_experts // num_seats)
    most_useful = num_experts - num_experts // num_seats  # every seat then holds every expert
    if shadow_experts is None:
        shadow_experts = num_active if num_seats > 1 else 0
    if not 0 <= shadow_experts <= most_useful:
        raise ConfigError(
            f"--shadow-experts {shadow_experts}: with {num_experts} experts on {count(num_seats, 'expert worker')} "
            f"it must be between 0 and {most_useful}"
        )
    shares = even_shares(num_experts, num_seats)
    shadows = place_shadows(shares, shadow_experts)
    seats = []
    for rank, active, shadow in zip(expert_ranks, shares, shadows, strict=True):
        in_all_layers = (tuple(active),) * len(moe_layers), (tuple(shadow),) * len(moe_layers)
        seats.append(SeatExperts(rank=rank, active=in_all_layers[0], shadows=in_all_layers[1]))
    calls = expert_calls(num_experts, moe_layers)
    return Placement(calls=calls, seats=tuple(seats), num_shadows=shadow_experts)


def survivable_deaths(placement: Placement) -> int:
    """How many expert workers may die at once, whichever they are, without leaving an expert without a place."""
    return survivable_losses(placement, {seat.rank: seat.rank for seat in placement.seats})


def survivable_losses(placement: Placement, device_of: Mapping[Rank, int]) -> int:
    """The same for devices, each with all workers on it."""
    fewest = placement.num_experts * len(placement.seats)
    for layer, call in enumerate(placement.calls):
        places = {(expert, device_of[seat.rank]) for seat in placement.seats for expert in seat.experts(layer)}
        num_places = Counter(expert for expert, _ in places)
        fewest = min(fewest, *(num_places[expert] for expert in range(call.num_shards)))
    return fewest - 1


def even_shares(num_experts: int, num_seats: int) -> list[range]:
    """[0, num_experts) in consecutive shares whose sizes differ by at most one, the larger ones first."""
    size, num_larger = divmod(num_experts, num_seats)
    starts = [seat * size + min(seat, num_larger) for seat in range(num_seats + 1)]
    return [range(starts[seat], starts[seat + 1]) for seat in range(num_seats)]


def place_shadows(shares: Sequence[Sequence[int]], capacity: int) -> list[list[int]]:
    """For each seat the experts that it holds as shadows, at most `capacity`.

    First how many of each share go to which host, then which ones. The experts of a share are assigned to its hosts
    round-robin: a host never gets more shadows of a share than the share has experts, so no expert is twice on a host,
    and the numbers of copies of a share's experts differ by at most one.
    """
    sent = _Sent([len(share) for share in shares], capacity)
    shadows: list[list[int]] = [[] for _ in shares]
    for owner, share in enumerate(shares):
        hosts = [host for host in range(len(shares)) for _ in range(sent.count[owner][host])]
        for turn, host in enumerate(hosts):
            shadows[host].append(share[turn % len(share)])
    return [sorted(one) for one in shadows]


class _Sent:
    """`count[owner][host]`: how many shadows of the owner's share the host holds.

    Filled one shadow at a time, a copy for every expert before another copy for any. Where the only hosts left with
    room may not take it (the owner itself, or a host that has the whole share), an earlier shadow moves over: an
    augmenting path, so that the fewest copies of any expert are as many as the slots allow.
    """

    def __init__(self, sizes: list[int], capacity: int) -> None:
        self.sizes = sizes
        self.capacity = capacity
        self.count = [[0] * len(sizes) for _ in sizes]
        self.load = [0] * len(sizes)
        growing = set(range(len(sizes)))  # if there is no path for an owner now, there will never be one
        for _copy in range(1, len(sizes)):
            for turn in range(max(sizes)):
                if sum(self.load) == capacity * len(sizes):
                    return  # no host has room: to look for paths would find none
                for owner in sorted(growing):
                    if turn < sizes[owner] and not self._send_one(owner, set()):
                        growing.remove(owner)

    def _send_one(self, owner: int, tried: set[int]) -> bool:
        """One more shadow of this share to the best host that has room, or where another share's shadow makes room."""
        for host in self._preferred(owner):
            if host in tried:
                continue
            tried.add(host)
            if self.load[host] < self.capacity:
                self.load[host] += 1
                self.count[owner][host] += 1
                return True
            for other in sorted(range(len(self.sizes)), key=lambda o: -self.count[o][host]):
                if other != owner and self.count[other][host] > 0 and self._send_one(other, tried):
                    self.count[other][host] -= 1
                    self.count[owner][host] += 1
                    return True
        return False

    def _preferred(self, owner: int) -> list[int]:
        """Hosts that may take one more: first those with the fewest of this share, so that a death spreads its load."""
        num_seats = len(self.sizes)
        hosts = [h for h in range(num_seats) if h != owner and self.count[owner][h] < self.sizes[owner]]
        return sorted(hosts, key=lambda h: (self.count[owner][h], self.load[h], (h - owner) % num_seats))
