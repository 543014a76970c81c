"""StepBatch: the rows that one step computes, and where their KV lives.

Rows of one sequence stand together, in order of position. A decoding sequence has one row, a prefilling
one as many as its chunk:

    sequence      |  A (decode) |     B (prefill chunk)     | C (decode) |
    row             0             1      2      3      4      5
    token           t_A           b_7    b_8    b_9    b_10   t_C
    position        41            7      8      9      10     12
    query_starts    0             1                           5            6

The KV pool is one tensor [num_blocks, num_layers, 2, G, block_size, E]: a block holds all layers of its tokens in one
contiguous piece, so that a block is copied, logged or restored in one go. Row t's KV goes to block
kv_slots[t] // block_size, offset kv_slots[t] % block_size. Latent attention has [num_blocks, num_layers, 1, 1,
block_size, E]: a row is key and value of all heads. All index tensors are contiguous int32.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """Inputs of one forward pass."""

    tokens_T: Tensor  # int32
    positions_T: Tensor  # int32
    kv_slots_T: Tensor  # int32
    query_starts_S: Tensor  # int32, num_seqs + 1 entries
    block_tables_SB: Tensor  # int32, padded with 0 beyond a sequence's blocks
    logits_rows_L: Tensor  # int64: the rows whose logits are wanted, ascending

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.block_tables_SB.shape[0]
