"""`everserve status --watch`: the instance as it lives, on one screen.

    /cluster/live --updates, four times a second--> Watched --> screen(): pure, for any size from 80 x 24 on

Where there is no terminal: a line for each thing that happens, and one every few seconds that says how it goes.
"""

import json
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from everserve.client import key_headers, unauthorized
from everserve.errors import ConfigError
from everserve.words import count

_KEPT_TICKS = 1200
_RECENT_S = 10.0  # what p50 and p99 are about
_PLAIN_S = 5.0
_AGAIN_S = 1.0
_READ_S = 5.0  # updates come four times a second; after this time the server counts as silent
_COLOURS = {"whole": "green", "degraded": "yellow", "broken": "bold red", "unknown": "dim"}
_KINDS = {"fault": "red", "trouble": "bold red", "move": "cyan"}
_BLOCKS = " ▁▂▃▄▅▆▇█"


class Watched:
    """The state after all updates so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.hello: dict[str, Any] = {}
        self.cluster: dict[str, Any] | None = None
        self.ticks: deque[dict[str, Any]] = deque(maxlen=_KEPT_TICKS)
        self.entries: dict[int, dict[str, Any]] = {}
        self.silent_since_s: float | None = None  # the server does not answer

    def add(self, news: dict[str, Any]) -> None:
        if "hello" in news:
            if news["hello"]["gateway"] != self.hello.get("gateway"):
                self.ticks.clear()
                self.entries.clear()
            self.hello = news["hello"]
        self.cluster = news.get("cluster", self.cluster)
        self.ticks += [tick for tick in news["ticks"] if not self.ticks or tick["n"] > self.ticks[-1]["n"]]
        self.entries |= {entry["id"]: entry for entry in news.get("entries", [])}

    @property
    def health(self) -> str:
        """The state in one word."""
        if self.cluster is None or self.silent_since_s is not None:
            return "unknown"
        if self.cluster["violations"]:
            return "broken"
        return "degraded" if self.cluster["degraded"] else "whole"

    @property
    def since_unix_s(self) -> float | None:
        """Since when it is as it is: since the first of what is still open, or the end of what was the last."""
        if self.silent_since_s is not None:
            return self.silent_since_s
        is_open = [entry["unix_s"] for entry in self.entries.values() if entry["is_open"]]
        if self.health != "whole":
            return min(is_open, default=None)
        ended = [entry["ended_unix_s"] for entry in self.entries.values() if entry["ended_unix_s"] is not None]
        return max(ended or [entry["unix_s"] for entry in self.entries.values()], default=None)

    def pace(self) -> str:
        """Tokens and the times between them, in one line. p50, p99: of ten seconds; the largest: of five minutes."""
        if not self.ticks:
            return "no tokens yet"
        num_recent = max(1, round(_RECENT_S / self.hello.get("tick_s", 0.25)))
        recent = list(self.ticks)[-num_recent:]
        last = recent[-4:]
        words = [f"{statistics.fmean(tick.get('tokens_per_s', 0.0) for tick in last):.0f} tokens/s"]
        words.append(count(self.ticks[-1].get("num_streams", 0), "stream"))
        if p50 := [tick["p50_ms"] for tick in recent if tick.get("p50_ms") is not None]:
            p99 = max(tick["p99_ms"] for tick in recent if tick.get("p99_ms") is not None)
            largest = max(tick["max_ms"] for tick in self.ticks if tick.get("max_ms") is not None)
            words.append(f"inter-token p50 {_ms(statistics.median(p50))}, p99 {_ms(p99)}, largest {_ms(largest)}")
        return " · ".join(words)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


# -- the screen ----------------------------------------------------------------------------------


def screen(watched: Watched, now_unix_s: float, width: int, height: int) -> RenderableType:
    """Everything that matters, in no more lines than there are."""
    head = [_headline(watched, now_unix_s), Text(watched.pace(), no_wrap=True, overflow="ellipsis")]
    head.append(_sparkline(watched, width))
    head += [Text(f"! {what}", "red", overflow="ellipsis") for what in _wrong(watched)[:3]]
    num_left = height - len(head) - 1
    workers = watched.cluster["workers"] if watched.cluster is not None else []
    table, num_rows = _workers(workers, max_rows=max(3, num_left - 8))
    num_left -= num_rows + 1
    return Group(*head, Text(), table, Text(), *_happenings(watched, width, num_left - 1))


def _headline(watched: Watched, now_unix_s: float) -> RenderableType:
    left = Text.assemble(("everserve ", "bold"), ", ".join(watched.hello.get("models", [])) or watched.url)
    if watched.cluster is not None:
        left.append(f" · epoch {watched.cluster['epoch']}", "dim")
    health = watched.health
    words = {"unknown": f"no answer from {watched.url}", "broken": "NOT VALID"}.get(health, health)
    right = Text(words, _COLOURS[health], justify="right")
    if (since := watched.since_unix_s) is not None:
        clock = time.strftime("%H:%M:%S", time.localtime(since))
        right.append(f" since {clock} ({_span(now_unix_s - since)})", "dim")
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_column(no_wrap=True, justify="right")
    grid.add_row(left, right)
    return grid


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _sparkline(watched: Watched, width: int) -> Text:
    """Tokens per second, a tick a column; red where a client waited far longer than usual."""
    ticks = list(watched.ticks)[-width:]
    top = max((tick.get("tokens_per_s", 0.0) for tick in ticks), default=0.0)
    usual = statistics.median([tick["p50_ms"] for tick in ticks if tick.get("p50_ms")] or [0.0])
    line = Text()
    for tick in ticks:
        share = tick.get("tokens_per_s", 0.0) / top if top else 0.0
        is_slow = usual and (tick.get("max_ms") or 0.0) > max(4 * usual, 20.0)
        line.append(_BLOCKS[round(share * (len(_BLOCKS) - 1))], "red" if is_slow else "green")
    return line


def _wrong(watched: Watched) -> list[str]:
    if watched.cluster is None:
        return []
    return [*watched.cluster["violations"], *watched.cluster["degraded"]]


def _workers(workers: list[dict[str, Any]], max_rows: int) -> tuple[Table, int]:
    """The table, and how many lines it has. Where there are too many, those that are not ready come first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "role", "state", "incarnation", "pid", "requests", "KV / slots"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("role", "state", "KV / slots") else "right")
    shown = workers
    if len(workers) > max_rows - 1:
        shown = sorted(workers, key=lambda worker: worker["state"] == "ready")[: max_rows - 2]
    for worker in shown:
        table.add_row(*_cells(worker), style=None if worker["state"] == "ready" else "yellow")
    if len(shown) < len(workers):
        table.add_row("", f"and {len(workers) - len(shown)} more")
    return table, 1 + len(shown) + (len(shown) < len(workers))


def _cells(worker: dict[str, Any]) -> list[str]:
    has_kv = "attention" in worker["roles"]
    place = f"{100 * worker['kv_cache_usage']:.0f} % KV" if has_kv else ""
    if worker["slots"] and not has_kv:
        place = f"{worker['slots'] - worker['shadow_slots']} + {worker['shadow_slots']} shadow"
    return [
        str(worker["rank"]),
        "+".join(worker["roles"]),
        worker["state"],
        str(worker["incarnation"]),
        str(worker["pid"] or ""),
        str(worker["requests"]) if has_kv else "",
        place,
    ]


def _happenings(watched: Watched, width: int, max_lines: int) -> Iterator[Text]:
    """The latest first, as many as there is room for."""
    for entry in sorted(watched.entries.values(), key=lambda entry: -entry["unix_s"]):
        text = Text(time.strftime("%H:%M:%S ", time.localtime(entry["unix_s"])), "dim")
        text.append(entry["title"], _KINDS.get(entry["kind"], ""))
        if entry["parts"]:
            text.append(" · " + " · ".join(entry["parts"]))
        max_lines -= -(-len(text) // width)
        if max_lines < 0:
            return
        yield text


# -- following -----------------------------------------------------------------------------------


def watch(url: str, api_key: str | None, console: Console | None = None) -> None:
    """Until Ctrl-C, or until the terminal is gone. A server that is not there yet, or not any more, is waited for; one
    that refuses is not."""
    console = console or Console()
    watched = Watched(url)
    try:
        if console.is_terminal:
            _show(watched, api_key, console)
        else:
            _tell(watched, api_key)
    except KeyboardInterrupt:
        return


def _show(watched: Watched, api_key: str | None, console: Console) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for _ in _follow(watched, api_key):
            if not console.is_terminal:  # it was one when we started, and is gone
                return
            width, height = console.size
            live.update(screen(watched, time.time(), width, height), refresh=True)


def _tell(watched: Watched, api_key: str | None) -> None:
    """Lines: what happens once it is over or has not changed for a while, and how it goes."""
    told: set[int] = set()
    health, said_s = "", 0.0
    for _ in _follow(watched, api_key):
        for entry in sorted(watched.entries.values(), key=lambda entry: entry["unix_s"]):
            if entry["id"] not in told and (not entry["is_open"] or time.time() - entry["unix_s"] > _PLAIN_S):
                told.add(entry["id"])
                _say(" · ".join([entry["title"], *entry["parts"]]), entry["unix_s"])
        if watched.health != health or time.monotonic() - said_s > _PLAIN_S:
            health, said_s = watched.health, time.monotonic()
            _say(f"{health}: {'; '.join([watched.pace(), *_wrong(watched)])}", time.time())


def _say(text: str, unix_s: float) -> None:
    print(time.strftime("%H:%M:%S", time.localtime(unix_s)), text, flush=True)


def _follow(watched: Watched, api_key: str | None) -> Iterator[None]:
    """Read the updates; yields after each, and once a second while there are none."""
    headers = key_headers(api_key)
    with httpx.Client(headers=headers, timeout=httpx.Timeout(_READ_S)) as client:
        while True:
            since = f"?since={watched.ticks[-1]['n']}" if watched.ticks else ""
            try:
                with client.stream("GET", f"{watched.url}/cluster/live{since}") as response:
                    _check(watched.url, headers, response)
                    for line in response.iter_lines():
                        if line.startswith("data:"):
                            watched.silent_since_s = None
                            watched.add(json.loads(line[5:]))
                            yield
            except (httpx.HTTPError, ValueError) as error:
                if not watched.hello and not isinstance(error, httpx.TransportError):
                    raise ConfigError(f"{watched.url} does not answer as Everserve does: {error}") from error
            except httpx.InvalidURL as error:
                raise ConfigError(f"--url {watched.url}: {error}") from error
            watched.silent_since_s = watched.silent_since_s or time.time()
            yield
            time.sleep(_AGAIN_S)


def _check(url: str, headers: dict[str, str], response: httpx.Response) -> None:
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(unauthorized(url, headers))
    if response.status_code == httpx.codes.NOT_FOUND:
        raise ConfigError(f"{url} has no /cluster/live: is it Everserve, and not an older one?")
    response.raise_for_status()
