"""How large steps are: as large as is of use, and so small that none takes long on a device.

A queued step cannot be cancelled. The next tokens of all other streams wait for it; and when a worker is killed, its
device memory can be freed only when its last step is over (procs/device_descriptors.py). A limit of tokens alone does
not bound that: a token at the end of a long prompt attends to everything before it.
"""

import math
from dataclasses import dataclass

from everserve.plan.weights import ModelSizes

_ROWS_OF_EXPERT = 512  # on average: tiles of 128 rows are then nearly full, and arithmetic takes longer than weights
_FEWEST_TOKENS, _MOST_TOKENS = 2048, 8192  # of a step on a GPU, by default
_MAX_STEP_FLOP = 5e13  # 0.25 s at 200 TFLOP/s, which is slow for large matrix products on current devices


def step_tokens(model: ModelSizes) -> int:
    """The most tokens of a step on a GPU, for a process that has all experts: so many that reading weights is not what
    takes the time. Where rows travel between processes lanes need memory for all of them, and steps have fewer."""
    if not model.moe_layers:
        return _FEWEST_TOKENS
    wanted = _ROWS_OF_EXPERT * model.num_experts // model.experts_per_token
    return min(_MOST_TOKENS, max(_FEWEST_TOKENS, 1 << (wanted - 1).bit_length()))


@dataclass(frozen=True)
class StepWork:
    """The cost of prompt tokens in floating-point operations. `most`: the limit of one step."""

    per_token: float
    per_key: float  # that a token attends to
    most: float

    @classmethod
    def of(cls, model: ModelSizes, num_sharing: int) -> "StepWork":
        """The work of a step for one of `num_sharing` workers that compute on the same device at the same time."""
        return cls(2.0 * model.weights_per_token, 4.0 * model.values_per_key, _MAX_STEP_FLOP / num_sharing)

    def cost(self, first: int, num_tokens: int) -> float:
        """The cost of `num_tokens` tokens from position `first` on."""
        return num_tokens * (self.per_token + self.per_key * (first + (num_tokens + 1) / 2))

    def affordable(self, first: int, left: float) -> int:
        """How many tokens from this position on cost at most `left`."""
        linear = self.per_token + self.per_key * (first + 0.5)
        return max(0, math.floor((math.sqrt(linear * linear + 2 * self.per_key * left) - linear) / self.per_key))
