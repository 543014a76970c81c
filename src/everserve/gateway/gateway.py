"""What the gateway process holds."""

import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from everserve.config.gateway import GatewayConfig
from everserve.errors import OverloadedError
from everserve.gateway.http.access import Access, Owner, stream_name
from everserve.gateway.http.connections import ConnectionLimits, Connections
from everserve.gateway.http.departures import Departures
from everserve.gateway.http.errors import HttpError
from everserve.gateway.http.slices import Slices
from everserve.gateway.observe.cluster import Cluster
from everserve.gateway.observe.counted import Counted, Counts
from everserve.gateway.observe.feed import EventFeed
from everserve.gateway.observe.live import Live
from everserve.gateway.observe.repairs import Repairs
from everserve.gateway.observe.timeline import Timeline
from everserve.gateway.orchestrator import OrchestratorLink
from everserve.gateway.questions import Questions
from everserve.gateway.store.store import Store
from everserve.gateway.streams.fleet import Fleet
from everserve.gateway.streams.resumable import Keeper, Name
from everserve.gateway.streams.tracing import Tracing
from everserve.gateway.text.grammars import Grammars
from everserve.gateway.text.guiding import Style
from everserve.gateway.text.sampling import GenerationDefaults, Limits, SeedSource
from everserve.gateway.text.tokenizer import ModelTokenizer
from everserve.gateway.text.vectors import Dimensions
from everserve.ledger.connections import Connection
from everserve.tables.ids import Rank
from everserve.tables.requests import Flow

_GENERATION_BITS = 40  # of the numbers of streams


class Answering(Protocol):
    """A response that generates (answers.py)."""

    @property
    def owner(self) -> Owner: ...

    @property
    def is_complete(self) -> bool:
        """Nothing is generated any more, but its client has not read all of it."""
        ...


class Gateway:
    """The state of the process. One thread, one event loop: nothing here is locked."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: ModelTokenizer,
        defaults: GenerationDefaults,
        fleet: Fleet,
        feed: EventFeed,
        tracing: Tracing | None = None,
        number: int = 0,
    ) -> None:
        self.number = number  # among the gateways of this address
        self.config = config
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.fleet = fleet
        self.feed = feed
        self.tracing = tracing or Tracing()
        self.access = Access(config)
        self.connections = Connections(ConnectionLimits(request_bytes=config.request_memory_bytes))
        self.timeline = Timeline()
        self.repairs = Repairs()
        feed.listeners += [self.timeline.add, self.repairs.on_event, *self.tracing.listeners]
        self.cluster = Cluster(fleet, self.timeline)
        self.slices = Slices()
        self.live = Live(config, self.access, fleet, self.cluster, self.timeline, self.slices)
        self.orchestrator = OrchestratorLink(fleet, self.cluster, feed.publish)
        self.supervisor: Questions | None = None
        self.departures = Departures(number, self._close_record)  # connections on their way to other gateways
        self.kept_elsewhere: Callable[[Name], int | None] = lambda name: None  # the gateway that has this stream
        self.store: Store | None = None  # opened by the process
        self.keeper = Keeper(config.resume_window_s, fleet.tell, config.resume_memory_bytes)
        self.grammars = Grammars(config.model)
        self.dimensions = Dimensions(config.model)
        self.style = Style.of(tokenizer.files.chat_template, config.tool_call_parser, config.reasoning_parser)
        self.seeds = SeedSource(config.seed)
        self.started_unix_s = int(time.time())
        self.answers: set[Answering] = set()  # to clients' requests, while they are generated or sent
        self.responses: Counter[tuple[str, str, str]] = Counter()  # by handler, method and kind of status
        self.is_draining = False
        self.is_taking_over = False  # requests of the gateway before come again; they were let in already
        self.on_taken_over: Callable[[], None] = lambda: None  # all is read again that the gateway before had begun
        self.counts = Counts(
            fleet,
            self.cluster,
            self.repairs,
            self.keeper,
            self.connections,
            self.responses,
            lambda: self.num_requests,
            lambda: self.live.own_tick,
        )
        self.save_counts: Callable[[], None] = lambda: None  # for a successor, and for the other gateways
        self.counted_elsewhere: Callable[[], list[Counted]] = list  # by the other gateways
        self._numbers = itertools.count(1 + (number << _GENERATION_BITS))
        self._requests = itertools.count(number + 1, config.gateways)

    @property
    def num_requests(self) -> int:
        """Clients' requests that are being generated or answered."""
        return len(self.answers)

    def _close_record(self, record: Connection) -> None:
        self.connections.custody.close(record)

    def flow(self, owner: Owner, priority: int) -> Flow:
        """The flow of a new request, for its part of the places."""
        return Flow(owner, next(self._requests), self.access.weight(owner), priority)

    def check_room(self, num_streams: int, owner: Owner) -> None:
        """Raise unless there is room for so many more streams of this key. An answer that is complete and not read yet
        takes a place."""
        if self.is_taking_over:
            return
        num_unread = 0
        is_near = self.fleet.num_streams + len(self.answers) + num_streams > self.fleet.max_queue
        if is_near or self.config.gateways > 1:
            num_unread = sum(answer.is_complete and answer.owner == owner for answer in self.answers)
        self.fleet.check_room(num_streams, owner, num_unread)

    def check_serving(self) -> None:
        """Raise unless new requests are taken: at once, or as soon as a worker is there again."""
        if self.is_draining:
            raise OverloadedError("The server is shutting down.", retry_after_s=5)
        if self.fleet.limits is None:
            raise OverloadedError("The server is not ready: no worker has started yet.", retry_after_s=5)

    def check_health(self) -> None:
        """Raise unless new requests are taken and would run now."""
        self.check_serving()
        if not self.fleet.ready_links():
            raise OverloadedError("No attention worker is ready: requests wait.", retry_after_s=5)
        if violations := self.cluster.violations():
            raise OverloadedError(f"The cluster is not valid: {'; '.join(violations)}.", retry_after_s=5)

    def check_model(self, name: str | None) -> str:
        """The served name that this request means."""
        names = self.config.served_model_names
        if name is None:
            return names[0]
        if name not in names:
            raise HttpError(404, f"The model `{name[:200]}` does not exist.", param="model", code="model_not_found")
        return name

    def check_rank(self, rank: Rank) -> None:
        """Raise unless there is such a seat."""
        if self.cluster.members is None:
            raise OverloadedError("The server is not ready: no membership table has been published yet.")
        if self.cluster.worker(rank) is None:
            raise HttpError(404, f"There is no worker with rank {rank}.", param="rank")

    def limits(self) -> Limits:
        """What this server and its model can do."""
        self.check_serving()
        assert self.fleet.limits is not None
        return Limits(
            max_total_tokens=self.fleet.limits.max_total_tokens,
            vocab_size=self.fleet.limits.vocab_size,
            max_logprobs=self.config.max_logprobs,
        )

    def begin_numbers(self, generation: int) -> None:
        """A gateway with this generation: the ones before it, and those with other numbers, have used others."""
        life = (generation - 1) * self.config.gateways + self.number
        self._numbers = itertools.count(1 + (life << _GENERATION_BITS))

    def stream_id(self, wanted: str, may_see: str) -> str:
        """A name that no stream ever had. Clients reuse their request ids, and a worker may still send tokens of a
        stream that was cancelled."""
        return stream_name(wanted, next(self._numbers), may_see)
