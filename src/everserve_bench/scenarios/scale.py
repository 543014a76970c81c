"""What does a client see while devices come and go?

Streams run side by side, and those that end begin again, while the instance is scaled from size to size. A size is a
number of devices with an attention and an expert worker each. Every change is told from its request until there are
exactly the workers that were asked for: how long it took, the largest gap of any stream in that time beside the gaps of
the stretch before, and tokens per second before and after.

Every stream is compared, token by token, with the same request on an instance that is not scaled: a benchmark that
loses tokens has failed.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

from everserve.config.base import Flag
from everserve.config.cluster import MAX_RANKS
from everserve.errors import ConfigError, EverserveError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import analysis, kill, options, processes, report
from everserve_bench.instance import Instance, flags_for
from everserve_bench.load import Ask, Load, make_asks
from everserve_bench.scenario import Result, Scenario, check_context
from everserve_bench.subject import Subject
from everserve_bench.tables import Table, bars, exactness, text

_TIMEOUT_S = 300.0
_BIN_S = 0.25
_COLUMNS = [
    ("devices", lambda row: f"{row['devices_before']} -> {row['devices']}"),
    ("took", text("took_s", ".2f", " s")),
    ("largest gap", text("largest_gap_ms", ".1f", " ms")),
    ("gaps before (median, p99, max)", lambda row: ", ".join(f"{gap:.1f}" for gap in row["gaps_before_ms"]) + " ms"),
    ("tokens/s before", text("tokens_per_s_before", ".0f")),
    ("after", text("tokens_per_s", ".0f")),
]


class Scale(Scenario, frozen=True, kw_only=True):
    """More and fewer devices under running streams. Largest gaps and tokens/s.

    Exit status 1 if a stream lost a token or got a different one.
    """

    NAME: ClassVar[str] = "scale"

    sizes: Annotated[
        tuple[int, ...],
        Flag(
            "Numbers of devices, one after the other; each has an attention and an expert worker.",
            parse=options.numbers,
        ),
    ] = (2, 4, 8, 3)
    num_streams: Annotated[int, options.STREAMS] = 8
    num_prompt: Annotated[int, options.PROMPT] = 32
    max_tokens: Annotated[int, options.TOKENS] = 400
    stay_s: Annotated[float, Flag("Seconds at each size.", min=0.5)] = 5.0
    spares: Annotated[int | None, options.SPARES] = None
    kv_log: Annotated[str | None, options.KV_LOG] = None

    def check(self) -> None:
        if len(self.sizes) < 2 or min(self.sizes) < 1 or 2 * max(self.sizes) > MAX_RANKS:
            raise ConfigError(f"--sizes: two or more numbers from 1 to {MAX_RANKS // 2}: 2,4,8,3")

    def flags(self, served: Subject) -> tuple[str, ...]:
        first, most = self.sizes[0], max(self.sizes)
        flags = flags_for(
            served,
            num_attention=first,
            num_expert=first,
            num_streams=self.num_streams,
            longest=self.num_prompt + self.max_tokens,
            spares=self.spares,
            kv_log=self.kv_log,
        )
        return (*flags, "--devices", str(first), "--max-workers", str(2 * most))

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        check_context(served, self.num_prompt + self.max_tokens, f"--tokens {self.max_tokens}")
        asks = make_asks(self.num_streams, self.num_prompt, self.max_tokens, served.vocab_size)
        steal = report.Steal()
        with contextlib.closing(Instance(served.model, self.flags(served))) as instance:
            progress.begin(self.NAME, total=1 + len(self.sizes))
            expected = kill.undisturbed(instance.server, asks)
            progress.advance()
            found = kill.run(_scale_under_load(instance.server, self, asks, expected, progress))
        yield {**found, "stolen": steal.share()}

    @staticmethod
    def is_passed(result: Result) -> bool:
        return not result["num_wrong"] and not result["errors"]

    @staticmethod
    def show(result: Result) -> Iterator[Table | str]:
        title = f"Scaling under {result['settings']['num_streams']} streams: {result['model']}"
        yield Table(title, _COLUMNS, result["changes"])
        yield f"tokens/s over time: {bars(result['series']['tokens_per_s'])}"
        yield from exactness(result)


@dataclass(frozen=True)
class Change:
    """From one size to the next, as clients saw it."""

    devices_before: int
    devices: int
    asked_s: float  # after the beginning of the load
    took_s: float  # until there were exactly the workers that were asked for
    largest_gap_ms: float  # of any stream, from the request until then
    gaps_before_ms: list[float]  # median, 99th percentile and largest, in the stretch before
    tokens_per_s_before: float
    tokens_per_s: float  # in the stretch after


async def _scale_under_load(
    server: LocalServer, settings: "Scale", asks: list[Ask], expected: list[list[int]], progress: Progress
) -> Result:
    await processes.wait_whole(server, timeout_s=_TIMEOUT_S)
    load = Load(server, asks)
    await load.flow()
    begin_s = time.perf_counter()
    marks: list[tuple[float, float]] = []  # of each change: asked, and done
    await asyncio.sleep(settings.stay_s)
    progress.advance()
    for size in settings.sizes[1:]:
        asked_s = time.perf_counter()
        await asyncio.to_thread(processes.post, server, "/cluster/scale", {"devices": size})
        marks.append((asked_s, await _wait_for(server, size)))
        await asyncio.sleep(settings.stay_s)
        progress.advance()
    end_s = time.perf_counter()
    await load.finish()
    changes = _changes(settings.sizes, settings.stay_s, load.arrivals_s, begin_s, marks)
    series = analysis.series(load.arrivals_s, begin_s, 0.0, end_s - begin_s, _BIN_S)
    return {"changes": [asdict(one) for one in changes], "series": asdict(series), **load.outcome(expected)}


def _changes(
    sizes: Sequence[int],
    stay_s: float,
    arrivals_s: list[list[float]],
    begin_s: float,
    marks: list[tuple[float, float]],
) -> list[Change]:
    found = []
    calm_s = begin_s  # the end of the change before
    for (before, after), (asked_s, done_s) in zip(itertools.pairwise(sizes), marks, strict=True):
        gaps = [analysis.largest_gap(stream, asked_s, done_s - asked_s) for stream in arrivals_s]
        quiet = sorted(gap for stream in arrivals_s for gap in analysis.gaps_between(stream, calm_s, asked_s))
        found.append(
            Change(
                devices_before=before,
                devices=after,
                asked_s=round(asked_s - begin_s, 3),
                took_s=round(done_s - asked_s, 3),
                largest_gap_ms=_ms(max((gap for gap in gaps if gap is not None), default=0.0)),
                gaps_before_ms=[_ms(quiet[int(share * (len(quiet) - 1))]) for share in (0.5, 0.99, 1.0)]
                if quiet
                else [],
                tokens_per_s_before=_rate(arrivals_s, calm_s, asked_s),
                tokens_per_s=_rate(arrivals_s, done_s, done_s + stay_s),
            )
        )
        calm_s = done_s
    return found


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def _rate(arrivals_s: list[list[float]], begin_s: float, end_s: float) -> float:
    return round(analysis.rate(arrivals_s, begin_s, end_s), 1)


async def _wait_for(server: LocalServer, size: int) -> float:
    """Until there are exactly these workers, all ready; returns when that was seen."""
    deadline = time.perf_counter() + _TIMEOUT_S
    while time.perf_counter() < deadline:
        view = await asyncio.to_thread(processes.cluster, server)
        roles = Counter(role for worker in view["workers"] for role in worker["roles"])
        if processes.is_whole(view) and roles == {"attention": size, "expert": size}:
            return time.perf_counter()
        await asyncio.sleep(0.02)
    raise EverserveError(f"the server has not scaled to {size} in {_TIMEOUT_S:.0f} s: {view}")
