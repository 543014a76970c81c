"""SeatExperts: the expert slots of one seat in its device memory, which outlives its workers.

What each slot holds is in the seat's slot table. A successor keeps what is there, after its checksum was computed once
more, and begins to serve with it; what a predecessor left half-filled is empty. If most of what is planned is missing,
as at the first start, the seat is of no use without it: it is loaded before the worker is ready. Otherwise the
orchestrator has it filled while the worker serves, from whatever source is the cheapest by then.
"""

import logging
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from everserve.backends.cuda.arena_range import ArenaRange
from everserve.backends.cuda.device import Device, tensor_at
from everserve.backends.cuda.ops.checksum import add_checksum
from everserve.backends.cuda.ops.experts import ExpertArena
from everserve.memory.weights.slot_table import SlotTable
from everserve.model.config import ModelConfig
from everserve.model.fingerprint import check_unchanged, expert_identity
from everserve.model.weights import Weights
from everserve.plan.expert_memory import ExpertMemoryPlan
from everserve.plan.weights import ITEM_BYTES, WeightsPlan
from everserve.tables.calls import ShardKind
from everserve.tables.memory import Kind
from everserve.tables.slots import EMPTY, Fill, Place

log = logging.getLogger(__name__)

_AT_ONCE = 16  # experts between two waits for the device


class SeatExperts:
    """Takes over the descriptors of the weights and of their table."""

    def __init__(self, device: Device, memory: dict[Kind, int]) -> None:
        start, model = device.start, device.model
        assert start.slots is not None, "an expert worker is told its slots"
        self._device = device
        calls = zip(model.calls, start.slots.experts, strict=True)
        self._planned = [planned for call, planned in calls if call.kind is not ShardKind.HEAD]
        num_layers, num_own = len(model.cuts), max(map(len, self._planned))
        weights = WeightsPlan.of(model, start.roles, num_own)
        experts = weights.tensor("experts")
        assert experts.offset == 0, "the memory of an expert seat begins with its first expert"
        self.plan = ExpertMemoryPlan.of(model, "bfloat16", num_own)
        self._slot_bytes = self.plan.slot_bytes[0]  # of every layer: all shards are as large
        assert self._slot_bytes * experts.shape[0] == experts.num_bytes, "experts lie without gaps"
        self.range = ArenaRange(
            device.driver,
            memory[Kind.WEIGHTS],
            weights.num_bytes,
            self._slot_bytes,
            ITEM_BYTES * min(model.hidden_size, model.cuts[0].shard_size),
            start.capacity.max_workers,
        )
        source = start.settings.model
        files = f"{source.load_format}:{source.directory}:{source.fingerprint}"
        self.identity = expert_identity(files, model, "bfloat16")
        self.table = SlotTable(memory[Kind.WEIGHTS_STATE], num_layers, num_own)
        self.table.claim(self.identity, start.incarnation)
        for kind in (Kind.WEIGHTS, Kind.WEIGHTS_STATE):
            os.close(memory.pop(kind))
        places = tensor_at(self.range.address, (self.range.num_places, *experts.shape[1:]))
        self.arena = make_arena(model, places, start.capacity.lane_slots, num_own)

    def prepare(self) -> None:
        """Keep what is there, and load the rest if it is most of what is planned."""
        num_kept, missing = self._keep(), missing_fills(self._planned, self.table.experts())
        log.info("%d expert slots were in memory already, %d are missing", num_kept, len(missing))
        if len(missing) > num_kept:
            self._load(missing)

    def _keep(self) -> int:
        """How many slots hold an expert. Those with a wrong checksum do not."""
        entries = [(at, entry) for at in self.table.places() if (entry := self.table.read(at)) is not None]
        sums = self._checksums([at for at, _ in entries])
        num_kept = 0
        for (at, entry), checksum in zip(entries, sums, strict=True):
            if checksum == entry.checksum:
                num_kept += 1
            else:
                log.error("slot %d of call %d is damaged and will be filled again", at.slot, at.call_index)
                self.table.clear(at)
        return num_kept

    def _load(self, fills: list[Fill]) -> None:
        source = self._device.start.settings.model
        check_unchanged(source.directory, source.fingerprint)
        progress = self._device.loading.part("experts")
        for done in range(0, len(fills), _AT_ONCE):
            self._load_some(fills[done : done + _AT_ONCE])
            progress(min(done + _AT_ONCE, len(fills)), len(fills))

    def _load_some(self, fills: Sequence[Fill]) -> None:
        """Checksums of all of them at the end: they wait for the device."""
        device = self._device
        weights = Weights(device.model, device.checkpoint, "bfloat16", device.torch_device)
        places = [(fill, Place(fill.call_index, fill.slot)) for fill in fills]
        # A place that has not ended yet may still be written to by a process that was declared gone.
        begun = [(fill, at) for fill, at in places if self.table.begin(at)]
        for fill, at in begun:
            sources = weights.layout.shard(device.model.call_layers[fill.call_index], fill.expert)
            self.arena.fill(at.call_index, at.slot, *weights.shard(sources).decoded())
        for (fill, at), checksum in zip(begun, self._checksums([at for _, at in begun]), strict=True):
            self.table.complete(at, fill.expert, checksum)
            self.table.end(at)

    def _checksums(self, places: list[Place]) -> list[int]:
        """Checksums of what is there now. Waits for the device."""
        totals = torch.zeros(len(places), dtype=torch.int64, device=self._device.torch_device)
        for i, at in enumerate(places):
            address = self.range.place_address(self.arena.own_place(*at))
            add_checksum(address, self._slot_bytes, 0, totals[i : i + 1])
        return [total % (1 << 64) for total in totals.tolist()]


def make_arena(model: ModelConfig, experts: Tensor, num_slots: int, num_own: int | None = None) -> ExpertArena:
    """An arena over the memory of a seat's experts."""
    cut = model.cuts[0]
    return ExpertArena.of_experts(
        experts, len(model.cuts), num_slots, num_own,
        activation=model.activation(cut.layer), sizes=(cut.shard_size, model.hidden_size),
    )  # fmt: skip


def missing_fills(planned: Sequence[Sequence[int]], held: Sequence[Sequence[int]]) -> list[Fill]:
    """Planned experts that no slot of their layer holds, for slots that are empty: their own, or any other. What a slot
    holds besides is left there: routes may lead to it."""
    missing = []
    for index, (wanted, there) in enumerate(zip(planned, held, strict=True)):
        absent = {slot: expert for slot, expert in enumerate(wanted) if expert != EMPTY and expert not in there}
        empty = [slot for slot, expert in enumerate(there) if expert == EMPTY]
        at_home = {slot: absent.pop(slot) for slot in empty if slot in absent}
        others = zip([slot for slot in empty if slot not in at_home], absent.values(), strict=False)
        missing += [Fill(index, slot, expert) for slot, expert in sorted([*at_home.items(), *others])]
    return missing
