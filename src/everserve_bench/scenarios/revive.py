"""How long until the next token when hardware fails and does not come back, by what is done about it?

A device is gone under running streams, with its one worker: SIGKILL, and the server is told that nothing may start
there.
Redundant experts, repair from a source, a mask, a role switch that streams wait for and one behind a mask; and an
attention worker whose streams others continue. (revive_variants.py: which variant on which server.) Each is broken into
the phases that the paper's Table 1 has, taken from the server's events (revived.py).

The baseline, in the same run and under the same load, is a restart of everything. Every stream is compared, token by
token, with the same request undisturbed, up to the first token that is marked as computed under a mask.
"""

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

from everserve.config.base import Flag
from everserve.errors import ConfigError, EverserveError
from everserve.progress import Progress
from everserve_bench import kill, kill_rounds, options, report, restart, revive_loss
from everserve_bench.instance import Instance, flags_for
from everserve_bench.kill_rounds import spreads
from everserve_bench.load import Ask, make_asks
from everserve_bench.revive_variants import (
    NUM_ATTENTION,
    NUM_EXPERT,
    RESTART,
    VARIANTS,
    Variant,
    choose,
    flags_of,
)
from everserve_bench.revived import PHASES, Round, Seen
from everserve_bench.scenario import Result, Scenario, check_context
from everserve_bench.subject import Subject, is_for_gpu
from everserve_bench.tables import Table, medians, text, worst

TITLES = {variant.name: variant.title for variant in VARIANTS} | {RESTART: "restart of everything (baseline)"}
_FIGURES = ("background_gap_ms", "lifted_s", "redundant_s", "whole_s", "stolen")
_PHASES = [
    ("what is done", text("title")),
    *((phase, medians(phase)) for phase in PHASES),
    ("next token", worst("next")),
]
_CLIENTS = [
    ("what is done", text("title")),
    ("touched: next token", worst("touched_next")),
    ("largest gap", worst("touched_gap")),
    ("untouched: next token", worst("untouched_next")),
    ("largest gap", worst("untouched_gap")),
    ("restart", text("restart_is_longer", ".0f", "x longer")),
]
_BEHIND = [
    ("what is done", text("title")),
    ("longest pause ms", worst("background_gap_ms")),
    ("of moved streams ms", worst("moved_gap")),
    ("exact again s", worst("lifted_s", 2)),
    ("redundant s", worst("redundant_s", 2)),
    ("whole s", worst("whole_s", 2)),
    ("marked", lambda row: f"{row['marked_per_stream']:.1f}" if row["marked_per_stream"] else ""),
]
_LEGEND = """\
A device is gone with its one worker. Phases follow each other up to the next token of the last stream that waits; one
that is not on the way there is empty. The first table has medians; they need not add up to the median of the sum.
touched: streams that need a lost expert (all), or whose attention worker is lost; untouched: the others.
behind it: the longest pause of any stream after that, while experts are loaded or a worker changes its role.
exact again: the mask is lifted; redundant: every expert has all its places; whole: after the device has returned."""


@dataclass
class _Found:
    """So far."""

    rounds: list[Round] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)  # variant, and why it could not be measured


class Revive(Scenario, frozen=True, kw_only=True):
    """A device is gone for good under running streams. Phases up to the next token, with redundant experts, repair, a
    mask, a role switch in the foreground and in the background; beside it, a full restart.

    Exit status 1 if a token was lost, or different without a mark, if a variant could not be measured, or if on a GPU a
    worker of another device was harmed.
    """

    NAME: ClassVar[str] = "revive"

    variants: Annotated[
        tuple[str, ...],
        Flag(
            "Only these; repeatable: shadows, attention, repair, mask, switch, mask-switch. Default: all.",
            name="variant",
        ),
    ] = ()
    num_streams: Annotated[int, options.STREAMS] = 8
    num_prompt: Annotated[int, options.PROMPT] = 32
    max_tokens: Annotated[int, options.TOKENS] = 256
    spares: Annotated[int | None, options.SPARES] = None
    kv_log: Annotated[str, options.KV_LOG] = "mirror"  # in host memory, which outlives devices
    serve: Annotated[tuple[str, ...], options.SERVE] = ()
    rounds: Annotated[int, Flag("Losses of each kind.", min=1)] = 8
    baseline_rounds: Annotated[int, options.BASELINE_ROUNDS] = 3
    warm_s: Annotated[float, options.WARM_S] = 1.0

    def check(self) -> None:
        choose(self.variants)

    def flags(self, served: Subject, variant: Variant) -> tuple[str, ...]:
        flags = flags_for(
            served,
            num_attention=NUM_ATTENTION,
            num_expert=NUM_EXPERT,
            num_streams=self.num_streams,
            longest=self.num_prompt + self.max_tokens,
            spares=self.spares,
            kv_log=self.kv_log,
        )
        alone = ("--devices", str(NUM_ATTENTION + NUM_EXPERT)) if is_for_gpu(self.shape) else ()  # on CPUs each is
        lost = ("--map-experts", "off")  # with the device, which is gone a moment after the process that is killed
        return (*flags, *flags_of(variant, served.num_experts), *alone, *lost, "--enable-chaos", *self.serve)

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        check_context(served, self.num_prompt + self.max_tokens, f"--tokens {self.max_tokens}")
        if served.num_experts < NUM_EXPERT:
            raise ConfigError(f"--shape {self.shape}: it has {served.num_experts} experts per layer")
        workers = {"num_attention": NUM_ATTENTION, "num_expert": NUM_EXPERT}
        for found in self._losses(served, progress):
            yield workers | summarize(found.rounds, found.failures)

    def _losses(self, served: Subject, progress: Progress) -> Iterator[_Found]:
        """Variants with the same flags share a server, in turn; the first one is also restarted. The right answers are
        those of the first server: they do not depend on where experts are."""
        variants = choose(self.variants)
        asks = make_asks(self.num_streams, self.num_prompt, self.max_tokens, served.vocab_size)
        expected: list[list[int]] = []
        found = _Found()
        num_baseline = self.baseline_rounds
        progress.begin(self.NAME, total=1 + len(variants) * self.rounds + num_baseline)
        for flags, same in itertools.groupby(variants, key=lambda variant: self.flags(served, variant)):
            with contextlib.closing(Instance(served.model, flags)) as instance:
                if not expected:
                    expected = kill.undisturbed(instance.server, asks)
                    progress.advance()
                for i, variant in itertools.product(range(self.rounds), tuple(same)):
                    if i > 0 and variant.needs_new_server:
                        instance.restart()
                    self._lose(instance, variant, i, asks, expected, found)
                    progress.advance(variant.title)
                    yield found
                for _ in range(num_baseline):
                    again = restart.restart_under_load(instance, asks, expected, self.warm_s)
                    found.rounds.append(revive_loss.judge_restart(again, instance.server.events()))
                    progress.advance("restart")
                    yield found
                num_baseline = 0

    def _lose(
        self,
        instance: Instance,
        variant: Variant,
        nth: int,
        asks: list[Ask],
        expected: list[list[int]],
        found: _Found,
    ) -> None:
        """A failure is a finding about this variant; the next round begins with a new server."""
        try:
            found.rounds.append(revive_loss.lose(instance.server, variant, nth, asks, expected, self.warm_s))
        except (EverserveError, OSError) as error:
            found.failures.append((variant.name, str(error)))
            instance.restart()

    @staticmethod
    def is_passed(result: Result) -> bool:
        return kill_rounds.is_passed(result) and not result["failures"]

    @staticmethod
    def show(result: Result) -> Iterator[Table | str]:
        settings = result["settings"]
        rows = {name: _row(name, found) for name, found in result["variants"].items()}
        workers = f"{result['num_attention']} attention and {result['num_expert']} expert workers"
        setup = f"{result['model']}: {settings['num_streams']} streams, {workers}"
        losses = f"{settings['rounds']} losses of each kind; ms from the fault to the next token"
        yield Table(f"{setup}; {losses}", _PHASES, list(rows.values()))
        yield Table("What clients saw: ms, median (worst)", _CLIENTS, list(rows.values()))
        behind = [row for name, row in rows.items() if name != RESTART]
        yield Table("Behind it: median (worst)", _BEHIND, behind)
        yield _LEGEND
        yield from (f"{TITLES[failure['variant']]}: FAILED: {failure['why']}" for failure in result["failures"])
        verdict = "every stream is exact" if result["is_exact"] else "FAILED: tokens were lost or changed"
        yield (
            f"{result['num_streams_compared']} streams, {result['num_tokens_compared']} tokens compared with the"
            f" undisturbed run, {result['num_marked']} more are marked: {result['num_lost']} lost,"
            f" {result['num_different']} different: {verdict}"
        )


def _row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """What the tables need of a variant, side by side."""
    seen = {
        f"{group}_{short}": found[group][figure]
        for group in ("touched", "untouched", "moved")
        for short, figure in (("next", "next_last_ms"), ("gap", "gap_ms"))
        if figure in found[group]
    }
    return {**found, **found["phases_ms"], **seen, "title": TITLES[name], "next": found["touched"]["next_last_ms"]}


# -- over rounds ---------------------------------------------------------------------------------


def summarize(rounds: Sequence[Round], failures: Sequence[tuple[str, str]]) -> Result:
    """Per variant the spread of every figure over its rounds, and how many times longer a restart is."""
    variants: dict[str, dict[str, Any]] = {}
    for name in TITLES:
        same = [round_ for round_ in rounds if round_.variant == name]
        if same:
            variants[name] = _of_variant(same)
    restart = variants.get(RESTART)
    for name, found in variants.items():
        if restart is not None and name != RESTART:
            base, own = restart["touched"]["next_last_ms"], found["touched"]["next_last_ms"]
            found["restart_is_longer"] = base["median"] / own["median"]
    return {
        "variants": variants,
        "failures": [{"variant": name, "why": why} for name, why in failures],
        "num_streams_compared": sum(round_.num_streams for round_ in rounds),
        "num_tokens_compared": sum(round_.num_tokens - round_.num_marked for round_ in rounds),
        "num_marked": sum(round_.num_marked for round_ in rounds),
        "num_lost": sum(round_.num_lost for round_ in rounds),
        "num_different": sum(round_.num_different for round_ in rounds),
        "is_exact": not any(round_.num_lost or round_.num_different for round_ in rounds),
        "others_lost": sum(round_.others_lost for round_ in rounds),
        "rounds": [asdict(round_) for round_ in rounds],
    }


def _of_variant(rounds: Sequence[Round]) -> dict[str, Any]:
    values = {phase: [round_.phases_ms[phase] for round_ in rounds] for phase in PHASES}
    phases = {phase: [value for value in found if value is not None] for phase, found in values.items()}
    return {
        "rounds": len(rounds),
        "phases_ms": {phase: report.spread(found) for phase, found in phases.items() if found},
        "touched": _of_seen([round_.touched for round_ in rounds]),
        "untouched": _of_seen([round_.untouched for round_ in rounds]),
        "moved": _of_seen([round_.moved for round_ in rounds]),
        **spreads(rounds, _FIGURES),
        "marked_per_stream": statistics.mean(round_.num_marked / round_.num_streams for round_ in rounds),
        "num_lost": sum(round_.num_lost for round_ in rounds),
        "num_different": sum(round_.num_different for round_ in rounds),
    }


def _of_seen(groups: Sequence[Seen]) -> dict[str, Any]:
    return {"num": sum(group.num for group in groups)} | spreads(groups, ("next_median_ms", "next_last_ms", "gap_ms"))
