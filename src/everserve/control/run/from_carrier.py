"""What the carrier says: hosts that join or are lost; and of these what supervisor and anchor say of the first one.

An instance begins when all its hosts are there. A carrier that has died takes all other hosts with it: they join again,
with new boots.
"""

import logging
import selectors
from dataclasses import dataclass, field

from everserve.control.decide.machine import Machine
from everserve.control.hold.hosts import Hosts
from everserve.control.hold.provisioning import Provisioning
from everserve.control.run.injection import Injection
from everserve.control.run.input_queue import InputQueue
from everserve.control.run.worker_traffic import WorkerTraffic
from everserve.memory.anchor_client import AnchorClient
from everserve.tables.ids import WorkerId
from everserve.wire.channel import Channel, ChannelClosed, Descriptors
from everserve.wire.messages import (
    AnyMessage,
    EvictHost,
    HostJoined,
    HostLeft,
    LeftMemory,
    Offer,
    Signalled,
    Withdraw,
    WorkerExited,
    WorkerStarted,
)
from everserve.words import count

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class FromCarrier:
    """Reads the channel to the carrier. `num_awaited`: hosts that have still to join before the instance begins."""

    queue: InputQueue
    selector: selectors.BaseSelector
    hosts: Hosts
    anchor: AnchorClient
    provisioning: Provisioning
    workers: WorkerTraffic
    injection: Injection
    machine: Machine
    num_awaited: int
    there: set[int] = field(default_factory=set)

    def begin(self) -> None:
        """Start the instance, or wait for hosts."""
        if self.num_awaited:
            log.info("waiting for %s to join", count(self.num_awaited, "host"))
        else:
            self.queue.decide(self.machine.start)

    def attach(self, carrier_fd: int) -> None:
        """A new one may be announced before the channel to the one before ends."""
        self._detach()
        channel = Channel.of_fd(carrier_fd)
        self.hosts.carrier = self.anchor.carrier = channel
        self.selector.register(channel, selectors.EVENT_READ, self._read)
        for host in self.machine.goal.gone_hosts:  # it may not know
            channel.send(EvictHost(host=host, gone=True))

    def _detach(self) -> None:
        """All hosts that it had are lost."""
        channel = self.hosts.carrier
        if channel is None:
            return
        self.selector.unregister(channel)
        channel.close()
        self.hosts.carrier = self.anchor.carrier = None
        for host in sorted(self.there):
            self._leave(HostLeft(host=host, reason="the carrier of the first host has ended"))
            self._forget_workers(host)

    def _forget_workers(self, host: int) -> None:
        """What no carrier says any more."""
        for end in list(self.workers.ends):
            if end.host == host:
                self.workers.remove(end.id, exit_status=-9)

    def _read(self) -> None:
        channel = self.hosts.carrier
        if channel is None:
            return
        try:
            for message, fds in channel.receive_frames():
                self._on_message(message, fds)
        except ChannelClosed:
            self._detach()

    def _on_message(self, message: AnyMessage, fds: Descriptors) -> None:
        match message:
            case HostJoined():
                self._join(message)
            case HostLeft():
                self._leave(message)
            case WorkerStarted():
                worker = WorkerId(message.start.rank, message.start.incarnation)
                is_lost = not self.queue.is_recovering and not self.machine.counts(worker)
                self.workers.add(self.provisioning.take_in(message, fds.take(), is_lost))
            case WorkerExited():
                self.workers.remove(WorkerId(message.rank, message.incarnation), message.exit_status)
            case Offer() | Withdraw():
                self.anchor.handle(message, fds)
            case LeftMemory():
                (fd,) = fds.take()
                self.provisioning.take_in_memory(message.memory, fd)
            case Signalled():
                self.injection.confirm(message)
            case _:
                raise AssertionError(f"the carrier does not send {type(message).__name__}")

    def _join(self, joined: HostJoined) -> None:
        self.there.add(joined.host)
        self.queue.tell(joined)
        if self.num_awaited and len(self.there) >= self.num_awaited:
            self.num_awaited = 0
            self.queue.decide(self.machine.start)
        elif self.num_awaited:
            log.info("waiting for %s more to join", count(self.num_awaited - len(self.there), "host"))

    def _leave(self, left: HostLeft) -> None:
        self.there.discard(left.host)
        if not self.num_awaited:
            self.queue.tell(left)

    def say_missing(self) -> None:
        """After a recovery: hosts that are not there are lost."""
        for host in sorted(self.machine.goal.hosts - {0, *self.there, *self.machine.goal.lost_hosts}):
            self.queue.tell(HostLeft(host=host, reason="it was not there when this orchestrator began"))
