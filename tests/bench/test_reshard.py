"""The papers' own examples, and what a decline from eight devices to two costs each planner."""

import itertools

import pytest

from everserve.plan.shards import Spread, place_shards
from everserve.tables.calls import Call, ShardKind
from everserve.tables.ids import Rank
from everserve_bench.planners import reshard
from everserve_bench.planners.reshard import PLANNERS, Part, Row, Span, after, lost_bytes, rows_of


def anchortp_figure_3() -> tuple[Row, ...]:
    """1024 rows on four GPUs, numbered from 1."""
    held = {Rank(gpu): (Span(256 * (gpu - 1), 256 * gpu),) for gpu in (1, 2, 3, 4)}
    return (Row(Call(layer=0, kind=ShardKind.SLICE, num_shards=1024), 1, held),)


SURVIVORS = [Rank(1), Rank(3), Rank(4)]


def test_figure_3_of_anchortp():
    plan = reshard.continuous(anchortp_figure_3(), SURVIVORS)
    assert sorted(plan.parts[0], key=lambda part: part.span) == [
        Part(Rank(1), Span(0, 256), Rank(1)),
        Part(Rank(1), Span(256, 341), None),
        Part(Rank(3), Span(341, 512), None),
        Part(Rank(3), Span(512, 682), Rank(3)),
        Part(Rank(4), Span(682, 768), Rank(3)),
        Part(Rank(4), Span(768, 1024), Rank(4)),
    ]
    assert (plan.reload_bytes, plan.peer_bytes, plan.kept_bytes) == (256, 86, 682)


@pytest.mark.parametrize(
    ("planner", "reloaded", "from_peers"),
    [("keep and deal", 256, 0), ("continuous", 256, 86), ("greedy", 342, 0), ("full reload", 1024, 0)],
)
def test_the_same_loss_by_all_planners(planner, reloaded, from_peers):
    plan = PLANNERS[planner](anchortp_figure_3(), SURVIVORS)
    assert (plan.reload_bytes, plan.peer_bytes) == (reloaded, from_peers)
    assert lost_bytes(anchortp_figure_3(), SURVIVORS) == 256


def test_survivors_reload_about_as_much_each():
    """So that reloads side by side end together."""
    plan = reshard.keep_and_deal(anchortp_figure_3(), SURVIVORS)
    assert sorted(plan.reloaded_by().values()) == [85, 85, 86]


def test_who_has_a_copy_keeps_it():
    """Two workers have the same bytes: each keeps its own, and nothing is lost with a third."""
    held = {Rank(0): (Span(0, 4),), Rank(1): (Span(0, 4),), Rank(2): (Span(0, 2),)}
    rows = (Row(Call(layer=0, kind=ShardKind.SLICE, num_shards=2), 2, held),)
    assert lost_bytes(rows, [Rank(0), Rank(1)]) == 0
    plan = reshard.continuous(rows, [Rank(0), Rank(1)])
    assert plan.kept_bytes == 4 and plan.reload_bytes == plan.peer_bytes == 0


def decline(planner: str, num_layers: int = 24) -> tuple[list[int], list[int], tuple[Row, ...]]:
    """From eight to two, always the highest rank: bytes reloaded and bytes from peers at each step."""
    calls = [
        Call(layer=layer, kind=kind, num_shards=8)
        for layer in range(num_layers)
        for kind in (ShardKind.HEAD, ShardKind.SLICE)
    ]
    rows = rows_of(place_shards(calls, [Rank(rank) for rank in range(8)], 0, Spread.CYCLIC), [840] * len(calls))
    reloaded, from_peers = [], []
    for num in range(7, 1, -1):
        plan = PLANNERS[planner](rows, [Rank(rank) for rank in range(num)])
        reloaded.append(plan.reload_bytes)
        from_peers.append(plan.peer_bytes)
        rows = after(rows, plan)
    return reloaded, from_peers, rows


def test_a_decline_costs_ours_the_lost_share_at_each_step():
    whole = 48 * 8 * 840
    reloaded, from_peers, rows = decline("keep and deal")
    assert not any(from_peers)
    assert [step / whole for step in reloaded] == pytest.approx([1 / num for num in range(8, 2, -1)], rel=0.1)
    assert sum(reloaded) + sum(from_peers) < sum(map(sum, decline("continuous")[:2]))
    held = [sum(s.num_bytes for row in rows for s in row.held[Rank(rank)]) for rank in range(2)]
    assert sum(held) == whole and max(held) == min(held)


@pytest.mark.parametrize("kind", [ShardKind.HEAD, ShardKind.SLICE])
def test_a_decline_leaves_workers_with_as_much_over_all_layers(kind):
    """Ties are broken in turns: no worker gets the lost shard of every layer."""
    calls = [Call(layer=layer, kind=kind, num_shards=8) for layer in range(24)]
    ranks = [Rank(rank) for rank in range(8)]
    for lost in itertools.islice(itertools.permutations(ranks, 5), 7, 6720, 1600):
        rows = rows_of(place_shards(calls, ranks, 0, Spread.CYCLIC), [1] * len(calls))
        for i in range(len(lost)):
            survivors = [rank for rank in ranks if rank not in lost[: i + 1]]
            rows = after(rows, reshard.keep_and_deal(rows, survivors))
            held = [sum(s.num_bytes for row in rows for s in row.held[rank]) for rank in survivors]
            assert max(held) * len(held) / sum(held) < 1.1, (lost[: i + 1], held)
