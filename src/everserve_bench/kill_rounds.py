"""Kills, over rounds: medians and worst cases of each kind of fault, and whether all went well."""

import statistics
from collections.abc import Sequence
from typing import Any

from everserve_bench import report
from everserve_bench.analysis import median_index
from everserve_bench.incident import Round
from everserve_bench.kill_phases import PHASES
from everserve_bench.subject import BUNDLED, is_for_gpu

TITLES = {"expert": "expert worker", "attention": "attention worker", "restart": "all (baseline)"}
_FIGURES = (
    *("normal_p50_ms", "normal_p99_ms", "normal_largest_ms", "gap_ms", "gap_at_once_ms", "excess_ms", "whole_s"),
    "stolen",
)
_TOLD = (
    *("suspected_s", "detected_s", "rows_replayed", "requests_resumed", "tokens_restored", "tokens_recomputed"),
    "ready_s",
)


def summarize(rounds: Sequence[Round]) -> dict[str, Any]:
    """Per fault: the spread of every figure over its rounds, and how many times longer the restart's gap is."""
    faults = {fault: of_fault([r for r in rounds if r.fault == fault]) for fault in TITLES}
    faults = {fault: found for fault, found in faults.items() if found}
    restart = faults.get("restart")
    for found in faults.values():
        if restart is not None:
            found["restart_is_longer"] = restart["gap_ms"]["median"] / found["gap_ms"]["median"]
            found["restart_is_longer_worst"] = restart["gap_ms"]["min"] / found["gap_ms"]["max"]
    return {
        "faults": faults,
        "num_streams_compared": sum(round_.num_streams for round_ in rounds),
        "num_tokens_compared": sum(round_.num_tokens for round_ in rounds),
        "is_exact": not any(round_.num_lost or round_.num_different for round_ in rounds),
        "num_kills": sum(round_.incident is not None for round_ in rounds),
        "others_lost": sum(round_.incident.others_lost for round_ in rounds if round_.incident is not None),
    }


def of_fault(rounds: Sequence[Round]) -> dict[str, Any]:
    """The result of the rounds of one kind; empty if there are none."""
    if not rounds:
        return {}
    told = [round_.incident for round_ in rounds if round_.incident is not None]
    return {
        "rounds": len(rounds),
        **spreads(rounds, _FIGURES),
        "median_stream_gap_ms": statistics.median([gap for round_ in rounds for gap in round_.gaps_ms]),
        **spreads(told, _TOLD),
        "phases_ms": _phases(rounds),
        "others_lost": sum(one.others_lost for one in told),
        "num_lost": sum(round_.num_lost for round_ in rounds),
        "num_different": sum(round_.num_different for round_ in rounds),
        "shown_round": median_index([round_.gap_ms for round_ in rounds]),
    }


def _phases(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    known = {phase: [round_.phases_ms[phase] for round_ in rounds if phase in round_.phases_ms] for phase in PHASES}
    return {phase: report.spread(found) for phase, found in known.items() if found}


def spreads(items: Sequence[object], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """The spread of every figure that at least one of them has."""
    values = {name: [getattr(item, name) for item in items] for name in names}
    known = {name: [value for value in found if value is not None] for name, found in values.items()}
    return {name: report.spread(found) for name, found in known.items() if found}


# -- the verdict ---------------------------------------------------------------------------------


def is_passed(result: dict[str, Any]) -> bool:
    """Every stream was exact, and no survivor harmed. The latter only on a GPU: processes that share a few cores with
    the whole benchmark may look dead for a moment."""
    return bool(result["is_exact"]) and not (result["others_lost"] and is_on_gpu(result))


def is_on_gpu(result: dict[str, Any]) -> bool:
    return is_for_gpu(result["settings"].get("shape", BUNDLED))


def survivors(result: dict[str, Any]) -> str:
    """Whether a worker was harmed that was not killed."""
    if not result["others_lost"]:
        return f"{result['num_kills']} kills: no survivor was harmed"
    verdict = "FAILED" if is_on_gpu(result) else "the machine is overloaded"
    return f"{result['others_lost']} workers were declared gone although they were not killed: {verdict}"


def exactness(result: dict[str, Any], more: str = "") -> str:
    verdict = "every stream is exact" if result["is_exact"] else "FAILED: tokens were lost or changed"
    compared = f"{result['num_streams_compared']} streams, {result['num_tokens_compared']} tokens compared"
    return f"{compared} with the undisturbed run: {more}{verdict}"
