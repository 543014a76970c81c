"""What the dashboard watches: `/cluster/live`, one stream of everything that changes, four times a second.

A reader has no queue, only a position: the last tick, timeline version and cluster that it was sent. What is newer is
taken from rings that all readers share, so a slow reader costs nothing and misses what is older than the ring; one that
comes back says with `since` where it was. Readers with the same position get the same bytes, written once.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from everserve import __version__
from everserve.config.gateway import GatewayConfig
from everserve.gateway.http import sse
from everserve.gateway.http.access import Access
from everserve.gateway.http.responses import ClusterView
from everserve.gateway.http.slices import Slices
from everserve.gateway.http.turns import Turns
from everserve.gateway.observe.cluster import Cluster
from everserve.gateway.observe.incidents import Entry
from everserve.gateway.observe.readers import ReaderStream
from everserve.gateway.observe.timeline import Timeline
from everserve.gateway.streams.cadence import TICK_S, Tick, together
from everserve.gateway.streams.fleet import Fleet

NUM_TICKS = 1200  # five minutes


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the gateway lives."""

    gateway: str  # another one means that all that was known is of the past
    version: str
    models: list[str]
    enable_chaos: bool
    tick_s: float
    num_ticks: int


class News(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the stream. The first one has everything."""

    hello: InstanceInfo | UnsetType = UNSET
    ticks: list[Tick]
    entries: list[Entry] | UnsetType = UNSET  # those that are new or have changed
    cluster: ClusterView | UnsetType = UNSET  # if it has changed


class Live:
    """The last minutes, and their readers."""

    def __init__(
        self,
        config: GatewayConfig,
        access: Access,
        fleet: Fleet,
        cluster: Cluster,
        timeline: Timeline,
        slices: Slices,
    ) -> None:
        self.hello = InstanceInfo(
            gateway=uuid.uuid4().hex,
            version=__version__,
            models=config.served_model_names,
            enable_chaos=config.enable_chaos and access.may_administer,
            tick_s=TICK_S,
            num_ticks=NUM_TICKS,
        )
        self.timeline = timeline
        self.ticks: deque[Tick] = deque(maxlen=NUM_TICKS)
        self._fleet = fleet
        self._cluster = cluster
        self._view = cluster.view()
        self._view_number = 1  # counts changes
        self._is_viewed = False  # in this tick
        self._written: dict[_Position, tuple[bytes, _Position]] = {}  # in this tick
        self._slices = slices
        self._ticked_s = fleet.clock()
        self._readers: set[_Reader] = set()
        self.on_tick: Callable[[], None] = lambda: None
        self.own_tick: Tick | None = None  # of this gateway's streams
        self.ticks_elsewhere: Callable[[], list[Tick]] = list  # the last ones of the other gateways

    async def run(self) -> None:
        """Tick for ever. A tick that comes late is longer, and none is made up for it."""
        while True:
            await asyncio.sleep(max(0.0, self._ticked_s + TICK_S - self._fleet.clock()))
            self.tick(time.time())

    def tick(self, unix_s: float) -> None:
        """A quarter of a second is over."""
        fleet, now_s = self._fleet, self._fleet.clock()
        n = self.ticks[-1].n + 1 if self.ticks else 0
        waiting_s = fleet.longest_wait_s(now_s)
        cadence = fleet.totals.cadence
        self.timeline.measure(now_s, cadence.pause_across, waiting_s)
        elapsed_s = max(now_s - self._ticked_s, 1e-3)
        self.own_tick = cadence.close(n, elapsed_s, unix_s, waiting_s, fleet.num_streams)
        self.ticks.append(together(self.own_tick, self.ticks_elsewhere()))
        self._ticked_s, self._is_viewed = now_s, False
        self._written.clear()
        for reader in self._readers:
            reader.wake()
        self.on_tick()

    async def news_after(self, position: "_Position") -> tuple[bytes, "_Position"]:
        """The event that brings a reader from this position up to date, and where that is."""
        if position.is_new and position not in self._written:
            return await self._slices.call(lambda: self._write(position))  # minutes of ticks
        return self._write(position)

    def _write(self, position: "_Position") -> tuple[bytes, "_Position"]:
        if position not in self._written:
            self._look()
            last = self.ticks[-1].n if self.ticks else -1
            event = sse.named_event("news", self._news(position, last))
            self._written[position] = event, _Position(last, self.timeline.version, self._view_number, is_new=False)
        return self._written[position]

    def _look(self) -> None:
        if not self._is_viewed:
            self._is_viewed = True
            if (view := self._cluster.view()) != self._view:
                self._view, self._view_number = view, self._view_number + 1

    def _news(self, position: "_Position", last: int) -> News:
        since = position.since if position.since <= last else -1  # it remembers another gateway
        ticks = [tick for tick in self.ticks if tick.n > since] if last - since > 1 else []
        if last - since == 1:
            ticks = [self.ticks[-1]]
        has_entries = self.timeline.version > position.version
        return News(
            hello=self.hello if position.is_new else UNSET,
            ticks=ticks,
            entries=self.timeline.entries(position.version) if has_entries else UNSET,
            cluster=self._view if position.view_number != self._view_number else UNSET,
        )

    def open_reader(self, since: int | None) -> "_Reader":
        reader = _Reader(self, since)
        self._readers.add(reader)
        return reader

    def close_reader(self, reader: "_Reader") -> None:
        self._readers.discard(reader)

    def close(self) -> None:
        """The gateway ends: so do all streams."""
        for reader in self._readers:
            reader.end()


class _Position(NamedTuple):
    """What a reader has been sent: the last tick, timeline version and cluster."""

    since: int
    version: int = 0
    view_number: int = 0
    is_new: bool = True


class _Reader:
    """One client: where it is."""

    def __init__(self, live: Live, since: int | None) -> None:
        self._live = live
        self._position = _Position(-1 if since is None else since)
        self._ended = False
        self._changed = asyncio.Event()

    def wake(self) -> None:
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def wait(self) -> None:
        """Until the next tick. It may have been woken while it was sending."""
        if not self._position.is_new:
            await self._changed.wait()
            self._changed.clear()

    async def take(self) -> bytes | None:
        """The next event, or None at the end."""
        if self._ended:
            return None
        event, self._position = await self._live.news_after(self._position)
        return event


class LiveResponse(ReaderStream):
    """Everything, and then what changes."""

    def __init__(self, live: Live, since: int | None, turns: Turns) -> None:
        super().__init__(turns, lambda: live.open_reader(since), live.close_reader)
