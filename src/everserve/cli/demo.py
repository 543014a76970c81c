"""`everserve demo`: the story in one terminal, in under a minute."""

import asyncio
import time

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from everserve.cli import app
from everserve.client import Stream, complete, percentile
from everserve.errors import EverserveError
from everserve.runtime.local_server import LocalServer

PROMPTS = (
    "It was a cold evening in November when",
    "Prince Andrew looked up at the sky and",
    "ROMEO:\n",
    "Holmes rose from his chair and went to the window.",
)
MAX_TOKENS = 120
_REFRESH_S = 0.1


@app.command()
def demo() -> None:
    """Start the bundled model, stream a few completions side by side, and show what happened."""
    console = Console()
    console.print("Starting the bundled model (64 experts, 8 per token, on the CPU) ...", highlight=False)
    began = time.monotonic()
    with LocalServer("demo") as server:
        console.print(f"Ready at {server.url} after {time.monotonic() - began:.1f} s.\n", highlight=False)
        streams = asyncio.run(_play(server, console))
    console.print()
    _summary(streams, console)
    console.print("\nServe it yourself:  everserve serve demo", highlight=False)
    console.print("Then any OpenAI client works with the base URL http://127.0.0.1:8000/v1", highlight=False)


async def _play(server: LocalServer, console: Console) -> list[Stream]:
    """All streams at once; live panels on a terminal, finished ones elsewhere."""
    streams = [Stream() for _ in PROMPTS]
    work = asyncio.gather(
        *(
            complete(
                server.url,
                server.model,
                prompt,
                MAX_TOKENS,
                stream,
                temperature=0.8,
                top_p=0.95,
                seed=seed,
                ignore_eos=False,
            )
            for seed, (prompt, stream) in enumerate(zip(PROMPTS, streams, strict=True))
        )
    )
    with Live(console=console, auto_refresh=False) as live:
        while not work.done():
            await asyncio.wait([work], timeout=_REFRESH_S)
            if console.is_terminal:
                live.update(_panels(streams), refresh=True)
        live.update(_panels(streams), refresh=True)
    for stream in await work:
        if stream.error:
            raise EverserveError(stream.error)
    return streams


def _panels(streams: list[Stream]) -> Columns:
    return Columns(
        [
            Panel(Text.assemble((prompt, "bold"), stream.text), width=58, title=f"{len(stream.token_ids)} tokens")
            for prompt, stream in zip(PROMPTS, streams, strict=True)
        ]
    )


def _summary(streams: list[Stream], console: Console) -> None:
    table = Table("stream", "tokens", "first token ms", "between tokens p50 ms", "largest gap ms")
    for index, stream in enumerate(streams):
        gaps = stream.gaps_s or [0.0]
        cells = (stream.first_token_s, percentile(gaps, 0.5), max(gaps))
        table.add_row(str(index + 1), str(len(stream.token_ids)), *(f"{1e3 * seconds:.1f}" for seconds in cells))
    console.print(table)
    began = min(stream.started_s for stream in streams)
    seconds = max(stream.arrivals_s[-1] for stream in streams) - began
    total = sum(len(stream.token_ids) for stream in streams)
    console.print(f"{total} tokens in {seconds:.2f} s: {total / seconds:.0f} tokens/s", highlight=False)
