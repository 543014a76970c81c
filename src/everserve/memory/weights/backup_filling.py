"""The backup of all experts is filled by expert workers, in the background, after the start.

Slot e of the backup is for expert e. Each worker first copies the experts that it holds, then whatever is missing, from
any source: each expert is held by one worker at least, but that worker may have died. A slot's lock (slot_table.py)
keeps two workers from copying the same expert, and ends with its process. So there is no state besides the backup
itself, and no order of deaths leaves a gap for longer than there is an expert worker.
"""

import logging
import threading
import time
from collections.abc import Callable

from everserve.memory.weights.copying import BACKUP_NICE, be_nice
from everserve.memory.weights.expert_memory import ExpertMemory
from everserve.tables.slots import Place
from everserve.words import count

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.2  # while other workers copy the rest

# Copy an expert (call, expert) to this address, and return its checksum; None if that is not possible now. The
# last argument: only if this worker holds it.
CopyOut = Callable[[int, int, int, bool], int | None]


class BackupFilling:
    """A thread that ends when the backup is complete. `first_layer` spreads the workers over the layers."""

    def __init__(self, backup: ExpertMemory, copy_out: CopyOut, first_layer: int) -> None:
        self._backup = backup
        self._copy_out = copy_out
        self._first_layer = first_layer
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="backup")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Between two experts."""
        self._is_over.set()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        be_nice(BACKUP_NICE)
        began_s, num_copied = time.monotonic(), self._pass(is_held=True)
        while not self._is_over.is_set() and self._missing():
            num_copied += self._pass(is_held=False)
            if self._missing():
                self._is_over.wait(_LOOK_AGAIN_S)
        log.info("copied %s to the backup in %.1f s", count(num_copied, "expert"), time.monotonic() - began_s)

    def _missing(self) -> list[Place]:
        """What is missing, in the order in which this worker copies them."""
        missing = [place for place in self._backup.table.missing() if self._backup.plan.has(place)]
        return sorted(missing, key=lambda place: (place.call_index < self._first_layer, place))

    def _pass(self, is_held: bool) -> int:
        num_copied = 0
        for place in self._missing():
            if self._is_over.is_set():
                break
            num_copied += self._copy(place, is_held)
        return num_copied

    def _copy(self, place: Place, is_held: bool) -> bool:
        table, (call_index, expert) = self._backup.table, place
        if not table.begin(place):
            return False
        try:
            checksum = self._copy_out(call_index, expert, self._backup.address(place), is_held)
            if checksum is not None:
                table.complete(place, expert, checksum)
            return checksum is not None
        except Exception:
            log.exception("expert %d of call %d could not be copied to the backup", expert, call_index)
            return False
        finally:
            table.end(place)
