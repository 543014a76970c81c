"""A real Chromium, and real clusters for it to look at."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserType, ConsoleMessage, Page, Request, sync_playwright

from everserve.procs.local_server import LocalServer
from tests.support.cluster import PATIENT

CLUSTER = ("--attention-workers", "2", "--expert-workers", "2", "--enable-chaos", *PATIENT)
NO_BROWSER = "no Chromium was found: `apt-get install chromium`, or `python -m playwright install chromium`"


def find_browser(chromium: BrowserType) -> str | None:
    """The system's Chromium, or the one that Playwright has installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = [os.environ.get("CHROMIUM"), *map(shutil.which, names), chromium.executable_path]
    return next((path for path in found if path and Path(path).exists()), None)


def launch(chromium: BrowserType, *flags: str) -> Browser:
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    return chromium.launch(executable_path=find_browser(chromium), args=[*sandbox, *flags])


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """For this folder only: while Playwright runs, no other test could run an event loop."""
    with sync_playwright() as playwright:
        if find_browser(playwright.chromium) is None:
            pytest.skip(NO_BROWSER)
        running = launch(playwright.chromium)
        yield running
        running.close()


@pytest.fixture(scope="package")
def server(browser: Browser) -> Iterator[LocalServer]:
    """Two attention and two expert workers of the bundled model; its tests leave it whole. (It needs the browser first:
    without one nothing is started.)"""
    with LocalServer("demo", *CLUSTER) as running:
        yield running
        assert "Traceback" not in running.log_text(), running.log_text()


class Visitor:
    """Opens pages, and remembers what a page must not do."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.errors: list[str] = []
        self.urls: list[str] = []
        self.origins: set[str] = set()
        self._contexts: list[Any] = []

    def open(self, url: str, width: int = 1280, height: int = 720, before: Any = None, **options: Any) -> Page:
        context = self._browser.new_context(viewport={"width": width, "height": height}, **options)
        self._contexts.append(context)
        self.origins.add(url)
        page = context.new_page()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._on_request)
        if before is not None:
            before(page)
        page.goto(url)
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _on_request(self, request: Request) -> None:
        self.urls.append(request.url)


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    """Whatever a test does: no error on the console, and no request to anybody but the server."""
    visiting = Visitor(browser)
    yield visiting
    visiting.close()
    assert visiting.errors == []
    assert [url for url in visiting.urls if not url.startswith(tuple(visiting.origins))] == []
