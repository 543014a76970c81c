"""Benches of divided instances: the servers that they start, what they make of arrival times, and their tables."""

import itertools
import json

import pytest

from everserve.config.cluster import ClusterConfig
from everserve.control.hold.design import capacity_of, first_goal
from everserve.errors import ConfigError
from everserve.plan.survival import repairable_devices
from everserve.wire.messages import StartOrchestrator
from everserve_bench import availability, divided, show
from everserve_bench.availability import Point
from everserve_bench.declined import judge, time_to_peak
from everserve_bench.resharded import Loss, counted, planned
from everserve_bench.restarted import Restarted
from everserve_bench.scenarios import decline, reshard, trace
from everserve_bench.scenarios.decline import Decline
from everserve_bench.scenarios.reshard import Reshard
from everserve_bench.scenarios.trace import Trace
from everserve_bench.subject import subject
from everserve_bench.traced import Node, mean, together, ways
from tests.support.configs import worker_settings

# -- servers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "num", "fewest"), [("bundled", 3, 2), ("small-llama", 8, 2), ("small-mixtral", 4, 3)]
)
def test_a_server_has_room_for_everything_on_the_devices_that_are_left(shape, num, fewest):
    with subject(shape, 1 if shape != "bundled" else None) as served:
        told = divided.flags(served, num, fewest, num_streams=4, longest=100, kv_log="off")
        model = divided.model_of(served)
    shadows = int(told[told.index("--shadow-experts") + 1])
    cluster = ClusterConfig(tensor_parallel_size=num, shadow_experts=shadows).resolved()
    settings = worker_settings(directory=served.model, tensor_parallel=True, divides_heads=True)
    start = StartOrchestrator(cluster=cluster, worker=settings)
    goal = first_goal(start, model)
    assert goal.placement is not None
    assert repairable_devices(goal, goal.placement, capacity_of(start, model, goal)) >= num - fewest


def test_devices_that_cannot_be():
    with subject() as served, pytest.raises(ConfigError, match="at least one is left"):
        divided.flags(served, 3, 0, num_streams=1, longest=1)


# -- one loss ------------------------------------------------------------------------------------


def test_what_planners_would_move():
    with subject("small-llama", 2) as served:
        model = divided.model_of(served)
    rows = divided.rows(model, 4, kv_tokens=1000)
    found = planned(rows, 4)
    total = sum(row.num_bytes for row in rows)
    head = 4 * (4 * 32 * 512 + 2 * 32 * 1000)  # float32: two query heads, a key and a value head; and KV
    assert {row.shard_bytes for row in rows} == {head, 3 * 4 * 512 * 192}
    assert found["keep and deal"]["reload_bytes"] == found["keep and deal"]["fewest_bytes"] == total / 4
    assert found["keep and deal"]["peer_bytes"] == 0 < found["continuous"]["peer_bytes"]
    assert found["full reload"]["reload_bytes"] == total
    assert found["continuous"]["reload_bytes"] < found["greedy"]["reload_bytes"] < total


def test_only_counters_of_what_was_moved_and_that_have_changed():
    before = {"a_bytes_total": 5.0, "everserve_tokens_restored_total": 1.0, "requests_total": 3.0}
    after = {"a_bytes_total": 5.0, "everserve_tokens_restored_total": 4.0, "requests_total": 9.0, "b_bytes_total": 7.0}
    assert counted(before, after) == {"everserve_tokens_restored_total": 3.0, "b_bytes_total": 7.0}


def make_loss(variant: str, pauses_ms: list[float], **changes) -> Loss:
    fields = {"num_devices": 4, "normal_p99_ms": 9.0, "whole_s": 1.0, "bytes_by_source": {}, "counted": {}}
    fields |= {"num_streams": 2, "num_tokens": 100, "num_missing": 0, "num_different": 0, "stolen": 0.0}
    return Loss(variant=variant, pauses_ms=pauses_ms, **(fields | changes))


def test_a_table_of_losses(tmp_path, capsys):
    parts = [make_loss("parts", [1.0, 3.0], bytes_by_source={"host": 4_000_000}), make_loss("parts", [2.0, 40.0])]
    losses = [*parts, make_loss("restart", [9000.0])]
    result = {"model": "m", "settings": {"num_streams": 2, "rounds": 2}, "link_bytes_per_s": 1e9, "planners": {}}
    result |= reshard.summarize(losses, [], ["8 devices: parts: why"], 1e9)
    assert result["cases"]["4 parts"]["cdf_ms"] == [1.0, 2.0, 3.0, 40.0]
    assert result["cases"]["4 parts"]["link_ms"] == pytest.approx(2.0), "half of the bytes of two losses"
    assert result["is_exact"] and result["num_tokens_compared"] == 300
    told = shown("reshard", result, tmp_path, capsys)
    assert "| 4 parts |" in told and "skipped: 8 devices: parts: why" in told and "every stream is exact" in told
    wrong = reshard.summarize([make_loss("parts", [1.0], num_missing=1)], [], [], 1e9)
    assert not wrong["is_exact"]


def shown(name: str, result: dict, directory, capsys) -> str:
    path = directory / f"{name}.json"
    path.write_text(json.dumps({"environment": {"command": f"everserve bench {name}"}, **result}))
    show.show([path], is_markdown=True)
    return str(capsys.readouterr().out)


def test_variants_are_refused_by_name():
    with pytest.raises(ConfigError, match="--variant magic"):
        Reshard(variants=("parts", "magic")).check()


# -- a decline -----------------------------------------------------------------------------------


def steady(begin_s: float, end_s: float, every_s: float = 0.01) -> list[float]:
    return [begin_s + i * every_s for i in range(round((end_s - begin_s) / every_s))]


def test_a_loss_in_the_middle_of_a_stream():
    """100 tokens/s, but for 0.8 s after the loss."""
    arrivals = steady(0.0, 5.0) + steady(5.8, 12.0)
    (stage,) = judge([4, 3], [arrivals], 0.0, [(5.0, 6.0)], 12.0)
    assert (stage.devices_before, stage.devices, stage.took_s) == (4, 3, 1.0)
    assert stage.pause_ms == stage.worst_ms == pytest.approx(810, abs=1)
    assert stage.tokens_per_s == pytest.approx(100, rel=0.02)
    assert stage.lost_s == pytest.approx(0.8, abs=0.05)
    assert stage.peak_s == pytest.approx(1.0, abs=0.3)


def test_a_change_that_nobody_notices():
    arrivals = steady(0.0, 10.0)
    (stage,) = judge([3, 4], [arrivals], 0.0, [(4.0, 4.5)], 10.0)
    assert stage.peak_s == 0.0 and stage.lost_s == pytest.approx(0.0, abs=0.05) and stage.worst_ms < 20
    assert time_to_peak([steady(0.0, 4.0)], 4.0, 8.0, stays=100.0) == 4.0, "it never gets there"


def test_sizes_of_a_decline_and_when_it_is_settled():
    settings = Decline(num_devices=5, fewest=2)
    assert settings.sizes == [5, 4, 3, 2, 3, 4, 5]
    devices = [{"device": 0, "state": "serving", "workers": [0, 2]}, {"device": 1, "state": "gone", "workers": [1, 3]}]
    workers = [{"rank": rank, "state": "ready" if rank in (0, 2) else "gone"} for rank in range(4)]
    view = {"devices": devices, "workers": workers, "violations": [], "moves": [], "conditions": {"epochs": []}}
    assert divided.is_settled(view, 1) and not divided.is_settled(view, 2)
    assert not divided.is_settled({**view, "moves": [{}]}, 1)
    assert not divided.is_settled({**view, "workers": [{"rank": 0, "state": "starting"}]}, 1)


def test_a_table_of_a_decline(tmp_path, capsys):
    stages = judge([3, 2, 3], [steady(0.0, 9.0)], 0.0, [(2.0, 3.0), (5.0, 6.0)], 9.0)
    result = {"model": "m", "settings": {"num_streams": 1, "num_devices": 3, "fewest": 2}, "num_wrong": 0, "errors": []}
    result |= {"series": {"tokens_per_s": [100.0] * 9}, "num_streams": 1, "num_tokens": 900}
    result |= decline.summarize(stages, [Restarted(2, 7.5, 90.0, 100, 0)])
    assert result["lost_by_restarts_s"] == 7.5 and Decline.is_passed(result)
    told = shown("decline", result, tmp_path, capsys)
    assert "| 3 -> 2 |" in told and "| 7.50 |" in told and "by as many restarts: 7.50 s" in told


# -- a trace -------------------------------------------------------------------------------------


def test_nodes_of_the_trace_have_as_many_devices_as_it_says():
    read = availability.read()
    histories = availability.nodes(read, 8, seed=1)
    assert len(histories) == 8 and read[0] == (0.0, 55)
    for at_s, number in read[::10]:
        there = [next(p for p in reversed(points) if p.at_s <= at_s).devices for points in histories]
        assert sum(map(len, there)) == number
    for points in histories:
        assert all(a.devices != b.devices for a, b in itertools.pairwise(points)), "changes only"
    assert availability.nodes(read, 8, seed=1) == histories != availability.nodes(read, 8, seed=2)


def test_time_is_compressed():
    points = [Point(0.0, frozenset({0, 1})), Point(100.0, frozenset({0})), Point(101.0, frozenset({1})),
              Point(500.0, frozenset({0, 1, 2}))]  # fmt: skip
    found = availability.compress(points, 1000.0, 10.0, 3)
    assert [(round(p.at_s, 2), sorted(p.devices)) for p in found] == [
        *((0.0, [0, 1, 2]), (0.25, [0, 1])),
        *((1.0, [1]), (5.0, [0, 1, 2])),
    ]
    held = availability.held_up(found, 2)
    assert [sorted(p.devices) for p in held] == [[0, 1, 2], [0, 1], [0, 1], [0, 1, 2]]


def test_ways_to_serve_a_trace():
    """Four devices, of which three are left for half of the time, and one at the end."""
    points = [Point(0.0, frozenset(range(4))), Point(4.0, frozenset(range(3))), Point(8.0, frozenset({0}))]
    degrees = {4: Restarted(4, 2.0, 100.0, 1, 0), 3: Restarted(3, 2.0, 80.0, 1, 0), 2: Restarted(2, 1.0, 60.0, 1, 0)}
    found = ways(points, [90.0] * 10, 100.0, 4, 2, degrees, width_s=1.0)
    assert found.measured == [90.0] * 8 + [0.0] * 2, "one device cannot serve"
    assert found.fault_scaled == [100.0] * 4 + [75.0] * 4 + [0.0] * 2
    assert found.powers_of_two == [100.0] * 4 + [60.0] * 4 + [0.0] * 2
    assert found.restarts == [100.0] * 4 + [0.0] * 2 + [80.0] * 2 + [0.0] * 2
    both = together([found, found])
    assert mean(both.measured) == 144.0 and both.fault_free == [200.0] * 10


def test_a_table_of_a_trace(tmp_path, capsys):
    settings = Trace(num_devices=4, num_nodes=2, seconds=10.0)
    node = Node([Point(0.0, frozenset(range(4)))], 0.0, [90.0] * 10, 3, 55.0, 5, 500, 0, [])
    found = trace.Found(fault_free=[100.0, 100.0], nodes=[node, node], degrees=[Restarted(4, 2.0, 99.0, 1, 0)])
    result = {"model": "m", "settings": settings.told(), "compressed": 9726.6, "is_on_gpu": False}
    result |= trace.summarize(settings, found)
    assert result["of_fault_scaled"] == pytest.approx(0.9) and Trace.is_passed(result)
    told = shown("trace", result, tmp_path, capsys)
    assert "| measured | 180 | 90% |" in told and "2 nodes are emulated" in told and "27 hours" in told
    assert "6 losses and returns" in told and "all exact" in told
