"""The limit of arithmetic in one step of an engine, so that no step takes long on a device.

A queued step cannot be cancelled. The next tokens of all other streams wait for it; and when a worker is killed, its
device memory can be freed only when its last step is over (procs/device_descriptors.py). A limit of tokens alone does
not bound that: a token at the end of a long prompt attends to everything before it.
"""

import math
from dataclasses import dataclass

from everserve.plan.weights import ModelSizes

_MAX_STEP_FLOP = 5e13  # 0.25 s at 200 TFLOP/s, which is slow for large matrix products on current devices


@dataclass(frozen=True)
class StepWork:
    """The cost of prompt tokens in floating-point operations. `most`: the limit of one step."""

    per_token: float
    per_key: float  # that a token attends to
    most: float

    @classmethod
    def of(cls, model: ModelSizes, num_sharing: int) -> "StepWork":
        """For one of `num_sharing` workers that compute on the same device at the same time."""
        heads, hidden = model.num_heads * model.head_size, model.hidden_size
        attention = hidden * (2 * heads + 2 * model.num_kv_heads * model.head_size)
        num_moe = len(model.moe_layers)
        dense = (model.num_layers - num_moe) * 3 * hidden * model.intermediate_size
        experts = num_moe * model.experts_per_token * 3 * hidden * model.expert_intermediate_size
        num_weights = model.num_layers * attention + dense + experts
        return cls(2.0 * num_weights, 4.0 * heads * model.num_layers, _MAX_STEP_FLOP / num_sharing)

    def cost(self, first: int, num_tokens: int) -> float:
        """The cost of `num_tokens` tokens from position `first` on."""
        return num_tokens * (self.per_token + self.per_key * (first + (num_tokens + 1) / 2))

    def affordable(self, first: int, left: float) -> int:
        """How many tokens from this position on cost at most `left`."""
        linear = self.per_token + self.per_key * (first + 0.5)
        return max(0, math.floor((math.sqrt(linear * linear + 2 * self.per_key * left) - linear) / self.per_key))
