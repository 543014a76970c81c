"""One expert worker and one attention worker in a process, on a device: enough to change slots under traffic."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from everserve.backends.cuda.lanes.lane import ANSWER_AT, FLAG_AT, STATUS_AT, CudaLaneShape
from everserve.memory.device import Driver, Mapping, Region
from everserve.memory.names import BELL_BYTES
from everserve.memory.weights.checksum import checksum
from everserve.memory.weights.offers import Offers
from everserve.memory.weights.slot_table import SlotTable, state_bytes
from everserve.memory.weights.slots import MemorySlots
from everserve.plan.expert_memory import ExpertMemoryPlan
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.memory import Kind, MemoryName
from everserve.tables.slots import EMPTY, FailedFill, Fill, Filled, Place

NUM_LAYERS, NUM_OWN, NUM_MAPPED, NUM_EXPERTS = 2, 4, 2, 8
HIDDEN_SIZE, EXPERT_SIZE = 1024, 2048  # an expert has 12 MiB: two chunks
NUM_SLOTS, NUM_TOKENS, TOP_K, MAX_WORKERS = NUM_OWN + NUM_MAPPED, 32, 2, 8
PLACE_BYTES = 3 * HIDDEN_SIZE * EXPERT_SIZE * 2
PLAN = ExpertMemoryPlan.uniform(NUM_LAYERS, NUM_OWN, PLACE_BYTES)
BACKUP_PLAN = ExpertMemoryPlan.uniform(NUM_LAYERS, NUM_EXPERTS, PLACE_BYTES)
SHAPE = CudaLaneShape(NUM_TOKENS, TOP_K, HIDDEN_SIZE, NUM_SLOTS)
IDENTITY = bytes(range(32))
_LIMIT_S = 20.0


def weights_of(call_index: int, expert: int) -> list[Tensor]:
    """gate, up and down, in host memory; the same in every process."""
    generator = torch.Generator().manual_seed(100 * call_index + expert)
    shapes = [(EXPERT_SIZE, HIDDEN_SIZE)] * 2 + [(HIDDEN_SIZE, EXPERT_SIZE)]
    return [(torch.randn(shape, generator=generator) * shape[1] ** -0.5).bfloat16() for shape in shapes]


def bytes_of(call_index: int, expert: int) -> bytes:
    return b"".join(matrix.view(torch.int8).numpy().tobytes() for matrix in weights_of(call_index, expert))


def make_state(plan: ExpertMemoryPlan, owner: int | None) -> tuple[int, SlotTable]:
    fd = os.memfd_create("state")
    os.ftruncate(fd, state_bytes(plan.num_layers, plan.num_slots))
    table = SlotTable(fd, plan.num_layers, plan.num_slots)
    table.claim(IDENTITY, None if owner is None else Incarnation(owner))
    return fd, table


def put(table: SlotTable, place: Place, expert: int, write: Callable[[bytes], object]) -> None:
    assert table.begin(place)
    data = bytes_of(place.call_index, expert)
    write(data)
    table.complete(place, expert, checksum(data))
    table.end(place)


def make_seat(driver: Driver, experts: range, owner: int) -> tuple[int, int]:
    """Device memory with these experts in every layer, and its table."""
    weights_fd, (state_fd, table) = driver.create(PLAN.num_bytes), make_state(PLAN, owner)
    mapping = Mapping(driver, weights_fd, PLAN.num_bytes)
    for layer in range(NUM_LAYERS):
        for slot, expert in enumerate(experts):
            place = Place(layer, slot)
            put(table, place, expert, lambda data, at=PLAN.offset(place): driver.write(mapping.address + at, data))
    mapping.close()
    return weights_fd, state_fd


def make_backup(experts: range) -> tuple[int, int]:
    weights_fd, (state_fd, table) = os.memfd_create("backup"), make_state(BACKUP_PLAN, None)
    os.ftruncate(weights_fd, BACKUP_PLAN.num_bytes)
    for layer in range(NUM_LAYERS):
        for expert in experts:
            place = Place(layer, expert)
            put(table, place, expert, lambda data, at=BACKUP_PLAN.offset(place): os.pwrite(weights_fd, data, at))
    return weights_fd, state_fd


class _Files:
    def __init__(self, driver: Driver) -> None:
        from everserve.backends.cuda.file_feed import Buffers  # noqa: PLC0415 (only where there is a device)

        self._buffers = Buffers(driver.register_host)

    def feed(self, call_index: int, expert: int) -> Any:
        from everserve.backends.cuda.file_feed import FileFeed  # noqa: PLC0415

        feed = FileFeed(self._buffers, lambda: weights_of(call_index, expert))
        return feed, lambda: feed.checksum


class ExpertSide:
    """An expert worker in the seat with this memory."""

    def __init__(self, driver: Driver, weights_fd: int, state_fd: int, incarnation: int) -> None:
        from everserve.backends.cuda.arena_range import ArenaRange  # noqa: PLC0415
        from everserve.backends.cuda.device import tensor_at  # noqa: PLC0415
        from everserve.backends.cuda.device_places import DevicePlaces  # noqa: PLC0415
        from everserve.backends.cuda.lanes.server import CudaServer  # noqa: PLC0415
        from everserve.backends.cuda.ops.experts import ExpertArena  # noqa: PLC0415
        from everserve.backends.cuda.transfer import DeviceStream  # noqa: PLC0415

        self.driver, device = driver, torch.device("cuda", 0)
        self.table = SlotTable(state_fd, NUM_LAYERS, NUM_OWN)
        self.table.claim(IDENTITY, Incarnation(incarnation))
        self.range = ArenaRange(driver, weights_fd, PLAN.num_bytes, PLACE_BYTES, 2 * HIDDEN_SIZE, MAX_WORKERS)
        places = tensor_at(self.range.address, (self.range.num_places, 3, EXPERT_SIZE, HIDDEN_SIZE))
        self.arena = ExpertArena.of_experts(places, NUM_LAYERS, NUM_SLOTS, NUM_OWN)
        self.bell_fd = driver.create(BELL_BYTES)
        self.bell = Mapping(driver, self.bell_fd, BELL_BYTES)
        held_LS = torch.tensor(self.table.experts(), dtype=torch.int32)
        self.server = CudaServer(
            driver, self.arena, SHAPE, MAX_WORKERS, held_LS, self.bell.address, device, NUM_EXPERTS
        )  # fmt: skip
        stream = DeviceStream(driver, device)
        places = DevicePlaces(driver, self.range, PLAN, NUM_EXPERTS, self.server, stream, _Files(driver))
        self.offers = Offers(places, IDENTITY, lambda *_: None)
        num_slots = [[num] * NUM_LAYERS for num in (NUM_SLOTS, NUM_OWN, NUM_EXPERTS)]
        self.slots = MemorySlots(self.table, *num_slots, places, self.offers)
        self.slots.take_over()

    def offer(self, rank: int, fds: tuple[int, int]) -> None:
        weights = MemoryName(kind=Kind.WEIGHTS, owners=(), num_bytes=PLAN.num_bytes, gpu=0)
        self.slots.offer(Rank(rank), weights, [os.dup(fd) for fd in fds])

    def offer_backup(self, fds: tuple[int, int]) -> None:
        weights = MemoryName(kind=Kind.BACKUP, owners=(), num_bytes=BACKUP_PLAN.num_bytes)
        self.slots.offer(None, weights, [os.dup(fd) for fd in fds])

    def fill(self, fill: Fill, meanwhile: Callable[[], object] = lambda: None) -> Filled | FailedFill:
        """As its loop would: graphs are queued all the time."""
        self.slots.begin(fill)
        deadline_s = time.monotonic() + _LIMIT_S
        while (result := self.slots.poll()) is None:
            self.server.top_up(may_be_large=False)
            meanwhile()
            assert time.monotonic() < deadline_s, f"{fill} does not end"
        return result

    @property
    def slot_of(self) -> list[dict[int, int]]:
        """For each layer, the experts that are held, and where."""
        experts = self.slots.held.experts
        return [{e: slot for slot, e in enumerate(slots) if e != EMPTY} for slots in experts]


class AskingSide:
    """An attention worker without attention. It sends rows and knows what should come back, bit by bit."""

    def __init__(self, driver: Driver, expert: ExpertSide) -> None:
        from everserve.backends.cuda.lanes.send import SendState  # noqa: PLC0415

        self._driver, self._expert, device = driver, expert, torch.device("cuda", 0)
        lane_fd = driver.create(SHAPE.lane_bytes())
        self._lanes = Region(driver, 1, SHAPE.lane_bytes())
        self._lanes.map(lane_fd, 0)
        self._stop = torch.zeros(1, dtype=torch.int32, device=device)
        self._state = SendState.empty(SHAPE, self._lanes.base, 1, self._stop)
        self._state.lead.fill_(0)
        self._state.present_E[0], self._state.bell_E[0] = 1, expert.bell.address
        self._stream = torch.cuda.Stream(device)
        torch.manual_seed(0)
        self._x_TD = torch.randn(NUM_TOKENS, HIDDEN_SIZE, device=device).bfloat16()
        self._weights_TK = torch.rand(NUM_TOKENS, TOP_K, device=device)
        self._residual_TD = torch.randn(NUM_TOKENS, HIDDEN_SIZE, device=device)
        self._go_on = torch.zeros(1, dtype=torch.int32, device=device)
        self._y_LRD = [torch.cat(self._alone(layer)) for layer in range(NUM_LAYERS)]
        self.num_rows = torch.zeros(NUM_LAYERS, NUM_EXPERTS, dtype=torch.int64)
        self._rehearse()
        expert.server.open(Rank(0), lane_fd)
        os.close(lane_fd)

    def step(self, experts: list[int]) -> None:
        """One layer after the other with rows for these experts, which the worker holds; all come back as they
        should."""
        for layer in range(NUM_LAYERS):
            ids_TK = self._ids(experts)
            out_TD = self._ask(layer, ids_TK)
            while not self._stream.query():
                self._expert.server.top_up(may_be_large=False)
            assert int(self._stop.item()) == 0, "it was refused"
            assert torch.equal(out_TD.cpu(), self._expected(layer, ids_TK)), f"layer {layer}, experts {experts}"
            self.num_rows[layer] += ids_TK.flatten().bincount(minlength=NUM_EXPERTS)

    def status_of(self, layer: int, slot: int, expert: int) -> int:
        """What a request for this expert in this slot is answered, whatever is there."""
        seq = int(self._state.sent_E[0].item()) + 1
        with torch.cuda.stream(self._stream):
            self._send(layer, torch.full((NUM_TOKENS, TOP_K), expert, dtype=torch.int32), {expert: slot})
        deadline_s = time.monotonic() + _LIMIT_S
        while int.from_bytes(self._driver.read(self._lanes.base + ANSWER_AT, 8), "little") != seq:
            self._expert.server.top_up(may_be_large=False)
            assert time.monotonic() < deadline_s, "no answer"
        return int.from_bytes(self._driver.read(self._lanes.base + STATUS_AT, 8), "little")

    def _ids(self, experts: list[int]) -> Tensor:
        return torch.tensor(experts)[torch.rand(NUM_TOKENS, len(experts)).argsort(1)[:, :TOP_K]].int().contiguous()

    def _ask(self, layer: int, ids_TK: Tensor) -> Tensor:
        from everserve.backends.cuda.lanes import send  # noqa: PLC0415

        with torch.cuda.stream(self._stream):
            y_row_TK = self._send(layer, ids_TK, self._expert.slot_of[layer])
            self._driver.wait_all_geq(self._stream.cuda_stream, [self._lanes.base + FLAG_AT], 0)
            return send.collect(self._state, y_row_TK, self._weights_TK, self._residual_TD, layer)

    def _send(self, layer: int, ids_TK: Tensor, slot_of: dict[int, int]) -> Tensor:
        from everserve.backends.cuda.lanes import send  # noqa: PLC0415

        ranks = torch.tensor([[0 if expert in slot_of else -1 for expert in range(NUM_EXPERTS)]])
        slots = torch.tensor([[slot_of.get(expert, 0) for expert in range(NUM_EXPERTS)]])
        place_of_LN, expert_at_LP = (table.cuda() for table in send.places(ranks, slots, 1, NUM_SLOTS))
        y_row_TK = send.plan(self._state, ids_TK.cuda(), place_of_LN[0], expert_at_LP[0], layer)
        send.post(self._state, self._x_TD, y_row_TK, layer, (layer + 1) % NUM_LAYERS)
        return y_row_TK

    def _rehearse(self) -> None:
        """Kernels are loaded and memory is allocated while nothing waits."""
        self._stop.fill_(1)
        torch.cuda.synchronize()
        ids_TK = self._ids([*range(NUM_EXPERTS)])
        for layer in range(NUM_LAYERS):
            out_TD = self._ask(layer, ids_TK)
            torch.cuda.synchronize()
            out_TD.cpu()
            self._expected(layer, ids_TK)
        self._stop.zero_()
        torch.cuda.synchronize()

    def _alone(self, layer: int) -> list[Tensor]:
        """y of all rows for each expert, by the same kernels over memory of our own."""
        from everserve.backends.cuda.ops.experts import (  # noqa: PLC0415
            SOME_ROWS,
            ExpertArena,
            down,
            gate_up,
            tiles_of_one_slot,
        )

        device, results = torch.device("cuda", 0), []
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        memory = torch.empty(1, 3, EXPERT_SIZE, HIDDEN_SIZE, dtype=torch.bfloat16, device=device)
        arena = ExpertArena.of_experts(memory, 1, 1)
        for expert in range(NUM_EXPERTS):
            arena.fill(0, 0, *weights_of(layer, expert))
            rows, tiles = tiles_of_one_slot(NUM_TOKENS, SOME_ROWS, device)
            h_RF = self._x_TD.new_empty(NUM_TOKENS, EXPERT_SIZE)
            y_RD = self._x_TD.new_empty(NUM_TOKENS, HIDDEN_SIZE)
            gate_up(self._x_TD.data_ptr(), rows, arena, zero, tiles, h_RF, self._stop)
            down(h_RF, arena, zero, tiles, y_RD.data_ptr(), None, self._stop)
            torch.cuda.synchronize()
            results.append(y_RD)
        return results

    def _expected(self, layer: int, ids_TK: Tensor) -> Tensor:
        from everserve.backends.cuda.ops.experts import combine  # noqa: PLC0415

        rows_TK = ids_TK * NUM_TOKENS + torch.arange(NUM_TOKENS, dtype=torch.int32)[:, None]
        with torch.cuda.stream(self._stream):
            out_TD = combine(
                self._y_LRD[layer].data_ptr(), rows_TK.cuda(), self._weights_TK, self._residual_TD, self._go_on
            )  # fmt: skip
            return out_TD.cpu()


def every_expert(fills: list[tuple[int, int]]) -> Iterator[Fill]:
    """(slot, expert) in every layer."""
    for slot, expert in fills:
        for layer in range(NUM_LAYERS):
            yield Fill(layer, slot, expert)
