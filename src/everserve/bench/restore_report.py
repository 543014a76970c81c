"""What the restore benchmark found: times and prices by length and way, as a dictionary and as tables."""

from pathlib import Path
from statistics import median
from typing import Any

from everserve.bench import report
from everserve.bench.restore_stage import Sample


def summarize(samples: list[Sample], ways: tuple[str, ...]) -> dict[str, Any]:
    """Medians and spreads by length and way, and how many times faster the first way is. A way that was not tried at
    some length is not there."""
    rows = []
    for point in sorted({sample.point for sample in samples}):
        row: dict[str, Any] = {"tokens": point}
        for way in ways:
            found = [sample for sample in samples if (sample.point, sample.way) == (point, way)]
            if not found:
                continue
            row[way] = {
                "time_ms": report.spread([sample.time_ms for sample in found]),
                "compute_ms": report.spread([sample.compute_ms for sample in found]),
                "bytes_moved": found[0].bytes_moved,
            }
            if way != ways[0]:
                row[f"{way}_is_slower"] = row[way]["time_ms"]["median"] / row[ways[0]]["time_ms"]["median"]
        rows.append(row)
    tokens: dict[tuple[int, int], set[int]] = {}
    for sample in samples:
        tokens.setdefault((sample.point, sample.round), set()).add(sample.token)
    return {"ways": list(ways), "points": rows, "is_exact": all(len(found) == 1 for found in tokens.values())}


def show(result: dict[str, Any], path: Path) -> None:
    first, *others = ways = result["ways"]
    rows = result["points"]
    report.print_table(
        f"{result['model']}: from the loss of a stream to its next token, medians of {result['settings']['rounds']}"
        " (worst)",
        ["tokens", *(f"{way} ms" for way in ways), *(f"{way} / {first}" for way in others)],
        [
            [str(row["tokens"]), *(_time(row, way) for way in ways), *(_slower(row, way) for way in others)]
            for row in rows
        ],
    )
    report.print_table(
        "Its price",
        ["tokens", *(f"{way} core ms" for way in ways), *(f"{way} MB" for way in ways)],
        [
            [
                str(row["tokens"]),
                *(f"{row[way]['compute_ms']['median']:.1f}" if way in row else "-" for way in ways),
                *(f"{row[way]['bytes_moved'] / 1e6:.2f}" if way in row else "-" for way in ways),
            ]
            for row in rows
        ],
    )
    flat = [row[first]["time_ms"]["median"] for row in rows]
    print(f"{first}: {min(flat):.1f} to {max(flat):.1f} ms over all lengths (median {median(flat):.1f})")
    print("the next token is the same in all ways" if result["is_exact"] else "FAILED: the ways disagree")
    print(f"written to {path}")


def _time(row: dict[str, Any], way: str) -> str:
    return f"{row[way]['time_ms']['median']:.1f} ({row[way]['time_ms']['max']:.1f})" if way in row else "-"


def _slower(row: dict[str, Any], way: str) -> str:
    slower = row.get(f"{way}_is_slower")
    return f"{slower:.1f}x" if slower is not None else "-"
