"""Where the heads of an expert worker on a GPU lie in the memory of its seat, which outlives its workers.

    header | weights of each piece: q, k and v | KV: [block][piece][2][size][E] | words: [block][piece][size]

A *piece* is a place for one (layer, head), with its weights and what each block has of it. There are as many as the
worker with the most heads has: a layer has fewer or more of them on a worker, but all of its layers together as many as
anywhere else (plan/shards.py). The *word* of a token in a piece certifies its keys and values (memory/kv_pieces.py); on
GPUs homes write it (backends/cuda/log/head_writer.py).
"""

from dataclasses import dataclass

from everserve.plan.weights import ALIGNMENT, ITEM_BYTES, PAGE_BYTES, ModelSizes

HEADER_BYTES = 1 << 16
_WORD_BYTES = 8
Head = tuple[int, int]  # layer, number


def can_divide_heads(model: ModelSizes, device: str = "cuda") -> bool:
    """Whether heads can be computed apart, which norms over all of them forbid. A GPU's kernels know heads of one kind
    and of sizes that are powers of two, and an answer is a row of a lane at most."""
    if device != "cuda":
        return model.has_heads_of_their_own
    is_tile = model.head_size & (model.head_size - 1) == 0
    fits = model.num_heads * model.head_size <= model.num_kv_heads * model.hidden_size
    return model.has_plain_heads and is_tile and fits


@dataclass(frozen=True)
class HeadMemoryPlan:
    """Everything is bfloat16."""

    num_pieces: int
    width: int  # rows of the weights of a head
    hidden_size: int
    head_size: int
    num_blocks: int
    block_size: int

    @classmethod
    def of(cls, model: ModelSizes, num_pieces: int, num_blocks: int, block_size: int) -> "HeadMemoryPlan":
        width = (model.num_heads // model.num_kv_heads + 2) * model.head_size
        return cls(num_pieces, width, model.hidden_size, model.head_size, num_blocks, block_size)

    @property
    def weights_shape(self) -> tuple[int, int]:
        return (self.num_pieces * self.width, self.hidden_size)

    @property
    def weights_at(self) -> int:
        return HEADER_BYTES

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights, with the header: everything but KV."""
        return self.blocks_at

    @property
    def pool_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_blocks, self.num_pieces, 2, self.block_size, self.head_size)

    @property
    def blocks_at(self) -> int:
        return _up(self.weights_at + self.num_pieces * self.width * self.hidden_size * ITEM_BYTES, ALIGNMENT)

    @property
    def piece_bytes(self) -> int:
        """Keys and values that a block has of a piece."""
        return 2 * self.block_size * self.head_size * ITEM_BYTES

    @property
    def block_bytes(self) -> int:
        return self.num_pieces * self.piece_bytes

    @property
    def words_at(self) -> int:
        return _up(self.blocks_at + self.num_blocks * self.block_bytes, ALIGNMENT)

    @property
    def block_words_bytes(self) -> int:
        """The words of a block."""
        return self.num_pieces * self.block_size * _WORD_BYTES

    @property
    def num_bytes(self) -> int:
        return _up(self.words_at + self.num_blocks * self.block_words_bytes, PAGE_BYTES)


def kv_share(model: ModelSizes) -> float:
    """The part of a token's memory that is keys and values: the rest is its words."""
    kv_bytes = 2 * model.head_size * ITEM_BYTES
    return kv_bytes / (kv_bytes + _WORD_BYTES)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
