"""What masked experts cost: tables and a picture."""

from pathlib import Path
from statistics import mean
from typing import Any

from everserve_bench import plot, report


def by_choice(result: dict[str, Any], figure: str) -> dict[str, dict[str, list[float]]]:
    """A figure of all draws, by choice and fraction, in the order in which they were measured."""
    found: dict[str, dict[str, list[float]]] = {}
    for case in result["cases"]:
        if figure in case:
            found.setdefault(case["choice"], {}).setdefault(case["fraction"], []).append(case[figure])
    return found


def show(result: dict[str, Any], path: Path) -> None:
    base, num_experts = result["base"], result["num_experts"]
    fractions = list(dict.fromkeys(case["fraction"] for case in result["cases"]))
    counts = {case["fraction"]: case["num_masked"] for case in result["cases"]}
    columns = ["masked in each layer", *(f"{fraction} ({counts[fraction]})" for fraction in fractions)]
    title = (
        f"{result['model']}: {num_experts} experts per layer, {result['experts_per_token']} per token; "
        f"{result['num_tokens']} held-out tokens, perplexity {base['perplexity']:.2f} without a mask"
    )
    rows = [
        [choice, *(_ratio(draws.get(fraction, []), base["perplexity"]) for fraction in fractions)]
        for choice, draws in by_choice(result, "perplexity").items()
    ]
    report.print_table(f"{title}. Perplexity over that", columns, rows)
    if "accuracy" in base:
        rows = [
            [choice, *(f"{mean(draws[fraction]):.3f}" if fraction in draws else "-" for fraction in fractions)]
            for choice, draws in by_choice(result, "accuracy").items()
        ]
        questions = result["settings"]["num_questions"]
        report.print_table(f"lm-eval, {questions} questions, accuracy {base['accuracy']:.3f} without", columns, rows)
    picture = plot.write_masks(result, by_choice(result, "perplexity"), path.with_suffix(".png"))
    print(f"written to {path}" + (f" and {picture}" if picture is not None else "; no plot: matplotlib is missing"))


def _ratio(values: list[float], base: float) -> str:
    return f"{mean(values) / base:.3f}" + (f" (worst {max(values) / base:.3f})" if len(values) > 1 else "")
