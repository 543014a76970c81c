"""Where each expert slot lies in host memory: the weights of an expert worker on CPUs (`--weights memory`), and the
backup of all experts.

    [layer index][slot]:  gate | up | down | padding to a multiple of 64 bytes

All slots have the same size, for the widest dtype that an expert may have. Experts whose file is narrower leave the end
of their slot unused.
"""

from dataclasses import dataclass

from everserve.plan.weights import ModelSizes
from everserve.tables.slots import Place

ALIGNMENT = 64
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ExpertMemoryPlan:
    """The slots of one memory."""

    num_layers: int  # with experts
    num_slots: int  # per layer
    slot_bytes: int

    @classmethod
    def of(cls, model: ModelSizes, dtype: str, num_slots: int) -> "ExpertMemoryPlan":
        """`dtype`: the widest that weights are kept in."""
        num_weights = 3 * model.hidden_size * model.expert_intermediate_size
        slot_bytes = -(-num_weights * _ITEM_BYTES[dtype] // ALIGNMENT) * ALIGNMENT
        return cls(len(model.moe_layers), num_slots, slot_bytes)

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.num_slots * self.slot_bytes

    def offset(self, place: Place) -> int:
        assert 0 <= place.layer_index < self.num_layers and 0 <= place.slot < self.num_slots, place
        return (place.layer_index * self.num_slots + place.slot) * self.slot_bytes
