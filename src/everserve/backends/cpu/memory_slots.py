"""The slots of an expert worker on CPUs that holds its experts in memory of its seat (`--weights memory`).

    begin    the slot is empty -> on a thread: lock -> the cheapest source that works -> checksum -> table
    poll     ops read the slot from now on

Sources, cheapest first: another slot of this worker, the memory of a peer, the backup, the model's files. Each is
looked at when it is tried, not before; one that has changed or is damaged falls through to the next.

The last slots of each layer, behind those of the seat's memory, are for experts in the memory of another seat, whose
worker does not serve: ops read them there, nothing is copied, and only their checksum is computed once. Such a loan
ends when the slot is cleared or filled again, or the memory is withdrawn.

The memory outlives this process: its successor starts with what the table says is there, and loads only the rest.
"""

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from everserve.memory.weights import copying
from everserve.memory.weights.copying import BACKUP_REST_PERCENT, FILL_NICE
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.memory.weights.slot_table import NotOwnerError
from everserve.model.expert_half import ExpertHalf
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.memory import Memory
from everserve.tables.slots import EMPTY, FailedFill, Fill, Filled, HeldSlots, Place, SeatSlots, Source
from everserve.worker.background import Background
from everserve.worker.backup_filling import BackupFilling

log = logging.getLogger(__name__)

_LOCK_S = 30.0  # how long a fill waits for a process that was stopped while it filled the same slot, and will be killed
_LOOK_AGAIN_S = 0.01
_AT_ONCE_BYTES = 4 << 20  # the checksum of so many takes less time than a thread to begin, where cores are busy


@dataclass(frozen=True)
class _Loan:
    """A slot of another seat's memory that is used where it is."""

    memory: ExpertMemory
    place: Place

    def end(self) -> None:
        self.memory.table.give_back(self.place)


@dataclass(frozen=True)
class _Ready:
    """An expert is in the memory of its slot, or borrowed."""

    source: Source
    num_bytes: int  # copied
    seconds: float
    loan: _Loan | None = None


class MemorySlots:
    """`own`: the memory of this seat; `experts` may have more slots. `check_source` raises if the files are not those
    that this instance serves."""

    def __init__(
        self,
        experts: ExpertHalf,
        own: ExpertMemory,
        identity: bytes,
        incarnation: Incarnation,
        check_source: Callable[[], None],
    ) -> None:
        self._experts = experts
        self._layers = experts.config.call_layers
        self._own = own
        self._identity = identity
        self._check_source = check_source
        self._peers: dict[Rank, ExpertMemory] = {}
        self._backup: ExpertMemory | None = None
        self._loans: dict[Place, _Loan] = {}
        self._num_mapped = experts.num_slots - own.plan.num_slots
        self._filling: Fill | None = None
        self._copies: Background[_Ready] = Background("fill", FILL_NICE)
        self._loans_begun: Background[_Ready] = Background("borrow", 0)  # streams wait for them
        self._backup_filling: BackupFilling | None = None
        own.table.claim(identity, incarnation)

    def num_experts(self, layer_index: int) -> int:
        return self._experts.config.cuts[layer_index].num_shards

    @property
    def held(self) -> HeldSlots:
        return msgspec.structs.replace(self._experts.held_slots(), num_mapped=self._num_mapped)

    # -- the start -------------------------------------------------------------------------------

    def start_with(self, planned: SeatSlots, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Hold what the table says is there, and load the rest of what is planned into empty slots. Slots with other
        experts stay as they are until the orchestrator has them refilled: a predecessor that still runs may compute
        with them for attention workers that do not know yet that it is gone. Returns how many were there."""
        fills, num_found = [], 0
        for index, wanted in enumerate(planned.experts):
            there = self._found(index)
            for slot, expert in there.items():
                self._hold(Fill(index, slot, expert))
            num_found += len(there)
            missing = [expert for expert in wanted if expert != EMPTY and expert not in there.values()]
            fills += [Fill(index, *pair) for pair in zip(self._free(index), missing, strict=False)]
        for done, fill in enumerate(fills):
            self._copy(fill, is_starting=True)
            self._hold(fill)
            progress(done + 1, len(fills))
        return num_found

    def _found(self, layer_index: int) -> dict[int, int]:
        """The expert in each slot of this seat's memory, but for slots that a process changes which was declared gone,
        and may still run."""
        table, found = self._own.table, dict[int, int]()
        for slot in range(self._own.plan.slots[layer_index]):
            place = Place(layer_index, slot)
            if not table.is_locked(place) and (entry := table.read(place)) is not None:
                found[slot] = entry.expert
        return found

    def _free(self, layer_index: int) -> Iterator[int]:
        """Slots that are empty, and not being changed."""
        held = self.held.own(layer_index)
        free = [slot for slot, expert in enumerate(held) if expert == EMPTY]
        return (slot for slot in free if not self._own.table.is_locked(Place(layer_index, slot)))

    # -- changes ---------------------------------------------------------------------------------

    def begin(self, fill: Fill) -> None:
        self._empty(Place(fill.layer_index, fill.slot))
        self._filling = fill
        if self._is_own(Place(fill.layer_index, fill.slot)):
            self._copies.begin(lambda: self._copy(fill))
        elif self._num_bytes(fill.layer_index, fill.expert) <= _AT_ONCE_BYTES:
            self._loans_begun.do(lambda: self._borrow(fill))
        else:
            self._loans_begun.begin(lambda: self._borrow(fill))

    def poll(self) -> Filled | FailedFill | None:
        fill = self._filling
        if fill is None:
            return None
        is_own = self._is_own(Place(fill.layer_index, fill.slot))
        result = (self._copies if is_own else self._loans_begun).poll()
        if result is None:
            return None
        self._filling = None
        if isinstance(result, Exception):
            return FailedFill(**fill._asdict(), reason=f"{type(result).__name__}: {result}")
        if result.loan is not None and not self._is_offered(result.loan.memory):
            result.loan.end()
            return FailedFill(**fill._asdict(), reason="the memory that it was found in was withdrawn")
        self._hold(fill, result.loan)
        return Filled(fill=fill, source=result.source, num_bytes=result.num_bytes, seconds=result.seconds)

    def _empty(self, place: Place) -> None:
        self._experts.clear(self._layers[place.layer_index], place.slot)
        if (loan := self._loans.pop(place, None)) is not None:
            loan.end()

    def _is_own(self, place: Place) -> bool:
        return self._own.plan.has(place)

    def clear(self, place: Place) -> None:
        self._empty(place)
        if not self._is_own(place):
            return
        try:
            self._own.table.clear(place)
        except NotOwnerError as error:
            log.warning("a slot was cleared in this process only: %s", error)

    def offer(self, rank: Rank | None, weights: Memory, fds: Sequence[int]) -> None:
        plan = self._own.plan
        if rank is None:
            plan = plan.with_slots([cut.num_shards for cut in self._experts.config.cuts])
        try:
            memory = ExpertMemory(plan, fds, read_only=rank is not None)
        except (OSError, ValueError) as error:
            log.warning("%s cannot be used: %s", weights.name, error)
            return
        if rank is None:
            memory.table.claim(self._identity, owner=None)
            self._backup = memory
        elif rank not in self._peers or self._peers[rank].inode != memory.inode:
            self.withdraw(rank)
            self._peers[rank] = memory  # else a new orchestrator offers again what is offered: it may be borrowed

    def withdraw(self, rank: Rank | None) -> None:
        """A copy that runs ends first; its memory goes with the last reference to it."""
        if rank is None:
            self._backup = None
            if self._backup_filling is not None:
                self._backup_filling.stop()
            return
        memory = self._peers.pop(rank, None)
        for place in [place for place, loan in self._loans.items() if loan.memory is memory]:
            self._empty(place)

    def tend(self) -> None: ...

    def begin_backup(self, rank: Rank) -> None:
        """Copy experts to the backup, if there is one, beside everything else."""
        if self._backup is not None:
            self._backup_filling = BackupFilling(
                self._backup, self._copy_to_backup, first_layer=rank % len(self._layers)
            )
            self._backup_filling.start()

    def close(self) -> None:
        if self._backup_filling is not None:
            self._backup_filling.stop()
            self._backup_filling.join()
        for memory in (self._own, *self._peers.values()):
            memory.close()

    # -- copies: on other threads, but for the start ---------------------------------------------

    def _copy(self, fill: Fill, is_starting: bool = False) -> _Ready:
        """Fill a slot of the memory, verified. Raises if no source has the expert."""
        place, began_s = Place(fill.layer_index, fill.slot), time.monotonic()
        while not self._own.table.begin(place):
            if time.monotonic() > began_s + _LOCK_S:
                raise TimeoutError(
                    "an older process of this seat may still write to the slot, or another worker reads it"
                )
            time.sleep(_LOOK_AGAIN_S)
        try:
            to, num_bytes = self._own.address(place), self._num_bytes(fill.layer_index, fill.expert)
            source, checksum = self._copy_cheapest(fill.layer_index, fill.expert, to, check_files=not is_starting)
            self._own.table.complete(place, fill.expert, checksum)
        finally:
            self._own.table.end(place)
        return _Ready(source, num_bytes, time.monotonic() - began_s)

    def _borrow(self, fill: Fill) -> _Ready:
        """Find an expert in the memory of another seat, verified. Raises if it is not there."""
        began_s, num_bytes = time.monotonic(), self._num_bytes(fill.layer_index, fill.expert)
        for memory in [*self._peers.values()]:
            if memory.table.has(self._identity):
                place = memory.borrow(fill.layer_index, fill.expert, num_bytes)
                if place is not None:
                    return _Ready(Source.MAPPED, 0, time.monotonic() - began_s, _Loan(memory, place))
        raise LookupError("no memory of another seat has it")

    def _copy_cheapest(self, layer_index: int, expert: int, to: int, check_files: bool = True) -> tuple[Source, int]:
        num_bytes = self._num_bytes(layer_index, expert)
        for source, memory in self._memories():
            if memory.table.has(self._identity):
                checksum = memory.copy_out(layer_index, expert, to, num_bytes)
                if checksum is not None and self._is_offered(memory):
                    return source, checksum
        if check_files:
            self._check_source()
        return Source.FILE, self._copy_from_file(layer_index, expert, to)

    def _memories(self) -> Iterator[tuple[Source, ExpertMemory]]:
        yield Source.SLOT, self._own
        for memory in [*self._peers.values()]:  # the loop's thread may change the peers meanwhile
            yield Source.PEER, memory
        if self._backup is not None:
            yield Source.HOST, self._backup

    def _is_offered(self, memory: ExpertMemory) -> bool:
        """Not withdrawn during the copy, with a device that was lost."""
        return memory is self._own or memory is self._backup or memory in [*self._peers.values()]

    def _copy_from_file(self, layer_index: int, expert: int, to: int, rest_percent: int = 0) -> int:
        checksum = end = 0
        for part in self._experts.tensors(self._layers[layer_index], expert):
            tensor = part.contiguous()  # a slice's `down` is some of the columns in the file
            num_bytes, address = tensor.nbytes, tensor.data_ptr()
            assert num_bytes % 8 == 0, "an expert's matrices are whole words"
            checksum += copying.copy(
                to + end, address, num_bytes, first_word=end // 8, rest_percent=rest_percent
            )  # fmt: skip
            end += num_bytes
        checksum %= 1 << 64
        if copying.sum_at(to, end) != checksum:
            raise OSError("the weights in memory are not those that were copied there")
        return checksum

    def _copy_to_backup(self, layer_index: int, expert: int, to: int, is_held: bool) -> int | None:
        num_bytes, rest = self._num_bytes(layer_index, expert), BACKUP_REST_PERCENT
        memories = [self._own] if is_held else [self._own, *self._peers.values()]
        for memory in memories:
            if memory.table.has(self._identity):
                checksum = memory.copy_out(layer_index, expert, to, num_bytes, rest_percent=rest)
                if checksum is not None:
                    return checksum
        if is_held:
            return None
        self._check_source()
        return self._copy_from_file(layer_index, expert, to, rest)

    # -- views -----------------------------------------------------------------------------------

    def _num_bytes(self, layer_index: int, expert: int) -> int:
        config = self._experts.config
        itemsize = self._experts.dtype(self._layers[layer_index], expert).itemsize
        return 3 * config.hidden_size * config.cuts[layer_index].shard_size * itemsize

    def _hold(self, fill: Fill, loan: _Loan | None = None) -> None:
        """Ops read the slot where it is."""
        at, layer = Place(fill.layer_index, fill.slot), self._layers[fill.layer_index]
        memory, place = (loan.memory, loan.place) if loan is not None else (self._own, at)
        self._experts.fill(layer, fill.slot, fill.expert, *self._views(memory, place, fill.expert))
        if loan is not None:
            self._loans[at] = loan

    def _views(self, memory: ExpertMemory, place: Place, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        config, dtype = self._experts.config, self._experts.dtype(self._layers[place.layer_index], expert)
        hidden, inner = config.hidden_size, config.cuts[place.layer_index].shard_size
        start = memory.plan.offset(place)
        data = memory.data[start : start + 3 * hidden * inner * dtype.itemsize]
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # the memory of another seat cannot be written to, which torch cannot express
            numbers = torch.from_numpy(data)
        gate, up, down = numbers.view(dtype).view(3, inner * hidden)
        return gate.view(inner, hidden), up.view(inner, hidden), down.view(hidden, inner)
