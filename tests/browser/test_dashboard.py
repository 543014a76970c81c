"""The dashboard in Chromium, looking at a real cluster: a fault and its recovery are seen."""

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from everserve.procs.local_server import LocalServer
from everserve.procs.process import parent_of
from tests.browser.conftest import Visitor
from tests.support.cluster import cluster, wait_until, wait_whole, worker

TIMEOUT_MS = 60_000
STORE = "import('/dashboard/main.js').then(({ store, chart }) => %s)"


def ask(page: Page, what: str) -> Any:
    """Something that the page's own modules know."""
    return page.evaluate(STORE % what)


def until(page: Page, condition: str) -> None:
    """As `wait_for_function`, which the page's policy does not allow: it evaluates text."""
    deadline_s = time.monotonic() + TIMEOUT_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline_s, condition
        page.wait_for_timeout(50)


def write(page: Page, num_streams: int = 4) -> None:
    """Let the page keep streams running."""
    page.select_option("#try-streams", str(num_streams))
    page.check("#try-again")
    page.click("#try-send")
    until(page, "document.querySelector('#try-text').textContent.length > 120")


def entry(page: Page, title: str) -> Any:
    return page.locator("#entries li", has_text=title).first


def expect_whole(page: Page) -> None:
    expect(page.locator("#verdict")).to_have_attribute("data-state", "ready", timeout=TIMEOUT_MS)
    expect(page.locator("#verdict-word")).to_have_text("Whole")


def test_a_kill_and_the_recovery(server: LocalServer, visitor: Visitor) -> None:
    """An expert worker is killed with the mouse while four streams are written."""
    page = visitor.open(server.url)
    expect_whole(page)
    write(page)
    expect(page.locator('[data-key="gateway"] .kill')).not_to_be_visible()  # it cannot be killed from here
    before = worker(server, 3)
    page.click('[data-key="w3"] .kill')
    expect(page.locator("#kill-title")).to_have_text("Kill expert 3?")
    page.click("#kill >> text=SIGKILL")
    died = entry(page, "Expert worker 3 died (SIGKILL)")
    # On a machine that is busy enough the other one is suspected for a moment too; then the page tells that.
    moved = r"32 experts per layer moved to their shadows|waited [\d.]+ m?s for experts without a place"
    expect(died).to_contain_text(re.compile(moved), timeout=TIMEOUT_MS)
    expect(died).to_contain_text("0 tokens lost", timeout=TIMEOUT_MS)
    expect(died).to_contain_text(re.compile(r"longest pause [\d.]+ m?s"))
    expect(died).to_contain_text(re.compile(r"replaced after [\d.]+ s"), timeout=TIMEOUT_MS)
    expect(died).to_have_attribute("data-shape", "healed")
    assert before["pid"] != worker(server, 3)["pid"], "the fault has landed"
    expect(page.locator('[data-key="w3"]')).to_contain_text(f"incarnation {before['incarnation'] + 1}")
    expect_whole(page)
    expect(page.locator("#last")).to_contain_text("expert worker 3 died (SIGKILL)")
    expect(page.locator("#try-text .error")).to_have_count(0)
    mark = ask(page, "[...store.entries.values()].filter(e => e.kind == 'fault').at(-1)")
    assert mark["ended_unix_s"] > mark["unix_s"] and mark["pause_ms"] > 0
    wait_until(lambda: min(count_pixels(page, "--bad", "--ok")) > 30, what="a mark of the fault and of the recovery")
    num_tokens = ask(page, "store.column('rate').slice(-8).reduce((a, b) => a + b)")
    assert num_tokens > 0, "and the streams go on"


def count_pixels(page: Page, *colors: str) -> list[int]:
    """How many pixels of the upper plot have exactly these colours."""
    script = """([canvas, colors]) => {
      const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(canvas, 0, 0);
      const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
      return colors.map((color) => {
        const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
        let found = 0;
        for (let i = 0; i < data.length; i += 4) found += data[i] === r && data[i + 1] === g && data[i + 2] === b;
        return found;
      });
    }"""
    wanted = [ask(page, f"chart.colors['{color}']") for color in colors]
    counts: list[int] = page.evaluate(script, [page.query_selector("#plot-rate canvas"), wanted])
    return counts


def test_a_kill_with_the_keyboard(server: LocalServer, visitor: Visitor) -> None:
    """An attention worker, whose streams go on elsewhere."""
    page = visitor.open(server.url)
    expect_whole(page)
    reach(page, on_kill_button(0))
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.locator("#kill")).not_to_be_visible()
    assert page.evaluate(on_kill_button(0)), "the focus is where it was"
    assert ask(page, "[...store.entries.values()].filter(e => e.is_open && e.kind == 'fault').length") == 0, (
        "nothing happened"
    )
    page.evaluate("document.querySelector('#try-form').requestSubmit()")  # one text, which stays when it is complete
    until(page, "document.querySelector('#try-text').textContent.length > 120")
    rank = next(one["rank"] for one in cluster(server)["workers"] if one["requests"])
    reach(page, on_kill_button(rank))
    page.keyboard.press("Enter")
    expect(page.locator("#kill")).to_be_visible()
    page.keyboard.press("Enter")
    died = entry(page, f"Attention worker {rank} died (SIGKILL)")
    expect(died).to_contain_text(f"moved to worker {1 - rank}", timeout=TIMEOUT_MS)
    expect(died).to_contain_text("0 tokens lost", timeout=TIMEOUT_MS)
    expect(died).to_contain_text("replaced after", timeout=TIMEOUT_MS)
    expect(page.locator("#announce")).to_contain_text(f"attention worker {rank} died")
    expect(page.locator("#try-text mark").first).to_have_text(f"attention worker {rank} died")
    expect_whole(page)
    wait_whole(server)


def on_kill_button(rank: int) -> str:
    return f"document.activeElement.matches('[data-key=\"w{rank}\"] .kill')"


def reach(page: Page, is_there: str, most: int = 60) -> None:
    """Press Tab until the focus is there."""
    for _ in range(most):
        if page.evaluate(is_there):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the keyboard does not get there: {is_there}")


def test_everything_can_be_reached_with_the_keyboard(server: LocalServer, visitor: Visitor) -> None:
    """In the order of the page, and each with a visible focus."""
    page = visitor.open(server.url)
    expect_whole(page)
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", seen[-1]
        if seen[-1] == "try-send":
            break
    wanted = ["Cluster map", "theme", "1 min", "plots", "Kill", "entries", "try-text", "try-prompt", "try-send"]
    positions = [seen.index(name) for name in wanted]
    assert positions == sorted(positions) and seen.count("Kill") == 7  # all processes but the gateway
    page.focus("#plots")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert ask(page, "chart.hovered < store.column('time').length - 1")
    page.keyboard.press("Escape")
    assert ask(page, "chart.hovered === null")


def test_the_heat_map_of_experts(server: LocalServer, visitor: Visitor) -> None:
    """Load is seen, on one screen; the map of workers comes back."""
    page = visitor.open(server.url)
    expect_whole(page)
    write(page)
    page.click("#map-choice >> text=Experts")
    expect(page.locator("#graph")).not_to_be_visible()
    expect(page.locator("#heat-words")).to_contain_text(
        re.compile(r"[\d.]+ × the mean; busiest expert \d+"), timeout=TIMEOUT_MS
    )
    expect(page.locator("#heat-canvas")).to_have_attribute("aria-label", re.compile("Load of 64 experts in 6 layers"))
    wait_until(lambda: page.evaluate(HOT_PIXELS) > 20, what="a busy expert in its colour")
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    box = page.locator("#heat-canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.999, box["y"] + 1)
    expect(page.locator("#heat-canvas")).to_have_attribute(
        "title", re.compile(r"layer 0, expert 63: \d+ rows/s, 2 places")
    )
    page.click("#map-choice >> text=Workers")
    expect(page.locator("#heat")).not_to_be_visible()
    expect(page.locator('[data-key="w3"]')).to_be_visible()


HOT_PIXELS = """(() => {
  const canvas = document.querySelector("#heat-canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let i = 0; i < data.length; i += 4) found += data[i] - data[i + 2] > 90;
  return found;
})()"""


def test_one_screen(server: LocalServer, visitor: Visitor) -> None:
    page = visitor.open(server.url)
    expect_whole(page)
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    for name in ("header", ".charts", ".cluster", ".events", ".try", '[data-key="w3"]', '[data-key="zygote"]'):
        box = page.locator(name).bounding_box()
        assert box and box["y"] >= 0 and box["y"] + box["height"] <= 720 and box["x"] + box["width"] <= 1280, name


def test_a_phone(server: LocalServer, visitor: Visitor) -> None:
    page = visitor.open(server.url, 390, 844, has_touch=True, is_mobile=True, device_scale_factor=2)
    expect_whole(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for name in (".charts", ".cluster", ".events", ".try"):
        box = page.locator(name).bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= 390
    buttons = page.locator("main button:visible")
    heights = [buttons.nth(i).bounding_box()["height"] for i in range(buttons.count())]  # type: ignore[index]
    assert min(heights) >= 32, "thumbs are not cursors"


CONTRAST = """(selectors) => {
  const parse = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255);
  const light = (rgb) => rgb.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const luminance = (color) => light(parse(color)).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const { backgroundColor } = getComputedStyle(e);
      if (!/, 0\\)$/.test(backgroundColor)) return backgroundColor;
    }
  };
  return selectors.map((selector) => {
    const element = document.querySelector(selector);
    const [a, b] = [luminance(getComputedStyle(element).color), luminance(behind(element))].sort((x, y) => y - x);
    return [selector, (a + 0.05) / (b + 0.05)];
  });
}"""
TEXTS = ["#verdict-word", "#verdict-why", "#last", "#fig-rate", "dt", ".legend li", ".meta", ".state", ".kv", ".kill"]
TEXTS += [".words", "#entries b", "#entries time", "#try-send", ".segments button", "#validity", "#theme", ".try label"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(server: LocalServer, visitor: Visitor, scheme: Any) -> None:
    page = visitor.open(server.url, color_scheme=scheme)
    expect_whole(page)
    for selector, ratio in page.evaluate(CONTRAST, TEXTS):
        assert ratio >= 4.5, (scheme, selector, ratio)


def test_light_and_dark(server: LocalServer, visitor: Visitor) -> None:
    """As the system has it, unless something else is chosen; what is chosen is remembered."""
    page = visitor.open(server.url, color_scheme="dark")
    expect_whole(page)

    def shade() -> tuple[str, str]:
        return page.evaluate("getComputedStyle(document.documentElement).backgroundColor"), ask(
            page, "chart.colors['--ink']"
        )

    dark = shade()
    page.emulate_media(color_scheme="light")
    until(page, STORE % f"chart.colors['--ink'] !== '{dark[1]}'")  # the chart changes with the page
    assert shade()[0] != dark[0]
    page.focus("#theme")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    assert shade() == dark
    page.reload()
    expect_whole(page)
    assert shade() == dark and page.locator("#theme").inner_text() == "Theme: dark"


def test_motion_is_not_for_everybody(server: LocalServer, visitor: Visitor) -> None:
    """... so nothing on this page moves by itself."""
    page = visitor.open(server.url, reduced_motion="reduce")
    expect_whole(page)
    styles = "[...document.querySelectorAll('*')].map((e) => getComputedStyle(e))"
    assert page.evaluate(f"{styles}.every((s) => s.transitionDuration === '0s' && s.animationName === 'none')")


def test_a_hidden_tab_rests_and_catches_up(server: LocalServer, visitor: Visitor) -> None:
    page = visitor.open(server.url)
    expect_whole(page)
    show(page, False)
    page.wait_for_timeout(100)  # what was on its way is there
    last = ask(page, "store.lastTick")
    page.wait_for_timeout(1500)
    assert ask(page, "store.lastTick") == last
    num_streams = sum("/cluster/live" in url for url in visitor.urls)
    show(page, True)
    until(page, STORE % f"store.lastTick > {last + 5}")
    steps = ask(page, "store.column('time').map((t, i, all) => i ? t - all[i - 1] : 0.25)")
    assert max(steps) < 1.5, "no tick is missing"
    assert sum("/cluster/live" in url for url in visitor.urls) == num_streams + 1, "one connection at a time"
    assert any(url.endswith(f"since={last}") for url in visitor.urls)


def show(page: Page, is_visible: bool) -> None:
    page.evaluate(
        """(hidden) => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        not is_visible,
    )


def test_hours_do_not_grow(server: LocalServer, visitor: Visitor) -> None:
    """Five hours of ticks and six hundred faults, as fast as the page can take them."""
    page = visitor.open(server.url)
    expect_whole(page)
    show(page, False)  # only what the test feeds it
    page.evaluate("window.feedOf = " + FEED)
    page.evaluate(STORE % "feedOf(store, 0, 9600)")
    nodes = page.evaluate("document.querySelectorAll('*').length")
    for start in range(9600, 72_000, 4800):
        page.evaluate(STORE % f"feedOf(store, {start}, 4800)")
    assert abs(page.evaluate("document.querySelectorAll('*').length") - nodes) < 20
    assert ask(page, "store.columns.map((column) => column.length)") == [1200] * 6
    assert ask(page, "[store.entries.size, chart.plots[0].data[0].length]") == [60, 1200]
    assert page.locator("#entries li").count() == 60


def test_experts_without_a_place_are_said(server: LocalServer, visitor: Visitor) -> None:
    page = visitor.open(server.url)
    expect_whole(page)
    show(page, False)
    ask(page, "store.apply({ ticks: [], cluster: { ...store.cluster, experts_without_place: 3 } })")
    expect(page.locator("#validity")).to_contain_text("3 experts without a place")


def test_what_the_axes_say(server: LocalServer, visitor: Visitor) -> None:
    """Four decades on a low chart: some have no room for a label, and then there is none."""
    page = visitor.open(server.url, before=lambda page: page.add_init_script(RECORD))
    expect_whole(page)
    show(page, False)
    page.evaluate("texts.clear()")
    page.evaluate(
        STORE % "store.apply({ ticks: [{ n: 1e9, unix_s: Date.now() / 1000, p50_ms: 5, p99_ms: 9, max_ms: 7000 }] })"
    )
    until(page, "texts.has('10 s')")
    texts = set(page.evaluate("[...texts]"))
    assert "1 ms" in texts and not [text for text in texts if "null" in text or "NaN" in text]


RECORD = """(() => {
  window.texts = new Set();
  const { fillText } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    window.texts.add(String(text));
    return fillText.call(this, text, ...rest);
  };
})()"""


FEED = """(store, start, count) => {
  const now = 2e9;
  const tickOf = (n) => ({ n: 1e9 + n, unix_s: now + n / 4, tokens_per_s: 500 + (n % 7), p50_ms: 8, max_ms: 20 });
  for (let n = start; n < start + count; n += 120) {
    const ticks = Array.from({ length: 120 }, (_, i) => tickOf(n + i));
    const id = 1e6 + Math.floor(n / 120);
    const state = n % 240 ? "gone" : "ready";
    const dies = { id, unix_s: now + n / 4, kind: "fault", who: "expert worker 2", title: "expert worker 2 died" };
    const entry = { ...dies, parts: [`part ${n}`], is_open: n % 240 > 0, ended_unix_s: null, pause_ms: 20 };
    const workers = store.cluster.workers.map((w) => (w.rank === 2 ? { ...w, state, incarnation: n } : w));
    store.apply({ ticks, entries: [entry], cluster: { ...store.cluster, workers } });
  }
}"""


def test_a_lost_server_is_said_and_found_again(server: LocalServer, visitor: Visitor) -> None:
    page = visitor.open(server.url)
    expect_whole(page)
    page.route("**/cluster/live*", lambda route: route.abort())
    show(page, False)
    show(page, True)
    expect_stale(page)
    page.unroute("**/cluster/live*")
    expect_whole(page)
    expect_live(page)
    visitor.errors = [error for error in visitor.errors if "ERR_FAILED" not in error]  # that was us


def expect_stale(page: Page) -> None:
    """What is of the past looks so, and says how old it is."""
    expect(page.locator("#verdict-word")).to_have_text("No answer", timeout=TIMEOUT_MS)
    expect(page.locator("#verdict-seen")).to_have_text(re.compile(r"Last seen \d+ s ago"), timeout=TIMEOUT_MS)
    assert filters(page) == ["grayscale(1)"] * 4


def expect_live(page: Page) -> None:
    expect(page.locator("#verdict-seen")).to_have_text("")
    assert filters(page) == ["none"] * 4


def filters(page: Page) -> Any:
    parts = [".figures", ".charts", ".cluster", ".events"]
    return page.evaluate("(all) => all.map((one) => getComputedStyle(document.querySelector(one)).filter)", parts)


def test_a_server_that_stops_answering_is_not_called_live(server: LocalServer, visitor: Visitor) -> None:
    """Its connections stay open, and nothing comes: neither the gateway runs nor those who would replace it."""
    page = visitor.open(server.url)
    expect_whole(page)
    expect_live(page)
    named = {one["name"]: one["pid"] for one in cluster(server)["processes"]}
    keeper, root = parent_of(named["gateway"]), server.process.pid if server.process is not None else None
    pids = [pid for pid in (named["gateway"], keeper, named["supervisor"], root) if pid is not None]
    for pid in reversed(pids):
        os.kill(pid, signal.SIGSTOP)
    try:
        expect_stale(page)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    expect_whole(page)
    expect_live(page)


def test_words_are_explained(server: LocalServer, visitor: Visitor) -> None:
    page = visitor.open(server.url)
    expect_whole(page)
    said = page.evaluate("[...document.querySelectorAll('[data-term]')].map((e) => [e.textContent.trim(), e.title])")
    explained = {word: title for word, title in said if len(title) > 10}
    assert len(explained) == len({word for word, _ in said})
    assert {"epoch", "slots:", "shadow", "zygote", "anchor", "orchestrator", "between tokens p50"} <= explained.keys()


def test_an_unexpected_error_does_not_end_the_connection(server: LocalServer, visitor: Visitor) -> None:
    page = visitor.open(server.url)
    expect_whole(page)
    bodies = ["data: {this is not JSON\n\n", 'data: {"ticks": null}\n\n']
    page.route("**/cluster/live*", lambda route: route.fulfill(body=bodies.pop()), times=len(bodies))
    last = ask(page, "store.lastTick")
    show(page, False)
    show(page, True)
    wait_until(lambda: (page.wait_for_timeout(50), not bodies)[1], what="both broken answers")
    expect_whole(page)
    wait_until(lambda: ask(page, "store.lastTick") > last, what="news after the errors")
    assert [error.split(":")[0] for error in visitor.errors] == ["TypeError", "SyntaxError"], "both were reported"
    visitor.errors.clear()


def test_a_server_with_a_key_and_without_chaos(visitor: Visitor) -> None:
    with LocalServer("demo", "--api-key", "sesame") as server:
        page = visitor.open(server.url)
        for key in ("wrong", "sesame"):
            expect(page.locator("#key")).to_be_visible(timeout=TIMEOUT_MS)
            page.fill("#key-input", key)
            page.keyboard.press("Enter")
        expect_whole(page)
        expect(page.locator("#key")).not_to_be_visible()
        assert page.locator(".kill:visible").count() == 0
        write(page, 1)
        page.reload()
        expect_whole(page)
        page.close()
        visitor.errors = [error for error in visitor.errors if "401" not in error]  # that was us


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> None:
    """Each test finds the cluster whole."""
    if "server" in request.fixturenames:
        check: Callable[[LocalServer], None] = wait_whole
        check(request.getfixturevalue("server"))
