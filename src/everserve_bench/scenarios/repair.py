"""What do clients see when devices are lost, with their workers, their KV and their experts, next to restarting
everything?

One server has an attention and an expert worker on each of N devices. Under running streams k of them are lost at once:
their processes die, or they are lost with everything in their memory, and then they return at once, or are gone until
all experts have new places on the survivors. Each with enough shadow experts that every expert keeps a place, and with
so few that streams have to wait for the repair. (repair_cases.py: which cases, and on which server.)

The baseline, in the same run and under the same load, is a restart of everything. Every stream is compared, token by
token, with the same request undisturbed.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

from everserve.config.base import Flag
from everserve.config.cluster import MAX_RANKS
from everserve.errors import ConfigError, EverserveError
from everserve.progress import Progress
from everserve_bench import incident, kill, kill_rounds, lose, options, repair_cases, restart
from everserve_bench.instance import Instance, flags_for
from everserve_bench.kill_rounds import spreads
from everserve_bench.load import Ask, make_asks
from everserve_bench.repair_cases import Case
from everserve_bench.repaired import Round
from everserve_bench.scenario import Result, Scenario, check_context
from everserve_bench.subject import Subject, is_for_gpu
from everserve_bench.tables import Row, Table, medians, text, worst


def _copied(found: Row) -> str:
    num_experts = found.get("experts_by_source", {})
    copied = [
        f"{source} {num / 1e6:,.0f}" + (f" ({num_experts[source]:,.0f})" if source in num_experts else "")
        for source, num in found["bytes_by_source"].items()
    ]
    return ", ".join(copied) or "-"


_FIGURES = (
    *("normal_p50_ms", "normal_p99_ms", "gap_ms", "excess_ms", "return_gap_ms", "whole_s", "stolen"),
    *("tokens_per_s_before", "tokens_per_s_during", "tokens_per_s_after", "tokens_per_s_returned"),
)
_REPAIR = ("detected_s", "num_without_place", "planned_s", "first_slot_s", "covered_s", "redundant_s", "paused_s")
_SEEN = [
    ("case", text("case")),
    ("gap ms", worst("gap_ms")),
    ("over p99 ms", worst("excess_ms")),
    ("p50 / p99 ms", medians("normal_p50_ms", "normal_p99_ms")),
    (
        "tokens/s before, during, after",
        medians("tokens_per_s_before", "tokens_per_s_during", "tokens_per_s_after", digits=0),
    ),
    ("at return: gap ms", worst("return_gap_ms")),
    ("tokens/s", medians("tokens_per_s_returned", digits=0)),
    ("inexact", text("inexact")),
    ("restart", text("restart_is_longer", ".0f", "x longer")),
]
_DONE = [
    ("case", text("case")),
    ("shadows", text("num_shadows")),
    ("noticed ms", worst("detected_s", scale=1e3)),
    ("without place", worst("num_without_place", 0)),
    ("covered ms", worst("covered_s", scale=1e3)),
    ("redundant s", worst("redundant_s", 2)),
    ("whole s", worst("whole_s", 2)),
    ("waited ms", worst("paused_s", scale=1e3)),
    ("copied MB (experts)", _copied),
    ("harmed", text("others_lost")),
]
_LEGEND = """\
case: how many devices are lost at once; their processes die, or the device with its memory is lost, or it is gone until
  all is repaired; shadow experts are enough for that, or few.
gap: the largest of any stream until the repair is complete; at return: from the return of devices to full strength.
without place: experts, over all layers; covered: all have one; redundant: all have all their places; whole: all workers
  are there, since the loss or the return; waited: an attention worker, for an expert without a place; copied: by
  source, of one loss; mapped experts are served where a dead worker left them; harmed: workers declared gone on other
  devices."""


@dataclass
class _Found:
    """So far."""

    rounds: list[Round] = field(default_factory=list)
    restarts: list[incident.Round] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)  # case, and why it could not be measured


class Repair(Scenario, frozen=True, kw_only=True):
    """Devices are lost under running streams. Gaps, time to repair, tokens/s; beside it, a full restart.

    Exit status 1 if a stream lost a token or got a different one, if a loss was not repaired, or if on a GPU a worker
    of another device was harmed.
    """

    NAME: ClassVar[str] = "repair"

    num_devices: Annotated[
        int,
        Flag("Devices, with an attention and an expert worker each.", name="devices", min=2, max=MAX_RANKS // 2),
    ] = 8
    lost: Annotated[tuple[int, ...], Flag("Devices lost at once; repeatable.", min=1)] = (1, 2, 4)
    cases: Annotated[
        tuple[str, ...],
        Flag(
            "Only these cases, by parts of their names; repeatable: gone, device-few, 2-processes-enough.", name="case"
        ),
    ] = ()
    num_streams: Annotated[int, options.STREAMS] = 8
    num_prompt: Annotated[int, options.PROMPT] = 32
    max_tokens: Annotated[int, options.TOKENS] = 1500
    spares: Annotated[int | None, options.SPARES] = None
    kv_log: Annotated[str, Flag("`--kv-log` of the server. A mirror outlives a device, an anchor only processes.")] = (
        "mirror"
    )
    serve: Annotated[tuple[str, ...], options.SERVE] = ()
    rounds: Annotated[int, Flag("Losses in each case.", min=1)] = 3
    baseline_rounds: Annotated[int, options.BASELINE_ROUNDS] = 1
    warm_s: Annotated[float, options.WARM_S] = 3.0

    def flags(self, served: Subject, num_shadows: int) -> tuple[str, ...]:
        """The same as --data-parallel-size N --enable-expert-parallel."""
        return (
            *flags_for(
                served,
                num_attention=self.num_devices,
                num_expert=self.num_devices,
                num_streams=self.num_streams,
                longest=self.num_prompt + self.max_tokens,
                spares=self.spares,
                kv_log=self.kv_log,
            ),
            *("--devices", str(self.num_devices), "--shadow-experts", str(num_shadows), "--enable-chaos"),
            *(() if is_for_gpu(self.shape) else ("--weights", "memory")),  # as on a GPU: it has to come from somewhere
            *("--map-experts", "on"),
            *self.serve,
        )

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        check_context(served, self.num_prompt + self.max_tokens, f"--tokens {self.max_tokens}")
        cases, missing = repair_cases.choose(served.num_experts, self.num_devices, self.lost, self.cases)
        if not cases:
            raise ConfigError(f"--case: the fewest shadows possible are enough in {', '.join(map(str, missing))}")
        for found in self._losses(served, cases, progress):
            yield {
                "left_out": [str(case) for case in missing],
                **summarize(found.rounds, found.restarts, found.failures),
            }

    def _losses(self, served: Subject, cases: list[Case], progress: Progress) -> Iterator[_Found]:
        """Cases with as many shadows share a server; the first one is restarted for the baseline. The right answers
        are those of the first server: they do not depend on where experts are. A later one has more shadows, and there
        may be no room for them: that is a finding about its cases.

        After a repair experts are elsewhere, and the next loss may find copies of all. So cases with few shadows begin
        with a server that has lost nothing yet."""
        asks = make_asks(self.num_streams, self.num_prompt, self.max_tokens, served.vocab_size)
        expected: list[list[int]] = []
        found = _Found()
        servers = [(num, list(same)) for num, same in itertools.groupby(cases, key=lambda case: case.num_shadows)]
        progress.begin(self.NAME, total=1 + len(cases) * self.rounds + self.baseline_rounds)
        for num_shadows, same in servers:
            try:
                started = Instance(served.model, self.flags(served, num_shadows))
            except ConfigError as error:
                if not expected:
                    raise
                found.failures += [(str(case), str(error)) for case in same]
                yield found
                continue
            with contextlib.closing(started) as instance:
                if not expected:
                    expected = kill.undisturbed(instance.server, asks)
                    progress.advance()
                is_new = True
                for i, case in itertools.product(range(self.rounds), same):
                    if case.shadows == "few" and not is_new:
                        instance.restart()
                    is_new = False
                    self._lose(instance, case, i, asks, expected, found)
                    progress.advance(str(case))
                    yield found
                for _ in range(self.baseline_rounds if num_shadows == servers[0][0] else 0):
                    found.restarts.append(restart.kill_everything(instance, asks, expected, self.warm_s))
                    progress.advance("restart")
                    yield found

    def _lose(
        self,
        instance: Instance,
        case: Case,
        round_: int,
        asks: list[Ask],
        expected: list[list[int]],
        found: _Found,
    ) -> None:
        """A failure is a finding about this case; the next begins with a new server."""
        devices = repair_cases.devices_to_lose(round_, case.num_lost, self.num_devices)
        try:
            found.rounds.append(lose.lose_devices(instance.server, case, devices, asks, expected, self.warm_s))
        except (EverserveError, OSError) as error:
            found.failures.append((str(case), str(error)))
            instance.restart()

    @staticmethod
    def is_passed(result: Result) -> bool:
        return kill_rounds.is_passed(result) and not result["failures"]

    @staticmethod
    def show(result: Result) -> Iterator[Table | str]:
        settings, cases = result["settings"], result["cases"]
        rows = [
            {**found, "case": name, "inexact": found["num_missing"] + found["num_different"]}
            for name, found in cases.items()
        ]
        devices = f"{settings['num_streams']} streams, {settings['num_devices']} devices with an attention"
        setup = f"{result['model']}: {devices} and an expert worker each; rounds: {settings['rounds']}; median (worst)"
        yield Table(setup, _SEEN, [*rows, *_baseline(result["restart"])])
        yield Table("What the server did: median (worst)", _DONE, rows)
        yield _LEGEND
        yield from (f"{failure['case']}: FAILED: {failure['why']}" for failure in result["failures"])
        if result["left_out"]:
            yield f"left out, because the fewest shadows possible are enough: {', '.join(result['left_out'])}"
        yield kill_rounds.exactness(result, f"{result['num_missing']} lost, {result['num_different']} different: ")


def _baseline(found: Row) -> list[Row]:
    if not found:
        return []
    seen = {name: found[name] for name in ("gap_ms", "excess_ms", "normal_p50_ms", "normal_p99_ms")}
    return [{**seen, "case": "restart (baseline)", "inexact": found["num_lost"] + found["num_different"]}]


# -- over rounds ---------------------------------------------------------------------------------


def summarize(
    rounds: Sequence[Round], restarts: Sequence[incident.Round], failures: Sequence[tuple[str, str]]
) -> Result:
    """Per case the spread of every figure over its rounds, and how many times longer the restart's gap is."""
    restart = kill_rounds.of_fault(restarts)
    cases: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(round_.case for round_ in rounds):
        cases[name] = _of_case([round_ for round_ in rounds if round_.case == name])
        if restart:
            cases[name]["restart_is_longer"] = restart["gap_ms"]["median"] / cases[name]["gap_ms"]["median"]
    compared = [(round_.num_streams, round_.num_tokens, round_.num_missing, round_.num_different) for round_ in rounds]
    compared += [(r.num_streams, r.num_tokens, r.num_lost, r.num_different) for r in restarts]
    return {
        "cases": cases,
        "restart": restart,
        "failures": [{"case": case, "why": why} for case, why in failures],
        "num_streams_compared": sum(one[0] for one in compared),
        "num_tokens_compared": sum(one[1] for one in compared),
        "num_missing": sum(one[2] for one in compared),
        "num_different": sum(one[3] for one in compared),
        "is_exact": not any(one[2] or one[3] for one in compared),
        "others_lost": sum(round_.repair.others_lost for round_ in rounds),
        "rounds": [asdict(round_) for round_ in rounds],
        "restart_rounds": [asdict(round_) for round_ in restarts],
    }


def _of_case(rounds: Sequence[Round]) -> dict[str, Any]:
    first = rounds[0]
    copied: Counter[str] = Counter()
    filled: Counter[str] = Counter()
    for round_ in rounds:
        copied.update(round_.repair.bytes_by_source)
        filled.update(round_.repair.experts_by_source)
    return {
        "rounds": len(rounds),
        **{name: getattr(first, name) for name in ("num_lost", "fault", "shadows", "num_shadows")},
        **spreads(rounds, _FIGURES),
        **spreads([round_.repair for round_ in rounds], _REPAIR),
        "bytes_by_source": {source: num / len(rounds) for source, num in copied.items()},  # of one loss
        "experts_by_source": {source: num / len(rounds) for source, num in filled.items()},
        "others_lost": sum(round_.repair.others_lost for round_ in rounds),
        "num_missing": sum(round_.num_missing for round_ in rounds),
        "num_different": sum(round_.num_different for round_ in rounds),
    }
