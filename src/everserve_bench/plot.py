"""Pictures: tokens/s and inter-token times around a kill; how gaps grow with load; what masked experts cost. They need
matplotlib."""

import importlib
from fractions import Fraction
from pathlib import Path
from typing import Any

from everserve_bench.kill_rounds import is_on_gpu

_LABELS = {
    "expert": "an expert worker dies",
    "attention": "an attention worker dies",
    "restart": "everything restarts (baseline)",
}
_COLOURS = {"expert": "#1f77b4", "attention": "#2ca02c", "restart": "#d62728"}


def write(result: dict[str, Any], path: Path) -> Path | None:
    """Draws, for each kind of fault, the round with the median gap. None if there is no matplotlib."""
    pyplot = _pyplot()
    if pyplot is None:
        return None
    figure, (rate, gaps) = pyplot.subplots(2, 1, sharex=True, figsize=(10, 6.5), constrained_layout=True)
    for fault, found in result["faults"].items():
        rounds = [round_ for round_ in result["rounds"] if round_["fault"] == fault]
        _draw(rate, gaps, fault, found, rounds[found["shown_round"]])
    for axes in (rate, gaps):
        axes.axvline(0, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize=8)
    rate.annotate(
        "SIGKILL", (0, 1), xycoords=("data", "axes fraction"), xytext=(-4, -12), textcoords="offset points", ha="right"
    )
    rate.set_ylabel("tokens/s, all streams")
    rate.set_ylim(bottom=0)
    gaps.set_yscale("log")
    gaps.set_ylabel("largest time between tokens, ms")
    gaps.set_xlabel("seconds since the kill (dotted: full strength again)")
    figure.suptitle(f"{heading(result)}: one worker dies, or everything restarts")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def heading(result: dict[str, Any]) -> str:
    """What ran where."""
    settings = result["settings"]
    model = f"{result['model']}: " if is_on_gpu(result) else ""
    workers = f"{settings['num_attention']} attention and {settings['num_expert']} expert workers"
    return f"{model}{settings['num_streams']} streams, {workers}"


def write_scaling(result: dict[str, Any], path: Path) -> Path | None:
    """The largest gap over the number of streams, a line per context, a panel per kind of fault; bars: best to worst.
    None if there is no matplotlib."""
    pyplot = _pyplot()
    if pyplot is None:
        return None
    figure, panels = pyplot.subplots(1, 2, sharey=True, figsize=(10, 4.5), constrained_layout=True)
    for axes, fault in zip(panels, ("expert", "attention"), strict=True):
        for context in sorted({cell["context"] for cell in result["cells"]}):
            cells = [cell for cell in result["cells"] if cell["context"] == context and fault in cell["faults"]]
            if cells:
                _draw_line(axes, context, cells, fault)
        axes.set(title=_LABELS[fault], xscale="log", yscale="log", xlabel="streams")
        streams = sorted({cell["num_streams"] for cell in result["cells"]})
        axes.set_xticks(streams, labels=[str(num) for num in streams])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("largest gap between two tokens, ms")
    if panels[0].lines:
        panels[0].legend(loc="best", fontsize=8)
    figure.suptitle(f"{result['model']}: what clients see, by streams and length of their prompts")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def write_masks(result: dict[str, Any], draws: dict[str, dict[str, list[float]]], path: Path) -> Path | None:
    """Perplexity over the share of experts that are masked, a line per choice; bars: best to worst draw. None if there
    is no matplotlib."""
    pyplot = _pyplot()
    if pyplot is None:
        return None
    base = result["base"]["perplexity"]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), constrained_layout=True)
    for choice, found in draws.items():
        shares, ratios = [float(Fraction(name)) for name in found], [[v / base for v in vs] for vs in found.values()]
        means = [sum(values) / len(values) for values in ratios]
        below = [middle - min(values) for middle, values in zip(means, ratios, strict=True)]
        above = [max(values) - middle for middle, values in zip(means, ratios, strict=True)]
        axes.errorbar(shares, means, yerr=(below, above), fmt=".-", capsize=3, label=choice)
    names = list(dict.fromkeys(case["fraction"] for case in result["cases"]))
    axes.set(xscale="log", yscale="log", xlabel="experts masked in each layer", ylabel="perplexity over no mask")
    axes.set_xticks([float(Fraction(name)) for name in names], labels=names)
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    axes.set_title(f"{result['model']}, {result['num_experts']} experts per layer, held-out text")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _draw_line(axes: Any, context: int, cells: list[dict[str, Any]], fault: str) -> None:
    gaps = [cell["faults"][fault]["gap_ms"] for cell in cells]
    below = [gap["median"] - gap["min"] for gap in gaps]
    above = [gap["max"] - gap["median"] for gap in gaps]
    streams, medians = [cell["num_streams"] for cell in cells], [gap["median"] for gap in gaps]
    axes.errorbar(streams, medians, yerr=(below, above), fmt=".-", capsize=3, label=f"{context} tokens")


def _pyplot() -> Any:
    """None if it is not installed: it is optional, the `bench` extra."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        return None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _draw(rate: Any, gaps: Any, fault: str, found: dict[str, Any], shown: dict[str, Any]) -> None:
    """One fault's line in both panels, and its return to full strength."""
    colour, series = _COLOURS[fault], shown["series"]
    centres = [series["begin_s"] + (i + 0.5) * series["width_s"] for i in range(len(series["tokens_per_s"]))]
    label = f"{_LABELS[fault]}: largest gap {_time(found['gap_ms']['median'])}"
    rate.plot(centres, series["tokens_per_s"], color=colour, linewidth=1, label=_LABELS[fault])
    heights = [gap or float("nan") for gap in series["largest_gap_ms"]]  # a line breaks where no token came
    gaps.plot(centres, heights, ".-", color=colour, linewidth=0.8, markersize=3, label=label)
    for axes in (rate, gaps):
        axes.axvline(shown["whole_s"], color=colour, linewidth=1, linestyle=":")


def _time(ms: float) -> str:
    return f"{ms:.1f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"
