"""What the failover benchmark found: medians and worst cases over rounds, as a dictionary and as a table."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everserve.bench import report
from everserve.bench.analysis import median_index
from everserve.bench.incident import Round
from everserve.bench.kill_phases import PHASES
from everserve.bench.on_gpu import is_for_gpu
from everserve.bench.subject import BUNDLED

TITLES = {"expert": "expert worker", "attention": "attention worker", "restart": "all (baseline)"}
_FIGURES = (
    "normal_p50_ms",
    "normal_p99_ms",
    "normal_largest_ms",
    "gap_ms",
    "gap_at_once_ms",
    "excess_ms",
    "whole_s",
    "stolen",
)
_TOLD = (
    *("suspected_s", "detected_s", "rows_replayed", "requests_resumed", "tokens_restored", "tokens_recomputed"),
    "ready_s",
)

_LEGEND = (
    "gap: the largest of any stream that spans the kill or begins before full strength, or within 1 s; at once: within "
    "0.1 s; no kill: the same in the second before.\nwhole: every seat is taken and ready again.\nmilliseconds: of the "
    "stream that waited longest. notice: by the gateway, a peer or the orchestrator. give away: the gateway, to other "
    "workers. arrive: until that worker has ended its step and read them. copy: their KV. step: and the way to the "
    "client."
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


def is_passed(result: dict[str, Any]) -> bool:
    """Every stream was exact, and no survivor harmed. The latter only on a GPU: processes that share a few cores with
    the whole benchmark may look dead for a moment."""
    return bool(result["is_exact"]) and not (result["others_lost"] and _is_on_gpu(result))


def heading(result: dict[str, Any]) -> str:
    """What ran where."""
    settings = result["settings"]
    model = f"{result['model']}: " if _is_on_gpu(result) else ""
    workers = f"{settings['num_attention']} attention and {settings['num_expert']} expert workers"
    return f"{model}{settings['num_streams']} streams, {workers}"


def _is_on_gpu(result: dict[str, Any]) -> bool:
    return is_for_gpu(result["settings"].get("shape", BUNDLED))


def of_fault(rounds: Sequence[Round]) -> dict[str, Any]:
    """Of the rounds of one kind; empty if there are none."""
    if not rounds:
        return {}
    told = [round_.incident for round_ in rounds if round_.incident is not None]
    return {
        "rounds": len(rounds),
        **_spreads(rounds, _FIGURES),
        "median_stream_gap_ms": statistics.median([gap for round_ in rounds for gap in round_.gaps_ms]),
        **_spreads(told, _TOLD),
        "phases_ms": _phases(rounds),
        "others_lost": sum(one.others_lost for one in told),
        "num_lost": sum(round_.num_lost for round_ in rounds),
        "num_different": sum(round_.num_different for round_ in rounds),
        "shown_round": median_index([round_.gap_ms for round_ in rounds]),
    }


def _phases(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    known = {phase: [round_.phases_ms[phase] for round_ in rounds if phase in round_.phases_ms] for phase in PHASES}
    return {phase: report.spread(found) for phase, found in known.items() if found}


def _spreads(items: Sequence[object], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of every figure that at least one of them has."""
    values = {name: [getattr(item, name) for item in items] for name in names}
    known = {name: [value for value in found if value is not None] for name, found in values.items()}
    return {name: report.spread(found) for name, found in known.items() if found}


def show(result: dict[str, Any], path: Path, plot: Path | None) -> None:
    """What clients saw, what the server did, and the verdict."""
    settings, faults = result["settings"], result["faults"]
    report.print_table(
        f"{heading(result)}; {settings['rounds']} rounds, baseline {settings['baseline_rounds']}: median (worst)",
        [
            "SIGKILL to",
            "gap ms",
            "over p99 ms",
            "at once ms",
            "no kill ms",
            "p50 / p99 ms",
            "lost / different",
            "restart",
        ],
        [_seen(fault, found) for fault, found in faults.items()],
    )
    report.print_table(
        "What the server did: median (worst)",
        [
            *("SIGKILL to", "peers noticed ms", "noticed ms", "rows replayed", "requests moved"),
            *("tokens from the log", "recomputed per request", "successor s", "whole s", "others lost"),
        ],
        [_done(fault, found) for fault, found in faults.items()],
    )
    _show_phases(faults)
    print(_LEGEND)
    print(survivors(result))
    lost, different = (sum(found[key] for found in faults.values()) for key in ("num_lost", "num_different"))
    verdict = "every stream is exact" if result["is_exact"] else "FAILED: tokens were lost or changed"
    print(
        f"{result['num_streams_compared']} streams, {result['num_tokens_compared']} tokens compared with the "
        f"undisturbed run: {lost} lost, {different} different: {verdict}"
    )
    print(f"written to {path}" + (f" and {plot}" if plot else "; for the plot: pip install 'everserve[bench]'"))


def _show_phases(faults: dict[str, Any]) -> None:
    rows = [
        [TITLES[fault], *(both(found["phases_ms"].get(phase), 1) for phase in PHASES)]
        for fault, found in faults.items()
        if found.get("phases_ms")  # files of old runs have none
    ]
    if rows:
        title = "Milliseconds from the kill to the next token: median (worst)"
        report.print_table(title, ["SIGKILL to", *PHASES], rows)


def survivors(result: dict[str, Any]) -> str:
    """Whether a worker was harmed that was not killed."""
    if not result["others_lost"]:
        return f"{result['num_kills']} kills: no survivor was harmed"
    verdict = "FAILED" if _is_on_gpu(result) else "the machine is overloaded"
    return f"{result['others_lost']} workers were declared gone although they were not killed: {verdict}"


def _seen(fault: str, found: dict[str, Any]) -> list[str]:
    has_ratio = fault != "restart" and "restart_is_longer" in found
    return [
        TITLES[fault],
        both(found["gap_ms"], 1),
        both(found["excess_ms"], 1),
        both(found["gap_at_once_ms"], 1) if "gap_at_once_ms" in found else "",
        both(found["normal_largest_ms"], 1),
        f"{found['normal_p50_ms']['median']:.1f} / {found['normal_p99_ms']['median']:.1f}",
        f"{found['num_lost']} / {found['num_different']}",
        f"{found['restart_is_longer']:.0f}x longer" if has_ratio else "",
    ]


def _done(fault: str, found: dict[str, Any]) -> list[str]:
    told = {name: found[name] for name in _TOLD if name in found}
    return [
        TITLES[fault],
        both(told.get("suspected_s"), 1, 1e3),
        both(told.get("detected_s"), 1, 1e3),
        both(told.get("rows_replayed"), 0),
        both(told.get("requests_resumed"), 0),
        both(told.get("tokens_restored"), 0),
        both(told.get("tokens_recomputed"), 1),
        both(told.get("ready_s"), 2),
        both(found["whole_s"], 2),
        str(found["others_lost"]) if told else "",
    ]


def both(spread: dict[str, float] | None, digits: int, scale: float = 1) -> str:
    """Median and, in brackets, the worst; nothing if nothing is known."""
    if spread is None:
        return ""
    median, worst = scale * spread["median"], scale * spread["max"]
    return f"{median:.{digits}f} ({worst:.{digits}f})" if median < 1000 else f"{median:.0f} ({worst:.0f})"
