"""`python -m everserve.carrier`: started by the supervisor, or by the agent of a joined host, never by hand."""

import argparse
import socket
import sys

from everserve.carrier.far import FarEnd
from everserve.carrier.near import NearEnd
from everserve.errors import UserError
from everserve.procs import logs, process
from everserve.procs.scarcity import told_as_temporary
from everserve.wire.channel import Channel, ChannelClosed
from everserve.wire.messages import Failed, StartCarrier, StartFarEnd


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root-pid", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    args = parser.parse_args()
    process.die_with(args.root_pid)
    process.die_sooner_than_parent()
    process.set_name("es-carrier")
    logs.configure("carrier")
    process.raise_open_files()
    control = Channel(socket.socket(fileno=args.control_fd))
    try:
        with told_as_temporary(control):
            start = control.receive()
            if isinstance(start, StartFarEnd):
                FarEnd(start, control).run()
            else:
                assert isinstance(start, StartCarrier), "the first message says which end it is"
                NearEnd(start, control).run()
    except UserError as error:
        control.send(Failed(reason=str(error), user_error=True))
        return 1
    except ChannelClosed:
        return 0  # who has started it is gone
    return 0


if __name__ == "__main__":
    sys.exit(main())
