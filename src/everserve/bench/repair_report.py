"""What the repair benchmark found: medians and worst cases over rounds, as a dictionary and as a table."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everserve.bench import failover_report, incident, report
from everserve.bench.failover_report import both
from everserve.bench.on_gpu import is_for_gpu
from everserve.bench.repaired import Round

_FIGURES = (
    *("normal_p50_ms", "normal_p99_ms", "gap_ms", "excess_ms", "return_gap_ms", "whole_s", "stolen"),
    *("tokens_per_s_before", "tokens_per_s_during", "tokens_per_s_after", "tokens_per_s_returned"),
)
_REPAIR = ("detected_s", "num_without_place", "planned_s", "first_slot_s", "covered_s", "redundant_s", "paused_s")

_LEGEND = """\
case: how many devices are lost at once; their processes die, or the device with its memory is lost, or it is gone until
  all is repaired; shadow experts are enough for that, or few.
gap: the largest of any stream until the repair is complete; at return: from the return of devices to full strength.
without place: experts, over all layers; covered: all have one; redundant: all have all their places; whole: all workers
  are there, since the loss or the return; waited: an attention worker, for an expert without a place; copied: by
  source, of one loss; mapped experts are served where a dead worker left them; harmed: workers declared gone on other
  devices."""


def summarize(
    rounds: Sequence[Round], restarts: Sequence[incident.Round], failures: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Per case the spread of every figure over its rounds, and how many times longer the restart's gap is."""
    restart = failover_report.of_fault(restarts)
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


def is_passed(result: dict[str, Any]) -> bool:
    """Processes that share a few cores with the whole benchmark may look dead for a moment: no failure there."""
    is_on_gpu = is_for_gpu(result["settings"]["shape"])
    return bool(result["is_exact"]) and not result["failures"] and not (result["others_lost"] and is_on_gpu)


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
        **_spreads(rounds, _FIGURES),
        **_spreads([round_.repair for round_ in rounds], _REPAIR),
        "bytes_by_source": {source: num / len(rounds) for source, num in copied.items()},  # of one loss
        "experts_by_source": {source: num / len(rounds) for source, num in filled.items()},
        "others_lost": sum(round_.repair.others_lost for round_ in rounds),
        "num_missing": sum(round_.num_missing for round_ in rounds),
        "num_different": sum(round_.num_different for round_ in rounds),
    }


def _spreads(items: Sequence[object], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of every figure that at least one of them has."""
    values = {name: [getattr(item, name) for item in items] for name in names}
    known = {name: [value for value in found if value is not None] for name, found in values.items()}
    return {name: report.spread(found) for name, found in known.items() if found}


def show(result: dict[str, Any], path: Path) -> None:
    """What clients saw, what the server did, what could not be measured, and the verdict."""
    settings = result["settings"]
    setup = f"{result['model']}: {settings['num_streams']} streams, {settings['num_devices']} devices with an attention"
    report.print_table(
        f"{setup} and an expert worker each; rounds: {settings['rounds']}; median (worst)",
        [
            *("case", "gap ms", "over p99 ms", "p50 / p99 ms", "tokens/s before, during, after"),
            *("at return: gap ms", "tokens/s", "inexact", "restart"),
        ],
        [_seen(name, found) for name, found in result["cases"].items()] + _restart_row(result),
    )
    report.print_table(
        "What the server did: median (worst)",
        [
            *("case", "shadows", "noticed ms", "without place", "covered ms", "redundant s", "whole s", "waited ms"),
            *("copied MB (experts)", "harmed"),
        ],
        [_done(name, found) for name, found in result["cases"].items()],
    )
    print(_LEGEND)
    for failure in result["failures"]:
        print(f"{failure['case']}: FAILED: {failure['why']}")
    if result["left_out"]:
        print(f"left out, because the fewest shadows possible are enough: {', '.join(result['left_out'])}")
    verdict = "every stream is exact" if result["is_exact"] else "FAILED: tokens were lost or changed"
    print(
        f"{result['num_streams_compared']} streams, {result['num_tokens_compared']} tokens compared with the "
        f"undisturbed run: {result['num_missing']} lost, {result['num_different']} different: {verdict}"
    )
    print(f"written to {path}")


def _seen(name: str, found: dict[str, Any]) -> list[str]:
    return [
        name,
        both(found["gap_ms"], 1),
        both(found["excess_ms"], 1),
        f"{found['normal_p50_ms']['median']:.1f} / {found['normal_p99_ms']['median']:.1f}",
        " / ".join(f"{found[f'tokens_per_s_{when}']['median']:,.0f}" for when in ("before", "during", "after")),
        both(found.get("return_gap_ms"), 1),
        f"{found['tokens_per_s_returned']['median']:,.0f}" if "tokens_per_s_returned" in found else "",
        str(found["num_missing"] + found["num_different"]),
        f"{found['restart_is_longer']:.0f}x longer" if "restart_is_longer" in found else "",
    ]


def _restart_row(result: dict[str, Any]) -> list[list[str]]:
    found = result["restart"]
    if not found:
        return []
    normal = f"{found['normal_p50_ms']['median']:.1f} / {found['normal_p99_ms']['median']:.1f}"
    inexact = str(found["num_lost"] + found["num_different"])
    figures = [both(found["gap_ms"], 1), both(found["excess_ms"], 1), normal]
    return [["restart (baseline)", *figures, "", "", "", inexact, ""]]


def _done(name: str, found: dict[str, Any]) -> list[str]:
    num_experts = found.get("experts_by_source", {})
    copied = [
        f"{source} {num / 1e6:,.0f}" + (f" ({num_experts[source]:,.0f})" if source in num_experts else "")
        for source, num in found["bytes_by_source"].items()
    ]
    return [
        name,
        str(found["num_shadows"]),
        both(found["detected_s"], 1, 1e3),
        both(found["num_without_place"], 0),
        both(found["covered_s"], 1, 1e3),
        both(found["redundant_s"], 2),
        both(found["whole_s"], 2),
        both(found["paused_s"], 1, 1e3),
        ", ".join(copied) or "-",
        str(found["others_lost"]),
    ]
