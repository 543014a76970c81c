"""An orchestrator in a thread; supervisor, gateway, anchor and workers are ends of channels that the test plays."""

import gc
import os
import selectors
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from everserve.control.host import Host
from everserve.memory.liveness import CELL_BYTES
from everserve.model.bundled import DEMO_MODEL
from everserve.tables.ids import Epoch, Incarnation, Rank, Role, WorkerId
from everserve.wire.channel import Channel, ChannelClosed, Frame
from everserve.wire.messages import (
    Allocate,
    Allocated,
    AnchorAttached,
    AnyMessage,
    FoundProcess,
    Hello,
    PeerJoined,
    Provision,
    Ready,
    Report,
    RoutesChanged,
    Shutdown,
    StartOrchestrator,
    StartWorker,
    WorkerExited,
    WorkerSettings,
    WorkerStarted,
)
from tests.unit.supervisor_toy import new_memory

SETTINGS = WorkerSettings(
    model=str(DEMO_MODEL), dtype="auto", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16,
    max_prefill_while_decoding=16, block_size=16, kv_cache_bytes=1 << 22, kv_log="mirror", enable_prefix_caching=False,
    batch_invariant=False, num_threads=1, fixed_routes=(0, 0), event_log=None,
)  # fmt: skip
_WITHIN_S = 60.0
_Message = TypeVar("_Message", bound=AnyMessage)


def open_fds() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


def same_memory(one: int, other: int) -> bool:
    return os.fstat(one).st_ino == os.fstat(other).st_ino


class Mailbox:
    """Our end of one of the orchestrator's channels, and all that has come through it."""

    def __init__(self, orchestrator: "Orchestrator", channel: Channel) -> None:
        self._orchestrator = orchestrator
        self.channel = channel
        self.frames: list[Frame] = []

    def send(self, message: AnyMessage, fds: Sequence[int] = ()) -> None:
        self.channel.send(message, fds)

    def all(self, kind: type[_Message]) -> list[_Message]:
        return [frame.message for frame in self.frames if isinstance(frame.message, kind)]

    def get(self, kind: type[_Message], num: int = 1) -> _Message:
        """The last of so many messages of this kind, as soon as it is there."""
        self._orchestrator.until(lambda: len(self.all(kind)) >= num)
        return self.all(kind)[num - 1]

    def wait_for(self, message: AnyMessage) -> None:
        self._orchestrator.until(lambda: message in self.all(type(message)))

    def fds_of(self, message: AnyMessage) -> list[int]:
        """What came with it; the caller's from now on."""
        self.wait_for(message)
        return next(frame for frame in self.frames if frame.message == message).fds.take()


class Worker(Mailbox):
    """One incarnation, as the supervisor has started it."""

    def __init__(self, orchestrator: "Orchestrator", start: StartWorker, memory: list[int]) -> None:
        ours, self._theirs = Channel.pair()
        super().__init__(orchestrator, Channel(ours))
        self.start, self.memory = start, memory
        self.id = WorkerId(start.rank, start.incarnation)
        self.pid = 1000 * start.incarnation + start.rank

    def introduce(self) -> "Worker":
        """By the supervisor."""
        started = WorkerStarted(start=self.start, pid=self.pid)
        self._orchestrator.supervisor.send(started, fds=[self._theirs.fileno(), *self.memory])
        self._theirs.close()
        return self

    def exit(self, status: int = -9) -> None:
        self.channel.close()
        rank, incarnation = self.id
        self._orchestrator.supervisor.send(WorkerExited(rank=rank, incarnation=incarnation, exit_status=status))


class Orchestrator:
    """The host and its surroundings. The anchor answers by itself, unless it `is_silent`."""

    def __init__(
        self,
        num_attention: int = 1,
        num_expert: int = 2,
        found: tuple[FoundProcess, ...] | None = None,
        with_anchor: bool = True,
    ) -> None:
        self._fds_before = open_fds()
        self._selector = selectors.DefaultSelector()
        self._failure: BaseException | None = None
        self._boxes: list[Mailbox] = []
        self._anchors: list[Mailbox] = []
        self.is_silent = False
        self.num_workers = num_attention + num_expert
        supervisor, gateway = Channel.pair(), Channel.pair()
        self.supervisor = self._listen(Mailbox(self, Channel(supervisor[1])))
        self.gateway = self._listen(Mailbox(self, Channel(gateway[1])))
        start = StartOrchestrator(
            model=str(DEMO_MODEL),
            num_attention=num_attention,
            num_expert=num_expert,
            shadow_experts=None,
            detect_ms=0.0,
            worker=SETTINGS,
            event_log=None,
            found=found,
            is_serving=found is not None,
        )
        host = Host(start, Channel(supervisor[0]), Channel(gateway[0]))
        self._host = weakref.ref(host)
        self._thread = threading.Thread(target=self._run, args=(host,))
        self._thread.start()
        if with_anchor:
            self.new_anchor()

    def _run(self, host: Host) -> None:
        try:
            host.run()
        except ChannelClosed:
            pass
        except BaseException as error:
            self._failure = error.with_traceback(None)

    # What the test plays

    def _listen(self, box: Mailbox) -> Mailbox:
        self._boxes.append(box)
        self._selector.register(box.channel, selectors.EVENT_READ, box)
        return box

    @property
    def anchor(self) -> Mailbox:
        return self._anchors[-1]

    def new_anchor(self) -> Mailbox:
        """The one before is dead, if there was one."""
        if self._anchors:
            self._hang_up(self.anchor)
        ours, theirs = Channel.pair()
        self._anchors.append(self._listen(Mailbox(self, Channel(ours))))
        self.supervisor.send(AnchorAttached(), fds=[theirs.fileno()])
        theirs.close()
        return self.anchor

    def _hang_up(self, box: Mailbox) -> None:
        if box.channel.fileno() >= 0 and box.channel in [key.fileobj for key in self._selector.get_map().values()]:
            self._selector.unregister(box.channel)
        box.channel.close()

    def start_worker(self, num_asked: int) -> Worker:
        """The process exists for which the supervisor was asked with that Provision."""
        order = self.supervisor.get(Provision, num_asked)
        frame = [frame for frame in self.supervisor.frames if isinstance(frame.message, Provision)][num_asked - 1]
        return self.add(Worker(self, order.start, frame.fds.take()))

    def add(self, worker: Worker) -> Worker:
        self._listen(worker)
        return worker.introduce()

    def introduce(self, start: StartWorker) -> Worker:
        """A worker that an orchestrator before has ordered."""
        memory = [new_memory(CELL_BYTES), *(new_memory(1 << 20) for _ in start.memory)]
        return self.add(Worker(self, start, memory))

    def start_all(self) -> list[Worker]:
        """Every worker of a new instance, ready; in the order of ranks."""
        workers = [self.start_worker(num) for num in range(1, self.num_workers + 1)]
        for worker in workers:
            worker.send(Hello())
        for worker in workers:
            worker.send(Ready())
        self.supervisor.get(Ready)
        return sorted(workers, key=lambda worker: worker.id)

    # Time

    def until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + _WITHIN_S
        while not condition():
            assert time.monotonic() < deadline_s, "it does not happen"
            if self._failure is not None:
                raise self._failure
            self._pump()

    def _pump(self) -> None:
        for key, _ in self._selector.select(0.05):
            box = key.data
            try:
                new = list(box.channel.receive_frames())
            except ChannelClosed:
                self._selector.unregister(box.channel)
                continue
            box.frames += new
            if box in self._anchors and not self.is_silent:
                self._allocate([frame.message for frame in new])

    def _allocate(self, messages: list[AnyMessage]) -> None:
        for message in messages:
            if isinstance(message, Allocate):
                fd = new_memory(message.num_bytes)
                self.anchor.send(Allocated(name=message.name), fds=[fd])
                os.close(fd)

    def wait_for_end(self) -> None:
        self.until(lambda: not self._thread.is_alive())

    def close(self) -> None:
        """Its process would end here, and its descriptors with it."""
        if self._thread.is_alive():
            self.supervisor.send(Shutdown(grace_s=0.0))
        self._thread.join(timeout=_WITHIN_S)
        assert not self._thread.is_alive(), "it was told to end"
        for box in self._boxes:
            box.channel.close()
            for fd in box.memory if isinstance(box, Worker) else ():
                os.close(fd)
            box.frames.clear()
        self._selector.close()
        gc.collect()
        assert self._host() is None
        for fd in open_fds() - self._fds_before:
            with suppress(OSError):  # one was that of the directory that was listed
                os.close(fd)
        if self._failure is not None:
            raise self._failure


def report(*, epoch: int, peers: Sequence[WorkerId] = (), logs: Sequence[WorkerId] = ()) -> Report:
    """Of a worker that is ready."""
    return Report(is_ready=True, is_leaving=False, epoch=Epoch(epoch), peers=list(peers), logs=list(logs))


def start_worker(rank: int, incarnation: int, roles: tuple[Role, ...]) -> StartWorker:
    """As an orchestrator before has ordered it."""
    return StartWorker(
        rank=Rank(rank),
        incarnation=Incarnation(incarnation),
        roles=roles,
        settings=SETTINGS,
        num_workers=3,
        slots=None,
        detect_ms=0.0,
        memory=(f"log-{rank}.{incarnation}",) if Role.ATTENTION in roles else (),
    )


def found(*workers: tuple[int, int, int]) -> tuple[FoundProcess, ...]:
    """(rank, incarnation, pid)"""
    return tuple(FoundProcess(rank=Rank(r), incarnation=Incarnation(i), pid=pid) for r, i, pid in workers)


def joined(worker: Worker) -> PeerJoined:
    return PeerJoined(rank=worker.start.rank, incarnation=worker.start.incarnation, roles=worker.start.roles)


def ranks_in(routes: RoutesChanged) -> set[int]:
    """Whom these routes name."""
    return set(routes.routes.array()[..., 0].ravel().tolist()) - {-1}


ATTENTION, EXPERT = (Role.ATTENTION,), (Role.EXPERT,)
