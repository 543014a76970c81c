"""Experts of an expert worker on CPUs in memory of its seat (`--weights memory`): where they lie, how they are copied
there, and how ops compute with them. memory/weights/slots.py decides what is copied when.

Copies run on a thread, which leaves the cores to steps; but for the start, when nothing else does anything.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from everserve.memory.weights import copying
from everserve.memory.weights.copying import BACKUP_REST_PERCENT, FILL_NICE
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.memory.weights.found import Copy, Found
from everserve.memory.weights.offers import Offers
from everserve.memory.weights.slot_table import Entry
from everserve.memory.weights.slots import MemorySlots
from everserve.model.expert_half import ExpertHalf
from everserve.model.ops import ShardWeights
from everserve.model.weights import shard_at
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.memory import MemoryName
from everserve.tables.slots import EMPTY, FailedFill, Fill, Place, SeatSlots, Source
from everserve.worker.background import Background, Job

_LOOK_AGAIN_S = 0.01
_AT_ONCE_BYTES = 4 << 20  # the checksum of so many takes less time than a thread to begin, where cores are busy


class InMemory(NamedTuple):
    """A slot, of this seat or another one."""

    memory: ExpertMemory
    place: Place

    @property
    def address(self) -> int:
        return self.memory.address(self.place)


class _Copy:
    """A job that a thread does, or has done."""

    def __init__(self, job: Job[int]) -> None:
        self._job = job

    def poll(self) -> int | None:
        return self._job.poll()

    def give_up(self) -> None:
        """It goes on to its end: memory that is withdrawn stays mapped as long as a copy has it."""


class HostPlaces:
    """`own`: the memory of this seat. `check_source` raises if the files are not those that this instance serves.

    `copies_at_once`: every copy is made when it is begun.
    """

    def __init__(self, experts: ExpertHalf, own: ExpertMemory, check_source: Callable[[], None]) -> None:
        self._experts = experts
        self._layers = experts.config.call_layers
        self._own = own
        self._check_source = check_source
        self._copies, self._sums = Background("fill", FILL_NICE), Background("borrow", 0)  # streams wait for sums
        self.copies_at_once = False

    # -- where ops read experts ------------------------------------------------------------------

    def own(self, place: Place) -> InMemory:
        return InMemory(self._own, place)

    def hold(self, place: Place, expert: int, at: InMemory) -> None:
        layer = self._layers[place.call_index]
        self._experts.fill(layer, place.slot, expert, self._views(layer, at, expert))

    def empty(self, place: Place) -> None:
        self._experts.clear(self._layers[place.call_index], place.slot)

    def fence(self) -> Callable[[], bool]:
        return lambda: True  # nothing is computed while slots change

    def drain(self) -> None: ...

    def num_bytes(self, call_index: int, expert: int) -> int:
        return self._experts.form(self._layers[call_index], expert).num_bytes

    def _views(self, layer: int, at: InMemory, expert: int) -> ShardWeights:
        config, form = self._experts.config, self._experts.form(layer, expert)
        start = at.memory.plan.offset(at.place)
        data = at.memory.data[start : start + form.num_bytes]
        with warnings.catch_warnings():
            # The memory of another seat cannot be written to, which torch cannot express.
            warnings.simplefilter("ignore")
            numbers = torch.from_numpy(data)
        return shard_at(form, numbers, config.hidden_size, config.cuts[at.place.call_index].shard_size)

    # -- copies ----------------------------------------------------------------------------------

    def copy(self, at: InMemory, call_index: int, expert: int) -> Callable[[InMemory], Copy]:
        num_bytes = self.num_bytes(call_index, expert)

        def begin(to: InMemory) -> Copy:
            if to == at:  # it is used where it is
                is_quick = num_bytes <= _AT_ONCE_BYTES
                return self._begin(self._sums, lambda: copying.sum_at(at.address, num_bytes), at_once=is_quick)
            return self._begin(self._copies, lambda: copying.copy(to.address, at.address, num_bytes))

        return begin

    def in_files(self, call_index: int, expert: int) -> Found[InMemory]:
        def read(to: int) -> int:
            if not self.copies_at_once:  # at the start that has just been checked
                self._check_source()
            return self.copy_from_files(call_index, expert, to)

        return Found(Source.FILE, lambda to: self._begin(self._copies, partial(read, to.address)), lambda: None)

    def copy_from_files(self, call_index: int, expert: int, to: int, rest_percent: int = 0) -> int:
        """The checksum, of what is there then."""
        checksum = end = 0
        for tensor in self._experts.tensors(self._layers[call_index], expert).parts():
            num_bytes, address = tensor.nbytes, tensor.data_ptr()
            assert num_bytes % 8 == 0, "an expert's matrices are whole words"
            checksum += copying.copy(to + end, address, num_bytes, first_word=end // 8, rest_percent=rest_percent)
            end += num_bytes
        checksum %= 1 << 64
        if copying.sum_at(to, end) != checksum:
            raise OSError("the weights in memory are not those that were copied there")
        return checksum

    def _begin(self, background: Background, work: Callable[[], int], at_once: bool = False) -> Copy:
        if not (at_once or self.copies_at_once):
            return _Copy(background.begin(work))
        job = Job(work)
        job.do()
        return _Copy(job)


class _Seat:
    """`OpenSeat`: all memory of this host is near."""

    is_near = True

    def __init__(self, places: HostPlaces, memory: ExpertMemory) -> None:
        self._places = places
        self.memory = memory
        self.table = memory.table

    def at(self, place: Place) -> InMemory:
        return InMemory(self.memory, place)

    def copy(self, place: Place, expert: int) -> Callable[[InMemory], Copy]:
        return self._places.copy(self.at(place), place.call_index, expert)

    def find(self, call_index: int, expert: int) -> tuple[Place, Entry] | None:
        return self.table.find(call_index, expert)

    def close(self) -> None:
        """The memory and its locks go with the last reference: a thread may still copy from it, or into a backup."""


class SeatMemory:
    """The memory of one seat, with its slots, and what other memory they are filled from."""

    def __init__(
        self,
        experts: ExpertHalf,
        own: ExpertMemory,
        identity: bytes,
        incarnation: Incarnation,
        check_source: Callable[[], None],
        first_layer: int = 0,
    ) -> None:
        self._own = own
        self._identity = identity
        self._check_source = check_source
        self._num_shards = [cut.num_shards for cut in experts.config.cuts]
        self.places = HostPlaces(experts, own, check_source)
        self.offers = Offers(self, identity, self.copy_out, first_layer)
        num_slots = [len(slots) for slots in experts.held_slots().experts]
        self.slots = MemorySlots(own.table, num_slots, own.plan.slots, self._num_shards, self.places, self.offers)
        own.table.claim(identity, incarnation)

    def open_seat(self, rank: Rank, weights: MemoryName, fds: Sequence[int]) -> _Seat:
        return _Seat(self.places, ExpertMemory(self._own.plan, fds, read_only=True))

    def open_backup(self, fds: Sequence[int]) -> _Seat:
        return _Seat(self.places, ExpertMemory(self._own.plan.with_slots(self._num_shards), fds))

    def close(self) -> None:
        self.offers.close()
        self._own.close()

    # -- the start -------------------------------------------------------------------------------

    def load(self, planned: SeatSlots, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Hold what the table says is there, and load the rest of what is planned into empty slots. Slots with other
        experts stay as they are until the orchestrator has them refilled: a predecessor that still runs may compute
        with them for attention workers that do not know yet that it is gone. Returns how many were there."""
        fills, num_found = [], 0
        for index, wanted in enumerate(planned.experts):
            there = self._hold_what_is_there(index)
            num_found += len(there)
            missing = [expert for expert in wanted if expert != EMPTY and expert not in there]
            fills += [Fill(index, *pair) for pair in zip(self._free(index), missing, strict=False)]
        self.places.copies_at_once = True
        for done, fill in enumerate(fills):
            self._fill(fill)
            progress(done + 1, len(fills))
        self.places.copies_at_once = False
        return num_found

    def _hold_what_is_there(self, call_index: int) -> set[int]:
        """The experts in this seat's memory, but for slots that a process changes which was declared gone, and may
        still run."""
        table, there = self._own.table, set()
        for slot in range(self._own.plan.slots[call_index]):
            place = Place(call_index, slot)
            if not table.is_locked(place) and (entry := table.read(place)) is not None:
                self.places.hold(place, entry.expert, self.places.own(place))
                self.slots.note(place, entry)
                there.add(entry.expert)
        return there

    def _free(self, call_index: int) -> Iterator[int]:
        """Slots that are empty, and not being changed."""
        held = self.slots.held.own(call_index)
        free = [slot for slot, expert in enumerate(held) if expert == EMPTY]
        return (slot for slot in free if not self._own.table.is_locked(Place(call_index, slot)))

    def _fill(self, fill: Fill) -> None:
        self.slots.begin(fill)
        while (result := self.slots.poll()) is None:
            time.sleep(_LOOK_AGAIN_S)
        if isinstance(result, FailedFill):
            raise OSError(f"cannot load expert {fill.expert} of call {fill.call_index}: {result.reason}")

    # -- the backup, on its thread ---------------------------------------------------------------

    def copy_out(self, call_index: int, expert: int, to: int, is_held: bool) -> int | None:
        """`CopyOut` of memory/weights/backup_filling.py."""
        num_bytes, rest = self.places.num_bytes(call_index, expert), BACKUP_REST_PERCENT
        memories = [self._own]
        if not is_held:
            memories += [seat.memory for seat in self.offers.seats if isinstance(seat, _Seat)]
        for memory in memories:
            if memory.table.has(self._identity):
                checksum = memory.copy_out(call_index, expert, to, num_bytes, rest_percent=rest)
                if checksum is not None:
                    return checksum
        if is_held:
            return None
        self._check_source()
        return self.places.copy_from_files(call_index, expert, to, rest)
