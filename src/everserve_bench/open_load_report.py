"""`bench load` as a table: one line per rate and variant."""

from pathlib import Path
from typing import Any

from everserve_bench import report


def show(result: dict[str, Any], path: Path) -> None:
    columns = ["requests/s", "variant", "time to first token", "between tokens", "tokens/s", "drained", "refused"]
    rows = [
        [
            f"{point['per_s']:g}",
            point["variant"] + (f" ({point['num_kills']})" if point["num_kills"] else ""),
            _row(point["first_token_ms"]),
            _row(point["between_tokens_ms"]),
            f"{point['tokens_per_s']:.0f}",
            f"{point['drained_s']:.1f} s",
            str(point["num_refused"]),
        ]
        for point in result["points"]
    ]
    settings = result["settings"]
    title = (
        f"Requests at random times, lengths of {settings['trace']} x {settings['scale']:g},"
        f" {settings['duration_s']:g} s per rate: {result['model']} (ms: median, p95, p99)"
    )
    report.print_table(title, columns, rows)
    num_requests = sum(point["num_requests"] for point in result["points"])
    num_failed = sum(point["num_failed"] for point in result["points"])
    verdict = "the same tokens on all variants" if not result["num_different"] else f"{result['num_different']} DIFFER"
    print(f"{num_requests} requests, {num_failed} failed: {verdict}")
    print(f"written to {path}")


def _row(percentiles: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in percentiles) or "-"
