"""An expert from the device to the backup in host memory: `CopyOut` of memory/weights/backup_filling.py, on its thread.

    slot ──the device's stream──> a registered buffer ──copied and summed──> backup

What was refilled meanwhile, or arrives with a wrong checksum, is not used.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from everserve.backends.cuda.file_feed import Buffers, convert
from everserve.memory.device import Driver
from everserve.memory.weights import copying
from everserve.memory.weights.checksum import WORD_BYTES
from everserve.memory.weights.copying import BACKUP_REST_PERCENT
from everserve.memory.weights.slot_table import SlotTable

_CHUNK_BYTES = 4 << 20
_WORD = (1 << 64) - 1


class BackupCopy:
    """`table`: of the own slots. `address(call_index, slot)`: where they lie. `load(call_index, expert)`: gate, up
    and down out of the files; None if there are none."""

    def __init__(
        self,
        driver: Driver,
        table: SlotTable,
        address: Callable[[int, int], int],
        num_bytes: int,
        load: Callable[[int, int], Sequence[Tensor]] | None,
    ) -> None:
        self._driver = driver
        self._table = table
        self._address = address
        self._num_bytes = num_bytes
        self._load = load
        self._buffers: Buffers | None = None
        self._stream = 0

    def __call__(self, call_index: int, expert: int, to: int, is_held: bool) -> int | None:
        found = self._table.find(call_index, expert)
        if found is None:
            return None if is_held or self._load is None else self._from_files(call_index, expert, to)
        place, entry = found
        checksum = self._from_device(self._address(*place), to)
        return checksum if checksum == entry.checksum and self._table.read(place) == entry else None

    def _from_device(self, address: int, to: int) -> int:
        buffer, checksum = self._prepared().addresses[0], 0
        for at in range(0, self._num_bytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, self._num_bytes - at)
            self._driver.read_async(self._stream, address + at, buffer, size)
            self._driver.synchronize(self._stream)
            checksum += copying.copy(
                to + at, buffer, size, first_word=at // WORD_BYTES, rest_percent=BACKUP_REST_PERCENT
            )  # fmt: skip
        return checksum & _WORD

    def _from_files(self, call_index: int, expert: int, to: int) -> int:
        assert self._load is not None
        end = to
        for matrix in self._load(call_index, expert):
            end += convert(matrix.reshape(-1), end)
        assert end == to + self._num_bytes, "an expert has its three matrices"
        return copying.sum_at(to, self._num_bytes)

    def _prepared(self) -> Buffers:
        if self._buffers is None:
            self._driver.make_current()
            self._stream = self._driver.create_stream()
            self._buffers = Buffers(self._driver.register_host, _CHUNK_BYTES)
        return self._buffers
