"""What `bench revive` found: medians and worst cases over rounds, as a dictionary and as tables."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everserve.bench import report
from everserve.bench.failover_report import both
from everserve.bench.on_gpu import is_for_gpu
from everserve.bench.revive_variants import RESTART, VARIANTS
from everserve.bench.revived import PHASES, Round, Seen

TITLES = {variant.name: variant.title for variant in VARIANTS} | {RESTART: "restart of everything (baseline)"}
_FIGURES = ("background_gap_ms", "lifted_s", "redundant_s", "whole_s", "stolen")

_LEGEND = """\
A device is gone with its one worker. Phases follow each other up to the next token of the last stream that waits; one
that is not on the way there is empty. The first table has medians; they need not add up to the median of the sum.
touched: streams that need a lost expert (all), or whose attention worker is lost; untouched: the others.
behind it: the longest pause of any stream after that, while experts are loaded or a worker changes its role.
exact again: the mask is lifted; redundant: every expert has all its places; whole: after the device has returned."""


def summarize(rounds: Sequence[Round], failures: Sequence[tuple[str, str]]) -> dict[str, Any]:
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


def is_passed(result: dict[str, Any]) -> bool:
    """Processes that share a few cores with the whole benchmark may look dead for a moment: no failure there."""
    is_on_gpu = is_for_gpu(result["settings"]["shape"])
    return bool(result["is_exact"]) and not result["failures"] and not (result["others_lost"] and is_on_gpu)


def _of_variant(rounds: Sequence[Round]) -> dict[str, Any]:
    values = {phase: [round_.phases_ms[phase] for round_ in rounds] for phase in PHASES}
    phases = {phase: [value for value in found if value is not None] for phase, found in values.items()}
    return {
        "rounds": len(rounds),
        "phases_ms": {phase: report.spread(found) for phase, found in phases.items() if found},
        "touched": _of_seen([round_.touched for round_ in rounds]),
        "untouched": _of_seen([round_.untouched for round_ in rounds]),
        "moved": _of_seen([round_.moved for round_ in rounds]),
        **_spreads(rounds, _FIGURES),
        "marked_per_stream": statistics.mean(round_.num_marked / round_.num_streams for round_ in rounds),
        "num_lost": sum(round_.num_lost for round_ in rounds),
        "num_different": sum(round_.num_different for round_ in rounds),
    }


def _of_seen(groups: Sequence[Seen]) -> dict[str, Any]:
    return {"num": sum(group.num for group in groups)} | _spreads(groups, ("next_median_ms", "next_last_ms", "gap_ms"))


def _spreads(items: Sequence[object], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of every figure that at least one of them has."""
    values = {name: [getattr(item, name) for item in items] for name in names}
    known = {name: [value for value in found if value is not None] for name, found in values.items()}
    return {name: report.spread(found) for name, found in known.items() if found}


def show(result: dict[str, Any], path: Path) -> None:
    """The phases, what clients saw and what went on behind it, what could not be measured, and the verdict."""
    settings, variants = result["settings"], result["variants"]
    workers = f"{result['num_attention']} attention and {result['num_expert']} expert workers"
    report.print_table(
        f"{result['model']}: {settings['num_streams']} streams, {workers}; {settings['rounds']} losses of each kind; "
        "ms from the fault to the next token",
        ["what is done", *PHASES, "next token"],
        [_phases(name, found) for name, found in variants.items()],
    )
    report.print_table(
        "What clients saw: ms, median (worst)",
        ["what is done", "touched: next token", "largest gap", "untouched: next token", "largest gap", "restart"],
        [_clients(name, found) for name, found in variants.items()],
    )
    report.print_table(
        "Behind it: median (worst)",
        [
            "what is done",
            "longest pause ms",
            "of moved streams ms",
            "exact again s",
            "redundant s",
            "whole s",
            "marked",
        ],
        [_background(name, found) for name, found in variants.items() if name != RESTART],
    )
    print(_LEGEND)
    for failure in result["failures"]:
        print(f"{TITLES[failure['variant']]}: FAILED: {failure['why']}")
    verdict = "every stream is exact" if result["is_exact"] else "FAILED: tokens were lost or changed"
    print(
        f"{result['num_streams_compared']} streams, {result['num_tokens_compared']} tokens compared with the "
        f"undisturbed run, {result['num_marked']} more are marked: {result['num_lost']} lost, "
        f"{result['num_different']} different: {verdict}"
    )
    print(f"written to {path}")


def _phases(name: str, found: dict[str, Any]) -> list[str]:
    phases = [found["phases_ms"].get(phase) for phase in PHASES]
    medians = [f"{phase['median']:.1f}" if phase is not None else "" for phase in phases]
    return [TITLES[name], *medians, both(found["touched"]["next_last_ms"], 1)]


def _clients(name: str, found: dict[str, Any]) -> list[str]:
    groups = [found[group] for group in ("touched", "untouched")]
    figures = [both(group.get(figure), 1) for group in groups for figure in ("next_last_ms", "gap_ms")]
    ratio = f"{found['restart_is_longer']:.0f}x longer" if "restart_is_longer" in found else ""
    return [TITLES[name], *figures, ratio]


def _background(name: str, found: dict[str, Any]) -> list[str]:
    return [
        TITLES[name],
        both(found.get("background_gap_ms"), 1),
        both(found["moved"].get("gap_ms"), 1),
        both(found.get("lifted_s"), 2),
        both(found.get("redundant_s"), 2),
        both(found.get("whole_s"), 2),
        f"{found['marked_per_stream']:.1f}" if found["marked_per_stream"] else "",
    ]
