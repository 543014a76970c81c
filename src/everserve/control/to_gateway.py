"""Messages to the gateway: tables, losses, events and counters. If the gateway is gone they are dropped."""

import time

from everserve.control.effects import Lost, Publish
from everserve.tables.ids import Rank
from everserve.tables.outputs import ExpertStats
from everserve.tables.slots import Fill
from everserve.tables.survival import Survival
from everserve.wire.channel import Channel
from everserve.wire.events import AnyEvent
from everserve.wire.messages import AnyMessage, ClusterChanged, EventHappened, WorkerLost

_RESEND_S = 1.0  # the shortest time between two updates that only change counters


class GatewayEnd:
    """The orchestrator's end of the channel to the gateway."""

    def __init__(self, channel: Channel) -> None:
        self.channel: Channel | None = channel
        self._expert_stats: dict[Rank, ExpertStats] = {}
        self._slowness: dict[Rank, float] = {}
        self._survivals: tuple[Survival, ...] = ()
        self._num_stale = 0
        self._num_health_troubles = 0
        self._has_news = False
        self._has_changed = False
        self._told_s = 0.0

    def send(self, message: AnyMessage) -> None:
        if self.channel is not None:
            self.channel.send(message)

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
        self._slowness = ratios
        self._has_news = True

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
        if self.channel is not None:
            self.channel.flush()
