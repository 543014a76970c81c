"""Divided heads on a GPU, without one: where their KV is, which piece is whose, how slots are numbered by calls."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from everserve.backends.cuda.call_slots import CallSlots
from everserve.backends.cuda.head_table import HeadTable, NoPieceError
from everserve.backends.cuda.lanes.head_kv import CudaHeadKv
from everserve.backends.cuda.lanes.page import lane_shape, page_shape
from everserve.cli.serve_settings import divide_heads, say_whole_heads, with_room
from everserve.config.cluster import ClusterConfig
from everserve.control.hold.design import capacity_of, first_goal
from everserve.control.hold.needs import Needs
from everserve.errors import ConfigError
from everserve.model.config import ModelConfig
from everserve.plan.repair import Room, replan
from everserve.plan.shards import Spread, place_shards
from everserve.plan.survival import repairable_devices
from everserve.tables.calls import Call, ShardKind
from everserve.tables.ids import NO_DEVICE, Incarnation, Rank, Role, WorkerId
from everserve.tables.memory import Kind
from everserve.tables.slots import EMPTY, FailedFill, Fill, Filled, HeldSlots, Place, Source
from everserve.wire.messages import StartOrchestrator, WorkerSettings
from everserve_bench.degree_plan import model_of
from everserve_bench.device_shapes import write_shape
from tests.support.configs import worker_settings

NUM_LAYERS, MODEL = 4, b"model 1 and so on"
ENGINE = worker_settings(kv_cache_bytes=64 << 20, max_model_len=512).engine


class FakePeers:
    """Where heads are asked, as `CudaPeers` says it."""

    def __init__(self) -> None:
        self.num_changes = 0
        self.pools = {Rank(3): 33, Rank(4): 44}
        self.owner_LN = np.array([[3, 4, -1], [9, 9, 9], [4, 3, -1], [9, 9, 9]], np.int32)

    def pool_of(self, rank: Rank) -> int:
        return self.pools[rank]

    def has_answered(self, rank: Rank) -> bool:
        return True

    def move(self, call: int, head: int, rank: int) -> None:
        self.owner_LN[call, head] = rank
        self.num_changes += 1


class TestHeadKv:
    def setup_method(self) -> None:
        self.peers = FakePeers()
        self.pools = self.peers.pools
        self.kv = CudaHeadKv(self.peers, {0: 0, 1: 2}, 2)

    def step(self) -> bool:
        assert not self.kv.is_displaced
        self.kv.use()
        return self.kv.has_same_pools()

    def test_a_successor_that_has_the_kv_changes_nothing(self) -> None:
        assert self.step()
        self.peers.move(0, 0, -1)  # its worker has died, and has no successor yet
        assert not self.kv.is_displaced
        self.peers.move(0, 0, 3)
        assert self.step()

    def test_a_successor_without_the_kv_is_found_before_a_token_counts(self) -> None:
        assert self.step()
        self.pools[Rank(3)] = 34
        self.peers.move(0, 0, 3)
        assert not self.step() and self.kv.is_displaced
        self.kv.forget()
        assert self.step()

    def test_a_head_that_is_asked_elsewhere_is_displaced(self) -> None:
        assert self.step()
        self.peers.move(2, 1, 4)
        assert self.kv.is_displaced
        self.kv.forget()
        assert self.step()

    def test_no_step_goes_ahead_of_the_first_one_after_a_change(self) -> None:
        assert not self.kv.is_checked
        assert self.step() and self.kv.is_checked
        self.peers.move(0, 0, -1)
        assert not self.kv.is_checked
        self.peers.move(0, 0, 3)
        self.pools[Rank(3)] = 34
        assert not self.step() and not self.kv.is_checked

    def test_pools_are_read_when_something_has_changed(self) -> None:
        assert self.step()
        self.pools.clear()
        assert self.step(), "nothing has changed: nothing is read"


class Bytes:
    """Memory, as the driver reads and writes it."""

    def __init__(self) -> None:
        self.data = bytearray(1 << 16)

    def read(self, address: int, num_bytes: int) -> bytes:
        return bytes(self.data[address : address + num_bytes])

    def write(self, address: int, data: bytes) -> None:
        self.data[address : address + len(data)] = data


class TestHeadTable:
    def setup_method(self) -> None:
        self.memory = Bytes()
        self.table = self.successor()
        for head in ((0, 1), (1, 2)):
            self.table.in_use.add(head)
            self.table.complete(self.table.take(head), head)

    def successor(self, model: bytes = MODEL) -> HeadTable:
        table = HeadTable(self.memory, 0, 2)
        table.claim(model)
        return table

    def test_a_successor_finds_all_of_it(self) -> None:
        found = self.successor()
        assert (found.find((0, 1)), found.find((1, 2)), found.find((0, 0))) == (0, 1, None)
        assert found.pool == self.table.pool > 0

    def test_memory_of_another_model_has_nothing(self) -> None:
        pool = self.table.pool
        found = self.successor(b"model 2 and so on")
        assert found.find((0, 1)) is None and found.pool != pool

    def test_a_piece_that_gets_another_head_changes_the_identity_of_all_kv(self) -> None:
        pool = self.table.pool
        with pytest.raises(NoPieceError, match="layer 3, head 0"):
            self.table.take((3, 0))
        assert self.table.pool == pool
        self.table.in_use.remove((0, 1))
        assert self.table.take((3, 0)) == 0
        assert self.table.find((0, 1)) is self.table.find((3, 0)) is None, "it is empty until it is complete"
        assert self.table.pool != pool

    def test_an_empty_piece_costs_nothing(self) -> None:
        pool = self.table.pool
        self.table.in_use.remove((1, 2))
        self.table.complete(1, (7, 7))
        self.memory.write(8 * (8 + 1), bytes(8))  # a predecessor died while it loaded
        assert self.table.take((5, 5)) == 1 and self.table.pool == pool

    def test_another_process_sees_which_piece_has_which_head(self) -> None:
        assert self.table.pieces() == {(0, 1): 0, (1, 2): 1}
        self.table.in_use.clear()
        self.table.take((3, 70000))
        assert self.table.pieces() == {(1, 2): 1}, "what is being loaded is not there yet"
        self.table.complete(0, (3, 70000))
        assert self.table.pieces() == {(3, 70000): 0, (1, 2): 1}
        self.memory.write(0, bytes(8))
        assert self.table.pieces() == {}, "memory that no worker has claimed"

    def test_the_owner_is_there_for_the_next_one(self) -> None:
        assert self.table.owner == (0, 0, 0)
        self.table.own(17, 1234, 99, pool=5)
        assert self.successor().owner == (17, 1234, 99) and self.successor().pool == 5


def settings_of(directory: Path, log: str) -> WorkerSettings:
    return worker_settings(
        directory=str(directory),
        tensor_parallel=True,
        dtype="bfloat16",
        weights="memory",
        kv_cache_bytes=64 << 20,
        max_model_len=512,
        mode=log,
        device="cuda",
    )


def divided(num: int = 3, **cluster: int) -> tuple[ModelConfig, Needs, StartOrchestrator]:
    """Llama's shape as a server with `-tp` would divide it on GPUs."""
    directory = write_shape(divided.root / "llama", "llama", num_layers=NUM_LAYERS)
    told = settings_of(directory, "anchor")
    config = ClusterConfig(tensor_parallel_size=num, **cluster).resolved()
    settings = divide_heads(told, config)
    config = with_room(config, settings)
    start = StartOrchestrator(cluster=config, worker=settings, num_gpus=1, gpus=("GPU",))
    model = ModelConfig.from_source(settings.model)
    return model, Needs(model, settings, capacity_of(start, model, first_goal(start, model)), 50.0), start


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> None:
    divided.root = tmp_path


def test_weights_and_kv_of_a_worker_are_near_their_share() -> None:
    model, needs, start = divided(3, max_lost_devices=0)
    goal = first_goal(start, model)
    assert model.divides_heads and start.worker.log.mode == "anchor" and start.cluster.shadow_experts == 0
    num_heads = NUM_LAYERS * model.num_kv_heads
    assert needs.capacity.head_pieces == -(-num_heads // 3)
    calls = zip(model.calls, needs.capacity.slots(len(model.calls)), strict=True)
    assert {(call.kind, num) for call, num in calls} == {(ShardKind.HEAD, 3), (ShardKind.SLICE, 3)}
    memory = {piece.kind: piece for piece in needs.memory(goal, WorkerId(Rank(4), Incarnation(1)))}
    assert memory[Kind.KV_PIECES].gpu == 0
    whole = needs.settings.engine.kv_cache_bytes + num_heads * 6 * model.head_size * model.hidden_size * 2
    assert memory[Kind.KV_PIECES].num_bytes <= 1.05 * whole, "the heads of a third, for the streams of three homes"


@pytest.mark.parametrize(("num", "told", "num_lost"), [(2, None, 0), (3, None, 1), (8, None, 1), (8, 3, 3), (2, 1, 1)])
def test_others_have_room_for_what_lost_devices_had(num: int, told: int | None, num_lost: int) -> None:
    model, needs, start = divided(num, **({} if told is None else {"max_lost_devices": told}))
    goal, num_left = first_goal(start, model), num - num_lost
    assert goal.placement is not None and start.cluster.shadow_experts == 0
    assert needs.capacity.head_pieces == -(-NUM_LAYERS * model.num_kv_heads // num_left)
    assert set(needs.capacity.slots(len(model.calls))) == {-(-8 // num_left)}, "eight heads, and eight slices"
    assert needs.capacity.heads_stay is (num_lost == 0)
    assert repairable_devices(goal, goal.placement, needs.capacity) == num_lost


def test_room_for_lost_devices_is_refused_where_it_has_no_meaning() -> None:
    _, needs, _ = divided(2)
    whole = changed(needs.settings, divides_heads=False)
    with pytest.raises(ConfigError, match="divided over GPUs"):
        with_room(ClusterConfig(tensor_parallel_size=3, max_lost_devices=1).resolved(), whole)
    with pytest.raises(ConfigError, match="fewer than its devices"):
        ClusterConfig(tensor_parallel_size=3, max_lost_devices=3).check()
    with pytest.raises(ConfigError, match="with -tp"):
        ClusterConfig(max_lost_devices=1).check()


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 8), st.integers(1, 2), st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True))
def test_heads_fit_into_pieces_whatever_is_lost(num: int, num_lost: int, gone: list[int]) -> None:
    """And all have a place, as long as no more are lost than there is room for."""
    calls = tuple(
        Call(layer=layer, kind=kind, num_shards=8) for layer in range(6) for kind in (ShardKind.HEAD, ShardKind.SLICE)
    )
    placement = place_shards(calls, [Rank(rank) for rank in range(num)], 0, Spread.CYCLIC)
    slots, pieces = (-(-8 // (num - num_lost)),) * len(calls), -(-6 * 8 // (num - num_lost))
    for num_gone, rank in enumerate([rank for rank in gone if rank < num], start=1):
        seats = tuple(seat for seat in placement.seats if seat.rank != rank)
        before = structs.replace(placement, seats=seats)
        placement = replan(before, [Room(seat.rank, seat.rank, max(slots), slots, pieces) for seat in seats])
        heads = [index for index, call in enumerate(calls) if call.kind is ShardKind.HEAD]
        assert all(sum(len(seat.experts(index)) for index in heads) <= pieces for seat in placement.seats)
        if num_gone <= num_lost:
            for index in heads:
                assert {head for seat in placement.seats for head in seat.experts(index)} == set(range(8))


def test_spare_slots_are_for_those_who_ask() -> None:
    model, needs, _ = divided(3, shadow_experts=2)
    slots = dict(zip((call.kind for call in model.calls), needs.capacity.slots(len(model.calls)), strict=True))
    assert slots[ShardKind.HEAD] == 2 + 2 + 2, "its own, those that are dealt, and spare ones"
    assert needs.capacity.head_pieces == (2 + 2 + 2) * NUM_LAYERS


def test_mirrors_are_those_of_homes_and_of_no_device() -> None:
    """All heads of a home's own blocks, with their words, in host memory; records are there too."""
    _, needs, start = divided(2)
    told = settings_of(Path(needs.settings.model.directory), "mirror")
    settings = divide_heads(told, start.cluster)
    model, start = ModelConfig.from_source(settings.model), structs.replace(start, worker=settings)
    goal = first_goal(start, model)
    needs = Needs(model, settings, capacity_of(start, model, goal), 50.0)
    home, other = (needs.memory(goal, WorkerId(Rank(rank), Incarnation(1))) for rank in (1, 3))
    mirror, log = (next(piece for piece in home if piece.kind is kind) for kind in (Kind.KV_MIRROR, Kind.LOG))
    assert (mirror.device, mirror.gpu, log.device) == (NO_DEVICE,) * 3
    assert settings.engine.kv_cache_bytes * 0.9 < mirror.num_bytes < settings.engine.kv_cache_bytes * 1.05
    assert Kind.KV_MIRROR not in {piece.kind for piece in other}


def test_a_lane_has_room_for_a_page() -> None:
    model, _, _ = divided(2)
    shape, page = lane_shape(model, ENGINE, 4), page_shape(model, ENGINE)
    assert shape.page_words == page.num_words and shape.top_k == 8
    assert shape.page_at + 4 * page.num_words <= shape.lane_bytes()
    ends = [page.positions_at, page.kv_slots_at, page.row_seqs_at, page.small_at, page.large_at, page.tables_at]
    sizes = [page.max_rows] * 3 + [4 * page.max_small, 4 * page.max_rows, page.max_seqs * page.max_blocks]
    assert all(at + size <= end for at, size, end in zip(ends, sizes, [*ends[1:], page.num_words], strict=True))


class FfnSlots:
    """`ChangeableSlots` of two FFNs, one of which fails."""

    def __init__(self) -> None:
        self.began: list[Fill] = []
        self.cleared: list[Place] = []
        self.held = HeldSlots(experts=((5, EMPTY), (6, 7)), generations=((1, 0), (1, 1)))

    def begin(self, fill: Fill) -> None:
        self.began.append(fill)

    def poll(self) -> Filled | FailedFill | None:
        fill = self.began[-1]
        if fill.call_index:
            return FailedFill(**fill._asdict(), reason="no")
        return Filled(fill=fill, source=Source.PEER, num_bytes=9, seconds=0.5)

    def clear(self, place: Place) -> None:
        self.cleared.append(place)


class Kernels:
    """What the server and the memory of heads are told."""

    def __init__(self) -> None:
        self.told: list[tuple] = []
        self.pool = 1

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.told.append((name, *args))

    def load(self, head: tuple[int, int]) -> int:
        if head == (1, 7):
            raise NoPieceError("none")
        self.pool += 1
        return 10 * head[0] + head[1]


@pytest.fixture
def call_slots() -> tuple[CallSlots, FfnSlots, Kernels]:
    model = model_of({**LLAMA, "num_hidden_layers": 2})
    ffn, kernels = FfnSlots(), Kernels()
    return CallSlots(model, ffn, {0: (3, EMPTY), 2: (4, 1)}, kernels, kernels), ffn, kernels


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16", "rope_theta": 5e5,
}  # fmt: skip


def test_calls_have_the_slots_of_heads_and_ffns_in_turn(call_slots) -> None:
    slots, _, _ = call_slots
    assert slots.held.experts == ((3, EMPTY), (5, EMPTY), (4, 1), (6, 7))
    assert slots.num_experts(0) == slots.num_experts(1) == 8


def test_a_fill_of_an_ffn_has_its_own_number_and_is_told_under_the_call(call_slots) -> None:
    slots, ffn, _ = call_slots
    slots.begin(Fill(1, 1, 2))
    assert ffn.began == [Fill(0, 1, 2)] and slots.poll().fill == Fill(1, 1, 2)
    slots.begin(Fill(3, 0, 2))
    failed = slots.poll()
    assert (failed.call_index, failed.reason) == (3, "no") and slots.poll() is None
    slots.clear(Place(3, 1))
    assert ffn.cleared == [Place(1, 1)]


def test_a_head_is_loaded_while_nothing_is_queued_and_tells_the_new_identity(call_slots) -> None:
    slots, _, kernels = call_slots
    slots.begin(Fill(2, 0, 6))
    assert kernels.told == [("empty", 2, 0), ("give_up", (1, 4)), ("drain",), ("hold_head", 2, 0, 6, 16, 2)]
    assert slots.poll().source is Source.FILE and slots.poll() is None
    assert slots.held.experts[2] == (6, 1) and slots.held.generations[2] == (3, 1)


def test_a_head_without_a_piece_leaves_its_slot_empty(call_slots) -> None:
    slots, _, kernels = call_slots
    slots.begin(Fill(2, 1, 7))
    assert "none" in slots.poll().reason
    assert slots.held.experts[2] == (4, EMPTY) and kernels.told[-1] == ("drain",)


def changed(settings: WorkerSettings, **model: object) -> WorkerSettings:
    return structs.replace(settings, model=structs.replace(settings.model, **model))


def test_one_process_computes_as_many_do() -> None:
    _, needs, _ = divided(2)
    told = settings_of(Path(needs.settings.model.directory), "anchor")
    used = divide_heads(told, ClusterConfig(tensor_parallel_size=1).resolved())
    assert used.model.divide_heads and not used.model.divides_heads and used.log.mode == "anchor"


def test_heads_that_cannot_be_divided_are_not_and_the_start_says_so(caplog: pytest.LogCaptureFixture) -> None:
    _, needs, _ = divided(2)
    directory = Path(needs.settings.model.directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    told, cluster = settings_of(directory, "anchor"), ClusterConfig(tensor_parallel_size=2).resolved()
    used = divide_heads(told, cluster)
    assert not used.model.divides_heads and used.log.mode == "anchor"
    assert with_room(cluster, used).shadow_experts is None, "slices have copies"
    say_whole_heads(told)
    assert "attention is not divided: this model's heads can only be divided on CPUs" in caplog.text


def test_homes_have_records_and_fetch_kv_unless_there_is_no_log() -> None:
    model, needs, start = divided(2)
    memory = needs.memory(first_goal(start, model), WorkerId(Rank(0), Incarnation(1)))
    assert {Kind.LOG} == {piece.kind for piece in memory} & {Kind.LOG, Kind.KV}
    assert needs.fetches_kv is Role.ATTENTION and needs.logs_are_inherited
    off = structs.replace(needs.settings, log=structs.replace(needs.settings.log, mode="off"))
    assert dataclasses.replace(needs, settings=off).fetches_kv is None


@pytest.mark.parametrize(("log", "shadows", "stay"), [("anchor", 0, True), ("anchor", 2, False), ("off", 2, True)])
def test_heads_stay_where_they_could_not_bring_their_kv_or_find_no_room(log: str, shadows: int, stay: bool) -> None:
    model, _, start = divided(2, shadow_experts=shadows)
    worker = structs.replace(start.worker, log=structs.replace(start.worker.log, mode=log))
    start = structs.replace(start, worker=worker)
    assert capacity_of(start, model, first_goal(start, model)).heads_stay is stay


def test_heads_on_a_gpu_have_no_shadow() -> None:
    model, needs, start = divided(2)
    memory = needs.memory(first_goal(start, model), WorkerId(Rank(2), Incarnation(1)))
    assert not {Kind.KV_MIRROR, Kind.KV_PARITY} & {piece.kind for piece in memory}
