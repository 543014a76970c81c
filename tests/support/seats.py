"""Expert seats whose weights are in real shared memory, in this process. An incarnation ends like a process: at any
moment, with its locks given up by the kernel."""

import functools
import os
import time
from collections.abc import Sequence

import torch

from everserve.backends.cpu.host_places import SeatMemory
from everserve.backends.cpu.reference import ReferenceOps
from everserve.memory.owned import create_memory
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.memory.weights.slot_table import SlotTable, state_bytes
from everserve.model.ops import ShardWeights
from everserve.plan.expert_memory import ExpertMemoryPlan
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.memory import Kind, MemoryName
from everserve.tables.slots import EMPTY, FailedFill, Fill, Filled, Place, SeatSlots
from tests.support.experts import HIDDEN, INNER, MOE_LAYERS, NUM_EXPERTS, RandomExperts

IDENTITY = b"the files of this model, as f32.."[:32]
NUM_LAYERS = len(MOE_LAYERS)
EXPERT_BYTES = 3 * HIDDEN * INNER * 4


def plan_of(num_slots: int) -> ExpertMemoryPlan:
    return ExpertMemoryPlan.uniform(NUM_LAYERS, num_slots, -(-EXPERT_BYTES // 64) * 64)


class SharedWeights:
    """The two descriptors that the anchor would hold."""

    def __init__(self, num_slots: int) -> None:
        self.plan = plan_of(num_slots)
        self.fds = (
            create_memory("weights", self.plan.num_bytes),
            create_memory("state", state_bytes(NUM_LAYERS, num_slots)),
        )
        generation = os.fstat(self.fds[0]).st_ino
        self.memory = MemoryName(kind=Kind.WEIGHTS, owners=(), num_bytes=self.plan.num_bytes, generation=generation)

    def descriptors(self) -> list[int]:
        """To give away."""
        return [os.dup(fd) for fd in self.fds]

    def look(self) -> ExpertMemory:
        return ExpertMemory(self.plan, self.descriptors(), read_only=True)

    def table(self) -> SlotTable:
        """As another process opens it."""
        return SlotTable(self.fds[1], self.plan.num_layers, self.plan.num_slots)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


@functools.cache
def right_weights(call_index: int, expert: int) -> torch.Tensor:
    """The bytes of an expert."""
    tensors = RandomExperts.tensors(None, MOE_LAYERS[call_index], expert)  # type: ignore[arg-type]
    return torch.cat([tensor.reshape(-1) for tensor in tensors[:3]]).view(torch.uint8)


class SeatInMemory:
    """A seat and its current incarnation. `planned`: experts of each layer, for its start. `num_mapped`: slots for
    experts in the memory of other seats."""

    def __init__(self, rank: int, planned: Sequence[int], num_slots: int, num_mapped: int = 0) -> None:
        self.rank = Rank(rank)
        self.num_mapped = num_mapped
        self.weights = SharedWeights(num_slots)
        self.incarnation = Incarnation(0)
        self.num_file_reads = 0
        self.are_files_gone = False
        self.backup: SharedWeights | None = None
        self._planned = (*planned, *[EMPTY] * (num_slots - len(planned)))
        self.start()

    def start(self) -> int:
        """The next incarnation. How many slots it found full."""
        self.incarnation = Incarnation(self.incarnation + 1)
        self.half = _Experts(self)
        self.is_filling = False
        own = ExpertMemory(self.weights.plan, self.weights.descriptors())
        self.memory = SeatMemory(self.half, own, IDENTITY, self.incarnation, self._check_files)
        self.slots = self.memory.slots
        if self.backup is not None:
            self.slots.offer(None, self.backup.memory, self.backup.descriptors())
        return self.memory.load(SeatSlots(rank=self.rank, experts=(self._planned,) * NUM_LAYERS))

    def die(self) -> None:
        """The kernel gives up its locks."""
        self.memory.close()

    def fill(self, fill: Fill) -> Filled | FailedFill:
        self.slots.begin(fill)
        return self.poll()

    def fill_in_this_thread(self, fill: Fill) -> Filled | FailedFill:
        """So that a moment of it can be chosen."""
        self.memory.places.copies_at_once = self.is_filling = True
        result = self.fill(fill)
        self.memory.places.copies_at_once = self.is_filling = False
        return result

    def poll(self) -> Filled | FailedFill:
        while (result := self.slots.poll()) is None:
            time.sleep(0.0002)
        return result

    def offer_to(self, other: "SeatInMemory") -> None:
        other.slots.offer(self.rank, self.weights.memory, self.weights.descriptors())

    def damage(self, place: Place) -> None:
        """A bit of the weights in this slot."""
        memory = ExpertMemory(self.weights.plan, self.weights.descriptors())
        memory.data[self.weights.plan.offset(place) + 100] ^= 8
        memory.close()

    def check(self) -> None:
        """What it serves, and what its table promises, is right to the last bit."""
        look = self.weights.look()
        for index, (layer, experts) in enumerate(zip(MOE_LAYERS, self.slots.held.experts, strict=True)):
            for slot, expert in enumerate(experts):
                if slot >= look.plan.num_slots:
                    if expert != EMPTY:
                        self._check_served(layer, index, slot, expert)
                    continue
                entry, start = look.table.read(Place(index, slot)), look.plan.offset(Place(index, slot))
                data = torch.from_numpy(look.data[start : start + EXPERT_BYTES].copy())
                if entry is not None:
                    assert torch.equal(data, right_weights(index, entry.expert)), "the table promises what is not there"
                if expert != EMPTY:
                    assert torch.equal(data, right_weights(index, expert)), "it serves what is not there"
                    assert entry is not None and entry.expert == expert
                    self._check_served(layer, index, slot, expert)

    def _check_served(self, layer: int, index: int, slot: int, expert: int) -> None:
        served = torch.cat([w.reshape(-1) for w in self.half.served(layer, slot)[:3]])
        assert torch.equal(served.view(torch.uint8), right_weights(index, expert))

    def close(self) -> None:
        self.memory.close()
        self.weights.close()

    def _check_files(self) -> None:
        if self.are_files_gone:
            raise OSError("the files are gone")


class _Experts(RandomExperts):
    """Counts what is read from files."""

    def __init__(self, seat: SeatInMemory) -> None:
        self._seat = seat
        super().__init__(ReferenceOps(), [EMPTY] * (seat.weights.plan.num_slots + seat.num_mapped))

    def tensors(self, layer: int, expert: int) -> ShardWeights:
        self._seat.num_file_reads += 1
        return super().tensors(layer, expert)

    def served(self, layer: int, slot: int) -> ShardWeights:
        weights = self._slots[layer]._weights[slot]  # type: ignore[attr-defined]
        assert weights is not None
        return weights


ALL_EXPERTS = tuple(range(NUM_EXPERTS))
