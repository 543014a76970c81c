"""The whole model on a GPU's kernels against transformers, however a sequence is cut into steps."""

import sys
from itertools import accumulate, pairwise
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from everserve.backends.cuda.lanes.local_experts import LocalCudaExperts
from everserve.backends.cuda.ops.experts import ExpertArena
from everserve.backends.cuda.ops.ops import CudaOps
from everserve.backends.cuda.staging import Staging
from everserve.engine.batching import Rows
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.decoder import Decoder
from everserve.model.layout import Source, Weights
from tests.models import KINDS as ALL_KINDS
from tests.models import model_directory, random_tokens, transformers_model

BLOCK_SIZE, NUM_BLOCKS, MAX_ROWS = 16, 12, 20
TOKENS = random_tokens(18, seed=1)
WHOLE, CHUNKED, DECODED = [18], [7, 11], [17, 1]
KINDS = ALL_KINDS if torch.cuda.is_available() else ["qwen3-moe"]  # the interpreter takes its time


class Copied(Weights):
    """In memory of their own: in a file they may begin anywhere."""

    def load_temporary(self, source: Source) -> Tensor:
        return super().load_temporary(source).clone()


class Model:
    """One model, both halves here, with a pool of KV blocks that are handed out one after the other."""

    def __init__(self, kind: str, device: torch.device, max_rows: int = MAX_ROWS) -> None:
        directory = model_directory(kind, "bfloat16")
        config = ModelConfig.from_directory(str(directory))
        weights = Copied(config, Checkpoint.open(str(directory)), "bfloat16", device)
        self.ops = CudaOps(device, max_num_seqs=3, max_model_len=BLOCK_SIZE * NUM_BLOCKS)
        self.decoder = Decoder(config, weights, self.ops, BLOCK_SIZE * NUM_BLOCKS)
        self.experts = LocalCudaExperts(
            self.ops, _arena(config, weights, device), config.call_layers, config.max_shards
        )
        shape = self.decoder.kv_shape(NUM_BLOCKS, BLOCK_SIZE)
        self.pool = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
        group = config.num_heads // config.num_kv_heads
        self.staging = Staging(max_rows, 3, NUM_BLOCKS, BLOCK_SIZE, group, is_mixed=True, device=device)
        self.lengths: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.num_taken = 0

    def step(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        """Append these tokens to these sequences; logits of all new rows, by sequence."""
        sizes = self.fill(chunks)
        hidden_TD = self.decoder.run(self.staging.batch, self.pool, self.experts)
        logits_TV = self.decoder.logits(hidden_TD, torch.arange(sum(sizes), device=hidden_TD.device))
        return dict(zip(chunks, logits_TV.cpu().split(sizes), strict=True))

    def fill(self, chunks: dict[int, list[int]], logits_rows: list[int] | None = None) -> list[int]:
        """Bring them to the device; how many rows each has."""
        positions = [self.lengths.get(seq, 0) + i for seq, tokens in chunks.items() for i in range(len(tokens))]
        sizes = [len(tokens) for tokens in chunks.values()]
        for seq, tokens in chunks.items():
            self._grow(seq, len(tokens))
        tables = np.zeros((len(chunks), NUM_BLOCKS), np.int32)
        for line, seq in zip(tables, chunks, strict=True):
            line[: len(self.blocks[seq])] = self.blocks[seq]
        rows_of = np.repeat(np.arange(len(chunks)), sizes)
        position_T = np.array(positions, np.int32)
        slots = tables[rows_of, position_T // BLOCK_SIZE] * BLOCK_SIZE + position_T % BLOCK_SIZE
        starts = np.array([0, *accumulate(sizes)], np.int32)
        tokens_T = np.array([token for tokens in chunks.values() for token in tokens], np.int32)
        self.staging.fill(Rows(tokens_T, position_T, slots.astype(np.int32), starts, tables, logits_rows or []))
        return sizes

    def alone(self, seq: int, sizes: list[int], tokens: list[int] = TOKENS) -> Tensor:
        bounds = pairwise(accumulate(sizes, initial=0))
        return torch.cat([self.step({seq: tokens[start:end]})[seq] for start, end in bounds])

    def _grow(self, seq: int, num_tokens: int) -> None:
        self.lengths[seq] = self.lengths.get(seq, 0) + num_tokens
        blocks = self.blocks.setdefault(seq, [])
        while len(blocks) * BLOCK_SIZE < self.lengths[seq]:
            blocks.append(NUM_BLOCKS - 1 - self.num_taken)
            self.num_taken += 1


def _arena(config: ModelConfig, weights: Weights, device: torch.device) -> ExpertArena:
    layers, experts = len(config.cuts), config.max_shards
    hidden, size = config.hidden_size, config.cuts[0].shard_size
    gate_up = torch.empty(layers * experts * 2 * size, hidden, dtype=torch.bfloat16, device=device)
    down = torch.empty(layers * experts * hidden, size, dtype=torch.bfloat16, device=device)
    arena = ExpertArena(gate_up, down, layers, experts)
    for index, cut in enumerate(config.cuts):
        for expert in range(cut.num_shards):
            sources = weights.layout.shard(cut.layer, expert)
            arena.fill(index, expert, weights.load(sources.gate), weights.load(sources.up), weights.load(sources.down))
    return arena


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_at_least_as_exact_as_transformers(kind: str, device: torch.device) -> None:
    """Against the same weights in float32: at most twice the error that transformers makes in bfloat16. However a
    sequence is cut, its rows have the same bits."""
    pytest.importorskip("transformers")
    directory = model_directory(kind, "bfloat16")
    with torch.no_grad():
        exact, theirs = (
            transformers_model(directory, dtype)(torch.tensor([TOKENS])).logits[0].float()
            for dtype in ("float32", "bfloat16")
        )
    model = Model(kind, device)
    whole, chunked, decoded = (model.alone(seq, sizes) for seq, sizes in enumerate((WHOLE, CHUNKED, DECODED)))
    assert (whole - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()
    assert (whole - exact).abs().max() <= 2 * (theirs - exact).abs().max()
    assert torch.equal(whole, chunked) and torch.equal(whole, decoded)


def test_a_sequence_does_not_notice_its_neighbours(device: torch.device) -> None:
    others = {1: random_tokens(5, seed=2), 2: random_tokens(1, seed=3)}
    alone = Model("mixtral", device, max_rows=5).alone(0, [5, 1], TOKENS[:6])
    model = Model("mixtral", device, max_rows=10)
    first = model.step({1: others[1][:4], 0: TOKENS[:5], 2: others[2]})[0]
    second = model.step({0: TOKENS[5:6], 1: others[1][4:]})[0]
    assert torch.equal(torch.cat([first, second]), alone)


def test_logits_of_more_rows_than_a_graph_has_room_for(device: torch.device) -> None:
    """A prompt's logprobs: as many as there are sequences are computed in the step, all of them can be asked for
    afterwards."""
    model = Model("qwen3-moe", device)
    model.fill({0: TOKENS}, logits_rows=[*range(18)])
    assert model.staging.batch.logits_rows_L.tolist() == [0, 1, 2]
    hidden_TD = model.decoder.run(model.staging.batch, model.pool, model.experts)
    few_LV = model.decoder.logits(hidden_TD, model.staging.batch.logits_rows_L)
    all_LV = model.decoder.logits(hidden_TD, torch.arange(18, dtype=torch.int32, device=device))
    assert len(all_LV) == 18 and torch.equal(few_LV, all_LV[:3])


class NothingComputed(TorchDispatchMode):
    """Torch may make tensors and look at them differently; whatever it would compute is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self.computed: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if self.is_on and not name.startswith(("empty", "new_empty")) and not func.is_view and not _in_a_kernel():
            self.computed.append(name)
        return func(*args, **(kwargs or {}))


def _in_a_kernel() -> bool:
    """Triton's interpreter uses torch to get at a kernel's arguments."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith("triton/runtime/interpreter.py"):
        frame = frame.f_back
    return frame is not None


def test_torch_computes_nothing_in_a_step_that_may_have_stopped(device: torch.device) -> None:
    """Its kernels do not look at the word that stops a step. They would write where the step needs what it had, to go
    on from where it stopped: tensors of a step share memory."""
    model = Model("qwen3-moe-mixed", device, max_rows=2)  # the interpreter computes rows that are not used, too
    model.step({0: TOKENS[:1]})  # what is made once and kept may be computed
    model.fill({0: TOKENS[1:2]})

    def experts(*args: Any) -> Tensor:
        mode.is_on = True
        return model.experts(*args)

    with NothingComputed() as mode:
        hidden_TD = model.decoder.run(model.staging.batch, model.pool, experts)
        assert mode.is_on
        model.ops.greedy(model.decoder.logits(hidden_TD, model.staging.batch.logits_rows_L))
    assert mode.computed == []
