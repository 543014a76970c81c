"""The keeper and its gateways, started by the supervisor as `python -m everserve.gateway` with inherited descriptors.

    keeper.py    StartGateway -> load the tokenizer (prepared.py) -> make a gateway, and the next one when it dies
    life.py      the gateway

If root dies, the kernel ends this process.
"""

import argparse
import logging
import os
import socket
import sys
from dataclasses import replace

from everserve.gateway.keeper import GatewayKeeper
from everserve.gateway.life import live
from everserve.gateway.prepared import prepare
from everserve.gateway.succession import take
from everserve.ledger.ledger import Ledger
from everserve.procs import logs, process
from everserve.tables.members import gateway_name
from everserve.wire.channel import Channel, ChannelClosed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root-pid", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--ledger-fd", type=int, required=True)
    parser.add_argument("--table-fd", type=int, required=True)
    parser.add_argument("--succession-fd", type=int)
    arguments = parser.parse_args()
    process.die_with(arguments.root_pid)
    process.set_name("es-keeper")
    logs.configure("gateway")
    process.raise_open_files()
    process.return_large_blocks()
    control = Channel(socket.socket(fileno=arguments.control_fd), waits_for_room=True)
    listen = socket.socket(fileno=arguments.listen_fd)
    try:
        prepared = prepare(control, listen, Ledger.map(arguments.ledger_fd), arguments.table_fd)
    except ChannelClosed:
        return 1  # the supervisor went away before it had said what to do
    if prepared.number:
        logs.configure(gateway_name(prepared.number))
    is_possible, connections = GatewayKeeper.is_possible(), frozenset[int]()
    if arguments.succession_fd is not None:
        given = take(socket.socket(fileno=arguments.succession_fd), prepared.ledger)
        if given is None:
            return os.EX_TEMPFAIL  # the keeper before goes on
        connections = given.connections
        prepared = replace(prepared, control=Channel(socket.socket(fileno=given.control), waits_for_room=True))
    if not is_possible:
        return live(prepared)
    keeper = GatewayKeeper(
        prepared.control,
        prepared.ledger,
        prepared.table,
        listen,
        lambda: live(prepared),
        arguments.root_pid,
        connections,
    )
    status = keeper.run()
    logging.shutdown()
    os._exit(status)  # what objects here would close are numbers that a gateway has used for other files


if __name__ == "__main__":
    sys.exit(main())
