"""A cluster in one process: attention workers and expert workers around the same lanes, one kernel after the other.

Lane (a, e) lies at base + (a * E + e) * lane_bytes. So an attention worker's lanes are lane_bytes apart, as they should
be, and those of an expert worker E times as far: its shape has room to spare at the end of each lane.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everserve.backends.cuda.lanes import send, serve
from everserve.backends.cuda.lanes.batches import serve_experts
from everserve.backends.cuda.lanes.lane import NUM_BOXES, CudaLaneShape
from everserve.backends.cuda.lanes.send import SendState
from everserve.backends.cuda.lanes.serve import ServeState
from tests.kernels.toy_experts import make_arena

HIDDEN_SIZE, EXPERT_SIZE = 64, 96
NUM_EXPERTS, TOP_K, NUM_LAYERS = 6, 2, 4


@dataclass(frozen=True)
class SpreadLaneShape(CudaLaneShape):
    """Lanes that are further apart than they need to be."""

    spread: int = 1

    def lane_bytes(self) -> int:
        return self.spread * super().lane_bytes()


@dataclass
class Attention:
    """One attention worker. Expert n of every layer is where the tables say."""

    state: SendState
    place_of_LN: Tensor
    expert_at_LP: Tensor
    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    residual_TD: Tensor
    y_row_TK: Tensor = field(default_factory=lambda: torch.empty(0))

    def send(self, layer: int, replay: bool = False) -> None:
        next_layer = layer + 1 if layer + 1 < NUM_LAYERS else -1
        self.y_row_TK = send.plan(self.state, self.ids_TK, self.place_of_LN[layer], self.expert_at_LP[layer], layer)
        send.post(self.state, self.x_TD, self.y_row_TK, layer, next_layer, replay)

    def finish(self, layer: int) -> Tensor:
        return send.collect(self.state, self.y_row_TK, self.weights_TK, self.residual_TD, layer)

    def route(self, rank_N: list[int], slot_N: list[int]) -> None:
        """The same in all layers."""
        rank_LN = torch.tensor(rank_N).expand(NUM_LAYERS, -1)
        slot_LN = torch.tensor(slot_N).expand(NUM_LAYERS, -1)
        tables = send.places(rank_LN, slot_LN, self.state.num_ranks, self.state.shape.num_slots)
        self.place_of_LN.copy_(tables[0])
        self.expert_at_LP.copy_(tables[1])


@dataclass
class Expert:
    """One expert worker: expert n is in slot (n + rank) % N."""

    state: ServeState
    arena: Any
    h_RF: Tensor

    def serve(self) -> int:
        """One batch; its layer, or -1."""
        serve_experts(self.state, self.arena, self.h_RF)
        return int(self.state.layer.item())

    def answer(self) -> int:
        """Like `serve`, but nothing is computed."""
        serve.choose(self.state)
        self.state.tiles.num_tiles.zero_()
        serve.down_and_answer(self.state, self.h_RF, self.arena, self.state.tiles)
        return int(self.state.layer.item())


@dataclass
class Cluster:
    memory: Tensor  # int8
    shape: CudaLaneShape
    attention: list[Attention]
    experts: list[Expert]
    weights: list[list[tuple[Tensor, Tensor, Tensor]]]  # [layer][expert]

    def word(self, a: int, e: int, at: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """A word of a lane, to read and to write."""
        first = (a * len(self.experts) + e) * self.shape.lane_bytes() + at
        return self.memory[first : first + dtype.itemsize].view(dtype)

    def counts(self, a: int, e: int, box: int) -> Tensor:
        first = (a * len(self.experts) + e) * self.shape.lane_bytes() + self.shape.counts_at(box)
        return self.memory[first : first + 4 * self.shape.num_slots].view(torch.int32)


def make_cluster(
    device: torch.device,
    *,
    num_attention: int = 2,
    num_experts: int = 2,
    num_tokens: int = 12,
    max_rows: int | None = None,
    max_spins: int = 4,
) -> Cluster:
    shape = CudaLaneShape(num_tokens, TOP_K, HIDDEN_SIZE, NUM_EXPERTS)
    spread = SpreadLaneShape(num_tokens, TOP_K, HIDDEN_SIZE, NUM_EXPERTS, spread=num_experts)
    lane_bytes = shape.lane_bytes()
    memory = torch.full((num_attention * num_experts * lane_bytes,), 0x7F, dtype=torch.int8, device=device)
    memory.view(-1, lane_bytes)[:, : shape.counts_at(NUM_BOXES)] = 0  # of the rest nothing is expected

    arena, weights = make_arena(NUM_LAYERS, NUM_EXPERTS, HIDDEN_SIZE, EXPERT_SIZE, device)
    cluster = Cluster(memory, shape, [], [], weights)
    for a in range(num_attention):
        stop = torch.zeros(1, dtype=torch.int32, device=device)
        state = SendState.empty(shape, memory.data_ptr() + a * num_experts * lane_bytes, num_experts, stop)
        state.present_E.fill_(1)
        state.lead.fill_(0)
        cluster.attention.append(_make_attention(state, num_tokens, device))
    for e in range(num_experts):
        arena, _ = make_arena(NUM_LAYERS, NUM_EXPERTS, HIDDEN_SIZE, EXPERT_SIZE, device)
        for layer in range(NUM_LAYERS):
            for n, expert in enumerate(weights[layer]):
                arena.fill(layer, (n + e) % NUM_EXPERTS, *expert)
        stop = torch.zeros(1, dtype=torch.int32, device=device)
        capacity = max_rows or num_attention * shape.max_rows
        state = ServeState.empty(
            spread, memory.data_ptr() + e * lane_bytes, num_attention, NUM_LAYERS, capacity, stop,
            num_experts=NUM_EXPERTS,
        )  # fmt: skip
        state.healthy_A.fill_(1)
        state.held_LS.copy_(torch.tensor([(s - e) % NUM_EXPERTS for s in range(NUM_EXPERTS)]).expand(NUM_LAYERS, -1))
        state.limits.copy_(torch.tensor([max_spins, 0, 0]))
        h_RF = torch.zeros(capacity, EXPERT_SIZE, dtype=torch.bfloat16, device=device)
        cluster.experts.append(Expert(state, arena, h_RF))
    return cluster


def _make_attention(state: SendState, num_tokens: int, device: torch.device) -> Attention:
    """The last two rows are padding. Expert n is at rank n % E."""
    num_places = state.num_ranks * state.shape.num_slots
    ids_TK = torch.rand(num_tokens, NUM_EXPERTS).argsort(dim=1)[:, :TOP_K].to(torch.int32).contiguous()
    ids_TK[-2:] = -1
    worker = Attention(
        state,
        torch.empty(NUM_LAYERS, NUM_EXPERTS, dtype=torch.int32, device=device),
        torch.empty(NUM_LAYERS, num_places, dtype=torch.int32, device=device),
        x_TD=torch.randn(num_tokens, HIDDEN_SIZE, device=device).bfloat16(),
        ids_TK=ids_TK.to(device),
        weights_TK=torch.rand(num_tokens, TOP_K, device=device),
        residual_TD=torch.randn(num_tokens, HIDDEN_SIZE, device=device),
    )
    ranks = [n % state.num_ranks for n in range(NUM_EXPERTS)]
    worker.route(ranks, [(n + rank) % NUM_EXPERTS for n, rank in enumerate(ranks)])
    return worker
