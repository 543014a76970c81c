"""`bench decline` as a dictionary and as a table."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everserve.bench import report
from everserve.bench.declined import Stage
from everserve.bench.restarted import Restarted
from everserve.bench.scale_report import bars

_LEGEND = """\
pause: of each stream the longest time between two tokens around the change. peak: until tokens/s are what they stay at.
lost: how much longer the stage took than its tokens would take at that rate.
restart: a new server with as many devices, from its start until every stream has a token again; in the same run."""


def summarize(stages: Sequence[Stage], restarts: Sequence[Restarted]) -> dict[str, Any]:
    """Losses are compared with restarts at the same degree."""
    restart_s = {one.num_devices: one.restart_s for one in restarts}
    losses = [stage for stage in stages if stage.devices < stage.devices_before]
    known = [stage for stage in losses if stage.devices in restart_s]
    return {
        "stages": [asdict(stage) for stage in stages],
        "restarts": [asdict(one) for one in restarts],
        "lost_s": round(sum(stage.lost_s for stage in stages), 3),
        "lost_in_losses_s": round(sum(stage.lost_s for stage in losses), 3),
        "lost_by_restarts_s": round(sum(restart_s[stage.devices] for stage in known), 3) if restarts else None,
        "num_inexact_after_restarts": sum(one.num_inexact for one in restarts),
    }


def is_passed(result: dict[str, Any]) -> bool:
    return not (result["num_wrong"] or result["errors"] or result["num_inexact_after_restarts"])


def show(result: dict[str, Any], path: Path) -> None:
    restart_s = {one["num_devices"]: one["restart_s"] for one in result["restarts"]}
    settings = result["settings"]
    columns = ["devices", "pause ms (p50)", "worst", "peak s", "settled s", "lost s", "tokens/s", "restart s"]
    report.print_table(
        f"{result['model']}: devices are lost and come back under {settings['num_streams']} streams",
        columns,
        [_row(stage, restart_s) for stage in result["stages"]],
    )
    print(_LEGEND)
    print(f"tokens/s over time: {bars(result['series']['tokens_per_s'])}")
    line = f"lost by {settings['num_devices'] - settings['fewest']} losses: {result['lost_in_losses_s']:.2f} s"
    if result["lost_by_restarts_s"] is not None:
        line += f"; by as many restarts: {result['lost_by_restarts_s']:.2f} s"
    print(f"{line}; by all changes: {result['lost_s']:.2f} s")
    verdict = "all exact" if is_passed(result) else f"{result['num_wrong']} NOT EXACT"
    print(f"{result['num_streams']} streams, {result['num_tokens']} tokens: {verdict}")
    for error in result["errors"]:
        print(f"error: {error}")
    print(f"written to {path}")


def _row(stage: dict[str, Any], restart_s: dict[int, float]) -> list[str]:
    is_loss = stage["devices"] < stage["devices_before"]
    known = is_loss and stage["devices"] in restart_s
    return [
        f"{stage['devices_before']} -> {stage['devices']}",
        f"{stage['pause_ms']:,.1f}",
        f"{stage['worst_ms']:,.1f}",
        f"{stage['peak_s']:.2f}",
        f"{stage['took_s']:.2f}",
        f"{stage['lost_s']:.2f}",
        f"{stage['tokens_per_s']:,.0f}",
        f"{restart_s[stage['devices']]:.2f}" if known else "",
    ]
