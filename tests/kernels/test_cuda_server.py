"""An expert worker's graphs and its bell, on a device."""

import time
from collections.abc import Callable

import pytest
import torch

from everserve.backends.cuda.lanes import send
from everserve.backends.cuda.lanes.lane import ANSWER_AT, CudaLaneShape
from everserve.backends.cuda.lanes.send import SendState
from everserve.backends.cuda.lanes.server import CudaServer
from everserve.memory.device import Driver, Mapping, Region
from everserve.memory.names import BELL_BYTES
from everserve.tables.ids import Rank
from tests.kernels.toy_experts import make_arena

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need an NVIDIA GPU")
NUM_SLOTS, HIDDEN_SIZE, EXPERT_SIZE = 4, 64, 96


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within 10 s"
        time.sleep(0.001)


def test_who_has_asked_and_rung_before_its_lane_was_opened_is_served(device) -> None:
    driver = Driver()
    shape = CudaLaneShape(4, 2, HIDDEN_SIZE, NUM_SLOTS)
    lane_fd, bell_fd = driver.create(shape.lane_bytes()), driver.create(driver.whole(BELL_BYTES))
    bell = Mapping(driver, bell_fd, driver.whole(BELL_BYTES))
    arena, _ = make_arena(1, NUM_SLOTS, HIDDEN_SIZE, EXPERT_SIZE, device)
    held_LS = torch.arange(NUM_SLOTS, dtype=torch.int32)[None]
    server = CudaServer(driver, arena, shape, 1, held_LS, bell.address, device, NUM_SLOTS)

    lanes = Region(driver, 1, shape.lane_bytes())
    lanes.map(lane_fd, 0)
    state = SendState.empty(shape, lanes.base, 1, torch.zeros(1, dtype=torch.int32, device=device))
    state.present_E[0], state.bell_E[0] = 1, bell.address
    rank_LN = torch.zeros(1, NUM_SLOTS, dtype=torch.int32)
    place_of_LN, expert_at_LP = send.places(rank_LN, torch.arange(NUM_SLOTS)[None], 1, NUM_SLOTS)
    ids_TK = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32, device=device)
    x_TD = torch.ones(2, HIDDEN_SIZE, dtype=torch.bfloat16, device=device)
    y_row_TK = send.plan(state, ids_TK, place_of_LN[0].to(device), expert_at_LP[0].to(device), 0)
    send.post(state, x_TD, y_row_TK, 0, 0)
    torch.cuda.synchronize()
    server.top_up(may_be_large=False)  # not before: kernels are loaded and memory is mapped while nothing waits
    wait_until(lambda: driver.read(bell.address, 4) == bytes(4), "the server has heard the bell, and seen nothing")

    server.open(Rank(0), lane_fd)
    server.top_up(may_be_large=False)
    wait_until(lambda: driver.read(lanes.base + ANSWER_AT, 8) == (1).to_bytes(8, "little"), "an answer")
    server.end()
    lanes.close()
    bell.close()
