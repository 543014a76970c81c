"""`everserve demo`: the story in one terminal, in under a minute.

A cluster writes four texts side by side. An expert worker is killed in the middle of a sentence, then an attention
worker. The sentences go on. Afterwards the same texts are written again without any kill, and compared.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from everserve.cli import app
from everserve.cli.status import ask, fetch_cluster
from everserve.client import Stream, complete, percentile
from everserve.errors import EverserveError
from everserve.runtime.local_server import LocalServer

PROMPTS = (
    "It was a cold evening in November when",
    "Prince Andrew looked up at the sky and",
    "ROMEO:\n",
    "Holmes rose from his chair and went to the window.",
)
MAX_TOKENS = 200
NUM_ATTENTION, NUM_EXPERT = 2, 2
_REFRESH_S = 0.1


@dataclass
class Kill:
    """One planned fault: when all streams have this many tokens, this worker dies."""

    after_tokens: int
    rank: int
    what: str
    at_s: float = 0.0
    pid: int = 0


@dataclass
class Story:
    """What happens while the texts are written."""

    server: LocalServer
    streams: list[Stream]
    kills: list[Kill]
    told: list[str] = field(default_factory=list)

    async def play(self, show: "Screen | None") -> None:
        """Write all texts; kill on the way."""
        work = asyncio.gather(*(_write(self.server, i, stream) for i, stream in enumerate(self.streams)))
        due = list(self.kills)
        shown_s = 0.0
        while not work.done():
            await asyncio.wait([work], timeout=0.005)
            if due and min(len(stream.token_ids) for stream in self.streams) >= due[0].after_tokens:
                await asyncio.to_thread(self._kill, due.pop(0))
            if show is not None and time.monotonic() - shown_s > _REFRESH_S:
                shown_s = time.monotonic()
                show.update(self)
        for stream in await work:
            if stream.error:
                raise EverserveError(stream.error)

    def _kill(self, kill: Kill) -> None:
        sent = ask("POST", f"{self.server.url}/cluster/fault", body={"rank": kill.rank, "signal": "KILL"})
        kill.pid = sent["pid"]
        self.told.append(f"SIGKILL to {kill.what} (rank {kill.rank}, pid {kill.pid})")


async def _write(server: LocalServer, index: int, stream: Stream) -> Stream:
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": index}
    return await complete(server.url, server.model, PROMPTS[index], MAX_TOKENS, stream, **sampling)


class Screen:
    """Live panels on a terminal; finished ones elsewhere."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def update(self, story: Story) -> None:
        headline = Text("\n".join(story.told) or "Writing ...", style="bold red" if story.told else "dim")
        self._live.update(Group(headline, _panels(story.streams)), refresh=True)


@app.command()
def demo() -> None:
    """Start a cluster of the bundled model, kill workers while it writes, and show that no token was lost."""
    console = Console(highlight=False)
    console.print(
        f"Starting a cluster of the bundled model (64 experts, 8 per token) on this CPU: {NUM_ATTENTION} attention "
        f"workers, {NUM_EXPERT} expert workers ..."
    )
    began = time.monotonic()
    flags = ("--attention-workers", str(NUM_ATTENTION), "--expert-workers", str(NUM_EXPERT), "--enable-chaos")
    with LocalServer("demo", *flags) as server:
        placed = next(event for event in server.events() if event["event"] == "placement_made")
        console.print(
            f"Ready at {server.url} after {time.monotonic() - began:.1f} s. Each expert worker holds "
            f"{placed['active_per_worker']} experts per layer and {placed['shadow_per_worker']} shadows of the other's."
        )
        kills = [
            Kill(MAX_TOKENS // 4, NUM_ATTENTION, "an expert worker"),
            Kill(MAX_TOKENS // 2, 0, "an attention worker"),
        ]
        story = Story(server, [Stream() for _ in PROMPTS], kills)
        _perform(story, console)
        whole_s = _wait_whole(server)
        console.print("The same texts once more, without any kill, to compare ...")
        again = Story(server, [Stream() for _ in PROMPTS], [])
        asyncio.run(again.play(None))
        events = server.events()
    num_lost, num_different = _summary(story, again, console)
    _what_happened(story, events, whole_s, console)
    console.print(f"Tokens lost: {num_lost}. Tokens that differ from the undisturbed texts: {num_different}.")
    console.print("\nServe it yourself:  everserve serve demo --attention-workers 2 --expert-workers 2 --enable-chaos")
    console.print("Then:               everserve status;  everserve kill 3")
    if num_lost or num_different:
        raise typer.Exit(1)


def _perform(story: Story, console: Console) -> None:
    with Live(console=console, auto_refresh=False) as live:
        screen = Screen(live)
        asyncio.run(story.play(screen if console.is_terminal else None))
        screen.update(story)
    console.print()


def _wait_whole(server: LocalServer) -> float:
    """Until every seat is taken again; returns when that was."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        cluster = fetch_cluster(server.url)
        if not cluster["violations"] and not cluster["degraded"]:
            break
        time.sleep(0.05)
    ready = [event["at_s"] for event in server.events() if event["event"] == "worker_became_ready"]
    return float(max(ready))


def _panels(streams: list[Stream]) -> Columns:
    return Columns(
        [
            Panel(Text.assemble((prompt, "bold"), stream.text), width=58, title=f"{len(stream.token_ids)} tokens")
            for prompt, stream in zip(PROMPTS, streams, strict=True)
        ]
    )


def _summary(story: Story, again: Story, console: Console) -> tuple[int, int]:
    """The closing table: what clients saw. Returns how many tokens were lost, and how many differ."""
    total_lost = total_different = 0
    table = Table(
        "stream", "tokens", "lost", "different", "between tokens p50 ms", "largest gap ms", "without kills ms"
    )
    for index, (stream, undisturbed) in enumerate(zip(story.streams, again.streams, strict=True)):
        num_lost = len(undisturbed.token_ids) - len(stream.token_ids)
        num_different = sum(a != b for a, b in zip(stream.token_ids, undisturbed.token_ids, strict=False))
        total_lost, total_different = total_lost + num_lost, total_different + num_different
        cells = (percentile(stream.gaps_s, 0.5), max(stream.gaps_s), max(undisturbed.gaps_s))
        table.add_row(
            str(index + 1),
            str(len(stream.token_ids)),
            str(num_lost),
            str(num_different),
            *(f"{1e3 * seconds:.1f}" for seconds in cells),
        )
    console.print(table)
    return total_lost, total_different


def _what_happened(story: Story, events: list[dict[str, Any]], whole_s: float, console: Console) -> None:
    """Each kill in one line, from the typed events."""
    for kill in story.kills:
        killed = [event for event in events if event["event"] == "fault_injected" and event["victim_pid"] == kill.pid]
        kill.at_s = killed[0]["at_s"]
        later = [event for event in events if event["at_s"] >= kill.at_s and event.get("rank") == kill.rank]
        noticed = next(event for event in later if event["event"] == "fault_detected")
        back = next(event for event in later if event["event"] == "worker_became_ready")
        gap = max(_gap_at(stream, kill.at_s) for stream in story.streams)
        console.print(
            f"Killing {kill.what}: noticed after {1e3 * (noticed['at_s'] - kill.at_s):.1f} ms, largest pause of any "
            f"stream {1e3 * gap:.0f} ms, a new worker in its seat after {back['at_s'] - kill.at_s:.2f} s."
        )
    last = max(kill.at_s for kill in story.kills)
    console.print(f"Full strength {whole_s - last:.2f} s after the last kill.")


def _gap_at(stream: Stream, at_s: float) -> float:
    """How long this client waited for its first token after that moment, counted from its last one before."""
    before = [arrival for arrival in stream.arrivals_s if arrival <= at_s]
    after = [arrival for arrival in stream.arrivals_s if arrival > at_s]
    return after[0] - before[-1] if before and after else 0.0
