"""What the balance benchmark found, as a dictionary and as a table."""

import statistics
from pathlib import Path
from typing import Any

from everserve_bench import report

_FIGURES = ("tokens_per_s", "max_over_mean", "p50_ms", "p99_ms", "largest_ms")
_LEGEND = (
    "max/mean: rows of the busiest expert worker of each layer over the mean of all; a layer takes as long as its "
    "busiest worker.\ngaps: times between two tokens of a stream. before, during, after: the moves of the server that "
    "balances; the other one in the same seconds."
)


def summarize(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The rounds, the median of each figure, and what follows from them."""
    phases: dict[str, dict[str, dict[str, float]]] = {}
    for name in ("balanced", "not balanced"):
        for phase in ("before", "during", "after"):
            found = [r["phases"][name][phase] for r in rounds if phase in r["phases"][name]]
            if found:
                phases.setdefault(name, {})[phase] = {key: _median(found, key) for key in _FIGURES}
    shares = [r["hot_share"] for r in rounds if r["hot_share"] is not None]
    largest = [r["phases"]["balanced"].get("during", {}).get("largest_ms") for r in rounds]
    return {
        "phases": phases,
        "hot_share": statistics.mean(shares) if shares else None,
        "ratio_before": _ratio(phases, "before"),
        "ratio_after": _ratio(phases, "after"),
        "largest_gap_while_moving_ms": max((one for one in largest if one is not None), default=None),
        "normal_p99_ms": statistics.median(r["normal_p99_ms"] for r in rounds),
        "num_accepted": sum(d["is_accepted"] for r in rounds for d in r["decisions"]),
        "num_streams_compared": sum(r["num_streams"] for r in rounds),
        "num_inexact": sum(r["num_inexact"] for r in rounds),
        "rounds": rounds,
    }


def is_passed(result: dict[str, Any]) -> bool:
    return bool(result["num_inexact"] == 0 and result["num_accepted"] > 0)


def _ratio(phases: dict[str, dict[str, dict[str, float]]], phase: str) -> float | None:
    """Tokens per second of the server that balances over those of the other one. Before the moves it should be 1: how
    far it is from that says how much the machine varies between the two, and what a ratio afterwards is worth."""
    rates = [phases.get(name, {}).get(phase, {}).get("tokens_per_s") for name in ("balanced", "not balanced")]
    return rates[0] / rates[1] if rates[0] and rates[1] else None


def _median(found: list[dict[str, Any]], key: str) -> float:
    values = [one[key] for one in found if one[key] is not None]
    return statistics.median(values) if values else float("nan")


def show(result: dict[str, Any], path: Path) -> None:
    settings, share = result["settings"], result["hot_share"]
    print(
        f"skew: streams of {settings['words']} tokens; the busiest eighth of a layer's experts gets "
        + (f"{share:.0%} of its rows (evenly: 12%)" if share is not None else "an unknown share of its rows")
    )
    setup = f"{settings['num_attention']} attention and {settings['num_expert']} expert workers"
    if num_devices := settings.get("tensor_parallel"):
        setup = f"divided over {num_devices} devices, one of which is lost"
    report.print_table(
        f"{settings['num_streams']} streams of skewed tokens; {result['model']}, {setup}; median of rounds",
        ["server", "phase", "tokens/s", "max/mean", "gap p50 ms", "p99 ms", "largest ms"],
        [
            [name, phase, *(f"{found[key]:.{digits}f}" for key, digits in zip(_FIGURES, (1, 2, 1, 1, 1), strict=True))]
            for name, phases in result["phases"].items()
            for phase, found in phases.items()
        ],
    )
    print(_LEGEND)
    for number, round_ in enumerate(result["rounds"], 1):
        for decision in round_["decisions"]:
            word = "accepted" if decision["is_accepted"] else "refused"
            print(f"round {number}, after {decision['since_s']:.1f} s: {word}: {decision['reason']}")
    if result["ratio_before"] is not None and result["ratio_after"] is not None:
        before, after = result["ratio_before"], result["ratio_after"]
        print(
            f"tokens/s, balanced over not balanced: {before:.2f} before the moves (1 but for noise), {after:.2f} after:"
            f" a change by {after / before:.2f}"
        )
    if result["largest_gap_while_moving_ms"] is not None:
        largest, normal = result["largest_gap_while_moving_ms"], result["normal_p99_ms"]
        print(f"largest gap while experts move: {largest:.1f} ms; p99 without balancing: {normal:.1f} ms")
    verdict = "every stream is exact" if not result["num_inexact"] else f"FAILED: {result['num_inexact']} are not exact"
    moved = "" if result["num_accepted"] else "; FAILED: nothing was moved"
    print(f"{result['num_streams_compared']} streams compared with the undisturbed run: {verdict}{moved}")
    print(f"written to {path}")
