"""`bench prefill` as tables: what clients saw, the same in lock-step, and one engine alone."""

from pathlib import Path
from typing import Any

from everserve_bench import report


def show(result: dict[str, Any], path: Path) -> None:
    settings = result["settings"]
    report.print_table(
        f"{result['model']}, `-tp {settings['num_homes']}`: prompts of {settings['mean_prompt']} tokens on average, at"
        f" {settings['load']:g} of what it can compute (ms: median, p95, p99)",
        ["lengths of", "requests", "time to first token", "between tokens", "work", "pending"],
        [
            [
                row["trace"],
                str(row["num_requests"]),
                _row(row["first_token_ms"]),
                _row(row["between_tokens_ms"]),
                f"{row['work_max_over_mean']:.2f}",
                f"{row['pending_most']:.2f}",
            ]
            for row in result["clients"]
        ],
    )
    print(
        "work: prompts that the busiest home computed, over the mean; pending: what waits at the home with the most, on"
    )
    print("average, in mean prompts")
    report.print_table(
        "The same lengths in lock-step, on paper: the busiest home of a batch over the mean, and the wait for a first"
        " token in mean prompts (median, p95, p99)",
        ["lengths of", "homes", "streams and tokens", "max/mean", "wait"],
        [
            [
                row["trace"],
                str(row["num_homes"]),
                row["variant"],
                f"{row['max_over_mean']:.2f}",
                ", ".join(f"{wait:g}" for wait in row["waits"]),
            ]
            for row in result["lock_step"]
        ],
    )
    show_engine("One engine alone", result["engine"])
    num_unfinished = sum(row["num_unfinished"] for row in result["clients"])
    disturbed = sum(row["num_disturbed"] for row in result["clients"])
    if disturbed:
        print(f"{disturbed} measurements are void: a process was declared gone without any fault")
    print(f"{num_unfinished} requests did not finish; written to {path}")


def show_alone(result: dict[str, Any], path: Path) -> None:
    """`--alone`: speed, and where the time of a step goes."""
    show_engine(f"{result['model']}, one engine alone", result["engine"])
    for profile in result["engine"]["profiles"]:
        _show_profile(result["model"], profile)
    if result["engine"]["beside"]:
        _show_beside(result["model"], result["engine"]["beside"])
    print(f"written to {path}")


def show_engine(title: str, engine: dict[str, Any]) -> None:
    report.print_table(
        f"{title}; measured limits: {engine['flops'] / 1e9:,.0f} GFLOP/s,"
        f" {engine['bandwidth'] / 1e9:,.1f} GB/s for {engine['weight_bytes'] / 1e6:,.0f} MB of weights in each step",
        ["prompt", "prompts", "step", "tokens/s", "arithmetic allows", "weights allow", "of the tighter limit"],
        [
            [
                str(row["prompt"]),
                str(row["batch"]),
                str(row.get("step_tokens", "-")),  # files of old runs have none
                f"{row['tokens_per_s']:,.0f}",
                f"{row['arithmetic_tokens_per_s']:,.0f}",
                f"{row['reading_tokens_per_s']:,.0f}",
                f"{row['share']:.0%}",
            ]
            for row in engine["rows"]
        ],
    )


def _show_profile(title: str, profile: dict[str, Any]) -> None:
    kernels = profile["kernels"]
    total_ms = sum(kernel["ms"] for kernel in kernels)
    report.print_table(
        f"{title}: a step of {profile['step_tokens']} tokens takes {profile['step_ms']:.2f} ms; its kernels"
        f" {total_ms:.2f}",
        ["kernel", "launches", "ms", "of all"],
        [[k["name"], str(k["num"]), f"{k['ms']:.3f}", f"{k['ms'] / total_ms:.1%}"] for k in kernels],
    )


def _show_beside(title: str, rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    report.print_table(
        f"{title}: {first['num_prompts']} prompts of {first['num_prompt']} tokens beside {first['num_decoding']}"
        " streams that decode; ms of a step: median, p99",
        ["prompt tokens of a step", "mean", "without prompts", "with prompts", "p99 / p99", "prompt tokens/s"],
        [
            [
                row["variant"],
                f"{row['tokens_per_step']:.0f}",
                _row(row["pure_ms"]),
                _row(row["mixed_ms"]),
                f"{row['slowdown']:.2f}",
                f"{row['prompt_tokens_per_s']:,.0f}",
            ]
            for row in rows
        ],
    )


def _row(percentiles: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in percentiles) or "-"
