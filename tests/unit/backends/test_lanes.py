"""Lanes: their layout, both ends, what a server refuses, and the order of memory between two real processes."""

import ctypes
import itertools
import mmap
import os
import signal
import struct

import numpy as np
import pytest
import torch

from everserve.backends.cpu import ops as native
from everserve.backends.cpu.exchange import Exchange
from everserve.backends.cpu.lane import NUM_BOXES, LaneRegion, LaneShape, moved_place, row_word
from everserve.backends.cpu.lane_server import LaneServer
from everserve.backends.cpu.peers import ExpertPeers
from everserve.backends.cpu.reference import ReferenceOps
from everserve.backends.cpu.remote_experts import RemoteExperts
from everserve.memory.liveness import Cell
from everserve.seam.batching import ON_CPUS, Request, choose
from everserve.seam.healing import NO_REPORTS, Reports
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.slots import EMPTY
from tests.support.experts import (
    HIDDEN,
    MOE_LAYERS,
    NUM_EXPERTS,
    SHAPE,
    TOP_K,
    RandomExperts,
    Rows,
    local_experts,
    routes,
)
from tests.support.in_process_experts import MemoryExperts, MemoryWarden, new_cell, new_memory

EVERYTHING = range(NUM_EXPERTS)


# layout


@pytest.mark.parametrize("hidden_size", [1, 16, 37, 512, 4096])
@pytest.mark.parametrize(("max_tokens", "top_k"), [(1, 1), (7, 3), (2048, 8)])
def test_layout(max_tokens, top_k, hidden_size):
    shape = LaneShape(max_tokens, top_k, hidden_size)
    layout = shape.layout()
    row, indices = 4 * hidden_size, 4 * max_tokens * top_k
    ends = [
        (0, 128),  # the words
        (layout.tokens_at, indices),
        (layout.slots_at, indices),
        (layout.x_at, max_tokens * row),
        (layout.y_at, max_tokens * top_k * row),
        (layout.box_bytes, 0),
    ]
    assert all(at + size <= following for (at, size), (following, _) in itertools.pairwise(ends))
    assert layout.first_box >= 64 and shape.lane_bytes() >= layout.first_box + NUM_BOXES * layout.box_bytes
    assert shape.lane_bytes() % mmap.PAGESIZE == shape.lane_bytes() % row == 0
    for box in range(NUM_BOXES):
        begin = layout.first_box + box * layout.box_bytes
        assert begin % 64 == 0, "words have cache lines of their own"
        assert (begin + layout.x_at) % row == (begin + layout.y_at) % row == 0, "whole rows from the lane's beginning"


def test_region_maps_side_by_side_and_again():
    region = LaneRegion(SHAPE, 3)
    fds = [new_memory(SHAPE.lane_bytes()) for _ in range(2)]
    first, second = (region.map(fd) for fd in fds)
    assert {(address - region.base) % SHAPE.lane_bytes() for address in (first, second)} == {0} and first != second
    ctypes.c_int64.from_address(first).value = 41
    region.unmap(first)
    again = region.map(fds[0])
    assert ctypes.c_int64.from_address(again).value == 41, "the memory is the descriptor's, not the mapping's"
    with pytest.raises(ValueError, match=r"a lane has \d+ bytes, this memory has 64"):
        region.map(new_memory(64))
    region.close()


# what a server refuses


class Customer:
    """An attention worker's end by hand: writes what it likes into box 0."""

    def __init__(self) -> None:
        self.cell, _ = new_cell()
        self.fd = new_memory(SHAPE.lane_bytes())
        self.lane = mmap.mmap(self.fd, SHAPE.lane_bytes())
        self.layout = SHAPE.layout()
        self.seq = 0
        sizes = (SHAPE.max_tokens, TOP_K, HIDDEN, 0, 1, 9, 1, SHAPE.y_floats, SHAPE.page_words)
        struct.pack_into("10q", self.lane, 0, 0x656E616C2D7365, *sizes)
        x_at = self.layout.first_box + self.layout.x_at
        self.lane[x_at : x_at + 4 * HIDDEN * 2] = np.ones(2 * HIDDEN, np.float32).tobytes()

    def ask(
        self, layer=MOE_LAYERS[0], num_tokens=2, tokens=(0, 1, 1), slots=(0, 1, 2), experts=None, num_rows=None
    ) -> None:
        at = self.layout.first_box
        struct.pack_into(f"{len(tokens)}i", self.lane, at + self.layout.tokens_at, *tokens)
        experts = slots if experts is None else experts
        words = [row_word(slot, expert) if slot >= 0 else slot for slot, expert in zip(slots, experts, strict=True)]
        struct.pack_into(f"{len(words)}i", self.lane, at + self.layout.slots_at, *words)
        num_rows = len(tokens) if num_rows is None else num_rows
        self.seq += 1
        struct.pack_into("q4i", self.lane, at + 8, 5, layer, num_tokens, num_rows, 0)
        struct.pack_into("Q", self.lane, at, self.seq)

    def moved(self, num_rows=3) -> list[tuple[int, int] | None]:
        """What the server says of each row."""
        words = struct.unpack_from(f"{num_rows}i", self.lane, self.layout.first_box + self.layout.slots_at)
        return [moved_place(word) for word in words]

    def answer(self) -> tuple[bool, int]:
        """Whether the request is answered, and with which status."""
        answer, status = struct.unpack_from("Qq", self.lane, self.layout.first_box + 64)
        return answer == self.seq, status


@pytest.fixture
def server():
    cell, _ = new_cell()
    alarm = ctypes.c_uint32()
    experts = RandomExperts(ReferenceOps(), EVERYTHING)
    experts.clear(MOE_LAYERS[1], 2)
    server = LaneServer(cell, ctypes.addressof(alarm), SHAPE, experts)
    yield server
    server.close()


NONSENSE = [
    ("bad layer", {"layer": 0}, 2),
    ("layer far away", {"layer": 1 << 30}, 2),
    ("negative layer", {"layer": -1}, 2),
    ("no tokens", {"num_tokens": 0}, 2),
    ("too many tokens", {"num_tokens": SHAPE.max_tokens + 1}, 2),
    ("no rows", {"num_rows": 0}, 2),
    ("more rows than experts", {"num_tokens": 1, "num_rows": TOP_K + 1}, 2),
    ("token out of range", {"tokens": (0, 1, 2)}, 2),
    ("negative token", {"tokens": (-1, 1, 1)}, 2),
    ("slot out of range", {"slots": (0, 1, NUM_EXPERTS)}, 3),
    ("negative slot", {"slots": (0, -1, 1)}, 3),
    ("empty slot", {"layer": MOE_LAYERS[1]}, 4),
    ("another expert", {"experts": (0, 1, 4)}, 4),
    ("no expert at all", {"experts": (0, 1, 32767)}, 4),
]


@pytest.mark.parametrize(("request_", "status"), [case[1:] for case in NONSENSE], ids=[case[0] for case in NONSENSE])
def test_nonsense_is_refused_and_the_next_request_served(server, request_, status):
    customer = Customer()
    server.open(Rank(0), customer.cell, customer.fd)
    customer.ask(**request_)
    for request in server.poll(0):
        assert server.compute([request]) == 0
    assert customer.answer() == (True, status) and server.num_refused == 1
    customer.ask()
    (request,) = server.poll(0)
    assert server.compute([request]) == 3
    assert customer.answer() == (True, 0) and server.num_refused == 1
    assert server.poll(0) == [], "taken once"


def test_rows_of_experts_that_moved_are_marked(server):
    customer = Customer()
    server.open(Rank(0), customer.cell, customer.fd)
    customer.ask(slots=(0, 1, 2), experts=(5, 1, 0))
    (request,) = server.poll(0)
    assert server.compute([request]) == 0 and customer.answer() == (True, 4)
    assert customer.moved() == [(0, 5), None, (2, 0)]


def test_a_slot_computes_what_it_holds_now(server):
    """A request that came before the change, and waits for its batch, is refused all the same."""
    customer, experts, layer = Customer(), server._experts, MOE_LAYERS[0]
    server.open(Rank(0), customer.cell, customer.fd)
    customer.ask()
    (request,) = server.poll(0)
    experts.clear(layer, 1)
    experts.load(layer, expert=5, slot=1)
    assert server.compute([request]) == 0 and customer.answer() == (True, 4)
    customer.ask(experts=(0, 5, 2))
    (request,) = server.poll(0)
    assert server.compute([request]) == 3 and customer.answer() == (True, 0)
    assert experts.generations[layer] == [1, 3, 1, 1, 1, 1]


def test_a_bad_box_does_not_spoil_the_batch(server):
    customers = [Customer(), Customer(), Customer()]
    for rank, customer in enumerate(customers):
        server.open(Rank(rank), customer.cell, customer.fd)
        customer.ask(slots=(0, 1, 99 if rank == 1 else 2))
    assert server.compute(server.poll(0)) == 6
    assert [customer.answer() for customer in customers] == [(True, 0), (True, 3), (True, 0)]


def test_a_lane_of_another_shape_is_left_alone(server):
    customer = Customer()
    struct.pack_into("q", customer.lane, 16, TOP_K + 1)
    server.open(Rank(0), customer.cell, customer.fd)
    customer.ask()
    assert server.poll(0) == [] and server.num_refused == 1 and customer.answer() == (False, 0)


def test_a_dropped_lane_is_not_read(server):
    customer = Customer()
    server.open(Rank(0), customer.cell, os.dup(customer.fd))
    server.drop(Rank(0))
    customer.ask()
    assert server.poll(0) == []
    server.open(Rank(0), customer.cell, customer.fd)
    assert len(server.poll(0)) == 1


def test_poll_says_that_something_changed_and_shows_where_everybody_is(server):
    customer = Customer()
    server.open(Rank(3), customer.cell, customer.fd)
    server.attend()
    customer.cell.position = 4
    assert server.poll(0) == [] and not server.changed and server.positions == {3: 4}
    server._cell.ring_control()
    assert server.poll(60) == [] and server.changed, "does not block"
    server.attend()
    server.poll(0)
    assert not server.changed


# requests that come alone


@pytest.fixture
def native_server():
    cell, _ = new_cell()
    alarm = ctypes.c_uint32()
    experts = RandomExperts(native.NativeOps(1), EVERYTHING)
    experts.clear(MOE_LAYERS[1], 2)
    server = LaneServer(cell, ctypes.addressof(alarm), SHAPE, experts)
    yield server
    server.close()


@pytest.mark.parametrize(("request_", "status"), [case[1:] for case in NONSENSE], ids=[case[0] for case in NONSENSE])
def test_alone_too_nonsense_is_refused_and_the_next_request_served(native_server, request_, status):
    server, customer = native_server, Customer()
    server.open(Rank(0), customer.cell, customer.fd)
    customer.ask(**request_)
    assert server.serve(0, 100, ON_CPUS) == []
    assert customer.answer() == (True, status) and server.num_refused == 1 and server.num_served[1] == 0
    customer.ask()
    assert server.serve(0, 100, ON_CPUS) == []
    assert customer.answer() == (True, 0) and server.num_refused == 1 and server.num_served[1] == 3


def test_requests_that_need_a_decision_are_left_to_python(native_server):
    server, customer = native_server, Customer()
    server.open(Rank(0), customer.cell, customer.fd)
    server.attend()
    customer.ask()
    (large,) = server.serve(0, 2, ON_CPUS)
    assert large.num_rows == 3 and customer.answer() == (False, 0)
    assert server.compute([large]) == 3 and customer.answer() == (True, 0)
    customer.ask()
    struct.pack_into("i", customer.lane, customer.layout.first_box + 28, 1)
    (replay,) = server.serve(0, 100, ON_CPUS)
    assert replay.replay and server.compute([replay]) == 3
    customer.ask()
    server._cell.ring_control()
    (with_news,) = server.serve(0, 100, ON_CPUS)
    assert server.changed and server.compute([with_news]) == 3
    assert server.num_served == (0, 0)


def test_without_native_ops_nothing_is_computed_alone(server):
    customer = Customer()
    server.open(Rank(0), customer.cell, customer.fd)
    customer.ask()
    assert len(server.serve(0, 100, ON_CPUS)) == 1 and server.num_served == (0, 0)


def test_experts_of_a_layer_that_had_none_are_computed_alone_too():
    cell, _ = new_cell()
    alarm = ctypes.c_uint32()
    experts = RandomExperts(native.NativeOps(1), [EMPTY] * NUM_EXPERTS)
    server, customer = LaneServer(cell, ctypes.addressof(alarm), SHAPE, experts), Customer()
    server.open(Rank(0), customer.cell, customer.fd)
    customer.ask(num_tokens=1, tokens=(0,), slots=(0,))
    (request,) = server.serve(0, 100, ON_CPUS)
    assert server.compute([request]) == 0 and customer.answer() == (True, 4)
    experts.load(MOE_LAYERS[0], 0, 0)
    customer.ask(num_tokens=1, tokens=(0,), slots=(0,))
    assert server.serve(0, 100, ON_CPUS) == [] and customer.answer() == (True, 0) and server.num_served == (1, 1)
    server.close()


@pytest.mark.parametrize("policy", [ON_CPUS, ON_CPUS._replace(reach=None), ON_CPUS._replace(reach=0)], ids=str)
def test_c_knows_when_nobody_is_coming(native_server, policy):
    """As `choose` does, with whatever positions."""
    server, customers = native_server, [Customer(), Customer(), Customer()]
    for rank, customer in enumerate(customers):
        server.open(Rank(rank), customer.cell, customer.fd)
    reasons = set()
    for call, *positions in itertools.product((MOE_LAYERS[0], MOE_LAYERS[2]), range(-1, 6), range(-1, 6)):
        for customer, position in zip(customers[1:], positions, strict=True):
            customer.cell.position = position
        customers[0].ask(layer=call)
        num_before = server.num_served[0]
        left = server.serve(0, 100, policy)
        where = {Rank(rank): position for rank, position in enumerate(positions, 1)}
        choice = choose([Request(Rank(0), 0, call, 0, 3, arrived_ns=0)], where, now_ns=0, policy=policy)
        reasons.add(choice.reason)
        assert bool(left) == (choice.reason != "all are here") == (server.num_served[0] == num_before), positions
        if left:
            server.compute(left)
        assert customers[0].answer() == (True, 0)
    assert reasons == {"all are here", "waiting for company"}


# several attention workers


@pytest.mark.parametrize("ops", [native.NativeOps(1), ReferenceOps(batch_invariant=True)], ids=lambda ops: ops.name)
def test_rows_of_several_lanes_are_one_batch(ops):
    """Each attention worker, when it would block, lets the next one send; the last one lets the server work."""
    cell, cell_fd = new_cell()
    alarm = ctypes.c_uint32()
    server = LaneServer(cell, ctypes.addressof(alarm), SHAPE, RandomExperts(ops, EVERYTHING))
    local, layer, inputs = local_experts(ops), MOE_LAYERS[0], [Rows(5, seed) for seed in range(3)]
    batches, results = [], {}

    def run(rank: int) -> bool:
        if rank == len(inputs):
            requests = server.poll(0)
            batches.append([request.rank for request in requests])
            return bool(requests and server.compute(requests))
        own, _ = new_cell()
        peers = ExpertPeers(Rank(rank), Incarnation(1), own, MemoryWarden(own), SHAPE, MOE_LAYERS, NUM_EXPERTS)
        lane_fd = new_memory(SHAPE.lane_bytes())
        server.open(Rank(rank), own, os.dup(lane_fd))
        peers.join(Rank(9), Incarnation(1), Cell(cell_fd), lane_fd)
        peers.use(routes({Rank(9): EVERYTHING}))
        remote = RemoteExperts(
            Exchange(peers, NO_REPORTS, detect_ms=1, lease_s=1, others_turn=lambda: run(rank + 1)), ops
        )
        results[rank] = inputs[rank].through(remote, layer)
        peers.close()
        return True

    run(0)
    assert batches == [[0, 1, 2]]
    for rank, rows in enumerate(inputs):
        assert torch.equal(results[rank], rows.through(local, layer))
    server.close()


# two processes


@pytest.mark.parametrize("most_rows", [0, 20, 1000], ids=["by Python", "by both", "alone"])
def test_thousands_of_exchanges_between_two_processes(most_rows):
    """Weakly ordered memory, futexes and sequence words, for real: every row of every answer is checked."""
    ops, num_exchanges = native.NativeOps(1), 1000
    cluster = MemoryExperts(SHAPE, MOE_LAYERS, NUM_EXPERTS)
    cell, cell_fd = new_cell()
    lane_fd = new_memory(SHAPE.lane_bytes())
    pid = os.fork()
    if pid == 0:
        try:
            alarm = ctypes.c_uint32()
            server = LaneServer(cell, ctypes.addressof(alarm), SHAPE, RandomExperts(ops, EVERYTHING))
            server.open(Rank(0), cluster.cell, lane_fd)
            while not server.changed:
                for request in server.serve(10, most_rows, ON_CPUS):
                    server.compute([request])
            os._exit(0 if bool(most_rows) == (server.num_served[0] > 0) else 2)
        except BaseException:
            os._exit(1)
    try:
        cluster.peers.join(Rank(9), Incarnation(1), Cell(cell_fd), lane_fd)
        cluster.peers.use(routes({Rank(9): EVERYTHING}))
        told = []
        remote = RemoteExperts(
            Exchange(
                cluster.peers,
                detect_ms=5000,
                lease_s=1,
                reports=Reports(
                    lambda: None, lambda *suspicion: told.append(suspicion), lambda *replay: told.append(replay)
                ),
            ),
            ops,
        )
        local = local_experts(ops)
        cases = [Rows(1 + seed % SHAPE.max_tokens, seed) for seed in range(40)]
        expected = {layer: [rows.through(local, layer) for rows in cases] for layer in MOE_LAYERS}
        for i in range(num_exchanges):
            layer, case = MOE_LAYERS[i % len(MOE_LAYERS)], i * 7 % len(cases)
            assert torch.equal(cases[case].through(remote, layer), expected[layer][case]), f"exchange {i}"
        assert told == []
        cell.ring_control()
        assert os.waitpid(pid, 0) == (pid, 0)
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    cluster.close()
