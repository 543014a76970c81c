"""The orchestrator's side of its workers: channel, cell, and the lanes between workers.

The states of a worker here:

    started (its process exists) -> connected (sent Hello) -> loaded (sent Ready; its lanes are being allocated)
        -> ready (has opened all of them) -> ... -> lost (fenced, until its process has ended) -> forgotten

A worker that was started before this orchestrator sends Report instead of Hello, and may have lanes already.

On a device all processes map memory under one lock of the driver, and to begin to use a device takes that lock for a
large part of a second. So lanes are handed out late: a worker's peers, whose streams wait while they map one, do so
when it has loaded. And it counts as ready when its own are open: the next step of all its peers needs it.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from everserve.control.decide.effects import Publish
from everserve.control.decide.inputs import AnyInput, Said
from everserve.control.hold.needs import Needs
from everserve.memory.anchor_client import AnchorClient
from everserve.memory.liveness import Cell
from everserve.memory.names import lack
from everserve.tables.goal import Goal
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.memory import Kind, MemoryName
from everserve.tables.routes import Routes
from everserve.tables.routes_delta import delta_of
from everserve.wire.channel import Channel
from everserve.wire.messages import (
    AnyMessage,
    Failed,
    LanesSent,
    Offer,
    PeerJoined,
    PeerLeft,
    Ready,
    Report,
    RoutesChanged,
    RoutesPatched,
)


@dataclass(eq=False)
class WorkerEnd:
    """The orchestrator's side of one worker process."""

    rank: Rank
    incarnation: Incarnation
    roles: tuple[Role, ...]
    pid: int
    cell_fd: int  # held by the anchor client
    cell: Cell
    control: Channel | None  # None after end of file
    host: int = 0
    report: Report | None = None
    has_said_hello: bool = False
    has_lanes: bool = False  # it has loaded, and they are allocated or will be
    waits_for: set[MemoryName] = field(default_factory=set)  # lanes that are still being allocated
    were_lanes_sent: bool = False
    is_ready: bool = False
    offered: set[MemoryName] = field(default_factory=set)  # memory of others that it can open
    is_lost: bool = False
    routes: Routes | None = None  # that it was told last

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.rank, self.incarnation)

    @property
    def is_connected(self) -> bool:
        return self.has_said_hello and self.control is not None and not self.is_lost

    def send(self, message: AnyMessage, fds: tuple[int, ...] = ()) -> None:
        """Send the message and ring: a worker in the middle of a layer polls its cell, not its socket."""
        if self.control is not None:
            self.control.send(message, fds)
            self.cell.ring_control()

    def flush(self) -> None:
        """Write what the kernel did not take at once, and ring again: the worker may have read its socket too early."""
        if self.control is not None and self.control.wants_write:
            self.control.flush()
            self.cell.ring_control()

    def close(self) -> None:
        self.cell.close()
        if self.control is not None:
            self.control.close()
            self.control = None


class WorkerEnds:
    """All incarnations whose process may still exist."""

    def __init__(
        self,
        anchor: AnchorClient,
        needs: Needs,
        goal: Callable[[], Goal],
        tell: Callable[[AnyInput], None],
    ) -> None:
        self._anchor = anchor
        self._needs = needs
        self._goal = goal
        self._tell = tell  # reports ready workers, and lanes that could not be allocated
        self._ends: dict[WorkerId, WorkerEnd] = {}
        self._lanes: dict[MemoryName, tuple[WorkerEnd, WorkerEnd]] = {}  # attention end, expert end

    def __iter__(self) -> Iterator[WorkerEnd]:
        return iter(list(self._ends.values()))

    def get(self, worker: WorkerId) -> WorkerEnd | None:
        return self._ends.get(worker)

    def add(self, end: WorkerEnd) -> None:
        self._ends[end.id] = end

    def give_lanes(self, end: WorkerEnd) -> None:
        """The worker has loaded: allocate a lane to every peer of the other role that has, where there is none yet."""
        end.has_lanes = True
        for other in self:
            pair = _pair(end, other)
            if pair is not None and other.is_connected and other.has_lanes:
                lane = self._needs.lane(self._goal(), pair[0].id, pair[1].id)
                self._lanes[lane] = pair
                if not _have_a_lane(end, other):
                    end.waits_for.add(lane)
                    self._anchor.allocate(
                        lane,
                        then=functools.partial(self._hand_out, lane, end),
                        otherwise=functools.partial(self._lack_lane, end),
                    )
        self._see_lanes(end)

    def say_ready(self, end: WorkerEnd) -> None:
        """It has opened its lanes, or had them before this orchestrator began."""
        if not end.is_ready:
            end.is_ready = True
            self._tell(Said(end.rank, end.incarnation, Ready()))

    def dismiss_unknown_peers(self, end: WorkerEnd) -> None:
        """Remove peers that ended while there was no orchestrator to announce it."""
        for rank, incarnation in end.report.peers if end.report is not None else ():
            peer = self.get(WorkerId(rank, incarnation))
            if peer is None or peer.is_lost:
                end.send(PeerLeft(rank=rank, incarnation=incarnation))

    def part(self, lost: WorkerEnd) -> None:
        """This worker is lost: notify its peers, which no longer wait for lanes to it. If it has not answered since
        this orchestrator began, no lanes to it are known here: then its peers are those that have reported it."""
        lost.is_lost = True
        reported = {end for end in self if end.report is not None and lost.id in end.report.peers}
        for lane, pair in list(self._lanes.items()):
            if lost in pair:
                del self._lanes[lane]
                self._anchor.release(lane)
                peer = pair[0] if pair[1] is lost else pair[1]
                peer.send(PeerLeft(rank=lost.rank, incarnation=lost.incarnation))
                reported.discard(peer)
                peer.waits_for.discard(lane)
                self._see_lanes(peer)
        for peer in reported:
            peer.send(PeerLeft(rank=lost.rank, incarnation=lost.incarnation))

    def forget(self, end: WorkerEnd) -> None:
        """Its process has exited."""
        del self._ends[end.id]
        self._anchor.release(self._needs.cell(end.id, end.host))
        end.close()

    def _hand_out(self, lane: MemoryName, newer: WorkerEnd, lane_fd: int) -> None:
        """A lane is allocated: send it to both workers."""
        pair = self._lanes[lane]
        for end, peer in (pair, pair[::-1]):
            memory = {self._needs.cell(peer.id, peer.host): peer.cell_fd, lane: lane_fd}
            needs_bell = self._needs.bell(self._goal(), peer.rank)
            if needs_bell is not None and (bell := self._anchor.find(needs_bell)) is not None:
                memory[bell] = self._anchor.memory.descriptor(bell)
            for piece, fd in memory.items():
                end.send(Offer(memory=piece), fds=(fd,))
            end.send(PeerJoined(rank=peer.rank, incarnation=peer.incarnation, roles=peer.roles, memory=tuple(memory)))
        newer.waits_for.discard(lane)
        self._see_lanes(newer)

    def _lack_lane(self, end: WorkerEnd, reason: str) -> None:
        """Reported as a failure of the worker: while the instance starts, it ends with this line; later, the worker is
        replaced."""
        failed = Failed(reason=lack(end.rank, Kind.LANE, reason), user_error=True)
        self._tell(Said(end.rank, end.incarnation, failed))

    def _see_lanes(self, end: WorkerEnd) -> None:
        """If all its lanes have been sent, it opens them and says so. A worker that reports to a new orchestrator was
        ready before, if it had lanes at all."""
        if end.has_lanes and not end.waits_for and not end.were_lanes_sent:
            end.were_lanes_sent = True
            if end.report is not None:
                self.say_ready(end)
            else:
                end.send(LanesSent())


def send_routes(ends: Iterable[WorkerEnd], tables: Publish, *, whole: bool = False) -> None:
    """Sends routes to attention workers; the others need none. Nearly all have the same routes, and get the same
    changes of these; `whole`: all of them, whatever the workers have."""
    routes = tables.routes
    changes: dict[int, RoutesChanged | RoutesPatched] = {}
    for end in ends if routes is not None else ():
        if routes is not None and Role.ATTENTION in end.roles and end.is_connected:
            before = None if whole else end.routes
            if id(before) not in changes:
                changes[id(before)] = change_of(before, routes)
            end.send(changes[id(before)])
            end.routes = routes


def change_of(before: Routes | None, routes: Routes) -> RoutesChanged | RoutesPatched:
    """What to tell a worker that was told the routes `before`."""
    delta = delta_of(before, routes) if before is not None else None
    return RoutesChanged(routes=routes) if delta is None else RoutesPatched(delta=delta)


def _have_a_lane(one: WorkerEnd, other: WorkerEnd) -> bool:
    """Both workers must report it: the previous orchestrator may have died after sending the lane to one of them."""
    return (
        one.report is not None
        and other.report is not None
        and other.id in one.report.peers
        and one.id in other.report.peers
    )


def _pair(one: WorkerEnd, other: WorkerEnd) -> tuple[WorkerEnd, WorkerEnd] | None:
    """(attention, expert) if the two need a lane: a worker with both roles computes its experts itself."""
    for attention, expert in ((one, other), (other, one)):
        if Role.EXPERT not in attention.roles and Role.ATTENTION not in expert.roles:
            return attention, expert
    return None
