"""`everserve demo`: streams and deaths in one terminal, in under a minute.

A cluster writes four texts side by side. In the middle of their sentences an expert worker is killed, then an attention
worker, then the orchestrator. The sentences go on. Afterwards the same texts are written again without any kill, and
compared token for token.

demo_run.py is what happens, demo_screen.py how it looks.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from everserve.cli import demo_screen
from everserve.cli.app import app
from everserve.cli.demo_run import NUM_TOKENS, PROMPTS, DemoRun, KillOutcome, PlannedKill, judge
from everserve.cli.starting import StartBars
from everserve.cli.status import fetch_cluster
from everserve.model.bundled import DEMO_MODEL
from everserve.model.headers import Headers
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve.words import count

NUM_ATTENTION, NUM_EXPERT = 2, 2
_REFRESH_S = 0.1
_KEYS = ("EVERSERVE_API_KEY", "EVERSERVE_ADMIN_KEY")  # of other servers; this one lives for a minute, on the loopback
_WIDTH = 110  # of tables, where there is no terminal


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(help="Tokens of each text.", min=200, max=1500)] = NUM_TOKENS,
) -> None:
    """Kill workers of a small cluster under running streams.

    Writes texts beside each other, kills, and compares every token with the undisturbed texts.

    Waits until the cluster is back at full strength. Exit status 1 if a token was lost or changed.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(
        f"Starting a cluster of the bundled model (64 experts, 8 per token) on this CPU: {NUM_ATTENTION} attention "
        f"workers, {NUM_EXPERT} expert workers ..."
    )
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_started(console))
        run, again = DemoRun(server, _kills(tokens), tokens), DemoRun(server, [], tokens)
        _perform(run, console)
        console.print(demo_screen.about_the_model(Headers.read(DEMO_MODEL).num_parameters()))
        _wait_whole(server, console)
        console.print("The same texts once more, without any kill, to compare ...")
        _repeat(again)
        events = server.events()
    if errors := run.errors + again.errors:
        console.print(f"A text broke: {errors[0]}", markup=False)
        raise typer.Exit(1)
    is_exact = _tell(judge(run, again, events), again, console)
    console.print("\nServe it yourself:  everserve serve demo --attention-workers 2 --expert-workers 2 --enable-chaos")
    console.print("Then:               everserve status --watch;  everserve kill 3")
    if not is_exact:
        raise typer.Exit(1)


@contextlib.contextmanager
def _started(console: Console) -> Iterator[LocalServer]:
    began_s = time.monotonic()
    flags = ("--attention-workers", str(NUM_ATTENTION), "--expert-workers", str(NUM_EXPERT), "--enable-chaos")
    environment = {name: value for name, value in os.environ.items() if name not in _KEYS}
    with contextlib.ExitStack() as stack:
        with StartBars(console, "starting") as bars:
            server = stack.enter_context(LocalServer("demo", *flags, on_wait=bars.show, environment=environment))
        placed = next(event for event in server.events() if event["event"] == "placement_made")
        console.print(
            f"Ready at {server.url} after {time.monotonic() - began_s:.1f} s. Each expert worker holds "
            f"{count(placed['active_per_worker'], 'expert')} per layer and "
            f"{count(placed['shadow_per_worker'], 'shadow')} of other workers' experts."
        )
        console.print()
        yield server


def _tell(outcomes: list[KillOutcome], again: DemoRun, console: Console) -> bool:
    """What became of each kill; whether no token was lost or changed."""
    num_lost = sum(outcome.num_lost for outcome in outcomes)
    num_different = sum(outcome.num_different for outcome in outcomes)
    console.print(demo_screen.summary(outcomes, again))
    for line in demo_screen.prices(outcomes, again):
        console.print(line)
    texts = f"{len(PROMPTS)} texts of {again.num_tokens} tokens"
    console.print(f"{texts}, compared token for token with the undisturbed ones.")
    console.print(f"Tokens lost: {num_lost}. Tokens that differ from the undisturbed texts: {num_different}.")
    return not num_lost and not num_different


def _kills(num_tokens: int) -> list[PlannedKill]:
    """Expert workers come after attention workers in rank."""
    return [
        PlannedKill(num_tokens // 4, f"expert worker {NUM_ATTENTION}", {"rank": NUM_ATTENTION}),
        PlannedKill(num_tokens // 2, "attention worker 0", {"rank": 0}),
        PlannedKill(3 * num_tokens // 4, "the orchestrator", {"process": "orchestrator"}),
    ]


def _perform(run: DemoRun, console: Console) -> None:
    """Live on a terminal, as lines elsewhere."""
    if not console.is_terminal:
        console.print(f"{len(PROMPTS)} texts are being written side by side:")
        lines = demo_screen.PlainLines(run, console)
        asyncio.run(run.play(lines.look))
        lines.look()
        demo_screen.beginnings(run.streams, console)
        console.print()
        return
    shown_s = 0.0
    with Live(console=console, auto_refresh=False) as live:

        def show(at_least_s: float = _REFRESH_S) -> None:
            nonlocal shown_s
            now_s = time.perf_counter()
            if now_s - shown_s >= at_least_s:
                shown_s = now_s
                live.update(demo_screen.screen(run, now_s, console), refresh=True)

        asyncio.run(run.play(show))
        show(0.0)
    console.print()


def _repeat(again: DemoRun) -> None:
    """The same texts, undisturbed."""
    total = again.num_tokens * len(PROMPTS)
    with Progress().begin("undisturbed", total, " tokens") as progress:
        asyncio.run(again.play(lambda: progress.update(sum(len(stream.token_ids) for stream in again.streams))))


def _wait_whole(server: LocalServer, console: Console) -> None:
    """Until every seat is taken again. How long that takes is the machine's affair; what is missing is said."""
    told: list[str] = []
    while True:
        cluster = fetch_cluster(server.url)
        missing = [*cluster["violations"], *cluster["degraded"]]
        if not missing:
            return
        if missing[:1] != told:
            told = missing[:1]
            console.print(f"Waiting: {told[0]}", markup=False)
        time.sleep(0.05)
