"""SeatHeads: the heads that an expert worker on a GPU is to serve, loaded, and how calls are numbered."""

from collections.abc import Sequence

import torch
from torch import Tensor

from everserve.backends.cuda.call_slots import CallSlots, HeadKernels
from everserve.backends.cuda.device import Device
from everserve.backends.cuda.head_memory import HeadMemory
from everserve.model.fingerprint import check_unchanged
from everserve.tables.calls import ShardKind
from everserve.tables.slots import EMPTY
from everserve.worker.slot_changes import ChangeableSlots


class SeatHeads:
    """Takes over the descriptor of their memory. What a predecessor has left there is not loaded again."""

    def __init__(self, device: Device, fd: int) -> None:
        start, model = device.start, device.model
        assert start.slots is not None, "an expert worker is told its slots"
        self._device = device
        self.memory = HeadMemory(device, fd)
        kinds = [call.kind is ShardKind.HEAD for call in model.calls]
        self.ffn_calls = [call for call, is_head in enumerate(kinds) if not is_head]
        self.is_head_L = torch.tensor(kinds, dtype=torch.int32, device=device.torch_device)
        self._held = {call: start.slots.experts[call] for call, is_head in enumerate(kinds) if is_head}
        self._load()

    def _load(self) -> None:
        calls, memory = self._device.model.calls, self.memory
        places = [
            (call, slot, (calls[call].layer, head))
            for call, heads in self._held.items()
            for slot, head in enumerate(heads)
            if head != EMPTY
        ]
        memory.keep([head for _, _, head in places])
        source = self._device.start.settings.model
        if not all(memory.has(head) for _, _, head in places):
            check_unchanged(source.directory, source.fingerprint)
        progress = self._device.loading.part("heads")
        piece_LS = memory.arena.piece_LS.cpu()
        for done, (call, slot, head) in enumerate(places):
            is_there = memory.has(head)
            piece_LS[call, slot] = memory.load(head)
            if not is_there:
                progress(done + 1, len(places))
        memory.arena.piece_LS.copy_(piece_LS)

    def by_call(self, held_FS: Tensor) -> Tensor:
        """What all slots hold, by call, from what those of FFNs do."""
        calls = self._device.model.calls
        num_slots = max([held_FS.shape[1], *map(len, self._held.values())])
        held_LS = torch.full((len(calls), num_slots), EMPTY, dtype=torch.int32)
        held_LS[self.ffn_calls, : held_FS.shape[1]] = held_FS
        for call, heads in self._held.items():
            held_LS[call, : len(heads)] = torch.tensor(heads, dtype=torch.int32)
        return held_LS

    def slots(self, ffn: ChangeableSlots, server: HeadKernels) -> CallSlots:
        return CallSlots(self._device.model, ffn, dict[int, Sequence[int]](self._held), server, self.memory)
