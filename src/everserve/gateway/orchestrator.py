"""The channel to the orchestrator: its tables, its verdicts on workers, and what an operator asks it for.

    none --attach--> attached --its end, or a newer one--> none

The gateway starts without an orchestrator and outlives every one that it gets. While there is none it keeps the last
tables and reports itself degraded; streams do not need an orchestrator. A new one is first told what the gateway knows
(GatewayReport). Messages of an older one are not read.
"""

import asyncio
import socket
from collections.abc import Callable

from everserve.errors import ProtocolError
from everserve.gateway.observe.cluster import Cluster
from everserve.gateway.questions import Questions, Unanswered
from everserve.gateway.streams.fleet import Fleet
from everserve.tables.ids import Epoch, Rank, WorkerId
from everserve.tables.outputs import AttentionLoad
from everserve.wire.channel import AsyncChannel, ChannelClosed
from everserve.wire.events import AnyEvent
from everserve.wire.messages import (
    Answered,
    AnyMessage,
    Ask,
    ClusterChanged,
    EventHappened,
    ExpertsChanged,
    GatewayReport,
    LogSettled,
    StreamsReported,
    WorkerLost,
)
from everserve.wire.operators import AnyRequest

_COUNT_S = 1.0  # between two reports of what attention workers have


class OrchestratorLink:
    """Reads what the orchestrator says, tells it what is settled, and asks it for what operators want."""

    def __init__(self, fleet: Fleet, cluster: Cluster, publish: Callable[[AnyEvent], None]) -> None:
        self._fleet = fleet
        self._cluster = cluster
        self._publish = publish
        self._channel: AsyncChannel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._counting: asyncio.Task[None] | None = None
        self._questions = Questions("orchestrator", self._ask)

    def attach(self, sock: socket.socket) -> None:
        """A new orchestrator is there."""
        self.close()
        self._channel = AsyncChannel(sock)
        self._channel.send(
            GatewayReport(
                epoch=Epoch(self._cluster.epoch), logs=self._fleet.logs_in_use(), lost=self._fleet.lost_incarnations()
            )
        )
        self._fleet.has_orchestrator = True
        self._fleet.logs.report_to(self._tell_settled)
        self._reading = asyncio.ensure_future(self._read(self._channel))
        self._counting = asyncio.ensure_future(self._count_streams())
        self._reading.add_done_callback(lambda task: task.cancelled() or task.result())  # raises what went wrong

    def close(self) -> None:
        """This orchestrator is gone, or a newer one is there."""
        if self._channel is None:
            return
        assert self._reading is not None and self._counting is not None
        self._reading.cancel()
        self._counting.cancel()
        self._channel.close()
        self._channel = None
        self._cluster.orchestrator_is_gone = True
        self._fleet.has_orchestrator = False
        self._fleet.logs.report_to(None)
        self._questions.give_up()

    async def ask(self, request: AnyRequest, id: str = "") -> Answered:
        """What an operator asks for; returns when that is decided, or raises Unanswered."""
        return await self._questions.ask(request, id)

    def _ask(self, ask: Ask) -> None:
        self._send(StreamsReported(loads=self._loads()))  # what is decided may depend on them: no old count
        self._send(ask)

    async def _count_streams(self) -> None:
        """What attention workers have, now and then: by this the orchestrator chooses one for another role, and knows
        when a device is quiet."""
        told: dict[Rank, AttentionLoad] = {}
        while True:
            await asyncio.sleep(_COUNT_S)
            loads = self._loads()
            if loads != told and self._channel is not None:
                told = loads
                self._channel.send(StreamsReported(loads=loads))

    def _loads(self) -> dict[Rank, AttentionLoad]:
        return {link.rank: link.load for link in self._fleet.ready_links()}

    async def _read(self, channel: AsyncChannel) -> None:
        while True:
            try:
                message = await channel.receive()
            except (ChannelClosed, ProtocolError, OSError):
                self.close()
                return
            self._handle(message)

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, WorkerLost):
            self._fleet.lose(message.rank, message.incarnation, message.roles, message.cause)
        elif isinstance(message, ClusterChanged):
            self._cluster.on_changed(message)
            self._fleet.avoid(WorkerId(one.rank, one.incarnation) for one in message.members.workers if one.is_slow)
        elif isinstance(message, ExpertsChanged):
            self._cluster.experts.on_changed(message)
        elif isinstance(message, EventHappened):
            self._publish(message.event)
        elif isinstance(message, Answered):
            self._questions.on_answer(message)
        else:
            raise AssertionError(f"the orchestrator does not send {type(message).__name__} to the gateway")

    def _tell_settled(self, log: WorkerId) -> None:
        rank, incarnation = log
        self._send(LogSettled(rank=rank, incarnation=incarnation))

    def _send(self, message: AnyMessage) -> None:
        if self._channel is None:
            raise Unanswered("The orchestrator is gone; this works again when a new one has started.")
        self._channel.send(message)
