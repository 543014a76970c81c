"""The worker's loop: receive -> handle -> step -> send.

While there is work it never blocks; while there is none it sleeps until a message comes. Each time it falls idle it
checks the engine's integrity, and then sends its gauges once a second.
"""

import logging
import selectors
import time

from everserve.engine.engine import Engine
from everserve.errors import RequestError
from everserve.runtime.channel import Channel, ChannelClosed
from everserve.runtime.events import BadBytes, EventLog, RequestPreempted
from everserve.runtime.messages import AnyMessage, Cancel, Rejected, Shutdown, StartWorker, StepOutput, Submit

log = logging.getLogger(__name__)

_IDLE_REPORT_S = 1.0


class WorkerLoop:
    """One engine between a gateway and a supervisor."""

    def __init__(
        self, start: StartWorker, engine: Engine, gateway: Channel, control: Channel, events: EventLog
    ) -> None:
        self._start = start
        self._engine = engine
        self._gateway = gateway
        self._control = control
        self._events = events
        self._stop_at: float | None = None
        self._was_busy = False
        self._dropped_said = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(gateway, selectors.EVENT_READ)
        self._selector.register(control, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until shut down, or until the gateway or the supervisor is gone."""
        try:
            while not self._is_over():
                self._receive()
                if self._engine.has_work:
                    self._step()
                else:
                    self._idle()
        except ChannelClosed:
            log.info("the other end is gone; exiting")

    def _is_over(self) -> bool:
        return self._stop_at is not None and (not self._engine.has_work or time.monotonic() >= self._stop_at)

    def _receive(self) -> None:
        timeout_s = 0.0 if self._engine.has_work or self._was_busy else _IDLE_REPORT_S
        for key, _ in self._selector.select(timeout_s):
            channel: Channel = key.fileobj  # type: ignore[assignment]
            for message in channel.receive_all():
                self._handle(message)
            self._mention_bad_bytes(channel)
        self._gateway.flush()

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, Submit):
            try:
                self._engine.add(message.spec)
            except RequestError as error:
                self._gateway.send(Rejected(id=message.spec.id, reason=str(error)))
        elif isinstance(message, Cancel):
            self._engine.cancel(message.id)
        elif isinstance(message, Shutdown):
            self._stop_at = time.monotonic() + message.grace_s
        else:
            log.warning("dropped a %s: not for a worker", type(message).__name__)

    def _step(self) -> None:
        self._was_busy = True
        result = self._engine.step()
        for id, reason in result.failed:
            self._gateway.send(Rejected(id=id, reason=reason, is_server_fault=True))
        self._gateway.send(StepOutput(outputs=result.outputs, stats=self._engine.stats()))
        for sequence in result.preempted:
            self._events.append(
                RequestPreempted(
                    process=self._events.process,
                    rank=self._start.rank,
                    request_id=sequence.id,
                    num_tokens=len(sequence.tokens),
                )
            )

    def _idle(self) -> None:
        """Nothing to do: prove that nothing was left behind, and say how things stand."""
        if self._was_busy:
            self._engine.check()
            self._was_busy = False
        self._gateway.send(StepOutput(outputs=[], stats=self._engine.stats()))

    def _mention_bad_bytes(self, channel: Channel) -> None:
        if channel.num_dropped and not self._dropped_said:
            self._dropped_said = True
            log.warning("dropped %d frames that are not messages", channel.num_dropped)
            self._events.append(BadBytes(process=self._events.process, num_dropped=channel.num_dropped))
