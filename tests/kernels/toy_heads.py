"""Homes and workers in one process, one kernel after the other: heads, their KV and FFN shards are apart.

    world = HeadWorld(config, weights, device, num_workers=3, num_homes=2, seed=1)    every shard somewhere, at random
    world.homes[0].step({0: tokens})                                                  logits of all new rows

Kernels, pages and lanes are the real ones. What is played is the other processes: all workers serve what they find
wherever a home would wait.
"""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from everserve.backends.cuda.lanes import send
from everserve.backends.cuda.lanes.batches import serve_experts, serve_heads
from everserve.backends.cuda.lanes.calls import Calls
from everserve.backends.cuda.lanes.lane import NUM_BOXES, CudaLaneShape
from everserve.backends.cuda.lanes.page import PageShape
from everserve.backends.cuda.lanes.remote_heads import CudaHeads
from everserve.backends.cuda.lanes.send import SendState
from everserve.backends.cuda.lanes.serve import ServeState
from everserve.backends.cuda.ops.experts import ExpertArena
from everserve.backends.cuda.ops.heads import HeadArena, HeadShape
from everserve.backends.cuda.ops.ops import CudaOps
from everserve.backends.cuda.staging import Staging
from everserve.engine.batching import Rows
from everserve.model.config import ModelConfig
from everserve.model.decoder import Decoder
from everserve.model.rope import rope_tables
from everserve.model.spec import QkNorm
from everserve.model.weights import Weights
from everserve.tables.calls import ShardKind
from tests.kernels.toy_lanes import SpreadLaneShape

BLOCK_SIZE, BLOCKS_PER_HOME, MAX_ROWS, MAX_SEQS = 16, 12, 6, 2
MAX_LEN = BLOCK_SIZE * BLOCKS_PER_HOME
PAGE = PageShape(MAX_ROWS, MAX_SEQS, BLOCKS_PER_HOME, 1)


@dataclass
class Tables:
    """What `Calls` needs of an attention worker's peers."""

    state: SendState
    place_of_LN: Tensor
    expert_at_LP: Tensor
    expert_ranks: range


class Worker:
    """One expert worker: its slots, by call, and all that is in them."""

    def __init__(self, world: "HeadWorld", rank: int, held: list[list[int]]) -> None:
        config, device, num_calls = world.config, world.device, len(world.config.calls)
        self.held = [[*one, *[-1] * (world.num_slots - len(one))] for one in held]
        stop = torch.zeros(1, dtype=torch.int32, device=device)
        spread = SpreadLaneShape(*world.lane, spread=world.num_workers)
        is_head_L = torch.tensor([call.kind is ShardKind.HEAD for call in config.calls], dtype=torch.int32)
        self.state = ServeState.empty(
            spread, world.memory.data_ptr() + rank * world.shape.lane_bytes(), world.num_homes, num_calls,
            world.num_homes * world.shape.max_rows, stop, num_experts=config.max_shards,
            is_head_L=is_head_L.to(device),
        )  # fmt: skip
        self.state.healthy_A.fill_(1)
        self.state.held_LS.copy_(torch.tensor(self.held))
        self.state.limits.copy_(torch.tensor([4, 0, 0]))
        self.arena, self.heads = self._load_ffn(world), self._load_heads(world)
        self.h_RF = torch.zeros(self.state.max_rows, self.arena.expert_size, dtype=torch.bfloat16, device=device)

    def _load_ffn(self, world: "HeadWorld") -> ExpertArena:
        config, weights, num_slots = world.config, world.weights, world.num_slots
        shape = (len(config.calls) * num_slots, 3, config.cuts[0].shard_size, config.hidden_size)
        experts = torch.empty(shape, dtype=torch.bfloat16, device=world.device)
        arena = ExpertArena.of_experts(experts, len(config.calls), num_slots)
        for index, call in enumerate(config.calls):
            for slot, shard in enumerate(self.held[index]):
                if shard >= 0 and call.kind is not ShardKind.HEAD:
                    arena.fill(index, slot, *weights.shard(weights.layout.shard(call.layer, shard)))
        return arena

    def _load_heads(self, world: "HeadWorld") -> HeadArena:
        config, weights, shape = world.config, world.weights, world.head_shape
        held = [
            (index, slot, call.layer, head)
            for index, call in enumerate(config.calls)
            if call.kind is ShardKind.HEAD
            for slot, head in enumerate(self.held[index])
            if head >= 0
        ]
        num_pieces = max(len(held), 1)
        size = (num_pieces * shape.width, config.hidden_size)
        qkv = torch.zeros(size, dtype=torch.bfloat16, device=world.device)
        pool = (shape.num_blocks, num_pieces, 2, BLOCK_SIZE, config.head_size)
        arena = HeadArena(
            shape, qkv, torch.full(pool, float("nan"), dtype=torch.bfloat16, device=world.device),
            rope_tables(config.layers[0].mixer.rope, config.head_size, MAX_LEN, world.device), world.norms,
            len(config.calls), world.num_slots, self.state.max_rows, PAGE,
        )  # fmt: skip
        for piece, (index, slot, layer, head) in enumerate(held):
            parts = [weights.load_temporary(part) for part in weights.layout.head(layer, head).qkv]
            qkv[piece * shape.width : (piece + 1) * shape.width].copy_(torch.cat(parts))
            arena.piece_LS[index, slot] = piece
        return arena

    def serve(self) -> None:
        """One batch of heads and one of the FFN, if there are such."""
        serve_heads(self.state, self.heads)
        serve_experts(self.state, self.arena, self.h_RF)


class ToyExperts:
    """`Experts` over the same lanes."""

    num_replayed_rows = 0

    def __init__(self, calls: Calls, call_of: dict[int, int], to_all: Collection[int]) -> None:
        self._calls, self._call_of, self._to_all = calls, call_of, to_all

    def __call__(self, layer, ids_TK, weights_TK, hidden_TD, residual_TD):
        call = self._call_of[layer]
        y_row_TK = self._calls(call, ids_TK, hidden_TD, to_all=layer in self._to_all)
        return send.collect(self._calls.state, y_row_TK, weights_TK, residual_TD, call)


class Home:
    """Sequences with blocks of this home's range."""

    def __init__(self, world: "HeadWorld", rank: int) -> None:
        config, device = world.config, world.device
        self._world, self._rank = world, rank
        self.ops = CudaOps(device, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN)
        region = world.memory.data_ptr() + rank * world.num_workers * world.shape.lane_bytes()
        self.state = SendState.empty(world.shape, region, world.num_workers, self.ops.words.stop)
        self.state.present_E.fill_(1)
        self.state.lead.fill_(0)
        place_of_LN, expert_at_LP = send.places(world.rank_LN, world.slot_LN, world.num_workers, world.num_slots)
        tables = Tables(self.state, place_of_LN.to(device), expert_at_LP.to(device), range(world.num_workers))
        calls = Calls(tables, self._cut, lambda flags: None)
        ffn, heads = config.numbers_of(ShardKind.SLICE, ShardKind.EXPERT), config.numbers_of(ShardKind.HEAD)
        self.experts = ToyExperts(calls, ffn, config.numbers_of(ShardKind.SLICE))
        self.heads = CudaHeads(calls, self.ops, heads, config.num_kv_heads, world.head_shape.answer_size, PAGE)
        self.decoder = Decoder(config, world.weights, self.ops, MAX_LEN, has_heads=False)
        group = config.num_heads // config.num_kv_heads
        self.staging = Staging(
            MAX_ROWS, MAX_SEQS, BLOCKS_PER_HOME, BLOCK_SIZE, group, True, device, launches_ahead=False
        )
        self.at_cut: Callable[[Callable[[], None]], None] = lambda aside: None  # before workers serve
        self._lengths: dict[int, int] = {}
        self._blocks: dict[int, list[int]] = {}
        self._free = [*range(rank * BLOCKS_PER_HOME, (rank + 1) * BLOCKS_PER_HOME)]

    def _cut(self, aside: Callable[[], None]) -> None:
        self.at_cut(aside)
        for worker in self._world.workers:
            worker.serve()

    def step(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        """Append these tokens to these sequences; logits of all new rows, by sequence."""
        sizes = [len(tokens) for tokens in chunks.values()]
        positions = [self._lengths.get(seq, 0) + i for seq, tokens in chunks.items() for i in range(len(tokens))]
        for seq, tokens in chunks.items():
            self._lengths[seq] = self._lengths.get(seq, 0) + len(tokens)
            blocks = self._blocks.setdefault(seq, [])
            while len(blocks) * BLOCK_SIZE < self._lengths[seq]:
                blocks.append(self._free.pop())
        tables = np.zeros((len(chunks), BLOCKS_PER_HOME), np.int32)
        for line, seq in zip(tables, chunks, strict=True):
            line[: len(self._blocks[seq])] = self._blocks[seq]
        position_T = np.array(positions, np.int32)
        rows_of = np.repeat(np.arange(len(chunks)), sizes)
        slots = tables[rows_of, position_T // BLOCK_SIZE] * BLOCK_SIZE + position_T % BLOCK_SIZE
        tokens_T = np.array([token for tokens in chunks.values() for token in tokens], np.int32)
        starts = np.array([0, *accumulate(sizes)], np.int32)
        self.staging.fill(Rows(tokens_T, position_T, slots.astype(np.int32), starts, tables, []))
        hidden_TD = self.decoder.run(self.staging.batch, self.heads, self.experts)
        assert self.ops.words.stop.item() == 0
        logits_TV = self.decoder.logits(hidden_TD, torch.arange(sum(sizes), device=hidden_TD.device))
        return dict(zip(chunks, logits_TV.cpu().split(sizes), strict=True))


class HeadWorld:
    """`num_workers` expert workers, among whom all shards are dealt at random."""

    def __init__(
        self, config: ModelConfig, weights: Weights, device: torch.device, *, num_workers: int, num_homes: int = 1,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.config = replace(config, tensor_parallel=True, divides_heads=True)
        self.weights, self.device = weights, device
        self.num_workers, self.num_homes = num_workers, num_homes
        held = self._deal(random.Random(seed))
        self.num_slots = max(len(one) for worker in held for one in worker)
        top_k = max(self.config.max_shards_per_token, config.num_kv_heads)
        self.lane = (MAX_ROWS, top_k, config.hidden_size, self.num_slots, PAGE.num_words)
        self.shape = CudaLaneShape(*self.lane)
        size = num_homes * num_workers * self.shape.lane_bytes()
        self.memory = torch.full((size,), 0x7F, dtype=torch.int8, device=device)
        self.memory.view(-1, self.shape.lane_bytes())[:, : self.shape.counts_at(NUM_BOXES)] = 0
        group = config.num_heads // config.num_kv_heads
        self.head_shape = HeadShape(
            config.num_kv_heads, group, config.head_size, config.hidden_size, config.layers[0].norm.eps, BLOCK_SIZE,
            BLOCKS_PER_HOME, num_homes,
        )  # fmt: skip
        self.norms = self._load_norms()
        self.workers = [Worker(self, rank, one) for rank, one in enumerate(held)]
        self.homes = [Home(self, rank) for rank in range(num_homes)]

    def _deal(self, chance: random.Random) -> list[list[list[int]]]:
        """[worker][call] -> shards, in the order of slots; and the tables of that."""
        calls = self.config.calls
        held: list[list[list[int]]] = [[[] for _ in calls] for _ in range(self.num_workers)]
        self.rank_LN = torch.full((len(calls), self.config.max_shards), -1)
        self.slot_LN = torch.zeros_like(self.rank_LN)
        for index, call in enumerate(calls):
            for shard in chance.sample(range(call.num_shards), call.num_shards):
                rank = chance.randrange(self.num_workers)
                self.rank_LN[index, shard], self.slot_LN[index, shard] = rank, len(held[rank][index])
                held[rank][index].append(shard)
        return held

    def _load_norms(self) -> Tensor | None:
        if self.config.layers[0].mixer.qk_norm is QkNorm.NONE:
            return None
        norms = torch.zeros(len(self.config.calls), 2, self.config.head_size, dtype=torch.bfloat16, device=self.device)
        for layer, call in self.config.numbers_of(ShardKind.HEAD).items():
            for i, name in enumerate(("q_norm", "k_norm")):
                norms[call, i] = self.weights.home(layer).need(name)
        return norms
