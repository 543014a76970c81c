"""Which bytes each worker keeps, takes from a peer or reloads when a layer is divided over other workers than before.

Four planners behind one interface, so that they can be compared and tested against each other:

    keep and deal   ours, by `plan/repair.py` itself: survivors keep every shard that they have, and what is lost is
                    dealt to the least loaded, layer by layer. Reloads what no survivor has; nothing else moves
    continuous      AnchorTP's Continuous Minimal Migration (§III-C, Algorithm 1): the bytes of a layer are divided
                    evenly into as many consecutive ranges as there are survivors. A survivor keeps the part of its new
                    range that it has, takes from peers what they have, and reloads the rest
    greedy          the same ranges, but whatever a survivor does not have itself it reloads (§V-C)
    full reload     the same ranges; nothing is used again

A planner is a target, and a rule where the bytes of the target come from. No plan for a target moves fewer bytes than
`continuous` does for its own, and none reloads fewer than `lost_bytes` (Eq. 1): bytes that no survivor has. A better
plan needs another target, and ours is one: it contains everything that survivors have.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from everserve.plan.layer_plan import Room
from everserve.plan.repair import repair
from everserve.tables.calls import Call
from everserve.tables.ids import Rank
from everserve.tables.placement import Placement, SeatExperts


class Span(NamedTuple):
    """Bytes [begin, end) of a row."""

    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


Spans = tuple[Span, ...]  # in order, without common bytes


@dataclass(frozen=True)
class Row:
    """All bytes of one call, its shards one behind the other, and who has which of them: weights, or KV of heads."""

    call: Call
    shard_bytes: int
    held: Mapping[Rank, Spans]

    @property
    def num_bytes(self) -> int:
        return self.call.num_shards * self.shard_bytes


class Part(NamedTuple):
    """Bytes that a worker has afterwards. `source`: itself, a peer, or None: they are reloaded."""

    rank: Rank
    span: Span
    source: Rank | None


@dataclass(frozen=True)
class Plan:
    """For each row what every worker has afterwards, and where that comes from."""

    parts: tuple[tuple[Part, ...], ...]

    @property
    def kept_bytes(self) -> int:
        return sum(part.span.num_bytes for part in self._all() if part.source == part.rank)

    @property
    def peer_bytes(self) -> int:
        return sum(part.span.num_bytes for part in self._all() if part.source not in (part.rank, None))

    @property
    def reload_bytes(self) -> int:
        return sum(part.span.num_bytes for part in self._all() if part.source is None)

    def reloaded_by(self) -> dict[Rank, int]:
        """What each worker reloads: reloads of different workers run side by side."""
        return self._sums(lambda part: part.source is None)

    def received_by(self) -> dict[Rank, int]:
        """What each worker receives from peers."""
        return self._sums(lambda part: part.source not in (part.rank, None))

    def held(self, index: int) -> dict[Rank, Spans]:
        """What workers have of a row afterwards."""
        spans: dict[Rank, list[Span]] = {}
        for part in self.parts[index]:
            spans.setdefault(part.rank, []).append(part.span)
        return {rank: united(found) for rank, found in spans.items()}

    def _sums(self, counts: Callable[[Part], bool]) -> dict[Rank, int]:
        found = {part.rank: 0 for part in self._all()}
        for part in self._all():
            found[part.rank] += part.span.num_bytes if counts(part) else 0
        return found

    def _all(self) -> Iterator[Part]:
        return (part for row in self.parts for part in row)


Planner = Callable[[Sequence[Row], Sequence[Rank]], Plan]


def lost_bytes(rows: Sequence[Row], survivors: Sequence[Rank]) -> int:
    """What no survivor has: the fewest bytes that any plan reloads (Eq. 1)."""
    there = (united(span for rank in survivors for span in row.held.get(rank, ())) for row in rows)
    return sum(row.num_bytes - sum(s.num_bytes for s in spans) for row, spans in zip(rows, there, strict=True))


def after(rows: Sequence[Row], plan: Plan) -> tuple[Row, ...]:
    """The rows when the plan has been carried out: where the next one begins."""
    return tuple(Row(row.call, row.shard_bytes, plan.held(index)) for index, row in enumerate(rows))


# -- planners ------------------------------------------------------------------------------------


def keep_and_deal(rows: Sequence[Row], survivors: Sequence[Rank]) -> Plan:
    """The orchestrator's plan. Workers hold whole shards."""
    slots = tuple(_slots_for(row, survivors) for row in rows)
    rooms = [Room(rank, rank, max(slots), slots) for rank in survivors]
    placement = repair(placement_of(rows), rooms)
    parts = []
    for index, row in enumerate(rows):
        target = {seat.rank: _spans_of(seat.experts(index), row.shard_bytes) for seat in placement.seats}
        parts.append(tuple(_peers_first(row, survivors, target)))
    return Plan(tuple(parts))


def continuous(rows: Sequence[Row], survivors: Sequence[Rank]) -> Plan:
    return _plan(rows, survivors, _peers_first)


def greedy(rows: Sequence[Row], survivors: Sequence[Rank]) -> Plan:
    return _plan(rows, survivors, _own_or_reload)


def full_reload(rows: Sequence[Row], survivors: Sequence[Rank]) -> Plan:
    return _plan(rows, survivors, _reload)


PLANNERS: dict[str, Planner] = {
    "keep and deal": keep_and_deal,
    "continuous": continuous,
    "greedy": greedy,
    "full reload": full_reload,
}


def placement_of(rows: Sequence[Row]) -> Placement:
    """What is held, as the orchestrator knows it: every shard serves where it is."""
    ranks = sorted({rank for row in rows for rank in row.held})
    seats = tuple(
        SeatExperts(
            rank=rank,
            active=tuple(_shards_of(row.held.get(rank, ()), row.shard_bytes) for row in rows),
            shadows=((),) * len(rows),
        )
        for rank in ranks
    )
    return Placement(calls=tuple(row.call for row in rows), seats=seats)


def rows_of(placement: Placement, shard_bytes: Sequence[int]) -> tuple[Row, ...]:
    """The bytes of a placement, shadows too. `shard_bytes` by index of the call."""
    rows = []
    for index, (call, size) in enumerate(zip(placement.calls, shard_bytes, strict=True)):
        held = {seat.rank: _spans_of(seat.experts(index), size) for seat in placement.seats}
        rows.append(Row(call, size, held))
    return tuple(rows)


def _slots_for(row: Row, survivors: Sequence[Rank]) -> int:
    """Room for an even share of all shards, and for all that a survivor has."""
    most = max(sum(s.num_bytes for s in row.held.get(rank, ())) // row.shard_bytes for rank in survivors)
    return max(-(-row.call.num_shards // len(survivors)), most)


def _shards_of(spans: Spans, shard_bytes: int) -> tuple[int, ...]:
    assert not any(edge % shard_bytes for span in spans for edge in span), "workers hold whole shards"
    return tuple(i for span in spans for i in range(span.begin // shard_bytes, span.end // shard_bytes))


def _spans_of(shards: Iterable[int], shard_bytes: int) -> Spans:
    return united(Span(shard * shard_bytes, (shard + 1) * shard_bytes) for shard in shards)


def _even_ranges(row: Row, survivors: Sequence[Rank]) -> dict[Rank, Spans]:
    """Lines 1 to 5 of Algorithm 1."""
    bounds = [i * row.num_bytes // len(survivors) for i in range(len(survivors) + 1)]
    return {rank: (Span(bounds[i], bounds[i + 1]),) for i, rank in enumerate(survivors)}


# -- where the bytes of a target come from -------------------------------------------------------

_Sources = Callable[[Row, Sequence[Rank], Mapping[Rank, Spans]], Iterator[Part]]


def _plan(rows: Sequence[Row], survivors: Sequence[Rank], sources: _Sources) -> Plan:
    return Plan(tuple(tuple(sources(row, survivors, _even_ranges(row, survivors))) for row in rows))


def _peers_first(row: Row, survivors: Sequence[Rank], target: Mapping[Rank, Spans]) -> Iterator[Part]:
    """Lines 6 to 20 of Algorithm 1, but a worker looks at what it has itself first: several may have the same bytes."""
    for rank, wanted in target.items():
        missing = wanted
        for source in (rank, *(other for other in survivors if other != rank)):
            held = row.held.get(source, ())
            yield from (Part(rank, span, source) for span in common(missing, held))
            missing = without(missing, held)
        yield from (Part(rank, span, None) for span in missing)


def _own_or_reload(row: Row, survivors: Sequence[Rank], target: Mapping[Rank, Spans]) -> Iterator[Part]:
    for rank, wanted in target.items():
        held = row.held.get(rank, ())
        yield from (Part(rank, span, rank) for span in common(wanted, held))
        yield from (Part(rank, span, None) for span in without(wanted, held))


def _reload(row: Row, survivors: Sequence[Rank], target: Mapping[Rank, Spans]) -> Iterator[Part]:
    return (Part(rank, span, None) for rank, wanted in target.items() for span in wanted)


# -- spans ---------------------------------------------------------------------------------------


def united(spans: Iterable[Span]) -> Spans:
    """The bytes of all of them, in order; those that touch become one."""
    found: list[Span] = []
    for span in sorted(span for span in spans if span.end > span.begin):
        if found and span.begin <= found[-1].end:
            found[-1] = Span(found[-1].begin, max(found[-1].end, span.end))
        else:
            found.append(span)
    return tuple(found)


def common(one: Spans, other: Spans) -> Spans:
    """Bytes of both."""
    return united(Span(max(a.begin, b.begin), min(a.end, b.end)) for a in one for b in other)


def without(one: Spans, other: Spans) -> Spans:
    """Bytes of the first that the second does not have."""
    found = list(one)
    for b in other:
        halves = ((Span(a.begin, min(a.end, b.begin)), Span(max(a.begin, b.end), a.end)) for a in found)
        found = [half for pair in halves for half in pair if half.end > half.begin]
    return united(found)
