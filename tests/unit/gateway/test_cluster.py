"""What operators see and do: /cluster, /health, /cluster/fault, /cluster/drain; and the channel to the orchestrator."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from everserve.tables.health import DeviceHealth, Level
from everserve.tables.ids import Epoch, Role
from everserve.tables.members import Members, Process, WorkerState
from everserve.tables.outputs import Output
from everserve.tables.survival import Kv, Survival, Weights
from everserve.tables.validity import Conditions
from everserve.wire.events import FaultDetected
from everserve.wire.messages import (
    ClusterChanged,
    EventHappened,
    ProcessesChanged,
)
from everserve.wire.operators import (
    DrainRequest,
    DrainView,
    FaultRequest,
    FaultView,
    HealthRequest,
    HealthView,
    ScaleRequest,
    ScaleView,
    SwitchRequest,
)
from tests.support.fleet_toy import engine_stats
from tests.support.gateway_toy import answer_to, member, refusal, toy_server, until

FAULT = {"rank": 0, "signal": "KILL"}
SCALE = {"attention": 2}


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


VIEW = {
    "epoch": 2,
    "violations": ["v"],
    "degraded": ["d"],
    "conditions": {"peers": [], "coverage": ["v"], "epochs": []},
    "experts_without_place": 0,
    "recent": [],
    "processes": [{"name": "gateway", "pid": 7, "host": 0}],
    "spares": {"ready": 0, "wanted": 0},
    "workers": [
        {
            **{"rank": 0, "incarnation": 1, "pid": 4242, "roles": ["attention"], "state": "ready"},
            **{"requests": 2, "running": 1, "waiting": 1, "kv_cache_usage": 0.5},
            **{"host": 0, "device": 0, "slots": 0, "shadow_slots": 0, "slow": False, "slowness": 1.1, "note": ""},
        },
        {
            **{"rank": 1, "incarnation": 3, "pid": 0, "roles": ["expert"], "state": "starting"},
            **{"requests": 0, "running": 0, "waiting": 0, "kv_cache_usage": 0.0},
            **{"host": 0, "device": 1, "slots": 8, "shadow_slots": 2, "slow": False, "slowness": None},
            **{"note": "crashed 3 times"},
        },
    ],
    "devices": [
        {"device": 0, "host": 0, "state": "serving", "level": 0, "reason": "", "note": "", "workers": [0]},
        {
            **{"device": 1, "host": 0, "state": "down", "level": 3, "reason": "a fan", "note": "is used on: …"},
            "workers": [1],
        },
    ],
    "hosts": [
        {
            "host": 0,
            "name": socket.gethostname(),
            "address": "",
            "state": "serving",
            "devices": [0, 1],
            "workers": [0, 1],
        }
    ],
    "moves": [],
    "balance": {"max_over_mean": None, "kinds": {}},
    "survives": [{"failure": "any one process", "weights": Weights.SUCCESSOR, "kv": Kv.COMPUTED}],
}


def test_cluster() -> None:
    async def test() -> None:
        async with toy_server() as server:
            expert = member(
                1,
                incarnation=3,
                pid=0,
                roles=(Role.EXPERT,),
                state=WorkerState.STARTING,
                slots=8,
                shadow_slots=2,
                note="crashed 3 times",
                device=1,
            )
            ill = DeviceHealth(device=1, level=Level.DRAIN, reason="a fan", note="is used on: …")
            tables = {"violations": ("v",), "degraded": ("d",), "health": (ill,), "num_health_troubles": 2}
            told = Survival(failure="any one process", weights=Weights.SUCCESSOR, kv=Kv.COMPUTED)
            server.orchestrator.publish(member(0, device=0), expert, **tables, slowness={0: 1.1}, survivals=(told,))
            task, _, gone = server.begin("POST", "/v1/completions", {"prompt": "a", "n": 2})
            await until(lambda: len(server.worker.specs) == 2)
            stats = engine_stats(num_running=1, num_waiting=1, kv_usage=0.5)
            server.worker.send(Output(id=server.worker.specs[0].id, index=0, token=50), stats=stats)
            await until(lambda: server.gateway.cluster.epoch == 2 and server.gateway.fleet.stats(0) == stats)
            view = (await server.request("GET", "/cluster")).json
            assert view == VIEW
            server.orchestrator.publish(member(0, incarnation=2))
            await until(lambda: server.gateway.cluster.epoch == 3)
            (worker,) = (await server.request("GET", "/cluster")).json["workers"]
            assert worker["requests"] == 0, "those are another incarnation's"
            gone.set()
            await task

    run(test)


def test_spares_are_processes_and_counted() -> None:
    async def test() -> None:
        async with toy_server() as server:
            changed = ProcessesChanged(processes=(Process(name="zygote", pid=8),), spares=(20, 21), num_spares_wanted=3)
            server.gateway.cluster.on_processes(changed)
            view = (await server.request("GET", "/cluster")).json
            assert view["spares"] == {"ready": 2, "wanted": 3}
            pids = {process["name"]: process["pid"] for process in view["processes"]}
            assert pids == {"zygote": 8, "spare-0": 20, "spare-1": 21}

    run(test)


def test_tables_of_an_older_epoch_are_dropped() -> None:
    async def test() -> None:
        async with toy_server() as server:
            cluster = server.gateway.cluster

            def change(epoch: int, violation: str) -> ClusterChanged:
                members = Members(epoch=Epoch(epoch), workers=(member(0),))
                return ClusterChanged(
                    members=members,
                    conditions=Conditions(coverage=(violation,)),
                    degraded=(),
                    num_experts_without_place=0,
                    expert_stats={},
                    num_stale=0,
                )

            for epoch, violation in ((5, "new"), (4, "old")):
                cluster.on_changed(change(epoch, violation))
            assert cluster.epoch == 5 and cluster.violations() == ("new",)
            cluster.on_changed(change(5, "the same tables, newer counters"))
            assert cluster.violations() == ("the same tables, newer counters",)

    run(test)


def test_health_is_about_running_now_and_requests_may_wait() -> None:
    async def test() -> None:
        async with toy_server() as server:

            async def health() -> tuple[int, str]:
                answers = [await server.request("GET", path) for path in ("/health", "/ping", "/readyz")]
                assert len({answer.status for answer in answers}) == 1
                assert (await server.request("GET", "/livez")).status == 200
                is_well = answers[0].status == 200
                assert is_well or "retry-after" in answers[0].headers
                return answers[0].status, "" if is_well else answers[0].error["message"]

            assert await health() == (200, "")
            server.orchestrator.publish(member(0), violations=("expert 3 of layer 1 has no place",))
            await until(lambda: server.gateway.cluster.epoch == 2)
            status, message = await health()
            assert status == 503 and "expert 3 of layer 1 has no place" in message
            assert (await server.request("GET", "/v1/models")).status == 200
            server.orchestrator.publish(member(0))
            await until(lambda: server.gateway.cluster.epoch == 3)
            assert (await health())[0] == 200
            server.worker.die()
            await until(lambda: not server.gateway.fleet.ready_links())
            status, message = await health()
            assert status == 503 and "No attention worker is ready" in message
            assert (await server.request("GET", "/v1/models")).status == 200

    run(test)


def test_before_the_first_table_nothing_is_known_to_be_well() -> None:
    async def test() -> None:
        async with toy_server() as server:
            server.gateway.cluster.members = None
            assert "no membership table" in (await server.request("GET", "/health")).error["message"]
            assert (await server.request("GET", "/cluster")).json["workers"] == []

    run(test)


def test_without_its_orchestrator_the_gateway_goes_on() -> None:
    async def test() -> None:
        async with toy_server(lambda spec: [50, 51]) as server:
            server.orchestrator.die()
            await until(lambda: server.gateway.cluster.orchestrator_is_gone)
            view = (await server.request("GET", "/cluster")).json
            assert view["violations"] == [] and len(view["workers"]) == 1
            assert len(view["degraded"]) == 1 and "the orchestrator is gone" in view["degraded"][0]
            metrics = (await server.request("GET", "/metrics")).body.decode()
            assert "everserve_degraded 1.0" in metrics and "everserve_validity_violations 0.0" in metrics
            assert (await server.request("GET", "/health")).status == 200, "every request is served"
            answer = await server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
            assert answer.status == 200
            server.worker.die()
            await until(lambda: not server.gateway.fleet.ready_links())
            assert server.gateway.fleet.totals.failovers["attention", "closed"] == 1
            assert (await server.request("GET", "/health")).status == 503, "now none is"

    run(test)


def test_a_new_orchestrator_is_told_what_we_know_and_the_old_one_is_not_heard_any_more() -> None:
    async def test() -> None:
        async with toy_server() as server:
            gateway, first = server.gateway, server.orchestrator
            assert first.report is not None and (first.report.epoch, first.report.logs) == (0, [])
            task, answer, _ = server.begin("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True})
            await until(lambda: len(server.worker.specs) == 1)
            id = server.worker.specs[0].id
            server.worker.send(Output(id=id, index=0, token=50))
            server.worker.die()
            await until(lambda: gateway.fleet.num_waiting == 1)
            assert first.settled == []
            first.publish(member(0), member(1))  # late: it is in the channel, and nobody will read it
            second = server.attach_orchestrator()
            await until(lambda: second.report is not None)
            assert second.report is not None and (second.report.epoch, second.report.logs) == (1, [(0, 1)])
            view = (await server.request("GET", "/cluster")).json
            assert "the orchestrator is gone" in view["degraded"][0] and view["epoch"] == 1
            worker = await server.add_worker(1)
            await until(lambda: len(worker.specs) == 1)
            assert worker.sources == [(0, 1)] and second.settled == []
            worker.send(Output(id=id, index=1, token=51, finish_reason="length"))
            await asyncio.wait_for(task, 5)
            assert answer.events[-1] == "[DONE]"
            await until(lambda: second.settled == [(0, 1)])
            second.publish(member(1))
            await until(lambda: gateway.cluster.degraded() == ())
            assert gateway.cluster.epoch == 2 and first.settled == []
            second.lose(worker, "crash")
            await until(lambda: gateway.fleet.ready_links() == [])
            third = server.attach_orchestrator()
            await until(lambda: third.report is not None)
            assert third.report is not None and (third.report.logs, third.report.lost) == ([], [(1, 1)])

    run(test)


def test_an_orchestrator_whose_epoch_is_behind_is_not_believed() -> None:
    async def test() -> None:
        async with toy_server() as server:
            server.orchestrator.publish(member(0), violations=("v",))
            await until(lambda: server.gateway.cluster.epoch == 2)
            second = server.attach_orchestrator()
            await until(lambda: second.report is not None)
            second._epoch = 0
            second.publish(member(0))
            second.publish(member(0))
            second.publish(member(0))
            await until(lambda: server.gateway.cluster.epoch == 3)
            assert server.gateway.cluster.violations() == ()

    run(test)


def test_before_there_is_an_orchestrator() -> None:
    async def test() -> None:
        async with toy_server(enable_chaos=True) as server:
            server.orchestrator.die()
            await until(lambda: server.gateway.cluster.orchestrator_is_gone)
            for path, body in (("/cluster/fault", FAULT), ("/cluster/drain", {"rank": 0}), ("/cluster/scale", SCALE)):
                answer = await server.post(path, body)
                assert answer.status == 503 and "orchestrator is gone" in answer.error["message"]
            server.gateway.cluster.members = None
            for path, body in (("/cluster/fault", FAULT), ("/cluster/drain", {"rank": 0})):
                answer = await server.post(path, body)
                assert answer.status == 503 and "no membership table" in answer.error["message"]

    run(test)


def test_counters_of_orchestrators_go_on_over_their_lives() -> None:
    async def test() -> None:
        async with toy_server() as server:
            server.orchestrator.publish(member(0), num_stale=5)
            await until(lambda: server.gateway.cluster.num_stale_elsewhere == 5)
            second = server.attach_orchestrator()
            await until(lambda: second.report is not None)
            for num_stale, total in ((0, 5), (2, 7)):
                second.publish(member(0), num_stale=num_stale)
                await until(lambda total=total: server.gateway.cluster.num_stale_elsewhere == total)

    run(test)


def test_events_of_others_are_shown() -> None:
    async def test() -> None:
        async with toy_server() as server:
            event = FaultDetected(
                process="orchestrator", rank=1, incarnation=1, roles=("expert",), cause="crash", reason="life word"
            )
            server.orchestrator.channel.send(EventHappened(event=event))
            task, answer, gone = server.begin("GET", "/events")
            await until(lambda: b"event: fault_detected" in answer.body)
            gone.set()
            await task

    run(test)


# -- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["KILL", "STOP", "CONT", "TERM"])
def test_a_fault_is_answered_when_it_was_injected(name: str) -> None:
    async def test() -> None:
        async with toy_server(enable_chaos=True) as server:
            server.orchestrator.answers = False
            task, answer, _ = server.begin("POST", "/cluster/fault", {"rank": 0, "signal": name})
            await until(lambda: len(server.orchestrator.asked) == 1)
            assert not task.done(), "nobody has confirmed it yet"
            (asked,) = server.orchestrator.asked
            assert asked.request == FaultRequest(rank=0, signal=name)
            view = FaultView(rank=0, incarnation=3, pid=4242, signal=name)
            server.orchestrator.channel.send(answer_to(asked, view))
            await asyncio.wait_for(task, 5)
            assert answer.status == 200
            assert answer.json == {"rank": 0, "incarnation": 3, "pid": 4242, "signal": name}

    run(test)


def test_faults_need_the_flag() -> None:
    async def test() -> None:
        async with toy_server() as server:
            answer = await server.post("/cluster/fault", FAULT)
            assert answer.status == 403 and "--enable-chaos" in answer.error["message"]
            assert server.orchestrator.asked == []

    run(test)


def test_faults_need_the_key() -> None:
    async def test() -> None:
        async with toy_server(enable_chaos=True, api_keys=["k"]) as server:
            assert (await server.post("/cluster/fault", FAULT)).status == 401
            headers = {"Authorization": "Bearer k"}
            assert (await server.request("POST", "/cluster/fault", FAULT, headers)).status == 200

    run(test)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"rank": 9, "signal": "KILL"}, 404),
        ({"rank": -1, "signal": "KILL"}, 400),
        ({"rank": "0", "signal": "KILL"}, 400),
        ({"rank": True, "signal": "KILL"}, 400),
        ({"rank": 0, "signal": "USR1"}, 400),
        ({"rank": 0, "signal": 9}, 400),
        ({"rank": 0}, 400),
        ({"signal": "KILL"}, 400),
        ({"rank": 0, "signal": "KILL", "extra": 1}, 400),
        ({"rank": 0, "process": "anchor", "signal": "KILL"}, 400),
        ({"rank": None, "process": None, "signal": "KILL"}, 400),
        ({"process": "nobody", "signal": "KILL"}, 404),
        ({"process": "root", "signal": "KILL"}, 404),
        ({"process": "", "signal": "KILL"}, 400),
        ({"process": 7, "signal": "KILL"}, 400),
        ({"process": "anchor"}, 400),
        ([], 400),
        (b"{", 400),
    ],
)
def test_faults_that_make_no_sense(body: Any, status: int) -> None:
    async def test() -> None:
        async with toy_server(enable_chaos=True) as server:
            answer = await server.request("POST", "/cluster/fault", body)
            assert answer.status == status and answer.error["message"]
            assert server.orchestrator.asked == [] and server.supervisor.asked == []

    run(test)


def test_a_fault_for_an_empty_seat() -> None:
    async def test() -> None:
        async with toy_server(enable_chaos=True) as server:
            server.orchestrator.answer = refusal("that seat is empty")
            answer = await server.post("/cluster/fault", FAULT)
            assert answer.status == 409 and "that seat is empty" in answer.error["message"]

    run(test)


def test_a_fault_without_an_orchestrator() -> None:
    async def test() -> None:
        async with toy_server(enable_chaos=True) as server:
            server.orchestrator.answers = False
            task, answer, _ = server.begin("POST", "/cluster/fault", FAULT)
            await until(lambda: len(server.orchestrator.asked) == 1)
            server.orchestrator.die()
            await asyncio.wait_for(task, 5)
            assert answer.status == 503 and "died before" in answer.error["message"]
            again = await server.post("/cluster/fault", FAULT)
            assert again.status == 503 and "orchestrator is gone" in again.error["message"]

    run(test)


@pytest.mark.parametrize("process", ["gateway", "keeper", "orchestrator", "anchor", "zygote"])
def test_processes_that_are_not_workers_get_their_signals_from_the_supervisor(process: str) -> None:
    async def test() -> None:
        async with toy_server(enable_chaos=True) as server:
            answer = await server.post("/cluster/fault", {"process": process, "signal": "STOP"})
            assert answer.status == 200 and answer.json == {"process": process, "pid": 99, "signal": "STOP"}
            (asked,) = server.supervisor.asked
            assert asked.request == FaultRequest(process=process, signal="STOP")
            server.supervisor.answer = refusal("it is being replaced")
            answer = await server.post("/cluster/fault", {"process": process, "signal": "KILL"})
            assert answer.status == 409 and "it is being replaced" in answer.error["message"]
            assert server.orchestrator.asked == []

    run(test)


def test_signals_to_processes_need_the_flag_and_a_supervisor() -> None:
    async def test() -> None:
        body = {"process": "orchestrator", "signal": "KILL"}
        async with toy_server() as server:
            assert (await server.post("/cluster/fault", body)).status == 403
        async with toy_server(enable_chaos=True) as server:
            server.gateway.supervisor = None
            assert (await server.post("/cluster/fault", body)).status == 503

    run(test)


# -- drains --------------------------------------------------------------------------------------


def test_a_drain_is_answered_when_the_worker_was_asked() -> None:
    async def test() -> None:
        async with toy_server() as server:
            server.orchestrator.answer = DrainView(rank=0, incarnation=3)
            answer = await server.post("/cluster/drain", {"rank": 0})
            assert answer.status == 202 and answer.json == {"rank": 0, "incarnation": 3}
            (asked,) = server.orchestrator.asked
            assert asked.request == DrainRequest(rank=0)
            server.orchestrator.answer = refusal("it has not started yet")
            answer = await server.post("/cluster/drain", {"rank": 0})
            assert answer.status == 409 and "it has not started yet" in answer.error["message"]

    run(test)


@pytest.mark.parametrize(
    ("body", "status"), [({"rank": 9}, 404), ({"rank": -1}, 400), ({}, 400), ({"rank": 0, "signal": "TERM"}, 400)]
)
def test_drains_that_make_no_sense(body: Any, status: int) -> None:
    async def test() -> None:
        async with toy_server() as server:
            answer = await server.post("/cluster/drain", body)
            assert answer.status == status and answer.error["message"]
            assert server.orchestrator.asked == []

    run(test)


def test_drains_need_the_key() -> None:
    async def test() -> None:
        async with toy_server(api_keys=["k"]) as server:
            assert (await server.post("/cluster/drain", {"rank": 0})).status == 401
            answer = await server.request("POST", "/cluster/drain", {"rank": 0}, {"Authorization": "Bearer k"})
            assert answer.status == 202

    run(test)


def test_a_drain_without_an_orchestrator() -> None:
    async def test() -> None:
        async with toy_server() as server:
            server.orchestrator.answers = False
            task, answer, _ = server.begin("POST", "/cluster/drain", {"rank": 0})
            await until(lambda: len(server.orchestrator.asked) == 1)
            server.attach_orchestrator()
            await asyncio.wait_for(task, 5)
            assert answer.status == 503 and "died before" in answer.error["message"]

    run(test)


# -- scaling -------------------------------------------------------------------------------------


def test_a_scale_is_answered_with_the_workers_that_there_will_be() -> None:
    async def test() -> None:
        async with toy_server() as server:
            server.orchestrator.answer = refusal("there is no room")
            answer = await server.post("/cluster/scale", {"attention": 9})
            assert answer.status == 409 and answer.error["message"] == "Not scaled: there is no room."
            server.orchestrator.answer = ScaleView(attention=2, expert=3, devices=5, added=(4,), retired=())
            answer = await server.post("/cluster/scale", {"attention": 2, "expert": 3})
            assert answer.status == 200
            assert answer.json == {"attention": 2, "expert": 3, "devices": 5, "added": [4], "retired": []}
            first, second = server.orchestrator.asked
            assert (first.request, second.request) == (ScaleRequest(attention=9), ScaleRequest(attention=2, expert=3))
            server.orchestrator.answer = ScaleView(attention=4, expert=4, devices=4, added=(), retired=())
            assert (await server.post("/cluster/scale", {"devices": 4})).json["devices"] == 4

    run(test)


def test_a_switch_is_answered_when_it_is_decided() -> None:
    async def test() -> None:
        async with toy_server() as server:
            answer = await server.post("/cluster/switch", {"rank": 1, "role": "expert"})
            assert answer.status == 200 and answer.json == {"rank": 1, "role": "expert"}
            server.orchestrator.answer = refusal("rank 1 is the last attention worker that is ready")
            answer = await server.post("/cluster/switch", {"rank": 1, "role": "expert"})
            assert answer.status == 409 and "Not switched: rank 1 is the last" in answer.error["message"]
            for body in ({"rank": 1}, {"role": "expert"}, {"rank": 64, "role": "expert"}, {"rank": 1, "role": "both"}):
                assert (await server.post("/cluster/switch", body)).status == 400
            asked = server.orchestrator.asked
            assert [one.request for one in asked] == [SwitchRequest(rank=1, role="expert")] * 2

    run(test)


def test_the_orchestrator_hears_what_attention_workers_have() -> None:
    async def test() -> None:
        async with toy_server() as server:
            await until(lambda: server.orchestrator.loads)
            ((rank, load),) = server.orchestrator.loads.items()
            assert rank == 0 and load.num_streams == load.num_used_blocks == 0 < load.num_free_blocks

    run(test)


@pytest.mark.parametrize("body", [{}, {"attention": -1}, {"devices": 2, "expert": 1}, {"expert": 65}, {"workers": 3}])
def test_scales_that_make_no_sense(body: Any) -> None:
    async def test() -> None:
        async with toy_server() as server:
            answer = await server.post("/cluster/scale", body)
            assert answer.status == 400 and answer.error["message"] and server.orchestrator.asked == []

    run(test)


# -- health --------------------------------------------------------------------------------------


def test_what_an_operator_says_of_a_device_is_answered_with_what_follows() -> None:
    async def test() -> None:
        async with toy_server() as server:
            server.orchestrator.answer = refusal("there is no device 9")
            answer = await server.post("/cluster/health", {"device": 9, "level": 3})
            assert answer.status == 409 and "there is no device 9" in answer.error["message"]
            server.orchestrator.answer = HealthView(device=1, level=3, reason="a fan", done="it is drained")
            answer = await server.post("/cluster/health", {"device": 1, "level": 3, "reason": "a fan"})
            assert answer.status == 200
            assert answer.json == {"device": 1, "level": 3, "reason": "a fan", "done": "it is drained"}
            said = server.orchestrator.asked[-1].request
            assert said == HealthRequest(device=1, level=3, reason="a fan")

    run(test)


@pytest.mark.parametrize(
    "body", [{}, {"device": 1}, {"device": 1, "level": 7}, {"device": -1, "level": 1}, {"device": 1, "level": "L3"}]
)
def test_health_that_makes_no_sense(body: Any) -> None:
    async def test() -> None:
        async with toy_server() as server:
            answer = await server.post("/cluster/health", body)
            assert answer.status == 400 and answer.error["message"] and server.orchestrator.asked == []

    run(test)


def test_to_say_health_needs_the_admin_key() -> None:
    async def test() -> None:
        async with toy_server(api_keys=["k"], admin_key="a") as server:
            body = {"device": 0, "level": 3}
            server.orchestrator.answer = refusal("there is no device 0")
            assert (await server.request("POST", "/cluster/health", body, {"Authorization": "Bearer k"})).status == 403
            assert (await server.request("POST", "/cluster/health", body, {"Authorization": "Bearer a"})).status == 409

    run(test)


def test_a_retired_worker_vanishes() -> None:
    async def test() -> None:
        async with toy_server() as server:
            second = await server.add_worker(1)
            gauge = 'vllm:num_requests_running{engine="1"'
            server.orchestrator.publish(member(0), member(1))
            await until(lambda: len(server.gateway.cluster.view().workers) == 2)
            assert gauge in server.metrics_text()
            second.give_back()
            second.die()
            server.orchestrator.lose(second, "left")
            server.orchestrator.publish(member(0))
            await until(lambda: len(server.gateway.cluster.view().workers) == 1)
            assert gauge not in server.metrics_text()

    run(test)


def test_a_worker_that_leaves_costs_its_clients_nothing() -> None:
    async def test() -> None:
        async with toy_server() as server:
            second = await server.add_worker(1)
            task, answer, _ = server.begin("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True})
            await until(lambda: len(server.worker.specs) == 1)
            id = server.worker.specs[0].id
            server.worker.send(Output(id=id, index=0, token=50))
            server.worker.give_back()
            await until(lambda: len(second.specs) == 1)
            assert list(second.specs[0].known) == [50] and second.sources == [(0, 1)]
            second.send(Output(id=id, index=1, token=51, finish_reason="length"))
            await asyncio.wait_for(task, 5)
            server.worker.die()
            server.orchestrator.lose(server.worker, "left")
            await until(lambda: server.orchestrator.settled == [(0, 1)])
            text = server.metrics_text()
            assert len(answer.events) == 3 and answer.events[-1] == "[DONE]"
        assert "everserve_streams_moved_total 1.0" in text and "everserve_requests_resumed_total 0.0" in text
        assert "left" not in text

    run(test)
