"""The dashboard, the alerts and the documents name what exists: each metric, each label, each section."""

import asyncio
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from everserve.tables.calls import ShardKind
from everserve.tables.ids import Epoch, Role
from everserve.tables.routes import Routes
from everserve.wire.events import RepairPhase
from everserve.wire.messages import ExpertsChanged
from tests.support.gateway_toy import member, toy_server, until

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy/prometheus/everserve.rules.yaml"
DASHBOARD = ROOT / "deploy/grafana/everserve.json"
METRICS, OPERATIONS = ROOT / "docs/metrics.md", ROOT / "docs/operations.md"
CONTRACT = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total"),
    *("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"),
    *("vllm:e2e_request_latency_seconds", "vllm:request_success_total", "everserve_epoch", "everserve_workers"),
    *("everserve_validity_violations", "everserve_failovers_total", "everserve_stall_seconds"),
    *("everserve_requests_resumed_total", "everserve_tokens_recomputed_total", "everserve_stale_messages_total"),
    *("everserve_kv_log_lag_tokens", "everserve_degraded_experts"),
)
SCRAPED = {"instance", "job"}  # labels that Prometheus adds

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_NAME = re.compile(r"(?<![\w:$.])([a-zA-Z_:][\w:]*)(?!\s*\()(?![\w:])")
_WORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "group_right"}


@cache
def exposition() -> dict[str, set[str]]:
    """The names of all samples that a gateway can show, with their labels, after something of everything."""

    async def scrape() -> str:
        async with toy_server(lambda spec: [50, 51, 52]) as server:
            expert = member(1, roles=(Role.EXPERT,), slots=4, shadow_slots=2)
            server.gateway.feed.publish(
                RepairPhase(process="orchestrator", phase="covered", since_s=0.1, num_experts_without_place=0)
            )
            no_experts = Routes.of(Epoch(2), [])
            server.orchestrator.channel.send(
                ExpertsChanged(
                    **{"moe_layers": (), "load": b"", "max_over_mean": 1.5, "worst_layer": 0},
                    routes=no_experts,
                    balance={ShardKind.HEAD: 1.0},
                )
            )
            server.orchestrator.publish(member(0, device=0), expert, num_survivable_deaths=1, slowness={0: 1.0})
            await until(lambda: server.gateway.cluster.epoch == 2)
            assert (await server.post("/v1/completions", {"prompt": "abcd", "max_tokens": 3})).status == 200
            return (await server.request("GET", "/metrics")).body.decode()

    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(asyncio.run(scrape())):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def read_query(query: str) -> dict[str, set[str]]:
    """The metrics of a PromQL expression, each with the labels that it is selected by."""
    query = _STRINGS.sub('""', query)
    metrics = {
        name: {re.split("[=!]", pair)[0].strip() for pair in labels.split(",") if pair.strip()}
        for name, labels in _SELECTOR.findall(query)
    }
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", " ", _GROUPING.sub(" ", query))
    for name in _NAME.findall(bare):
        if name not in _WORDS:
            metrics.setdefault(name, set())
    return metrics


def grouped_by(query: str) -> set[str]:
    return {label.strip() for _, labels in _GROUPING.findall(query) for label in labels.split(",") if label.strip()}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def queries() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    found += [note["expr"] for note in board["annotations"]["list"] if "expr" in note]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert match is not None and variable["query"]["query"] == variable["definition"]
            found.append(match[1])
    return [re.sub(r"\$__(rate_interval|range|interval)", "5m", query) for query in found]


def test_queries_are_read_as_prometheus_would() -> None:
    query = (
        'sum by (le, role) (rate(a:b_bucket{x="y,{z}", w!~"v"}[5m])) / on (instance) c > bool 0.5 and d_total offset 5m'
    )
    assert read_query(query) == {"a:b_bucket": {"x", "w"}, "c": set(), "d_total": set()}
    assert grouped_by(query) == {"le", "role", "instance"}


@pytest.mark.parametrize("query", [*(rule["expr"] for rule in alerts()), *queries()])
def test_what_queries_name_exists(query: str) -> None:
    metrics = read_query(query)
    assert metrics, "a query without a metric"
    for name, labels in metrics.items():
        assert name in exposition(), f"{name} is not in /metrics"
        assert labels <= exposition()[name] | SCRAPED, f"{name} has no such labels: {labels}"
    known = set().union(*(exposition()[name] for name in metrics)) | SCRAPED
    assert grouped_by(query) <= known


def test_the_contract_is_kept() -> None:
    names = set(exposition()) | {name.removesuffix("_count") for name in exposition() if name.endswith("_count")}
    assert set(CONTRACT) <= names
    assert exposition()["everserve_workers"] == {"role", "state"}
    assert exposition()["everserve_failovers_total"] == {"role", "cause"}
    assert {"model_name", "engine"} <= exposition()["vllm:num_requests_running"]


def test_the_page_about_metrics_has_all_of_them_and_no_others() -> None:
    documented = set(re.findall(r"`((?:vllm:|everserve_|http_|process_)[\w:]+)`", METRICS.read_text()))
    shown = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exposition()}
    assert documented == shown


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alerts_say_what_to_do(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert ROOT / file == OPERATIONS and anchor == rule["alert"].lower()
    assert anchor in anchors(OPERATIONS)


def test_documents_lead_somewhere() -> None:
    """Links of the two pages, within and between files."""
    for page in (METRICS, OPERATIONS):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_dashboard_can_be_imported() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["schemaVersion"] >= 38 and board["uid"] and board["title"]
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24, panel["title"]
        if panel["type"] != "row":
            assert panel["targets"] and panel["datasource"]["uid"] == "${datasource}", panel["title"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    cells = [(x, y) for panel in panels() for x, y in _cells(panel["gridPos"])]
    assert len(set(cells)) == len(cells), "panels overlap"


def _cells(place: dict[str, int]) -> list[tuple[int, int]]:
    xs, ys = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
    return [(x, y) for x in xs for y in ys]


def test_spares_count_who_is_missing() -> None:
    """One expert worker of two is gone: none of the others may die."""

    async def test() -> None:
        async with toy_server() as server:
            experts = [member(rank, roles=(Role.EXPERT,), slots=4, shadow_slots=2) for rank in (1, 2)]
            for state, left in (("ready", 1), ("starting", 0)):
                epoch = server.gateway.cluster.epoch
                gone = member(2, roles=(Role.EXPERT,), slots=4, shadow_slots=2, state=state, incarnation=3)
                server.orchestrator.publish(member(0), experts[0], gone, num_survivable_deaths=left)
                await until(lambda epoch=epoch: server.gateway.cluster.epoch > epoch)
                text = (await server.request("GET", "/metrics")).body.decode()
                assert f"everserve_survivable_expert_deaths {left}.0\n" in text
                assert 'everserve_worker_restarts_total{rank="2",role="expert"} 2.0\n' in text
            assert 'everserve_expert_slots{kind="shadow",rank="2"} 0.0\n' in text

    asyncio.run(asyncio.wait_for(test(), 20))


def test_responses_are_counted_by_kind() -> None:
    async def test() -> None:
        async with toy_server(lambda spec: [50]) as server:
            await server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
            await server.post("/v1/completions", {"prompt": "a", "max_tokens": -1})
            await server.request("GET", "/nobody/serves/this")
            task, _, _ = server.begin("POST", "/v1/completions", {"prompt": "b", "max_tokens": 2})
            await until(lambda: len(server.worker.specs) == 2)
            server.worker.reject(server.worker.specs[-1].id, "broken", is_server_fault=True)
            await task
            text = (await server.request("GET", "/metrics")).body.decode()
        for labels, count in (
            ('handler="/v1/completions",method="POST",status="2xx"', 1),
            ('handler="/v1/completions",method="POST",status="4xx"', 1),
            ('handler="/v1/completions",method="POST",status="5xx"', 1),
            ('handler="none",method="GET",status="4xx"', 1),
        ):
            assert f"http_requests_total{{{labels}}} {count}.0\n" in text, labels

    asyncio.run(asyncio.wait_for(test(), 20))
