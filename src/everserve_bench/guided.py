"""What a guided stream costs: itself, and those beside it.

The same streams with and without a schema, in turn on one server: alone, and one among others that are not guided. Time
between tokens as clients see it, and CPU time of all processes per token, which says the same on a busy machine. Ratios
are of one round each; the table has their medians.

Then the first token: without a schema, with one that the server sees for the first time, and with that one again.
"""

import asyncio
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everserve.client import Stream, complete
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import report
from everserve_bench.load import random_prompts
from everserve_bench.processes import cluster, cpu_s, pids

PROMPT = 32
_VOCABULARY = 1000  # of prompts: any model has so many


@dataclass(frozen=True, kw_only=True)
class Settings:
    rounds: int = 5
    tokens: int = 128
    neighbours: int = 7


def schema(name: str, num_items: int) -> dict[str, Any]:
    """JSON that takes more tokens than it has items. No two names make one grammar."""
    properties = {name: {"type": "string", "pattern": "^[a-z ]{3,12}$"}, "age": {"type": "integer", "minimum": 0}}
    item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "array", "minItems": num_items, "items": item}


def guided_by(name: str, num_items: int) -> dict[str, Any]:
    return {"guided_json": schema(name, num_items), "ignore_eos": False}


@dataclass(frozen=True)
class Sample:
    """One time that some streams ran."""

    first_ms: float  # of the first stream
    itl_ms: float  # of the first stream
    others_itl_ms: float | None  # of the streams beside it
    cpu_ms: float  # of all processes, for a token of any stream


def run(settings: Settings, model: str, out: Path | None) -> None:
    """The whole benchmark."""
    with LocalServer(model) as server, Progress().begin("guided", total=5 * settings.rounds + 1) as progress:
        found = measure(server, settings, progress.advance)
    result = {"settings": vars(settings), "model": model, **found}
    path = report.write("guided", result, out)
    show(result)
    print(f"written to {path}")


def measure(server: LocalServer, settings: Settings, advance: Any = lambda: None) -> dict[str, Any]:
    """Every variant once for each round, in turn; another order each time."""
    samples: dict[str, list[Sample]] = {}
    first_ms: dict[str, list[float]] = {"unguided": [], "new schema": [], "same schema": []}
    ask(server, settings, -1, 1, guided_by("warm", settings.tokens))
    advance()
    for round_ in range(settings.rounds):
        same = guided_by("same", settings.tokens)
        plan = [
            (f"{kind}, {where}", num, fields)
            for where, num in (("alone", 1), ("beside others", settings.neighbours + 1))
            for kind, fields in (("unguided", {}), ("guided", same))
        ]
        for name, num, fields in plan if round_ % 2 else reversed(plan):
            samples.setdefault(name, []).append(ask(server, settings, round_, num, fields))
            advance()
        new = guided_by(f"new{round_}", settings.tokens)
        for name, fields in (("unguided", {}), ("new schema", new), ("same schema", new)):
            first_ms[name].append(ask(server, settings, settings.rounds + round_, 1, fields, max_tokens=1).first_ms)
        advance()
    ratios = {where: compare(samples[f"guided, {where}"], samples[f"unguided, {where}"]) for where in WHERE}
    return {
        "first_token_ms": {name: report.spread(values) for name, values in first_ms.items()},
        "samples": {name: [vars(sample) for sample in found] for name, found in samples.items()},
        "guided_to_unguided": ratios,
    }


WHERE = ("alone", "beside others")


def ask(
    server: LocalServer, settings: Settings, seed: int, num: int, fields: dict[str, Any], max_tokens: int | None = None
) -> Sample:
    """So many streams at once; `fields` are those of the first."""
    num_tokens = max_tokens or settings.tokens
    prompts = random_prompts(_VOCABULARY, num, PROMPT, seed=seed)
    processes = pids(cluster(server))
    before_s = cpu_s(processes)
    streams = _complete(server, prompts, num_tokens, fields)
    spent_s = cpu_s(processes) - before_s
    short = [stream for stream in streams if stream.error or len(stream.token_ids) != num_tokens]
    if short:
        raise RuntimeError(f"a stream did not have its {num_tokens} tokens: {short[0]}")
    return sample_of(streams, spent_s)


def _complete(server: LocalServer, prompts: list[list[int]], num_tokens: int, fields: dict[str, Any]) -> list[Stream]:
    async def run() -> list[Stream]:
        asked = [fields, *({} for _ in prompts[1:])]
        works = (
            complete(server.url, server.model, prompt, num_tokens, **more)
            for prompt, more in zip(prompts, asked, strict=True)
        )
        return await asyncio.gather(*works)

    return asyncio.run(run())


def sample_of(streams: list[Stream], spent_s: float) -> Sample:
    first, *others = streams
    return Sample(
        first_ms=1e3 * first.first_token_s,
        itl_ms=_per_token_ms(first),
        others_itl_ms=statistics.mean(map(_per_token_ms, others)) if others else None,
        cpu_ms=1e3 * spent_s / sum(len(stream.token_ids) for stream in streams),
    )


def _per_token_ms(stream: Stream) -> float:
    """The mean: a busy client reads several tokens at once."""
    return 1e3 * (stream.arrivals_s[-1] - stream.arrivals_s[0]) / max(1, len(stream.arrivals_s) - 1)


def compare(guided: list[Sample], unguided: list[Sample]) -> dict[str, Any]:
    """How many times as long, round by round."""
    pairs = list(zip(guided, unguided, strict=True))
    ratios = {
        "itl": [a.itl_ms / b.itl_ms for a, b in pairs if b.itl_ms > 0],
        "others_itl": [a.others_itl_ms / b.others_itl_ms for a, b in pairs if a.others_itl_ms and b.others_itl_ms],
        "cpu": [a.cpu_ms / b.cpu_ms for a, b in pairs if b.cpu_ms > 0],
    }
    return {name: report.spread(values) for name, values in ratios.items() if values}


def show(result: dict[str, Any]) -> None:
    """Two tables."""
    names = {"itl": "time between its tokens", "others_itl": "of the others' tokens", "cpu": "CPU time per token"}
    rows = [
        [where, what, f"{ratio['median']:.3f}", f"{ratio['min']:.3f} to {ratio['max']:.3f}"]
        for where, found in result["guided_to_unguided"].items()
        for key, what in names.items()
        if (ratio := found.get(key)) is not None
    ]
    report.print_table("a guided stream to an unguided one", ["where", "what", "times", "range"], rows)
    firsts = [[name, f"{each['median']:.1f}"] for name, each in result["first_token_ms"].items()]
    report.print_table("the first token", ["schema", "ms"], firsts)
