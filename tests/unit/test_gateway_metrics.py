"""What dashboards made for vLLM look for."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from everserve.gateway.metrics import Histogram
from tests.unit.gateway_toy import QUEUED_S, toy_server

EXPECTED = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "everserve_epoch": "gauge",
    "everserve_workers": "gauge",
    "everserve_validity_violations": "gauge",
    "everserve_stale_messages": "counter",
}


def test_buckets_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 102.0


def test_names_types_labels_and_counts() -> None:
    async def test() -> None:
        async with toy_server(lambda spec: [50, 51, 52]) as server:
            body = {"prompt": "abcd", "max_tokens": 3, "n": 2}
            assert (await server.post("/v1/completions", body)).status == 200
            text = (await server.request("GET", "/metrics")).body.decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        for name, kind in EXPECTED.items():
            assert families[name].type == kind, name
            if name.startswith("vllm:"):
                assert all({"model_name", "engine"} <= set(sample.labels) for sample in families[name].samples)
        values = {
            (sample.name, sample.labels.get("finished_reason")): sample.value
            for family in families.values()
            for sample in family.samples
            if "le" not in sample.labels
        }
        assert values["vllm:prompt_tokens_total", None] == 8
        assert values["vllm:generation_tokens_total", None] == 6
        assert values["vllm:request_success_total", "length"] == 2
        assert values["vllm:time_to_first_token_seconds_count", None] == 2
        assert values["vllm:request_queue_time_seconds_sum", None] == 2 * QUEUED_S
        assert values["vllm:inter_token_latency_seconds_count", None] == 4
        assert values["vllm:request_generation_tokens_sum", None] == 6

    asyncio.run(test())
