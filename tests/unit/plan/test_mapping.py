"""Which workers serve what others left in memory, and for how long."""

import json

import pytest
from msgspec.structs import replace

from everserve.config.cluster import ClusterConfig
from everserve.control.hold.design import capacity_of, first_goal
from everserve.model.config import ModelConfig
from everserve.plan.mapping import in_vain, next_mappings, not_needed
from everserve.plan.placement import place_experts
from everserve.tables.ids import Rank
from everserve.tables.slots import EMPTY, Fill, HeldSlots, Place
from everserve.wire.messages import StartOrchestrator
from everserve_bench.shapes import SMALL
from tests.support.configs import worker_settings

NUM_LAYERS = 2
ONE, TWO, THREE = Rank(1), Rank(2), Rank(3)
PLACEMENT = place_experts(6, (0, 1), [ONE, TWO, THREE], 0)


def held(own: tuple[int, ...], *mapped: int) -> HeldSlots:
    experts = ((*own, *mapped),) * NUM_LAYERS
    generations = tuple((0,) * len(slots) for slots in experts)
    return HeldSlots(experts=experts, generations=generations, num_mapped=len(mapped))


def everywhere(rank: Rank, lender: Rank) -> bool:
    return True


def mapped(have, left, reaches=everywhere, loads=None, refused=(), told=None) -> list[tuple[Rank, Fill]]:
    moves = next_mappings(PLACEMENT, have, left, told or {}, reaches, range(NUM_LAYERS), lambda: loads or {}, refused)
    return [(move.rank, move.fill) for move in moves]


def test_the_lowest_layer_and_the_most_loaded_expert_come_first_and_workers_share_them():
    have = {TWO: held((2, 3), EMPTY, EMPTY), THREE: held((4, 5), EMPTY, EMPTY)}
    found = mapped(have, {ONE: held((0, 1))}, loads={0: (1.0, 2.0, 0.0, 0.0, 0.0, 0.0)})
    assert found == [
        (TWO, Fill(0, 2, 1)), (THREE, Fill(0, 2, 0)),
        (TWO, Fill(1, 2, 0)), (THREE, Fill(1, 2, 1)),
    ]  # fmt: skip


def test_what_has_a_place_is_not_mapped():
    have = {TWO: held((0, 3), EMPTY), THREE: held((4, 5), 1)}
    assert mapped(have, {ONE: held((0, 1))}) == []


def test_what_workers_were_told_counts():
    """One that is about to clear a slot has it free; what is being filled has a place."""
    have = {TWO: held((2, 3), 0, EMPTY), THREE: held((4, 5), EMPTY)}
    told = {TWO: ((), (Place(0, 2),)), THREE: ((Fill(0, 2, 1), Fill(1, 2, 1)), ())}
    assert mapped(have, {ONE: held((0, 1))}, told=told) == [(TWO, Fill(0, 2, 0))]


def test_there_may_be_too_few_slots():
    have = {TWO: held((2, 3), EMPTY)}
    assert mapped(have, {ONE: held((0, 1)), THREE: held((4, 5))}) == [(TWO, Fill(0, 2, 0)), (TWO, Fill(1, 2, 0))]


def test_only_what_a_worker_reaches():
    have = {TWO: held((2, 3), EMPTY, EMPTY)}
    assert mapped(have, {ONE: held((0, 1)), THREE: held((1, 5))}, lambda rank, lender: lender == THREE) == [
        (TWO, Fill(0, 2, 1)), (TWO, Fill(0, 3, 5)), (TWO, Fill(1, 2, 1)), (TWO, Fill(1, 3, 5)),
    ]  # fmt: skip


def test_what_was_tried_in_vain_is_left_to_others():
    have = {TWO: held((2, 3), EMPTY, EMPTY), THREE: held((4, 5), EMPTY)}
    refused = {(TWO, 0, 0), (TWO, 1, 0), (THREE, 1, 0)}
    assert mapped(have, {ONE: held((0, EMPTY))}, refused=refused) == [(THREE, Fill(0, 2, 0))]


def test_nothing_is_mapped_from_a_mapped_slot():
    """It has no memory."""
    assert mapped({TWO: held((2, 3), EMPTY)}, {ONE: held((2, 3), 0)}) == []


def test_what_is_told_in_vain():
    """A ready worker has one of them by now, or the memory that had it is lost."""
    fills, left = (Fill(0, 2, 0), Fill(1, 3, 1)), {ONE: held((0, 1))}
    have = {TWO: held((2, 3), EMPTY, EMPTY)}
    assert not in_vain({TWO: fills}, have, left, everywhere)
    assert in_vain({TWO: fills}, have, {}, everywhere) == [TWO]
    assert in_vain({TWO: fills}, have, left, lambda rank, lender: False)
    assert in_vain({TWO: fills}, have | {THREE: held((4, 1))}, left, everywhere)
    assert not in_vain({TWO: fills}, have | {THREE: held((4, 5), 1)}, left, everywhere), "mapped there: as before"


@pytest.mark.parametrize("owner", [ONE, TWO])
def test_a_slot_in_memory_of_a_ready_worker_ends_it(owner):
    have = {ONE: held((0, 1)), TWO: held((2, 3), 0, 5)} if owner is ONE else {TWO: held((2, 0), 0, 5)}
    assert not_needed(PLACEMENT, have, {ONE, TWO}, {}) == {TWO: {Place(0, 2), Place(1, 2)}}


def test_a_leaving_worker_does_not():
    assert not_needed(PLACEMENT, {ONE: held((0, 1)), TWO: held((2, 3), 0)}, {TWO}, {}) == {}


def test_nor_does_a_slot_that_is_about_to_change():
    have = {ONE: held((0, 1)), TWO: held((2, 3), 0)}
    assert not_needed(PLACEMENT, have, {ONE, TWO}, {ONE: frozenset({Place(0, 0)})}) == {TWO: {Place(1, 2)}}
    few = replace(PLACEMENT, seats=PLACEMENT.seats[:1])  # expert 3 shall have no place
    have = {ONE: held((3, 0)), TWO: held((EMPTY, EMPTY), 3)}
    leaving = {ONE: frozenset({Place(0, 0), Place(1, 0)})}
    assert not_needed(few, have, {ONE, TWO}, leaving) == {TWO: {Place(0, 2), Place(1, 2)}}


@pytest.mark.parametrize(
    ("cluster", "changes", "expected"),
    [
        ({"attention_workers": 1, "expert_workers": 2, "shadow_experts": 0}, {"weights": "memory"}, (4, 4)),
        ({"attention_workers": 1, "expert_workers": 2}, {"weights": "memory"}, (8, 0)),  # each has all
        ({"attention_workers": 1, "expert_workers": 4, "shadow_experts": 1}, {"weights": "memory"}, (3, 3)),
        ({"attention_workers": 1, "expert_workers": 2, "shadow_experts": 0}, {"weights": "mapped"}, (4, 0)),
        ({"attention_workers": 1, "expert_workers": 1}, {"weights": "memory"}, (8, 0)),
        (
            {"attention_workers": 1, "expert_workers": 2, "shadow_experts": 0, "map_experts": "off"},
            {"weights": "memory"},
            (4, 0),
        ),
        ({"attention_workers": 1, "expert_workers": 2, "shadow_experts": 0}, {"device": "cuda"}, (4, 4)),  # of one GPU
        ({"attention_workers": 1, "expert_workers": 2, "shadow_experts": 0}, {"device": "cuda", "gpus": 2}, (4, 0)),
        ({"tensor_parallel_size": 2}, {"divides_heads": True, "tensor_parallel": True}, None),
    ],
)
def test_how_many_slots_there_are_for_that(tmp_path, cluster, changes, expected):
    """As many as with memory, but no more than there are experts; none where no memory can be mapped."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL["mixtral"]))
    changes = {**changes}
    num_gpus = changes.pop("gpus", 1 if changes.get("device") == "cuda" else 0)
    settings = worker_settings(directory=str(tmp_path), **changes)
    model = ModelConfig.from_source(settings.model)
    start = StartOrchestrator(cluster=ClusterConfig(**cluster).resolved(), worker=settings, num_gpus=num_gpus)
    capacity = capacity_of(start, model, first_goal(start, model))
    if expected is None:
        assert capacity.mapped_slots == 0
    else:
        assert (capacity.slots_per_layer, capacity.mapped_slots) == expected
