"""Where each expert slot lies in host memory: the weights of an expert worker on CPUs (`--weights memory`), and the
backup of all experts.

    [call][slot]:  gate | up | down | biases | padding to a multiple of 64 bytes

All slots of a layer have the same size, for the widest dtype that an expert may have, or for its largest expert where
these are quantised. Experts whose file is narrower leave the end of their slot unused. Layers may differ: slices of a
dense FFN are not as large as experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from everserve.plan.weights import ModelSizes
from everserve.tables.slots import Place

ALIGNMENT = 64
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ExpertMemoryPlan:
    """The slots of one memory, by index of the layer."""

    slots: tuple[int, ...]
    slot_bytes: tuple[int, ...]

    @classmethod
    def of(
        cls, model: ModelSizes, dtype: str, num_slots: int | Sequence[int], shard_bytes: Sequence[int] = ()
    ) -> "ExpertMemoryPlan":
        """`dtype`: the widest that weights are kept in. `num_slots`: of every layer, or of each. `shard_bytes`: of the
        largest shard of each layer, if `dtype` does not say it."""
        weights = (cut.num_weights(model.hidden_size) for cut in model.cuts)
        sizes = shard_bytes or [num * _ITEM_BYTES[dtype] for num in weights]
        slot_bytes = tuple(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        return cls((), slot_bytes).with_slots(num_slots)

    @classmethod
    def uniform(cls, num_layers: int, num_slots: int, slot_bytes: int) -> "ExpertMemoryPlan":
        """All layers are alike."""
        return cls((num_slots,) * num_layers, (slot_bytes,) * num_layers)

    def with_slots(self, num_slots: int | Sequence[int]) -> "ExpertMemoryPlan":
        """The same experts, but other numbers of slots."""
        slots = (num_slots,) * self.num_layers if isinstance(num_slots, int) else tuple(num_slots)
        assert len(slots) == self.num_layers, f"slots for {len(slots)} of {self.num_layers} layers"
        return ExpertMemoryPlan(slots, self.slot_bytes)

    @property
    def num_layers(self) -> int:
        return len(self.slot_bytes)

    @property
    def num_slots(self) -> int:
        """The slots of the layer with the most: tables of slots are as wide as that."""
        return max(self.slots, default=0)

    @property
    def num_bytes(self) -> int:
        return self._first[-1]

    def has(self, place: Place) -> bool:
        return 0 <= place.call_index < self.num_layers and 0 <= place.slot < self.slots[place.call_index]

    def offset(self, place: Place) -> int:
        assert self.has(place), place
        return self._first[place.call_index] + place.slot * self.slot_bytes[place.call_index]

    @cached_property
    def _first(self) -> tuple[int, ...]:
        """Where each layer begins, and the end."""
        sizes = (num * size for num, size in zip(self.slots, self.slot_bytes, strict=True))
        return tuple(accumulate(sizes, initial=0))
