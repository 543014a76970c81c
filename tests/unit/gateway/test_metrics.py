"""What dashboards made for vLLM look for."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from everserve.gateway.streams.metrics import EngineMetrics, Histogram, RestartingCounter
from everserve.tables.ids import Rank
from everserve.tables.outputs import EngineStats, ExpertStats, Output
from tests.support.fleet_toy import engine_stats
from tests.support.gateway_toy import QUEUED_S, member, toy_server, until

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
    "vllm:iteration_tokens_total": "histogram",
    "vllm:prompt_tokens_cached": "counter",
    "everserve_epoch": "gauge",
    "everserve_workers": "gauge",
    "everserve_worker_slowness": "gauge",
    "everserve_spares": "gauge",
    "everserve_validity_violations": "gauge",
    "everserve_stale_messages": "counter",
    "everserve_failovers": "counter",
    "everserve_stall_seconds": "histogram",
    "everserve_requests_queued": "gauge",
    "everserve_requests_resumed": "counter",
    "everserve_tokens_recomputed": "counter",
    "everserve_replayed_rows": "counter",
    "everserve_kv_log_lag_tokens": "gauge",
    "everserve_tokens_restored": "counter",
    "everserve_log_broken_tokens": "counter",
    "everserve_degraded_experts": "gauge",
    "everserve_masked_experts": "gauge",
    "everserve_masked_tokens": "counter",
    "everserve_unmasked_tokens": "counter",
    "everserve_kv_regained_tokens": "counter",
    "everserve_kv_lost_tokens": "counter",
    "everserve_kv_regained_bytes": "counter",
    "everserve_streams_moved": "counter",
    "everserve_stream_divergences": "counter",
    "everserve_client_resumes": "counter",
    "everserve_suspended_streams": "gauge",
    "everserve_resume_evictions": "counter",
}


def test_buckets_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 102.0


def test_tokens_of_a_step() -> None:
    metrics = EngineMetrics()

    def stats(num_steps: int, num_prompt: int, num_generated: int) -> EngineStats:
        return engine_stats(num_steps=num_steps, num_prompt_tokens=num_prompt, num_generated_tokens=num_generated)

    told = [stats(1, 10, 0), stats(2, 10, 4), stats(4, 20, 12), stats(4, 20, 12)]
    for before, now in zip([None, *told], told, strict=False):
        metrics.note_steps(before, now)
    assert metrics.step_tokens.total == 32 and sum(metrics.step_tokens.counts) == 4
    metrics.note_steps(None, stats(100, 1000, 1000))  # of a worker that has outlived a gateway
    assert sum(metrics.step_tokens.counts) == 4


def test_a_counter_that_restarts_never_goes_back() -> None:
    counter, totals = RestartingCounter(), []
    for value in (0, 3, 5, 1, 1, 4, 0):
        counter.update(value)
        totals.append(counter.total)
    assert totals == [0, 3, 5, 6, 6, 9, 9]


def test_names_types_labels_and_counts() -> None:
    async def test() -> None:
        async with toy_server(lambda spec: [50, 51, 52]) as server:
            body = {"prompt": "abcd", "max_tokens": 3, "n": 2}
            assert (await server.post("/v1/completions", body)).status == 200
            text = (await server.request("GET", "/metrics")).body.decode()
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert sorted(names) == sorted(set(names)), "Prometheus takes each name once"
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
        assert values["vllm:inter_token_latency_seconds_count", None] == 0, "tokens come together, all of a choice"
        assert values["vllm:request_generation_tokens_sum", None] == 6
        assert values["vllm:request_prefill_kv_computed_tokens_sum", None] == 2 * (4 - 2)  # two are cached
        assert values["vllm:request_params_max_tokens_sum", None] == 6
        assert values["vllm:request_params_n_sum", None] == 2
        assert values["vllm:request_params_n_count", None] == 1
        assert values["vllm:request_max_num_generation_tokens_sum", None] == 3
        assert values["vllm:request_prefill_time_seconds_count", None] == 2
        assert values["vllm:request_inference_time_seconds_count", None] == 2
        assert values["vllm:prompt_tokens_cached_total", None] == 2 * 2
        sources = families["vllm:prompt_tokens_by_source"].samples
        assert {sample.labels["source"]: sample.value for sample in sources} == {
            "local_compute": 4,
            "local_cache_hit": 4,
        }
        (cache,) = families["vllm:cache_config_info"].samples
        assert (cache.labels["block_size"], cache.labels["num_gpu_blocks"], cache.value) == ("4", "100", 1)

    asyncio.run(test())


STATS_AFTER_A_LOSS = engine_stats(
    num_known_tokens=5,
    num_replayed_rows=6,
    num_stale=7,
    num_restored_tokens=9,
    num_broken_tokens=3,
    num_unreadable_logs=4,
    num_masked_tokens=12,
    num_unmasked_tokens=17,
    num_regained_tokens=19,
    num_lost_tokens=21,
    num_regained_bytes=23,
    log_lag_tokens=2,
)
LINES_AFTER_A_LOSS = (
    'everserve_failovers_total{cause="hang",role="attention"} 1.0',
    'everserve_failovers_total{cause="crash",role="expert"} 0.0',
    "everserve_stall_seconds_count 1.0",
    "everserve_requests_resumed_total 1.0",
    "everserve_requests_queued 0.0",
    "everserve_tokens_recomputed_total 5.0",
    "everserve_replayed_rows_total 6.0",
    f"everserve_stale_messages_total {2 + 7 + 8}.0",
    "everserve_stream_divergences_total 1.0",
    "everserve_streams_moved_total 0.0",
    "everserve_tokens_restored_total 9.0",
    "everserve_log_broken_tokens_total 3.0",
    "everserve_unreadable_logs_total 4.0",
    "everserve_masked_tokens_total 12.0",
    "everserve_unmasked_tokens_total 17.0",
    "everserve_kv_regained_tokens_total 19.0",
    "everserve_kv_lost_tokens_total 21.0",
    "everserve_kv_regained_bytes_total 23.0",
    "everserve_kv_log_lag_tokens 2.0",
    "everserve_epoch 2.0",
    "everserve_validity_violations 1.0",
    'everserve_workers{role="attention",state="ready"} 2.0',
)


def test_what_losing_a_worker_has_cost() -> None:
    async def test() -> None:
        async with toy_server() as server:
            task, _, gone = server.begin("POST", "/v1/completions", {"prompt": "abcd", "max_tokens": 3})
            await until(lambda: len(server.worker.specs) == 1)
            id = server.worker.specs[0].id
            second = await server.add_worker(1)
            server.orchestrator.lose(server.worker, "hang")
            await until(lambda: len(second.specs) == 1)
            server.worker.send(Output(id=id, index=0, token=50))  # too late
            second.send(Output(id=id, index=0, token=50))
            second.send(Output(id=id, index=0, token=51), Output(id=id, index=1, token=50), stats=STATS_AFTER_A_LOSS)
            expert_stats = {Rank(2): ExpertStats(num_stale=8, num_replayed_rows=6)}
            server.orchestrator.publish(member(0), member(1), violations=("x",), expert_stats=expert_stats)
            await until(lambda: server.gateway.cluster.epoch == 2)
            await until(lambda: server.gateway.fleet.totals.num_stale == 2)
            await until(lambda: server.gateway.fleet.stats(Rank(1)) == STATS_AFTER_A_LOSS)
            text = (await server.request("GET", "/metrics")).body.decode()
            gone.set()
            await task
        for line in LINES_AFTER_A_LOSS:
            assert f"{line}\n" in text, line

    asyncio.run(asyncio.wait_for(test(), 20))
