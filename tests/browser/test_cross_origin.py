"""A page of another origin cannot change the cluster, and a name that was made to point here shows nothing of it."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page

from everserve.procs.local_server import LocalServer
from tests.browser.conftest import launch

RANK = 3  # an expert worker
ATTACK = """async ([url, body]) => {
  const tries = [
    { mode: "no-cors", body: new Blob([body]) },
    { mode: "no-cors", body },
    { mode: "no-cors", body: new Blob([body], { type: "application/json" }) },
    { mode: "cors", body, headers: { "Content-Type": "application/json" } },
  ];
  const seen = [];
  for (const options of tries) {
    for (const path of ["cluster/fault", "cluster/drain"]) {
      seen.push(await fetch(`${url}/${path}`, { method: "POST", ...options }).then((r) => r.type, (e) => e.name));
    }
  }
  return seen;
}"""
OWN = """async (body) => {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch("cluster/fault", { method: "POST", headers, body });
  return response.status;
}"""


@pytest.fixture
def other_origin() -> Iterator[str]:
    """A server of somebody else on this host: another port is another origin."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>a nice page</title>")

        def log_message(self, *arguments: object) -> None:
            pass

    running = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}/"
    running.shutdown()
    thread.join()
    running.server_close()


def workers(server: LocalServer) -> dict[int, tuple[int, str]]:
    found = httpx.get(f"{server.url}/cluster", timeout=None).json()["workers"]
    return {worker["rank"]: (worker["incarnation"], worker["state"]) for worker in found}


def signals(server: LocalServer) -> int:
    return sum(event["event"] in ("fault_injected", "worker_leaving") for event in server.events())


def until_whole(server: LocalServer) -> None:
    deadline_s = time.monotonic() + 60
    while any(state != "ready" for _, state in workers(server).values()):
        assert time.monotonic() < deadline_s, workers(server)


def test_a_page_of_another_origin_kills_no_worker_and_the_dashboard_still_can(
    browser: Browser, server: LocalServer, other_origin: str
) -> None:
    until_whole(server)
    before, num_signals = workers(server), signals(server)
    body = f'{{"rank": {RANK}, "signal": "KILL"}}'
    page = browser.new_page()
    page.goto(other_origin)
    seen: list[Any] = page.evaluate(ATTACK, [server.url, body])
    assert "opaque" in seen, "some of these requests do reach the server"
    assert workers(server) == before and signals(server) == num_signals
    page.set_content(
        f'<form method="post" enctype="text/plain" action="{server.url}/cluster/fault">'
        f"<input name='{body[:-1]}, \"x\": \"' value='\"}}'></form>"
    )
    with page.expect_navigation():
        page.evaluate("document.forms[0].submit()")
    assert "cross_origin" in page.content()
    assert workers(server) == before and signals(server) == num_signals
    page.goto(server.url)
    assert page.evaluate(OWN, body) == 200
    page.close()
    assert signals(server) == num_signals + 1
    deadline_s = time.monotonic() + 60
    while workers(server)[RANK] <= before[RANK]:  # the signal landed: another process takes the seat
        assert time.monotonic() < deadline_s
    until_whole(server)


def test_a_name_that_points_at_this_host_is_refused(browser: Browser, server: LocalServer) -> None:
    """DNS rebinding: the page's own name leads to our server, so that for the browser it is the page's own origin."""
    port = urlsplit(server.url).port
    rebound = launch(browser.browser_type, f"--host-resolver-rules=MAP evil.example 127.0.0.1:{port}")
    try:
        page: Page = rebound.new_page()
        for path in ("", "cluster", "events"):
            answer = page.goto(f"http://evil.example:{port}/{path}")
            assert answer is not None and answer.status == 403 and "host_not_allowed" in answer.text()
        before = workers(server)
        assert page.evaluate(OWN, f'{{"rank": {RANK}, "signal": "KILL"}}') == 403
        assert workers(server) == before
    finally:
        rebound.close()
