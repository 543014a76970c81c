"""What an engine is allowed by its model, its KV cache and its device, besides what it is told (config/engine.py)."""

from dataclasses import dataclass

from everserve.plan.prefill import KEYS_ONLY, TokenCost
from everserve.plan.steps import StepWork
from everserve.tables.block_ranges import NO_BLOCKS, BlockRange


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """The limits of one engine."""

    max_model_len: int
    num_blocks: int
    vocab_size: int
    first_block: int = 0  # the number of its first block, where others have other blocks of the same memory
    visible_keys: int | None = None  # that a row sees at most, its own included; those in front of them are given back
    parking: BlockRange = NO_BLOCKS  # blocks that only mirrors have, for KV of streams that wait
    max_restored_while_serving: int = 2048  # tokens brought back from logs in one step, if others wait for that step
    max_logits_bytes: int = 128 << 20  # in one step
    token_cost: TokenCost = KEYS_ONLY  # by which homes divide prompts among each other
    work: StepWork | None = None  # bounds what prompts may cost in one step; None: only their tokens are counted

    @property
    def max_logits_rows(self) -> int:
        return max(1, self.max_logits_bytes // (4 * self.vocab_size))
