"""Variants of one server beside a reference: what overhead and checkpoint have in common. variants.py measures them.

Ratios are taken slice by slice, with the 95 % interval of their median.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from operator import itemgetter
from statistics import median
from typing import Annotated, Any, ClassVar

from everserve.progress import Progress
from everserve_bench import options, report, variants
from everserve_bench.analysis import median_interval, ratios
from everserve_bench.scenario import Result, Scenario
from everserve_bench.slices import Slice
from everserve_bench.subject import Subject, is_for_gpu
from everserve_bench.tables import Cell, Table, interval, medians, text
from everserve_bench.variants import Load, Samples, VariantResults

FIGURES = ("tokens_per_s", "itl_p50_ms", "itl_p99_ms", "cpu_ms_per_token")
Flags = Mapping[str, tuple[str, ...]]  # by variant


class Comparison(Scenario, frozen=True, kw_only=True):
    """Variants, one of which is the reference of all others."""

    REFERENCE: ClassVar[str]

    streams: tuple[int, ...]
    prompt: Annotated[int, options.on_device("Tokens of each prompt.", 32, 512, min=1)]
    max_tokens: Annotated[int, options.FIXED_TOKENS]
    rounds: int

    def variants_told(self) -> Flags:
        """What is measured."""
        raise NotImplementedError

    def measure(self, served: Subject, progress: Progress) -> Iterator[Result]:
        flags = self.variants_told()
        load = Load(
            streams=self.streams,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            rounds=self.rounds,
            one_at_a_time=is_for_gpu(self.shape),
        )
        for found in variants.compare(flags, self.REFERENCE, served, load, progress):
            yield self.result_of(found, flags)

    @classmethod
    def result_of(cls, found: VariantResults, flags: Flags) -> Result:
        return {
            "flags": {name: " ".join(given) for name, given in flags.items()},
            "idle_cores": found.idle_cores,
            "num_different": found.num_different,
            "differences": [asdict(difference) for difference in found.differences],
            "num_repeated": found.num_repeated,
            "not_measured": found.not_measured,
            **cls.summarize(found.samples),
        }

    @classmethod
    def summarize(cls, samples: Samples) -> Result:
        """A row per variant and number of streams: every figure, with its ratio to the reference in the same rounds."""
        rows = []
        for (name, num_streams), slices in samples.items():
            row: dict[str, Any] = {"variant": name, "streams": num_streams}
            for figure in FIGURES:
                row[figure] = report.spread(values(slices, figure))
                row[f"{figure}_to_{cls.REFERENCE}"] = compared(slices, samples[cls.REFERENCE, num_streams], figure)
            row["stolen"] = report.spread(values(slices, "stolen"))
            row["rounds"] = {figure: [round(value, 4) for value in values(slices, figure)] for figure in FIGURES}
            rows.append(row)
        return {"variants": rows, "protections": []}

    @staticmethod
    def is_passed(result: Result) -> bool:
        """All variants answered the same tokens."""
        return not result["num_different"]

    @classmethod
    def show(cls, result: Result) -> Iterator[Table | str]:
        settings = result["settings"]
        for num_streams in settings["streams"]:
            rows = [row for row in result["variants"] if row["streams"] == num_streams]
            num_slices = len(rows[0]["rounds"]["tokens_per_s"])  # fewer than asked for, if the run was cut short
            title = f"{num_streams} streams" if num_streams > 1 else "1 stream"
            load = f"{title}, prompt {settings['prompt']}, output {settings['max_tokens']}"
            how = f"medians of {num_slices} slices; ratios with their 95 % interval"
            yield Table(f"{load}: {how}", cls._columns(), rows)
            yield from cls.remarks(title, rows)
        yield from (f"{name}: {reason}" for name, reason in result.get("not_measured", {}).items())
        yield from cls.verdicts(result)
        yield "ratios are taken slice by slice; with fewer than 6 slices the interval is their whole range"
        if result["idle_cores"]:
            yield f"all servers together, idle: {sum(result['idle_cores'].values()):.3f} cores"
        yield f"tokens that differ between variants: {result['num_different']}"
        yield from _where_they_differ(result.get("differences", []))
        repeated = {name: num for name, num in result["num_repeated"].items() if num}
        if repeated:
            yield f"slices repeated because a process was declared gone without any fault: {repeated}"

    @classmethod
    def _columns(cls) -> list[tuple[str, Cell]]:
        to = cls.REFERENCE

        def against(figure: str) -> tuple[str, Cell]:
            cell = interval(f"{figure}_to_{to}")
            return f"to {to}", lambda row: "1" if row["variant"] == to else cell(row)

        return [
            ("variant", text("variant")),
            ("tokens/s", medians("tokens_per_s", digits=0)),
            against("tokens_per_s"),
            ("p50 ms", medians("itl_p50_ms", digits=2)),
            against("itl_p50_ms"),
            ("p99 ms", medians("itl_p99_ms", digits=2)),
            ("core ms/token", medians("cpu_ms_per_token", digits=3)),
            against("cpu_ms_per_token"),
        ]

    @classmethod
    def remarks(cls, title: str, rows: list[dict[str, Any]]) -> Iterator[str]:
        """Under a table."""
        return iter(())

    @classmethod
    def verdicts(cls, result: Result) -> Iterator[str]:
        """Over all numbers of streams."""
        return iter(())


def compared(slices: list[Slice], reference: list[Slice], figure: str) -> dict[str, float]:
    """The median of the rounds' ratios, and where the true one lies (95 %)."""
    found = ratios(values(slices, figure), values(reference, figure))
    low, high = median_interval(found)
    return {"median": median(found), "low": low, "high": high}


def values(slices: list[Slice], figure: str) -> list[float]:
    return [getattr(one, figure) for one in slices]


def _where_they_differ(differences: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each slice that has some."""
    for (variant, num_streams, slice_), found in itertools.groupby(
        differences, key=itemgetter("variant", "num_streams", "slice")
    ):
        firsts = [difference["first"] for difference in found]
        yield (
            f"  {variant}, slice {slice_}: {len(firsts)} of {num_streams} streams, from token {min(firsts)} on"
            f" (the last of them from {max(firsts)} on)"
        )
