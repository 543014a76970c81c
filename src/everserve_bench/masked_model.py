"""A model in this process, some of whose experts are masked: the likelihood of texts, and which experts they use."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everserve.backends.cpu.local_experts import LocalExperts
from everserve.backends.cpu.ops import NativeOps
from everserve.model.batch import StepBatch
from everserve.model.checkpoint import Checkpoint
from everserve.model.config import ModelConfig
from everserve.model.decoder import Decoder
from everserve.model.expert_half import ExpertHalf
from everserve.model.weights import Weights

_BLOCK_SIZE = 16


class _CountingExperts:
    """`Experts` that count the rows of each."""

    num_replayed_rows = 0

    def __init__(self, expert_half: ExpertHalf) -> None:
        self._experts = LocalExperts(expert_half)
        config = expert_half.config
        self.rows_LN = np.zeros((len(config.moe_layers), config.num_experts), np.int64)
        self._index = {layer: i for i, layer in enumerate(config.moe_layers)}

    def __call__(
        self, layer: int, ids_TK: Tensor, weights_TK: Tensor, hidden_TD: Tensor, residual_TD: Tensor
    ) -> Tensor:
        chosen = ids_TK[ids_TK >= 0].numpy()
        self.rows_LN[self._index[layer]] += np.bincount(chosen, minlength=self.rows_LN.shape[1])
        return self._experts(layer, ids_TK, weights_TK, hidden_TD, residual_TD)

    def begin_step(self, num_rows: int) -> None: ...

    def end_step(self) -> None: ...

    def rest(self) -> None: ...


class MaskedModel:
    """`max_len`: of the texts, in tokens."""

    def __init__(self, directory: Path, max_len: int, num_threads: int) -> None:
        torch.set_grad_enabled(False)
        ops, self.config = NativeOps(num_threads), ModelConfig.from_directory(directory)
        checkpoint = Checkpoint.open(directory)
        self._decoder = Decoder(self.config, Weights(self.config, checkpoint, "auto", ops.device), ops, max_len)
        experts = ExpertHalf(self.config, checkpoint, ops, num_slots=self.config.num_experts)
        experts.load_all()
        self._experts = _CountingExperts(experts)
        self._num_blocks = -(-max_len // _BLOCK_SIZE)
        shape = self._decoder.kv_shape(self._num_blocks, _BLOCK_SIZE)
        self._kv_pool = torch.empty(shape, dtype=self._decoder.kv_dtype)

    @property
    def rows_by_expert(self) -> NDArray[np.int64]:
        """How often each expert was chosen so far, [call][expert]."""
        return self._experts.rows_LN.copy()

    def use_mask(self, masked_LN: NDArray[np.uint8]) -> None:
        """1: masked."""
        self._decoder.masks.use(masked_LN.tobytes())

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """The log probability of each token but the first, given those before it; and whether it is the most likely
        one: [2, num - 1].
        """
        num = len(tokens) - 1
        positions_T = torch.arange(num, dtype=torch.int32)
        batch = StepBatch(
            tokens_T=torch.tensor(tokens[:-1], dtype=torch.int32),
            positions_T=positions_T,
            kv_slots_T=positions_T,
            query_starts_S=torch.tensor([0, num], dtype=torch.int32),
            block_tables_SB=torch.arange(self._num_blocks, dtype=torch.int32)[None],
            logits_rows_L=torch.arange(num),
        )
        scores_TV = self._decoder.forward(batch, self._kv_pool, self._experts).log_softmax(-1)
        target_T = torch.tensor(tokens[1:])
        return torch.stack([scores_TV.gather(1, target_T[:, None])[:, 0], (scores_TV.argmax(-1) == target_T).float()])
