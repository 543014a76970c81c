"""/cluster/live and the dashboard's files, without a browser."""

import asyncio
import json
import tomllib
from pathlib import Path
from typing import Any

from everserve.gateway.api.pages import read_files
from everserve.gateway.observe.live import NUM_TICKS
from everserve.wire.events import ProcessEnded
from tests.support.gateway_toy import Response, ToyServer, toy_server, until
from tests.unit.gateway.test_app import run


def news(answer: Response) -> list[dict[str, Any]]:
    events = [event.split("\n") for event in answer.body.decode().split("\n\n")[:-1]]
    assert all(lines[0] == "event: news" and len(lines) == 2 for lines in events)
    return [json.loads(lines[1].removeprefix("data: ")) for lines in events]


async def first_news(server: ToyServer, path: str = "/cluster/live") -> dict[str, Any]:
    task, answer, gone = server.begin("GET", path)
    await until(lambda: answer.body.endswith(b"\n\n"))
    gone.set()
    await asyncio.wait_for(task, 5)
    return news(answer)[0]


def test_everything_first_and_then_what_changes() -> None:
    async def test() -> None:
        async with toy_server(enable_chaos=True) as server:
            live = server.gateway.live
            for number in range(3):
                live.tick(1000.0 + number)
            task, answer, gone = server.begin("GET", "/cluster/live")
            await until(lambda: answer.body.endswith(b"\n\n"))
            live.tick(1003.0)
            await until(lambda: len(news(answer)) == 2)
            server.gateway.feed.publish(ProcessEnded(process="supervisor", child="anchor", exit_status=-9))
            live.tick(1004.0)
            await until(lambda: len(news(answer)) == 3)
            first, second, third = news(answer)
            assert first["hello"]["models"] == ["toy", "alias"] and first["hello"]["enable_chaos"]
            assert [tick["n"] for tick in first["ticks"]] == [0, 1, 2] and first["cluster"]["epoch"] == 1
            assert [tick["n"] for tick in second["ticks"]] == [3] and set(second) == {"ticks"}, "nothing else changed"
            assert [entry["title"] for entry in third["entries"]] == ["the anchor died (SIGKILL)"]
            gone.set()
            await asyncio.wait_for(task, 5)
            assert live._readers == set()

    run(test)


def test_a_reader_that_comes_back_catches_up() -> None:
    async def test() -> None:
        async with toy_server() as server:
            live = server.gateway.live
            for number in range(10):
                live.tick(1000.0 + number)
            cases = {"6": [7, 8, 9], "9": [], "4711": list(range(10)), "x": list(range(10)), "": list(range(10))}
            for since, expected in cases.items():
                first = await first_news(server, f"/cluster/live?since={since}")
                assert [tick["n"] for tick in first["ticks"]] == expected

    run(test)


def test_a_slow_reader_costs_nothing() -> None:
    """It gets what is still there, in one piece, when it reads again."""

    async def test() -> None:
        async with toy_server() as server:
            live = server.gateway.live
            reader = live.open_reader(None)
            assert await reader.take() is not None
            for number in range(NUM_TICKS + 500):
                live.tick(1000.0 + number)
            data = await reader.take()
            assert data is not None
            ticks = json.loads(data.split(b"data: ")[1])["ticks"]
            assert len(ticks) == NUM_TICKS and ticks[-1]["n"] == NUM_TICKS + 499 and len(live.ticks) == NUM_TICKS
            live.close()
            assert await reader.take() is None

    run(test)


def test_ticks_come_by_themselves() -> None:
    async def test() -> None:
        async with toy_server() as server:
            live = server.gateway.live
            ticking = asyncio.ensure_future(live.run())
            await until(lambda: len(live.ticks) >= 2)
            ticking.cancel()
            first, second = list(live.ticks)[:2]
            assert (first.n, second.n) == (0, 1) and second.unix_s > first.unix_s

    run(test)


def test_who_watches_needs_the_key_but_the_page_has_none() -> None:
    async def test() -> None:
        async with toy_server(api_keys=["k"]) as server:
            assert (await server.request("GET", "/cluster/live")).status == 401
            page = await server.request("GET", "/")
            assert page.status == 200 and b"<title>Everserve</title>" in page.body

    run(test)


def test_the_page_may_load_from_here_only() -> None:
    async def test() -> None:
        async with toy_server() as server:
            page = await server.request("GET", "/")
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            for text in (b"http://", b"https://", b"style=", b"onclick", b"<style"):
                assert text not in page.body
            again = await server.request("GET", "/", headers={"If-None-Match": page.headers["etag"]})
            assert again.status == 304 and again.body == b""
            script = await server.request("GET", "/dashboard/main.js")
            assert script.headers["content-type"] == "text/javascript; charset=utf-8"
            for path in ("/dashboard/", "/dashboard/../pages.py", "/dashboard/vendor/uPlot.LICENSE", "/dashboard/x.js"):
                assert (await server.request("GET", path)).status == 404
            assert (await server.request("HEAD", "/")).status == 200

    run(test)


def test_the_files_are_in_the_package() -> None:
    names = set(read_files())
    assert {"index.html", "main.js", "style.css", "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css"} <= names


def test_the_files_are_named_for_the_wheel() -> None:
    root = Path(__file__).parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["everserve"]
    package = root / "src" / "everserve"
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert {path for path in (package / "gateway" / "dashboard").rglob("*") if path.is_file()} <= packed


def test_what_happened_is_part_of_the_cluster() -> None:
    async def test() -> None:
        async with toy_server() as server:
            server.gateway.feed.publish(ProcessEnded(process="supervisor", child="zygote", exit_status=1))
            cluster = (await server.request("GET", "/cluster")).json
            assert cluster["recent"] == ["the zygote ended (1)"] and cluster["experts_without_place"] == 0

    run(test)
