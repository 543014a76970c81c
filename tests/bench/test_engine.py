"""What `bench engine` says of the limits that are reached."""

from pathlib import Path
from typing import Any

import pytest

from everserve_bench.micro import engine
from everserve_bench.micro.roofline import Roofline
from everserve_bench.shapes import SMALL_MOE

CASE = engine.Case("a model", Path("nowhere"), SMALL_MOE, itemsize=4)
ROOFLINE = Roofline(bytes_per_s=40e9, flops=80e9)


def row(system: str, streams: int, between_ms: float) -> dict[str, Any]:
    """Half of the time goes into prompts."""
    values = {"tokens_per_s": 500 * streams / between_ms, "itl_p50_ms": between_ms}
    values |= {"first_token_ms": 1.0, "itl_p99_ms": 1.0}
    return {"system": system, "streams": streams} | {
        name: {"median": value, "min": value, "max": value} for name, value in values.items()
    }


def test_each_row_says_which_limit_is_tighter_and_how_much_of_it_is_reached(capsys: pytest.CaptureFixture[str]) -> None:
    one, many = (ROOFLINE.floor(SMALL_MOE, streams, engine.PROMPT + engine.OUTPUT // 2, 4) for streams in (1, 64))
    rows = [row("everserve", 1, 2e3 * one.memory_s), row("everserve", 64, 4e3 * (many.arithmetic_s or 0))]
    rows += [row("transformers generate", streams, 100.0) for streams in (1, 64)]
    engine.add_floors(CASE, rows, ROOFLINE)
    assert rows[0]["limit"] == "memory" and rows[0]["share_between_tokens"] == pytest.approx(0.5)
    assert rows[0]["share_of_requests"] == pytest.approx(0.25)
    assert rows[1]["limit"] == "arithmetic" and rows[1]["share_between_tokens"] == pytest.approx(0.25)
    assert "limit" not in rows[2]
    engine._print_comparison(CASE, rows)
    lines = [line for line in capsys.readouterr().out.splitlines() if "everserve" in line]
    cells = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines]
    assert [(line[-3], line[-1]) for line in cells] == [("memory", "50% / 25%"), ("arithmetic", "25% / 12%")]
