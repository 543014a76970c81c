"""What the dashboard watches: `/cluster/live`, one stream of everything that changes, four times a second.

A reader has no queue, only a position: the last tick and the last timeline version that it was sent. What is newer
is taken from rings that all readers share, so a slow reader costs nothing and misses what is older than the ring; one
that comes back says with `since` where it was.
"""

import asyncio
import time
import uuid
from collections import deque

import msgspec
from msgspec import UNSET, UnsetType

from everserve import __version__
from everserve.config.gateway import GatewayConfig
from everserve.gateway.http import sse
from everserve.gateway.http.access import Access
from everserve.gateway.http.responses import ClusterView
from everserve.gateway.observe.cluster import Cluster
from everserve.gateway.observe.incidents import Entry
from everserve.gateway.observe.readers import ReaderStream
from everserve.gateway.observe.timeline import Timeline
from everserve.gateway.streams.cadence import TICK_S, Tick
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
        self, config: GatewayConfig, access: Access, fleet: Fleet, cluster: Cluster, timeline: Timeline
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
        self._view: ClusterView | None = None  # of this tick, made when the first reader asks
        self._ticked_s = fleet.clock()
        self._readers: set[_Reader] = set()

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
        self.ticks.append(cadence.close(n, elapsed_s, unix_s, waiting_s, fleet.num_streams))
        self._ticked_s, self._view = now_s, None
        for reader in self._readers:
            reader.wake()

    def view(self) -> ClusterView:
        if self._view is None:
            self._view = self._cluster.view()
        return self._view

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


class _Reader:
    """One client: where it is."""

    def __init__(self, live: Live, since: int | None) -> None:
        self._live = live
        self._since = -1 if since is None else since
        self._version = 0
        self._view: ClusterView | None = None
        self._is_new = True
        self._ended = False
        self._changed = asyncio.Event()

    def wake(self) -> None:
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def take(self) -> bytes | None:
        """The next event, or None at the end."""
        if not self._is_new:
            await self._changed.wait()  # it may have been woken while it was sending
            self._changed.clear()
        return None if self._ended else sse.named_event("news", self._news())

    def _news(self) -> News:
        live = self._live
        hello = live.hello if self._is_new else UNSET
        last = live.ticks[-1].n if live.ticks else -1
        if self._since > last:
            self._since = -1  # it remembers another gateway
        ticks = [tick for tick in live.ticks if tick.n > self._since] if last - self._since > 1 else []
        if last - self._since == 1:
            ticks = [live.ticks[-1]]
        entries = live.timeline.entries(self._version) if live.timeline.version > self._version else UNSET
        view = live.view()
        cluster = view if view != self._view else UNSET
        self._since, self._version, self._view, self._is_new = last, live.timeline.version, view, False
        return News(hello=hello, ticks=ticks, entries=entries, cluster=cluster)


class LiveResponse(ReaderStream):
    """Everything, and then what changes."""

    def __init__(self, live: Live, since: int | None) -> None:
        super().__init__(lambda: live.open_reader(since), live.close_reader)
