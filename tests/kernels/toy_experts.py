"""Small experts with random weights, for the kernels' arena and for the reference alike."""

import torch
from torch import Tensor

from everserve.backends.cpu.reference import ReferenceOps, ReferenceSlots
from everserve.backends.cuda.ops.experts import ExpertArena
from everserve.model.ops import ShardWeights

Weights = list[list[tuple[Tensor, Tensor, Tensor]]]  # [layer][slot] -> gate, up, down


def make_arena(
    num_layers: int, num_slots: int, hidden_size: int, expert_size: int, device: torch.device
) -> tuple[ExpertArena, Weights]:
    shape = (num_layers * num_slots, 3, expert_size, hidden_size)
    experts = torch.empty(shape, dtype=torch.bfloat16, device=device)
    arena = ExpertArena.of_experts(experts, num_layers, num_slots)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, device=device) * columns**-0.5).bfloat16()

    weights = [
        [
            (matrix(expert_size, hidden_size), matrix(expert_size, hidden_size), matrix(hidden_size, expert_size))
            for _ in range(num_slots)
        ]
        for _ in range(num_layers)
    ]
    for layer, slots in enumerate(weights):
        for slot, expert in enumerate(slots):
            arena.fill(layer, slot, *expert)
    return arena, weights


def reference_slots(experts: list[tuple[Tensor, Tensor, Tensor]], device: torch.device) -> ReferenceSlots:
    slots = ReferenceOps(device).expert_slots(len(experts))
    assert isinstance(slots, ReferenceSlots)
    for slot, expert in enumerate(experts):
        slots.fill(slot, ShardWeights(*expert))
    return slots


def random_routes(
    num_tokens: int, num_real: int, top_k: int, num_experts: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """ids_TK, with -1 in the rows after the real ones, and weights_TK."""
    ids_TK = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :top_k].to(torch.int32)
    ids_TK[num_real:] = -1
    return ids_TK.contiguous().to(device), torch.rand(num_tokens, top_k, device=device)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """h and y are rounded to bfloat16 on the way, in the reference they are not."""
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)
