"""Is one worker fast, next to what people would use instead?

Through HTTP, streaming, greedy: tokens/s for 1 and 16 streams (prompt 32, output 128), time to first token and
inter-token times, beside transformers' `generate` and continuous batching on the same weights in the same run.
Variants are interleaved and repeated; the table shows medians, the JSON the spread too. Then how cost grows with
streams and context.

Beside our rows stands which limit of the machine is reached first, memory or arithmetic (roofline.py), and how much of
it is reached: between two tokens, and over whole requests with their prompts.
"""

import gc
import random
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from everserve.client import Stream, complete_all, percentile
from everserve.model.bundled import DEMO_MODEL
from everserve.procs.local_server import LocalServer
from everserve.progress import Progress
from everserve_bench import report
from everserve_bench.load import random_prompts
from everserve_bench.micro.baseline import KINDS, Baseline
from everserve_bench.micro.roofline import Floor, Roofline
from everserve_bench.shapes import SMALL_MOE, write_random_model

PROMPT, OUTPUT, GROWTH_OUTPUT = 32, 128, 64


@dataclass(frozen=True)
class Case:
    """One model to measure."""

    name: str
    directory: Path
    config: dict[str, Any]
    itemsize: int  # bytes per weight that the server reads


def run(rounds: int, quick: bool, out: Path | None) -> None:
    """The whole benchmark; `quick` leaves out the growth table and continuous batching."""
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    with tempfile.TemporaryDirectory(prefix="everserve-bench-") as scratch:
        small = write_random_model(Path(scratch) / "small-moe", SMALL_MOE)
        cases = [
            Case("Qwen3-MoE 61 M, random, float32", small, SMALL_MOE, itemsize=4),
            Case("bundled model", DEMO_MODEL, report.read_json(DEMO_MODEL / "config.json"), itemsize=2),
        ]
        roofline = Roofline.measure()
        result: dict[str, Any] = {
            "prompt": PROMPT,
            "output": OUTPUT,
            "read_bandwidth": roofline.bytes_per_s,
            "product_flops": roofline.flops,
            "cases": [_measure_case(case, roofline, rounds, quick) for case in cases],
        }
    path = report.write("engine", result, out)
    print(f"limits: {_in_words(roofline)}; written to {path}")


def _in_words(roofline: Roofline) -> str:
    arithmetic = f"{roofline.flops / 1e9:.0f} GFLOP/s" if roofline.flops else "arithmetic not measured"
    return f"{roofline.bytes_per_s / 1e9:.1f} GB/s, {arithmetic}"


def _measure_case(case: Case, roofline: Roofline, rounds: int, quick: bool) -> dict[str, Any]:
    with LocalServer(str(case.directory)) as server:
        baseline = Baseline(case.directory, "float32")
        try:
            compared = _compare(case, server, baseline, rounds, KINDS[:1] if quick else KINDS)
        finally:
            baseline.close()
        growth = [] if quick else _growth(case, server, rounds)
    add_floors(case, compared, roofline)
    add_floors(case, growth, roofline)
    _print_comparison(case, compared)
    _print_growth(case, growth)
    return {"model": case.name, "compared": compared, "growth": growth}


def _compare(
    case: Case, server: LocalServer, baseline: Baseline, rounds: int, kinds: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Everserve and each baseline, interleaved, for 1 and 16 streams."""
    samples: dict[tuple[str, int], list[dict[str, float]]] = {}
    with Progress().begin(case.name, total=(rounds + 1) * 4 + 4 * (len(kinds) - 1)) as progress:
        for round_ in range(rounds + 1):  # round 0 warms everything up and is thrown away
            for num_streams in (1, 16):
                prompts = random_prompts(case.config["vocab_size"], num_streams, PROMPT, seed=round_)
                measured = {"everserve": _ours(server, prompts, OUTPUT)}
                progress.advance()
                for kind in kinds[: 2 if round_ < 2 else 1]:  # continuous batching takes minutes: one round will do
                    measured[f"transformers {kind}"] = _theirs(baseline, kind, prompts)
                    progress.advance()
                if round_ > 0:
                    for name, sample in measured.items():
                        samples.setdefault((name, num_streams), []).append(sample)
    return [
        {"system": name, "streams": num_streams, **_summary(found)} for (name, num_streams), found in samples.items()
    ]


def _ours(server: LocalServer, prompts: list[list[int]], max_tokens: int) -> dict[str, float]:
    steal = report.Steal()
    streams = complete_all(server.url, server.model, prompts, max_tokens)
    stolen = steal.share()
    broken = [stream.error for stream in streams if stream.error or len(stream.token_ids) != max_tokens]
    if broken:
        raise RuntimeError(f"streams are incomplete: {broken}")
    return {**_timing(streams), "stolen": stolen}


def _timing(streams: list[Stream]) -> dict[str, float]:
    began = min(stream.started_s for stream in streams)
    seconds = max(stream.arrivals_s[-1] for stream in streams) - began
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    return {
        "tokens_per_s": sum(len(stream.token_ids) for stream in streams) / seconds,
        "first_token_ms": 1e3 * percentile([stream.first_token_s for stream in streams], 0.5),
        "itl_p50_ms": 1e3 * percentile(gaps, 0.5),
        "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
    }


def _theirs(baseline: Baseline, kind: str, prompts: list[list[int]]) -> dict[str, float]:
    answer = baseline.measure(kind, prompts, OUTPUT)
    arrivals = answer["arrivals_s"]
    found = {"tokens_per_s": len(prompts) * OUTPUT / answer["seconds"]}
    if arrivals:
        gaps = [b - a for a, b in pairwise(arrivals)]
        found["first_token_ms"] = 1e3 * arrivals[0]
        found["itl_p50_ms"] = 1e3 * percentile(gaps, 0.5)
        found["itl_p99_ms"] = 1e3 * percentile(gaps, 0.99)
    return found


def _growth(case: Case, server: LocalServer, rounds: int) -> list[dict[str, Any]]:
    """Inter-token time over streams at a short context, and over contexts at one stream; medians of a few rounds."""
    points = [(n, PROMPT) for n in (1, 2, 4, 8, 16, 32, 64)] + [(1, c) for c in (128, 512, 1024, 2048, 4000)]
    samples: dict[tuple[int, int], list[dict[str, float]]] = {point: [] for point in points}
    with Progress().begin(f"{case.name}, growing", total=rounds * len(points)) as progress:
        for round_ in range(rounds):
            # In another order each time: a virtual machine loses its cores every few seconds, at the same points.
            for num_streams, context in random.Random(round_).sample(points, len(points)):
                prompts = random_prompts(case.config["vocab_size"], num_streams, context, seed=1000 + round_)
                samples[num_streams, context].append(_ours(server, prompts, GROWTH_OUTPUT))
                progress.advance()
    return [{"streams": n, "context": context, **_summary(found)} for (n, context), found in samples.items()]


def _summary(samples: list[dict[str, float]]) -> dict[str, Any]:
    return {key: report.spread([sample[key] for sample in samples]) for key in samples[0]}


def add_floors(case: Case, rows: list[dict[str, Any]], roofline: Roofline) -> None:
    """To our own rows, of both tables."""
    for row in rows:
        if row.get("system", "everserve") == "everserve":
            behind = row["context"] + GROWTH_OUTPUT // 2 if "context" in row else PROMPT + OUTPUT // 2
            row.update(_of_floor(row, roofline.floor(case.config, row["streams"], behind, case.itemsize)))


def _of_floor(row: dict[str, Any], floor: Floor) -> dict[str, Any]:
    """Which limit is reached first, and how much of it between two tokens and over whole requests."""
    return {
        "limit": floor.limit,
        "floor_ms": {"memory": 1e3 * floor.memory_s, "arithmetic": 1e3 * (floor.arithmetic_s or 0.0)},
        "share_between_tokens": 1e3 * floor.seconds / row["itl_p50_ms"]["median"],
        "share_of_requests": floor.seconds * row["tokens_per_s"]["median"] / row["streams"],
    }


def _print_comparison(case: Case, compared: list[dict[str, Any]]) -> None:
    reference = {
        row["streams"]: row["tokens_per_s"]["median"] for row in compared if row["system"] == "transformers generate"
    }
    rows = []
    for row in sorted(compared, key=lambda row: row["streams"]):
        speed = row["tokens_per_s"]
        cells = [f"{row[key]['median']:.1f}" if key in row else "" for key in _LATENCIES]
        rows.append(
            [
                row["system"],
                str(row["streams"]),
                f"{speed['median']:.0f} ({speed['min']:.0f}-{speed['max']:.0f})",
                f"{speed['median'] / reference[row['streams']]:.2f}x",
                *cells,
                *_floor_cells(row),
            ]
        )
    columns = [
        "system",
        "streams",
        "tokens/s (min-max)",
        "vs generate",
        "first ms",
        "p50 ms",
        "p99 ms",
        *_FLOOR_COLUMNS,
    ]
    report.print_table(f"{case.name}: prompt {PROMPT}, output {OUTPUT}", columns, rows)


def _floor_cells(row: dict[str, Any]) -> list[str]:
    if "limit" not in row:
        return [""] * len(_FLOOR_COLUMNS)
    shares = f"{row['share_between_tokens']:.0%} / {row['share_of_requests']:.0%}"
    return [row["limit"], f"{row['floor_ms'][row['limit']]:.1f}", shares]


_FLOOR_COLUMNS = ("limit", "floor ms", "of it (with prompts)")
_LATENCIES = ("first_token_ms", "itl_p50_ms", "itl_p99_ms")


def _print_growth(case: Case, growth: list[dict[str, Any]]) -> None:
    if not growth:
        return
    rows = []
    for row in growth:
        rows.append(
            [
                str(row["streams"]),
                str(row["context"]),
                f"{row['tokens_per_s']['median']:.0f}",
                *(f"{row[key]['median']:.1f}" for key in _LATENCIES),
                *_floor_cells(row),
            ]
        )
    columns = ["streams", "context", "tokens/s", "first ms", "p50 ms", "p99 ms", *_FLOOR_COLUMNS]
    report.print_table(f"{case.name}: how cost grows (output {GROWTH_OUTPUT})", columns, rows)
