"""How does recovery grow with the number of running requests, and with how long they are?

A *cell* is a number of streams and the length of their prompts. In each cell one undisturbed run gives the right
answers; then workers are killed under the same load, as in the failover benchmark, except that streams that end after
the kill do not begin again: the large cells take long enough. One server does all cells, small ones first.

A cell that does not fit is a finding, not an error: its streams need more KV than there is, or are refused.

The JSON is written after each cell: a run that is cut short leaves what it has.
"""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from everserve.bench import grid, kill, plot, report, scaling_report
from everserve.bench.grid import FAULTS, GridPoint, PointResult
from everserve.bench.instance import Instance, flags_for
from everserve.bench.load import Ask, make_asks
from everserve.bench.subject import BUNDLED, Subject, subject
from everserve.errors import ConfigError, EverserveError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    num_attention: int
    num_expert: int
    streams: tuple[int, ...]
    contexts: tuple[int, ...]
    max_tokens: int
    most_tokens: int
    rounds: int
    warm_s: float
    shape: str = BUNDLED
    num_layers: int | None = None
    spares: int | None = None  # None, here and below: as the server does by itself
    kv_log: str | None = None

    def cells(self) -> tuple[list[GridPoint], list[GridPoint]]:
        """Those to measure, and those whose prompts would take too long."""
        per_step = self.num_attention * grid.scale_of(self.shape).prompt_tokens_per_step
        found = grid.choose(self.streams, self.contexts, self.max_tokens, per_step)
        small = [cell for cell in found if cell.num_prompt_tokens <= self.most_tokens]
        return small, [cell for cell in found if cell not in small]

    def flags(self, served: Subject, measured: list[GridPoint]) -> tuple[str, ...]:
        """Of the one server that does all these cells."""
        return (
            *flags_for(
                served,
                num_attention=self.num_attention,
                num_expert=self.num_expert,
                num_streams=max(cell.num_streams for cell in measured),
                longest=max(cell.length for cell in measured),
                spares=self.spares,
                kv_log=self.kv_log,
            ),
            *("--block-size", str(grid.scale_of(self.shape).block_size)),
        )


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether every stream was exact, nothing failed, on a GPU no survivor was harmed."""
    chosen, left_out = settings.cells()
    with subject(settings.shape, settings.num_layers) as served:
        measured = [cell for cell in chosen if cell.length <= served.max_context]
        if not measured:
            raise ConfigError(
                f"no cell is left within --most-tokens {settings.most_tokens} and the context of the {served.title},"
                f" {served.max_context} tokens"
            )
        found = [_too_long(cell, served) for cell in chosen if cell not in measured]
        result: dict[str, Any] = {"model": served.title, "settings": asdict(settings)}
        result["left_out"] = [asdict(cell) for cell in left_out]
        for one in _measure(settings, served, measured):
            found.append(one)
            result |= scaling_report.summarize(found)
            report.keep("scaling", result, out)
    path = report.write("scaling", result, out)
    scaling_report.show(result, path, plot.write_scaling(result, path.with_suffix(".png")))
    return scaling_report.is_passed(result)


def _too_long(cell: GridPoint, served: Subject) -> PointResult:
    reason = f"a stream has {cell.length} tokens, the model's context is {served.max_context}"
    return PointResult(cell, misfits=dict.fromkeys(FAULTS, reason))


def _measure(settings: Settings, served: Subject, measured: list[GridPoint]) -> Iterator[PointResult]:
    """All points of the grid in turn. A server that is lost at one is started again for the next."""
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    with contextlib.ExitStack() as stack:
        flags = settings.flags(served, measured)
        instance = stack.enter_context(contextlib.closing(Instance(served.model, flags)))
        kv_tokens = _kv_tokens(instance.server, grid.scale_of(settings.shape).block_size)
        progress = stack.enter_context(Progress())
        progress.begin("scaling", total=len(measured) * (1 + len(FAULTS) * settings.rounds))
        for i, cell in enumerate(measured):
            yield _measure_cell(settings, instance.server, served, cell, kv_tokens, progress)
            progress.update((i + 1) * (1 + len(FAULTS) * settings.rounds))
            if instance.server.process is None or instance.server.process.poll() is not None:
                instance.restart()


def _measure_cell(
    settings: Settings, server: LocalServer, served: Subject, cell: GridPoint, kv_tokens: int, progress: Progress
) -> PointResult:
    block_size = grid.scale_of(settings.shape).block_size
    found = PointResult(cell, misfits=grid.weigh(cell, block_size, kv_tokens, settings.num_attention))
    if set(found.misfits) == set(FAULTS):
        return found
    asks = make_asks(cell.num_streams, cell.context, cell.max_tokens, served.vocab_size)
    try:
        expected = kill.undisturbed(server, asks)
    except kill.Refused as refusal:
        found.misfits = dict.fromkeys(FAULTS, str(refusal))
        return found
    except (EverserveError, OSError) as error:
        found.failures = dict.fromkeys(FAULTS, str(error))
        return found
    progress.advance(_note(cell))
    for i in range(settings.rounds):
        for fault, rank in kill.victims(i, settings.num_attention, settings.num_expert).items():
            if fault not in found.misfits and fault not in found.failures:
                _kill(found, server, fault, rank, asks, expected, settings.warm_s)
            progress.advance(_note(cell))
    return found


def _kill(
    found: PointResult,
    server: LocalServer,
    fault: str,
    rank: int,
    asks: list[Ask],
    expected: list[list[int]],
    warm_s: float,
) -> None:
    """A failure is a finding about this point and this fault; the benchmark goes on with the next."""
    try:
        found.rounds.append(kill.kill_worker(server, fault, rank, asks, expected, warm_s, repeats=False))
    except (EverserveError, OSError) as error:
        found.failures[fault] = str(error)


def _note(cell: GridPoint) -> str:
    return f"{cell.num_streams} streams of {cell.context}"


def _kv_tokens(server: LocalServer, block_size: int) -> int:
    """For how many tokens an attention worker has KV."""
    ready = [event for event in server.events() if event["event"] == "worker_became_ready" and event["num_blocks"]]
    return min(int(event["num_blocks"]) for event in ready) * block_size
