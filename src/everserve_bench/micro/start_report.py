"""`bench start` as a table."""

from pathlib import Path
from typing import Any

from everserve_bench import report

_CACHES = {"cold": "no kernels compiled before", "warm": "kernels in the cache"}


def show(result: dict[str, Any], path: Path) -> None:
    medians, is_on_gpu = result["medians"], "cold" in result["starts"] or "kernels" in result["medians"]["warm"]
    names = [name for name in medians["warm"] if name != "total"]
    rows = []
    for cache, found in medians.items():
        totals = [start["total"] for start in result["starts"][cache]]
        label = f"{_CACHES[cache]}, " if is_on_gpu else ""
        count = f"{label}{len(totals)} start{'s' * (len(totals) > 1)}"
        rows.append([count, *(f"{found[name]:.2f}" for name in names), f"{found['total']:.2f} ({max(totals):.2f})"])
    settings = result["settings"]
    title = (
        f"{result['model']}: {settings['num_attention']} attention and {settings['num_expert']} expert workers;"
        " seconds from `everserve serve` to the first token"
    )
    report.print_table(title, ["", *names, "total"], rows)
    print("Medians; total: median (longest). Phases between imports and rest: of the worker that was ready last.")
    print(f"written to {path}")
