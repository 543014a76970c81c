"""PagedSequences: drives a decoder over sequences, with a KV pool whose blocks are dealt out in random order."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from everserve.backends.cpu.local_experts import LocalExperts
from everserve.model.batch import StepBatch
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.decoder import Decoder
from everserve.model.expert_half import ExpertHalf
from everserve.model.ops import Ops
from everserve.model.weights import Weights


class PagedSequences:
    """A model directory, both halves in this process, and the sequences that it is computing."""

    def __init__(
        self,
        directory: object,
        ops: Ops,
        *,
        dtype: str = "auto",
        block_size: int = 16,
        num_blocks: int = 64,
        seed: int = 0,
        tensor_parallel: bool = False,
        config: ModelConfig | None = None,
    ) -> None:
        """`config`: another one than the directory's."""
        config = replace(config or ModelConfig.from_directory(str(directory)), tensor_parallel=tensor_parallel)
        checkpoint = Checkpoint.open(str(directory))
        weights = Weights(config, checkpoint, dtype, ops.device, ops.reads_quantised)
        self.decoder = Decoder(config, weights, ops, max_model_len=config.max_position_embeddings)
        experts = ExpertHalf(config, checkpoint, ops, num_slots=config.max_shards, dtype=dtype)
        experts.load_all()
        self.expert_io = LocalExperts(experts)
        self.block_size = block_size
        # Garbage, not zeros: whatever reads beyond its own keys is found out.
        shape = self.decoder.kv_shape(num_blocks, block_size)
        self.kv_pool = torch.full(shape, float("nan"), dtype=self.decoder.kv_dtype, device=ops.device)
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._blocks: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Append these tokens to these sequences, in one batch; logits of every new row, by sequence."""
        batch = self._batch(chunks)
        logits_TV = self.decoder.forward(batch, self.kv_pool, self.expert_io)
        parts = logits_TV.split([len(tokens) for tokens in chunks.values()])
        return dict(zip(chunks, parts, strict=True))

    def _batch(self, chunks: Mapping[int, Sequence[int]]) -> StepBatch:
        tokens: list[int] = []
        positions: list[int] = []
        kv_slots: list[int] = []
        starts = [0]
        for seq, chunk in chunks.items():
            blocks = self._blocks.setdefault(seq, [])
            for token in chunk:
                position = self._lengths.get(seq, 0)
                if position % self.block_size == 0:
                    blocks.append(self._free.pop())
                tokens.append(token)
                positions.append(position)
                kv_slots.append(blocks[-1] * self.block_size + position % self.block_size)
                self._lengths[seq] = position + 1
            starts.append(len(tokens))
        width = max(len(self._blocks[seq]) for seq in chunks)
        tables = [self._blocks[seq] + [0] * (width - len(self._blocks[seq])) for seq in chunks]
        device = self.kv_pool.device

        def integers(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return StepBatch(
            tokens_T=integers(tokens),
            positions_T=integers(positions),
            kv_slots_T=integers(kv_slots),
            query_starts_S=integers(starts),
            block_tables_SB=integers(tables),
            logits_rows_L=torch.arange(len(tokens), device=device),
        )
