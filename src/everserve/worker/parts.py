"""What a worker is made of: its surroundings, and what is built for its role in them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from everserve.datapath.trust import Peers
from everserve.engine.engine import Engine
from everserve.runtime.events import EventLog
from everserve.runtime.liveness import Cell, Warden
from everserve.runtime.messages import StartWorker
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.symptoms import Symptom
from everserve.worker.control import ControlEnd
from everserve.worker.leaving import LeaveRequest
from everserve.worker.loading import Loading
from everserve.worker.logs import KeptLogs
from everserve.worker.pausing import PausingCheckpoint

_NO_DETECTION_MS = 1000.0  # with --detect-ms 0: how often to look at the control socket while waiting for an answer


@dataclass(frozen=True)
class Surroundings:
    """What every worker has, whatever it computes with."""

    start: StartWorker
    memory: dict[str, int]  # descriptors by kind (runtime/memories.py); whoever uses one closes it
    cell: Cell
    warden: Warden
    control: ControlEnd
    leave: LeaveRequest
    events: EventLog
    loading: Loading
    on_control: Callable[[], None]
    on_suspect: Callable[[Rank, Incarnation, Symptom], None]
    on_replay: Callable[[Rank, int, int], None]

    @property
    def detect_ms(self) -> float:
        return self.start.detect_ms or _NO_DETECTION_MS


class SeamExperts(Protocol):
    """Experts in other processes, as the loop sees them."""

    num_replayed_rows: int

    def rest(self) -> None:
        """There is nothing to compute for a while."""


@dataclass(frozen=True)
class Seam:
    """How an attention worker reaches its experts when they are in other processes."""

    peers: Peers
    experts: SeamExperts


@dataclass(frozen=True)
class AttentionParts:
    """An attention worker, ready to run."""

    engine: Engine
    seam: Seam | None
    logs: KeptLogs
    ops_name: str
    num_slots: int  # expert slots per layer of its own
    pausing: PausingCheckpoint | None = None
    sends_late: bool = False  # outputs of a step are sent while the next one runs: the host is idle then
