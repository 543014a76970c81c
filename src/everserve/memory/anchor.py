"""`python -m everserve.memory.anchor`: started by the supervisor, never by hand.

Allocate -> memory -> Offer + its descriptor, or Withdraw; until the supervisor is gone. Orchestrators come and go: a
new one says first what exists (Offer), so whatever the one before had asked for and never handed out is let go.
"""

import argparse
import os
import selectors
import socket
import sys

from everserve.memory.owned import NoMemoryError, OwnedMemory
from everserve.procs import logs, process
from everserve.procs.device_descriptors import entrust
from everserve.procs.scarcity import told_as_temporary
from everserve.wire.channel import RETRY_S, Channel, ChannelClosed, Descriptors
from everserve.wire.messages import (
    Allocate,
    AnyMessage,
    Offer,
    OrchestratorAttached,
    Ready,
    Release,
    Shutdown,
    Withdraw,
)


class Anchor:
    """Owns memory; does what the orchestrator says."""

    def __init__(self, supervisor: Channel) -> None:
        self._supervisor = supervisor
        self._orchestrator: Channel | None = None
        self._memory = OwnedMemory()
        self._num_entrusted = 0  # devices of which the supervisor holds what ties us to them
        self._is_over = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        self._selector.register(self._supervisor, selectors.EVENT_READ, self._read_supervisor)
        self._supervisor.send(Ready())
        while not self._is_over:
            channels = [end for end in (self._supervisor, self._orchestrator) if end is not None]
            is_behind = any(channel.wants_write for channel in channels)
            for key, _ in self._selector.select(RETRY_S if is_behind else None):
                key.data()
            for channel in channels:
                channel.flush()

    def _read_supervisor(self) -> None:
        for message, fds in self._supervisor.receive_frames():
            if isinstance(message, OrchestratorAttached):
                (fd,) = fds.take()
                self._attach(Channel.of_fd(fd))
            elif isinstance(message, Shutdown):
                self._is_over = True

    def _attach(self, orchestrator: Channel) -> None:
        self._detach()
        self._memory.release_all()
        self._orchestrator = orchestrator
        self._selector.register(orchestrator, selectors.EVENT_READ, self._read_orchestrator)

    def _detach(self) -> None:
        """Goes on without an orchestrator: everything is kept as it is."""
        if self._orchestrator is not None:
            self._selector.unregister(self._orchestrator)
            self._orchestrator.close()
            self._orchestrator = None

    def _read_orchestrator(self) -> None:
        if self._orchestrator is None:
            return
        try:
            for message, fds in self._orchestrator.receive_frames():
                self._handle(message, fds, self._orchestrator)
        except ChannelClosed:
            self._detach()

    def _handle(self, message: AnyMessage, fds: Descriptors, orchestrator: Channel) -> None:
        if isinstance(message, Allocate):
            try:
                fd = self._memory.allocate(message.memory)
            except NoMemoryError as error:
                orchestrator.send(Withdraw(memory=message.memory, reason=str(error)))
                return
            if self._memory.num_devices > self._num_entrusted:
                self._num_entrusted = self._memory.num_devices
                # We may be killed while a device still clears memory for us.
                entrust(self._supervisor, but=self._memory.fds)
            orchestrator.send(Offer(memory=message.memory), fds=[fd])
        elif isinstance(message, Offer):
            (fd,) = fds.take()
            self._memory.adopt(message.memory, fd)
            os.close(fd)
        elif isinstance(message, Release):
            self._memory.release(message.memory)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root-pid", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    args = parser.parse_args()
    process.die_with(args.root_pid)
    process.die_sooner_than_parent()
    process.set_name("es-anchor")
    logs.configure("anchor")
    process.raise_open_files()
    try:
        control = Channel(socket.socket(fileno=args.control_fd))
        with told_as_temporary(control):
            Anchor(control).run()
    except ChannelClosed:
        return 0  # the supervisor has ended
    return 0


if __name__ == "__main__":
    sys.exit(main())
