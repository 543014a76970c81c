"""Who is here now, what happened, and what happens."""

import asyncio
from collections import Counter, deque

from starlette.types import Receive, Scope, Send

from everserve.gateway import sse
from everserve.gateway.http import watch_disconnect
from everserve.gateway.responses import ClusterView, ProcessView, WorkerView
from everserve.gateway.workers import Fleet
from everserve.runtime.events import AnyEvent
from everserve.tables.members import Members, Worker

_NUM_RECENT = 1000
_MAX_BEHIND = 2000  # events; a reader further behind is dropped
_HEARTBEAT_S = 15.0


class Cluster:
    """The latest membership table and the recent events, as the supervisor told us."""

    def __init__(self, fleet: Fleet) -> None:
        self.members: Members | None = None
        self._fleet = fleet
        self._recent: deque[bytes] = deque(maxlen=_NUM_RECENT)
        self._readers: set[_Reader] = set()

    @property
    def epoch(self) -> int:
        return self.members.epoch if self.members is not None else 0

    def violations(self) -> tuple[str, ...]:
        """Unknown is not healthy: before the first table there is one violation."""
        if self.members is None:
            return ("no membership table has been published yet",)
        return self.members.violations()

    def count_workers(self) -> Counter[tuple[str, str]]:
        """How many workers there are, by role and state."""
        workers = self.members.workers if self.members is not None else ()
        return Counter((role, worker.state.value) for worker in workers for role in worker.roles)

    def view(self) -> ClusterView:
        members = self.members
        return ClusterView(
            epoch=self.epoch,
            violations=list(self.violations()),
            degraded=[],
            processes=[ProcessView(name=p.name, pid=p.pid) for p in members.processes] if members else [],
            workers=[self._view_worker(worker) for worker in members.workers] if members else [],
        )

    def on_event(self, event: AnyEvent) -> None:
        """Remember it and tell all readers."""
        data = sse.named_event(str(event.__struct_config__.tag), event)
        self._recent.append(data)
        for reader in list(self._readers):
            reader.put(data)

    def open_reader(self) -> "_Reader":
        """A reader that begins with the recent events."""
        reader = _Reader(self._recent)
        self._readers.add(reader)
        return reader

    def close_reader(self, reader: "_Reader") -> None:
        self._readers.discard(reader)

    def close(self) -> None:
        """The gateway ends: so do all event streams."""
        for reader in self._readers:
            reader.end()

    def _view_worker(self, worker: Worker) -> WorkerView:
        stats = self._fleet.stats(worker.rank)
        return WorkerView(
            rank=worker.rank,
            incarnation=worker.incarnation,
            pid=worker.pid,
            roles=list(worker.roles),
            state=worker.state.value,
            requests=self._fleet.num_streams(worker.rank),
            running=stats.num_running if stats else 0,
            waiting=stats.num_waiting if stats else 0,
            kv_cache_usage=stats.kv_usage if stats else 0.0,
        )


class _Reader:
    """One client of /events: what it has not been sent yet."""

    def __init__(self, recent: deque[bytes]) -> None:
        self._waiting = deque(recent)
        self._ended = False
        self._changed = asyncio.Event()

    def put(self, data: bytes) -> None:
        if len(self._waiting) >= _MAX_BEHIND:
            self.end()  # it does not read; remembering more for it would have no end
        elif not self._ended:
            self._waiting.append(data)
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def take(self) -> bytes | None:
        """Everything that waits (a heartbeat if nothing happens for long), or None at the end."""
        if not self._waiting and not self._ended:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), _HEARTBEAT_S)
            except TimeoutError:
                return sse.HEARTBEAT
        if self._ended:
            return None
        data = b"".join(self._waiting)
        self._waiting.clear()
        return data


class EventsResponse(sse.EventStream):
    """The recent events, and then each as it happens."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.start(send)
        reader = self._cluster.open_reader()
        try:
            with watch_disconnect(receive, reader.end):
                while scope["method"] != "HEAD" and (data := await reader.take()) is not None:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._cluster.close_reader(reader)
