"""One kernel that sends all rows to all shards, against the two that send any rows anywhere: every byte of lanes."""

import random

import pytest
import torch

from everserve.backends.cuda.lanes import send
from everserve.backends.cuda.lanes.lane import CudaLaneShape
from everserve.backends.cuda.lanes.send import SendState
from everserve.backends.cuda.lanes.send_all import post_to_all

NUM_RANKS, NUM_SLOTS, NUM_TOKENS, HIDDEN_SIZE = 3, 4, 5, 24
SHAPE = CudaLaneShape(NUM_TOKENS, 6, HIDDEN_SIZE, NUM_SLOTS)


class Home:
    """Its lanes, with nothing in them; a rank without a lane has memory here that must not be written to."""

    def __init__(self, device: torch.device, present: list[int], sent: list[int]) -> None:
        self.memory = torch.zeros(NUM_RANKS * SHAPE.lane_bytes(), dtype=torch.int8, device=device)
        self.state = SendState.empty(
            SHAPE, self.memory.data_ptr(), NUM_RANKS, torch.zeros(1, dtype=torch.int32, device=device)
        )
        self.state.present_E.copy_(torch.tensor(present))
        self.state.sent_E.copy_(torch.tensor(sent))
        self.state.lead.fill_(1)

    def words(self) -> list[list[int]]:
        state = self.state
        return [word.tolist() for word in (state.sent_E, state.rows_E, state.num_done, state.unplaced, state.stop)]


@pytest.mark.parametrize("seed", range(6))
def test_all_rows_to_all_shards(device: torch.device, seed: int) -> None:
    chance = random.Random(seed)
    num_shards = chance.choice([1, 3, 6])
    places = chance.sample(range(NUM_RANKS * NUM_SLOTS), num_shards)
    ranks, slots = [place // NUM_SLOTS for place in places], [place % NUM_SLOTS for place in places]
    present = [1, 1, 1]
    if seed == 1:
        ranks[0] = -1  # this shard has no place
    if seed == 2:
        present[ranks[0]] = 0  # the tables name a rank without a lane
    num_rows = 0 if seed == 3 else chance.randrange(1, NUM_TOKENS + 1)
    sent = [chance.randrange(5) for _ in range(NUM_RANKS)]
    tables = send.places(torch.tensor([ranks]), torch.tensor([slots]), NUM_RANKS, NUM_SLOTS)
    place_of, expert_at = (table[0].to(device) for table in tables)
    ids_TK = torch.arange(num_shards, dtype=torch.int32, device=device).repeat(NUM_TOKENS, 1)
    ids_TK[num_rows:] = -1
    x_TD = torch.randn(NUM_TOKENS, HIDDEN_SIZE, device=device).bfloat16()
    layer, replay = chance.choice([(0, False), (2, False), (2, True)])

    expected, found = Home(device, present, sent), Home(device, present, sent)
    y_row_TK = send.plan(expected.state, ids_TK, place_of, expert_at, layer)
    send.post(expected.state, x_TD, y_row_TK, layer, layer + 1, replay)
    at_once_TK = post_to_all(found.state, x_TD, ids_TK, place_of, expert_at, layer, layer + 1, replay)

    assert found.words() == expected.words()
    assert (found.state.stop.item() != 0) == (seed in {1, 2})
    if not found.state.stop.item():
        assert torch.equal(at_once_TK, y_row_TK)
        assert torch.equal(found.memory, expected.memory)
    absent = [rank for rank in range(NUM_RANKS) if not present[rank]]
    assert not any(found.memory.view(NUM_RANKS, -1)[rank].any() for rank in absent)


def test_a_stopped_step_sends_nothing(device: torch.device) -> None:
    home = Home(device, [1, 1, 1], [0, 0, 0])
    home.state.stop.fill_(4)
    tables = send.places(torch.tensor([[0, 1]]), torch.tensor([[2, 0]]), NUM_RANKS, NUM_SLOTS)
    place_of, expert_at = (table[0].to(device) for table in tables)
    ids_TK = torch.arange(2, dtype=torch.int32, device=device).repeat(NUM_TOKENS, 1)
    x_TD = torch.randn(NUM_TOKENS, HIDDEN_SIZE, device=device).bfloat16()
    before = home.words()
    post_to_all(home.state, x_TD, ids_TK, place_of, expert_at, 0, 1)
    assert home.words() == before and not home.memory.any()
