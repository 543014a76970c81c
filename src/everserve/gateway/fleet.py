"""The attention workers, and every stream that runs on one of them or waits for one.

Streams are bound late: a stream is given to a worker when one has room, and waits here until then. Losing a worker is
no event for its clients: its streams wait again, in front of the others, and go on elsewhere after the tokens that
were delivered. Only their own end, their client or `close` ends them.

A worker is lost when its channel ends, when the orchestrator says so, or when a newer incarnation takes its seat;
whichever comes first. What it still sends after that is dropped (links.py).
"""

import itertools
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from everserve.errors import EverserveError, OverloadedError, RequestError
from everserve.gateway.links import WorkerLink
from everserve.gateway.metrics import EngineMetrics, FleetMetrics
from everserve.gateway.streams import Stream
from everserve.gateway.waiting import WaitingLine
from everserve.runtime.events import AnyEvent, BadBytes, RequestResumed, StaleDropped
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.tables.outputs import EngineStats

_PROCESS = "gateway"


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """What every stream must keep to, wherever it runs."""

    max_total_tokens: int
    vocab_size: int


class Fleet:
    """All links and all streams."""

    def __init__(
        self,
        max_queue: int,
        tell: Callable[[AnyEvent], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_queue = max_queue
        self.clock = clock
        self.totals = FleetMetrics()
        self.engines: dict[Rank, EngineMetrics] = {}
        self.limits: ModelLimits | None = None  # known once a worker was ready, and remembered when none is
        self.has_orchestrator = True  # it says why a worker was lost; without it we can only count that it was
        self._tell = tell
        self._links: dict[Rank, WorkerLink] = {}
        self._fenced: set[WorkerLink] = set()
        self._lost: dict[Rank, Incarnation] = {}  # the latest of each rank that was declared gone
        self._waiting = WaitingLine()
        self._groups = itertools.count(1)

    # -- workers ---------------------------------------------------------------------------------

    def attach(self, rank: Rank, incarnation: Incarnation, sock: socket.socket) -> None:
        """A new process in this seat. It may have been declared gone before we hear of it."""
        old = self._links.get(rank)
        metrics = self.engines.setdefault(rank, EngineMetrics())
        link = WorkerLink(rank, incarnation, sock, metrics, self)
        if incarnation <= self._lost.get(rank, 0) or (old is not None and incarnation < old.incarnation):
            link.fence()
            self._fenced.add(link)
            return
        if old is not None:
            self._fence(old)
        self._links[rank] = link

    def lose(self, rank: Rank, incarnation: Incarnation, roles: Iterable[Role], cause: str) -> None:
        """The orchestrator's decision: this incarnation is gone."""
        if incarnation <= self._lost.get(rank, 0):
            return  # said before
        self._lost[rank] = incarnation
        for role in roles:
            self.totals.failovers[role.value, cause] += 1
        link = self._links.get(rank)
        if link is not None and link.incarnation <= incarnation:
            self._fence(link)

    def on_ready(self, link: WorkerLink) -> None:
        """A worker can serve. Workers of one model hardly differ; where they do, requests must fit the smallest."""
        readies = [(other.max_total_tokens, other.ready.vocab_size) for other in self._links.values() if other.ready]
        self.limits = ModelLimits(
            max_total_tokens=min(total for total, _ in readies), vocab_size=min(size for _, size in readies)
        )
        self._bind_waiting(self.clock())

    def on_step(self) -> None:
        """Streams may have ended, so there may be room."""
        if self._waiting:
            self._bind_waiting(self.clock())

    def on_bad_bytes(self, num_dropped: int) -> None:
        self._tell(BadBytes(process=_PROCESS, num_dropped=num_dropped))

    def on_end(self, link: WorkerLink) -> None:
        """A channel has ended."""
        link.close()
        if link.is_fenced:
            self._fenced.discard(link)
            if link.num_stale:
                self._tell(_stale_event(link))
            return
        del self._links[link.rank]
        if not self.has_orchestrator:
            self.totals.failovers[Role.ATTENTION.value, "closed"] += 1
        self._resume_streams_of(link)

    # -- streams ---------------------------------------------------------------------------------

    @property
    def num_streams(self) -> int:
        """Running and waiting."""
        return sum(len(link.streams) for link in self._links.values()) + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Streams that wait here for a worker."""
        return len(self._waiting)

    def check_room(self, num_streams: int) -> None:
        """Raise unless so many more streams are welcome now. Nothing is kept."""
        if num_streams > self.max_queue:
            raise RequestError(
                f"This request asks for {num_streams} choices in total (prompts times 'n'); "
                f"this server takes at most {self.max_queue} at a time."
            )
        if self.num_streams + num_streams > self.max_queue:
            raise OverloadedError(
                f"The server is busy: {self.num_streams} of {self.max_queue} places are taken "
                f"and this request needs {num_streams}."
            )

    def submit(self, siblings: list[Stream]) -> None:
        """Run these streams, which have one prompt, on the same worker, as soon as one has room."""
        assert self.limits is not None, "nobody knows yet whether these streams can run"
        now_s, group = self.clock(), next(self._groups)
        for stream in siblings:
            stream.group, stream.submitted_s = group, now_s
            stream.metrics = next(iter(self.engines.values()))  # for those that never reach a worker
            self._waiting.add(stream)
        self._bind_waiting(now_s)

    def cancel(self, stream: Stream) -> None:
        """Nobody waits for this stream any more; nothing happens if it has ended."""
        if stream.link is not None:
            stream.link.cancel(stream)
            self.on_step()
        elif self._waiting.remove(stream):
            self._bind_waiting(self.clock())  # fewer siblings may fit where all of them did not

    def close(self, error: EverserveError) -> None:
        """The gateway ends: so does every stream."""
        streams = [stream for link in self._links.values() for stream in link.streams.remove_all()]
        streams += self._waiting.remove_all()
        for link in (*self._links.values(), *self._fenced):
            link.close()
        self._links.clear()
        self._fenced.clear()
        for stream in streams:
            stream.listener.on_failure(error)

    # -- views -----------------------------------------------------------------------------------

    def ready_links(self) -> list[WorkerLink]:
        return [link for link in self._links.values() if link.ready is not None]

    def link(self, rank: Rank) -> WorkerLink | None:
        """The link to the worker that has this seat now."""
        return self._links.get(rank)

    def stats(self, rank: Rank) -> EngineStats | None:
        link = self._links.get(rank)
        return link.stats if link is not None else None

    # -- inside ----------------------------------------------------------------------------------

    def _fence(self, link: WorkerLink) -> None:
        """Lost, but its channel is open: it may still speak."""
        del self._links[link.rank]
        self._fenced.add(link)
        link.fence()
        self._resume_streams_of(link)

    def _resume_streams_of(self, link: WorkerLink) -> None:
        """Its streams wait in front of all others, and usually not for long."""
        now_s = self.clock()
        if link.stats is not None:
            link.metrics.add_past(link.stats)
        for stream in link.streams.remove_all():
            stream.mark_lost(link.rank, now_s)
            self._waiting.add(stream)
        self._bind_waiting(now_s)

    def _bind_waiting(self, now_s: float) -> None:
        """Give waiting streams to workers with room, in order."""
        resumed: list[tuple[Stream, Rank]] = []
        while siblings := self._waiting.first():
            link = choose(self.ready_links(), len(siblings))
            if link is None:
                break
            for stream in siblings[: link.room]:
                self._waiting.remove(stream)
                if stream.lost_s is not None:
                    resumed.append((stream, link.rank))
                else:
                    stream.waited_s = now_s - stream.submitted_s
                link.submit(stream)
        self.totals.num_resumed += len(resumed)
        for stream, rank in resumed:  # after all of them are on their way
            self._tell(_resumed_event(stream, rank, now_s))


def choose(links: list[WorkerLink], num_siblings: int) -> WorkerLink | None:
    """Who gets these streams: of the workers with room for all, the one with the fewest tokens left to compute.

    Siblings that are too many for any worker go in parts.
    """
    num_wanted = num_siblings if any(link.capacity >= num_siblings for link in links) else 1
    fitting = [link for link in links if link.room >= num_wanted]
    return min(fitting, key=lambda link: link.streams.num_owed, default=None)


def _resumed_event(stream: Stream, to_rank: Rank, now_s: float) -> RequestResumed:
    assert stream.lost_s is not None and stream.lost_rank is not None
    return RequestResumed(
        process=_PROCESS,
        request_id=stream.spec.id,
        from_rank=stream.lost_rank,
        to_rank=to_rank,
        num_known=len(stream.tokens),
        stalled_s=now_s - stream.lost_s,
    )


def _stale_event(link: WorkerLink) -> StaleDropped:
    return StaleDropped(
        process=_PROCESS,
        rank=link.rank,
        incarnation=link.incarnation,
        count=link.num_stale,
        what="messages to the gateway",
    )
