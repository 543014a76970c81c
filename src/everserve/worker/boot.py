"""A worker from its first instruction after the fork to its loop."""

import gc
import logging
import os
import time
from collections.abc import Callable

from everserve.datapath import lane
from everserve.datapath.lane import LaneShape
from everserve.datapath.local import LocalExperts
from everserve.datapath.peers import ExpertPeers
from everserve.datapath.remote import RemoteExperts
from everserve.engine.engine import Engine
from everserve.errors import UserError
from everserve.kvlog import library as kvlog
from everserve.model.ops import native
from everserve.runtime import liveness
from everserve.runtime.channel import Channel
from everserve.runtime.events import EventLog, RowsReplayed, SuspectedEvent, WorkerBecameReady
from everserve.runtime.liveness import Cell, Warden
from everserve.runtime.messages import EventHappened, Failed, Hello, Ready, StartWorker, Suspected, WorkerReady
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.worker.attention import AttentionLoop, Seam
from everserve.worker.build import EngineBuilder, Opened, has_spare_cores, load_experts, open_model
from everserve.worker.control import ControlEnd
from everserve.worker.expert import ExpertLoop
from everserve.worker.lease import LEASE_S
from everserve.worker.leaving import LeaveRequest
from everserve.worker.logs import KeptLogs

log = logging.getLogger(__name__)

_SPIN_US = 50.0  # before a worker that waits for another one sleeps
_NO_DETECTION_MS = 1000.0  # with --detect-ms 0: how often to look at the control socket while waiting for an answer


def prepare() -> None:
    """In the zygote: whatever takes time and is the same for all workers. No thread may be started here."""
    native.unavailable()  # compiles, if that was never done on this machine, and loads
    lane.load()
    kvlog.load()
    liveness.load()


def run(start: StartWorker, fds: list[int]) -> int:
    """In the worker: load, say ready, and run the loop. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s worker {start.rank} %(levelname)s %(message)s")
    began_s = time.monotonic()
    cell_fd, control_fd, lifeline_fd, *others = fds
    cell = Cell(cell_fd)
    os.close(cell_fd)
    control = ControlEnd(Channel.of_fd(control_fd), Channel.of_fd(lifeline_fd))
    leave = LeaveRequest()
    warden = Warden(cell, start.detect_ms or _NO_DETECTION_MS)
    if start.detect_ms:
        warden.start()
    control.send(Hello())
    events = EventLog(
        f"worker-{start.rank}", start.settings.event_log, lambda event: control.send(EventHappened(event=event))
    )
    worker = Worker(start, cell, warden, control, leave, events, began_s)
    try:
        if Role.ATTENTION in start.roles:
            worker.run_attention(Channel.of_fd(others[0]), log_fd=others[1] if start.has_log else None)
        else:
            worker.run_expert()
    except UserError as error:
        control.send(Failed(reason=str(error), user_error=True))
        return 1
    return 0


class Worker:
    """What every worker has, and the two roles it may take."""

    def __init__(
        self,
        start: StartWorker,
        cell: Cell,
        warden: Warden,
        control: ControlEnd,
        leave: LeaveRequest,
        events: EventLog,
        began_s: float,
    ) -> None:
        self._start = start
        self._cell = cell
        self._warden = warden
        self._control = control
        self._leave = leave
        self._events = events
        self._began_s = began_s
        self._on_control: Callable[[], None] = lambda: None  # the loop's, once there is one

    def run_attention(self, gateway: Channel, log_fd: int | None) -> None:
        """Own requests and their KV."""
        start = self._start
        opened = open_model(start)
        builder = EngineBuilder(start, opened, log_fd)
        seam: Seam | None = None
        if Role.EXPERT in start.roles:
            engine = builder.build(LocalExperts(load_experts(opened, start.settings.dtype, slots=None)))
        else:
            seam = self._make_seam(opened)
            engine = builder.build(seam.experts)
            if builder.writer is not None:
                seam.experts.do_meanwhile(*builder.writer.meanwhile)
        logs = KeptLogs(opened.sizes.log if log_fd is not None else None, builder.log)
        loop = AttentionLoop(
            start,
            engine,
            seam,
            logs,
            gateway,
            self._control,
            self._leave,
            self._warden,
            self._events,
            builder.pausing,
        )
        self._on_control = loop.read_control
        gateway.send(self._hello(engine))
        num_slots = opened.model.num_experts if seam is None else 0
        self._say_ready(opened, num_blocks=engine.config.num_blocks, num_slots=num_slots)
        loop.run()

    def run_expert(self) -> None:
        """Own expert slots."""
        start = self._start
        assert start.slots is not None, "an expert worker is told its slots"
        opened = open_model(start)
        experts = load_experts(opened, start.settings.dtype, start.slots)
        spin_us = _SPIN_US if has_spare_cores(start.num_workers) else 0.0
        loop = ExpertLoop(
            start, experts, self._cell, self._warden, self._control, self._leave, self._events, spin_us=spin_us
        )
        self._say_ready(opened, num_blocks=0, num_slots=start.slots.num_slots)
        loop.run()

    def _make_seam(self, opened: Opened) -> Seam:
        start, model = self._start, opened.model
        shape = LaneShape.of(model, start.settings.max_num_batched_tokens)
        peers = ExpertPeers(
            start.rank, start.incarnation, self._cell, self._warden, shape, model.moe_layers, model.num_experts
        )
        experts = RemoteExperts(
            peers,
            opened.ops,
            detect_ms=start.detect_ms or _NO_DETECTION_MS,
            lease_s=LEASE_S,
            on_control=self._read_control,
            on_suspect=self._on_suspect,
            on_replay=self._on_replay,
            spin_us=_SPIN_US if has_spare_cores(start.num_workers) else 0.0,
            fixed_routes=start.settings.fixed_routes,
        )
        return Seam(peers, experts)

    def _read_control(self) -> None:
        self._on_control()

    def _on_suspect(self, rank: Rank, incarnation: Incarnation, reason: str) -> None:
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

    def _hello(self, engine: Engine) -> WorkerReady:
        return WorkerReady(
            rank=self._start.rank,
            incarnation=self._start.incarnation,
            max_model_len=engine.config.max_model_len,
            max_num_seqs=engine.config.max_num_seqs,
            vocab_size=engine.config.vocab_size,
            num_blocks=engine.config.num_blocks,
            block_size=engine.config.block_size,
        )

    def _say_ready(self, opened: Opened, num_blocks: int, num_slots: int) -> None:
        load_s = time.monotonic() - self._began_s
        self._events.append(
            WorkerBecameReady(
                process=self._events.process,
                rank=self._start.rank,
                incarnation=self._start.incarnation,
                load_s=load_s,
                num_blocks=num_blocks,
                num_slots=num_slots,
            )
        )
        self._control.send(Ready())
        roles = " and ".join(self._start.roles)
        what = f"{num_blocks} KV blocks" if num_blocks else f"{num_slots} expert slots per layer"
        log.info("ready as %s in %.2f s: %s ops, %s", roles, load_s, opened.ops.name, what)
        gc.collect()
        gc.freeze()  # what start-up made stays for good; searching it at every full collection stalls streams
