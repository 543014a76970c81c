"""The experts' kernels against the reference; their plans against sorting in Python."""

import pytest
import torch
from torch import Tensor

from everserve.backends.cpu.reference import ReferenceOps
from everserve.backends.cuda.lanes.local_experts import LocalCudaExperts
from everserve.backends.cuda.ops.experts import (
    FEW_ROWS,
    MANY_ROWS,
    SOME_ROWS,
    Cut,
    ExpertArena,
    combine,
    cut_for,
    down,
    gate_up,
    plan_local,
)
from everserve.backends.cuda.ops.ops import CudaOps
from everserve.model.shard_choice import all_slices
from tests.kernels.toy_experts import assert_close, make_arena, random_routes, reference_slots

CUTS = [FEW_ROWS, SOME_ROWS, MANY_ROWS]


def compute(
    x_TD: Tensor, ids_TK: Tensor, arena: ExpertArena, layer: int, cut: Cut, stop: Tensor, num_slices: int = 1
) -> tuple[Tensor, Tensor]:
    """pos_TK, and y of the sorted rows."""
    slot_of_N = torch.arange(arena.num_slots, dtype=torch.int32, device=x_TD.device)
    layer_at = torch.tensor([layer], dtype=torch.int32, device=x_TD.device)
    plan = plan_local(ids_TK, slot_of_N, arena.num_slots, cut, stop)
    h_RF = x_TD.new_full((ids_TK.numel(), arena.expert_size), float("nan"))
    y_RD = x_TD.new_full((ids_TK.numel(), arena.hidden_size), float("nan"))
    for i in range(num_slices):
        gate_up(x_TD.data_ptr(), plan.src_R, arena, layer_at, plan.tiles, h_RF, stop, i, num_slices)
    for i in range(num_slices):
        down(h_RF, arena, layer_at, plan.tiles, y_RD.data_ptr(), None, stop, i, num_slices)
    return plan.pos_TK, y_RD


@pytest.mark.parametrize(
    "num_tokens, num_real, top_k, num_slots",
    [(1, 1, 2, 8), (24, 17, 4, 5), (700, 690, 4, 37), (2100, 2090, 4, 8), (2600, 0, 4, 3)],  # the last two in chunks
)
@pytest.mark.parametrize("cut", [FEW_ROWS, MANY_ROWS], ids=lambda cut: str(cut.rows))
def test_plan_is_a_stable_sort_by_slot(device, stop, num_tokens, num_real, top_k, num_slots, cut) -> None:
    ids_TK, _ = random_routes(num_tokens, num_real, top_k, num_slots, device)
    slot_of_N = torch.randperm(num_slots).to(torch.int32).to(device)
    pos_TK, src_R, tiles = plan_local(ids_TK, slot_of_N, num_slots, cut, stop)

    slot_R = torch.where(ids_TK >= 0, slot_of_N[ids_TK.long()], num_slots).flatten().cpu()
    order = slot_R.argsort(stable=True)[: num_real * top_k]
    assert src_R[: len(order)].tolist() == (order // top_k).tolist()
    expected_pos = torch.full((ids_TK.numel(),), -1)
    expected_pos[order] = torch.arange(len(order))
    assert pos_TK.flatten().tolist() == expected_pos.tolist()

    expected, row = [], 0
    for slot, count in enumerate(slot_R.bincount(minlength=num_slots)[:num_slots].tolist()):
        expected += [(slot, row + i, min(cut.rows, count - i)) for i in range(0, count, cut.rows)]
        row += count
    num_tiles = int(tiles.num_tiles[0])
    table = torch.stack([tiles.slot_M, tiles.row_M, tiles.size_M], dim=1)[:num_tiles]
    assert [tuple(tile) for tile in table.tolist()] == expected


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: str(cut.rows))
@pytest.mark.parametrize("hidden_size, expert_size", [(128, 64), (72, 104)])
def test_local_experts_agree_with_the_reference(device, stop, cut, hidden_size, expert_size) -> None:
    arena, weights = make_arena(2, 4, hidden_size, expert_size, device)
    x_TD = torch.randn(50, hidden_size, device=device).bfloat16()
    residual_TD = torch.randn(50, hidden_size, device=device)
    ids_TK, weights_TK = random_routes(50, 45, 2, 4, device)
    pos_TK, y_RD = compute(x_TD, ids_TK, arena, 1, cut, stop)
    out_TD = combine(y_RD.data_ptr(), pos_TK, weights_TK, residual_TD, stop)

    ops = ReferenceOps(device)
    token_R = torch.arange(45, dtype=torch.int32, device=device).repeat_interleave(2)
    y = ops.expert_rows(x_TD.float(), token_R, ids_TK[:45].flatten(), reference_slots(weights[1], device))
    expected_TD = ops.combine(y.view(45, 2, -1), weights_TK[:45], residual_TD[:45])
    assert_close(out_TD[:45], expected_TD)
    assert torch.equal(out_TD[45:], residual_TD[45:]), "padding"


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: str(cut.rows))
def test_bits_depend_on_the_row_alone(device, stop, cut) -> None:
    arena, _ = make_arena(1, 3, 128, 96, device)
    x_TD = torch.randn(40, 128, device=device).bfloat16()
    ids_TK, _ = random_routes(40, 40, 2, 3, device)
    pos_TK, y_RD = compute(x_TD, ids_TK, arena, 0, SOME_ROWS, stop)
    for tokens in ([7], [3, 7, 39], [*range(1, 40)]):
        some_pos, some_y = compute(x_TD[tokens], ids_TK[tokens], arena, 0, cut, stop)
        assert torch.equal(some_y[some_pos.long()], y_RD[pos_TK[tokens].long()])


@pytest.mark.parametrize("num_slices", [2, 7])
def test_slices_add_up(device, stop, num_slices) -> None:
    arena, _ = make_arena(1, 3, 136, 200, device)
    x_TD = torch.randn(40, 136, device=device).bfloat16()
    ids_TK, _ = random_routes(40, 40, 2, 3, device)
    _, whole = compute(x_TD, ids_TK, arena, 0, FEW_ROWS, stop)
    _, in_slices = compute(x_TD, ids_TK, arena, 0, FEW_ROWS, stop, num_slices)
    assert not whole.isnan().any()
    assert torch.equal(whole, in_slices)


@pytest.mark.parametrize("num_slices", [1, 3])
def test_bands_do_not_change_bits(device, stop, num_slices) -> None:
    """Seven tiles or more in bands of two: the last one is not full."""
    arena, _ = make_arena(1, 3, 136, 200, device)
    x_TD = torch.randn(50, 136, device=device).bfloat16()
    ids_TK, _ = random_routes(50, 47, 2, 3, device)
    banded = FEW_ROWS._replace(gate_up=FEW_ROWS.gate_up._replace(band=2), down=FEW_ROWS.down._replace(band=2))
    _, expected = compute(x_TD, ids_TK, arena, 0, FEW_ROWS, stop)
    _, found = compute(x_TD, ids_TK, arena, 0, banded, stop, num_slices)
    assert torch.equal(found[:94], expected[:94]) and not found[:94].isnan().any()


def test_a_slice_is_a_share(device, stop) -> None:
    arena, _ = make_arena(1, 2, 64, 512, device)
    x_TD = torch.randn(8, 64, device=device).bfloat16()
    ids_TK, _ = random_routes(8, 8, 2, 2, device)
    plan = plan_local(ids_TK, torch.arange(2, dtype=torch.int32, device=device), 2, FEW_ROWS, stop)
    h_RF = x_TD.new_full((16, 512), float("nan"))
    layer_at = torch.zeros(1, dtype=torch.int32, device=device)
    gate_up(x_TD.data_ptr(), plan.src_R, arena, layer_at, plan.tiles, h_RF, stop, 1, 4)
    assert h_RF.isnan().float().mean() == 0.75


def test_nobody_moves_when_stopped(device, stop, monkeypatch) -> None:
    arena, _ = make_arena(1, 3, 64, 64, device)
    x_TD = torch.randn(4, 64, device=device).bfloat16()
    ids_TK, weights_TK = random_routes(4, 4, 2, 3, device)
    slot_of_N = torch.arange(3, dtype=torch.int32, device=device)
    plan = plan_local(ids_TK, slot_of_N, 3, FEW_ROWS, stop)
    h_RF, y_RD = x_TD.new_zeros(8, 64), x_TD.new_zeros(8, 64)
    stop.fill_(5)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    many_TK, _ = random_routes(2100, 2100, 4, 3, device)
    assert not any(
        part.any() for ids in (ids_TK, many_TK) for part in plan_local(ids, slot_of_N, 3, FEW_ROWS, stop)[:2]
    )
    gate_up(x_TD.data_ptr(), plan.src_R, arena, stop.new_zeros(1), plan.tiles, h_RF, stop)
    down(h_RF + 1, arena, stop.new_zeros(1), plan.tiles, y_RD.data_ptr(), None, stop)
    combine(y_RD.data_ptr(), plan.pos_TK, weights_TK, x_TD.float(), stop)
    assert not h_RF.any() and not y_RD.any()


def test_no_rows_at_all(device, stop) -> None:
    arena, _ = make_arena(1, 3, 64, 64, device)
    x_TD, residual_TD = torch.randn(4, 64, device=device).bfloat16(), torch.randn(4, 64, device=device)
    ids_TK, weights_TK = random_routes(4, 0, 2, 3, device)
    pos_TK, y_RD = compute(x_TD, ids_TK, arena, 0, FEW_ROWS, stop)
    assert y_RD.isnan().all()
    assert torch.equal(combine(y_RD.data_ptr(), pos_TK, weights_TK, residual_TD, stop), residual_TD)


def test_the_cut_grows_with_the_batch() -> None:
    assert [cut_for(rows).rows for rows in (1, 16, 17, 128, 129, 10_000)] == [16, 16, 64, 64, 128, 128]


def test_a_slot_computes_with_the_place_that_the_table_names(device, stop) -> None:
    """Slots of one arena in memory for more: slot 0 moves behind the own places, to where a copy of slot 2 lies."""
    arena, weights = make_arena(2, 3, 128, 64, device)
    room = torch.full((10, 3, 64, 128), float("nan"), dtype=torch.bfloat16, device=device)
    wide = ExpertArena.of_experts(room, 2, 3)
    for slot, expert in enumerate(weights[1]):
        wide.fill(1, slot, *expert)
    room[8] = room[5]
    room[3] = float("nan")
    wide.place_LS[1, 0] = 8
    x_TD = torch.randn(9, 128, device=device).bfloat16()
    ids_TK = torch.tensor([[0, 1]] * 9, dtype=torch.int32, device=device)
    as_if_TK = torch.tensor([[2, 1]] * 9, dtype=torch.int32, device=device)
    pos_TK, y_RD = compute(x_TD, ids_TK, wide, 1, FEW_ROWS, stop)
    expected_pos_TK, expected_RD = compute(x_TD, as_if_TK, arena, 1, FEW_ROWS, stop)
    assert torch.equal(y_RD[pos_TK.long()], expected_RD[expected_pos_TK.long()])


@pytest.mark.parametrize("num_tokens", [1, 21])
def test_slices_are_a_dense_ffn(device, num_tokens) -> None:
    """Every row goes to all of them, padding nowhere; the bits of a row do not depend on its company."""
    arena, weights = make_arena(2, 5, 64, 24, device)
    ops = CudaOps(device, max_num_seqs=4, max_model_len=64)
    experts = LocalCudaExperts(ops, arena, (3, 6), 5)
    x_TD, residual_TD = torch.randn(num_tokens + 3, 64, device=device).bfloat16(), torch.randn(num_tokens + 3, 64)
    residual_TD = residual_TD.to(device)
    positions_T = torch.arange(num_tokens + 3, dtype=torch.int32, device=device)
    positions_T[num_tokens:] = -1
    out_TD = experts(6, *all_slices(positions_T, 5), x_TD, residual_TD)
    assert torch.equal(out_TD[num_tokens:], residual_TD[num_tokens:]), "padding"
    real = slice(0, num_tokens)
    reference = ReferenceOps(device).feed_forward(
        x_TD[real].float(), reference_slots(weights[1], device), residual_TD[real]
    )
    assert_close(out_TD[real], reference)
    alone = experts(6, *all_slices(positions_T[:1], 5), x_TD[:1].contiguous(), residual_TD[:1].contiguous())
    assert torch.equal(alone, out_TD[:1])
