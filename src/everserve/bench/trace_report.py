"""`bench trace` as a dictionary and as a table."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everserve.bench import report, traced
from everserve.bench.scale_report import bars

if TYPE_CHECKING:
    from everserve.bench.trace import Found, Settings

_TITLES = {
    "measured": "measured",
    "fault_free": "fault-free (measured before the first loss)",
    "fault_scaled": "fault-scaled (derived: times the share of devices)",
    "powers_of_two": "powers of two (derived from new servers)",
    "restarts": "restart at each change (derived from new servers)",
}
_SHARED_CORES = (
    "On CPUs all workers share the cores, so tokens/s hardly depend on the number of devices: fault-scaled is no bound"
    " there, and what counts are exactness and gaps."
)


def summarize(settings: "Settings", found: "Found") -> dict[str, Any]:
    """Over all nodes together, bin by bin."""
    width_s = settings.width_s
    degrees = {one.num_devices: one for one in found.degrees}
    nodes = [
        traced.ways(node.points, node.tokens_per_s, rate, settings.num_devices, settings.fewest, degrees, width_s)
        for node, rate in zip(found.nodes, found.fault_free, strict=True)
    ]
    all_nodes = traced.together(nodes)
    means = {name: round(traced.mean(getattr(all_nodes, name)), 1) for name in _TITLES}
    return {
        "ways": asdict(all_nodes),
        "means": means,
        "of_fault_scaled": means["measured"] / means["fault_scaled"] if means["fault_scaled"] else None,
        "degrees": [asdict(one) for one in found.degrees],
        "nodes": [
            {**asdict(node), "points": [[point.at_s, sorted(point.devices)] for point in node.points]}
            for node in found.nodes
        ],
        "num_changes": sum(node.num_changes for node in found.nodes),
        "num_down_s": sum(node.num_down_s for node in found.nodes),
        "largest_gap_ms": max(node.largest_gap_ms for node in found.nodes),
        "num_streams": sum(node.num_streams for node in found.nodes),
        "num_tokens": sum(node.num_tokens for node in found.nodes),
        "num_wrong": sum(node.num_wrong for node in found.nodes) + sum(one.num_inexact for one in found.degrees),
        "errors": sorted({error for node in found.nodes for error in node.errors}),
    }


def is_passed(result: dict[str, Any]) -> bool:
    return not result["num_wrong"] and not result["errors"]


def show(result: dict[str, Any], path: Path) -> None:
    settings, means = result["settings"], result["means"]
    num_nodes = len(result["nodes"])
    report.print_table(
        f"{result['model']}: a trace of spot A100s, {result['compressed']:,.0f} times as fast; {num_nodes} node(s) of"
        f" {settings['num_devices']} devices",
        ["", "tokens/s, mean", "of fault-scaled", "over time"],
        [
            [
                title,
                f"{means[name]:,.0f}",
                f"{means[name] / means['fault_scaled']:.0%}" if means["fault_scaled"] else "",
                bars(result["ways"][name]).partition(" ")[0],
            ]
            for name, title in _TITLES.items()
        ],
    )
    report.print_table(
        "New servers, measured in the same run",
        ["devices", "until every stream has a token, s", "tokens/s"],
        [
            [str(one["num_devices"]), f"{one['restart_s']:.2f}", f"{one['tokens_per_s']:,.0f}"]
            for one in result["degrees"]
        ],
    )
    if num_nodes > 1:
        print(f"{num_nodes} nodes are emulated: one instance has served the history of one after the other.")
    print(
        f"Time is compressed, starts and repairs are not: {settings['seconds']:g} s stand for"
        f" {result['compressed'] * settings['seconds'] / 3600:.0f} hours."
    )
    if result["num_down_s"]:
        print(
            f"For {result['num_down_s']:.1f} s of the histories fewer than {settings['fewest']} devices were there:"
            " the server kept that many, and what it gave then does not count."
        )
    if not result["is_on_gpu"]:
        print(_SHARED_CORES)
    print(f"{result['num_changes']} losses and returns; largest gap of any stream: {result['largest_gap_ms']:,.0f} ms")
    verdict = "all exact" if not result["num_wrong"] else f"{result['num_wrong']} NOT EXACT"
    print(f"{result['num_streams']} streams, {result['num_tokens']} tokens: {verdict}")
    for error in result["errors"]:
        print(f"error: {error}")
    print(f"written to {path}")
