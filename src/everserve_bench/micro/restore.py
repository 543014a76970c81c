"""A stream loses its worker: how long until its next token, and at what price?

    log         its KV is copied from the log of the lost worker, verified on arrival, into another worker's pool
    parallel    one prefill over prompt and tokens
    sequential  prompt and tokens one after the other, as they were computed before

On a GPU there are two logs: `anchor`, the lost worker's pool itself, copied device to device, and `mirror`, in host
memory. One token after the other takes long there: only short streams, and each only once.

Engines in this process, with all experts, on a CPU on one thread (a restoring worker shares its machine with others):
what is measured is the worker's own part, from the moment it is given the stream to the next token. The lost worker is
indistinguishable from a real one by its log. All ways must give the same next token.

Bytes moved: KV that is read from the log, or what the experts' rows would be on the wire between workers (each token's
row to at least one expert worker, and top-k rows back, in each layer).
"""

import contextlib
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from everserve.config.base import Flag
from everserve.model.bundled import DEMO_MODEL
from everserve.progress import Progress
from everserve_bench import options, report
from everserve_bench.scenario import Result, Scenario
from everserve_bench.subject import Subject, is_for_gpu
from everserve_bench.tables import Cell, Row, Table, both, text

if TYPE_CHECKING:
    from everserve_bench.micro.restore_stage import Sample, Stage, Way, Workers  # what they import is slow: torch

POINTS = (64, 128, 256, 512, 1024, 2048, 4096)
GPU_POINTS = (*POINTS, 8192)
GPU_MOST_SEQUENTIAL = 2048
SEQUENTIAL = "sequential"
_BLOCK = 64  # tokens: a whole number of blocks on any device


class Restore(Scenario, frozen=True, kw_only=True):
    """A lost stream goes on, in three ways. From the log, by one prefill, or token by token, at several lengths.

    Exit status 1 if they did not all give the same next token.
    """

    NAME: ClassVar[str] = "restore"

    points: Annotated[
        tuple[int, ...],
        options.on_device(
            "Tokens of the stream at its loss; repeatable.", POINTS, GPU_POINTS, name="point", min=33, max=8192
        ),
    ]
    most_sequential: Annotated[
        int | None,
        Flag("Longer streams are not computed token by token. Default: no limit; on a GPU 2048.", min=0),
    ] = None
    rounds: Annotated[int, options.REPETITIONS] = 5

    @property
    def context(self) -> int:
        """Room for the longest stream and its next token."""
        return -(-(max(self.points) + 1) // _BLOCK) * _BLOCK

    @property
    def longest_sequential(self) -> int | None:
        if self.most_sequential is None and is_for_gpu(self.shape):
            return GPU_MOST_SEQUENTIAL
        return self.most_sequential

    def includes(self, way: str, point: int, round_: int) -> bool:
        """Round 0 is a warm-up."""
        if way != SEQUENTIAL:
            return True
        is_short = self.longest_sequential is None or point <= self.longest_sequential
        return is_short and (not is_for_gpu(self.shape) or round_ == 1)

    def ways(self) -> "dict[str, Way]":
        """The first one is the baseline of the comparison."""
        from everserve_bench.micro.restore_stage import Way  # noqa: PLC0415 (torch)

        again = {"parallel": Way("off", max(self.points)), SEQUENTIAL: Way("off", 1)}
        if is_for_gpu(self.shape):
            return {"anchor": Way("anchor", 2048), "mirror": Way("mirror", 2048), **again}
        return {"log": Way("mirror", 512), **again}

    def told(self) -> Result:
        from everserve_bench.micro.restore_stage import NUM_PROMPT  # noqa: PLC0415 (torch)

        return {**super().told(), "most_sequential": self.longest_sequential, "prompt": NUM_PROMPT}

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        from everserve_bench.micro.restore_stage import Stage  # noqa: PLC0415 (torch)

        ways = self.ways()
        with _workers(served, self) as workers:
            stage = Stage(workers, ways)
            samples: list[Sample] = []
            for found in self.rounds_of(stage, progress):
                samples += found
                yield {
                    "model": f"{served.title}, context {self.context}",
                    "bytes_per_token": stage.bytes_per_token,
                    **summarize(samples, tuple(ways)),
                }

    def rounds_of(self, stage: "Stage", progress: Progress) -> "Iterator[list[Sample]]":
        """What each round brought, in another order each time."""
        ways = {
            (round_, point): [way for way in stage.ways if self.includes(way, point, round_)]
            for round_ in range(self.rounds + 1)
            for point in self.points
        }
        progress.begin(self.NAME, sum(map(len, ways.values())))
        for round_ in range(self.rounds + 1):
            samples = []
            for point in self.points:
                chosen = ways[round_, point]
                with stage.lost(point, seed=round_) as spec:
                    for way in random.Random(f"{round_}/{point}").sample(chosen, len(chosen)):
                        samples.append(stage.restore(spec, way, round_))
                        progress.advance()
            if round_:  # round 0 warms everything up and is thrown away
                yield samples

    @staticmethod
    def is_passed(result: Result) -> bool:
        return bool(result["is_exact"])

    @staticmethod
    def show(result: Result) -> Iterator[Table | str]:
        first, *others = ways = result["ways"]
        rows, rounds = result["points"], result["settings"]["rounds"]
        times = [(f"{way} ms", _of(way, lambda found: both(found["time_ms"], 1))) for way in ways]
        slower = [(f"{way} / {first}", text(f"{way}_is_slower", ".1f", "x")) for way in others]
        title = f"{result['model']}: from the loss of a stream to its next token, medians of {rounds} (worst)"
        yield Table(title, [("tokens", text("tokens")), *times, *slower], rows)
        core = [(f"{way} core ms", _of(way, lambda found: f"{found['compute_ms']['median']:.1f}")) for way in ways]
        moved = [(f"{way} MB", _of(way, lambda found: f"{found['bytes_moved'] / 1e6:.2f}")) for way in ways]
        yield Table("Its price", [("tokens", text("tokens")), *core, *moved], rows)
        flat = [row[first]["time_ms"]["median"] for row in rows]
        yield f"{first}: {min(flat):.1f} to {max(flat):.1f} ms over all lengths (median {median(flat):.1f})"
        yield "the next token is the same in all ways" if result["is_exact"] else "FAILED: the ways disagree"


def _of(way: str, cell: Cell) -> Cell:
    """The cell of one way; a dash where it was not tried at some length."""

    def of_way(row: Row) -> str:
        return cell(row[way]) if way in row else "-"

    return of_way


def summarize(samples: "list[Sample]", ways: tuple[str, ...]) -> Result:
    """Medians and spreads by length and way, and how many times faster the first way is. A way that was not tried at
    some length is not there."""
    rows = []
    for point in sorted({sample.point for sample in samples}):
        row: dict[str, Any] = {"tokens": point}
        for way in ways:
            found = [sample for sample in samples if (sample.point, sample.way) == (point, way)]
            if not found:
                continue
            row[way] = {
                "time_ms": report.spread([sample.time_ms for sample in found]),
                "compute_ms": report.spread([sample.compute_ms for sample in found]),
                "bytes_moved": found[0].bytes_moved,
            }
            if way != ways[0]:
                row[f"{way}_is_slower"] = row[way]["time_ms"]["median"] / row[ways[0]]["time_ms"]["median"]
        rows.append(row)
    tokens: dict[tuple[int, int], set[int]] = {}
    for sample in samples:
        tokens.setdefault((sample.point, sample.round), set()).add(sample.token)
    return {"ways": list(ways), "points": rows, "is_exact": all(len(found) == 1 for found in tokens.values())}


@contextlib.contextmanager
def _workers(served: Subject, settings: Restore) -> "Iterator[Workers]":
    if is_for_gpu(settings.shape):
        from everserve_bench.micro.restore_gpu import GpuWorkers  # noqa: PLC0415 (kernels)

        yield GpuWorkers(served.model, settings.context)
        return
    from everserve_bench.micro.restore_cpu import CpuWorkers  # noqa: PLC0415 (torch)

    with tempfile.TemporaryDirectory(prefix="everserve-") as directory:
        yield CpuWorkers(longer_context(Path(directory), settings.context), settings.context)


def longer_context(directory: Path, context: int) -> str:
    """The bundled model with room for longer streams: rotary embeddings have no end of their own."""
    shutil.copytree(DEMO_MODEL, directory, dirs_exist_ok=True)
    config = report.read_json(directory / "config.json") | {"max_position_embeddings": context}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)
