"""Streams of clients that may lose their connections and come back for the rest.

    live --the connection breaks--> suspended --its client comes back--> live
      '--the last event--> ended     '--------.
                             '----------------+--the window is over, or memory is short--> forgotten

Only streams of clients that gave their request an id (X-Request-Id) are kept. Their events have ids, 0, 1, 2, ..., and
stay here for a while after the connection has ended. A client that comes back says which event was its last; it gets
the events after it, each once, and then new ones. Nothing is generated twice, and nothing while the client is away: a
*suspended* stream has no worker, only its tokens. If the old connection still looks open, the new one takes over: a
connection that looks open may have been dead for long.

A stream belongs to the key that began it. With another key it cannot be told from one that never was: both are the same
lookup that finds nothing, and the same 404.

When memory is short, streams are forgotten in the order of how little their clients lose:

    ended        its client has most likely read it to its end      longest away first
    live         its client is there; it cannot come back later     largest first
    suspended    its client is away, and will miss the rest         longest away first
"""

import asyncio
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from starlette.requests import Request

from everserve.gateway.http.access import Owner, audience, request_label
from everserve.gateway.http.errors import HttpError
from everserve.gateway.streams.journal import Journal
from everserve.gateway.streams.outbox import KeptOutbox
from everserve.wire.events import AnyEvent, ClientResumed

STATES = ("ended", "live", "suspended")  # in this order they are forgotten when memory is short
_ANSWER_BYTES = 1 << 10  # of anything that is kept, besides its events
_CHOICE_BYTES = 8 << 10  # of one that is suspended: the state of each choice ...
_TOKEN_BYTES = 40  # ... and each token
_ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")
_EVENT_ID = re.compile(r"[0-9]{1,18}")


class Name(NamedTuple):
    """What a client has to know to come back."""

    owner: Owner
    endpoint: str
    request_id: str  # the client's own


def name_of(request: Request) -> Name:
    return Name(request.state.owner, request.scope["path"], request.state.request_id)


class Keeper:
    """Everything that is kept, within the limits of time and memory."""

    def __init__(self, window_s: float, tell: Callable[[AnyEvent], None], max_bytes: int) -> None:
        self.is_on = window_s > 0
        self.num_resumes = 0
        self.num_evicted = Counter(dict.fromkeys(STATES, 0))  # forgotten because memory was short
        self.num_bytes = 0
        self.on_added: Callable[[Name], None] = lambda name: None
        self.on_dropped: Callable[[Name], None] = lambda name: None
        self._window_s = window_s
        self._max_bytes = max_bytes
        self._tell = tell
        self._kept: dict[Name, Kept] = {}
        self._expected: dict[str, set[asyncio.Future[None]]] = {}  # by the id of the request
        self._ended: OrderedDict[Name, Kept] = OrderedDict()  # these two are without a connection, longest first
        self._suspended: OrderedDict[Name, Kept] = OrderedDict()

    @property
    def num_suspended(self) -> int:
        """Streams without a client, and hence without a worker."""
        return sum(kept.num_suspended for kept in self._suspended.values())

    def expect(self, request_id: str, opened: "asyncio.Future[None]") -> None:
        """An earlier gateway had a request of this id, which is being read again, until `opened` is done."""
        self._expected.setdefault(request_id, set()).add(opened)
        opened.add_done_callback(partial(self._on_opened, request_id))

    def _on_opened(self, request_id: str, opened: "asyncio.Future[None]") -> None:
        others = self._expected[request_id]
        others.discard(opened)
        if not others:
            del self._expected[request_id]

    async def all_expected(self, request_id: str) -> None:
        """Come back when nothing of this id is still being read again."""
        while request_id in self._expected:
            await asyncio.wait(self._expected[request_id])

    def find(self, name: Name, last_event_id: str) -> "Return":
        """The rest of what is kept under this name, after this event."""
        if not _EVENT_ID.fullmatch(last_event_id):
            raise HttpError(400, "Last-Event-ID must be the id of an event: a number.", param="Last-Event-ID")
        kept, after = self._kept.get(name), int(last_event_id)
        if kept is None:
            others = [endpoint for endpoint in _ENDPOINTS if name._replace(endpoint=endpoint) in self._kept]
            raise _belongs_to(others[0]) if others else self.not_kept()
        if after >= kept.outbox.num_sent:
            message = f"Event {after} was never sent: this stream has had {kept.outbox.num_sent} events so far."
            raise HttpError(400, message, param="Last-Event-ID")
        return Return(kept, after)

    def close(self) -> None:
        """The gateway shuts down: suspended streams are forgotten, and no more are kept."""
        self.is_on = False
        for kept in list(self._kept.values()):
            self.forget(kept)

    # -- for those that are kept -----------------------------------------------------------------

    def add(self, kept: "Kept") -> None:
        """Instead of an older one of that name, which goes on if its client is there. After a takeover the older one
        may come later."""
        other = self._kept.get(kept.name)
        if other is not None and other.arrived_s > kept.arrived_s:
            kept.on_forgotten()
            return
        if other is not None:
            self.forget(other)
        self._kept[kept.name] = kept
        self.on_added(kept.name)
        self.grow(kept, _ANSWER_BYTES)

    def holds(self, kept: "Kept") -> bool:
        return self._kept.get(kept.name) is kept

    def grow(self, kept: "Kept", num_bytes: int) -> None:
        """It has become so much larger. If that is too much, some are forgotten."""
        kept.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and self._kept:
            self._evict()

    def set_aside(self, kept: "Kept") -> None:
        """Its connection has ended."""
        kept.away_s = time.monotonic()
        kept.timer = asyncio.get_running_loop().call_later(self._window_s, self.forget, kept)
        (self._suspended if kept.num_suspended else self._ended)[kept.name] = kept
        self.grow(kept, kept.num_idle_bytes)

    def take_back(self, kept: "Kept", after: int) -> None:
        """Its client is there again."""
        away_s = 0.0
        if kept.timer is not None:
            kept.timer.cancel()
            away_s = time.monotonic() - kept.away_s
            self._drop_away(kept)
            self.grow(kept, -kept.num_idle_bytes)
        kept.timer = None
        self.num_resumes += 1
        name = kept.name
        label = request_label(name.request_id, audience(name.owner, is_chosen=True))
        self._tell(ClientResumed(process="gateway", request_id=label, after_event=after, away_s=away_s))

    def forget(self, kept: "Kept") -> None:
        """It cannot be resumed any more. If its client is connected, it goes on; otherwise it ends."""
        if not self.holds(kept):
            return
        del self._kept[kept.name]
        self.on_dropped(kept.name)
        self._drop_away(kept)
        self.num_bytes -= kept.num_bytes
        kept.on_forgotten()

    def _evict(self) -> None:
        """Forget one, because memory is short."""
        if self._ended:
            state, evicted = "ended", next(iter(self._ended.values()))
        elif len(self._kept) > len(self._suspended):
            live = (kept for kept in self._kept.values() if kept.timer is None)
            state, evicted = "live", max(live, key=lambda kept: kept.num_bytes)
        else:
            state, evicted = "suspended", next(iter(self._suspended.values()))
        self.num_evicted[state] += 1
        self.forget(evicted)

    def _drop_away(self, kept: "Kept") -> None:
        self._ended.pop(kept.name, None)
        self._suspended.pop(kept.name, None)

    def not_kept(self) -> HttpError:
        if not self._window_s:
            return HttpError(404, "This server keeps no streams: it was started with --resume-window 0.")
        return HttpError(
            404,
            "There is no stream with this X-Request-Id that could be resumed, or there is none any more: "
            f"streams are kept for {self._window_s:g} s after they ended or their connection broke.",
        )


def _belongs_to(endpoint: str) -> HttpError:
    return HttpError(409, f"The stream with this X-Request-Id belongs to {endpoint}.", param="X-Request-Id")


class Suspendable(Protocol):
    """What generates a kept stream (api/generation.py)."""

    num_open: int

    @property
    def num_tokens(self) -> int: ...
    @property
    def journal(self) -> Journal: ...
    def open(self, arrived_s: float) -> None: ...
    def suspend(self) -> None: ...
    def resume(self) -> None: ...
    def end(self) -> None: ...

    @property
    def is_forgotten(self) -> bool:
        """An earlier gateway had begun it, and its client could not come back any more."""
        ...


class Kept:
    """One stream of a client that may come back: an answer (answers.py) that outlives its connections."""

    def __init__(self, keeper: Keeper, name: Name, generation: Suspendable, outbox: KeptOutbox) -> None:
        self.name = name
        self.outbox = outbox
        self.num_bytes = 0
        self.arrived_s = 0.0
        self.away_s = 0.0  # since when
        self.timer: asyncio.TimerHandle | None = None  # while it is away
        self._keeper = keeper
        self._generation: Suspendable | None = generation  # None once it has ended
        self._origin = generation

    @property
    def journal(self) -> Journal:
        return self._origin.journal

    @property
    def num_suspended(self) -> int:
        return self._generation.num_open if self._generation is not None else 0

    @property
    def num_idle_bytes(self) -> int:
        """What it costs to keep it suspended, besides its events."""
        if self._generation is None:
            return 0
        return _CHOICE_BYTES * self._generation.num_open + _TOKEN_BYTES * self._generation.num_tokens

    def open(self, arrived_s: float) -> None:
        """Its client is there for the first time."""
        assert self._generation is not None
        self.arrived_s = arrived_s
        self._generation.open(arrived_s)
        if self._origin.is_forgotten:  # by an earlier gateway
            self.outbox.forget()
            return
        self.outbox.on_grown = lambda num_bytes: self._keeper.grow(self, num_bytes)
        self._keeper.add(self)

    def reopen(self, after: int) -> None:
        """Its client is there again, perhaps before we know that it was gone."""
        if not self._keeper.holds(self):
            raise self._keeper.not_kept()
        was_away = self.timer is not None
        self._keeper.take_back(self, after)
        self.outbox.rewind(after)
        if self._generation is not None and was_away:
            self._generation.resume()

    def close(self) -> None:
        """Its connection has ended. A client that has got no event has no id to come back with."""
        if not self.outbox.num_sent:
            self._keeper.forget(self)
        is_kept = self._keeper.holds(self)
        if self.outbox.is_finished or not is_kept:
            self._end()
        elif self._generation is not None:
            self._generation.suspend()
        if is_kept:
            self._keeper.set_aside(self)
        else:
            self.journal.close()

    def on_forgotten(self) -> None:
        """It goes on for the client that it has, or ends."""
        self.outbox.forget()
        self.journal.tie_to_connection()
        if self.timer is not None:
            self.timer.cancel()
            self._end()
            self.journal.close()

    def _end(self) -> None:
        if self._generation is not None:
            self._generation.end()
            self._generation = None


class Return:
    """A client that came back: the answer to it is the rest of the one before."""

    def __init__(self, kept: Kept, after: int) -> None:
        self.outbox = kept.outbox
        self.journal = kept.journal
        self._kept = kept
        self._after = after

    def open(self, arrived_s: float) -> None:
        self._kept.reopen(self._after)

    def close(self) -> None:
        self._kept.close()
