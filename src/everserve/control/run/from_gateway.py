"""What the gateways say: what they know of streams, and what operators ask for through them.

The machine decides and answers; only an injected fault is something to carry out.
"""

import selectors
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from everserve.control.decide.effects import Lost
from everserve.control.hold.log_references import Logs
from everserve.control.run.injection import Injection
from everserve.control.run.input_queue import InputQueue
from everserve.control.run.worker_traffic import WorkerTraffic
from everserve.control.tell.to_gateway import GatewayEnds
from everserve.tables.ids import Rank, WorkerId
from everserve.tables.outputs import AttentionLoad
from everserve.wire.channel import Channel, ChannelClosed
from everserve.wire.messages import AnyMessage, Ask, GatewayReport, LogSettled, StreamsReported
from everserve.wire.operators import FaultRequest


@dataclass(frozen=True, kw_only=True)
class FromGateway:
    """Reads the channels to the gateways that are there."""

    queue: InputQueue
    selector: selectors.BaseSelector
    gateway: GatewayEnds
    workers: WorkerTraffic
    logs: Logs
    injection: Injection
    loads: dict[int, dict[Rank, AttentionLoad]] = field(default_factory=dict)  # as each gateway has counted last

    def attach(self, number: int, gateway_fd: int) -> None:
        """A new gateway may be announced before the channel to the one before ends."""
        if number in self.gateway.channels:
            self._detach(number)
        self.gateway.attach(number, Channel.of_fd(gateway_fd))
        self.register(number)

    def register(self, number: int) -> None:
        """Read this one from now on."""
        self.selector.register(self.gateway.channels[number], selectors.EVENT_READ, partial(self._read, number))

    def _read(self, number: int) -> None:
        channel = self.gateway.channels.get(number)
        if channel is None:
            return  # it was closed in this turn
        try:
            for message in channel.receive_all():
                self._on_message(number, message)
        except ChannelClosed:
            self._detach(number)

    def _detach(self, number: int) -> None:
        channel = self.gateway.channels.pop(number)
        self.selector.unregister(channel)
        channel.close()

    def _on_message(self, number: int, message: AnyMessage) -> None:
        match message:
            case Ask() if not self.gateway.answers.is_new(message.id):
                if (answered := self.gateway.answers.find(message.id)) is not None:
                    self.gateway.send(answered)
            case Ask(request=FaultRequest(device=None, host=None) as fault):
                self.injection.inject(message.id, fault)
            case Ask():
                self.queue.tell(message)
            case StreamsReported():
                self.loads[number] = message.loads
                self.queue.tell(StreamsReported(loads=_sum(self.loads.values())))
            case GatewayReport():
                self.queue.tell(message)
                if self.queue.is_recovering:
                    self.logs.needed[number] = message.logs
                else:
                    self.logs.settle_lost_but(number, message.logs)
                    self._tell_lost(set(message.lost))
            case LogSettled():
                self.logs.settle(number, WorkerId(message.rank, message.incarnation))
            case _:
                raise AssertionError(f"the gateway does not send {type(message).__name__} to the orchestrator")

    def _tell_lost(self, known: set[WorkerId]) -> None:
        """Incarnations that were declared gone, and may still have a process, which a new gateway must not use."""
        for end in self.workers.ends:
            worker = WorkerId(end.rank, end.incarnation)
            if not self.workers.machine.counts(worker) and worker not in known:
                self.gateway.tell_lost(
                    Lost(
                        end.rank, end.incarnation, end.roles, "hang", "before this gateway was there", is_expected=False
                    )
                )


def _sum(loads: Iterable[dict[Rank, AttentionLoad]]) -> dict[Rank, AttentionLoad]:
    """What workers have of all gateways. Each of these sees all blocks, and its own streams."""
    total: dict[Rank, AttentionLoad] = {}
    for load in loads:
        for rank, one in load.items():
            other = total.get(rank)
            total[rank] = one if other is None else _both(one, other)
    return total


def _both(one: AttentionLoad, other: AttentionLoad) -> AttentionLoad:
    return AttentionLoad(
        num_streams=one.num_streams + other.num_streams,
        num_used_blocks=max(one.num_used_blocks, other.num_used_blocks),
        num_free_blocks=min(one.num_free_blocks, other.num_free_blocks),
    )
