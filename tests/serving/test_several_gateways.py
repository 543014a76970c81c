"""Two gateways on one address: one of them dies, and no client of either notices."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from everserve.procs.local_server import LocalServer
from everserve.procs.process import children_of
from tests.serving.test_gateway_deaths import PROMPTS, REQUESTS, Deaths
from tests.support.cluster import get, wait_until
from tests.support.raw_client import RawClient, post

_IS_COUNTER = re.compile(r"(vllm:|everserve_|http_)\w*(_total|_count|_sum|_bucket)\b")


class TwoGateways(Deaths):
    """They are killed in turn."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__(server)
        processes = {one["name"]: one["pid"] for one in get(server, "/cluster").json()["processes"]}
        self.keepers = [processes["keeper"], processes["keeper-1"]]

    def gateway(self) -> int | None:
        """The one that is next."""
        return self.gateway_of(self.num_deaths % 2)

    def gateway_of(self, number: int) -> int | None:
        return next(iter(children_of(self.keepers[number])), None)

    def num_clients_of(self, number: int) -> int:
        """Connections that this gateway has."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        port, established = f":{self.address[1]:04X}", "01"
        inodes = {words[9] for words in lines if words[1].endswith(port) and words[3] == established}
        directory = Path(f"/proc/{self.gateway_of(number)}/fd")
        names = []
        for path in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                names.append(str(path.readlink()))
        return sum(name.startswith("socket:[") and name[8:-1] in inodes for name in names)

    def kill_now(self, number: int) -> None:
        pid = self.gateway_of(number)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def nothing_is_passed_on(self) -> Iterator[None]:
        """Between the gateways, because the supervisor is stopped. Perhaps it is replaced for that."""
        processes = get(self.server, "/cluster").json()["processes"]
        supervisor = next(one["pid"] for one in processes if one["name"] == "supervisor")
        os.kill(supervisor, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor, signal.SIGCONT)

    async def connect_to(self, number: int) -> RawClient:
        """A connection that this gateway has accepted: it has less to do than the other one."""
        idle = []
        while True:
            before = self.num_clients_of(number)
            client = await RawClient.connect(self.address, random.Random(0))
            await client.send([_get("/v1/models")])
            assert (await client.receive()).status == 200
            if self.num_clients_of(number) > before:
                for other in idle:
                    await other.close()
                return client
            idle.append(client)


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


@pytest.fixture(scope="module")
def two() -> Iterator[TwoGateways]:
    flags = ("--attention-workers", "2", "--expert-workers", "2", "--enable-chaos", "--max-model-len", "1024")
    with LocalServer("demo", *flags, "--detect-ms", "2000", "--gateways", "2") as server:
        yield TwoGateways(server)


def test_connections_are_shared_out(two: TwoGateways) -> None:
    async def test() -> None:
        clients = [await two.connect_to(number) for number in (0, 1, 0, 1)]
        assert [two.num_clients_of(number) >= 2 for number in (0, 1)] == [True, True]
        for client in clients:
            await client.close()

    asyncio.run(test())


def test_no_client_notices(two: TwoGateways) -> None:
    two.run(num_deaths=6, num_raw=10)


@pytest.mark.parametrize("dies", ["no gateway", "the one with the stream", "the one that hands over"])
def test_who_comes_back_to_the_other_gateway_gets_the_rest(two: TwoGateways, dies: str) -> None:
    """Its connection is handed to the one that has the stream, also if that is dead at that moment, or if the other one
    dies while the connection is on its way."""
    body = {**REQUESTS[0][1], "max_tokens": 900, "prompt": PROMPTS[0]}

    async def test() -> None:
        client = await two.connect_to(0)
        await client.send([post("/v1/completions", body, X_Request_Id=f"undisturbed-{dies.replace(' ', '-')}")])
        known = (await client.receive()).body
        for number in (0, 1):
            name = f"mine-{dies.replace(' ', '-')}-{number}"
            client, other = await two.connect_to(number), await two.connect_to(1 - number)
            await client.send([post("/v1/completions", body, X_Request_Id=name)])
            begun = await client.receive_events(20)
            client.abort()
            begun, last = begun[: begun.rfind(b"\n\n") + 2], begun.count(b"\n\n") - 1
            back = post("/v1/completions", body, X_Request_Id=name, Last_Event_Id=str(last))
            if dies == "the one with the stream":
                two.kill_now(number)
            if dies == "the one that hands over":
                with two.nothing_is_passed_on():
                    await other.send([back])
                    await asyncio.sleep(0.2)  # now it is marked, and sent; if it is not, this is an ordinary death
                    two.kill_now(1 - number)
                    await asyncio.to_thread(wait_until, lambda number=number: two.gateway_of(1 - number) is not None)
            else:
                await other.send([back])
            answer = await other.receive()
            assert answer.status == 200, answer.body
            assert answer.event_ids[0] == last + 1
            assert _text(begun + answer.body) == _text(known)
            await other.send([_get("/v1/models")])
            assert (await other.receive()).status == 200, "the connection goes on"
            await other.close()

    asyncio.run(test())


def test_what_is_stored_and_shown_is_the_same_wherever_a_client_asks(two: TwoGateways) -> None:
    async def test() -> None:
        asked: list[Any] = []
        for number in (0, 1):
            client = await two.connect_to(number)
            await client.send([post("/v1/responses", {"model": "demo", "input": "x", "max_output_tokens": 2})])
            asked.append(json.loads((await client.receive()).body)["id"])
            for path in ("/metrics", "/load", "/cluster", f"/v1/responses/{asked[0]}"):
                await client.send([_get(path)])
                assert (await client.receive()).status == 200, path
            await client.close()

    asyncio.run(test())


def test_metrics_are_of_both_and_outlive_them(two: TwoGateways) -> None:
    def counted() -> dict[str, float]:
        lines = httpx.get(f"{two.server.url}/metrics", timeout=60).text.splitlines()
        samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in samples if _IS_COUNTER.match(name)}

    def num_tokens(metrics: dict[str, float]) -> float:
        return sum(value for name, value in metrics.items() if name.startswith("vllm:generation_tokens_total"))

    async def ask(number: int) -> None:
        client = await two.connect_to(number)
        await client.send([post(*REQUESTS[0])])
        assert (await client.receive()).status == 200
        await client.close()

    before = num_tokens(counted())
    asyncio.run(ask(0))
    asyncio.run(ask(1))
    wait_until(lambda: num_tokens(counted()) == before + 300, timeout_s=60)  # the other one says it every 0.25 s
    for number in (0, 1):
        shown, pid = counted(), two.gateway_of(number)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda number=number, pid=pid: two.gateway_of(number) not in (pid, None), timeout_s=60)
        now = counted()
        assert {name for name, value in shown.items() if now.get(name, 0.0) < value} == set()


def test_an_operator_may_kill_either(two: TwoGateways) -> None:
    before = two.gateway_of(1)
    answer = httpx.post(f"{two.server.url}/cluster/fault", json={"process": "gateway-1", "signal": "KILL"}, timeout=60)
    assert answer.status_code == 200 and answer.json()["pid"] == before
    wait_until(lambda: two.gateway_of(1) not in (before, None), timeout_s=60)
    answer = httpx.post(f"{two.server.url}/cluster/fault", json={"process": "gateway-2", "signal": "KILL"}, timeout=60)
    assert answer.status_code == 404


def _text(events: bytes) -> str:
    parts = [part.rpartition(b"data: ")[2] for part in events.split(b"\n\n")[:-1]]
    return "".join(json.loads(part)["choices"][0]["text"] for part in parts if part != b"[DONE]")
