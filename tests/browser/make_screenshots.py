"""The pictures in docs/images, of a real recovery: python -m tests.browser.make_screenshots

The page is held still at the moment when a dead worker's successor is loading, which is over too soon for a camera.
"""

import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from everserve.procs.local_server import LocalServer
from tests.browser.conftest import CLUSTER, NO_BROWSER, find_browser, launch
from tests.browser.test_dashboard import STORE, ask, expect_whole, show, until, write

IMAGES = Path(__file__).parents[2] / "docs" / "images"
HOLD = """store.subscribe(() => {
  if (!store.cluster.workers.some((worker) => worker.state === "starting")) return;
  Object.defineProperty(document, "hidden", { value: true, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
})"""


def kill(page: Page, key: str) -> None:
    page.click(f'[data-key="{key}"] .kill')
    page.click("#kill >> text=SIGKILL")
    page.evaluate("document.activeElement.blur()")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with LocalServer("demo", *CLUSTER) as server, sync_playwright() as playwright:
        path = find_browser(playwright.chromium)
        assert path is not None, NO_BROWSER
        browser = launch(playwright.chromium)
        page = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme="light")
        page.goto(server.url)
        expect_whole(page)
        write(page, 8)
        time.sleep(44)
        kill(page, "w1")
        time.sleep(14)
        page.evaluate(STORE % f"({HOLD}, 0)")
        kill(page, "w2")
        until(page, STORE % 'store.cluster.workers.some((worker) => worker.state === "starting")')
        time.sleep(0.5)
        page.screenshot(path=IMAGES / "dashboard-light.png")
        page.evaluate(STORE % "(store.listeners.pop(), 0)")
        show(page, True)
        expect_whole(page)
        time.sleep(4)
        page.emulate_media(color_scheme="dark")
        time.sleep(0.5)
        page.screenshot(path=IMAGES / "dashboard-dark.png")
        page.set_viewport_size({"width": 390, "height": 844})
        time.sleep(1)
        page.screenshot(path=IMAGES / "dashboard-phone.png", full_page=True)
        print([entry["title"] for entry in ask(page, "[...store.entries.values()]")])
        browser.close()


if __name__ == "__main__":
    main()
