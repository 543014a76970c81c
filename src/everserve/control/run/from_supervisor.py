"""What the supervisor says: processes that exist or have ended, memory that it has kept, a new anchor, the end."""

import selectors
from dataclasses import dataclass

from everserve.control.decide.machine import Machine
from everserve.control.hold.provisioning import Provisioning
from everserve.control.run.from_carrier import FromCarrier
from everserve.control.run.from_gateway import FromGateway
from everserve.control.run.injection import Injection
from everserve.control.run.input_queue import InputQueue
from everserve.control.run.worker_traffic import WorkerTraffic
from everserve.memory.anchor_client import AnchorClient
from everserve.tables.ids import WorkerId
from everserve.wire.channel import Channel, ChannelClosed, Descriptors
from everserve.wire.messages import (
    AnchorAttached,
    CarrierAttached,
    GatewayAttached,
    Offer,
    Shutdown,
    Signalled,
    WorkerExited,
    WorkerStarted,
)


@dataclass(frozen=True, kw_only=True)
class FromAnchor:
    """Reads the channel to the anchor. The supervisor replaces an anchor that has died."""

    anchor: AnchorClient
    selector: selectors.BaseSelector

    def attach(self, anchor_fd: int) -> None:
        """The new anchor may be announced before the old channel ends."""
        self._detach()
        channel = Channel.of_fd(anchor_fd)
        self.selector.register(channel, selectors.EVENT_READ, self._read)
        self.anchor.attach(channel)

    def _read(self) -> None:
        if self.anchor.channel is None:
            return
        try:
            self.anchor.read()
        except ChannelClosed:
            self._detach()

    def _detach(self) -> None:
        if self.anchor.channel is not None:
            self.selector.unregister(self.anchor.channel)
            self.anchor.detach()


@dataclass(frozen=True, kw_only=True)
class FromSupervisor:
    """Reads the channel to the supervisor."""

    machine: Machine
    queue: InputQueue
    supervisor: Channel
    anchor: FromAnchor
    provisioning: Provisioning
    workers: WorkerTraffic
    injection: Injection
    gateway: FromGateway
    carrier: FromCarrier

    def read(self) -> None:
        for message, fds in self.supervisor.receive_frames():
            match message:
                case AnchorAttached():
                    (anchor_fd,) = fds.take()
                    self.anchor.attach(anchor_fd)
                case CarrierAttached():
                    (carrier_fd,) = fds.take()
                    self.carrier.attach(carrier_fd)
                case GatewayAttached():
                    (gateway_fd,) = fds.take()
                    self.gateway.attach(message.gateway, gateway_fd)
                case WorkerStarted():
                    self._on_started(message, fds)
                case Offer():
                    (memory_fd,) = fds.take()
                    self.provisioning.take_in_memory(message.memory, memory_fd)
                case WorkerExited():
                    self.workers.remove(WorkerId(message.rank, message.incarnation), message.exit_status)
                case Signalled():
                    self.injection.confirm(message)
                case Shutdown():
                    self.queue.tell(message)
                    for end in self.workers.ends:
                        end.send(message)
                    self.queue.is_over = True
                case _:
                    raise AssertionError(f"the supervisor does not send {type(message).__name__}")

    def _on_started(self, message: WorkerStarted, fds: Descriptors) -> None:
        """A new process; or, during a recovery, an existing one."""
        worker = WorkerId(message.start.rank, message.start.incarnation)
        is_lost = not self.queue.is_recovering and not self.machine.counts(worker)
        self.workers.add(self.provisioning.take_in(message, fds.take(), is_lost))
