"""Prometheus metrics under vLLM's names, labels and buckets.

Observations are plain additions, because some are made for every token; Prometheus' own objects are built only when
somebody scrapes.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from everserve.tables.outputs import EngineStats

if TYPE_CHECKING:
    from everserve.gateway.gateway import Gateway

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
FINISH_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts per bucket, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: (upper bound, how many are at most that)."""
        buckets: list[tuple[str, float]] = []
        so_far = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(so_far)))
        return buckets


class EngineMetrics:
    """What the gateway saw of one rank's streams. Outlives the rank's incarnations."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self.time_to_first_token_s = Histogram(_TTFT_S)
        self.inter_token_latency_s = Histogram(_TOKEN_S)
        self.mean_token_s = Histogram(_TOKEN_S)
        self.queue_s = Histogram(_REQUEST_S)
        self.latency_s = Histogram(_REQUEST_S)
        self.decode_s = Histogram(_REQUEST_S)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.num_duplicates = 0  # of incarnations that are gone


_HISTOGRAMS = (
    ("time_to_first_token_s", "time_to_first_token_seconds", "Time from arrival to the first token."),
    ("inter_token_latency_s", "inter_token_latency_seconds", "Time between two tokens of a stream."),
    (
        "mean_token_s",
        "request_time_per_output_token_seconds",
        "Mean time per token after the first, by request.",
    ),
    ("queue_s", "request_queue_time_seconds", "Time a stream waited before it was first scheduled."),
    ("latency_s", "e2e_request_latency_seconds", "Time from arrival to the end of a stream."),
    ("decode_s", "request_decode_time_seconds", "Time from the first to the last token of a stream."),
    ("prompt_tokens", "request_prompt_tokens", "Prompt tokens by request."),
    ("generation_tokens", "request_generation_tokens", "Generated tokens by request."),
)
_ENGINE_GAUGES = (
    ("num_running", "num_requests_running", "Streams in the running batch."),
    ("num_waiting", "num_requests_waiting", "Streams waiting to run."),
    ("kv_usage", "kv_cache_usage_perc", "KV cache usage; 1 means full."),
)
_ENGINE_COUNTERS = (
    ("num_preemptions", "num_preemptions", "Streams that gave their KV blocks back."),
    ("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
)
_IDLE = EngineStats(
    num_running=0,
    num_waiting=0,
    kv_usage=0.0,
    num_steps=0,
    num_preemptions=0,
    num_prompt_tokens=0,
    num_generated_tokens=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
)


class Metrics(Collector):
    """Everything that `/metrics` shows."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self._model = gateway.settings.served_model_names[0]
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._engines()
        yield from self._cluster()

    def _engines(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        fleet = self._gateway.fleet
        engines = {str(rank): engine for rank, engine in fleet.engines.items()}
        stats = {str(rank): fleet.stats(rank) or _IDLE for rank in fleet.engines}
        for field, name, text in _ENGINE_GAUGES:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=labels)
            for rank in engines:
                gauge.add_metric([self._model, rank], getattr(stats[rank], field))
            yield gauge
        for field, name, text in _ENGINE_COUNTERS:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
            for rank in engines:
                counter.add_metric([self._model, rank], getattr(stats[rank], field))
            yield counter
        prompt = CounterMetricFamily("vllm:prompt_tokens", "Prompt tokens processed.", labels=labels)
        generated = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=labels)
        success = CounterMetricFamily("vllm:request_success", "Ended streams.", labels=[*labels, "finished_reason"])
        for rank, engine in engines.items():
            prompt.add_metric([self._model, rank], engine.num_prompt_tokens)
            generated.add_metric([self._model, rank], engine.num_generation_tokens)
            for reason, count in engine.num_finished.items():
                success.add_metric([self._model, rank, reason], count)
        yield from (prompt, generated, success)
        for field, name, text in _HISTOGRAMS:
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=labels)
            for rank, engine in engines.items():
                histogram: Histogram = getattr(engine, field)
                family.add_metric([self._model, rank], buckets=histogram.cumulative(), sum_value=histogram.total)
            yield family

    def _cluster(self) -> Iterator[Metric]:
        cluster = self._gateway.cluster
        yield GaugeMetricFamily("everserve_epoch", "Version of the membership table.", value=cluster.epoch)
        yield GaugeMetricFamily(
            "everserve_validity_violations",
            "Reasons why the instance cannot serve as it is.",
            value=len(cluster.violations()),
        )
        workers = GaugeMetricFamily("everserve_workers", "Workers.", labels=["role", "state"])
        for (role, state), count in cluster.count_workers().items():
            workers.add_metric([role, state], count)
        yield workers
        yield CounterMetricFamily(
            "everserve_stale_messages",
            "Outputs dropped because the client had them already, or because a newer incarnation took the seat.",
            value=self._gateway.fleet.num_stale,
        )
