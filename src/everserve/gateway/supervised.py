"""A running gateway's loop over the supervisor's messages, until Shutdown.

The end of the control channel means that the supervisor does not know this process: it ends at once. If the supervisor
dies, the channel is the next one's (procs/root.py). An orchestrator is attached when there is one, and may be followed
by another (orchestrator.py).
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable

from everserve.errors import OverloadedError
from everserve.gateway.api.jobs import Jobs
from everserve.gateway.gateway import Gateway
from everserve.gateway.http.handing_over import take_in
from everserve.gateway.http.server import Server
from everserve.gateway.succession import Giver
from everserve.wire.channel import AsyncChannel, ChannelClosed, Descriptors
from everserve.wire.messages import (
    Answered,
    AnyMessage,
    Attach,
    EventHappened,
    GatewayBegun,
    GatewayKnown,
    HandedOver,
    OrchestratorAttached,
    ProcessesChanged,
    Ready,
    Shutdown,
    Succeed,
    TakenIn,
)

_SAY_AGAIN_S = 1.0


class Supervised:
    """The loop around one Gateway."""

    def __init__(
        self,
        control: AsyncChannel,
        gateway: Gateway,
        server: Server,
        jobs: Jobs,
        giver: Giver,
        begun: Callable[[], GatewayBegun],
        knows_nothing: int | None = None,
    ) -> None:
        self._control = control
        self._giver = giver
        self._begun = begun  # what a gateway says first
        self._jobs = jobs
        self._awaits = knows_nothing  # the generation for which what comes must be; None: for this one
        self._gateway = gateway
        self._server = server
        assert gateway.supervisor is not None, "it may be asked while what is left is taken over"
        self._supervisor = gateway.supervisor
        self._supervisor_pid: int | None = None
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Handle the supervisor's messages until the HTTP server has ended."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_sigterm)
        self._control.begin_to_read()
        self._say_again()
        while True:
            try:
                message, fds = await self._control.receive_frame()
            except ChannelClosed:
                os._exit(0 if self._draining else 1)
            if self._awaits is None or isinstance(message, Shutdown | HandedOver | TakenIn | Succeed):
                self._handle(message, fds)
            elif isinstance(message, GatewayKnown) and message.generation == self._awaits:
                self._awaits = None

    def _say_again(self) -> None:
        """A supervisor that dies between GatewayBegun and its answer has a successor that knows of neither."""
        if self._awaits is not None:
            self._control.send(self._begun())
            asyncio.get_running_loop().call_later(_SAY_AGAIN_S, self._say_again)

    def _handle(self, message: AnyMessage, fds: Descriptors) -> None:
        if isinstance(message, Attach):
            (fd,) = fds.take()
            self._gateway.fleet.attach(message.rank, message.incarnation, socket.socket(fileno=fd))
        elif isinstance(message, OrchestratorAttached):
            (fd,) = fds.take()
            self._gateway.orchestrator.attach(socket.socket(fileno=fd))
        elif isinstance(message, ProcessesChanged):
            self._on_processes(message)
        elif isinstance(message, EventHappened):
            self._gateway.feed.publish(message.event)
        elif isinstance(message, Answered):
            self._supervisor.on_answer(message)
        elif isinstance(message, HandedOver):
            (fd,) = fds.take()
            self._gateway.departures.arrived(message.cookie)  # it may come back before we hear that it was there
            take_in(message, fd, self._gateway.connections, self._server.create_protocol)
            self._control.send(TakenIn(gateway=message.by, cookie=message.cookie))
        elif isinstance(message, TakenIn):
            self._gateway.departures.arrived(message.cookie)
        elif isinstance(message, Succeed):
            (fd,) = fds.take()
            self._giver.begin(socket.socket(fileno=fd))
        elif isinstance(message, Shutdown):
            self._shut_down(message.grace_s)
        elif isinstance(message, GatewayKnown):
            pass  # the first gateway, or one that knows already
        else:
            raise AssertionError(f"the supervisor does not send {type(message).__name__} to a running gateway")

    def _on_processes(self, message: ProcessesChanged) -> None:
        """There may be another supervisor, which has not heard what the one before was told last."""
        supervisor = next((one.pid for one in message.processes if one.name == "supervisor"), None)
        if self._supervisor_pid not in (None, supervisor):
            self._supervisor.give_up()
            self._control.send(Ready())
        self._supervisor_pid = supervisor
        self._gateway.cluster.on_processes(message)

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
        self._jobs.close()
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
