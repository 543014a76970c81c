"""Who is here: the processes and workers of one serving instance."""

from enum import StrEnum

import msgspec

from everserve.tables.ids import Epoch, Incarnation, Rank


class WorkerState(StrEnum):
    """starting -> ready -> gone. A new process in the seat is a new incarnation, starting again."""

    STARTING = "starting"
    READY = "ready"
    GONE = "gone"


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is not a worker."""

    name: str
    pid: int


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One seat and the process in it."""

    rank: Rank
    incarnation: Incarnation
    pid: int
    roles: tuple[str, ...]
    state: WorkerState


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """The whole instance at one epoch."""

    epoch: Epoch
    processes: tuple[Process, ...]
    workers: tuple[Worker, ...]

    def __post_init__(self) -> None:
        ranks = [worker.rank for worker in self.workers]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"two workers share a rank: {sorted(ranks)}")

    def violations(self) -> tuple[str, ...]:
        """Why this instance cannot serve as it is; empty = valid."""
        roles_ready = {role for worker in self.workers if worker.state is WorkerState.READY for role in worker.roles}
        missing = [role for role in ("attention", "expert") if role not in roles_ready]
        return tuple(f"no ready worker has the role {role}" for role in missing)
