"""A model whose next token is a hash of every token before it, read back through the block tables.

It computes nothing, but it notices everything: a wrong block, slot, position or reused block changes the stream.
"""

import zlib

import numpy as np
import torch

from everserve.engine.engine import Engine, EngineConfig
from everserve.model.batch import StepBatch
from everserve.model.ops.reference import ReferenceOps
from everserve.tables.requests import RequestSpec, SamplingParams

VOCAB = 97


class ToyModel:
    """The KV of a token is the token itself."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = np.full(num_blocks * block_size, -1, np.int64)
        self.fail_next = False

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        self.pool[batch.kv_slots_T.numpy()] = batch.tokens_T.numpy()
        if self.fail_next:
            self.fail_next = False
            raise StepAbandoned
        wanted = set(batch.logits_rows_L.tolist())
        starts, rows = batch.query_starts_S.tolist(), []
        for i in range(batch.num_seqs):
            table = batch.block_tables_SB[i].numpy()
            for row in range(starts[i], starts[i + 1]):
                if row in wanted:
                    positions = np.arange(int(batch.positions_T[row]) + 1)
                    slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
                    rows.append(logits_after(self.pool[slots].tolist()))
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)


class StepAbandoned(Exception):
    """The injected fault."""


def logits_after(context: list[int]) -> torch.Tensor:
    """Logits that depend on every token of the context and on their order."""
    seed = zlib.crc32(np.asarray(context, np.int64).tobytes())
    return torch.from_numpy(np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32))


def make_engine(num_blocks: int = 24, block_size: int = 4, **overrides: object) -> tuple[Engine, ToyModel]:
    settings: dict = {
        "max_model_len": 64,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 16,
        "max_prefill_while_decoding": 16,
        "vocab_size": VOCAB,
        **overrides,
    }
    model = ToyModel(num_blocks, block_size)
    config = EngineConfig(num_blocks=num_blocks, block_size=block_size, **settings)
    return Engine(config, ReferenceOps(), model), model


def spec(id: str, prompt: list[int], max_tokens: int = 8, **params: object) -> RequestSpec:
    return RequestSpec(id=id, prompt=prompt, params=SamplingParams(max_tokens=max_tokens, **params))  # type: ignore[arg-type]


def run_alone(request: RequestSpec) -> list[int]:
    """The stream when nothing else is there and everything fits."""
    engine, _ = make_engine(num_blocks=64, max_num_batched_tokens=64)
    engine.add(request)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [output.token for output in engine.step().outputs if output.token is not None]
    engine.check()
    return tokens
