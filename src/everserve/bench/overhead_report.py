"""What variants were found to cost: medians, and ratios round by round, as a dictionary and as a table."""

import itertools
from collections.abc import Mapping
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from everserve.bench import report
from everserve.bench.analysis import median_interval, ratios
from everserve.bench.slices import Slice
from everserve.bench.variants import Samples, Settings, VariantResults

REFERENCE = "2+2"
ONE_PROCESS = "one process"
ALL_OFF = "2+2, all off"
_TO_ONE_PROCESS = f"itl_p50_ms_to_{ONE_PROCESS}"
_FIGURES = ("tokens_per_s", "itl_p50_ms", "itl_p99_ms", "cpu_ms_per_token")


def result_of(
    found: VariantResults, flags: Mapping[str, tuple[str, ...]], settings: Settings, reference: str = REFERENCE
) -> dict[str, Any]:
    """All of it, for the JSON and for `show`."""
    return {
        "model": found.model,
        "settings": asdict(settings),
        "flags": {name: " ".join(given) for name, given in flags.items()},
        "idle_cores": found.idle_cores,
        "num_different": found.num_different,
        "differences": [asdict(difference) for difference in found.differences],
        "num_repeated": found.num_repeated,
        "not_measured": found.not_measured,
        **summarize(found.samples, reference),
    }


def summarize(samples: Samples, reference: str = REFERENCE) -> dict[str, Any]:
    """A row per variant and number of streams; every figure with its ratio to the reference in the same rounds, and the
    price of dividing the model: the time between tokens next to one process."""
    rows = []
    for (name, num_streams), slices in samples.items():
        row: dict[str, Any] = {"variant": name, "streams": num_streams}
        for figure in _FIGURES:
            values = _values(slices, figure)
            row[figure] = report.spread(values)
            row[f"{figure}_to_{reference}"] = _ratio(values, _values(samples[reference, num_streams], figure))
        if reference == REFERENCE and (ONE_PROCESS, num_streams) in samples:
            undivided = _values(samples[ONE_PROCESS, num_streams], "itl_p50_ms")
            row[_TO_ONE_PROCESS] = _ratio(_values(slices, "itl_p50_ms"), undivided)
        row["stolen"] = report.spread(_values(slices, "stolen"))
        row["rounds"] = {figure: [round(value, 4) for value in _values(slices, figure)] for figure in _FIGURES}
        rows.append(row)
    return {"variants": rows, "protections": _protections(samples) if reference == REFERENCE else []}


def _protections(samples: Samples) -> list[dict[str, Any]]:
    """What all of them together cost: 2+2 with them, next to 2+2 without."""
    return [
        {
            "streams": num_streams,
            **{
                figure: _ratio(_values(samples[REFERENCE, num_streams], figure), _values(slices, figure))
                for figure in _FIGURES
            },
        }
        for (name, num_streams), slices in samples.items()
        if name == ALL_OFF
    ]


def _ratio(values: list[float], reference: list[float]) -> dict[str, float]:
    """The median of the rounds' ratios, and where the true one lies (95 %)."""
    found = ratios(values, reference)
    low, high = median_interval(found)
    return {"median": median(found), "low": low, "high": high}


def _values(slices: list[Slice], figure: str) -> list[float]:
    return [getattr(one, figure) for one in slices]


def show(result: dict[str, Any], path: Path, reference: str = REFERENCE) -> None:
    """A table per number of streams, then what the protections cost."""
    settings = result["settings"]
    to = f"to {reference}"
    columns = ["variant", "tokens/s", to, "p50 ms", to, "p99 ms", "core ms/token", to]
    for num_streams in settings["streams"]:
        found = [row for row in result["variants"] if row["streams"] == num_streams]
        title = f"{num_streams} streams" if num_streams > 1 else "1 stream"
        report.print_table(
            f"{title}, prompt {settings['prompt']}, output {settings['max_tokens']}: medians of {_num_slices(found)} "
            "slices; ratios with their 95 % interval",
            columns,
            [_row(row, reference) for row in found],
        )
        divided = [row for row in found if _TO_ONE_PROCESS in row and row["variant"] != ONE_PROCESS]
        for row in divided:
            print(f"{title}: between tokens p50, {row['variant']} / {ONE_PROCESS}: {_interval(row[_TO_ONE_PROCESS])}")
    for name, reason in result.get("not_measured", {}).items():
        print(f"{name}: {reason}")
    for cost in result["protections"]:
        print(
            f"{cost['streams']} streams: all protections together ({REFERENCE} / all off): tokens/s "
            f"{_interval(cost['tokens_per_s'])}, between tokens p50 {_interval(cost['itl_p50_ms'])}, core time "
            f"{_interval(cost['cpu_ms_per_token'])}"
        )
    print("ratios are taken slice by slice; with fewer than 6 slices the interval is their whole range")
    if result["idle_cores"]:
        print(f"all servers together, idle: {sum(result['idle_cores'].values()):.3f} cores")
    print(f"tokens that differ between variants: {result['num_different']}")
    _show_differences(result.get("differences", []))
    repeated = {name: num for name, num in result["num_repeated"].items() if num}
    if repeated:
        print(f"slices repeated because a process was declared gone without any fault: {repeated}")
    print(f"written to {path}")


def _show_differences(differences: list[dict[str, Any]]) -> None:
    """A line for each slice that has some."""
    for (variant, num_streams, slice_), found in itertools.groupby(
        differences, key=itemgetter("variant", "num_streams", "slice")
    ):
        firsts = [difference["first"] for difference in found]
        print(
            f"  {variant}, slice {slice_}: {len(firsts)} of {num_streams} streams, from token {min(firsts)} on"
            f" (the last of them from {max(firsts)} on)"
        )


def _num_slices(rows: list[dict[str, Any]]) -> int:
    """The same of all variants. Fewer than were asked for if the run was cut short."""
    return len(rows[0]["rounds"]["tokens_per_s"])


def _row(row: dict[str, Any], reference: str) -> list[str]:
    ratio = {
        figure: "1" if row["variant"] == reference else _interval(row[f"{figure}_to_{reference}"])
        for figure in ("tokens_per_s", "itl_p50_ms", "cpu_ms_per_token")
    }
    return [
        row["variant"],
        f"{row['tokens_per_s']['median']:.0f}",
        ratio["tokens_per_s"],
        f"{row['itl_p50_ms']['median']:.2f}",
        ratio["itl_p50_ms"],
        f"{row['itl_p99_ms']['median']:.2f}",
        f"{row['cpu_ms_per_token']['median']:.3f}",
        ratio["cpu_ms_per_token"],
    ]


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"
