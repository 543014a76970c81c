"""The attention workers, and every stream that runs on one of them or waits for one.

Streams are bound late: a stream is given to a worker when one has room, and waits here until then. When a worker is
lost its streams wait again, in front of new ones, and go on at other workers after the tokens that were delivered. A
stream ends by itself, by its client, by `close`, or because it ends its workers (poison.py).

A worker is lost when its channel ends, when the orchestrator says so, or when a newer incarnation takes its seat;
whichever comes first. What it still sends after that is dropped (links.py). A worker that leaves gives its streams back
first; for them it is the same, only sooner. Where they left off is in its log, until all of them go on
(log_references.py).
"""

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from everserve.errors import EverserveError, OverloadedError, RequestError
from everserve.gateway.streams import poison
from everserve.gateway.streams.links import WorkerLink
from everserve.gateway.streams.log_references import LostLogs
from everserve.gateway.streams.metrics import EngineMetrics, FleetMetrics
from everserve.gateway.streams.others import LOOK_AGAIN_S, Others
from everserve.gateway.streams.prefixes import block_chains
from everserve.gateway.streams.stream import Stream, StreamBroken, count_blocks
from everserve.gateway.streams.waiting import WaitingLine
from everserve.ledger.shared import Turn
from everserve.plan import spread
from everserve.tables.ids import Incarnation, Rank, Role, WorkerId
from everserve.tables.outputs import EngineStats, Output
from everserve.wire.events import (
    AnyEvent,
    BadBytes,
    RequestResumed,
    StaleDropped,
    StreamBroke,
    StreamDiverged,
    StreamMoved,
)
from everserve.words import count

_PROCESS = "gateway"


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """What every stream must keep to, wherever it runs."""

    max_total_tokens: int
    vocab_size: int
    block_size: int


class Fleet:
    """All links and all streams."""

    def __init__(
        self,
        max_queue: int,
        tell: Callable[[AnyEvent], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
        number: int = 0,
        others: Others | None = None,
    ) -> None:
        self.others = others or Others()
        self.max_queue = max_queue
        self.clock = clock
        self.tell = tell
        self.totals = FleetMetrics()
        self.logs = LostLogs()
        self.engines: dict[Rank, EngineMetrics] = {}
        self.limits: ModelLimits | None = None  # known once a worker was ready, and remembered when none is
        self.has_orchestrator = False  # it says why a worker was lost; without it we can only count that it was
        self._links: dict[Rank, WorkerLink] = {}
        self._unseated: set[WorkerLink] = set()  # fenced, or left; read until their ends
        self._lost: dict[Rank, Incarnation] = {}  # the latest of each rank that was declared gone
        self._slow: frozenset[WorkerId] = frozenset()
        self._waiting = WaitingLine(self.others)
        self.on_limits: Callable[[ModelLimits], None] = lambda limits: None  # called when they are known
        self.on_lost: Callable[[Rank, Incarnation], None] = lambda rank, incarnation: None
        self.on_handled: Callable[[], None] = lambda: None  # a worker's outputs have reached their clients' answers
        self._may_bind = False  # something has changed since no more streams could be bound
        self._looks_again = False  # a look at the places is due
        self._has_poison = False  # a stream was given to a worker that may be
        self._groups = itertools.count(1)
        self._tells_prompts = number == 0  # one gateway does, of those that there are

    # -- workers ---------------------------------------------------------------------------------

    def attach(self, rank: Rank, incarnation: Incarnation, sock: socket.socket) -> None:
        """A new process in this seat. It may have been declared gone before we hear of it. We hear of it twice, with
        the same socket, if a supervisor dies in between."""
        old = self._links.get(rank)
        if old is not None and old.incarnation == incarnation:
            sock.close()
            return
        metrics = self.engines.setdefault(rank, EngineMetrics())
        metrics.begin(incarnation)
        link = WorkerLink(rank, incarnation, sock, metrics, self)
        if incarnation <= self._lost.get(rank, 0) or (old is not None and incarnation < old.incarnation):
            link.fence()
            self._unseated.add(link)
            self.logs.lose(link.log)
            return
        if old is not None and old.incarnation == incarnation:
            self._change_channel(old)
        elif old is not None:
            self._unseat(old, is_trusted=old.is_leaving)
        self._links[rank] = link

    def _change_channel(self, old: WorkerLink) -> None:
        """The same worker, told twice by supervisors: it has dropped what came through the first channel."""
        for stream in old.streams.remove_all():
            stream.is_first = bool(stream.tokens)
            self._waiting.add(stream)
        old.close()

    def lose(self, rank: Rank, incarnation: Incarnation, roles: Iterable[Role], cause: str) -> None:
        """The orchestrator's decision: this incarnation is gone."""
        if incarnation > self._lost.get(rank, 0):  # not said before
            self._lost[rank] = incarnation
            self.on_lost(rank, incarnation)
            if cause != "left":
                self.totals.failovers.update((role.value, cause) for role in roles)
            link = self._links.get(rank)
            if link is not None and link.incarnation <= incarnation:
                self._lose_link(link, cause)
        if Role.ATTENTION in roles:
            self.logs.lose(WorkerId(rank, incarnation))

    def remember_lost(self, lost: dict[Rank, Incarnation]) -> None:
        """Those that were declared gone to the gateway before this one."""
        self._lost |= lost

    def avoid(self, workers: Iterable[WorkerId]) -> None:
        """The orchestrator's decision: these are slow, and get streams only if no other worker has room."""
        self._slow = frozenset(workers)

    def on_ready(self, link: WorkerLink) -> None:
        """A worker can serve. Workers of one model hardly differ; where they do, requests must fit the smallest."""
        ready = [(other, other.ready) for other in self._links.values() if other.ready is not None]
        self.limits = ModelLimits(
            max_total_tokens=min(other.max_total_tokens for other, _ in ready),
            vocab_size=min(said.vocab_size for _, said in ready),
            block_size=min(said.block_size for _, said in ready),
        )
        self.on_limits(self.limits)
        self._bind_waiting(self.clock())

    def on_given_back(self, link: WorkerLink) -> None:
        """A worker leaves. All of its streams go elsewhere: also those that it has not received yet."""
        now_s = self.clock()
        for stream in link.streams.remove_all():
            stream.mark_moved(link.rank, now_s)
            self.logs.need(stream, link.log)
            self._waiting.add(stream)
        self._bind_waiting(now_s)

    def on_removed(self, stream: Stream) -> None:
        self._waiting.give_place(stream.spec.flow)
        self._may_bind = True
        if self.others.looks_again:
            self.others.note_streams(self.num_streams)

    def on_step(self) -> None:
        """Streams may have ended, so there may be room."""
        self.on_handled()
        if self._waiting and self._may_bind:
            self._bind_waiting(self.clock())

    def on_stats(self, link: WorkerLink) -> None:
        """A home has reported what it has still to compute. It hears what the others have, if it has anything."""
        if link.prompts or link.told:
            self._tell_prompts(link)

    def on_divergence(self, link: WorkerLink, stream: Stream, output: Output) -> None:
        """A token contradicts the one that was delivered. The client has that one, and the stream goes on with it."""
        assert output.token is not None
        self.totals.num_diverged += 1
        self.tell(
            StreamDiverged(
                process=_PROCESS,
                request_id=stream.spec.id,
                rank=link.rank,
                index=output.index,
                token=output.token,
                delivered=stream.tokens[output.index],
            )
        )

    def on_broken(self, link: WorkerLink, stream: Stream, error: EverserveError) -> None:
        """A stream cannot go on, by our fault."""
        event = StreamBroke(process=_PROCESS, request_id=stream.spec.id, rank=link.rank, reason=str(error))
        self.tell(event)

    def on_bad_bytes(self, num_dropped: int) -> None:
        self.tell(BadBytes(process=_PROCESS, num_dropped=num_dropped))

    def on_end(self, link: WorkerLink) -> None:
        """A channel has ended."""
        link.close()
        if link in self._unseated:
            self._unseated.remove(link)
            if link.num_stale:
                self.tell(_stale_event(link))
            return
        del self._links[link.rank]
        if not self.has_orchestrator:
            self._lost[link.rank] = link.incarnation  # counted now: a new orchestrator may say it later
            self.on_lost(link.rank, link.incarnation)
            if not link.is_leaving:
                self.totals.failovers[Role.ATTENTION.value, "closed"] += 1
        self._part_from(link)

    # -- streams ---------------------------------------------------------------------------------

    @property
    def num_streams(self) -> int:
        """Running and waiting."""
        return sum(len(link.streams) for link in self._links.values()) + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Streams that wait here for a worker."""
        return len(self._waiting)

    def longest_wait_s(self, now_s: float) -> float:
        """How long the client that waits longest for its next token has waited. First tokens are another matter."""
        streams = itertools.chain(self._waiting, self._running())
        return max((now_s - stream.last_s for stream in streams if stream.last_s is not None), default=0.0)

    def check_room(self, num_streams: int, key: str = "", num_unread: int = 0) -> None:
        """Raise unless there is room for so many more streams of this key, beside its answers that are not read yet. No
        reservation."""
        if num_streams > self.max_queue:
            raise RequestError(
                f"This request asks for {num_streams} choices in total (prompts times 'n'); "
                f"this server takes at most {self.max_queue} at a time."
            )
        num_taken = self._waiting.num_streams_of(key) + num_unread
        if num_taken + num_streams > self.max_queue:
            whose = " of this API key" if key else ""
            raise OverloadedError(
                f"The server is busy: {num_taken} of {self.max_queue} places{whose} are taken "
                f"and this request needs {num_streams}."
            )

    def submit(self, siblings: list[Stream]) -> None:
        """Run these streams, which have one prompt: on the same worker if one has room for all of them now."""
        assert self.limits is not None, "limits are known from the first ready worker on"
        now_s, group = self.clock(), next(self._groups)
        for stream in siblings:
            stream.group, stream.submitted_s = group, now_s
            stream.metrics = self._some_metrics()
            self._waiting.add(stream)
        self._bind_waiting(now_s)

    def _some_metrics(self) -> EngineMetrics:
        """Metrics for streams that never reach a worker."""
        return next(iter(self.engines.values()), None) or EngineMetrics()

    def cancel(self, stream: Stream) -> None:
        """Its client has left, or needs no more of it; nothing happens if it has ended."""
        if stream.link is not None:
            stream.link.cancel(stream)
            self.on_step()
        else:
            self._waiting.remove(stream)
        self.logs.release(stream)

    def suspend(self, stream: Stream) -> None:
        """Its client is gone, and may come back: the stream keeps its tokens, and no worker meanwhile."""
        self.cancel(stream)
        stream.mark_suspended()

    def resume(self, streams: list[Stream]) -> None:
        """Their client is back. There is always room for them: they were let in before."""
        now_s = self.clock()
        for stream in streams:
            stream.is_first = True
            stream.last_s = now_s if stream.tokens else None  # while suspended no client waited
            self._waiting.add(stream)
        self._bind_waiting(now_s)

    def go_on(self, streams: list[Stream]) -> None:
        """An earlier gateway had them, and so many tokens of each. They are given to workers in front of new ones."""
        for stream in streams:
            stream.group, stream.submitted_s = next(self._groups), self.clock()
            stream.metrics = self._some_metrics()
            if stream.home is not None:
                self.logs.need(stream, stream.home)
        self.resume(streams)

    def close(self, error: EverserveError) -> None:
        """The gateway ends: so does every stream."""
        streams = [stream for link in self._links.values() for stream in link.streams.remove_all()]
        streams += self._waiting.remove_all()
        for link in (*self._links.values(), *self._unseated):
            link.close()
        self._links.clear()
        self._unseated.clear()
        for stream in streams:
            stream.listener.on_failure(error)

    # -- views -----------------------------------------------------------------------------------

    def ready_links(self) -> list[WorkerLink]:
        """Those that take streams."""
        return [link for link in self._links.values() if link.is_open]

    def lost_incarnations(self) -> list[WorkerId]:
        """The latest of each rank that was declared gone. It never counts again, whatever a new orchestrator finds."""
        return sorted(map(WorkerId._make, self._lost.items()))

    def logs_in_use(self) -> list[WorkerId]:
        """The workers with KV logs that are needed, or may be."""
        attached = {link.log for link in self._links.values()}
        for log in self.logs.needed - attached:
            self.logs.lose(log)  # before this gateway was there
        return [*self.logs.unsettled, *attached]

    def link(self, rank: Rank) -> WorkerLink | None:
        """The link to the worker that has this seat now."""
        return self._links.get(rank)

    def stats(self, rank: Rank) -> EngineStats | None:
        link = self._links.get(rank)
        return link.stats if link is not None else None

    # -- inside ----------------------------------------------------------------------------------

    def _lose_link(self, link: WorkerLink, cause: str) -> None:
        """Declared gone. One that left has sent GivenBack before it ended, on a channel that may not be read yet."""
        num_reads = 2 if cause == "left" else 0  # its last messages, and its end
        for _ in range(num_reads):
            if self._links.get(link.rank) is link:
                link.read()
        if self._links.get(link.rank) is link:
            self._unseat(link, is_trusted=False)

    def _unseat(self, link: WorkerLink, is_trusted: bool) -> None:
        """The worker is lost, but its channel is open: it may still speak."""
        del self._links[link.rank]
        self._unseated.add(link)
        if not is_trusted:
            link.fence()
        self._part_from(link)

    def _part_from(self, link: WorkerLink) -> None:
        """Its streams wait in front of all others, and usually not for long."""
        now_s = self.clock()
        if link.stats is not None:
            link.metrics.add_past(link.stats)
        streams = link.streams.remove_all()
        for stream in streams:
            stream.mark_lost(link.rank, now_s)
            self.logs.need(stream, link.log)
            self._waiting.add(stream)
        self.logs.lose(link.log)
        for stream in streams:  # only after all of them wait: a listener may cancel siblings when it is called
            if stream.num_losses >= poison.MAX_LOSSES and self._waiting.remove(stream):
                self._give_up(stream, link)
        self._bind_waiting(now_s)

    def _give_up(self, stream: Stream, link: WorkerLink) -> None:
        """It may be what ends them."""
        error = StreamBroken(
            f"{count(stream.num_losses, 'worker')} in a row died while running this request, before its next token."
        )
        self.logs.release(stream)
        self.on_broken(link, stream, error)
        stream.listener.on_failure(error)

    def _bind_waiting(self, now_s: float) -> None:
        """Give waiting streams to workers with room, in order."""
        parted: list[Stream] = []
        self._may_bind = False
        while (turn := self._next_turn(now_s)) is not None:
            link, bound = turn
            self._waiting.bind(bound)
            for stream in bound:
                if stream.moved_s is not None or stream.lost_s is not None:
                    parted.append(stream)
                elif not stream.is_first:
                    stream.waited_s = now_s - stream.submitted_s
                self._waiting.take_place(stream.spec.flow)
                self._has_poison |= stream.num_losses > 0
            link.submit(bound)
        for link in self._links.values():
            if link.has_unsent:
                self._tell_prompts(link)
                link.send_submitted()
        if self.others.looks_again:
            self._tell_others()
        for stream in parted:  # after all of them are on their way
            self._count_parted(stream, now_s)

    def _tell_others(self) -> None:
        """What they should know of our streams. While any of these waits, places may come that they give back."""
        self.others.note_streams(self.num_streams)
        if self._has_poison:
            num_possible = poison.num_possible_of(self._running())
            self.others.note_poison(num_possible)
            self._has_poison = num_possible > 0 or any(stream.num_losses for stream in self._waiting)
        if self._waiting and not self._looks_again:
            self._looks_again = True
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._looks_again = False
        self._bind_waiting(self.clock())

    def _next_turn(self, now_s: float) -> tuple[WorkerLink, list[Stream]] | None:
        """The siblings that are next, as far as they may run, and their worker; None: the rest has to wait.

        Where no worker has room, a request that has no place at all goes to one that will take a place from others for
        it. If none would, no other request of that key has a better chance.
        """
        links = self.ready_links()
        num_free = sum(max(link.num_free, 0) for link in links)
        portion = self._waiting.portion(num_free) if num_free else 1
        refused: set[str] = set()
        turns: list[Turn] = []  # of those that wait for want of room
        for siblings in self._waiting.turns() if num_free else self._waiting.newcomers():
            flow = siblings[0].spec.flow
            if flow.key in refused:
                continue
            num_possible = self.others.num_poison
            allowed = poison.may_run(siblings[:portion], self._running(), num_possible)
            allowed = allowed or poison.may_run(siblings, self._running(), num_possible)[:portion]
            if not allowed:
                self._may_bind = True  # a token of another stream may change that
                continue
            if (home := self._home_of(allowed[0])) is not None:
                return home, allowed[:1]
            able = [link for link in links if link.can_run(siblings[0])]
            if links and not able:
                continue
            link = self._choose(allowed, able, is_newcomer=not num_free)
            if link is not None and not self._must_wait(allowed[0], now_s):
                self.others.note_turn(None)
                return link, allowed[: max(link.num_free, 1)]
            if self.others.looks_again:
                turns.append(self._waiting.turn_of(allowed[0]))
            refused.add(flow.key)
            if len(refused) == self._waiting.num_keys:
                break
        self.others.note_turn(turns[0] if turns else None)
        return None

    def _must_wait(self, stream: Stream, now_s: float) -> bool:
        """Whether the place is for a stream of another gateway. One whose client is in the middle of an answer does not
        wait."""
        if not self.others.looks_again or stream.is_first:
            return False
        return self.others.must_wait(self._waiting.turn_of(stream), now_s)

    def _running(self) -> Iterable[Stream]:
        return itertools.chain.from_iterable(link.streams for link in self._links.values())

    def _home_of(self, stream: Stream) -> WorkerLink | None:
        """The worker that had it before, and so has most of its KV, if it can take it."""
        link = self._links.get(stream.home.rank) if stream.home is not None else None
        if link is None or link.log != stream.home or not link.is_open or link.num_free <= 0:
            return None
        return link if link.can_run(stream) else None

    def _choose(self, siblings: list[Stream], links: list[WorkerLink], is_newcomer: bool) -> WorkerLink | None:
        if not links:
            return None
        assert self.limits is not None
        num_blocks = count_blocks(siblings, self.limits.block_size)
        rooms = [link.room._replace(is_slow=link.log in self._slow) for link in links]
        if sum(room.num_streams_free > 0 for room in rooms) > 1:
            spec = siblings[0].spec
            blocks = block_chains(spec.prompt, self.limits.block_size, spec.cache_salt)
            rooms = [room._replace(saved=link.saved(blocks)) for link, room in zip(links, rooms, strict=True)]
        if is_newcomer:
            flow = siblings[0].spec.flow
            has_part = [link.has_part_for(flow) for link in links]
            rooms = [room._replace(num_streams_free=int(part)) for room, part in zip(rooms, has_part, strict=True)]
        rank = spread.choose(rooms, len(siblings), num_blocks)
        return self._links[rank] if rank is not None else None

    def _tell_prompts(self, link: WorkerLink) -> None:
        """The prompts of other homes. They matter to homes that use the same workers, and only while there are any."""
        if self._tells_prompts and link.is_open and link.shares_workers:
            others = {other.rank: other.prompts for other in self.ready_links() if other is not link}
            link.tell_prompts({rank: prompts for rank, prompts in others.items() if prompts})

    def _count_parted(self, stream: Stream, now_s: float) -> None:
        """A stream that had a worker was given to another one."""
        if stream.moved_s is not None:
            self.totals.num_moved += 1
            self.tell(_moved_event(stream, now_s))
        else:
            self.totals.num_resumed += 1
            self.tell(_resumed_event(stream, now_s))


def _resumed_event(stream: Stream, now_s: float) -> RequestResumed:
    assert stream.lost_s is not None and stream.parted_rank is not None and stream.link is not None
    return RequestResumed(
        process=_PROCESS,
        request_id=stream.spec.id,
        from_rank=stream.parted_rank,
        to_rank=stream.link.rank,
        num_known=len(stream.tokens),
        stalled_s=now_s - stream.lost_s,
    )


def _moved_event(stream: Stream, now_s: float) -> StreamMoved:
    assert stream.moved_s is not None and stream.parted_rank is not None and stream.link is not None
    return StreamMoved(
        process=_PROCESS,
        request_id=stream.spec.id,
        from_rank=stream.parted_rank,
        to_rank=stream.link.rank,
        num_known=len(stream.tokens),
        paused_s=now_s - stream.moved_s,
    )


def _stale_event(link: WorkerLink) -> StaleDropped:
    return StaleDropped(
        process=_PROCESS,
        rank=link.rank,
        incarnation=link.incarnation,
        count=link.num_stale,
        what="messages to the gateway",
    )
