"""Which workers may need which memory of others.

    a log, and its blocks           attention workers: they restore the streams of one that is lost
    weights, and their slot table   expert workers: they copy experts, or compute with them where they are
    pools of heads' KV, mirrors     those who fetch KV: on CPUs expert workers, on a GPU attention workers
    and parities

All of them only on the host that the memory is on: what is on another host cannot be mapped.
"""

from collections.abc import Callable
from dataclasses import dataclass

from everserve.control.hold.needs import Needs
from everserve.control.hold.worker_ends import WorkerEnd
from everserve.tables.goal import Goal
from everserve.tables.ids import Role
from everserve.tables.memory import Kind, MemoryName


@dataclass(frozen=True)
class Readers:
    """Called with a worker and a piece of memory."""

    needs: Needs
    goal: Callable[[], Goal]

    def __call__(self, end: WorkerEnd, memory: MemoryName) -> bool:
        if not memory.owners or memory.host != end.host:
            return False
        role = Role.ATTENTION if Role.ATTENTION in end.roles else Role.EXPERT
        owner = memory.owners[0]
        match memory.kind:
            case Kind.LOG | Kind.KV:
                return role is Role.ATTENTION and end.id != owner
            case Kind.KV_PIECES | Kind.KV_MIRROR | Kind.KV_PARITY:
                return role is self.needs.fetches_kv and end.rank != owner.rank
            case Kind.WEIGHTS | Kind.WEIGHTS_STATE:
                return role is Role.EXPERT and end.rank != owner.rank and self._is_of_experts(memory)
        return False

    def _is_of_experts(self, memory: MemoryName) -> bool:
        """Memory that a seat had in an earlier role, and that other workers still use, is not."""
        return memory.need in self.needs.expert_weights(self.goal(), memory.owners[0].rank)
