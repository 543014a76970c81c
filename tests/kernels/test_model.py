"""The whole model on a GPU's kernels against transformers, however a sequence is cut into steps."""

import sys
from itertools import accumulate, pairwise
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from everserve.backends.cuda.lanes.local_experts import LocalCudaExperts
from everserve.backends.cuda.ops.experts import ExpertArena
from everserve.backends.cuda.ops.ops import CudaOps
from everserve.backends.cuda.report import StepReport
from everserve.backends.cuda.seat_experts import make_arena
from everserve.backends.cuda.staging import Staging
from everserve.backends.cuda.take_in import take_in
from everserve.engine.batching import Rows
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.decoder import Decoder
from everserve.model.layout import Source
from everserve.model.weights import Weights
from tests.support.models import KINDS as ALL_KINDS
from tests.support.models import model_directory, random_tokens, transformers_model

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

    def __init__(
        self,
        kind: str | Path,
        device: torch.device,
        max_rows: int = MAX_ROWS,
        launches_ahead: bool = False,
    ) -> None:
        """`kind`: one of models.py's, or a directory."""
        directory = kind if isinstance(kind, Path) else model_directory(kind, "bfloat16")
        config = ModelConfig.from_directory(str(directory))
        weights = Copied(config, Checkpoint.open(str(directory)), "bfloat16", device)
        self.ops = CudaOps(device, max_num_seqs=3, max_model_len=BLOCK_SIZE * NUM_BLOCKS, launches_ahead=launches_ahead)
        self.decoder = Decoder(config, weights, self.ops, BLOCK_SIZE * NUM_BLOCKS)
        self.experts = LocalCudaExperts(
            self.ops, full_arena(config, weights, device), config.call_layers, config.max_shards
        )
        shape = self.decoder.kv_shape(NUM_BLOCKS, BLOCK_SIZE)
        self.pool = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
        group = config.num_heads // config.num_kv_heads
        self.staging = Staging(max_rows, 3, NUM_BLOCKS, BLOCK_SIZE, group, is_mixed=True, device=device)
        self.report = StepReport(3, device)
        self.chosen_L = self.report.chosen_L
        self.lengths: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.num_taken = 0

    def step(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        """Append these tokens to these sequences; logits of all new rows, by sequence."""
        sizes = self.fill(chunks)
        hidden_TD = self.decoder.run(self.staging.batch, self.pool, self.experts)
        logits_TV = self.decoder.logits(hidden_TD, torch.arange(sum(sizes), device=hidden_TD.device))
        return dict(zip(chunks, logits_TV.cpu().split(sizes), strict=True))

    def run(self) -> list[int]:
        """A step as it is captured, over what was filled in; the tokens that it chooses."""
        take_in(self.staging, self.chosen_L, self.ops.words.stop)
        hidden_TD = self.decoder.run(self.staging.batch, self.pool, self.experts)
        logits_LV = self.decoder.logits(hidden_TD, self.staging.batch.logits_rows_L)
        self.report.launch(self.ops.words, self.ops.choose_in_step(logits_LV, self.staging.draws_L5))
        self.report.num_due += 1
        return self.report.tokens(self.report.num_due, 3)

    def fill(
        self, chunks: dict[int, list[int]], logits_rows: list[int] | None = None, sources: list[int] | None = None
    ) -> list[int]:
        """Bring them to the device; how many rows each has. `sources`: their tokens are what these rows have chosen."""
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
        sources_T = np.array(sources, np.int32) if sources is not None else None
        rows = Rows(tokens_T, position_T, slots.astype(np.int32), starts, tables, logits_rows or [], sources_T)
        self.staging.fill(rows)
        take_in(self.staging, self.chosen_L, self.ops.words.stop)
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


def full_arena(config: ModelConfig, weights: Weights, device: torch.device) -> ExpertArena:
    """Every shard in the slot of its number."""
    num = len(config.cuts) * config.max_shards
    memory = torch.empty(num, config.cuts[0].num_weights(config.hidden_size), dtype=torch.bfloat16, device=device)
    arena = make_arena(config, memory, config.max_shards)
    for index, cut in enumerate(config.cuts):
        for shard in range(cut.num_shards):
            arena.fill(index, shard, *weights.shard(weights.layout.shard(cut.layer, shard)))
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


def test_what_stands_for_a_prompt_does_not_depend_on_others(device: torch.device) -> None:
    """The final norm of its last row, in host memory, to the bit the same in any batch."""
    alone = Model("qwen3-moe", device)
    alone.fill({0: TOKENS[:7]})
    hidden_TD = alone.decoder.run(alone.staging.batch, alone.pool, alone.experts)
    (vector_D,) = alone.decoder.pooled(hidden_TD, [6])
    assert vector_D.dtype is torch.float32 and vector_D.device.type == "cpu" and vector_D.isfinite().all()
    beside = Model("qwen3-moe", device)
    beside.fill({1: TOKENS[7:12], 0: TOKENS[:7], 2: TOKENS[:2]})
    hidden_TD = beside.decoder.run(beside.staging.batch, beside.pool, beside.experts)
    assert torch.equal(beside.decoder.pooled(hidden_TD, [4, 11])[1], vector_D)


class NothingComputed(TorchDispatchMode):
    """Torch may make tensors and look at them differently; whatever it would compute is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not name.startswith(("empty", "new_empty")) and not func.is_view and not _in_a_kernel():
            self.computed.append(name)
        return func(*args, **(kwargs or {}))


def _in_a_kernel() -> bool:
    """Triton's interpreter uses torch to get at a kernel's arguments."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith("triton/runtime/interpreter.py"):
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("kind", ["qwen3-moe-mixed", pytest.param("qwen3", marks=pytest.mark.long)])
def test_torch_computes_nothing_in_a_step_that_may_have_stopped(kind: str, device: torch.device) -> None:
    """Its kernels do not look at the word that stops a step. They would write where the step needs what it had, to go
    on from where it stopped: tensors of a step share memory, with each other and with those of a step behind it."""
    model = Model(kind, device, max_rows=2, launches_ahead=True)  # the interpreter computes rows that are not used, too
    model.fill({0: TOKENS[:1]})  # what is made once and kept may be computed
    model.run()
    with NothingComputed() as mode:
        model.run()
    assert mode.computed == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3-moe-mixed", "qwen3"])
def test_steps_that_are_launched_ahead_have_the_same_bits(kind: str, device: torch.device) -> None:
    """With kernels instead of torch, and with tokens that only the device knows. If the step before has stopped,
    nothing changes, neither KV nor what was chosen."""
    model, ahead = (Model(kind, device, max_rows=3, launches_ahead=is_ahead) for is_ahead in (False, True))
    prompts = {0: TOKENS[:1], 1: TOKENS[1:2]}
    model.fill(prompts, [0, 1])
    ahead.fill(prompts, [0, 1])
    first = model.run()[:2]
    assert ahead.run()[:2] == first
    model.fill({1: first[1:], 0: first[:1]}, [0, 1])
    ahead.fill({1: [0], 0: [0]}, [0, 1], sources=[1, 0])
    ahead.ops.words.stop.fill_(1)
    before = [tensor.clone() for tensor in (ahead.pool, ahead.staging.words, ahead.chosen_L)]
    ahead.run()
    after = (ahead.pool, ahead.staging.words, ahead.chosen_L)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, after, strict=True))
    ahead.ops.words.stop.zero_()
    assert ahead.run()[:2] == model.run()[:2]
    assert torch.equal(ahead.pool.view(torch.int16), model.pool.view(torch.int16))
