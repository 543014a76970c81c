"""A worker from the fork to its loop."""

import gc
import logging
import os
import time
from collections.abc import Callable, Sequence

from everserve.engine.engine import Engine
from everserve.errors import UserError
from everserve.guides.compiling import VERSION
from everserve.memory.liveness import Cell, Warden
from everserve.procs.scarcity import is_scarcity
from everserve.procs.scarcity import last_words as scarcity_words
from everserve.seam.healing import Reports
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.tables.memory import Kind
from everserve.tables.routes import Symptom
from everserve.wire.channel import Channel
from everserve.wire.event_log import EventLog
from everserve.wire.events import RowsReplayed, SuspectedEvent, WorkerBecameReady
from everserve.wire.messages import EventHappened, Failed, Hello, Ready, StartWorker, Suspected, WorkerReady
from everserve.words import count
from everserve.worker.attention import AttentionLoop
from everserve.worker.control import ControlEnd, LeaveRequest
from everserve.worker.expert_service import ExpertService
from everserve.worker.guiding import Guiding
from everserve.worker.loading import Loading
from everserve.worker.parts import Backend, Surroundings
from everserve.worker.shortage import last_words

log = logging.getLogger(__name__)

_NO_DETECTION_MS = 1000.0  # with --detect-ms 0: how often to check the control socket while waiting for an answer


def run(start: StartWorker, fds: list[int], backend: Backend) -> int:
    """Runs the worker process: load, report ready, and run the loop. Returns the exit status."""
    began_s = time.monotonic()
    cell_fd, control_fd, lifeline_fd, *others = fds
    num_gateways = len(others) - len(start.memory)
    fds_of_memory = others[num_gateways:]
    memory = {piece.kind: fd for piece, fd in zip(start.memory, fds_of_memory, strict=True)}
    cell = Cell(cell_fd)
    os.close(cell_fd)
    control = ControlEnd(Channel.of_fd(control_fd), Channel.of_fd(lifeline_fd))
    leave = LeaveRequest()
    warden = Warden(cell, start.detect_ms or _NO_DETECTION_MS)
    if start.detect_ms:
        try:
            warden.start()
        except OSError as error:
            if not is_scarcity(error):
                raise
            control.send(scarcity_words(error))
            return os.EX_TEMPFAIL
    control.send(Hello())
    events = EventLog(
        f"worker-{start.rank}", start.settings.event_log, lambda event: control.send(EventHappened(event=event))
    )
    worker = Worker(start, backend, memory, cell, warden, control, leave, events, began_s)
    try:
        if Role.ATTENTION in start.roles:
            worker.run_attention([Channel.of_fd(fd) for fd in others[:num_gateways]])
        else:
            worker.run_expert()
    except UserError as error:
        control.send(Failed(reason=str(error), user_error=True))
        return 1
    except Exception as error:
        reason, is_users = last_words(start.rank, error)
        is_temporary = is_scarcity(error) and not is_users
        control.send(Failed(reason=reason, user_error=is_users, is_temporary=is_temporary))
        if is_temporary:
            return os.EX_TEMPFAIL
        raise  # with a traceback
    return 0


class Worker:
    """A worker process in one of its roles."""

    def __init__(
        self,
        start: StartWorker,
        backend: Backend,
        memory: dict[Kind, int],
        cell: Cell,
        warden: Warden,
        control: ControlEnd,
        leave: LeaveRequest,
        events: EventLog,
        began_s: float,
    ) -> None:
        self._start = start
        self._backend = backend
        self._control = control
        self._events = events
        self._began_s = began_s
        self._on_control: Callable[[], None] = lambda: None  # set to the loop's handler, once there is one
        self._around = Surroundings(
            start,
            memory,
            cell,
            warden,
            control,
            leave,
            events,
            Loading(start, events),
            Reports(self._read_control, self._on_suspect, self._on_replay),
        )

    def run_attention(self, gateways: Sequence[Channel]) -> None:
        """Run as an attention worker: owns requests and their KV."""
        parts = self._backend.build_attention(self._around)
        guiding = Guiding(self._start.settings.model.directory, parts.engine.limits.vocab_size)
        hello = self._hello(parts.engine, shares_workers=parts.seam is not None)
        loop = AttentionLoop(self._around, parts, gateways, guiding, hello)
        self._on_control = loop.read_control
        for gateway in gateways:
            gateway.send(hello)
        self._say_ready(parts.ops_name, parts.engine.limits.num_blocks, parts.num_slots)
        loop.run()

    def run_expert(self) -> None:
        """Run as an expert worker: owns expert slots."""
        assert self._start.slots is not None, "an expert worker is told its slots"
        service, ops_name = self._backend.build_expert(self._around)
        self._offer_backup(service)
        service.report_slots()
        self._say_ready(ops_name, num_blocks=0, num_slots=self._start.slots.num_slots)
        service.run()

    def _offer_backup(self, service: ExpertService) -> None:
        """Unless the backend has taken the backup already, to load from it."""
        memory = self._around.memory
        for piece in self._start.memory:
            if piece.kind is Kind.BACKUP and Kind.BACKUP in memory:
                service.slots.offer(None, piece, [memory.pop(kind) for kind in (Kind.BACKUP, Kind.BACKUP_STATE)])

    def _read_control(self) -> None:
        self._on_control()

    def _on_suspect(self, rank: Rank, incarnation: Incarnation, reason: Symptom) -> None:
        self._control.send(Suspected(rank=rank, incarnation=incarnation, reason=reason))
        self._events.append(
            SuspectedEvent(
                process=self._events.process, by=self._start.rank, rank=rank, incarnation=incarnation, reason=reason
            )
        )

    def _on_replay(self, suspect: Rank, layer: int, num_rows: int) -> None:
        self._events.append(
            RowsReplayed(
                process=self._events.process, rank=self._start.rank, suspect=suspect, layer=layer, num_rows=num_rows
            )
        )

    def _hello(self, engine: Engine, shares_workers: bool) -> WorkerReady:
        return WorkerReady(
            rank=self._start.rank,
            incarnation=self._start.incarnation,
            max_model_len=engine.limits.max_model_len,
            max_num_seqs=engine.config.max_num_seqs,
            vocab_size=engine.limits.vocab_size,
            num_blocks=engine.limits.num_blocks,
            block_size=engine.config.block_size,
            token_cost=engine.limits.token_cost.constant,
            shares_workers=shares_workers,
            guides=VERSION,
        )

    def _say_ready(self, ops_name: str, num_blocks: int, num_slots: int) -> None:
        gc.collect()
        gc.freeze()  # objects of the start-up stay for good; scanning them in every full collection stalls streams
        load_s = time.monotonic() - self._began_s
        self._events.append(
            WorkerBecameReady(
                process=self._events.process,
                rank=self._start.rank,
                incarnation=self._start.incarnation,
                load_s=load_s,
                num_blocks=num_blocks,
                num_slots=num_slots,
                phases=self._around.loading.phases,
            )
        )
        if self._start.settings.compute.device == "cuda":
            self._control.leave_behind()
        self._control.send(Ready())
        roles = " and ".join(self._start.roles)
        what = count(num_blocks, "KV block") if num_blocks else f"{count(num_slots, 'expert slot')} per layer"
        log.info("ready as %s in %.2f s: %s ops, %s", roles, load_s, ops_name, what)
