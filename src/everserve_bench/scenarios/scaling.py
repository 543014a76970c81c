"""How does recovery grow with the number of running requests, and with how long they are?

A *cell* is a number of streams and the length of their prompts. In each cell one undisturbed run gives the right
answers; then workers are killed under the same load, as in the failover benchmark, except that streams that end after
the kill do not begin again: the large cells take long enough. One server does all cells, small ones first.

A cell that does not fit is a finding, not an error: its streams need more KV than there is, or are refused.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

from everserve.config.base import Flag
from everserve.errors import ConfigError, EverserveError
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import kill, kill_rounds, options, plot
from everserve_bench.incident import Round
from everserve_bench.instance import Instance, flags_for
from everserve_bench.kill_rounds import TITLES
from everserve_bench.load import make_asks
from everserve_bench.scenario import Result, Scenario
from everserve_bench.scenarios import grid
from everserve_bench.scenarios.grid import FAULTS, GridPoint, PointResult
from everserve_bench.subject import Subject
from everserve_bench.tables import Table, medians, text, worst

_COLUMNS = [
    ("context", text("context")),
    ("streams", text("num_streams")),
    ("gap ms", lambda row: worst("gap_ms")(row) or row["why"]),
    ("over p99 ms", worst("excess_ms")),
    ("p50 / p99 ms", medians("normal_p50_ms", "normal_p99_ms")),
    ("from a log", worst("tokens_restored", 0)),
    ("again", worst("tokens_recomputed")),
    ("noticed ms", worst("detected_s", scale=1e3)),
    ("whole s", worst("whole_s")),
    ("inexact", text("inexact")),
    ("harmed", text("others_lost")),
]
_LEGEND = (
    "gap: the largest of any stream that spans the kill or begins within 1 s; over p99: of the times between tokens "
    "before the kill.\nfrom a log: tokens of all streams that moved whose KV was copied; again: of each of them, "
    "computed again.\nwhole: every seat is taken and ready again; inexact: tokens lost or different; harmed: workers "
    "declared gone that were not killed."
)


class Scaling(Scenario, frozen=True, kw_only=True):
    """How recovery grows with streams and their prompts. By the number of running streams and the length of prompts.

    Exit status 1 if a stream was not exact or a kill could not be measured, or if on a GPU a death took another worker
    along. Cells that do not fit are shown as such.
    """

    NAME: ClassVar[str] = "scaling"
    HAS_PLOT: ClassVar[bool] = True
    plot = staticmethod(plot.write_scaling)

    streams: Annotated[
        tuple[int, ...], options.on_device("Concurrent streams; repeatable.", (4, 16), (16, 64, 256), min=1, max=256)
    ]
    contexts: Annotated[
        tuple[int, ...],
        options.on_device("Tokens of each prompt; repeatable.", (128, 1024), (512, 2048, 8192), name="context", min=1),
    ]
    max_tokens: Annotated[
        int,
        Flag(
            "Tokens of each stream, not counting those it gets while other prompts are computed.", name="tokens", min=16
        ),
    ] = 400
    most_tokens: Annotated[int, Flag("Leave out points of the grid whose prompts have more tokens in all.", min=1)] = (
        600_000
    )
    num_attention: Annotated[int, options.ATTENTION_WORKERS] = 2
    num_expert: Annotated[int, options.EXPERT_WORKERS] = 2
    spares: Annotated[int | None, options.SPARES] = None
    kv_log: Annotated[str | None, options.KV_LOG] = None
    rounds: Annotated[int, Flag("Kills of each kind at each point of the grid.", min=1)] = 2
    warm_s: Annotated[float, options.WARM_S] = 2.0

    @property
    def scale(self) -> grid.Scale:
        return grid.scale_of(self.shape)

    def cells(self) -> tuple[list[GridPoint], list[GridPoint]]:
        """Those to measure, and those whose prompts would take too long."""
        per_step = self.num_attention * self.scale.prompt_tokens_per_step
        found = grid.choose(self.streams, self.contexts, self.max_tokens, per_step)
        small = [cell for cell in found if cell.num_prompt_tokens <= self.most_tokens]
        return small, [cell for cell in found if cell not in small]

    def flags(self, served: Subject, measured: list[GridPoint]) -> tuple[str, ...]:
        """The flags of the one server that does all these cells."""
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
            *("--block-size", str(self.scale.block_size)),
        )

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        chosen, left_out = self.cells()
        measured = [cell for cell in chosen if cell.length <= served.max_context]
        if not measured:
            raise ConfigError(
                f"no cell is left within --most-tokens {self.most_tokens} and the context of the {served.title},"
                f" {served.max_context} tokens"
            )
        found = [_too_long(cell, served) for cell in chosen if cell not in measured]
        for one in self._points(served, measured, progress):
            found.append(one)
            yield {"left_out": [asdict(cell) for cell in left_out], **summarize(found)}

    def _points(self, served: Subject, measured: list[GridPoint], progress: Progress) -> Iterator[PointResult]:
        """All in turn. A server that is lost at one is started again for the next."""
        steps = 1 + len(FAULTS) * self.rounds
        with contextlib.closing(Instance(served.model, self.flags(served, measured))) as instance:
            kv_tokens = _kv_tokens(instance.server, self.scale.block_size)
            progress.begin(self.NAME, total=len(measured) * steps)
            for i, cell in enumerate(measured):
                yield self._point(instance.server, served, cell, kv_tokens, progress)
                progress.update((i + 1) * steps)
                if instance.server.process is None or instance.server.process.poll() is not None:
                    instance.restart()

    def _point(
        self, server: LocalServer, served: Subject, cell: GridPoint, kv_tokens: int, progress: Progress
    ) -> PointResult:
        """A failure is a finding about this point and this fault; the benchmark goes on with the next."""
        found = PointResult(cell, misfits=grid.weigh(cell, self.scale.block_size, kv_tokens, self.num_attention))
        if set(found.misfits) == set(FAULTS):
            return found
        note = f"{cell.num_streams} streams of {cell.context}"
        asks = make_asks(cell.num_streams, cell.context, cell.max_tokens, served.vocab_size)
        try:
            expected = kill.undisturbed(server, asks)
        except kill.Refused as refusal:
            found.misfits = dict.fromkeys(FAULTS, str(refusal))
            return found
        except (EverserveError, OSError) as error:
            found.failures = dict.fromkeys(FAULTS, str(error))
            return found
        progress.advance(note)
        for i in range(self.rounds):
            for fault, rank in kill.victims(i, self.num_attention, self.num_expert).items():
                if fault not in found.misfits and fault not in found.failures:
                    try:
                        killed = kill.kill_worker(server, fault, rank, asks, expected, self.warm_s, repeats=False)
                        found.rounds.append(killed)
                    except (EverserveError, OSError) as error:
                        found.failures[fault] = str(error)
                progress.advance(note)
        return found

    @staticmethod
    def is_passed(result: Result) -> bool:
        """A cell that does not fit is no failure."""
        return kill_rounds.is_passed(result) and not result["num_failures"]

    @staticmethod
    def show(result: Result) -> Iterator[Table | str]:
        settings = result["settings"]
        setup = f"{result['model']}, {settings['num_attention']} attention and {settings['num_expert']} expert workers"
        for fault in FAULTS:
            title = f"SIGKILL to an {TITLES[fault]}; {setup}; kills in each cell: {settings['rounds']}; median (worst)"
            yield Table(title, _COLUMNS, [_row(cell, fault) for cell in result["cells"]])
        yield _LEGEND
        yield from _remarks(result)
        yield kill_rounds.survivors(result)
        yield kill_rounds.exactness(result)


def summarize(found: Sequence[PointResult]) -> Result:
    """The cells, in the order of the table, and the verdict over all of them."""
    ordered = sorted(found, key=lambda one: (one.cell.context, one.cell.num_streams))
    totals = kill_rounds.summarize([round_ for one in found for round_ in one.rounds])
    del totals["faults"]  # of cells that have nothing in common
    return {
        "cells": [_of_cell(one) for one in ordered],
        **totals,
        "num_failures": sum(len(one.failures) for one in found),
    }


def _of_cell(found: PointResult) -> Result:
    of_faults = {fault: kill_rounds.of_fault([r for r in found.rounds if r.fault == fault]) for fault in FAULTS}
    return {
        **asdict(found.cell),
        "faults": {fault: one for fault, one in of_faults.items() if one},
        "does_not_fit": found.misfits,
        "failures": found.failures,
        "rounds": [_brief(round_) for round_ in found.rounds],
    }


def _brief(round_: Round) -> dict[str, Any]:
    """Without what is only for a picture of one kill."""
    return {name: value for name, value in asdict(round_).items() if name != "series"}


def _too_long(cell: GridPoint, served: Subject) -> PointResult:
    reason = f"a stream has {cell.length} tokens, the model's context is {served.max_context}"
    return PointResult(cell, misfits=dict.fromkeys(FAULTS, reason))


def _kv_tokens(server: LocalServer, block_size: int) -> int:
    """For how many tokens an attention worker has KV."""
    ready = [event for event in server.events() if event["event"] == "worker_became_ready" and event["num_blocks"]]
    return min(int(event["num_blocks"]) for event in ready) * block_size


def _row(cell: dict[str, Any], fault: str) -> dict[str, Any]:
    head = {"context": cell["context"], "num_streams": cell["num_streams"]}
    found = cell["faults"].get(fault)
    if found is None:
        return {**head, "why": "FAILED" if fault in cell["failures"] else "does not fit"}
    return {**head, **found, "inexact": found["num_lost"] + found["num_different"]}


def _remarks(result: dict[str, Any]) -> list[str]:
    """Why cells have no figures, one line each."""
    lines = []
    for cell in result["cells"]:
        title = f"{cell['num_streams']} streams of {cell['context']}"
        both_same = len(set(cell["does_not_fit"].values())) == 1 and len(cell["does_not_fit"]) == len(FAULTS)
        misfits = {"": cell["does_not_fit"]["expert"]} if both_same else cell["does_not_fit"]
        lines += [f"{title}{fault and f', {TITLES[fault]}'}: does not fit: {why}" for fault, why in misfits.items()]
        lines += [f"{title}, {TITLES[fault]}: FAILED: {why}" for fault, why in cell["failures"].items()]
    left_out = [f"{cell['num_streams']} of {cell['context']}" for cell in result["left_out"]]
    if left_out:
        lines.append(f"left out, because their prompts have more than --most-tokens: {', '.join(left_out)}")
    return lines
