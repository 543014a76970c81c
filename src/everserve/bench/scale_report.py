"""`bench scale` as a table, and tokens per second over time as a line of text."""

from pathlib import Path
from typing import Any

from everserve.bench import report

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 100


def show(result: dict[str, Any], path: Path) -> None:
    columns = ["devices", "took", "largest gap", "gaps before (median, p99, max)", "tokens/s before", "after"]
    rows = [
        [
            f"{change['devices_before']} -> {change['devices']}",
            f"{change['took_s']:.2f} s",
            f"{change['largest_gap_ms']:.1f} ms",
            ", ".join(f"{gap:.1f}" for gap in change["gaps_before_ms"]) + " ms",
            f"{change['tokens_per_s_before']:.0f}",
            f"{change['tokens_per_s']:.0f}",
        ]
        for change in result["changes"]
    ]
    settings = result["settings"]
    title = f"Scaling under {settings['num_streams']} streams: {result['model']}"
    report.print_table(title, columns, rows)
    print(f"tokens/s over time: {bars(result['series']['tokens_per_s'])}")
    verdict = "all exact" if not result["num_wrong"] else f"{result['num_wrong']} NOT EXACT"
    print(f"{result['num_streams']} streams, {result['num_tokens']} tokens: {verdict}")
    for error in result["errors"]:
        print(f"error: {error}")
    print(f"written to {path}")


def bars(values: list[float]) -> str:
    """Several values share a bar where there are many."""
    width = -(-len(values) // _MAX_BARS)
    parts = [values[i : i + width] for i in range(0, len(values), width)] if width else []
    means = [sum(part) / len(part) for part in parts]
    most = max(means, default=0.0) or 1.0
    return "".join(_BARS[round(mean / most * (len(_BARS) - 1))] for mean in means) + f" (most: {most:.0f})"
