"""Homes and expert seats with divided heads on a device, without one: memory is the host's, kernels are interpreted.

    world = HeadPoolWorld(num_workers=3, num_homes=2, seed=1)    every head somewhere, at random
    home = world.homes[0]; home.engine.add(...); home.engine.step()

The memory of seats, its tables, words, copies, the journal and the engine are the real ones. What is played is
attention: the KV of a token is the token itself, in every head, and the next token is a hash of all that is read back
where heads are asked. So a stream changes if any of it is wrong.
"""

import ctypes
import os
import random
from collections.abc import Callable

import numpy as np
import torch

from everserve.backends.cpu.reference import ReferenceOps
from everserve.backends.cuda.head_table import HeadTable, new_identity
from everserve.backends.cuda.lanes.head_kv import CudaHeadKv
from everserve.backends.cuda.log.head_fetcher import HeadFetcher
from everserve.backends.cuda.log.head_mirror import HeadMirror, HeadMirrors
from everserve.backends.cuda.log.head_pools import HeadPools
from everserve.backends.cuda.log.head_writer import HeadLogWriter
from everserve.engine.engine import Engine
from everserve.engine.forward import EagerForward
from everserve.engine.journal import Journal
from everserve.engine.saved import Saved
from everserve.errors import KvLost, StepAbandoned
from everserve.kvlog.chains import key_of
from everserve.kvlog.layout import LogShape
from everserve.kvlog.log import Log, NoBlocks
from everserve.memory.device import Mapping
from everserve.memory.owned import create_memory
from everserve.memory.pieces.layout import KvShape
from everserve.model.batch import StepBatch
from everserve.plan.head_memory import HeadMemoryPlan
from everserve.tables.ids import Rank
from everserve.tables.memory import Kind
from tests.kernels.host_device import HostDriver
from tests.support.toy import VOCAB, logits_after, make_config

NUM_LAYERS, NUM_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS_PER_HOME = 2, 2, 4, 4, 24
HEADS = [(layer, head) for layer in range(NUM_LAYERS) for head in range(NUM_HEADS)]
MIRROR_SHAPE = KvShape(BLOCKS_PER_HOME, len(HEADS), 2 * BLOCK_SIZE * 2 * HEAD_SIZE, BLOCK_SIZE)
MAX_ROWS, FIRST_WORKER = 16, 10  # ranks of expert workers begin there


class ToyDriver(HostDriver):
    """What tables and maps need of a driver."""

    def read(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))


class Late:
    """A side on which nothing happens until somebody waits."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.queued: list[Callable[[], None]] = []

    def record(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()
        return lambda: self.run(launch)

    def run(self, launch: Callable[[], None]) -> None:
        self.queued.append(launch)

    def wait(self) -> None:
        queued, self.queued = self.queued, []
        for launch in queued:
            launch()


class Seat:
    """An expert seat: its memory, and whether a worker serves it. Its heads are in pieces; what a worker was asked
    before it stopped answering it stores when it wakes up."""

    def __init__(self, world: "HeadPoolWorld", rank: Rank) -> None:
        self.world, self.rank = world, rank
        self.is_up = True
        self.late: dict[int, Callable[[], None]] = {}  # by home: what it has still to store
        self.fd = -1
        self.lose_memory()

    def lose_memory(self) -> None:
        """With its device: there is new memory, without any head."""
        if self.fd >= 0:
            os.close(self.fd)
        plan = self.world.plan
        self.fd = create_memory("heads", plan.num_bytes)
        self.mapping = Mapping(self.world.driver, self.fd, plan.num_bytes)
        self.table = HeadTable(self.world.driver, self.mapping.address, plan.num_pieces)
        self.table.claim(b"a model and so on")
        pool = (ctypes.c_int64 * (plan.num_blocks * plan.block_bytes // 8)).from_address(
            self.mapping.address + plan.blocks_at
        )
        # [block, piece, plane, slot]: a row is one word
        self.pool = np.frombuffer(pool, np.int64).reshape(plan.num_blocks, plan.num_pieces, 2, BLOCK_SIZE)
        self.pool[...] = -1

    def succeed(self) -> None:
        """Another process has the memory."""
        self.is_up = True
        self.table.own(1, 2, 3, new_identity())

    def damage(self, share: float, seed: int) -> None:
        """So much of the KV that is there, and of its words."""
        assert not self.is_up
        plan = self.world.plan
        num_bytes = plan.words_at - plan.blocks_at + plan.num_blocks * plan.block_words_bytes
        at = self.mapping.address + plan.blocks_at
        data = np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(at), np.uint8)
        rng = np.random.default_rng(seed)
        hit = np.flatnonzero(rng.random(len(data)) < share)
        data[hit] ^= 1 << rng.integers(0, 8, len(hit), np.uint8)

    def load(self, head: tuple[int, int]) -> None:
        """Have it here; if another one has to go, the identity of all KV is another one."""
        self.table.in_use.add(head)
        if self.table.find(head) is None:
            self.table.complete(self.table.take(head), head)

    def store(self, head: tuple[int, int], slots: np.ndarray, tokens: np.ndarray) -> None:
        piece = self.table.find(head)
        assert piece is not None, "asked for a head that it does not have"
        for plane in range(2):
            self.pool[slots // BLOCK_SIZE, piece, plane, slots % BLOCK_SIZE] = _kv(tokens, head, plane)

    def read(self, head: tuple[int, int], slots: np.ndarray) -> np.ndarray:
        """The tokens, -1 where keys and values are not of one token and this head."""
        piece = self.table.find(head)
        keys, values = (self.pool[slots // BLOCK_SIZE, piece, plane, slots % BLOCK_SIZE] for plane in range(2))
        tokens = keys >> 16
        is_right = (keys == _kv(tokens, head, 0)) & (values == _kv(tokens, head, 1))
        return np.where(is_right, tokens, -1)


def _kv(tokens: np.ndarray, head: tuple[int, int], plane: int) -> np.ndarray:
    return tokens << 16 | head[0] << 8 | head[1] << 4 | plane


class Home:
    """An engine, and what it knows of its peers: `HeadPeers`."""

    def __init__(self, world: "HeadPoolWorld", rank: Rank, log_fd: int, **overrides: object) -> None:
        self.world, self.rank, self.log_fd = world, rank, log_fd
        self.num_changes = 0
        self.owner_LN = np.full((NUM_LAYERS, NUM_HEADS), -1, np.int32)
        self.follow()
        side = Late()
        mirrors = self._make_mirrors(side) if world.mirror_fds else None
        self.pools = HeadPools(world.driver, world.plan, side.wait, mirrors)
        for seat in world.seats.values():
            self.pools.offer(seat.rank, Kind.KV_PIECES, os.dup(seat.fd))
        self.pools.sweep()
        self.fetcher = HeadFetcher(self.pools, HEADS, side, mirrors)
        self.kv = CudaHeadKv(self, {layer: layer for layer in range(NUM_LAYERS)}, NUM_HEADS, self.fetcher)
        self.log = Log(log_fd, world.log_shape, NoBlocks())
        told = {"max_num_batched_tokens": MAX_ROWS, "launch_ahead": False, **overrides}
        config = make_config(BLOCKS_PER_HOME, BLOCK_SIZE, first_block=rank * BLOCKS_PER_HOME, **told)
        forward = EagerForward(lambda batch, experts: self._compute(batch), torch.device("cpu"))
        writer = HeadLogWriter(self.log, self.kv, self.fetcher, MAX_ROWS)
        self.engine = Engine(*config, ReferenceOps(), forward, journal=Journal(writer), kv_elsewhere=self.kv)

    def _make_mirrors(self, side: Late) -> HeadMirrors:
        """Its own, within reach, and those of all others."""
        own, *others = sorted(self.world.mirror_fds.items(), key=lambda one: one[0] != self.rank)
        mirror = HeadMirror(own[1], MIRROR_SHAPE, own[0])
        mirror.register(self.world.driver).join()
        assert mirror.num_reached == BLOCKS_PER_HOME
        mirrors = HeadMirrors(mirror, side)
        for rank, fd in others:
            mirrors.offer(rank, os.dup(fd))
        return mirrors

    # -- peers -------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Use the latest routes: of each head the first place whose worker serves."""
        for layer, head in HEADS:
            up = [rank for rank in self.world.routes[layer, head] if self.world.seats[rank].is_up]
            self.owner_LN[layer, head] = up[0] if up else -1
        self.num_changes += 1

    def pool_of(self, rank: Rank) -> int:
        seat = self.world.seats[rank]
        return seat.table.pool if seat.is_up else 0

    def has_answered(self, rank: Rank) -> bool:
        return self.rank not in self.world.seats[rank].late

    # -- a step ------------------------------------------------------------------------------------

    def _compute(self, batch: StepBatch) -> torch.Tensor:
        """As `CudaExperts` sees a step through."""
        if self.kv.is_displaced:
            raise KvLost(0, "displaced")
        self.kv.use()
        tokens, slots = batch.tokens_T.numpy().astype(np.int64), batch.kv_slots_T.numpy()
        for layer, head in HEADS:
            rank = Rank(int(self.owner_LN[layer, head]))
            if rank < 0:
                raise StepAbandoned(layer, (head,))
            seat = self.world.seats[rank]
            if self.world.before_call(self, seat, layer) or not seat.is_up:
                # It has died, or does not answer: what it was asked it may still store, unless that is over.
                self.follow()
                raise StepAbandoned(layer, (head,)) if not self.kv.is_displaced else KvLost(layer, "displaced")
            if self.rank in seat.late:
                seat.late.pop(self.rank)()  # one request after the other
            if seat.table.find((layer, head)) is None:
                raise StepAbandoned(layer, (head,))
            seat.store((layer, head), slots, tokens)
        rows = self._attend(batch)
        if not self.kv.has_same_pools():
            raise KvLost(0, "not the KV that streams were computed with")
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _attend(self, batch: StepBatch) -> list[torch.Tensor]:
        wanted, starts, found = set(batch.logits_rows_L.tolist()), batch.query_starts_S.tolist(), []
        for i in range(batch.num_seqs):
            table = batch.block_tables_SB[i].numpy()
            for row in (row for row in range(starts[i], starts[i + 1]) if row in wanted):
                positions = np.arange(int(batch.positions_T[row]) + 1)
                slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
                read = [self.world.seats[Rank(int(self.owner_LN[head]))].read(head, slots) for head in HEADS]
                is_one = np.all(np.array(read) == read[0], axis=0)
                found.append(logits_after(np.where(is_one, read[0], -1).tolist()))
        return found

    def saved(self, log: Log, id: str) -> Saved | None:
        record = log.find(key_of(id))
        return Saved.of(log, record, self.log) if record is not None else None


class HeadPoolWorld:
    """Any head may be at any worker: each has pieces for all, or for as many as it is told."""

    def __init__(
        self,
        num_workers: int = 3,
        num_homes: int = 2,
        seed: int = 0,
        has_mirrors: bool = False,
        num_pieces: int = len(HEADS),
    ) -> None:
        self.chance, self.driver = random.Random(seed), ToyDriver()
        self.plan = HeadMemoryPlan(num_pieces, 4 * HEAD_SIZE, 8, HEAD_SIZE, num_homes * BLOCKS_PER_HOME, BLOCK_SIZE)
        self.log_shape = LogShape(
            num_blocks=2 * num_homes * BLOCKS_PER_HOME,
            block_size=BLOCK_SIZE,
            num_layers=NUM_LAYERS,
            num_planes=2 * NUM_HEADS,
            piece_bytes=2 * HEAD_SIZE,
            num_records=18,
            max_blocks=16,
        )
        self.before_call: Callable[[Home, Seat, int], bool] = lambda home, seat, layer: False
        ranks = [Rank(FIRST_WORKER + i) for i in range(num_workers)]
        self.seats = {rank: Seat(self, rank) for rank in ranks}
        self.routes: dict[tuple[int, int], list[Rank]] = {}
        for head in HEADS:
            self.routes[head] = [self.chance.choice([rank for rank in ranks if self.has_room(head, rank)])]
            self.seats[self.routes[head][0]].load(head)
        self.mirror_fds = {Rank(i): create_memory("mirror", MIRROR_SHAPE.num_bytes) for i in range(num_homes)}
        if not has_mirrors:
            self.mirror_fds.clear()
        self.homes = [Home(self, Rank(i), self.new_log()) for i in range(num_homes)]

    def has_room(self, head: tuple[int, int], rank: Rank) -> bool:
        return len(self.seats[rank].table.in_use | {head}) <= self.plan.num_pieces

    def new_log(self) -> int:
        return create_memory("log", self.log_shape.head_bytes)

    def publish(self) -> None:
        for home in self.homes:
            home.follow()

    def move(self, head: tuple[int, int], rank: Rank) -> None:
        """It is asked there from now on; where it was its piece stays until it is needed."""
        self.seats[rank].load(head)
        before = self.routes[head]
        self.routes[head] = [rank]
        for other in before:
            if other != rank:
                self.seats[other].table.in_use.discard(head)
        self.publish()

    def die(self, rank: Rank, memory_lost: bool = False) -> None:
        """Its worker ends, and so do its late requests. With its device its memory is lost too."""
        seat = self.seats[rank]
        seat.is_up = False
        seat.late.clear()
        if memory_lost:
            for home in self.homes:
                home.pools.withdraw(rank, Kind.KV_PIECES)
            seat.lose_memory()
            for head, ranks in self.routes.items():
                if rank in ranks:
                    seat.load(head)
            for home in self.homes:
                home.pools.offer(rank, Kind.KV_PIECES, os.dup(seat.fd))
        self.publish()

    def take_away(self, head: tuple[int, int]) -> None:
        """It has no place any more, and its piece may be given to another one."""
        for rank in self.routes[head]:
            self.seats[rank].table.in_use.discard(head)
        self.routes[head] = []
        self.publish()

    def revive(self, rank: Rank) -> None:
        """Its next worker serves, if the last one has died."""
        if not self.seats[rank].is_up:
            self.seats[rank].succeed()
        self.publish()

    def restart(self, index: int) -> Home:
        """The home dies; the next one in its seat goes on with its log. Returns the one that has died."""
        dead = self.homes[index]
        for seat in self.seats.values():
            seat.late.pop(dead.rank, None)  # workers have closed its lane
        self.homes[index] = Home(self, dead.rank, dead.log_fd)
        return dead
