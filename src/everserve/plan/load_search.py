"""Give the busiest worker of a layer less to do, one change at a time, until none helps.

    which places of an expert are active     costs nothing: no weights move
    another place for an expert              one fill: in a free slot, or in that of an expert with more places than all
                                             experts can have
    two experts change places                two fills

A change counts if every worker that it concerns is left with clearly less than the busiest one had. So the loads in
descending order become smaller with every change, and the search ends. Each expert keeps its places on different
devices, and as many as all experts can have.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from everserve.plan.layer_plan import LayerPlan
from everserve.tables.ids import Rank

_FREE_GAIN, _MOVE_GAIN = 0.01, 0.03  # of the mean: less is not worth a change
_WIDTH = 4  # heaviest experts, least busy workers, lightest experts there: with which moves are looked for


class _Change(NamedTuple):
    """New active places of some experts, after copies were taken and put. In the order of preference."""

    after: float  # the most that a worker which it concerns then has to do
    num_fills: int
    homes: tuple[tuple[int, tuple[Rank, ...]], ...]
    take: tuple[tuple[int, Rank], ...] = ()
    put: tuple[tuple[int, Rank], ...] = ()


def lower_the_busiest(plan: LayerPlan) -> None:
    """Change `plan`."""
    search = _Search(plan)
    for _ in range(4 * len(plan.places)):
        if not search.change_one():
            return


class _Search:
    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan
        self.work = plan.work()
        self.mean = sum(self.work.values()) / max(len(self.work), 1)

    def change_one(self) -> bool:
        """What costs nothing comes first."""
        if not self.work:
            return False
        busiest = max(self.work, key=lambda rank: (self.work[rank], rank))
        change = next(
            (
                best
                for kind in (self._dealt, self._copied, self._swapped)
                if (best := min(kind(busiest), default=None)) is not None
            ),
            None,
        )
        if change is None:
            return False
        self.work |= self._work_after(change.homes)
        for expert, rank in change.take:
            self.plan.take(expert, rank)
        for expert, rank in change.put:
            self.plan.put(expert, rank)
        for expert, homes in change.homes:
            self.plan.homes[expert] = list(homes)
        return True

    def _dealt(self, busiest: Rank) -> Iterator[_Change]:
        """Other active places of one expert."""
        limit = self.work[busiest] - _FREE_GAIN * self.mean
        for expert in self.plan.active_on(busiest):
            homes = tuple(self.plan.homes[expert])
            rest = tuple(rank for rank in homes if rank != busiest)
            others = sorted((r for r in self.plan.places[expert] if r not in homes), key=self._idlest_first)
            choices = [(*rest, rank) for rank in others]
            choices += [(*homes, *others[:num]) for num in range(1, len(others) + 1)]
            choices += [rest] if rest else []
            for choice in choices:
                yield from self._if_better(limit, 0, ((expert, choice),))

    def _copied(self, busiest: Rank) -> Iterator[_Change]:
        """More copies of one of its heaviest experts, which serve beside the busiest worker or instead of it. With four
        attention workers, three places may be no better than two, and four are: so several at once."""
        limit, plan = self.work[busiest] - _MOVE_GAIN * self.mean, self.plan
        for expert, targets in self._candidates(busiest):
            devices = {plan.by_rank[rank].device for rank in plan.places[expert]}
            homes = tuple(plan.homes[expert])
            rest = tuple(home for home in homes if home != busiest)
            take: list[tuple[int, Rank]] = []
            changed: dict[int, tuple[Rank, ...]] = {}
            new: tuple[Rank, ...] = ()
            for rank in targets:
                victim = self._victim(rank, [expert, *changed]) if plan.room_on(rank) <= 0 else None
                if plan.by_rank[rank].device in devices or (victim is None and plan.room_on(rank) <= 0):
                    continue
                if victim is not None:
                    take.append((victim, rank))
                    changed[victim] = self._homes_without(victim, rank)
                devices.add(plan.by_rank[rank].device)
                new = (*new, rank)
                put = tuple((expert, one) for one in new)
                for choice in ((*homes, *new), (*rest, *new)):
                    yield from self._if_better(limit, len(new), ((expert, choice), *changed.items()), tuple(take), put)

    def _swapped(self, busiest: Rank) -> Iterator[_Change]:
        """A copy of one of its heaviest experts changes places with another expert, and serves there."""
        limit, plan = self.work[busiest] - _MOVE_GAIN * self.mean, self.plan
        for expert, targets in self._candidates(busiest):
            for source, rank in itertools.product(plan.places[expert], targets):
                if not plan.may_go(expert, source, rank):
                    continue
                rest = tuple(home for home in plan.homes[expert] if home != source)
                choices = {(*rest, rank), (*(home for home in rest if home != busiest), rank)}
                is_easy = len(plan.places[expert]) > 1 or plan.room_on(source) > 0 or plan.room_on(rank) > 0
                for other in self._lightest(rank):
                    # One of the two needs a place to stay meanwhile.
                    if not (is_easy or len(plan.places[other]) > 1) or not plan.may_go(other, rank, source):
                        continue
                    homes = _replaced(plan.homes[other], rank, source)
                    take, put = ((expert, source), (other, rank)), ((expert, rank), (other, source))
                    for choice in choices:
                        yield from self._if_better(limit, 2, ((expert, choice), (other, homes)), take, put)

    def _candidates(self, busiest: Rank) -> Iterator[tuple[int, list[Rank]]]:
        """The heaviest experts of the busiest worker, and the least busy workers that do not have them."""
        plan = self.plan
        heaviest = sorted(plan.active_on(busiest), key=lambda e: (-self._part(e, busiest), e))
        idlest = sorted(self.work, key=self._idlest_first)
        for expert in heaviest[:_WIDTH]:
            yield expert, [rank for rank in idlest if rank not in plan.places[expert]][:_WIDTH]

    def _lightest(self, rank: Rank) -> list[int]:
        return sorted(self.plan.held[rank], key=lambda e: (self._part(e, rank), e))[:_WIDTH]

    def _part(self, expert: int, rank: Rank) -> float:
        """What this expert makes that worker do."""
        return self.plan.parts(expert, self.plan.homes[expert]).get(rank, 0.0)

    def _idlest_first(self, rank: Rank) -> tuple[float, int]:
        return self.work[rank], rank

    def _victim(self, rank: Rank, but: Collection[int]) -> int | None:
        """The lightest expert there that has more places than all can have."""
        plan = self.plan
        idle = [e for e in plan.held[rank] if len(plan.places[e]) > plan.num_copies and e not in but]
        return min(idle, key=lambda e: (self._part(e, rank), e), default=None)

    def _homes_without(self, expert: int, rank: Rank) -> tuple[Rank, ...]:
        rest = tuple(home for home in self.plan.homes[expert] if home != rank)
        if rest:
            return rest
        others = [place for place in self.plan.places[expert] if place != rank]
        return (min(others, key=lambda place: (self.work[place], place)),)

    def _if_better(
        self,
        limit: float,
        num_fills: int,
        homes: tuple[tuple[int, tuple[Rank, ...]], ...],
        take: tuple[tuple[int, Rank], ...] = (),
        put: tuple[tuple[int, Rank], ...] = (),
    ) -> Iterator[_Change]:
        work = self._work_after(homes)
        after = max(work.values())
        if after <= limit:
            yield _Change(after, num_fills, homes, take, put)

    def _work_after(self, homes: tuple[tuple[int, tuple[Rank, ...]], ...]) -> dict[Rank, float]:
        """The work of the workers that these new active places concern."""
        work: dict[Rank, float] = {}
        for expert, choice in homes:
            for rank, part in self.plan.parts(expert, self.plan.homes[expert]).items():
                work[rank] = work.get(rank, self.work[rank]) - part
            for rank, part in self.plan.parts(expert, choice).items():
                work[rank] = work.get(rank, self.work[rank]) + part
        return work


def _replaced(ranks: Sequence[Rank], old: Rank, new: Rank) -> tuple[Rank, ...]:
    return tuple(new if rank == old else rank for rank in ranks)
