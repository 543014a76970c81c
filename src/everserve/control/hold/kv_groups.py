"""Which worker keeps the parity of which heads' KV (--kv-shadow parity), told to workers when heads have new places.

A worker that gets new groups writes their parity over that of the old ones. After a loss that would be what lost KV is
rebuilt from. So new groups are told only when nothing is to be fetched any more that needs the old ones:

    every head has a place
    every home has acknowledged the routes: it does so after it has fetched the KV of heads that have moved
    no stream needs the log of a worker that was lost: those still to be restored would be fetched too

Until then a further loss is survived by computing KV again, as two losses at once are.
"""

from collections.abc import Mapping

from everserve.control.decide.effects import Publish
from everserve.control.decide.machine import Machine
from everserve.control.hold.log_references import Logs
from everserve.control.hold.worker_ends import WorkerEnds
from everserve.plan.parity import Head, parity_groups
from everserve.tables.calls import ShardKind
from everserve.tables.ids import NO_RANK, Epoch, Rank, Role, WorkerId
from everserve.tables.members import WorkerState
from everserve.tables.routes import Routes
from everserve.wire.messages import KvGrouped

_ByHome = list[list[list[Head]]]


class KvGroups:
    """Looks at the tables once in every turn. `num_homes`: as many as block ranges."""

    def __init__(self, ends: WorkerEnds, logs: Logs, num_homes: int) -> None:
        self._ends = ends
        self._logs = logs
        self._num_homes = num_homes
        self._epoch = Epoch(-1)
        self._wanted: dict[Rank, _ByHome] = {}
        self._told: dict[WorkerId, _ByHome] = {}

    def flush(self, machine: Machine) -> None:
        tables = machine.tables()
        if self._logs.has_lost or not _is_settled(tables):
            return
        if tables.members.epoch != self._epoch:
            self._epoch = tables.members.epoch
            self._wanted = self._plan(machine, tables)
            self._told = {end.id: self._told[end.id] for end in self._ends if end.id in self._told}
        for end in self._ends:
            wanted = self._wanted.get(end.rank)
            if wanted is not None and end.is_ready and not end.is_lost and self._told.get(end.id) != wanted:
                end.send(KvGrouped(groups=wanted))
                self._told[end.id] = wanted

    def _plan(self, machine: Machine, tables: Publish) -> dict[Rank, _ByHome]:
        """Groups by worker and home. Homes may ask different workers for a head that is dealt."""
        assert tables.routes is not None and machine.goal.placement is not None
        calls = [(i, call) for i, call in enumerate(machine.goal.placement.calls) if call.kind is ShardKind.HEAD]
        ready = {w.rank for w in tables.members.workers if w.state is WorkerState.READY and w.roles == (Role.EXPERT,)}
        device_of = {seat.rank: seat.device for seat in machine.goal.seats if seat.rank in ready}
        found: dict[Rank, _ByHome] = {rank: [[] for _ in range(self._num_homes)] for rank in device_of}
        for home in range(self._num_homes):
            places = _places(tables.routes, Rank(home), {(call.layer, i): call.num_shards for i, call in calls})
            there = {head: rank for head, rank in places.items() if rank in device_of}
            for group in parity_groups(there, device_of):
                found[group.keeper][home].append(list(group.members))
        return found


def _is_settled(tables: Publish) -> bool:
    routes = tables.routes
    return routes is not None and not routes.num_without_place and not tables.conditions.epochs


def _places(routes: Routes, home: Rank, calls: Mapping[tuple[int, int], int]) -> dict[Head, Rank]:
    """Where this home asks for each head. `calls`: (layer, index) -> number of heads."""
    first_LE = routes.seen_by(home)[:, :, 0, 0]
    return {
        (layer, head): Rank(int(first_LE[index, head]))
        for (layer, index), num_heads in calls.items()
        for head in range(num_heads)
        if first_LE[index, head] != NO_RANK
    }
