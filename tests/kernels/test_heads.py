"""Heads of several homes in one batch, against all heads of one home together: the same bits."""

import numpy as np
import pytest
import torch
from torch import Tensor

from everserve.backends.cuda.device_batch import SEGMENT, DeviceBatch
from everserve.backends.cuda.lanes import send
from everserve.backends.cuda.lanes.batches import serve_heads
from everserve.backends.cuda.lanes.lane import NUM_BOXES, CudaLaneShape
from everserve.backends.cuda.lanes.page import PageShape
from everserve.backends.cuda.lanes.send import SendState
from everserve.backends.cuda.lanes.send_heads import collect_heads, turn_page
from everserve.backends.cuda.lanes.serve import ServeState
from everserve.backends.cuda.ops import attention, rows
from everserve.backends.cuda.ops.dense import Linear
from everserve.backends.cuda.ops.heads import HeadArena, HeadShape
from everserve.backends.cuda.ops.sums import Sums
from everserve.backends.cuda.staging import Staging
from everserve.engine.batching import Rows
from everserve.model.ops import Scores
from everserve.model.rope import Rotation
from everserve.model.shard_choice import all_slices

HEADS, GROUP, SIZE, HIDDEN, BLOCK = 2, 2, 16, 64, 16
MAX_LEN = 3 * SEGMENT
BLOCKS = MAX_LEN // BLOCK  # of a home
MAX_ROWS, MAX_SEQS = 8, 4


class Side:
    """One home and one worker that has all heads, in any order of slots; and all of it in one place."""

    def __init__(self, device: torch.device, num_homes: int = 2, hidden_size: int = HIDDEN) -> None:
        self.device, self.hidden_size, self.num_homes = device, hidden_size, num_homes
        self.page = PageShape(MAX_ROWS, MAX_SEQS, BLOCKS, 3)
        self.lane = CudaLaneShape(MAX_ROWS, HEADS, hidden_size, HEADS, self.page.num_words)
        size = num_homes * self.lane.lane_bytes()
        self.memory = torch.full((size,), 0x7F, dtype=torch.int8, device=device)
        self.memory.view(num_homes, -1)[:, : self.lane.counts_at(NUM_BOXES)] = 0
        self.stop = torch.zeros(1, dtype=torch.int32, device=device)
        self.shape = HeadShape(HEADS, GROUP, SIZE, hidden_size, 1e-5, BLOCK, BLOCKS, num_homes)
        self.norms = (torch.rand(1, 2, SIZE, device=device) + 0.5).bfloat16()
        angles = torch.rand(MAX_LEN, SIZE, device=device) * 6
        self.rope = (angles.cos(), angles.sin())
        self.weight = (torch.randn(HEADS * self.shape.width, hidden_size, device=device) * 0.1).bfloat16()
        # What is cached already: of all heads together, and by pieces. Head g is in slot 1 - g, with piece 1 - g.
        cached = torch.randn(num_homes * BLOCKS, 1, 2, HEADS, BLOCK, SIZE, device=device).bfloat16()
        self.pool = cached.clone()
        pieces = cached[:, 0].transpose(1, 2).flip(1).contiguous()
        qkv = torch.cat([self._head(1 - piece) for piece in range(HEADS)]).contiguous()
        self.arena = HeadArena(
            self.shape, qkv, pieces, self.rope, self.norms, 1, HEADS, num_homes * self.lane.max_rows, self.page
        )
        self.arena.piece_LS.copy_(torch.tensor([[0, 1]]))
        self.state = ServeState.empty(
            self.lane, self.memory.data_ptr(), num_homes, 1, num_homes * self.lane.max_rows, self.stop,
            num_experts=HEADS, is_head_L=torch.ones(1, dtype=torch.int32, device=device),
        )  # fmt: skip
        self.state.healthy_A.fill_(1)
        self.state.held_LS.copy_(torch.tensor([[1, 0]]))
        self.state.limits.copy_(torch.tensor([4, 0, 0]))

    def _head(self, head: int) -> Tensor:
        """Its rows of q, k and v."""
        q = self.weight[head * GROUP * SIZE : (head + 1) * GROUP * SIZE]
        k, v = (self.weight[(HEADS * (GROUP + i) + head) * SIZE :][:SIZE] for i in range(2))
        return torch.cat([q, k, v])

    def batch(self, home: int, sequences: list[tuple[int, int]]) -> DeviceBatch:
        """Rows of sequences: (first position, how many), decoding ones first. The blocks of each are far apart."""
        staging = Staging(MAX_ROWS, MAX_SEQS, BLOCKS, BLOCK, GROUP, True, self.device, launches_ahead=False)
        sizes = [num for _, num in sequences]
        tables = np.array([np.roll(np.arange(BLOCKS), 7 * i) for i in range(len(sequences))], np.int32) + home * BLOCKS
        positions = np.concatenate([np.arange(first, first + num) for first, num in sequences]).astype(np.int32)
        lines = np.repeat(np.arange(len(sequences)), sizes)
        slots = (tables[lines, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32)
        starts = np.array([0, *np.cumsum(sizes)], np.int32)
        staging.fill(Rows(np.zeros_like(positions), positions, slots, starts, tables, []))
        return staging.batch

    def together(self, x_TD: Tensor, batch: DeviceBatch) -> Tensor:
        """All heads at once."""
        rotation = Rotation(*self.rope, self.norms[0, 0], self.norms[0, 1], self.shape.eps)
        sums: Sums = Linear(self.weight).sums(x_TD, self.stop)
        q_THE = rows.rotate_and_store(
            sums, batch.positions_T, batch.kv_slots_T, self.pool, 0, rotation, HEADS * GROUP, self.stop, one_by_one=True
        )
        workspace = attention.Workspace(MAX_SEQS, 3, HEADS * GROUP, SIZE, self.device)
        return attention.attend(q_THE, batch, self.pool, 0, Scores(SIZE**-0.5), workspace, self.stop)

    def send(self, home: int, x_TD: Tensor, batch: DeviceBatch) -> tuple[SendState, Tensor]:
        state = SendState.empty(self.lane, self.memory.data_ptr() + home * self.lane.lane_bytes(), 1, self.stop)
        state.present_E.fill_(1)
        place_of_LN, expert_at_LP = send.places(torch.zeros(1, HEADS), torch.tensor([[1, 0]]), 1, HEADS)
        turn_page(state, batch, self.page)
        ids_TG, _ = all_slices(batch.positions_T, HEADS)
        y_row_TG = send.plan(state, ids_TG, place_of_LN[0].to(self.device), expert_at_LP[0].to(self.device), 0)
        send.post(state, x_TD, y_row_TG, 0, 0)
        return state, y_row_TG

    def serve(self) -> None:
        state, batch = self.state, self.state.heads
        assert batch is not None
        serve_heads(state, self.arena)
        assert batch.num_jobs.item() > 0


CASES = {
    "short": [[(5, 1), (40, 1), (17, 3)], [(9, 1)]],
    "long": [[(SEGMENT + 88, 1), (37, 1)], [(5, 1), (2 * SEGMENT + 3, 1)]],
    "prompts": [[(SEGMENT - 2, 4), (0, 3)], [(SEGMENT + 5, 1), (30, 2)]],
}


@pytest.mark.parametrize(
    "case", ["long", pytest.param("short", marks=pytest.mark.long), pytest.param("prompts", marks=pytest.mark.long)]
)
def test_heads_of_several_homes_have_the_bits_of_all_heads_together(case: str, device: torch.device) -> None:
    side = Side(device)
    sent = []
    for home, sequences in enumerate(CASES[case]):
        x_TD, batch = torch.randn(MAX_ROWS, HIDDEN, device=device).bfloat16(), side.batch(home, sequences)
        sent.append((side.together(x_TD, batch), *side.send(home, x_TD, batch)))
    side.serve()
    for expected, state, y_row_TG in sent:
        attended = collect_heads(state, y_row_TG, side.shape.answer_size, 0)
        assert side.stop.item() == 0
        assert torch.equal(attended, expected)
    stored = side.arena.kv_pool.flip(1).transpose(1, 2)[:, None]
    assert torch.equal(stored, side.pool)


def test_splits_are_those_of_the_whole_weight(device: torch.device) -> None:
    """A sum that is long enough to be split: the shape of one head's weight would give other splits."""
    side = Side(device, num_homes=1, hidden_size=1280)
    assert side.shape.split_size < 1280
    batch, x_TD = side.batch(0, [(3, 1), (0, 2)]), torch.randn(MAX_ROWS, 1280, device=device).bfloat16()
    expected = side.together(x_TD, batch)
    state, y_row_TG = side.send(0, x_TD, batch)
    side.serve()
    assert torch.equal(collect_heads(state, y_row_TG, side.shape.answer_size, 0), expected)
