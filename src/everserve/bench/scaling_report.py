"""What the scaling benchmark found: per cell and kind of fault, as a dictionary and as a table."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everserve.bench import failover_report, report
from everserve.bench.failover_report import TITLES, both
from everserve.bench.grid import FAULTS, PointResult
from everserve.bench.incident import Round

_LEGEND = (
    "gap: the largest of any stream that spans the kill or begins within 1 s; over p99: of the times between tokens "
    "before the kill.\nfrom a log: tokens of all streams that moved whose KV was copied; again: of each of them, "
    "computed again.\nwhole: every seat is taken and ready again; inexact: tokens lost or different; harmed: workers "
    "declared gone that were not killed."
)


def summarize(found: Sequence[PointResult]) -> dict[str, Any]:
    """The cells, in the order of the table, and the verdict over all of them."""
    ordered = sorted(found, key=lambda one: (one.cell.context, one.cell.num_streams))
    totals = failover_report.summarize([round_ for one in found for round_ in one.rounds])
    del totals["faults"]  # of cells that have nothing in common
    return {
        "cells": [_of_cell(one) for one in ordered],
        **totals,
        "num_failures": sum(len(one.failures) for one in found),
    }


def is_passed(result: dict[str, Any]) -> bool:
    """A cell that does not fit is no failure."""
    return failover_report.is_passed(result) and not result["num_failures"]


def _of_cell(found: PointResult) -> dict[str, Any]:
    of_faults = {fault: failover_report.of_fault([r for r in found.rounds if r.fault == fault]) for fault in FAULTS}
    return {
        **asdict(found.cell),
        "faults": {fault: one for fault, one in of_faults.items() if one},
        "does_not_fit": found.misfits,
        "failures": found.failures,
        "rounds": [_brief(round_) for round_ in found.rounds],
    }


def _brief(round_: Round) -> dict[str, Any]:
    """Without what is only for a picture of one kill."""
    return {name: value for name, value in asdict(round_).items() if name != "series"}


def show(result: dict[str, Any], path: Path, plot: Path | None) -> None:
    """A table for each kind of fault, what could not be measured, and the verdict."""
    settings = result["settings"]
    setup = f"{result['model']}, {settings['num_attention']} attention and {settings['num_expert']} expert workers"
    for fault in FAULTS:
        report.print_table(
            f"SIGKILL to an {TITLES[fault]}; {setup}; kills in each cell: {settings['rounds']}; median (worst)",
            [
                *("context", "streams", "gap ms", "over p99 ms", "p50 / p99 ms", "from a log"),
                *("again", "noticed ms", "whole s", "inexact", "harmed"),
            ],
            [_row(cell, fault) for cell in result["cells"]],
        )
    print(_LEGEND)
    for line in (*_remarks(result), failover_report.survivors(result)):
        print(line)
    verdict = "every stream is exact" if result["is_exact"] else "FAILED: tokens were lost or changed"
    print(
        f"{result['num_streams_compared']} streams, {result['num_tokens_compared']} tokens compared with the "
        f"undisturbed runs: {verdict}"
    )
    print(f"written to {path}" + (f" and {plot}" if plot else "; for the plot: pip install 'everserve[bench]'"))


def _row(cell: dict[str, Any], fault: str) -> list[str]:
    head = [str(cell["context"]), str(cell["num_streams"])]
    found = cell["faults"].get(fault)
    if found is None:
        return [*head, "FAILED" if fault in cell["failures"] else "does not fit", *[""] * 8]
    return [
        *head,
        both(found["gap_ms"], 1),
        both(found["excess_ms"], 1),
        f"{found['normal_p50_ms']['median']:.1f} / {found['normal_p99_ms']['median']:.1f}",
        both(found["tokens_restored"], 0),
        both(found["tokens_recomputed"], 1),
        both(found["detected_s"], 1, 1e3),
        both(found["whole_s"], 1),
        str(found["num_lost"] + found["num_different"]),
        str(found["others_lost"]),
    ]


def _remarks(result: dict[str, Any]) -> list[str]:
    """Why cells have no figures, one line each."""
    lines = []
    for cell in result["cells"]:
        title = f"{cell['num_streams']} streams of {cell['context']}"
        both_same = len(set(cell["does_not_fit"].values())) == 1 and len(cell["does_not_fit"]) == len(FAULTS)
        misfits = {"": cell["does_not_fit"]["expert"]} if both_same else cell["does_not_fit"]
        lines += [f"{title}{fault and f', {TITLES[fault]}'}: does not fit: {why}" for fault, why in misfits.items()]
        lines += [f"{title}, {TITLES[fault]}: FAILED: {why}" for fault, why in cell["failures"].items()]
    left_out = [f"{cell['num_streams']} of {cell['context']}" for cell in result["left_out"]]
    if left_out:
        lines.append(f"left out, because their prompts have more than --most-tokens: {', '.join(left_out)}")
    return lines
