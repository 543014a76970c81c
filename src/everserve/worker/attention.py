"""The attention worker's loop: receive -> handle -> step -> send.

It never blocks while it has work; without work it sleeps until a message comes. Each time it becomes idle it checks the
engine's integrity, and then sends its gauges once a second.

A step that needs an expert without a place is abandoned: the engine keeps its state, and the step is tried again when
the tables have changed. Clients see a pause, never a wrong token. If the new tables mask that expert, the step is
repeated without it, and its tokens are marked.

After each step the new KV is committed to the log (kvlog/), from which other workers restore the streams if this one
dies. Leaving uses the same log: a worker that is asked to leave gives its streams back and exits.
"""

import logging
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from everserve.engine.engine import StepResult
from everserve.engine.regaining import Regained
from everserve.errors import RequestError, StepAbandoned
from everserve.guides.guide import Guide
from everserve.memory.liveness.lease import LEAST_S, Lease
from everserve.seam.trust import Peers
from everserve.tables.ids import Epoch, Rank
from everserve.tables.memory import Kind
from everserve.tables.outputs import EngineStats
from everserve.tables.routes_delta import KnownRoutes
from everserve.wire.channel import Channel, ChannelClosed, Descriptors
from everserve.wire.events import (
    BadBytes,
    KvRegained,
    RequestPreempted,
    StreamRestored,
    StreamsContinued,
    StreamsPaused,
)
from everserve.wire.messages import (
    AnyMessage,
    Cancel,
    Fenced,
    LanesOpen,
    LanesSent,
    Leave,
    Leaving,
    Offer,
    PaceReported,
    PeerJoined,
    PeerLeft,
    PrefillsPending,
    Rejected,
    Report,
    RoutesChanged,
    RoutesPatched,
    RoutesUsed,
    RoutesWanted,
    Shutdown,
    Submit,
    Withdraw,
    WorkerReady,
)
from everserve.words import count
from everserve.worker.control import ControlEnd
from everserve.worker.gateways import Gateways
from everserve.worker.guiding import Guiding
from everserve.worker.offered import OF_HEADS, OF_LOG, HeadsKv, Logs, Offered, User, users
from everserve.worker.parts import AttentionParts, Surroundings

log = logging.getLogger(__name__)

_IDLE_REPORT_S = 1.0
_PACE_EVERY_S = 0.5
_TOGETHER_S = 0.03  # at most: running streams must not wait much longer than one step
_TRY_AGAIN_S = 0.1  # retry a paused step after this time, if no message comes before
_LOOK_AGAIN_S = 0.01  # the same where KV has to be fetched first: workers become free to do so without a message
_RING_EVERY_S = 0.005  # while streams wait
_GIVE_BACK_S = 5.0  # how long a leaving worker waits for the gateway to take its last messages


class _WasFenced(Exception):
    """The orchestrator has declared this incarnation gone."""


class AttentionLoop:
    """One engine between the gateways and an orchestrator."""

    def __init__(
        self,
        around: Surroundings,
        parts: AttentionParts,
        gateways: Sequence[Channel],
        guiding: Guiding,
        hello: WorkerReady | None = None,
    ) -> None:
        self._rank: Rank = around.start.rank
        self._hello = hello  # what each gateway is told first
        self._engine = parts.engine
        self._seam = parts.seam
        self._logs = parts.logs
        self._kv = parts.kv
        self._offered = Offered(parts.logs.memory, _users(parts))
        self._sends_late = parts.sends_late
        self._late: Callable[[], None] | None = None  # sends the results of the last step, not called yet
        self._sources: dict[str, Rank] = {}  # the worker whose log a waiting stream is restored from
        self._takes_over = False  # streams of another worker have come since the last step
        self._guiding = guiding
        self._gateways = Gateways(gateways)
        self._control = control = around.control
        self._leave_request = leave = around.leave
        self._lease = lease = Lease(around.warden, LEAST_S[around.start.settings.compute.device])
        parts.engine.times.on_begin, parts.engine.times.on_end = lease.begin, lease.end
        self._pace_at = 0.0
        self._events = around.events
        self._stop_at: float | None = None
        self._paused_since: float | None = None
        self._was_busy = False
        self._dropped_said = False
        self._routes = KnownRoutes()
        self._acknowledged = 0  # the latest epoch sent in RoutesUsed
        self._is_behind = False  # newer routes could not be used yet, so no step can be made
        self._selector = selectors.DefaultSelector()
        for number in range(len(gateways)):
            self._register_gateway(number)
        self._selector.register(control, selectors.EVENT_READ, self.read_control)
        self._selector.register(leave, selectors.EVENT_READ, lambda: None)
        self._selector.register(self._guiding, selectors.EVENT_READ, self._take_guided)
        control.make_report = self._report

    def run(self) -> None:
        """Serve until shut down or fenced."""
        self._guiding.prepare()
        try:
            while not self._is_over():
                self._lease.renew()
                self._receive()
                if self._control.new_gateways:
                    self._change_gateways()
                if self._leave_request.was_asked:
                    self._leave()
                    return
                self._acknowledge()
                if not self._engine.has_work:
                    self._idle()
                elif not self._is_behind:
                    self._step()
            self._do_late()
        except _WasFenced as fenced:
            log.warning("declared gone (%s); exiting", fenced)

    def _is_over(self) -> bool:
        if self._control.is_cut:
            return True
        has_work = self._engine.has_work or bool(self._guiding.ids)
        return self._stop_at is not None and (not has_work or time.monotonic() >= self._stop_at)

    def _leave(self) -> None:
        """Between two steps, when all computed KV is in the log. Streams that the gateway sends from now on are lost;
        the end of the channel tells the gateway so."""
        self._do_late()
        self._engine.forget_ahead()
        ids = self._engine.stream_ids() + self._guiding.ids
        log.info("leaving: %s on elsewhere", count(len(ids), "stream", "go"))
        self._gateways.give_back(ids)
        self._control.send(Leaving())
        deadline = time.monotonic() + _GIVE_BACK_S
        for gateway in self._gateways.channels:
            while gateway.wants_write and time.monotonic() < deadline:
                gateway.wait(0.1)

    def _acknowledge(self) -> None:
        """Between two steps: use the mask of the latest routes, and report these, if they are new. No request in flight
        follows older routes, no step runs under two masks, and no KV is needed from where older routes led to. Not
        while a step is on its way (engine/ahead.py): `_step` sees to it that there is none behind it."""
        if self._seam is not None and self._has_new_routes and not self._engine.is_ahead:
            try:
                self._engine.regain()
            except StepAbandoned as abandoned:
                self._is_behind = True
                self._pause(abandoned)
                return
            self._is_behind = False
            self._use_mask(self._seam.peers)
            self._acknowledged = self._seam.peers.epoch
            self._control.send(RoutesUsed(epoch=Epoch(self._acknowledged)))

    def _use_mask(self, peers: Peers) -> None:
        if peers.mask_id != self._engine.mask_id:
            self._engine.use_mask(peers.mask_id, peers.masked)
            log.warning("%s masked (mask %d)", count(sum(peers.masked), "expert", "are"), peers.mask_id)

    @property
    def _has_new_routes(self) -> bool:
        """Routes may have been read in the middle of a step that was abandoned: slots that a repair needs are free only
        when they are acknowledged, so this must not wait for the next message."""
        return self._seam is not None and self._seam.peers.epoch > self._acknowledged

    def _report(self) -> Report:
        self._acknowledged = 0  # send it again, to the new orchestrator; not now, which may be the middle of a step
        peers = self._seam.peers if self._seam is not None else None
        return Report(
            is_ready=True,
            is_leaving=self._leave_request.was_asked,
            epoch=Epoch(peers.epoch if peers is not None else 0),
            peers=peers.incarnations if peers is not None else [],
            memory=self._offered.names,
        )

    # -- receiving -------------------------------------------------------------------------------

    def _receive(self) -> None:
        timeout_s = 0.0 if self._engine.has_work or self._was_busy else _IDLE_REPORT_S
        if self._paused_since is not None and (self._is_behind or not self._has_new_routes):
            timeout_s = _LOOK_AGAIN_S if self._is_behind else _TRY_AGAIN_S
        for key, _ in self._select(timeout_s):
            key.data()
        self._gateways.flush()
        self._control.flush()
        self._logs.sweep(self._engine)
        if self._kv is not None and not self._engine.is_ahead:
            self._kv.sweep()

    def _select(self, timeout_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        """What can be read, waiting no longer than that. While streams wait, expert workers are rung."""
        if self._paused_since is None or self._seam is None:
            return self._selector.select(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._seam.peers.ring()
            left_s = deadline_s - time.monotonic()
            ready = self._selector.select(max(0.0, min(left_s, _RING_EVERY_S)))
            if ready or left_s <= _RING_EVERY_S:
                return ready

    def _register_gateway(self, number: int) -> None:
        channel = self._gateways.channels[number]
        self._selector.register(channel, selectors.EVENT_READ, partial(self._read_gateway, number, channel))

    def _read_gateway(self, number: int, channel: Channel) -> None:
        try:
            for message in receive_together(channel):
                self._handle_gateway(number, message)
        except ChannelClosed:
            self._lose_gateway(number)
            log.debug("the gateway has closed its channel")  # the supervisor logs why: a signal, or a crash
        self._mention_bad_bytes(channel)

    def _lose_gateway(self, number: int) -> None:
        """None of its clients is reachable. The next gateway submits again what goes on; what was computed is in the
        prefix cache and in the log."""
        self._selector.unregister(self._gateways.channels[number])
        ids = self._gateways.lose(number)
        if ids is None:
            self._guiding.forget()
            self._engine.cancel_all()
            self._sources.clear()
        else:
            for id in ids:
                self._cancel(id)

    def _change_gateways(self) -> None:
        """There are others, whether the ends of those before have been noticed or not."""
        self._do_late()
        assert self._hello is not None
        while self._control.new_gateways:
            number, channel = self._control.new_gateways.popitem()
            if self._gateways.is_open(number):
                self._lose_gateway(number)
            self._gateways.replace(number, channel, self._hello, self._stats(num_received=0))
            self._register_gateway(number)

    def read_control(self) -> None:
        """Handle messages of the orchestrator. Also called in the middle of a layer, when the control word changed."""
        self._control.read(self._handle_control)
        self._mention_bad_bytes(self._control)

    def _handle_gateway(self, number: int, message: AnyMessage) -> None:
        if isinstance(message, Submit):
            self._gateways.note_submit(number, message.spec.id)
            self._submit(message)
        elif isinstance(message, Cancel):
            self._gateways.forget(message.id)
            self._cancel(message.id)
        elif isinstance(message, PrefillsPending):
            self._engine.share_prefill(self._rank, message.homes)
        else:
            log.warning("dropped a %s: the gateway does not send it", type(message).__name__)

    def _cancel(self, id: str) -> None:
        if not self._guiding.cancel(id):
            self._engine.cancel(id)
        self._sources.pop(id, None)

    def _handle_control(self, message: AnyMessage, fds: Descriptors) -> None:
        if isinstance(message, Offer | Withdraw):
            self._offered.take(message, fds)
        elif isinstance(message, Leave):
            self._leave_request.ask()
        elif isinstance(message, Shutdown):
            self._stop_at = time.monotonic() + message.grace_s
        elif isinstance(message, Fenced):
            raise _WasFenced(message.reason)
        elif self._seam is not None and isinstance(message, PeerJoined | PeerLeft | RoutesChanged | RoutesPatched):
            self._change_peers(self._seam.peers, message)
        elif isinstance(message, LanesSent):
            self._control.send(LanesOpen())
        else:
            log.warning("dropped a %s: not for an attention worker", type(message).__name__)

    def _submit(self, message: Submit) -> None:
        """A new stream, or one that another worker has run so far."""
        if message.spec.params.guided is not None:
            self._guiding.begin(message)
        else:
            self._add(message, None)

    def _take_guided(self) -> None:
        """Streams whose grammars were compiled."""
        for message, made in self._guiding.take():
            if isinstance(made, RequestError):
                self._gateways.reject(Rejected(id=message.spec.id, reason=f"the grammar cannot be used: {made}"))
            else:
                self._add(message, made)

    def _add(self, message: Submit, guide: Guide | None) -> None:
        spec, source = message.spec, message.source
        saved = self._logs.find(spec, source) if source is not None else None
        try:
            self._engine.add(spec, saved, guide)
        except RequestError as error:
            self._gateways.reject(Rejected(id=spec.id, reason=str(error)))
            return
        if saved is not None and source is not None:
            self._sources[spec.id] = source[0]
            self._takes_over = True

    def _change_peers(self, peers: Peers, message: PeerJoined | PeerLeft | RoutesChanged | RoutesPatched) -> None:
        if isinstance(message, PeerJoined):
            peers.join(message.rank, message.incarnation, *self._offered.of_peer(message))
        elif isinstance(message, PeerLeft):
            peers.leave(message.rank, message.incarnation)
        elif isinstance(message, RoutesChanged):
            peers.use(self._routes.take(message.routes))
        elif (routes := self._routes.patch(message.delta)) is not None:
            peers.use(routes)
        elif self._routes.lacks(message.delta):
            self._control.send(RoutesWanted(epoch=self._routes.epoch))

    # -- stepping --------------------------------------------------------------------------------

    def _step(self) -> None:
        self._was_busy = True
        if self._takes_over:  # their KV is brought first, for which the tokens of other streams do not wait
            self._takes_over = False
            self._do_late()
        try:
            result = self._engine.step(self._do_late, not self._has_new_routes, self._is_quiet)
        except StepAbandoned as abandoned:
            self._do_late()
            self._pause(abandoned)
            return
        self._continue()
        self._report_pace()
        self._late = partial(self._tell, result)
        if not self._sends_late or not self._engine.has_work:
            self._do_late()

    def _is_quiet(self) -> bool:
        """No message has come: streams and routes can join the next step only if it has not been launched."""
        return not self._selector.select(0) and not self._has_new_routes

    def _report_pace(self) -> None:
        """Now and then, after a step. The orchestrator compares this worker, and its peers, with others."""
        now = self._engine.times.ended_s
        if now >= self._pace_at:
            self._pace_at = now + _PACE_EVERY_S
            own = self._engine.times.take()
            peers = self._seam.peers.take_answer_times() if self._seam is not None else []
            if own is not None:
                self._control.send(PaceReported(own=own, peers=peers))

    def _do_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            late()

    def _tell(self, result: StepResult) -> None:
        """Publish the results of a step: first to the gateways, then to the log."""
        if result.kv_lost is not None:
            log.warning("%s", result.kv_lost)
        if result.regained is not None:
            self._tell_regained(result.regained)
        self._gateways.send_step(result.outputs, self._stats)
        for id, reason, is_dead_end in result.failed:  # behind the tokens that came before
            fault = not is_dead_end
            self._gateways.reject(Rejected(id=id, reason=reason, is_server_fault=fault, is_dead_end=is_dead_end))
        self._engine.log_step()
        self._tell_restored(result)
        for sequence in result.preempted:
            self._events.append(
                RequestPreempted(
                    process=self._events.process,
                    rank=self._rank,
                    request_id=sequence.id,
                    num_tokens=len(sequence.tokens),
                )
            )

    def _tell_regained(self, regained: Regained) -> None:
        log.log(
            logging.WARNING if regained.num_lost else logging.INFO,
            "heads are elsewhere, or at another process: %s the KV of %d tokens, that of %d is computed again"
            " (%.1f MB, %.1f ms)",
            count(regained.num_streams, "stream", "keep"), regained.num_kept, regained.num_lost,
            regained.num_bytes / 1e6, regained.took_s * 1e3,
        )  # fmt: skip
        self._events.append(
            KvRegained(
                process=self._events.process,
                rank=self._rank,
                num_streams=regained.num_streams,
                num_kept=regained.num_kept,
                num_lost=regained.num_lost,
                num_bytes=regained.num_bytes,
                took_ms=regained.took_s * 1e3,
            )
        )

    def _tell_restored(self, result: StepResult) -> None:
        for restored in result.restored:
            self._events.append(
                StreamRestored(
                    at_s=restored.at_s,
                    process=self._events.process,
                    rank=self._rank,
                    request_id=restored.id,
                    from_rank=self._sources.pop(restored.id, -1),
                    num_restored=restored.num_restored,
                    num_recomputed=restored.num_recomputed,
                    took_ms=restored.took_ms,
                )
            )

    def _pause(self, abandoned: StepAbandoned) -> None:
        if self._paused_since is None:
            self._paused_since = time.monotonic()
            log.warning("streams wait: %s", abandoned)
            self._events.append(
                StreamsPaused(
                    process=self._events.process,
                    rank=self._rank,
                    layer=abandoned.layer,
                    experts=tuple(abandoned.experts),
                )
            )

    def _continue(self) -> None:
        if self._paused_since is not None:
            paused_s = time.monotonic() - self._paused_since
            self._paused_since = None
            log.warning("streams go on after %.3f s", paused_s)
            self._events.append(StreamsContinued(process=self._events.process, rank=self._rank, paused_s=paused_s))

    def _idle(self) -> None:
        """No work: check the engine's integrity once, and send the gauges."""
        self._paused_since = None
        self._do_late()
        if self._was_busy:
            if self._seam is not None:
                self._seam.experts.rest()
            self._engine.check()
            self._was_busy = False
        if self._seam is not None:
            self._seam.peers.sweep()  # no step may come for long, and memory of peers that are gone would stay
        self._gateways.send_step([], self._stats)

    def _stats(self, num_received: int) -> EngineStats:
        stats, seam = self._engine.stats(), self._seam
        return msgspec.structs.replace(
            stats,
            num_received=num_received,
            num_unreadable_logs=self._logs.num_unreadable,
            num_replayed_rows=seam.experts.num_replayed_rows if seam is not None else 0,
            num_stale=seam.peers.num_stale if seam is not None else 0,
        )

    def _mention_bad_bytes(self, channel: Channel | ControlEnd) -> None:
        if channel.num_dropped and not self._dropped_said:
            self._dropped_said = True
            log.warning("dropped %d frames that are not messages", channel.num_dropped)
            self._events.append(BadBytes(process=self._events.process, num_dropped=channel.num_dropped))


def receive_together(gateway: Channel) -> Iterator[AnyMessage]:
    """Every message that has arrived, and those that were announced with them: streams that the gateway sends together
    start in one step. ChannelClosed if the gateway is gone.

    The socket is read between two steps, and where the kernel does not allow more its buffer holds no more than forty
    Submits of 2,000 tokens. If the streams of a lost worker were taken as they arrive, each part would wait for a step
    of the part before, and the last ones longest. That wait is needless: the gateway sends the rest within milliseconds
    after the buffer has room.
    """
    until_s = time.monotonic() + _TOGETHER_S
    num_following = 0
    while True:
        for message in gateway.receive_all():
            if isinstance(message, Submit):
                num_following = message.num_following
            yield message
        left_s = until_s - time.monotonic()
        if not num_following or left_s <= 0 or not gateway.wait(left_s):
            return


def _users(parts: AttentionParts) -> dict[Kind, User]:
    """What uses memory of others."""
    found = users(OF_LOG, Logs(parts.logs, parts.engine))
    return found if parts.kv is None else found | users(OF_HEADS, HeadsKv(parts.logs.memory, parts.kv))
