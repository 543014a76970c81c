"""What a trace says about a request: toy workers, real spans."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from everserve.errors import ConfigError
from everserve.gateway.observe import tracing
from everserve.gateway.observe.spans import OtelTracing
from everserve.gateway.streams.tracing import NOT_TRACED, Tracing
from everserve.tables.outputs import Output
from everserve.wire.events import FaultDetected, RowsReplayed, StreamRestored, StreamsContinued
from tests.support.gateway_toy import toy_server, until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """Tracing into memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = OtelTracing(SimpleSpanProcessor(self._exporter))

    @property
    def span(self) -> ReadableSpan:
        spans = self._exporter.get_finished_spans()
        assert len(spans) == 1, spans
        return spans[0]

    def events(self, name: str = "") -> list[Any]:
        return [event for event in self.span.events if event.name.startswith(name)]


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def test_a_request_from_beginning_to_end() -> None:
    traced = Traced()

    async def test() -> None:
        async with toy_server(lambda spec: [50, 51, 52], tracing=traced.tracing) as server:
            body = {"model": "toy", "prompt": "abcd", "max_tokens": 3, "temperature": 0.5, "stop": "zz", "stream": True}
            response = await server.request("POST", "/v1/completions", body, {"traceparent": PARENT})
            assert response.status == 200, response.body
            assert not traced.tracing.streams

    run(test())
    span = traced.span
    assert span.name == "text_completion toy" and span.kind is SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.resource.attributes["service.name"] == "everserve"
    assert span.status.status_code is StatusCode.UNSET
    assert [event.name for event in span.events] == ["queued", "first_token", "finished"]
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.temperature"] == 0.5 and attributes["gen_ai.request.max_tokens"] == 3
    assert attributes["gen_ai.request.stop_sequences"] == ("zz",)
    assert attributes["gen_ai.usage.input_tokens"] == 4 and attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.response.id"].startswith("cmpl-")
    assert 0 < attributes["gen_ai.response.time_to_first_chunk"] <= attributes["gen_ai.latency.e2e"]
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times)


def lost() -> FaultDetected:
    return FaultDetected(
        process="orchestrator", rank=0, incarnation=1, roles=("attention",), cause="crash", reason="its word"
    )


def restored(id: str) -> StreamRestored:
    told = {"rank": 1, "from_rank": 0, "num_restored": 4, "num_recomputed": 1, "took_ms": 0.1}
    return StreamRestored(process="worker-1", request_id=id, **told)


def test_a_lost_attention_worker_is_an_event() -> None:
    traced = Traced()

    async def test() -> None:
        async with toy_server(tracing=traced.tracing) as server:
            body = {"messages": [{"role": "user", "content": "abcd"}], "max_tokens": 3}
            task, _, _ = server.begin("POST", "/v1/chat/completions", body)
            await until(lambda: len(server.worker.specs) == 1)
            id = server.worker.specs[0].id
            server.worker.send(Output(id=id, index=0, token=50))
            await until(lambda: bool(traced.tracing.streams) and _num_tokens(server) == 1)
            second = await server.add_worker(1)
            server.orchestrator.lose(server.worker, "crash")
            await until(lambda: len(second.specs) == 1)
            server.gateway.fleet.tell(lost())
            server.gateway.fleet.tell(restored(id))
            clock = server.gateway.fleet.clock
            server.gateway.fleet.clock = lambda: clock() + 5.0  # so long the client waits
            second.send(Output(id=id, index=1, token=51), Output(id=id, index=2, token=52, finish_reason="length"))
            await task

    run(test())
    assert traced.span.name.startswith("chat ")
    (failover,) = traced.events("failover")
    attributes = dict(failover.attributes)
    assert attributes.pop("everserve.gap_ms") >= 5000
    assert attributes == {
        "everserve.role": "attention",
        "everserve.rank": 0,
        "everserve.to_rank": 1,
        "everserve.tokens_known": 1,
        "everserve.tokens_restored": 4,
        "everserve.tokens_recomputed": 1,
        "everserve.cause": "crash",
        "everserve.reason": "its word",
    }
    assert dict(traced.span.attributes or {})["everserve.failovers"] == 1


def _num_tokens(server: Any) -> int:
    link = server.gateway.fleet.link(0)
    return sum(len(stream.tokens) for stream in link.streams._streams.values())


def test_a_lost_expert_worker_is_an_event_of_every_stream_that_needed_it() -> None:
    traced = Traced()

    async def test() -> None:
        async with toy_server(tracing=traced.tracing) as server:
            task, _, _ = server.begin("POST", "/v1/completions", {"prompt": "abcd", "max_tokens": 2, "n": 2})
            await until(lambda: len(server.worker.specs) == 2)
            ids = [spec.id for spec in server.worker.specs]
            server.worker.send(*(Output(id=id, index=0, token=50) for id in ids))
            await until(lambda: _num_tokens(server) == 2)
            for layer in (2, 3):  # one death, told twice
                replayed = RowsReplayed(process="worker-0", rank=0, suspect=3, layer=layer, num_rows=5)
                server.gateway.fleet.tell(replayed)
            server.gateway.fleet.tell(RowsReplayed(process="worker-1", rank=1, suspect=3, layer=2, num_rows=9))
            server.gateway.fleet.tell(StreamsContinued(process="worker-0", rank=0, paused_s=0.25))
            server.worker.send(*(Output(id=id, index=1, token=51, finish_reason="length") for id in ids))
            await task

    run(test())
    failovers = [dict(event.attributes) for event in traced.events("failover")]
    assert [found["everserve.choice"] for found in failovers] == [0, 1]
    for found in failovers:
        assert found["everserve.role"] == "expert" and found["everserve.rank"] == 3
        assert found["everserve.rows_replayed"] == 10 and found["everserve.gap_ms"] > 0
    assert [event.attributes["everserve.paused_ms"] for event in traced.events("paused")] == [250, 250]


def test_a_client_that_leaves_and_one_that_comes_back() -> None:
    gone, back = Traced(), Traced()

    async def leave() -> None:
        async with toy_server(tracing=gone.tracing) as server:
            task, _, left = server.begin("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True})
            await until(lambda: len(server.worker.specs) == 1)
            left.set()
            await task

    async def come_back() -> None:
        async with toy_server(lambda spec: [50, 51, 52], tracing=back.tracing, is_paced=True) as server:
            body = {"prompt": "a", "max_tokens": 3, "stream": True}
            task, response, left = server.begin("POST", "/v1/completions", body, {"x-request-id": "r"})
            await until(lambda: len(server.worker.specs) == 1)
            server.worker.advance()
            await until(lambda: bool(response.event_ids))
            left.set()
            await task
            headers = {"x-request-id": "r", "last-event-id": "0"}
            task, _, _ = server.begin("POST", "/v1/completions", body, headers)
            await until(lambda: len(server.worker.specs) == 2)
            while server.worker.advance():
                await asyncio.sleep(0)
            await task

    run(leave())
    run(come_back())
    assert [event.name for event in gone.span.events] == ["queued", "client_disconnected"]
    names = [event.name for event in back.span.events]
    assert names == ["queued", "first_token", "client_disconnected", "client_resumed", "finished"]


def test_a_stream_that_breaks_is_an_error() -> None:
    traced = Traced()

    async def test() -> None:
        async with toy_server(tracing=traced.tracing) as server:
            task, _, _ = server.begin("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3})
            await until(lambda: len(server.worker.specs) == 1)
            server.worker.reject(server.worker.specs[0].id, "no", is_server_fault=True)
            await task

    run(test())
    assert traced.span.status.status_code is StatusCode.ERROR and traced.span.status.description == "no"


# -- asked for, or not ---------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*tracing._ENDPOINTS, *tracing._PROTOCOLS, "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")
    return monkeypatch


def test_nobody_asks(environment: pytest.MonkeyPatch) -> None:
    tracing.ask_for(None)
    made = tracing.make_tracing()
    assert type(made) is Tracing and made.listeners == []
    assert made.request(None) is NOT_TRACED  # type: ignore[arg-type]
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:1")
    assert tracing.is_asked_for()
    environment.setenv("OTEL_SDK_DISABLED", "true")
    assert not tracing.is_asked_for()


def test_the_flag(environment: pytest.MonkeyPatch) -> None:
    for given, meant in (
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("http://h:4318/", "http://h:4318/v1/traces"),
        ("https://h/some/where", "https://h/some/where"),
    ):
        tracing.ask_for(given)
        assert tracing.os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == meant
    with pytest.raises(ConfigError, match="expected a URL"):
        tracing.ask_for("localhost:4317")
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="http/protobuf, not as grpc"):
        tracing.ask_for("http://h:4318")


@pytest.mark.parametrize("asked", [["--otlp-traces-endpoint", "http://localhost:4318"], []])
def test_without_the_extra_there_is_one_clear_line(asked: list[str], environment: pytest.MonkeyPatch) -> None:
    """In a process of its own, in which nobody finds OpenTelemetry."""
    if not asked:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    hide = "import sys; sys.modules['opentelemetry'] = None; from everserve.cli import main; main()"
    command = [sys.executable, "-c", hide, "serve", "demo", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "pip install 'everserve[otel]'" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1
