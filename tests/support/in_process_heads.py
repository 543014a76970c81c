"""Homes and shard workers in one process: heads, their KV and FFN shards are apart, streams and residual rows at homes.

    world = HeadWorld(directory, num_workers=3, seed=1)          every (layer, head) somewhere, at random
    world.homes[0].heads, world.homes[0].experts                 for a decoder without heads of its own

Lanes, cells and pools are the real ones, on memory of our own, and so is all the code that works on them. What is
played is the other processes: they take their turn whenever a home would block, one after the other.
"""

import ctypes
import gc
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from everserve.backends.cpu import ops as native
from everserve.backends.cpu.exchange import Exchange
from everserve.backends.cpu.kept_kv import KeptKv
from everserve.backends.cpu.lane import LaneShape
from everserve.backends.cpu.lane_server import LaneServer, Request
from everserve.backends.cpu.local_experts import LocalExperts
from everserve.backends.cpu.peers import ExpertPeers
from everserve.backends.cpu.remote_experts import RemoteExperts
from everserve.backends.cpu.remote_heads import RemoteHeads
from everserve.config.engine import EngineConfig
from everserve.engine.engine import Engine
from everserve.engine.forward import EagerForward
from everserve.engine.journal import Journal
from everserve.engine.limits import EngineLimits
from everserve.engine.speculation import Drafting
from everserve.kvlog.layout import LogShape
from everserve.kvlog.log import Log, NoBlocks
from everserve.memory.liveness import Cell, PeerState
from everserve.memory.pieces.layout import owner_of
from everserve.memory.pieces.sources import KvSources
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.decoder import Decoder
from everserve.model.expert_half import ExpertHalf
from everserve.model.head_half import HeadHalf
from everserve.model.weights import Weights
from everserve.plan.parity import parity_groups
from everserve.seam.healing import Reports
from everserve.tables.block_ranges import NO_BLOCKS, BlockRange, block_range_of, parking_range_of
from everserve.tables.calls import Call, ShardKind
from everserve.tables.ids import Epoch, Incarnation, Rank, SlotId
from everserve.tables.memory import Kind
from everserve.tables.routes import Routes
from tests.support.heads import BLOCK_SIZE, PoolMemory, head_half
from tests.support.in_process_experts import MemoryWarden, new_cell, new_memory

OPS = native.NativeOps(num_threads=1)
BLOCKS_PER_HOME = 24
MAX_TOKENS, MAX_SEQS = 48, 8
FIRST_WORKER = 20
FETCH = -1  # as the call of a fault: it dies when it is asked for KV
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Identity = tuple[int, int]  # layer, number


def calls_of(config: ModelConfig) -> tuple[Call, ...]:
    """Heads, then the FFN if it crosses the seam, layer by layer."""
    calls = []
    for layer in range(config.num_layers):
        calls.append(Call(layer=layer, kind=ShardKind.HEAD, num_shards=config.num_kv_heads))
        if config.crosses_seam(layer):
            calls.append(config.cut(layer).call)
    return tuple(calls)


class ShardWorker:
    """One seat. `fault(call, num_requests)` is asked before a batch is computed: True, and it dies there."""

    def __init__(self, world: "HeadWorld", rank: Rank, heads: Sequence[Identity], shards: Sequence[Identity]) -> None:
        self.world, self.rank = world, rank
        self.heads, self.shards = list(heads), list(shards)
        num_blocks = len(world.homes) * BLOCKS_PER_HOME
        self.memory = PoolMemory(world.config, num_blocks, world.num_pieces or len(self.heads), world.item_bytes)
        if world.shadow == "mirror":
            self.memory.mirrored()
        elif world.shadow == "parity":
            self.memory.with_parity(len(world.homes), world.num_workers)
        self.incarnation = Incarnation(0)
        self.fault: Callable[[int, list[Request]], bool] = lambda call, batch: False
        self.dies_after = False  # computing, before it answers
        self.shadows_at_once = True
        self.batches: list[tuple[int, list[int]]] = []  # call, ranks
        self.is_dead = True

    def start(self) -> None:
        """A new incarnation, with a lane to each home."""
        assert self.is_dead
        self.incarnation, self.is_dead = Incarnation(self.incarnation + 1), False
        world = self.world
        self.half = head_half(world.directory, OPS, self.heads, self.memory)
        self.ffn = world.expert_half(self.shards)
        self.cell, self.cell_fd = new_cell()
        self._no_alarm = ctypes.c_uint32()
        self.server = LaneServer(
            self.cell, ctypes.addressof(self._no_alarm), world.shape, self.ffn, heads=self.half, calls=world.calls
        )
        self.sources = KvSources(self.half.kv)
        world.offer(self)
        for home in world.homes:
            self.meet(home)

    def meet(self, home: "Home") -> None:
        lane_fd = new_memory(self.world.shape.lane_bytes())
        self.server.open(home.rank, home.cell, os.dup(lane_fd), block_range_of(home.rank, BLOCKS_PER_HOME))
        home.peers.join(self.rank, self.incarnation, Cell(self.cell_fd), lane_fd)

    def turn(self) -> bool:
        if self.is_dead:
            return False
        server, requests = self.server, self.server.poll(0)
        num_fetches = len(server.fetches)
        while server.fetches:
            if self.fault(FETCH, []):
                self.die()
                return True
            server.fetch_next(self.sources)
        if self.shadows_at_once:
            self.shadow()
        for call in sorted({request.layer for request in requests}):
            batch = [request for request in requests if request.layer == call]
            if self.fault(call, batch):
                if self.dies_after:
                    server._answer = lambda *_: None
                    server.compute(batch)
                self.die()
            if self.is_dead or self.server is not server:
                return True
            self.batches.append((call, [request.rank for request in batch]))
            server.compute(batch)
        return bool(requests or num_fetches)

    def shadow(self) -> None:
        """All that waits to become part of a mirror or a parity."""
        self.memory.now_s += 1.0
        while self.sources.has_to_shadow:
            self.sources.shadow_some(1 << 20)

    def die(self) -> None:
        """The process ends; all homes see it."""
        self.is_dead, self.fault, self.dies_after = True, lambda call, batch: False, False
        self.server.close()
        self.half.kv.close()
        for home in self.world.homes:
            home.warden.set(self.rank, PeerState.DIED)

    def replace(self, *, memory_lost: bool = False) -> None:
        """The orchestrator has a successor, and says so."""
        for home in self.world.homes:
            home.peers.leave(self.rank, self.incarnation)
        os.close(self.cell_fd)
        if memory_lost:
            self.memory.forget()
        self.start()
        self.world.publish()

    def damage(self, share: float, seed: int, first: int = 0, end: int | None = None) -> None:
        """Flip a bit in so many of the bytes of its pool, which no process uses at the moment."""
        assert self.is_dead
        fd, end = self.memory.fd, end or self.memory.shape.num_bytes
        data = np.frombuffer(os.pread(fd, end - first, first), np.uint8).copy()
        rng = np.random.default_rng(seed)
        hit = np.flatnonzero(rng.random(len(data)) < share)
        data[hit] ^= 1 << rng.integers(0, 8, len(hit), np.uint8)
        assert os.pwrite(fd, data.tobytes(), first) == len(data)

    def place(self, identity: Identity, kind: ShardKind) -> SlotId | None:
        layer, number = identity
        half: HeadHalf | ExpertHalf = self.half if kind is ShardKind.HEAD else self.ffn
        held = list(half.held[layer])
        return SlotId(held.index(number)) if number in held else None


class Home:
    """An attention worker: what it reaches heads and FFN shards through."""

    def __init__(self, world: "HeadWorld", rank: Rank) -> None:
        self.rank = rank
        self.cell, self.cell_fd = new_cell()
        self.warden = MemoryWarden(self.cell)
        width = max(call.num_shards for call in world.calls)
        numbers = range(len(world.calls))
        self.peers = ExpertPeers(rank, Incarnation(1), self.cell, self.warden, world.shape, numbers, width)
        self.suspected: list[tuple[Rank, str]] = []
        self.before_others: Callable[[], None] = lambda: None
        self.exchange = Exchange(
            self.peers,
            detect_ms=50,
            lease_s=1,
            reports=Reports(
                lambda: None,
                lambda rank, incarnation, reason: self.suspected.append((rank, reason)),
                lambda *replay: None,
            ),
            others_turn=self._others_turn,
        )
        config = world.config
        head_calls = {call.layer: i for i, call in enumerate(world.calls) if call.kind is ShardKind.HEAD}
        ffn_calls = {call.layer: i for i, call in enumerate(world.calls) if call.kind is not ShardKind.HEAD}
        answer_size = config.num_heads // config.num_kv_heads * config.head_size
        row_bytes = 2 * config.head_size * world.item_bytes
        sizes = {"row_bytes": row_bytes, "block_size": BLOCK_SIZE}
        self.heads = RemoteHeads(self.exchange, head_calls, config.num_kv_heads, answer_size, **sizes)
        self.experts = RemoteExperts(self.exchange, OPS, ffn_calls)
        self._world = world

    def _others_turn(self) -> bool:
        before, self.before_others = self.before_others, lambda: None
        before()
        return self._world.turn()


def make_engine(
    config: ModelConfig,
    forward: EagerForward,
    blocks: BlockRange,
    journal: Journal | None = None,
    heads: RemoteHeads | None = None,
    parking: BlockRange = NO_BLOCKS,
    drafting: Drafting | None = None,
    **changes: int,
) -> Engine:
    told = {
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": MAX_TOKENS,
        "max_prefill_while_decoding": MAX_TOKENS,
        "max_prefill_slowdown": 0.0,
        **changes,
    }
    limits = EngineLimits(
        max_model_len=config.max_position_embeddings,
        num_blocks=blocks.num_blocks,
        first_block=blocks.first_block,
        parking=parking,
        vocab_size=config.vocab_size,
    )
    config = EngineConfig(block_size=BLOCK_SIZE, kv_cache_bytes=0, **told)
    kv_elsewhere = heads.kv if heads is not None else None
    return Engine(config, limits, OPS, forward, journal=journal, kv_elsewhere=kv_elsewhere, drafting=drafting)


def config_heads(config: ModelConfig) -> int:
    """Of all layers."""
    return config.num_layers * config.num_kv_heads


class HeadWorld:
    """Every head and every FFN shard at one of the workers, at random, unless `places` says where heads are."""

    def __init__(
        self,
        directory: Path,
        num_workers: int,
        *,
        num_homes: int = 1,
        seed: int = 0,
        places: Mapping[int, Sequence[Identity]] | None = None,
        keeps_kv: bool = False,
        shadow: str = "mirror",
        has_copies: bool = False,
    ) -> None:
        """`keeps_kv`: pools have this shadow, and homes have records. `has_copies`: half of all heads have a second
        place, which has no KV of its own."""
        self.keeps_kv, self.shadow, self.num_pieces = keeps_kv, shadow if keeps_kv else None, 0
        self.directory = directory
        self.config = replace(ModelConfig.from_directory(str(directory)), tensor_parallel=True)
        self.checkpoint = Checkpoint.open(str(directory))
        self.item_bytes = ITEM_BYTES[self.config.dtype]
        self.calls = calls_of(self.config)
        self.shape = LaneShape.with_heads(
            self.config,
            MAX_TOKENS,
            max_num_seqs=MAX_SEQS,
            max_blocks=-(-self.config.max_position_embeddings // BLOCK_SIZE),
            per_token=self.config.max_shards_per_token,
        )
        self.epoch, self.num_workers = 0, num_workers
        self.homes = [Home(self, Rank(rank)) for rank in range(num_homes)]
        rng = random.Random(seed)
        heads, shards = ([[] for _ in range(num_workers)] for _ in range(2))
        for call in self.calls:
            for number in range(call.num_shards):
                where = heads if call.kind is ShardKind.HEAD else shards
                where[rng.randrange(num_workers)].append((call.layer, number))
        if has_copies:
            for mine, others in zip(heads, [*heads[1:], heads[0]], strict=True):
                mine += [head for head in others[::2] if head not in mine]
        if places is not None:
            heads = [list(places.get(i, ())) for i in range(num_workers)]
        ranks = [Rank(FIRST_WORKER + i) for i in range(num_workers)]
        if keeps_kv:
            self.num_pieces = config_heads(self.config)
            for home in self.homes:
                home.log_fd = new_memory(self.log_shape().head_bytes)
                home.log = Log(home.log_fd, self.log_shape(), NoBlocks())
        self.workers = []
        self.workers = [ShardWorker(self, *seat) for seat in zip(ranks, heads, shards, strict=True)]
        for worker in self.workers:
            worker.start()
        self.publish()

    def expert_half(self, shards: Sequence[Identity]) -> ExpertHalf:
        half = ExpertHalf(self.config, self.checkpoint, OPS, num_slots=max(self.config.max_shards, 1))
        for layer, number in shards:
            half.load(layer, number, slot=number)
        return half

    def decoder(self, has_heads: bool = False) -> Decoder:
        weights = Weights(self.config, self.checkpoint, "auto", OPS.device)
        return Decoder(self.config, weights, OPS, self.config.max_position_embeddings, has_heads=has_heads)

    def engine(
        self,
        index: int = 0,
        decoder: Decoder | None = None,
        log: Log | None = None,
        num_blocks: int = BLOCKS_PER_HOME,
        drafting: Drafting | None = None,
        **config: int,
    ) -> Engine:
        """Of one home; `log`: of a predecessor; `num_blocks`: of those that are its own."""
        home, decoder = self.homes[index], decoder or self.decoder()
        forward = EagerForward(
            lambda batch, experts: decoder.forward(batch, home.heads, experts), OPS.device, home.experts
        )
        journal = Journal(KeptKv(log or home.log, home.heads)) if self.keeps_kv else None
        blocks = block_range_of(home.rank, BLOCKS_PER_HOME)._replace(num_blocks=num_blocks)
        parking = NO_BLOCKS
        if self.shadow == "mirror":
            parking = parking_range_of(home.rank, BLOCKS_PER_HOME, len(self.homes))
        return make_engine(self.config, forward, blocks, journal, home.heads, parking, drafting, **config)

    def log_shape(self) -> LogShape:
        """Of a home's records."""
        config = self.config
        return LogShape(
            num_blocks=2 * len(self.homes) * BLOCKS_PER_HOME,
            block_size=BLOCK_SIZE,
            num_layers=config.num_layers,
            num_planes=2 * config.num_kv_heads,
            piece_bytes=config.head_size * self.item_bytes,
            num_records=3 * MAX_SEQS,
            max_blocks=-(-config.max_position_embeddings // BLOCK_SIZE),
        )

    def offer(self, worker: ShardWorker) -> None:
        """Every worker gets the memory of all others, as the orchestrator gives it to them."""
        for other in self.workers if self.keeps_kv else ():
            if other is worker or other.is_dead:
                continue
            for reader, owner in ((worker, other), (other, worker)):
                reader.sources.offer(owner.rank, Kind.KV_PIECES, os.dup(owner.memory.fd))
                if owner.memory.mirror_fd is not None:
                    reader.sources.offer(owner.rank, Kind.KV_MIRROR, os.dup(owner.memory.mirror_fd))
                if owner.memory.parity_fd is not None:
                    reader.sources.offer(owner.rank, Kind.KV_PARITY, os.dup(owner.memory.parity_fd))

    def engine_alone(self, decoder: Decoder) -> Engine:
        """All in one process: what all others must reproduce."""
        half = ExpertHalf(self.config, self.checkpoint, OPS, num_slots=[cut.num_shards for cut in self.config.cuts])
        half.load_all()
        pool = torch.empty(decoder.kv_shape(BLOCKS_PER_HOME, BLOCK_SIZE), dtype=decoder.kv_dtype)
        forward = EagerForward(
            lambda batch, experts: decoder.forward(batch, pool, experts), OPS.device, LocalExperts(half)
        )
        return make_engine(self.config, forward, BlockRange(0, BLOCKS_PER_HOME))

    def restart(self, index: int) -> None:
        """The process of a home ends, and another one comes."""
        before = self.homes[index]
        home = self.homes[index] = Home(self, before.rank)
        home.log_fd, home.log = before.log_fd, before.log
        before.peers.close()
        for worker in self.workers:
            if not worker.is_dead:
                worker.meet(home)
        self.publish()

    def publish(self) -> None:
        """Routes to all workers that live."""
        self.epoch += 1
        alive = [worker for worker in self.workers if not worker.is_dead]
        candidates = [
            [
                [
                    (worker.rank, slot)
                    for worker in alive
                    if (slot := worker.place((call.layer, number), call.kind)) is not None
                ]
                for number in range(call.num_shards)
            ]
            for call in self.calls
        ]
        routes = Routes.of(Epoch(self.epoch), candidates)
        for home in self.homes:
            home.peers.use(routes)

    def regroup(self) -> None:
        """The parity of heads where they are asked now, at workers that live."""
        alive = {worker.rank: worker for worker in self.workers if not worker.is_dead}
        places: dict[Identity, Rank] = {}
        for worker in alive.values():
            for layer, held in worker.half.held.items():
                for head in held:
                    if head >= 0:
                        places.setdefault((layer, head), worker.rank)
        found: dict[Rank, list[list[int]]] = {rank: [] for rank in alive}
        for group in parity_groups(places, {rank: rank for rank in alive}):
            found[group.keeper].append([owner_of(*head) for head in group.members])
        for rank, worker in alive.items():
            worker.sources.regroup([found[rank]] * len(self.homes))

    def turn(self) -> bool:
        return sum(worker.turn() for worker in self.workers) > 0

    def close(self) -> None:
        for worker in self.workers:
            if not worker.is_dead:
                worker.server.close()
                worker.half.kv.close()
                os.close(worker.cell_fd)
            os.close(worker.memory.fd)
        for home in self.homes:
            home.peers.close()
            os.close(home.cell_fd)
        gc.collect()  # mapped memory, with a descriptor of its own, in circles
