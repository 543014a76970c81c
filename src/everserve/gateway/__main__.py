"""The gateway process, started by the supervisor as `python -m everserve.gateway` with inherited descriptors.

    StartGateway -> load the tokenizer -> serve HTTP -> Ready -> handle the supervisor's messages until Shutdown

The end of the control channel means that the supervisor is gone: the process ends at once. An orchestrator is attached
when there is one, and may be followed by another (orchestrator.py).
"""

import argparse
import asyncio
import gc
import os
import signal
import socket
import sys
import traceback
from typing import Any

import uvicorn
import uvloop

from everserve.config.gateway import GatewayConfig
from everserve.errors import OverloadedError, UserError
from everserve.gateway.api.app import create_app
from everserve.gateway.gateway import Gateway
from everserve.gateway.http.server import Server
from everserve.gateway.observe.feed import EventFeed
from everserve.gateway.observe.tracing import make_tracing
from everserve.gateway.streams.fleet import Fleet
from everserve.gateway.supervisor import SupervisorLink
from everserve.gateway.text.sampling import read_defaults
from everserve.gateway.text.tokenizer import load_tokenizer
from everserve.procs import process
from everserve.wire.channel import AsyncChannel, ChannelClosed, Descriptors
from everserve.wire.events import EventLog
from everserve.wire.messages import (
    AnyMessage,
    Attach,
    EventHappened,
    Failed,
    OrchestratorAttached,
    ProcessesChanged,
    ProcessSignalled,
    Ready,
    Shutdown,
    StartGateway,
)

_KEEP_ALIVE_S = 60  # idle connections; longer than clients' pools keep them, so that they close first
_SWITCH_S = 0.0005  # for which a tokenizer's thread may keep the event loop from the interpreter (Python's own: 5 ms)
_CLOSE_S = 2  # after the streams have ended, for connections to close


class GatewayProcess:
    """The loop around one Gateway."""

    def __init__(self, control: AsyncChannel, gateway: Gateway, server: uvicorn.Server) -> None:
        self._control = control
        self._gateway = gateway
        self._server = server
        self._supervisor = gateway.supervisor = SupervisorLink(control.send)
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Handle the supervisor's messages until the HTTP server has ended."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_sigterm)
        while True:
            try:
                message, fds = await self._control.receive_frame()
            except ChannelClosed:
                os._exit(0 if self._draining else 1)
            self._handle(message, fds)

    def _handle(self, message: AnyMessage, fds: Descriptors) -> None:
        if isinstance(message, Attach):
            (fd,) = fds.take()
            self._gateway.fleet.attach(message.rank, message.incarnation, socket.socket(fileno=fd))
        elif isinstance(message, OrchestratorAttached):
            (fd,) = fds.take()
            self._gateway.orchestrator.attach(socket.socket(fileno=fd))
        elif isinstance(message, ProcessesChanged):
            self._gateway.cluster.on_processes(message)
        elif isinstance(message, EventHappened):
            self._gateway.feed.publish(message.event)
        elif isinstance(message, ProcessSignalled):
            self._supervisor.on_answer(message)
        elif isinstance(message, Shutdown):
            self._shut_down(message.grace_s)
        else:
            raise AssertionError(f"the supervisor does not send {type(message).__name__} to a running gateway")

    def _on_sigterm(self) -> None:
        self._shut_down(self._gateway.config.shutdown_timeout_s)

    def _shut_down(self, grace_s: float) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(grace_s))

    async def _drain(self, grace_s: float) -> None:
        """No new requests; running ones may finish, and clients read their answers, within the grace time; then all
        connections close."""
        gateway = self._gateway
        gateway.is_draining = True
        gateway.keeper.close()
        deadline_s = asyncio.get_running_loop().time() + grace_s
        while (gateway.num_requests or self._has_unsent_bytes()) and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.02)
        ended = "The server was shut down before this request had finished."
        gateway.fleet.close(OverloadedError(ended, retry_after_s=5))
        gateway.feed.close()
        gateway.live.close()
        self._server.should_exit = True

    def _has_unsent_bytes(self) -> bool:
        """Whether a client has still to read from an answer that is complete."""
        transports = [connection.transport for connection in self._server.server_state.connections]
        return any(transport.get_write_buffer_size() for transport in transports if transport is not None)


async def serve(control_fd: int, listen_fd: int) -> int:
    """The whole life of the process; returns its exit status."""
    control = AsyncChannel(socket.socket(fileno=control_fd))
    start = await control.receive()
    assert isinstance(start, StartGateway), f"expected StartGateway, got {type(start).__name__}"
    try:
        gateway = _build(start.config)
    except UserError as error:
        control.send(Failed(reason=str(error), user_error=True))
        return 1
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        control.send(Failed(reason=f"{type(error).__name__}: {error}", user_error=False))
        return 1
    server = Server(
        uvicorn.Config(
            create_app(gateway),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the app reports its own errors; clients' mistakes are not worth a line
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_S,
        ),
        gateway.connections,
    )
    serving = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=listen_fd)]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.001)
    _freeze_garbage()
    control.send(Ready())
    handling = asyncio.create_task(GatewayProcess(control, gateway, server).run())
    ticking = asyncio.create_task(gateway.live.run())
    done, _ = await asyncio.wait((serving, handling, ticking), return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()  # raises what went wrong
    await gateway.tracing.close()
    return 0


def _build(config: GatewayConfig) -> Gateway:
    tokenizer = load_tokenizer(config.model, config.chat_template)
    defaults = read_defaults(config.model, tokenizer.eos_id)
    feed = EventFeed()
    events = EventLog("gateway", config.event_log, tell=feed.publish)
    fleet = Fleet(config.max_queue, tell=events.append, balances=config.balance_prefill)
    return Gateway(config, tokenizer, defaults, fleet, feed, make_tracing())


def _freeze_garbage() -> None:
    """What start-up made stays for good; looking through it at every full collection costs tens of milliseconds."""
    gc.collect()
    gc.freeze()


def _die(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An unhandled exception is a bug of ours: print it and exit; the supervisor decides."""
    loop.default_exception_handler(context)
    os._exit(70)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--supervisor-pid", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    arguments = parser.parse_args()
    process.die_with(arguments.supervisor_pid)
    process.set_name("es-gateway")
    process.raise_open_files()
    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop().set_exception_handler(_die)
        try:
            return runner.run(serve(arguments.control_fd, arguments.listen_fd))
        except ChannelClosed:
            return 1  # the supervisor went away before it had said what to do


if __name__ == "__main__":
    sys.exit(main())
