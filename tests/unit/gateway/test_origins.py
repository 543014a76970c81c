"""What may change the cluster, and by which names and from which pages the server may be asked."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.gateway_toy import Response, ToyServer, toy_server

CHANGES = (("/cluster/fault", {"rank": 0, "signal": "KILL"}, 200), ("/cluster/drain", {"rank": 0}, 202))
API, ADMIN, WRONG = ({"Authorization": f"Bearer {key}"} for key in ("client", "operator", "neither"))
HOST = {"Host": "127.0.0.1:8000"}


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


async def change(server: ToyServer, headers: dict[str, Any]) -> set[int]:
    """Ask for each change of the cluster; 200 stands for those that were done."""
    server.orchestrator.asked.clear()
    answers = [(done, await server.request("POST", path, body, headers)) for path, body, done in CHANGES]
    num_done = sum(answer.status == done for done, answer in answers)
    assert len(server.orchestrator.asked) == num_done, "what is refused does not reach the orchestrator"
    for done, answer in answers:
        assert answer.status == done or answer.error["message"]
    return {200 if answer.status == done else answer.status for done, answer in answers}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"none": 200, "api": 200, "admin": 200, "wrong": 200}),
        ({"api_keys": ["client"]}, {"none": 401, "api": 200, "admin": 401, "wrong": 401}),
        ({"admin_key": "operator"}, {"none": 401, "api": 401, "admin": 200, "wrong": 401}),
        ({"admin_key": "operator", "api_keys": ["client"]}, {"none": 401, "api": 403, "admin": 200, "wrong": 401}),
        ({"listen_host": "0.0.0.0"}, {"none": 403, "api": 403, "admin": 403, "wrong": 403}),
        ({"listen_host": "10.1.2.3", "api_keys": ["client"]}, {"none": 401, "api": 403, "admin": 401, "wrong": 401}),
        ({"listen_host": "::", "admin_key": "operator"}, {"none": 401, "api": 401, "admin": 200, "wrong": 401}),
        ({"listen_host": "::1"}, {"none": 200, "api": 200, "admin": 200, "wrong": 200}),
    ],
)
def test_who_may_change_the_cluster(settings: dict[str, Any], expected: dict[str, int]) -> None:
    async def test() -> None:
        async with toy_server(enable_chaos=True, **settings) as server:
            keys = {"none": {}, "api": API, "admin": ADMIN, "wrong": WRONG}
            found = {name: await change(server, headers) for name, headers in keys.items()}
            assert found == {name: {status} for name, status in expected.items()}
            if settings.get("listen_host") == "0.0.0.0":
                refused = await server.post("/cluster/drain", {"rank": 0})
                assert "--admin-key" in refused.error["message"] and "EVERSERVE_ADMIN_KEY" in refused.error["message"]

    run(test)


def test_the_admin_key_opens_what_an_api_key_opens_and_clients_need_none_if_it_is_the_only_one() -> None:
    async def test() -> None:
        async with toy_server(admin_key="operator", api_keys=["client"]) as server:
            for path in ("/cluster", "/v1/models", "/load"):
                assert (await server.request("GET", path)).status == 401
                for key in (API, ADMIN):
                    assert (await server.request("GET", path, headers=key)).status == 200
        async with toy_server(admin_key="operator") as server:
            for headers in ({}, WRONG, ADMIN):
                assert (await server.request("GET", "/v1/models", headers=headers)).status == 200

    run(test)


@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ({}, True),  # not a browser
        ({"Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}, True),  # the dashboard
        ({"Origin": "https://127.0.0.1:8000"}, True),  # behind a proxy that ends TLS
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Origin": "http://127.0.0.1:9000"}, False),
        ({"Origin": "http://127.0.0.1:9000", "Sec-Fetch-Site": "same-site"}, False),
        ({"Origin": "http://localhost:8000", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": "https://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://[bad"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
    ],
)
def test_pages_of_other_origins_do_not_change_the_cluster(headers: dict[str, str], is_allowed: bool) -> None:
    async def test() -> None:
        for settings, key in (({}, {}), ({"admin_key": "operator"}, ADMIN)):
            async with toy_server(enable_chaos=True, **settings) as server:
                assert await change(server, {**HOST, **key, **headers}) == {200 if is_allowed else 403}

    run(test)


def test_bodies_must_be_declared_as_json() -> None:
    """What a page of another origin can send without asking is not read: no type, or one that forms have."""

    async def test() -> None:
        async with toy_server(lambda spec: [40], enable_chaos=True) as server:
            for kind in (
                None,
                "",
                "text/plain",
                "text/plain;charset=UTF-8",
                "application/x-www-form-urlencoded",
                "jsonp",
            ):
                assert await change(server, {"content-type": kind}) == {400}
                for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                    for resume in ({}, {"X-Request-Id": "a", "Last-Event-ID": "0"}):
                        answer = await server.request("POST", path, {}, {"content-type": kind, **resume})
                        assert answer.status == 400 and "application/json" in answer.error["message"]
            assert await change(server, {"content-type": "application/json; charset=utf-8"}) == {200}

    run(test)


PAGE = "https://page.example"


async def from_page(server: ToyServer, method: str, path: str, origin: str = PAGE, **headers: str) -> Response:
    body = {"prompt": "a", "max_tokens": 1} if method == "POST" else None
    return await server.request(method, path, body, {"origin": origin, "sec-fetch-site": "cross-site", **headers})


def test_pages_of_allowed_origins() -> None:
    """They may ask and read the answers, errors too; administration stays refused."""

    async def test() -> None:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-any"}
        async with toy_server(lambda spec: [40], enable_chaos=True, allowed_origins=[PAGE]) as server:
            preflight = await from_page(server, "OPTIONS", "/v1/completions", **asks)
            assert preflight.status == 200 and preflight.headers["access-control-allow-origin"] == PAGE
            assert "x-any" in preflight.headers["access-control-allow-headers"]
            for path, status in (("/v1/completions", 200), ("/nowhere", 404)):
                answer = await from_page(server, "POST", path)
                assert answer.status == status and answer.headers["access-control-allow-origin"] == PAGE
            assert (await from_page(server, "GET", "/v1/files")).status != 403
            assert (await from_page(server, "POST", "/cluster/drain")).status == 403
            other = await from_page(server, "OPTIONS", "/v1/completions", "https://other.example", **asks)
            assert other.status == 400 and "access-control-allow-origin" not in other.headers
            assert (await from_page(server, "GET", "/v1/files", "https://other.example")).status == 403
        async with toy_server(lambda spec: [40], allowed_origins=["*"], allowed_headers=["x-one"]) as server:
            assert (await from_page(server, "POST", "/v1/completions")).headers["access-control-allow-origin"] == "*"
            assert (await from_page(server, "OPTIONS", "/v1/completions", **asks)).status == 400
        async with toy_server(lambda spec: [40]) as server:
            assert (await from_page(server, "OPTIONS", "/v1/completions", **asks)).status == 405
            assert "access-control-allow-origin" not in (await from_page(server, "POST", "/v1/completions")).headers

    run(test)


async def ask_for(server: ToyServer, *hosts: str, path: str = "/version") -> Response:
    """As HTTP/1.1 with these Host headers, on a connection to 10.1.2.3."""
    task, answer, _ = server.begin("GET", path, hosts=hosts, scope={"http_version": "1.1", "server": ("10.1.2.3", 80)})
    await task
    return answer


def test_hosts() -> None:
    async def test() -> None:
        own = ["localhost", "localhost:8000", "LocalHost.", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "127.0.0.9"]
        async with toy_server(listen_host="0.0.0.0", allowed_hosts=["My.Name", "other:80"]) as server:
            for host in (*own, "0.0.0.0:8000", "10.1.2.3:8000", "my.name", "MY.NAME:8000", "other", "other:81"):
                assert (await ask_for(server, host)).status == 200, host
            for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "*",
                         "not.my.name", "10.1.2.4", "", "[", "::ffff:1.2.3.4"):  # fmt: skip
                for path in ("/version", "/", "/nowhere", "/cluster"):
                    answer = await ask_for(server, host, path=path)
                    assert answer.status == 403 and "--allowed-hosts" in answer.error["message"], host
                    assert answer.headers["x-request-id"]
            assert (await ask_for(server)).status == 400
            assert (await ask_for(server, "localhost", "evil.example")).status == 400
        async with toy_server(allowed_hosts=["*"]) as server:
            assert (await ask_for(server, "evil.example")).status == 200

    run(test)


def test_the_dashboard_offers_what_can_be_done() -> None:
    async def test() -> None:
        for settings, offers in (
            ({}, True),
            ({"listen_host": "::"}, False),
            ({"listen_host": "::", "admin_key": "k"}, True),
        ):
            async with toy_server(enable_chaos=True, **settings) as server:
                assert server.gateway.live.hello.enable_chaos == offers

    run(test)
