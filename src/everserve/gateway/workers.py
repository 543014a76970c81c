"""Channels to workers, and which worker gets the next stream."""

import asyncio
import socket
import time
from collections.abc import Callable

from everserve.errors import OverloadedError, ProtocolError, RequestError, WorkerDied
from everserve.gateway.metrics import EngineMetrics
from everserve.gateway.streams import Listener, StreamBroken, StreamTable
from everserve.runtime.channel import Channel, ChannelClosed
from everserve.runtime.messages import AnyMessage, Cancel, Rejected, StepOutput, Submit, WorkerReady
from everserve.tables.ids import Incarnation, Rank
from everserve.tables.outputs import EngineStats
from everserve.tables.requests import RequestSpec


class WorkerLink:
    """One incarnation of one rank: its channel and the streams that it runs for us.

    The channel is read by a callback, not a task: a step's outputs reach their streams without a switch in between.
    """

    def __init__(
        self,
        rank: Rank,
        incarnation: Incarnation,
        sock: socket.socket,
        metrics: EngineMetrics,
        fleet: "Fleet",
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.metrics = metrics
        self.streams = StreamTable()
        self.ready: WorkerReady | None = None
        self.stats: EngineStats | None = None
        self._fleet = fleet
        self._channel = Channel(sock)
        self._loop = asyncio.get_running_loop()
        self._is_writing = False
        self._said_bad_bytes = False
        self._loop.add_reader(sock, self._on_readable)

    @property
    def max_total_tokens(self) -> int:
        """How many tokens, prompt and output together, one stream can have here."""
        assert self.ready is not None
        return min(self.ready.max_model_len, self.ready.num_blocks * self.ready.block_size)

    def submit(self, spec: RequestSpec, listener: Listener) -> None:
        self.streams.add(spec, listener)
        self._send(Submit(spec=spec))

    def cancel(self, stream_id: str) -> None:
        """Nobody waits for this stream any more; nothing happens if it has ended."""
        if self.streams.remove(stream_id):
            self._send(Cancel(id=stream_id))

    def close(self, error: WorkerDied) -> None:
        """Every stream here ends with this error."""
        self._loop.remove_reader(self._channel.sock)
        self._loop.remove_writer(self._channel.sock)
        self._channel.close()
        self.ready = None
        self.streams.fail_all(error)

    def _on_readable(self) -> None:
        try:
            messages = self._channel.receive_all()
        except (ChannelClosed, OSError):
            self._fleet.on_closed(self, WorkerDied(f"Worker {self.rank} died while it ran this request."))
            return
        except ProtocolError as error:
            self._fleet.on_closed(self, WorkerDied(f"The channel to worker {self.rank} is out of step: {error}."))
            return
        for message in messages:
            self._handle(message)
        if self._channel.num_dropped and not self._said_bad_bytes:
            self._said_bad_bytes = True
            self._fleet.on_bad_bytes(self._channel.num_dropped)

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, StepOutput):
            self.stats = message.stats
            for stream_id in self.streams.deliver(message.outputs, time.monotonic()):
                self._send(Cancel(id=stream_id))
        elif isinstance(message, Rejected):
            error = StreamBroken if message.is_server_fault else RequestError
            self.streams.fail(message.id, error(message.reason))
        elif isinstance(message, WorkerReady):
            self.ready = message
        else:
            self._channel.num_dropped += 1  # one of our messages, but not one that a worker sends

    def _send(self, message: Submit | Cancel) -> None:
        self._channel.send(message)
        if self._channel.wants_write and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._channel.sock, self._on_writable)

    def _on_writable(self) -> None:
        self._channel.flush()
        if not self._channel.wants_write:
            self._is_writing = False
            self._loop.remove_writer(self._channel.sock)


class Fleet:
    """The workers that are attached."""

    def __init__(self, max_queue: int, on_bad_bytes: Callable[[int], None] = lambda num_dropped: None) -> None:
        self.max_queue = max_queue
        self.engines: dict[Rank, EngineMetrics] = {}
        self._links: dict[Rank, WorkerLink] = {}
        self.on_bad_bytes = on_bad_bytes  # called once per channel

    def attach(self, rank: Rank, incarnation: Incarnation, sock: socket.socket) -> None:
        """A new process in this seat; what the old one still ran is lost."""
        old = self._links.pop(rank, None)
        if old is not None:
            self._retire(old, WorkerDied(f"Worker {rank} was replaced while it ran this request."))
        metrics = self.engines.setdefault(rank, EngineMetrics())
        self._links[rank] = WorkerLink(rank, incarnation, sock, metrics, self)

    def ready_links(self) -> list[WorkerLink]:
        return [link for link in self._links.values() if link.ready is not None]

    def choose(self) -> WorkerLink | None:
        """Who gets the next stream: the ready worker with the fewest."""
        return min(self.ready_links(), key=lambda link: len(link.streams), default=None)

    def find_room(self, num_streams: int) -> WorkerLink:
        """A worker with room for so many more streams now, or the reason why there is none. Nothing is kept."""
        link = self.choose()
        if link is None:
            raise OverloadedError("No worker is ready to serve requests.", retry_after_s=5)
        if num_streams > self.max_queue:
            raise RequestError(
                f"This request asks for {num_streams} choices in total (prompts times 'n'); "
                f"this server takes at most {self.max_queue} at a time."
            )
        if len(link.streams) + num_streams > self.max_queue:
            raise OverloadedError(
                f"The server is busy: {len(link.streams)} of {self.max_queue} places are taken "
                f"and this request needs {num_streams}."
            )
        return link

    def stats(self, rank: Rank) -> EngineStats | None:
        link = self._links.get(rank)
        return link.stats if link is not None else None

    def num_streams(self, rank: Rank) -> int:
        link = self._links.get(rank)
        return len(link.streams) if link is not None else 0

    def is_running(self, stream_id: str) -> bool:
        return any(stream_id in link.streams for link in self._links.values())

    @property
    def num_stale(self) -> int:
        """Outputs dropped because they had been delivered before."""
        live = sum(link.streams.num_duplicates for link in self._links.values())
        return live + sum(engine.num_duplicates for engine in self.engines.values())

    def close(self, error: WorkerDied) -> None:
        """The gateway ends: so does every stream."""
        for link in list(self._links.values()):
            self.on_closed(link, error)

    def on_closed(self, link: WorkerLink, error: WorkerDied) -> None:
        """This incarnation is gone."""
        if self._links.get(link.rank) is link:
            del self._links[link.rank]
        self._retire(link, error)

    def _retire(self, link: WorkerLink, error: WorkerDied) -> None:
        link.metrics.num_duplicates += link.streams.num_duplicates
        link.close(error)
