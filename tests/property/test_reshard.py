"""Four planners for the same loss: what they have in common, and what ours does not need."""

from hypothesis import given
from hypothesis import strategies as st

from everserve.plan.layer_plan import Room
from everserve.plan.moves import next_moves
from everserve.plan.repair import replan
from everserve.plan.shards import Spread, place_shards
from everserve.tables.calls import Call, ShardKind
from everserve.tables.ids import Rank
from everserve.tables.slots import HeldSlots
from everserve_bench.planners import reshard
from everserve_bench.planners.reshard import (
    PLANNERS,
    Plan,
    Row,
    Span,
    after,
    common,
    lost_bytes,
    rows_of,
    united,
    without,
)
from tests.support.examples import examples

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=5).map(
    lambda pairs: united(Span(min(pair), max(pair)) for pair in pairs)
)
kinds = st.sampled_from((ShardKind.HEAD, ShardKind.SLICE))


@st.composite
def worlds(draw) -> tuple[tuple[Row, ...], list[Rank]]:
    """Rows as an instance begins with them, and in which order workers are lost; at least one is left."""
    ranks = [Rank(rank) for rank in range(draw(st.integers(2, 8)))]
    calls = [Call(layer=i, kind=draw(kinds), num_shards=draw(st.integers(len(ranks), 12))) for i in range(3)]
    spread = draw(st.sampled_from((Spread.CYCLIC, Spread.CONTIGUOUS)))
    rows = rows_of(place_shards(calls, ranks, 0, spread), draw(st.tuples(*[st.integers(1, 9)] * 3)))
    return rows, draw(st.permutations(ranks))[: draw(st.integers(1, len(ranks) - 1))]


def survivors_of(rows: tuple[Row, ...], *lost: Rank) -> list[Rank]:
    return [rank for rank in sorted(rows[0].held) if rank not in lost]


@examples(13)
@given(one=spans, other=spans)
def test_spans_are_sets_of_bytes(one, other):
    def as_set(found) -> set[int]:
        return {byte for span in found for byte in range(*span)}

    assert as_set(common(one, other)) == as_set(one) & as_set(other)
    assert as_set(without(one, other)) == as_set(one) - as_set(other)
    assert as_set(united((*one, *other))) == as_set(one) | as_set(other)


def check(rows: tuple[Row, ...], survivors: list[Rank], plan: Plan) -> None:
    """Every byte has a place afterwards, comes from where it is, and no worker gets one twice."""
    for index, row in enumerate(rows):
        assert united(span for held in plan.held(index).values() for span in held) == (Span(0, row.num_bytes),)
        for rank in survivors:
            mine = [part.span for part in plan.parts[index] if part.rank == rank]
            assert sum(span.num_bytes for span in mine) == sum(span.num_bytes for span in plan.held(index)[rank])
        for part in plan.parts[index]:
            assert part.rank in survivors and (part.source is None or part.source in survivors)
            assert part.source is None or not without((part.span,), row.held[part.source])
    assert plan.kept_bytes + plan.peer_bytes + plan.reload_bytes >= sum(row.num_bytes for row in rows)


@examples(13)
@given(world=worlds())
def test_every_planner_gives_every_byte_a_place_after_every_loss_and_when_all_are_back(world):
    """Each goes on from its own plan, with as few as one worker; those that return have nothing."""
    for planner in PLANNERS.values():
        rows, lost = world
        for i in range(len(lost)):
            survivors = survivors_of(world[0], *lost[: i + 1])
            plan = planner(rows, survivors)
            check(rows, survivors, plan)
            assert plan.reload_bytes >= lost_bytes(rows, survivors)
            rows = after(rows, plan)
        everyone = survivors_of(world[0])
        plan = planner(rows, everyone)
        check(rows, everyone, plan)
        assert planner in (reshard.greedy, reshard.full_reload) or plan.reload_bytes == 0, "peers have everything"


@examples(13)
@given(world=worlds())
def test_ours_reloads_what_is_lost_and_moves_nothing_else(world):
    """After one loss after the other: survivors keep all that they have, so there is nothing to take from peers."""
    rows, lost = world
    for i in range(len(lost)):
        survivors = survivors_of(world[0], *lost[: i + 1])
        plan = reshard.keep_and_deal(rows, survivors)
        assert plan.reload_bytes == lost_bytes(rows, survivors) and plan.peer_bytes == 0
        for index, row in enumerate(rows):
            assert all(not without(row.held[rank], plan.held(index)[rank]) for rank in survivors)
        theirs = reshard.continuous(rows, survivors)
        assert theirs.reload_bytes == plan.reload_bytes <= reshard.greedy(rows, survivors).reload_bytes
        rows = after(rows, plan)


@examples(13)
@given(world=worlds())
def test_plans_for_the_same_target_move_what_their_target_needs_and_no_more(world):
    rows, lost = world
    survivors = survivors_of(rows, *lost)
    plans = {name: PLANNERS[name](rows, survivors) for name in ("continuous", "greedy", "full reload")}
    for index, row in enumerate(rows):
        moved = {name: moved_bytes(plan, index) for name, plan in plans.items()}
        targets = {name: plan.held(index) for name, plan in plans.items()}
        assert targets["continuous"] == targets["greedy"] == targets["full reload"]
        for rank in survivors:
            needed = without(targets["continuous"][rank], row.held[rank])
            assert moved["continuous"].get(rank, ()) == moved["greedy"].get(rank, ()) == needed
            assert not without(needed, moved["full reload"].get(rank, ()))


def moved_bytes(plan: Plan, index: int) -> dict[Rank, reshard.Spans]:
    found: dict[Rank, list[Span]] = {}
    for part in plan.parts[index]:
        if part.source != part.rank:
            found.setdefault(part.rank, []).append(part.span)
    return {rank: united(spans) for rank, spans in found.items()}


@examples(13)
@given(world=worlds())
def test_workers_are_told_to_fill_what_ours_reloads(world):
    """From the placement of the orchestrator and what workers hold, to the slots that they fill. Who fills them, and
    what moves besides, is up to what makes work even."""
    rows, lost = world
    survivors = survivors_of(rows, lost[0])
    before = reshard.placement_of(rows)
    slots = tuple(max(-(-row.call.num_shards // len(survivors)), before.slots_by_call[i]) for i, row in enumerate(rows))
    placement = replan(before, [Room(rank, rank, max(slots), slots) for rank in survivors])
    seats = [seat for seat in before.seats if seat.rank in survivors]
    have = {
        seat.rank: HeldSlots(experts=seat.slots(slots).experts, generations=tuple((0,) * num for num in slots))
        for seat in seats
    }
    moves = next_moves(placement, have, survivors, survivors, {}, lambda rank, place: True)
    told = {(move.rank, move.fill.call_index, move.fill.expert) for move in moves}
    plan = reshard.keep_and_deal(rows, survivors)
    wanted = {
        (part.rank, index, shard)
        for index, row in enumerate(rows)
        for part in plan.parts[index]
        if part.source is None
        for shard in range(part.span.begin // row.shard_bytes, part.span.end // row.shard_bytes)
    }
    lost_shards = {(index, shard) for _, index, shard in wanted}
    assert {(index, shard) for _, index, shard in told} >= lost_shards
    urgent = {(move.fill.call_index, move.fill.expert) for move in moves if move.urgency == 0}
    assert urgent >= lost_shards, "no other worker has it"
