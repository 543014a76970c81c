"""What operators see and do: /cluster, /health, /cluster/fault; and the channel to the orchestrator."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from everserve.runtime.events import FaultDetected
from everserve.runtime.messages import ClusterChanged, EventHappened, FaultInjected
from everserve.tables.ids import Epoch, Incarnation, Role
from everserve.tables.members import Members, WorkerState
from everserve.tables.outputs import Output
from tests.unit.fleet_toy import engine_stats
from tests.unit.gateway_toy import ToyServer, member, toy_server, until

FAULT = {"rank": 0, "signal": "KILL"}


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


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
            )
            server.orchestrator.publish(member(0), expert, violations=("v",), degraded=("d",))
            task, _, gone = server.begin("POST", "/v1/completions", {"prompt": "a", "n": 2})
            await until(lambda: len(server.worker.specs) == 2)
            stats = engine_stats(num_running=1, num_waiting=1, kv_usage=0.5)
            server.worker.send(Output(id=server.worker.specs[0].id, index=0, token=50), stats=stats)
            await until(lambda: server.gateway.cluster.epoch == 2 and server.gateway.fleet.stats(0) == stats)
            view = (await server.request("GET", "/cluster")).json
            assert view == {
                "epoch": 2,
                "violations": ["v"],
                "degraded": ["d"],
                "processes": [{"name": "gateway", "pid": 7}],
                "workers": [
                    {
                        **{"rank": 0, "incarnation": 1, "pid": 4242, "roles": ["attention"], "state": "ready"},
                        **{"requests": 2, "running": 1, "waiting": 1, "kv_cache_usage": 0.5},
                        **{"slots": 0, "shadow_slots": 0, "note": ""},
                    },
                    {
                        **{"rank": 1, "incarnation": 3, "pid": 0, "roles": ["expert"], "state": "starting"},
                        **{"requests": 0, "running": 0, "waiting": 0, "kv_cache_usage": 0.0},
                        **{"slots": 8, "shadow_slots": 2, "note": "crashed 3 times"},
                    },
                ],
            }
            server.orchestrator.publish(member(0, incarnation=2))
            await until(lambda: server.gateway.cluster.epoch == 3)
            (worker,) = (await server.request("GET", "/cluster")).json["workers"]
            assert worker["requests"] == 0, "those are another incarnation's"
            gone.set()
            await task

    run(test)


def test_tables_of_an_older_epoch_are_dropped() -> None:
    async def test() -> None:
        async with toy_server() as server:
            cluster = server.gateway.cluster

            def change(epoch: int, violation: str) -> ClusterChanged:
                members = Members(epoch=Epoch(epoch), workers=(member(0),))
                return ClusterChanged(
                    members=members,
                    violations=(violation,),
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
                answers = [await server.request("GET", path) for path in ("/health", "/ping")]
                assert answers[0].status == answers[1].status
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
            assert view["violations"] == ["the orchestrator is gone"] and len(view["workers"]) == 1
            assert (await server.request("GET", "/health")).status == 503
            answer = await server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
            assert answer.status == 200
            server.worker.die()
            await until(lambda: not server.gateway.fleet.ready_links())
            assert server.gateway.fleet.totals.failovers["attention", "closed"] == 1

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
            assert (asked.rank, asked.signal) == (0, signal.Signals[f"SIG{name}"])
            answer_fault(server, asked.id, 4242)
            await asyncio.wait_for(task, 5)
            assert answer.status == 200
            assert answer.json == {"rank": 0, "incarnation": 3, "pid": 4242, "signal": name}

    run(test)


def answer_fault(server: ToyServer, id: str, pid: int | None) -> None:
    answer = FaultInjected(id=id, pid=pid, incarnation=Incarnation(3), reason="")
    server.orchestrator.channel.send(answer)


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
        ([], 400),
        (b"{", 400),
    ],
)
def test_faults_that_make_no_sense(body: Any, status: int) -> None:
    async def test() -> None:
        async with toy_server(enable_chaos=True) as server:
            answer = await server.request("POST", "/cluster/fault", body)
            assert answer.status == status and answer.error["message"]
            assert server.orchestrator.asked == []

    run(test)


def test_a_fault_for_an_empty_seat() -> None:
    async def test() -> None:
        async with toy_server(enable_chaos=True) as server:
            server.orchestrator.pid = None
            answer = await server.post("/cluster/fault", FAULT)
            assert answer.status == 409 and "nobody sits there" in answer.error["message"]

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
