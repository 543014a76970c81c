"""`python -m everserve.control`: started by the supervisor, never by hand."""

import argparse
import socket
import sys

from everserve.control.run.orchestrator import Orchestrator
from everserve.errors import UserError
from everserve.procs import logs, process
from everserve.procs.scarcity import told_as_temporary
from everserve.wire.channel import Channel, ChannelClosed
from everserve.wire.messages import Failed, StartOrchestrator


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root-pid", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--gateway-fd", type=int, required=True)
    args = parser.parse_args()
    process.die_with(args.root_pid)
    process.die_sooner_than_parent()
    process.set_name("es-orchestrator")
    logs.configure("orchestrator")
    process.raise_open_files()
    supervisor = Channel(socket.socket(fileno=args.control_fd))
    gateway = Channel(socket.socket(fileno=args.gateway_fd))
    try:
        with told_as_temporary(supervisor):
            start = supervisor.receive()
            assert isinstance(start, StartOrchestrator), "the first message says what to build"
            Orchestrator(start, supervisor, gateway).run()
    except UserError as error:
        supervisor.send(Failed(reason=str(error), user_error=True))
        return 1
    except ChannelClosed:
        return 0  # the supervisor is gone
    return 0


if __name__ == "__main__":
    sys.exit(main())
