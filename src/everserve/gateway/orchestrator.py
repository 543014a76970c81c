"""The channel to the orchestrator: its tables, its verdicts on workers, and faults that an operator asks for.

If it ends, the gateway goes on with the last tables and says so: tokens need nobody who decides.
"""

import asyncio
import socket
import uuid
from collections.abc import Callable

from everserve.errors import EverserveError, ProtocolError
from everserve.gateway.cluster import Cluster
from everserve.gateway.fleet import Fleet
from everserve.runtime.channel import AsyncChannel, ChannelClosed
from everserve.runtime.events import AnyEvent
from everserve.runtime.messages import (
    AnyMessage,
    ClusterChanged,
    EventHappened,
    FaultInjected,
    InjectFault,
    WorkerLost,
)
from everserve.tables.ids import Rank


class OrchestratorGone(EverserveError):
    """Nobody is there who could act on this."""


class OrchestratorLink:
    """Reads what the orchestrator says, and asks it for faults."""

    def __init__(
        self, sock: socket.socket, fleet: Fleet, cluster: Cluster, publish: Callable[[AnyEvent], None]
    ) -> None:
        self._channel = AsyncChannel(sock)
        self._fleet = fleet
        self._cluster = cluster
        self._publish = publish
        self._faults: dict[str, asyncio.Future[FaultInjected]] = {}  # by the id of the question
        self._has_ended = False

    async def run(self) -> None:
        """Handle messages until the channel ends."""
        while True:
            try:
                message = await self._channel.receive()
            except (ChannelClosed, ProtocolError, OSError):
                self._end()
                return
            self._handle(message)

    async def inject(self, rank: Rank, signal: int) -> FaultInjected:
        """Have a signal sent to the worker in this seat; returns when it was sent, or could not be."""
        if self._has_ended:
            raise OrchestratorGone("The orchestrator is gone: nobody can send signals to workers.")
        id = uuid.uuid4().hex
        answer: asyncio.Future[FaultInjected] = asyncio.get_running_loop().create_future()
        self._faults[id] = answer
        self._channel.send(InjectFault(id=id, rank=rank, signal=signal))
        try:
            return await answer
        finally:
            del self._faults[id]

    def close(self) -> None:
        self._channel.close()

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, WorkerLost):
            self._fleet.lose(message.rank, message.incarnation, message.roles, message.cause)
        elif isinstance(message, ClusterChanged):
            self._cluster.on_changed(message)
        elif isinstance(message, EventHappened):
            self._publish(message.event)
        elif isinstance(message, FaultInjected):
            answer = self._faults.get(message.id)
            if answer is not None and not answer.done():
                answer.set_result(message)
        else:
            raise AssertionError(f"the orchestrator does not send {type(message).__name__} to the gateway")

    def _end(self) -> None:
        self._has_ended = True
        self._cluster.orchestrator_is_gone = True
        self._fleet.has_orchestrator = False
        for answer in self._faults.values():
            if not answer.done():
                answer.set_exception(OrchestratorGone("The orchestrator died before it had answered."))
