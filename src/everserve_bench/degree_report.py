"""`bench degree` as tables: what was measured at each size, and what the placement alone says."""

from pathlib import Path
from typing import Any

from everserve_bench import report

_MEASURED = (
    *("N", "tokens/s", "to one process", "between tokens ms", "to one process", "core ms/token", "to one process"),
    *("work max/mean", "tokens that differ"),
)
_PLANNED = (
    *("N", "placement", "devices used", "predicted scaling", "in lock-step", "weights of the fullest, MB"),
    *("to 1/N", "KV max/mean", "KV tokens"),
)


def show(result: dict[str, Any], path: Path) -> None:
    settings = result["settings"]
    load = f"{settings['num_streams']} streams, prompt {settings['prompt']}, output {settings['max_tokens']}"
    for found in result["shapes"]:
        report.print_table(
            f"{found['model']}: `-tp N`, {load}; medians of {settings['slices']} slices",
            list(_MEASURED),
            [_measured(row) for row in found["rows"]],
        )
        report.print_table(
            f"{found['model']}, as planned, on devices with room for {settings['room']:g} times the model",
            list(_PLANNED),
            [_planned(division) for division in found["divisions"]],
        )
        for row in found["rows"]:
            if row["error"]:
                print(f"-tp {row['size']}: {row['error']}")
    for found in result["paper"]:
        title = f"{found['model']}, as planned, on devices of 80 GB"
        report.print_table(title, list(_PLANNED), [_planned(division) for division in found["divisions"]])
    num = sum(row["num_different"] for found in result["shapes"] for row in found["rows"])
    print("every token is the same at every N" if not num else f"{num} tokens DIFFER")
    print(f"predicted scaling: mean/max of work per device, of N times one device; written to {path}")


def _measured(row: dict[str, Any]) -> list[str]:
    if "tokens_per_s" not in row:
        return [str(row["size"]), *["-"] * (len(_MEASURED) - 1)]
    cells = [str(row["size"])]
    for figure, digits in (("tokens_per_s", 0), ("itl_p50_ms", 1), ("cpu_ms_per_token", 2)):
        to_one = row.get(f"{figure}_to_one")
        cells += [f"{row[figure]['median']:.{digits}f}", f"{to_one['median']:.2f}" if to_one else "1"]
    work = row.get("shard_work_max_over_mean")
    return [*cells, f"{work:.2f}" if work else "-", str(row["num_different"])]


def _planned(division: dict[str, Any]) -> list[str]:
    return [
        str(division["num_devices"]),
        division["variant"],
        str(division["num_used"]),
        f"{division['scaling']:.3f}",
        f"{division['scaling_in_lock_step']:.3f}",
        f"{division['weights_bytes'] / 1e6:,.0f}",
        f"{division['weights_to_ideal']:.2f}",
        f"{division['kv_to_mean']:.2f}",
        f"{division['kv_tokens']:,}" if division["kv_tokens"] else "does not fit",
    ]
