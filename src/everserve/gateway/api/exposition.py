"""`/metrics`: Prometheus' text, under vLLM's names and labels where vLLM has the same thing."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from everserve.gateway.gateway import Gateway
from everserve.gateway.observe import prometheus_text
from everserve.gateway.observe.counted import Sum
from everserve.gateway.streams.metrics import Histogram
from everserve.tables.ids import Rank
from everserve.tables.members import WorkerState

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
    ("prefill_s", "request_prefill_time_seconds", "Time from being scheduled to the first token of a stream."),
    ("inference_s", "request_inference_time_seconds", "Time from being scheduled to the end of a stream."),
    ("decode_s", "request_decode_time_seconds", "Time from the first to the last token of a stream."),
    ("prompt_tokens", "request_prompt_tokens", "Prompt tokens by request."),
    ("computed_tokens", "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached, by request."),
    ("generation_tokens", "request_generation_tokens", "Generated tokens by request."),
    ("most_generation_tokens", "request_max_num_generation_tokens", "Generated tokens of a request's longest choice."),
    ("max_tokens", "request_params_max_tokens", "The max_tokens of each stream."),
    ("num_choices", "request_params_n", "How many choices a request has."),
    ("step_tokens", "iteration_tokens_total", "Tokens computed in a step, of prompts and outputs."),
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
    ("num_drafts", "spec_decode_num_drafts", "Steps of streams that had drafts: tokens that may come next."),
    ("num_draft_tokens", "spec_decode_num_draft_tokens", "Drafts that were computed."),
    ("num_accepted_tokens", "spec_decode_num_accepted_tokens", "Drafts that were what came."),
)
_LOG_COUNTERS = (
    ("num_restored_tokens", "tokens_restored", "Tokens of resumed streams whose KV came from a log."),
    ("num_known_tokens", "tokens_recomputed", "Tokens of resumed streams that were computed a second time."),
    ("num_broken_tokens", "log_broken_tokens", "Tokens that a log should have had: a gap, or a wrong checksum."),
    ("num_unreadable_logs", "unreadable_logs", "Logs of dead workers that could not be read, by each that tried."),
    ("num_masked_tokens", "masked_tokens", "Tokens sampled while experts were masked: they are not exact."),
    ("num_unmasked_tokens", "unmasked_tokens", "Tokens whose KV was computed again because a mask was lifted."),
    ("num_regained_tokens", "kv_regained_tokens", "Tokens of running streams that kept their KV when heads moved."),
    ("num_lost_tokens", "kv_lost_tokens", "Tokens of running streams computed again because heads moved."),
    ("num_taken_back", "places_taken_back", "Places in batches that streams gave to requests which had none."),
    ("num_regained_bytes", "kv_regained_bytes", "Bytes of KV that were copied because heads or streams moved."),
)


class Metrics(Collector):
    """Everything that `/metrics` shows."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._model = gateway.config.served_model_names[0]
        self._sum = Sum()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def pieces(self) -> Iterator[bytes]:
        """The text, some lines at a time."""
        yield from prometheus_text.pieces(self._registry.collect())
        self._gateway.save_counts()  # what was shown never becomes less

    def collect(self) -> Iterator[Metric]:
        self._sum = Sum(self._gateway.counted_elsewhere())
        yield from self._engines()
        yield from self._cluster()
        yield from self._survival()

    def _engines(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        fleet = self._gateway.fleet
        engines = {str(rank): engine for rank, engine in fleet.engines.items()}
        sums = {str(rank): self._sum.engine(rank, engine) for rank, engine in fleet.engines.items()}
        stats = {str(rank): fleet.stats(rank) for rank in fleet.engines}
        present = [str(rank) for rank in fleet.engines if self._gateway.cluster.has_streams(rank)]
        for field, name, text in _ENGINE_GAUGES:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=labels)
            for rank in present:
                gauge.add_metric([self._model, rank], getattr(stats[rank], field, 0))
            yield gauge
        yield self._caches(present)
        captures = GaugeMetricFamily(
            "everserve_graph_captures",
            "Graphs that the rank's process has captured: none once it serves, whatever happens around it.",
            labels=["rank"],
        )
        pending = GaugeMetricFamily(
            "everserve_prefill_cost_pending",
            "Prompt tokens that a home has still to compute, each with the cost of its context.",
            labels=["rank"],
        )
        for rank in present:
            captures.add_metric([rank], getattr(stats[rank], "num_captures", 0))
            pending.add_metric([rank], getattr(stats[rank], "pending_prefill_cost", 0))
        yield captures
        yield pending
        done = CounterMetricFamily("everserve_prefill_cost", "The same of those that it has computed.", labels=["rank"])
        for rank, engine in engines.items():
            done.add_metric([rank], engine.total("prefill_cost", stats[rank]))
        yield done
        for field, name, text in _ENGINE_COUNTERS:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
            for rank, engine in engines.items():
                counter.add_metric([self._model, rank], engine.total(field, stats[rank]))
            yield counter
        prompt = CounterMetricFamily("vllm:prompt_tokens", "Prompt tokens processed.", labels=labels)
        generated = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=labels)
        cached = CounterMetricFamily("vllm:prompt_tokens_cached", "Those that were cached.", labels=labels)
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from.", labels=[*labels, "source"]
        )
        success = CounterMetricFamily("vllm:request_success", "Ended streams.", labels=[*labels, "finished_reason"])
        for rank, engine in sums.items():
            prompt.add_metric([self._model, rank], engine.num_prompt_tokens)
            generated.add_metric([self._model, rank], engine.num_generation_tokens)
            cached.add_metric([self._model, rank], engine.num_cached_tokens)
            num_computed = engine.num_prompt_tokens - engine.num_cached_tokens
            sources.add_metric([self._model, rank, "local_compute"], num_computed)
            sources.add_metric([self._model, rank, "local_cache_hit"], engine.num_cached_tokens)
            for reason, count in engine.num_finished.items():
                success.add_metric([self._model, rank, reason], count)
        yield from (prompt, cached, sources, generated, success)
        for field, name, text in _HISTOGRAMS:
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=labels)
            for rank, engine in sums.items():
                histogram: Histogram = getattr(engine, field)
                family.add_metric([self._model, rank], buckets=histogram.cumulative(), sum_value=histogram.total)
            yield family

    def _caches(self, ranks: list[str]) -> Metric:
        """Always 1: its labels are what it says."""
        names = ("block_size", "num_gpu_blocks", "enable_prefix_caching")
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache of a worker, in labels.", labels=["model_name", "engine", *names]
        )
        for rank in ranks:
            link = self._gateway.fleet.link(Rank(int(rank)))
            if link is not None and link.ready is not None:
                caches = link.stats is not None and link.stats.prefix_cache_queries > 0
                ready = link.ready
                values = [str(ready.block_size), str(ready.num_blocks), str(caches)]
                family.add_metric([self._model, rank, *values], 1)
        return family

    def _cluster(self) -> Iterator[Metric]:
        cluster = self._gateway.cluster
        yield GaugeMetricFamily("everserve_epoch", "Version of the cluster's tables.", value=cluster.epoch)
        yield GaugeMetricFamily(
            "everserve_validity_violations",
            "Reasons why the instance cannot serve as it is.",
            value=len(cluster.violations()),
        )
        yield GaugeMetricFamily(
            "everserve_degraded",
            "What is missing although the instance is valid: workers being replaced, experts with too few places, the"
            " orchestrator.",
            value=len(cluster.degraded()),
        )
        yield GaugeMetricFamily(
            "everserve_degraded_experts",
            "Experts, over all layers, that no worker can compute now: streams wait for them, or they are masked.",
            value=cluster.num_experts_without_place + cluster.num_masked_experts,
        )
        balance = GaugeMetricFamily(
            "everserve_expert_load_max_over_mean",
            "Rows of the busiest expert worker of each layer over the mean of all expert workers, lately.",
        )
        if cluster.experts.max_over_mean:
            balance.add_metric([], cluster.experts.max_over_mean)
        yield balance
        work = GaugeMetricFamily(
            "everserve_balance_max_over_mean",
            "Work of the busiest device over the mean of all that should serve, by kind of shards.",
            labels=["kind"],
        )
        for kind, ratio in cluster.experts.balance.items():
            work.add_metric([kind], ratio)
        yield work
        slowness = GaugeMetricFamily(
            "everserve_worker_slowness",
            "How many times as long as its peers a worker takes for the same work, lately.",
            labels=["rank"],
        )
        for rank, ratio in cluster.slowness.items():
            if cluster.worker(rank) is not None:
                slowness.add_metric([str(rank)], ratio)
        yield slowness
        workers = GaugeMetricFamily("everserve_workers", "Workers.", labels=["role", "state"])
        for (role, state), count in cluster.count_workers().items():
            workers.add_metric([role, state], count)
        yield workers
        yield GaugeMetricFamily(
            "everserve_spares", "Processes that are ready to become workers.", value=cluster.num_spares
        )
        yield from self._seats()
        yield from self._places()

    def _places(self) -> Iterator[Metric]:
        """Devices, hosts, and experts that move."""
        cluster = self._gateway.cluster
        devices = GaugeMetricFamily("everserve_devices", "Devices, as failure domains.", labels=["state"])
        for state, count in ({"serving": 0, "down": 0, "gone": 0} | cluster.count_devices()).items():
            devices.add_metric([state], count)
        yield devices
        hosts = GaugeMetricFamily("everserve_hosts", "Machines of the instance.", labels=["state"])
        for state, count in cluster.count_hosts().items():
            hosts.add_metric([state], count)
        yield hosts
        levels = GaugeMetricFamily(
            "everserve_device_health_level", "Health of a device, from 0 (healthy) to 6 (isolated).", labels=["device"]
        )
        for device, level in cluster.levels().items():
            levels.add_metric([str(device)], level)
        yield levels
        yield CounterMetricFamily(
            "everserve_health_source_troubles",
            "Lines of the health source that could not be read, and reads that failed.",
            value=cluster.num_health_troubles,
        )
        yield GaugeMetricFamily(
            "everserve_expert_moves_in_progress", "Expert slots that are being filled.", value=cluster.num_moves
        )
        repairs = HistogramMetricFamily(
            "everserve_repair_seconds",
            "From the detection of a lost expert worker to each phase of the repair.",
            labels=["phase"],
        )
        for phase, histogram in self._gateway.repairs.by_phase.items():
            repairs.add_metric([phase], buckets=histogram.cumulative(), sum_value=histogram.total)
        yield repairs
        moves = CounterMetricFamily("everserve_expert_moves", "Expert slots that were filled.", labels=["source"])
        copied = CounterMetricFamily("everserve_expert_move_bytes", "Bytes copied for that.", labels=["source"])
        for source, count in self._gateway.repairs.num_moved.items():
            moves.add_metric([source], count)
            copied.add_metric([source], self._gateway.repairs.num_bytes[source])
        yield from (moves, copied)

    def _seats(self) -> Iterator[Metric]:
        """Worker by worker, and what may still happen to them."""
        members = self._gateway.cluster.members
        seats = members.workers if members is not None else ()
        restarts = CounterMetricFamily(
            "everserve_worker_restarts", "Processes that a seat had before the present one.", labels=["rank", "role"]
        )
        slots = GaugeMetricFamily(
            "everserve_expert_slots",
            "Places for experts, per layer, in workers that are ready.",
            labels=["rank", "kind"],
        )
        for worker in seats:
            restarts.add_metric([str(worker.rank), "+".join(worker.roles)], max(0, worker.incarnation - 1))
            if worker.slots:
                is_ready = worker.state is WorkerState.READY
                num_active = worker.slots - worker.shadow_slots
                slots.add_metric([str(worker.rank), "active"], num_active if is_ready else 0)
                slots.add_metric([str(worker.rank), "shadow"], worker.shadow_slots if is_ready else 0)
        survivable = GaugeMetricFamily(
            "everserve_survivable_expert_deaths",
            "Expert workers that may still die at once, whichever they are, without leaving an expert without a place.",
        )
        if (num_left := self._gateway.cluster.num_survivable_deaths) is not None:
            survivable.add_metric([], num_left)
        masked = GaugeMetricFamily(
            "everserve_masked_experts",
            "Experts that are masked, over all layers: tokens are computed without them.",
            value=self._gateway.cluster.num_masked_experts,
        )
        yield from (restarts, slots, survivable, masked)

    def _survival(self) -> Iterator[Metric]:
        yield from self._losses()
        yield from self._logs()
        yield from self._clients()
        yield from self._http()

    def _losses(self) -> Iterator[Metric]:
        """What losing workers has cost."""
        fleet = self._gateway.fleet
        totals, stall_s = fleet.totals, self._sum.stall_s(fleet.totals.stall_s)
        failovers = CounterMetricFamily("everserve_failovers", "Workers that were lost.", labels=["role", "cause"])
        for (role, cause), count in totals.failovers.items():
            failovers.add_metric([role, cause], count)
        yield failovers
        yield HistogramMetricFamily(
            "everserve_stall_seconds",
            "Time from noticing that a stream's worker is lost to the stream's next token.",
            buckets=stall_s.cumulative(),
            sum_value=stall_s.total,
        )
        yield GaugeMetricFamily(
            "everserve_requests_queued",
            "Streams that wait in the gateway for a worker.",
            value=self._sum.of("num_waiting", fleet.num_waiting),
        )
        yield CounterMetricFamily(
            "everserve_requests_resumed",
            "Streams that lost their worker and were given to another one.",
            value=self._sum.of_fleet("num_resumed", totals.num_resumed),
        )
        yield CounterMetricFamily(
            "everserve_streams_moved",
            "Streams that were given to another worker because theirs was asked to leave.",
            value=self._sum.of_fleet("num_moved", totals.num_moved),
        )
        yield CounterMetricFamily(
            "everserve_stream_divergences",
            "Outputs that contradicted what clients had already; they were dropped.",
            value=self._sum.of_fleet("num_diverged", totals.num_diverged),
        )
        yield CounterMetricFamily(
            "everserve_rows_checked",
            "Rows that a second worker has computed, to compare their bits.",
            value=self._gateway.cluster.num_rows_checked,
        )
        yield CounterMetricFamily(
            "everserve_replayed_rows",
            "Rows sent to another expert worker because the first did not answer.",
            value=self._engine_total("num_replayed_rows"),
        )
        yield CounterMetricFamily(
            "everserve_stale_messages",
            "Dropped because their sender is no longer trusted, or because they had been received before.",
            value=self._sum.of_fleet("num_stale", totals.num_stale)
            + self._engine_total("num_stale")
            + self._gateway.cluster.num_stale_elsewhere,
        )

    def _logs(self) -> Iterator[Metric]:
        """What the KV logs have saved."""
        fleet = self._gateway.fleet
        stats = [fleet.stats(rank) for rank in fleet.engines]
        yield GaugeMetricFamily(
            "everserve_kv_log_lag_tokens",
            "Tokens whose KV is computed but not in a log yet.",
            value=sum(one.log_lag_tokens for one in stats if one is not None),
        )
        for field, name, text in _LOG_COUNTERS:
            yield CounterMetricFamily(f"everserve_{name}", text, value=self._engine_total(field))

    def _clients(self) -> Iterator[Metric]:
        """Clients that lost their connection."""
        keeper = self._gateway.keeper
        yield CounterMetricFamily(
            "everserve_client_resumes",
            "Clients that came back for the rest of their stream.",
            value=self._sum.of("num_resumes", keeper.num_resumes),
        )
        evicted = CounterMetricFamily(
            "everserve_resume_evictions",
            "Streams that were forgotten before their time because memory (--resume-memory-bytes) was short.",
            labels=["state"],
        )
        for state, count in self._sum.by_label("evicted", keeper.num_evicted).items():
            evicted.add_metric([state], count)
        yield evicted
        yield GaugeMetricFamily(
            "everserve_suspended_streams",
            "Streams whose client may come back.",
            value=self._sum.of("num_suspended", keeper.num_suspended),
        )

    def _http(self) -> Iterator[Metric]:
        """Metrics of HTTP as vLLM's servers have it."""
        responses = CounterMetricFamily("http_requests", "HTTP responses.", labels=["handler", "method", "status"])
        for labels, count in self._sum.responses(self._gateway.responses).items():
            responses.add_metric(list(labels), count)
        yield responses
        connections = self._gateway.connections
        yield GaugeMetricFamily(
            "everserve_connections",
            "Connections of clients, idle ones included.",
            value=self._sum.of("num_open", connections.num_open),
        )
        closed = CounterMetricFamily(
            "everserve_connections_closed",
            "Requests refused before they were answered, and idle connections closed, because of a limit.",
            labels=["limit"],
        )
        num_refused = self._sum.of("num_refused", connections.memory.num_refused)
        for limit, count in self._sum.by_label("closed", connections.closed).items():
            closed.add_metric([limit], count + (num_refused if limit == "memory" else 0))
        yield closed
        yield GaugeMetricFamily(
            "everserve_request_memory_bytes",
            "Memory that requests hold: bodies, and what is made of them (--request-memory-bytes).",
            value=self._sum.of("num_bytes", connections.memory.num_bytes),
        )

    def _engine_total(self, field: str) -> int:
        fleet = self._gateway.fleet
        return sum(engine.total(field, fleet.stats(rank)) for rank, engine in fleet.engines.items())
