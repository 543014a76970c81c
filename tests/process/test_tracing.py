"""Traces as a collector gets them: OTLP over HTTP from a real cluster in which workers are killed."""

import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support import cluster as c
from tests.support.cluster import Fault

WORKERS = ("--attention-workers", "2", "--expert-workers", "2", *c.PATIENT, "--no-enable-prefix-caching")
STREAMS = c.asks(6, num_prompt=40, max_tokens=120)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Keeps every span that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                for resource in request.resource_spans:
                    collector.services.add(values(resource.resource.attributes)["service.name"])
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, num: int) -> list[Any]:
        """So many spans, as soon as they are here."""
        c.wait_until(lambda: len(self.spans) >= num, what=f"{num} spans")
        assert len(self.spans) == num, "one span per request"
        taken, self.spans = self.spans, []
        return taken


def values(attributes: Any) -> dict[str, Any]:
    """Attributes, or those of an event, as they were before they were sent."""
    kinds = ("string_value", "int_value", "double_value", "bool_value")
    return {
        a.key: getattr(a.value, a.value.WhichOneof("value"), None)
        for a in attributes
        if a.value.WhichOneof("value") in kinds
    }


def events(span: Any, name: str) -> list[dict[str, Any]]:
    return [values(event.attributes) for event in span.events if event.name == name]


def failovers(spans: list[Any], role: str, rank: int) -> list[dict[str, Any]]:
    """Because of this worker: on a busy machine streams may pass by one that is only slow."""
    found = [event for span in spans for event in events(span, "failover")]
    return [event for event in found if (event["everserve.role"], event["everserve.rank"]) == (role, rank)]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


@pytest.fixture(scope="module")
def traced(start_server, collector):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with start_server(*WORKERS, "--otlp-traces-endpoint", collector.url) as running:
            yield running
            assert "Traceback" not in running.log_text(), running.log_text()


@pytest.fixture(scope="module")
def expected(server):
    return c.right_answers(server, STREAMS)


def test_a_request_is_one_trace_and_its_clients_are_part_of_it(traced, collector):
    body = {"model": "demo", "prompt": "It was", "max_tokens": 5, "seed": 1}
    httpx.post(
        f"{traced.url}/v1/completions", json=body, headers={"traceparent": PARENT}, timeout=None
    ).raise_for_status()
    httpx.post(f"{traced.url}/v1/completions", json=body, timeout=None).raise_for_status()
    first, second = collector.take(2)
    assert first.trace_id.hex() == PARENT.split("-")[1] and first.parent_span_id.hex() == PARENT.split("-")[2]
    assert second.trace_id != first.trace_id and not second.parent_span_id
    assert collector.services == {"everserve"}
    found = values(first.attributes)
    assert found["gen_ai.request.model"] == "demo" and found["gen_ai.usage.output_tokens"] == 5
    assert [event.name for event in first.events] == ["queued", "first_token", "finished"]
    assert first.start_time_unix_nano < first.events[1].time_unix_nano <= first.end_time_unix_nano


def test_a_killed_attention_worker_is_an_event_of_those_that_it_had(traced, collector, expected):
    c.wait_whole(traced)
    fault = Fault(traced, 0, signal.SIGKILL)
    streams = c.run_with(traced, STREAMS, c.in_decode, fault)
    fault.assert_landed()
    c.assert_equal(streams, expected)
    spans = collector.take(len(STREAMS))
    assert len({span.trace_id for span in spans}) == len(STREAMS)
    touched = failovers(spans, "attention", 0)
    resumed = [event for event in traced.events("gateway") if event["event"] == "request_resumed"]
    assert len(touched) == len(resumed) > 0, "exactly those that lost their worker"
    for event in touched:
        assert event["everserve.to_rank"] == 1 and event["everserve.cause"] == "crash" and event["everserve.reason"]
        assert event["everserve.gap_ms"] > 0 and event["everserve.tokens_known"] >= 5
        assert event["everserve.tokens_restored"] >= 40 and event["everserve.tokens_recomputed"] <= 2


def test_a_killed_expert_worker_is_an_event_too(traced, collector, expected):
    c.wait_whole(traced)
    fault = Fault(traced, 3, signal.SIGKILL)
    streams = c.run_with(traced, STREAMS, c.in_decode, fault)
    fault.assert_landed()
    c.assert_equal(streams, expected)
    replayed = [e for e in traced.events("worker") if e["event"] == "rows_replayed" and e["suspect"] == 3]
    touched = failovers(collector.take(len(STREAMS)), "expert", 3)
    assert bool(touched) == bool(replayed), "no stream was disturbed if no rows were under way there"
    for event in touched:
        assert event["everserve.rows_replayed"] > 0 and event["everserve.gap_ms"] > 0


@pytest.mark.long
def test_a_collector_that_is_gone_harms_nobody(start_server):
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and never answers
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with start_server("--otlp-traces-endpoint", url, "--shutdown-timeout", "5") as running:
            body = {"model": "demo", "prompt": "It was", "max_tokens": 5}
            httpx.post(f"{running.url}/v1/completions", json=body, timeout=None).raise_for_status()
            running.process.terminate()
            assert running.process.wait(timeout=90) == 0
            assert "Traceback" not in running.log_text(), running.log_text()
