"""What does balancing experts by their load give, and what does a client see while they move?

Traffic is skewed: all streams are made of a few tokens (`words`), in their prompts and, by a logit bias, in their
answers, so that a few experts of each layer get most rows. How skewed that is, is measured. In each round one server
balances (`--enable-eplb`) and another one with the same flags does not; both get the same streams for as long.

    streams begin ──before── the first decision that moves something ──during── nothing moves any more ──after── end

With `tensor_parallel` experts are divided over devices (`-tp N`) of which one is gone from the beginning: AnchorTP's
question, what balancing gives after a loss.

The server that does not balance is measured in the same stretches of time. Every stream is compared with the answer of
an undisturbed run.
"""

import asyncio
import contextlib
import gc
import http.client
import itertools
import json
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from everserve.client import percentile
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import balance_report, divided, kill, report
from everserve_bench.analysis import Verdict, gaps_between
from everserve_bench.instance import Instance, flags_for
from everserve_bench.load import Ask, Load
from everserve_bench.subject import BUNDLED, Subject, subject

_LOOK_EVERY_S = 0.25
_SETTLED_S = 1.0  # after the last sign of a move
_BIAS = 100.0  # stronger than any logit


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    num_attention: int = 2
    num_expert: int = 4
    shadow_experts: int | None = None
    num_streams: int = 8
    num_prompt: int = 16
    max_tokens: int = 600
    words: int = 4
    seconds: float = 40.0
    rounds: int = 1
    shape: str = BUNDLED
    num_layers: int | None = None
    tensor_parallel: int | None = None

    def flags(self, served: Subject) -> tuple[str, ...]:
        if self.tensor_parallel is not None:
            longest, num = self.num_prompt + self.max_tokens, self.tensor_parallel
            return divided.flags(served, num, num - 1, num_streams=self.num_streams, longest=longest)
        flags = flags_for(
            served,
            num_attention=self.num_attention,
            num_expert=self.num_expert,
            num_streams=self.num_streams,
            longest=self.num_prompt + self.max_tokens,
        )
        shadows = () if self.shadow_experts is None else ("--shadow-experts", str(self.shadow_experts))
        return (*flags, *shadows)


@dataclass(frozen=True)
class Look:
    """One look at `/cluster/experts`."""

    at_s: float
    max_over_mean: float | None
    num_moving: int
    hot_share: float | None  # of the rows of a layer, to its busiest eighth of experts; mean over layers


@dataclass
class Run:
    """One server under load."""

    begin_s: float = 0.0
    end_s: float = 0.0
    looks: list[Look] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    arrivals_s: list[list[float]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def moves(self) -> tuple[float, float] | None:
        """From the first decision that was accepted to the last sign of a move, since the beginning."""
        accepted = [decision["at_s"] for decision in self.decisions if decision["is_accepted"]]
        if not accepted:
            return None
        moving = [look.at_s for look in self.looks if look.num_moving]
        return accepted[0] - self.begin_s, max([*accepted, *moving]) + _SETTLED_S - self.begin_s


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every stream was exact, and something was moved."""
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    rounds = []
    with subject(settings.shape, settings.num_layers) as served, Progress() as progress:
        progress.begin("balance", total=2 * settings.rounds)
        asks = make_asks(settings, served.vocab_size)
        expected: list[list[int]] | None = None
        for _ in range(settings.rounds):
            balanced, expected = _measure(settings, served, asks, expected, "--enable-eplb")
            progress.advance("with --enable-eplb")
            plain, expected = _measure(settings, served, asks, expected)
            progress.advance("without")
            rounds.append(_compare(balanced, plain))
        title = served.title
    result = {"model": title, "settings": asdict(settings), **balance_report.summarize(rounds)}
    path = report.write("balance", result, out)
    balance_report.show(result, path)
    return balance_report.is_passed(result)


def make_asks(settings: Settings, vocab_size: int) -> list[Ask]:
    """Sampled with a seed of their own from the same few tokens."""
    generator = random.Random("balance")
    words = generator.sample(range(vocab_size // 8, vocab_size), settings.words)
    bias = {str(word): _BIAS for word in words}
    return [
        Ask(
            prompt=[generator.choice(words) for _ in range(settings.num_prompt)],
            max_tokens=settings.max_tokens,
            params={"temperature": 1.0, "seed": 500 + i, "logit_bias": bias},
        )
        for i in range(settings.num_streams)
    ]


def _measure(
    settings: Settings, served: Subject, asks: list[Ask], expected: list[list[int]] | None, *more: str
) -> tuple[Run, list[list[int]]]:
    flags = (*settings.flags(served), *more)
    with contextlib.closing(Instance(served.model, flags)) as instance:
        if settings.tensor_parallel is not None:
            asyncio.run(_lose_one(instance.server, settings.tensor_parallel))
        found = asyncio.run(_load(instance.server, asks, settings.seconds))
        arrivals, streams = found
        arrivals.decisions = [e for e in instance.server.events("orchestrator") if e["event"] == "balance_decided"]
        if expected is None:
            expected = kill.undisturbed(instance.server, asks)
        arrivals.verdicts = streams.verdicts(expected)
        return arrivals, expected


async def _lose_one(server: LocalServer, num_devices: int) -> None:
    """The last device is gone, and everything has other places."""
    await divided.change(server, num_devices - 1, is_lost=True)
    await divided.wait_settled(server, num_devices - 1)


async def _load(server: LocalServer, asks: list[Ask], seconds: float) -> tuple[Run, Load]:
    found = Run()
    load = Load(server, asks)
    await load.flow()
    found.begin_s = time.perf_counter()
    while time.perf_counter() < found.begin_s + seconds:
        found.looks.append(await asyncio.to_thread(look, server))
        await asyncio.sleep(_LOOK_EVERY_S)
    found.end_s = time.perf_counter()
    await load.finish()
    found.arrivals_s = load.arrivals_s
    return found, load


def look(server: LocalServer) -> Look:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=15.0)
    try:
        connection.request("GET", "/cluster/experts?form=map")
        view: dict[str, Any] = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return Look(
        at_s=time.perf_counter(),
        max_over_mean=view["imbalance"]["max_over_mean"],
        num_moving=len(view["moving"]),
        hot_share=hot_share(view["load"]),
    )


def hot_share(load: list[list[float]]) -> float | None:
    """The share of a layer's rows that its busiest eighth of experts gets; the mean over layers with rows."""
    shares = []
    for row in load:
        num_hot = max(len(row) // 8, 1)
        if sum(row) > 0:
            shares.append(sum(sorted(row)[-num_hot:]) / sum(row))
    return sum(shares) / len(shares) if shares else None


def _compare(balanced: Run, plain: Run) -> dict[str, Any]:
    """Both servers in the same stretches of time."""
    length = min(balanced.end_s - balanced.begin_s, plain.end_s - plain.begin_s)
    moves = balanced.moves() or (length, length)
    bounds = [0.0, *(min(at_s, length) for at_s in moves), length]
    stretches = list(zip(("before", "during", "after"), itertools.pairwise(bounds), strict=True))
    both = {"balanced": balanced, "not balanced": plain}
    shares = [look.hot_share for run in both.values() for look in run.looks if look.hot_share is not None]
    return {
        "phases": {
            name: {phase: figures(run, *stretch) for phase, stretch in stretches if stretch[1] - stretch[0] > 0.5}
            for name, run in both.items()
        },
        "normal_p99_ms": figures(plain, 0.0, length)["p99_ms"],
        "hot_share": sum(shares) / len(shares) if shares else None,
        "decisions": [
            {name: decision[name] for name in ("is_accepted", "reason", "max_over_mean", "expected", "num_moves")}
            | {"since_s": round(decision["at_s"] - balanced.begin_s, 2)}
            for decision in balanced.decisions
        ],
        "num_streams": sum(len(run.verdicts) for run in both.values()),
        "num_inexact": sum(not verdict.is_exact for run in both.values() for verdict in run.verdicts),
    }


def figures(run: Run, begin_s: float, end_s: float) -> dict[str, Any]:
    """The figures of one stretch of time, in seconds since the beginning."""
    begin, end = run.begin_s + begin_s, run.begin_s + end_s
    gaps = [gap for arrivals in run.arrivals_s for gap in gaps_between(arrivals, begin, end)]
    num_tokens = sum(begin < at <= end for arrivals in run.arrivals_s for at in arrivals)
    ratios = [look.max_over_mean for look in run.looks if begin <= look.at_s <= end and look.max_over_mean is not None]
    return {
        "begin_s": round(begin_s, 2),
        "seconds": round(end_s - begin_s, 2),
        "tokens_per_s": round(num_tokens / (end_s - begin_s), 1),
        "max_over_mean": round(sum(ratios) / len(ratios), 3) if ratios else None,
        "p50_ms": round(1e3 * percentile(gaps, 0.5), 2) if gaps else None,
        "p99_ms": round(1e3 * percentile(gaps, 0.99), 2) if gaps else None,
        "largest_ms": round(1e3 * max(gaps), 2) if gaps else None,
    }
