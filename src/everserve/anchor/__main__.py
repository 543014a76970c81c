"""`python -m everserve.anchor`: started by the supervisor, never by hand.

Allocate -> memory -> Allocated + its descriptor, until the orchestrator and the supervisor are gone
"""

import argparse
import selectors
import socket
import sys

from everserve.anchor.memory import OwnedMemory
from everserve.runtime import process
from everserve.runtime.channel import Channel, ChannelClosed
from everserve.runtime.messages import Allocate, Allocated, AnyMessage, Ready, Release, Shutdown


class Anchor:
    """Owns memory; does what the orchestrator says."""

    def __init__(self, supervisor: Channel, orchestrator: Channel) -> None:
        self._supervisor = supervisor
        self._orchestrator = orchestrator
        self._memory = OwnedMemory()
        self._is_over = False

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for channel in (self._supervisor, self._orchestrator):
                selector.register(channel, selectors.EVENT_READ, channel)
            self._supervisor.send(Ready())
            while not self._is_over:
                for key, _ in selector.select(None if not self._orchestrator.wants_write else 0.01):
                    for message in key.data.receive_all():
                        self._handle(message)
                self._orchestrator.flush()

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, Allocate):
            fd = self._memory.allocate(message.name, message.num_bytes)
            self._orchestrator.send(Allocated(name=message.name), fds=[fd])
        elif isinstance(message, Release):
            self._memory.release(message.name)
        elif isinstance(message, Shutdown):
            self._is_over = True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--supervisor-pid", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--orchestrator-fd", type=int, required=True)
    args = parser.parse_args()
    process.die_with(args.supervisor_pid)
    process.set_name("es-anchor")
    supervisor = Channel(socket.socket(fileno=args.control_fd))
    orchestrator = Channel(socket.socket(fileno=args.orchestrator_fd))
    try:
        Anchor(supervisor, orchestrator).run()
    except ChannelClosed:
        return 0  # nobody is left to own memory for
    return 0


if __name__ == "__main__":
    sys.exit(main())
