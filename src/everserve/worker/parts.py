"""The components of a worker: what every worker has, and what a backend builds for its role."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from everserve.engine.engine import Engine
from everserve.memory.liveness import Cell, Warden
from everserve.seam.experts import Experts
from everserve.seam.healing import Reports
from everserve.seam.trust import Peers
from everserve.tables.ids import Rank
from everserve.tables.memory import Kind
from everserve.wire.channel import Channel
from everserve.wire.event_log import EventLog
from everserve.wire.messages import StartWorker
from everserve.worker.control import ControlEnd, LeaveRequest
from everserve.worker.expert_service import ExpertService
from everserve.worker.loading import Loading
from everserve.worker.logs import KeptLogs

_NO_DETECTION_MS = 1000.0  # with --detect-ms 0: how often to check the control socket while waiting for an answer


@dataclass(frozen=True)
class Surroundings:
    """What every worker has, independent of role and backend."""

    start: StartWorker
    memory: dict[Kind, int]  # descriptors by kind; the part that uses one closes it
    cell: Cell
    warden: Warden
    control: ControlEnd
    leave: LeaveRequest
    events: EventLog
    loading: Loading
    reports: Reports

    @property
    def detect_ms(self) -> float:
        return self.start.detect_ms or _NO_DETECTION_MS


@dataclass(frozen=True)
class Seam:
    """How an attention worker calls experts in other processes."""

    peers: Peers
    experts: Experts


class OfferedKv(Protocol):
    """Memory with heads' KV that an attention worker fetches from: on a GPU."""

    def offer(self, rank: Rank, kind: Kind, fd: int) -> None:
        """It is there, instead of what was there before. Takes over the descriptor."""

    def withdraw(self, rank: Rank, kind: Kind) -> None:
        """It is lost."""

    def sweep(self) -> None:
        """Between two steps: map and unmap what there is."""


@dataclass(frozen=True)
class AttentionParts:
    """An attention worker, ready to run."""

    engine: Engine
    seam: Seam | None
    logs: KeptLogs
    ops_name: str
    num_slots: int  # own expert slots per layer
    sends_late: bool = False  # outputs of a step are sent while the next one runs: the host is idle then
    kv: OfferedKv | None = None


class Backend(Protocol):
    """Everything that depends on the kind of device: backends/cpu/roles.py, backends/cuda/roles.py."""

    def prepare(self) -> None:
        """In the zygote: do slow work that is the same for all workers. Must not start threads."""

    def rehearse(self, like: Sequence[StartWorker], lifeline: Channel) -> None:
        """In a spare: do slow work that is the same for all workers of these kinds."""

    def build_attention(self, around: Surroundings) -> AttentionParts:
        """Build an attention worker."""

    def build_expert(self, around: Surroundings) -> tuple[ExpertService, str]:
        """Build an expert worker; also returns the name of its ops."""
