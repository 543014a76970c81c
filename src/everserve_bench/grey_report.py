"""`bench grey` as a table."""

from pathlib import Path
from typing import Any

from everserve_bench import report


def show(result: dict[str, Any], path: Path) -> None:
    settings = result["settings"]
    size = f"{settings['num_attention']}+{settings['num_expert']} workers, {settings['num_streams']} streams"
    if "quiet" in result:
        _show_quiet(result["quiet"], f"{size}, {settings['num_neighbours']} busy neighbours")
    else:
        _show_cases(result["found"], f"A worker that is slow: {result['model']}, {size}")
        if result["no_quota"]:
            print(f"no CPU quotas: {result['no_quota']}")
    print(f"written to {path}")


def _show_cases(found: list[dict[str, Any]], title: str) -> None:
    columns = [
        "case",
        "found after",
        "asked to leave",
        "before (median, p99, max)",
        "slow, found",
        "slow, --slow-factor 0",
    ]
    rows = []
    for on in (one for one in found if one["is_on"]):
        off = next(one for one in found if not one["is_on"] and one["case"] == on["case"])
        rows.append(
            [
                on["case"],
                _seconds(on["demoted_s"]),
                _seconds(on["drained_s"]),
                *(_gaps(gaps) for gaps in (on["gaps_before_ms"], on["gaps_ms"], off["gaps_ms"])),
            ]
        )
    report.print_table(f"{title}; times between tokens in ms", columns, rows)
    num_wrong, num_faults = (sum(one[name] for one in found) for name in ("num_wrong", "num_faults"))
    print("all streams exact" if not num_wrong else f"{num_wrong} streams NOT EXACT", end="")
    print(f"; {num_faults} workers were declared gone instead" if num_faults else "")


def _show_quiet(quiet: dict[str, Any], title: str) -> None:
    rows = [[str(rank), f"{ratio:.2f}"] for rank, ratio in quiet["highest_slowness"].items()]
    report.print_table(f"{quiet['seconds']:.0f} s of {title}", ["rank", "highest slowness"], rows)
    print(f"{len(quiet['alarms'])} false alarms; {quiet['num_faults']} workers declared gone", end="")
    print(f"; {quiet['num_wrong']} streams NOT EXACT" if quiet["num_wrong"] else "; all streams exact")
    for alarm in quiet["alarms"]:
        print(f"rank {alarm['rank']} was {alarm['level']}: {alarm['reason']}")


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def _gaps(gaps_ms: list[float]) -> str:
    return ", ".join(f"{gap:.0f}" for gap in gaps_ms) or "no tokens"
