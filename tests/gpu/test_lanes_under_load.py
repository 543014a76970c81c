"""Workers that ask and workers that serve, on one device, as fast as they can: what comes back from every layer is what
it would be if all experts were here, bit by bit. What is rarely wrong shows only after many layers."""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import pytest
import torch
from torch import Tensor

from everserve.backends.cuda.lanes import send
from everserve.backends.cuda.lanes.lane import FLAG_AT, CudaLaneShape
from everserve.backends.cuda.recorder import Chain, Recorder
from everserve.memory.device import Driver, Mapping, Region
from everserve.memory.names import BELL_BYTES
from everserve.model.spec import Norm
from everserve.tables.ids import Rank
from tests.gpu.actors import Actor, through_mps
from tests.gpu.needs import DEVICE

pytestmark = [*DEVICE, pytest.mark.timeout(180)]
NUM_ASKING = NUM_SERVING = 2
NUM_TOKENS, TOP_K, NUM_EXPERTS, NUM_LAYERS = 64, 2, 8, 6
HIDDEN_SIZE = EXPERT_SIZE = 1024
NUM_SLOTS = NUM_EXPERTS // NUM_SERVING
SHAPE = CudaLaneShape(NUM_TOKENS, TOP_K, HIDDEN_SIZE, NUM_SLOTS)
SECONDS = 10.0


def test_rows_come_back_as_they_should(monkeypatch):
    with through_mps(monkeypatch), ExitStack() as stack:
        serving, asking = (
            [_actor(stack, function, rank) for rank in range(num)]
            for function, num in ((serve, NUM_SERVING), (ask, NUM_ASKING))
        )
        for server in serving:
            for asker in asking:
                for _ in ("lane", "bell"):
                    fd = server.take()
                    asker.give(fd)
                    os.close(fd)
        found = [asker.hear(SECONDS + 90) for asker in asking]
        for server in serving:
            server.tell("enough")
    assert all(num_steps > 100 for num_steps, _ in found), "they were to be busy"
    assert [wrong for _, wrong in found] == [[0] * NUM_LAYERS] * NUM_ASKING, "rows, by layer"


def _actor(stack: ExitStack, function: Callable[..., object], rank: int) -> Actor:
    actor = Actor(function, rank)
    stack.callback(actor.end)
    return actor


def serve(pipe: Connection, rank: int) -> None:
    """Some of the experts, for everybody, until we are told that it is enough."""
    from everserve.backends.cuda.lanes.server import CudaServer  # noqa: PLC0415 (only where there is a device)

    device = torch.zeros(1, device="cuda").device
    driver = Driver()
    arena = _arena(range(rank * NUM_SLOTS, (rank + 1) * NUM_SLOTS))
    bell_fd = driver.create(driver.whole(BELL_BYTES))
    bell = Mapping(driver, bell_fd, driver.whole(BELL_BYTES))
    held_LS = torch.arange(rank * NUM_SLOTS, (rank + 1) * NUM_SLOTS, dtype=torch.int32).expand(NUM_LAYERS, -1)
    server = CudaServer(driver, arena, SHAPE, NUM_ASKING, held_LS, bell.address, device, NUM_EXPERTS)
    for customer in range(NUM_ASKING):
        lane_fd = driver.create(SHAPE.lane_bytes())
        server.open(Rank(customer), lane_fd)
        for fd in (lane_fd, bell_fd):
            pipe.send(("said", "descriptor"))
            send_handle(pipe, fd, os.getppid())
    while not pipe.poll():
        server.top_up(may_be_large=False)
        time.sleep(1e-4)
    server.end()


def ask(pipe: Connection, rank: int) -> None:
    """Step after step; then say how many, and how many rows of each layer were wrong."""
    torch.set_grad_enabled(False)
    device = torch.zeros(1, device="cuda").device
    driver = Driver()
    asking = _Asking(driver, device, rank)
    for server in range(NUM_SERVING):
        asking.join(server, recv_handle(pipe), recv_handle(pipe))
    chain, wrong_L = asking.record()
    num_steps, end_s = 0, time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        with torch.cuda.stream(asking.stream):
            chain.launch()
            event = torch.cuda.Event()
            event.record()
        event.synchronize()
        num_steps += 1
        time.sleep(2e-3 if num_steps % (50 + rank) == 0 else 0.0)  # they are together, and then again they are not
    pipe.send(("said", (num_steps, wrong_L.tolist())))


class _Asking:
    """One attention worker without attention: rows of its own for every layer, and what should become of them."""

    def __init__(self, driver: Driver, device: torch.device, rank: int) -> None:
        from everserve.backends.cuda.ops.dense import Linear  # noqa: PLC0415

        torch.manual_seed(rank)
        self.stream = torch.cuda.Stream()
        self._driver = driver
        self._lanes = Region(driver, NUM_SERVING, SHAPE.lane_bytes())
        self._bells: list[Mapping] = []
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        self._state = send.SendState.empty(SHAPE, self._lanes.base, NUM_SERVING, self._stop)
        self._state.lead.fill_(0)
        experts = torch.arange(NUM_EXPERTS, dtype=torch.int32).expand(NUM_LAYERS, -1)
        tables = send.places(experts // NUM_SLOTS, experts % NUM_SLOTS, NUM_SERVING, NUM_SLOTS)
        self._place_of_LN, self._expert_at_LP = (table.to(device) for table in tables)
        self._ids_LTK = torch.rand(NUM_LAYERS, NUM_TOKENS, NUM_EXPERTS).argsort(-1)[..., :TOP_K].int().to(device)
        self._weights_TK = torch.rand(NUM_TOKENS, TOP_K, device=device)
        self._hidden_LTD = torch.randn(NUM_LAYERS, NUM_TOKENS, HIDDEN_SIZE, device=device)
        self._norm_D = torch.ones(HIDDEN_SIZE, dtype=torch.bfloat16, device=device)
        self._linear = Linear(torch.randn(3072, HIDDEN_SIZE, dtype=torch.bfloat16, device=device))

    def join(self, server: int, lane_fd: int, bell_fd: int) -> None:
        self._lanes.map(lane_fd, server)
        self._bells.append(Mapping(self._driver, bell_fd, self._driver.whole(BELL_BYTES)))
        self._state.bell_E[server] = self._bells[-1].address
        self._state.present_E[server] = 1

    def record(self) -> tuple[Chain, Tensor]:
        """A step that counts, for each layer, the rows that did not come back as they should."""
        expected_LTD, recorder = self._expected(), Recorder(self.stream)
        wrong_L = torch.zeros(NUM_LAYERS, dtype=torch.int64, device=expected_LTD.device)
        flags = [self._lanes.address(server) + FLAG_AT for server in range(NUM_SERVING)]

        def step() -> None:
            for layer in range(NUM_LAYERS):
                y_row_TK = self._send(layer)
                recorder.cut(lambda layer=layer: self._send(layer))
                self._driver.wait_all_geq(torch.cuda.current_stream().cuda_stream, flags, 0)
                out_TD = send.collect(
                    self._state, y_row_TK, self._weights_TK, self._hidden_LTD[layer], layer
                )  # fmt: skip
                differs_TD = out_TD.view(torch.int32) != expected_LTD[layer].view(torch.int32)
                wrong_L[layer] += differs_TD.any(dim=1).sum()

        with torch.cuda.stream(self.stream):
            step()  # for once without a graph: kernels are compiled and loaded
        torch.cuda.synchronize()
        with recorder.record() as chain:
            step()
        torch.cuda.synchronize()
        return chain, wrong_L

    def _send(self, layer: int) -> Tensor:
        x_TD = self._normed(layer)
        self._linear(x_TD, self._stop)  # something that takes its time
        x_TD = self._normed(layer)
        y_row_TK = send.plan(
            self._state, self._ids_LTK[layer], self._place_of_LN[layer], self._expert_at_LP[layer], layer
        )  # fmt: skip
        send.post(self._state, x_TD, y_row_TK, layer, (layer + 1) % NUM_LAYERS)
        return y_row_TK

    def _normed(self, layer: int) -> Tensor:
        from everserve.backends.cuda.ops.rows import norm  # noqa: PLC0415

        return norm(self._hidden_LTD[layer], self._norm_D, Norm(eps=1e-5), self._stop)

    def _expected(self) -> Tensor:
        from everserve.backends.cuda.ops.experts import combine, cut_for, down, gate_up, plan_local  # noqa: PLC0415

        arena, device = _arena(range(NUM_EXPERTS)), self._stop.device
        slot_of_N = torch.arange(NUM_EXPERTS, dtype=torch.int32, device=device)
        layers_L = torch.arange(NUM_LAYERS, dtype=torch.int32, device=device)
        results = []
        for layer in range(NUM_LAYERS):
            x_TD, layer_at = self._normed(layer), layers_L[layer : layer + 1]
            plan = plan_local(self._ids_LTK[layer], slot_of_N, NUM_EXPERTS, cut_for(NUM_TOKENS), self._stop)
            h_RF = x_TD.new_empty(SHAPE.max_rows, EXPERT_SIZE)
            y_RD = x_TD.new_empty(SHAPE.max_rows, HIDDEN_SIZE)
            gate_up(x_TD.data_ptr(), plan.src_R, arena, layer_at, plan.tiles, h_RF, self._stop)
            down(h_RF, arena, layer_at, plan.tiles, y_RD.data_ptr(), None, self._stop)
            results.append(
                combine(y_RD.data_ptr(), plan.pos_TK, self._weights_TK, self._hidden_LTD[layer], self._stop)
            )  # fmt: skip
        torch.cuda.synchronize()
        return torch.stack(results)


def _arena(experts: range):
    """Weights of these experts, the same in every process."""
    from everserve.backends.cuda.ops.experts import ExpertArena  # noqa: PLC0415

    num_slots, device = len(experts), torch.device("cuda")
    gate_up = torch.empty(NUM_LAYERS, num_slots, 2 * EXPERT_SIZE, HIDDEN_SIZE, dtype=torch.bfloat16, device=device)
    down = torch.empty(NUM_LAYERS, num_slots, HIDDEN_SIZE, EXPERT_SIZE, dtype=torch.bfloat16, device=device)
    for layer in range(NUM_LAYERS):
        for slot, expert in enumerate(experts):
            torch.manual_seed(100 + layer * NUM_EXPERTS + expert)
            gate_up[layer, slot].normal_(std=HIDDEN_SIZE**-0.5)
            down[layer, slot].normal_(std=EXPERT_SIZE**-0.5)
    torch.cuda.synchronize()
    return ExpertArena(
        gate_up.view(-1, HIDDEN_SIZE), down.view(-1, EXPERT_SIZE), NUM_LAYERS, num_slots
    )  # fmt: skip
