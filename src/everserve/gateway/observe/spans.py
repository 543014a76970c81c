"""Traces of requests, as OpenTelemetry spans: one per request, sent when it ends.

    queued -> first_token -> ... failover, paused, moved, client_disconnected, client_resumed ... -> finished

These are events of the span, each at the time when it happened. A *failover* says which worker died, which gap its
client saw, and how many tokens came from the log or were computed again. What is known about a death comes from several
processes, in any order: so everything is collected as it comes, and the span is made of it at the end.

Attributes are called as the semantic conventions for generative AI have them, or vLLM; ours begin with `everserve.`.
"""

import asyncio
import threading
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from everserve import __version__
from everserve.errors import EverserveError
from everserve.gateway.http.requests import ChatRequest, CompletionRequest
from everserve.gateway.streams.tracing import RequestTrace, Tracing
from everserve.gateway.text.sampling import num_generated
from everserve.tables.outputs import Output
from everserve.wire.events import (
    AnyEvent,
    FaultDetected,
    RequestResumed,
    RowsReplayed,
    StreamMoved,
    StreamRestored,
    StreamsContinued,
)

if TYPE_CHECKING:
    from starlette.requests import Request

    from everserve.gateway.streams.choices import Choice

_CLOSE_S = 2.0
_NUM_TIMES = 64  # latest tokens of a stream with remembered times: events about them arrive a little later
_SAME_FAULT_S = 1.0  # all reports of one death arrive within this time
_SAMPLING = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
_propagator = TraceContextTextMapPropagator()


@dataclass(eq=False)
class Mark:
    """One event of a span. `fault`: the rank that died; why it died may be known only later."""

    at_s: float
    name: str
    attributes: dict[str, Any] = field(default_factory=dict)
    fault: int | None = None


class OtelTracing(Tracing):
    """Makes traces, and tells them what happens to their streams. `processor`: where spans go, instead of OTLP."""

    def __init__(self, processor: Any = None) -> None:
        resource = Resource.create({"service.name": "everserve", "service.version": __version__})
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()),  # what the environment says wins
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self.tracer = self._provider.get_tracer("everserve", __version__)
        self.faults: defaultdict[int, deque[FaultDetected]] = defaultdict(lambda: deque(maxlen=4))  # by rank
        self.streams: dict[str, tuple[OtelTrace, Choice]] = {}  # that are under way, by their ids

    def request(self, http_request: "Request") -> RequestTrace:
        return OtelTrace(self, http_request.headers, http_request.scope["path"])

    @property
    def listeners(self) -> list[Callable[[AnyEvent], None]]:
        return [self._on_event]

    async def close(self) -> None:
        """A collector that does not answer must not keep us."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        deadline_s = time.monotonic() + _CLOSE_S
        while ending.is_alive() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)

    def _on_event(self, event: AnyEvent) -> None:
        if isinstance(event, RequestResumed | StreamMoved | StreamRestored):
            found = self.streams.get(event.request_id)
            if found is not None:
                trace, choice = found
                trace.on_stream(choice, event)
        elif isinstance(event, RowsReplayed | StreamsContinued):
            for trace, choice in list(self.streams.values()):
                link = choice.stream.link
                if link is not None and link.rank == event.rank:
                    trace.on_worker(choice, event)
        elif isinstance(event, FaultDetected):
            self.faults[event.rank].append(event)


class _Path:
    """One choice's way through time."""

    def __init__(self, begun_s: float) -> None:
        self._times_s: deque[float] = deque([begun_s], maxlen=_NUM_TIMES)
        self._open: list[Mark] = []  # marks with a gap that is not over yet

    def add(self, now_s: float) -> None:
        """A token."""
        if self._open:
            for mark in self._open:
                mark.attributes["everserve.gap_ms"] = 1e3 * (now_s - self._times_s[-1])
            self._open.clear()
        self._times_s.append(now_s)

    def measure(self, mark: Mark) -> None:
        """How long the client waited for a token then. The token may be there already, or come later."""
        times_s = list(self._times_s)
        after = bisect_right(times_s, mark.at_s)
        if after == len(times_s):
            self._open.append(mark)
        elif after:
            mark.attributes["everserve.gap_ms"] = 1e3 * (times_s[after] - times_s[after - 1])

    def forget(self, now_s: float) -> None:
        """The client has left, or is back: the time in between is no wait for a token."""
        self._open.clear()
        self._times_s.append(now_s)


class OtelTrace(RequestTrace):
    """One request, from its arrival to its end."""

    __slots__ = (
        *(
            "_arrived_s",
            "_attributes",
            "_choices",
            "_error",
            "_headers",
            "_ids",
            "_marks",
            "_num_prompt_tokens",
            "_num_siblings",
        ),
        *("_operation", "_owner", "_paths", "_queued_s", "_unix_ns"),
    )

    def __init__(self, owner: OtelTracing, headers: Mapping[str, str], path: str) -> None:
        self._owner = owner
        self._headers = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        self._operation = "chat" if "/chat/" in path else "text_completion"
        self._choices: Sequence[Choice] = ()
        self._marks: list[Mark] = []
        self._error: EverserveError | None = None
        self._queued_s: float | None = None
        self._ids: list[str] = []  # of its streams

    # -- what the gateway says -------------------------------------------------------------------

    def begin(
        self,
        request: CompletionRequest | ChatRequest,
        model: str,
        id: str,
        choices: "Sequence[Choice]",
        arrived_s: float,
    ) -> None:
        now_s = time.monotonic()
        self._unix_ns = time.time_ns() - int(now_s * 1e9)  # of the clock's zero
        self._arrived_s = arrived_s
        self._choices = choices
        self._paths = [_Path(now_s) for _ in choices]
        params = choices[0].spec.params
        self._attributes: dict[str, Any] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "everserve",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": id,
            "gen_ai.request.stream": bool(request.stream),
            "gen_ai.request.max_tokens": params.max_tokens,
            **{f"gen_ai.request.{name}": getattr(params, name) for name in _SAMPLING},
        }
        if request.stop:
            stops = [request.stop] if isinstance(request.stop, str) else request.stop
            self._attributes["gen_ai.request.stop_sequences"] = tuple(stops)
        if len(choices) > 1:
            self._attributes["gen_ai.request.choice.count"] = len(choices)
        self._num_siblings = num_generated(request)
        self._num_prompt_tokens = sum(len(choice.prompt.ids) for choice in choices[:: self._num_siblings])
        self._follow()
        self._mark("queued", {"gen_ai.usage.input_tokens": self._num_prompt_tokens})

    def token(self, choice: "Choice", output: Output) -> None:
        self._paths[choice.index].add(choice.last_s)
        if output.index == 0:
            queued_s = choice.stream.waited_s + output.queued_s
            if self._queued_s is None:
                self._queued_s = queued_s
                self._attributes["gen_ai.response.time_to_first_chunk"] = choice.last_s - self._arrived_s
            self._mark("first_token", {"everserve.queued_ms": 1e3 * queued_s, **self._where(choice)}, choice.last_s)
        if choice.finish_reason is not None:
            self._mark("finished", {**self._which(choice), "gen_ai.response.finish_reasons": (choice.finish_reason,)})

    def disconnected(self) -> None:
        self._mark("client_disconnected")
        for path in self._paths:
            path.forget(time.monotonic())

    def resumed(self) -> None:
        self._mark("client_resumed")
        for path in self._paths:
            path.forget(time.monotonic())
        self._follow()  # streams that go on have new names

    def failed(self, error: EverserveError) -> None:
        self._error = error
        self._mark("failed", {"error.type": type(error).__name__, "everserve.message": str(error)})

    def end(self) -> None:
        if not self._choices:
            return
        choices, self._choices = self._choices, ()
        for id in self._ids:
            self._owner.streams.pop(id, None)
        if self._error is None and any(choice.finish_reason is None for choice in choices):
            if self._marks[-1].name != "client_disconnected":
                self._mark("client_disconnected")
            self._attributes["error.type"] = "client_disconnected"
        self._send(choices)

    # -- what processes report -------------------------------------------------------------------

    def on_stream(self, choice: "Choice", event: RequestResumed | StreamMoved | StreamRestored) -> None:
        """It lost its worker, or has found another one."""
        if isinstance(event, StreamRestored):
            partings = [mark for mark in self._marks if "everserve.to_rank" in mark.attributes]
            same = [mark for mark in partings if mark.attributes.get("everserve.choice", 0) == choice.index]
            if same:
                same[-1].attributes["everserve.tokens_restored"] = event.num_restored
                same[-1].attributes["everserve.tokens_recomputed"] = event.num_recomputed
            return
        is_loss = isinstance(event, RequestResumed)
        mark = Mark(
            event.at_s - (event.stalled_s if isinstance(event, RequestResumed) else event.paused_s),
            "failover" if is_loss else "moved",
            {
                "everserve.role": "attention",
                "everserve.rank": event.from_rank,
                "everserve.to_rank": event.to_rank,
                "everserve.tokens_known": event.num_known,
                **self._which(choice),
            },
            fault=event.from_rank if is_loss else None,
        )
        self._marks.append(mark)
        self._paths[choice.index].measure(mark)

    def on_worker(self, choice: "Choice", event: RowsReplayed | StreamsContinued) -> None:
        """Its worker sent rows to other experts than first, or had to wait for some."""
        if isinstance(event, StreamsContinued):
            paused_ms = {"everserve.paused_ms": 1e3 * event.paused_s}
            self._mark("paused", {**paused_ms, **self._which(choice)}, event.at_s - event.paused_s)
            return
        for mark in self._marks:  # several layers may tell of one death
            is_near = mark.fault == event.suspect and event.at_s - mark.at_s < _SAME_FAULT_S
            if is_near and mark.attributes.get("everserve.choice", 0) == choice.index:
                mark.attributes["everserve.rows_replayed"] += event.num_rows
                return
        mark = Mark(
            event.at_s,
            "failover",
            {
                "everserve.role": "expert",
                "everserve.rank": event.suspect,
                "everserve.rows_replayed": event.num_rows,
                **self._which(choice),
            },
            fault=event.suspect,
        )
        self._marks.append(mark)
        self._paths[choice.index].measure(mark)

    # -- inside ----------------------------------------------------------------------------------

    def _follow(self) -> None:
        for choice in self._choices:
            if not choice.has_ended:
                self._owner.streams[choice.spec.id] = (self, choice)
                self._ids.append(choice.spec.id)

    def _mark(self, name: str, attributes: dict[str, Any] | None = None, at_s: float | None = None) -> None:
        self._marks.append(Mark(time.monotonic() if at_s is None else at_s, name, attributes or {}))

    def _which(self, choice: "Choice") -> dict[str, Any]:
        """The choice, if there are several."""
        return {"everserve.choice": choice.index} if len(self._paths) > 1 else {}

    def _where(self, choice: "Choice") -> dict[str, Any]:
        link = choice.stream.link
        rank = {"everserve.rank": int(link.rank)} if link is not None else {}
        return {**rank, **self._which(choice)}

    def _send(self, choices: "Sequence[Choice]") -> None:
        now_s = time.monotonic()
        reasons = tuple(choice.finish_reason for choice in choices if choice.finish_reason is not None)
        self._attributes |= {
            "gen_ai.usage.input_tokens": self._num_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(choice.num_tokens for choice in choices),
            "gen_ai.usage.cache_read.input_tokens": sum(choice.num_cached for choice in choices[:: self._num_siblings]),
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.latency.e2e": now_s - self._arrived_s,
            "everserve.failovers": len({mark.fault for mark in self._marks if mark.fault is not None}),
        }
        if self._queued_s is not None:
            self._attributes["gen_ai.latency.time_in_queue"] = self._queued_s
        span = self._owner.tracer.start_span(
            f"{self._operation} {self._attributes['gen_ai.request.model']}",
            context=_propagator.extract(self._headers),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in self._attributes.items() if value is not None},
            start_time=self._ns(self._arrived_s),
        )
        for mark in sorted(self._marks, key=lambda mark: mark.at_s):
            span.add_event(mark.name, {**mark.attributes, **self._cause(mark)}, timestamp=self._ns(mark.at_s))
        if self._error is not None:
            span.set_attribute("error.type", type(self._error).__name__)
            span.set_status(StatusCode.ERROR, str(self._error))
        span.end(end_time=self._ns(now_s))

    def _cause(self, mark: Mark) -> dict[str, str]:
        """What the orchestrator found, if it said so by now."""
        if mark.fault is None:
            return {}
        for fault in self._owner.faults[mark.fault]:
            if fault.at_s > mark.at_s - _SAME_FAULT_S:
                return {"everserve.cause": fault.cause, "everserve.reason": fault.reason}
        return {}

    def _ns(self, at_s: float) -> int:
        return self._unix_ns + int(at_s * 1e9)
