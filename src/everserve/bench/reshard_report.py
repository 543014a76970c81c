"""What the reshard benchmark found, as a dictionary and as tables."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everserve.bench import report
from everserve.bench.resharded import Loss
from everserve.client import percentile

_SHARES = (0.5, 0.9, 0.99, 1.0)
_KV_BYTES = "kv_regained_bytes"  # in the name of the counter of KV that was copied
_LEGEND = """\
pause: of each stream the longest time between two tokens around the loss; over all streams of all rounds.
recompute: no KV log. successor: KV in host memory, the device restarts at once and loads alone all that it had. parts:
  KV in host memory, survivors load and restore a part each (ours). process: there, only a process dies.
  oracle: a process dies, its memory is kept, streams wait for the next process. restart: everything.
  Only lost weights are loaded in all of them but a restart; `full reload` below is what a system would load that
  shards anew.
link: bytes that were copied over the speed of one copy from the memory of the host, measured in the same run. Weights
  that CPUs read where files are mapped are not copied. again: tokens whose KV was computed once more."""


def summarize(
    losses: Sequence[Loss], failures: Sequence[tuple[str, str]], skipped: Sequence[str], speed: float
) -> dict[str, Any]:
    """Per degree and variant."""
    cases: dict[str, dict[str, Any]] = {}
    for num_devices, variant in dict.fromkeys((loss.num_devices, loss.variant) for loss in losses):
        same = [loss for loss in losses if (loss.num_devices, loss.variant) == (num_devices, variant)]
        cases[f"{num_devices} {variant}"] = _case(same, speed)
    return {
        "cases": cases,
        "failures": [{"case": case, "why": why} for case, why in failures],
        "skipped": list(skipped),
        "num_streams_compared": sum(loss.num_streams for loss in losses),
        "num_tokens_compared": sum(loss.num_tokens for loss in losses),
        "num_missing": sum(loss.num_missing for loss in losses),
        "num_different": sum(loss.num_different for loss in losses),
        "is_exact": not any(loss.num_missing or loss.num_different for loss in losses),
        "losses": [asdict(loss) for loss in losses],
    }


def _case(losses: Sequence[Loss], speed: float) -> dict[str, Any]:
    pauses = sorted(pause for loss in losses for pause in loss.pauses_ms)
    copied: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for loss in losses:
        copied.update(loss.bytes_by_source)
        copied["KV"] += round(sum(num for name, num in loss.counted.items() if _KV_BYTES in name))
        counted.update(loss.counted)
    per_loss = {source: num / len(losses) for source, num in copied.items() if num or source != "KV"}
    return {
        "num_devices": losses[0].num_devices,
        "variant": losses[0].variant,
        "rounds": len(losses),
        "pause_ms": {f"p{share * 100:g}": percentile(pauses, share) for share in _SHARES},
        "cdf_ms": pauses,
        "normal_p99_ms": report.spread([loss.normal_p99_ms for loss in losses]),
        "whole_s": report.spread([loss.whole_s for loss in losses]),
        "bytes_by_source": per_loss,
        "link_ms": 1e3 * sum(per_loss.values()) / speed,
        "counted": {name: num / len(losses) for name, num in counted.items()},
        "num_inexact": sum(loss.num_missing + loss.num_different for loss in losses),
    }


def show(result: dict[str, Any], path: Path) -> None:
    settings = result["settings"]
    report.print_table(
        f"{result['model']}: one of N devices is lost under {settings['num_streams']} streams; rounds:"
        f" {settings['rounds']}",
        [
            *("devices, variant", "pause ms: p50", "p90", "p99", "worst", "p99 before", "copied MB", "link ms"),
            *("tokens again", "restored", "inexact"),
        ],
        [_row(name, found) for name, found in result["cases"].items()],
    )
    speed = result["link_bytes_per_s"]
    report.print_table(
        f"What planners move for the same loss, MB (mean over the devices); a link carries {speed / 1e9:.1f} GB/s",
        ["devices, planner", "reloaded", "from peers", "kept", "fewest possible", "busiest link ms"],
        [
            _planner_row(num, name, found, speed)
            for num, planners in result["planners"].items()
            for name, found in planners.items()
        ],
    )
    print(_LEGEND)
    for failure in result["failures"]:
        print(f"{failure['case']}: FAILED: {failure['why']}")
    for what in result["skipped"]:
        print(f"skipped: {what}")
    verdict = "every stream is exact" if result["is_exact"] else "FAILED: tokens were lost or changed"
    print(
        f"{result['num_streams_compared']} streams, {result['num_tokens_compared']} tokens compared with the "
        f"undisturbed run: {result['num_missing']} lost, {result['num_different']} different: {verdict}"
    )
    print(f"written to {path}")


def _row(name: str, found: dict[str, Any]) -> list[str]:
    copied = [f"{source} {num / 1e6:,.1f}" for source, num in found["bytes_by_source"].items()]
    return [
        name,
        *(f"{found['pause_ms'][f'p{share * 100:g}']:,.1f}" for share in _SHARES),
        f"{found['normal_p99_ms']['median']:.1f}",
        ", ".join(copied) or "-",
        f"{found['link_ms']:.1f}" if copied else "-",
        _sum(found["counted"], "tokens_recomputed", "kv_lost_tokens"),
        _sum(found["counted"], "tokens_restored", "kv_regained_tokens"),
        str(found["num_inexact"]),
    ]


def _sum(counted: dict[str, float], *parts: str) -> str:
    """Per loss, of counters with such names."""
    found = [num for name, num in counted.items() if any(part in name for part in parts)]
    return f"{sum(found):,.0f}" if found else "-"


def _planner_row(num: int | str, name: str, found: dict[str, float], speed: float) -> list[str]:
    figures = ("reload_bytes", "peer_bytes", "kept_bytes", "fewest_bytes")
    return [
        f"{num} {name}",
        *(f"{found[figure] / 1e6:,.2f}" for figure in figures),
        f"{1e3 * found['most_reload_bytes'] / speed:.2f}",
    ]
