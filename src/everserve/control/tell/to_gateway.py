"""Messages to the gateways: tables, losses, events and counters. What is for one that is gone is dropped."""

import time

from everserve.control.decide.effects import Lost, Publish
from everserve.tables.ids import Rank
from everserve.tables.outputs import ExpertStats
from everserve.tables.slots import Fill
from everserve.tables.survival import Survival
from everserve.wire.answers import Answers
from everserve.wire.channel import Channel
from everserve.wire.events import AnyEvent
from everserve.wire.messages import Answered, AnyMessage, ClusterChanged, EventHappened, WorkerLost

_RESEND_S = 1.0  # the shortest time between two updates that only change counters


class GatewayEnds:
    """The orchestrator's ends of the channels to the gateways. All are told the same."""

    def __init__(self, channel: Channel) -> None:
        self.channels: dict[int, Channel] = {0: channel}  # by number: to those that are there
        self.num_attached = 1  # gateways so far
        self.answers = Answers()
        self._expert_stats: dict[Rank, ExpertStats] = {}
        self._slowness: dict[Rank, float] = {}
        self._survivals: tuple[Survival, ...] = ()
        self._num_stale = 0
        self._num_health_troubles = 0
        self._has_news = False
        self._has_changed = False
        self._told_s = 0.0

    def attach(self, number: int, channel: Channel) -> None:
        """There is another one, which is told everything."""
        self.channels[number] = channel
        self.num_attached += 1
        self._has_changed = True

    def send(self, message: AnyMessage) -> None:
        if isinstance(message, Answered):
            self.answers.note(message)
        for channel in self.channels.values():
            channel.send(message)

    def tell(self, event: AnyEvent) -> None:
        self.send(EventHappened(event=event))

    def tell_lost(self, lost: Lost) -> None:
        self.send(WorkerLost(rank=lost.rank, incarnation=lost.incarnation, roles=lost.roles, cause=lost.cause))

    def tell_cluster(
        self, tables: Publish, moves: dict[Rank, tuple[Fill, ...]], mapping: tuple[Rank, ...] = ()
    ) -> None:
        """The tables of a new epoch, or the same ones with new counters. `moves`: slots that are being filled, by
        `mapping` without a copy."""
        self._told_s = time.monotonic()
        self._has_news = self._has_changed = False
        self.send(
            ClusterChanged(
                members=tables.members,
                conditions=tables.conditions,
                degraded=tables.degraded,
                num_experts_without_place=tables.routes.num_without_place if tables.routes is not None else 0,
                expert_stats=dict(self._expert_stats),
                num_stale=self._num_stale,
                num_survivable_deaths=tables.routes.num_survivable if tables.routes is not None else None,
                gone=tables.gone,
                hosts=tables.hosts,
                health=tables.health,
                num_health_troubles=self._num_health_troubles,
                moves=moves,
                mapping=mapping,
                slowness=self._slowness,
                survivals=self._survivals,
                num_masked_experts=len(tables.routes.masked_experts()) if tables.routes is not None else 0,
            )
        )

    def note_change(self) -> None:
        """A condition of validity or a move has changed, the tables have not: sent once, at the end of this turn."""
        self._has_changed = True

    def count_expert(self, rank: Rank, stats: ExpertStats) -> None:
        self._expert_stats[rank] = stats
        self._has_news = True

    def count_slowness(self, ratios: dict[Rank, float]) -> None:
        self._has_news |= ratios != self._slowness
        self._slowness = ratios

    def tell_survivals(self, survivals: tuple[Survival, ...]) -> None:
        """Which failures are survived now: sent with the next tables, at the end of this turn if they are others."""
        self._has_changed |= survivals != self._survivals
        self._survivals = survivals

    def count_stale(self, num: int) -> None:
        self._num_stale += num
        self._has_news = True

    def count_health_troubles(self, num: int) -> None:
        """So many in all."""
        self._has_news |= num != self._num_health_troubles
        self._num_health_troubles = num

    def flush(
        self, tables: Publish | None, moves: dict[Rank, tuple[Fill, ...]], mapping: tuple[Rank, ...] = ()
    ) -> None:
        """Write what the kernel did not take before, and send updates that are due. `tables`: None before the first."""
        has_old_news = self._has_news and time.monotonic() - self._told_s > _RESEND_S
        if tables is not None and (self._has_changed or has_old_news):
            self.tell_cluster(tables, moves, mapping)
        for channel in self.channels.values():
            channel.flush()
