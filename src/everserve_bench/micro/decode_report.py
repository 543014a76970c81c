"""What the decode benchmark found, as a table."""

from pathlib import Path
from typing import Any

from everserve_bench import report

_OTHERS = ("ahead_step_ms", "served_ahead_ms")


def show(result: dict[str, Any], path: Path) -> None:
    """A row for each shape and number of streams."""
    report.print_table(
        f"decode of one process, {result['settings']['context']} tokens of context; a copy moves "
        f"{result['bandwidth'] / 1e12:.2f} TB/s",
        [
            *("shape", "streams", "ms per step", "launched ahead", "served"),
            *("tokens/s", "of the memory floor", "transformers ms", "times faster"),
        ],
        [
            [
                f"{row['shape']}, {row['num_layers']} layers",
                str(row["batch"]),
                f"{row['step_ms']:.2f}",
                *(f"{row[name]:.2f}" if row.get(name) else "-" for name in _OTHERS),  # files of old runs have none
                f"{row['tokens_per_s']:,.0f}",
                f"{row['share_of_floor']:.0%}",
                f"{row['baseline_ms']:.1f}" if row["baseline_ms"] else "-",
                f"{row['baseline_ms'] / row['step_ms']:.1f}" if row["baseline_ms"] else "-",
            ]
            for row in result["rows"]
        ],
    )
    for error in dict.fromkeys(row["baseline_error"] for row in result["rows"] if row["baseline_error"]):
        print(f"transformers: {error}")
    print(f"written to {path}")
