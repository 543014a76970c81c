"""What do streams see while an instance that is divided over devices loses one after the other, and gets them back?

    N ──lose──> N - 1 ──lose──> ... ──lose──> fewest ──return──> ... ──return──> N

Under running streams, on one server, without a restart. Each change is told from its request until everything is where
it should be: pauses of streams, time until tokens/s are what they stay at, and how many seconds of work were lost. The
baseline, in the same run, is to start a new server with as many devices at each change.

Every stream is compared, token by token, with the same request undisturbed.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

from everserve.config.base import Flag
from everserve.config.cluster import MAX_RANKS
from everserve.errors import ConfigError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import analysis, divided, kill, options, processes, restarted
from everserve_bench.declined import Stage, judge
from everserve_bench.divided import Divided
from everserve_bench.instance import Instance
from everserve_bench.load import Ask, Load
from everserve_bench.restarted import Restarted
from everserve_bench.scenario import Result
from everserve_bench.subject import Subject
from everserve_bench.tables import Table, bars, exactness, text

_BIN_S = 0.25
_COLUMNS = [
    ("devices", lambda row: f"{row['devices_before']} -> {row['devices']}"),
    ("pause ms (p50)", text("pause_ms", ",.1f")),
    ("worst", text("worst_ms", ",.1f")),
    ("peak s", text("peak_s", ".2f")),
    ("settled s", text("took_s", ".2f")),
    ("lost s", text("lost_s", ".2f")),
    ("tokens/s", text("tokens_per_s", ",.0f")),
    ("restart s", text("restart_s", ".2f")),
]
_LEGEND = """\
pause: of each stream the longest time between two tokens around the change. peak: until tokens/s are what they stay at.
lost: how much longer the stage took than its tokens would take at that rate.
restart: a new server with as many devices, from its start until every stream has a token again; in the same run."""


class Decline(Divided, frozen=True, kw_only=True):
    """Devices are lost one after the other and come back. Under running streams: pauses, time to peak, time lost.

    Exit status 1 if a stream lost a token or got a different one.
    """

    NAME: ClassVar[str] = "decline"

    num_devices: Annotated[int, Flag("Devices at first.", name="devices", min=3, max=MAX_RANKS // 2)] = 8
    fewest: Annotated[int, Flag("Devices that are left in the middle.", min=2)] = 2
    stay_s: Annotated[float, Flag("Seconds at each number of devices.", min=1)] = 5.0
    has_baseline: Annotated[bool, Flag("Start new servers with fewer devices, too.", name="baseline")] = True
    kv_log: Annotated[str | None, options.KV_LOG] = None

    def check(self) -> None:
        if not 1 < self.fewest < self.num_devices:
            raise ConfigError(f"--fewest {self.fewest}: between 2 and {self.num_devices - 1}")

    @property
    def sizes(self) -> list[int]:
        """One after the other."""
        down = [*range(self.num_devices, self.fewest - 1, -1)]
        return [*down, *reversed(down[:-1])]

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        asks = self.asks(served)
        anew = range(self.num_devices - 1, self.fewest - 1, -1) if self.has_baseline else ()
        restarts: list[Restarted] = []
        progress.begin(self.NAME, total=len(self.sizes) + len(anew))
        flags = self.flags(served, self.num_devices, self.fewest, self.kv_log)
        with contextlib.closing(Instance(served.model, flags)) as instance:
            expected = kill.undisturbed(instance.server, asks)
            progress.advance("undisturbed")
            stages, seen = kill.run(self._decline(instance.server, asks, expected, progress))
        yield {**summarize(stages, restarts), **seen}
        for num in anew:
            flags = self.flags(served, num, num, self.kv_log)
            restarts.append(restarted.measure(served.model, flags, num, asks, expected, self.stay_s))
            progress.advance(f"a new server with {num} devices")
            yield {**summarize(stages, restarts), **seen}

    async def _decline(
        self, server: LocalServer, asks: list[Ask], expected: list[list[int]], progress: Progress
    ) -> tuple[list[Stage], Result]:
        """What each change did, and what clients saw over all."""
        await processes.wait_whole(server, timeout_s=divided.TIMEOUT_S)
        load = Load(server, asks)
        await load.flow()
        begin_s = time.perf_counter()
        marks: list[tuple[float, float]] = []  # of each change: asked, and settled
        await asyncio.sleep(self.stay_s)
        for before, size in itertools.pairwise(self.sizes):
            asked_s = time.perf_counter()
            await divided.change(server, max(before, size) - 1, is_lost=size < before)
            marks.append((asked_s, await divided.wait_settled(server, size)))
            await asyncio.sleep(self.stay_s)
            progress.advance(f"{before} -> {size}")
        end_s = time.perf_counter()
        await load.finish()
        series = analysis.series(load.arrivals_s, begin_s, 0.0, end_s - begin_s, _BIN_S)
        stages = judge(self.sizes, load.arrivals_s, begin_s, marks, end_s)
        return stages, {"series": asdict(series), **load.outcome(expected)}

    @staticmethod
    def is_passed(result: Result) -> bool:
        return not (result["num_wrong"] or result["errors"] or result["num_inexact_after_restarts"])

    @staticmethod
    def show(result: Result) -> Iterator[Table | str]:
        restart_s = {one["num_devices"]: one["restart_s"] for one in result["restarts"]}
        settings = result["settings"]
        title = f"{result['model']}: devices are lost and come back under {settings['num_streams']} streams"
        yield Table(title, _COLUMNS, [_row(stage, restart_s) for stage in result["stages"]])
        yield _LEGEND
        yield f"tokens/s over time: {bars(result['series']['tokens_per_s'])}"
        line = f"lost by {settings['num_devices'] - settings['fewest']} losses: {result['lost_in_losses_s']:.2f} s"
        if result["lost_by_restarts_s"] is not None:
            line += f"; by as many restarts: {result['lost_by_restarts_s']:.2f} s"
        yield f"{line}; by all changes: {result['lost_s']:.2f} s"
        yield from exactness(result)


def _row(stage: dict[str, Any], restart_s: dict[int, float]) -> dict[str, Any]:
    """A loss beside a restart with as many devices."""
    is_loss = stage["devices"] < stage["devices_before"]
    return {**stage, "restart_s": restart_s.get(stage["devices"]) if is_loss else None}


def summarize(stages: Sequence[Stage], restarts: Sequence[Restarted]) -> Result:
    """Losses are compared with restarts at the same degree."""
    restart_s = {one.num_devices: one.restart_s for one in restarts}
    losses = [stage for stage in stages if stage.devices < stage.devices_before]
    known = [stage for stage in losses if stage.devices in restart_s]
    return {
        "stages": [asdict(stage) for stage in stages],
        "restarts": [asdict(one) for one in restarts],
        "lost_s": round(sum(stage.lost_s for stage in stages), 3),
        "lost_in_losses_s": round(sum(stage.lost_s for stage in losses), 3),
        "lost_by_restarts_s": round(sum(restart_s[stage.devices] for stage in known), 3) if restarts else None,
        "num_inexact_after_restarts": sum(one.num_inexact for one in restarts),
    }
