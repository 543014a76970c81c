"""A real orchestrator's host, and everything around it played by the test: supervisor, anchor, gateway, workers.

All of them talk through real channels with real descriptors. Nothing computes, and time only passes for real.
"""

import os
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from everserve.config.cluster import ClusterConfig
from everserve.control.run.orchestrator import Orchestrator
from everserve.memory.owned import OwnedMemory, create_memory
from everserve.model.bundled import DEMO_MODEL
from everserve.tables.ids import NO_DEVICE, Epoch, Incarnation, Rank, Role, WorkerId
from everserve.tables.memory import Kind, MemoryName
from everserve.tables.routes import Routes
from everserve.tables.routes_delta import KnownRoutes
from everserve.tables.slots import HeldSlots
from everserve.wire.channel import Channel, Descriptors
from everserve.wire.messages import (
    Allocate,
    AnchorAttached,
    Answered,
    AnyMessage,
    Ask,
    CarrierAttached,
    FoundProcess,
    GatewayReport,
    Hello,
    HostJoined,
    KeepGoal,
    LanesOpen,
    LanesSent,
    Offer,
    PeerJoined,
    Provision,
    Ready,
    Release,
    Report,
    RoutesChanged,
    RoutesPatched,
    SlotsReported,
    StartOrchestrator,
    StartWorker,
    Withdraw,
    WorkerExited,
    WorkerStarted,
)
from everserve.wire.operators import AnyRequest
from tests.support.configs import worker_settings

Message = TypeVar("Message")


def start_of(
    num_attention: int = 1,
    num_expert: int = 2,
    log_mode: str = "off",
    weights: str = "mapped",
    max_workers: int | None = None,
    **more,
) -> StartOrchestrator:
    backup = "host" if weights == "memory" else "off"
    return StartOrchestrator(
        cluster=ClusterConfig(  # nothing is silent
            attention_workers=num_attention, expert_workers=num_expert, max_workers=max_workers, detect_ms=0.0
        ),
        worker=worker_settings(directory=str(DEMO_MODEL), mode=log_mode, weights=weights, expert_backup=backup),
        **more,
    )


def held_at_start(start: StartWorker) -> HeldSlots:
    assert start.slots is not None
    return HeldSlots(experts=start.slots.experts, generations=tuple((1,) * len(s) for s in start.slots.experts))


@dataclass(eq=False)
class ToyWorker:
    """A worker process, as its channel shows it."""

    start: StartWorker
    pid: int
    control: Channel
    memory: list[int]  # descriptors: its cell first
    orchestrator: "ToyOrchestrator" = field(repr=False)
    got: list[AnyMessage] = field(default_factory=list)
    num_done: int = 0  # of the slots that this orchestrator has told it
    dropped: tuple[MemoryName, ...] = ()  # of its memory, as the supervisor knows
    opens_lanes: bool = True  # as soon as it has them
    offered: dict[MemoryName, int] = field(default_factory=dict)  # memory of others, and which file it is
    peers: dict[WorkerId, list[int]] = field(default_factory=dict)  # the files that it shares with each

    def __post_init__(self) -> None:
        self.slots = held_at_start(self.start) if self.start.slots is not None else None

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.start.rank, self.start.incarnation)

    def say(self, *messages: AnyMessage) -> None:
        for message in messages:
            self.control.send(message)
        self.orchestrator.settle()

    def come_up(self) -> None:
        """All that a worker says while it starts."""
        slots = [SlotsReported(slots=held_at_start(self.start))] if Role.ATTENTION not in self.start.roles else []
        self.say(Hello(), *slots, Ready())

    def report(self, epoch: int, peers: list[WorkerId], is_leaving: bool = False) -> Report:
        """To a new orchestrator."""
        self.num_done = 0
        report = Report(is_ready=True, is_leaving=is_leaving, epoch=Epoch(epoch), peers=peers, memory=[*self.offered])
        return msgspec.structs.replace(report, slots=self.slots)

    def heard(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.got if isinstance(message, kind)]

    def told_of(self, message: type[Offer | Withdraw], kind: Kind) -> list[WorkerId]:
        """The owners of memory of this kind that was offered to it, or withdrawn."""
        return [told.memory.owners[0] for told in self.heard(message) if told.memory.kind is kind]

    @property
    def routed(self) -> set[int]:
        """The ranks that its latest routes lead to."""
        return set(self.routes.array()[..., 0].ravel().tolist()) - {-1} if self.routes is not None else set()

    @property
    def routes(self) -> Routes | None:
        """As it knows them: it was told whole ones, and changes of these."""
        known, latest = KnownRoutes(), None
        for message in self.got:
            if isinstance(message, RoutesChanged):
                latest = known.take(message.routes)
            elif isinstance(message, RoutesPatched):
                latest = known.patch(message.delta)
                assert latest is not None, "it has the routes that the change is about"
        return latest


class ToyOrchestrator:
    """The host, and what has come out of it on each side."""

    def __init__(self, start: StartOrchestrator, workers: "dict[WorkerId, ToyWorker] | None" = None) -> None:
        self.start = start
        ours, theirs = Channel.pair()
        self.supervisor, to_supervisor = Channel(ours), Channel(theirs)
        ours, theirs = Channel.pair()
        self.gateway, to_gateway = Channel(ours), Channel(theirs)
        self.anchor: Channel | None = None
        self.owned = OwnedMemory()
        self.adopted: list[str] = []
        self.released: list[str] = []
        self.refused: set[Kind] = set()  # of memory, of which there is none
        self.to_supervisor: list[AnyMessage] = []
        self.to_gateway: list[AnyMessage] = []
        self.workers: dict[WorkerId, ToyWorker] = {}
        self.is_birth_held = False
        self.held_orders: list[tuple[StartWorker, list[int]]] = []
        self.host = Orchestrator(start, to_supervisor, to_gateway)
        self.attach_anchor()
        self.carrier: Channel | None = None
        if start.goal is not None and start.goal.hosts != {0}:
            self.attach_carrier(sorted(start.goal.hosts - {0}))
        for worker in (workers or {}).values():
            self.introduce(worker)
        self.host.begin()
        self.settle()

    # -- what surrounds it -----------------------------------------------------------------------

    def attach_anchor(self) -> None:
        """A (new) anchor, which owns nothing yet."""
        ours, theirs = Channel.pair()
        self.anchor = Channel(ours)
        self.owned = OwnedMemory()
        self.supervisor.send(AnchorAttached(), fds=[theirs.fileno()])
        theirs.close()

    def attach_carrier(self, hosts: list[int]) -> None:
        """What supervisor and anchor do here, it does for other hosts; all their memory is on this one."""
        ours, theirs = Channel.pair()
        self.carrier = Channel(ours)
        self.supervisor.send(CarrierAttached(), fds=[theirs.fileno()])
        theirs.close()
        for host in hosts:
            self.carrier.send(HostJoined(host=host, name=f"host-{host}", address=""))

    def introduce(self, worker: ToyWorker) -> None:
        """As the supervisor does, when a process is new or the orchestrator is."""
        ours, theirs = Channel.pair()
        worker.control, worker.orchestrator, worker.got = Channel(ours), self, []
        self.workers[worker.id] = worker
        started = WorkerStarted(start=worker.start, pid=worker.pid, dropped=worker.dropped)
        channel = self.supervisor if worker.start.host == 0 else self.carrier
        assert channel is not None
        channel.send(started, fds=[theirs.fileno(), *worker.memory])
        theirs.close()

    def exit(self, worker: ToyWorker, status: int = -9) -> None:
        """Its process ends: its channel does, and the supervisor says so."""
        worker.control.close()
        for fd in worker.memory:
            os.close(fd)
        del self.workers[worker.id]
        gone = WorkerExited(rank=worker.start.rank, incarnation=worker.start.incarnation, exit_status=status)
        self.supervisor.send(gone)
        self.settle()

    def settle(self) -> None:
        """Until nothing more comes of what was sent."""
        while True:
            self.host.turn(0.0)
            if not (
                self._read_supervisor()
                + self._read_anchor()
                + self._read_carrier()
                + self._read_gateway()
                + self._read_workers()
            ):
                return

    def ask(self, request: AnyRequest) -> Answered:
        """For an operator, through the gateway."""
        self.gateway.send(Ask(id=f"{len(self.told(Answered))}", request=request))
        self.settle()
        return self.told(Answered)[-1]

    def _read_supervisor(self) -> int:
        frames = [(message, fds.take()) for message, fds in self.supervisor.receive_frames()]
        for message, fds in frames:
            self.to_supervisor.append(message)
            if isinstance(message, Provision):
                self.held_orders.append((message.start, fds))
        if not self.is_birth_held:
            self.give_birth()
        self.supervisor.flush()
        return len(frames)

    def give_birth(self) -> None:
        """The processes that were asked for exist."""
        orders, self.held_orders = self.held_orders, []
        for start, fds in orders:
            pid = 1000 * start.incarnation + start.rank
            self.introduce(ToyWorker(start, pid, self.supervisor, fds, self))

    def _read_anchor(self) -> int:
        assert self.anchor is not None
        return self._read_orders(self.anchor)

    def _read_carrier(self) -> int:
        return self._read_orders(self.carrier) if self.carrier is not None else 0

    def _read_orders(self, channel: Channel) -> int:
        frames: list[tuple[AnyMessage, Descriptors]] = list(channel.receive_frames())
        for message, fds in frames:
            if isinstance(message, Allocate) and message.memory.kind in self.refused:
                channel.send(Withdraw(memory=message.memory, reason="out of memory"))
            elif isinstance(message, Allocate):
                channel.send(Offer(memory=message.memory), fds=[self._allocate(message.memory)])
            elif isinstance(message, Provision):  # of another host
                self.held_orders.append((message.start, fds.take()))
            elif isinstance(message, Offer):
                (fd,) = fds.take()
                self.owned.adopt(message.memory, fd)
                os.close(fd)
                self.adopted.append(message.memory.name)
            elif isinstance(message, Release):
                self.owned.release(message.memory)
                self.released.append(message.memory.name)
        return len(frames)

    def _allocate(self, memory: MemoryName) -> int:
        """Memory of a device is the host's here."""
        if memory.gpu != NO_DEVICE:
            fd = create_memory(memory.name, memory.num_bytes)
            self.owned.adopt(memory, fd)
            os.close(fd)
        return self.owned.allocate(memory)

    def _read_gateway(self) -> int:
        messages = self.gateway.receive_all()
        self.to_gateway += messages
        return len(messages)

    def _read_workers(self) -> int:
        num_messages = 0
        for worker in list(self.workers.values()):
            frames = list(worker.control.receive_frames())
            for message, fds in frames:
                worker.got.append(message)
                files = [os.fstat(fd).st_ino for fd in fds.numbers]
                fds.close()
                if isinstance(message, Offer):
                    (worker.offered[message.memory],) = files
                elif isinstance(message, Withdraw):
                    worker.offered.pop(message.memory, None)
                elif isinstance(message, PeerJoined):
                    worker.peers[WorkerId(message.rank, message.incarnation)] = [
                        worker.offered.pop(piece) for piece in message.memory
                    ]
                if isinstance(message, LanesSent) and worker.opens_lanes:
                    worker.control.send(LanesOpen())
            num_messages += len(frames)
        return num_messages

    # -- what is seen of it ----------------------------------------------------------------------

    def worker(self, rank: int, incarnation: int = 1) -> ToyWorker:
        return self.workers[WorkerId(Rank(rank), Incarnation(incarnation))]

    def said(self, kind: type[Message]) -> list[Message]:
        """To the supervisor."""
        return [message for message in self.to_supervisor if isinstance(message, kind)]

    def told(self, kind: type[Message]) -> list[Message]:
        """To the gateway."""
        return [message for message in self.to_gateway if isinstance(message, kind)]


def serving(
    num_attention: int = 1,
    num_expert: int = 2,
    log_mode: str = "off",
    weights: str = "mapped",
    max_workers: int | None = None,
) -> ToyOrchestrator:
    """All workers are ready."""
    orchestrator = ToyOrchestrator(start_of(num_attention, num_expert, log_mode, weights, max_workers))
    for worker in list(orchestrator.workers.values()):
        worker.come_up()
    assert len(orchestrator.said(Ready)) == 1
    return orchestrator


def succeed(
    before: ToyOrchestrator,
    epoch: int,
    gone: list[WorkerId],
    late: tuple[WorkerId, ...] = (),
    logs: tuple[WorkerId, ...] = (),
) -> ToyOrchestrator:
    """The orchestrator has died, and these workers with it. The next one is told what the supervisor has, and hears
    from all workers that live but the late ones, and from the gateway, whose streams need these logs."""
    workers = {id: worker for id, worker in before.workers.items() if id not in gone}
    found = [
        FoundProcess(rank=id.rank, incarnation=id.incarnation, pid=worker.pid, roles=worker.start.roles)
        for id, worker in workers.items()
    ]
    found += [FoundProcess(rank=id.rank, incarnation=id.incarnation, pid=-1) for id in gone]
    goal = before.said(KeepGoal)[-1].goal
    start = msgspec.structs.replace(before.start, found=tuple(found), goal=goal, is_serving=True)
    after = ToyOrchestrator(start, workers)
    for id, worker in workers.items():
        if id not in late:
            peers = [other for other, peer in before.workers.items() if peer.start.roles != worker.start.roles]
            worker.say(worker.report(epoch, peers))
    after.gateway.send(GatewayReport(epoch=Epoch(epoch), logs=list(logs), lost=[]))
    after.settle()
    return after
