"""`bench mask`: which experts, which text, which questions; the bundled model under a mask; how it is shown."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from everserve.model.bundled import DEMO_MODEL
from everserve_bench import mask_report, mask_tasks
from everserve_bench.mask import CHOICES, FRACTIONS, RANDOM, Settings, cases, mask_of, windows
from everserve_bench.masked_model import MaskedModel

ROWS_LN = np.array([[5, 1, 9, 2, 7, 7, 0, 3], [1, 2, 3, 4, 5, 6, 7, 8]])


def test_which_experts_are_masked():
    assert mask_of("every n-th", 4, ROWS_LN, 0).tolist() == [[1, 0] * 4] * 2
    assert np.flatnonzero(mask_of("most used", 2, ROWS_LN, 0)[0]).tolist() == [2, 5]
    assert np.flatnonzero(mask_of("least used", 2, ROWS_LN, 0)[1]).tolist() == [0, 1]
    drawn = [mask_of(RANDOM, 3, ROWS_LN, draw) for draw in range(2)]
    assert all((masked.sum(axis=1) == 3).all() for masked in drawn) and not np.array_equal(*drawn)
    assert np.array_equal(drawn[0], mask_of(RANDOM, 3, ROWS_LN, 0)), "the same experts in every run"


def test_cases_are_rounded_to_whole_experts():
    found = [*cases(np.arange(64)[None].repeat(2, 0), num_draws=2)]
    assert {case.choice for case in found} == set(CHOICES) and len(found) == 5 * len(FRACTIONS)
    assert sorted({case.num_masked for case in found}) == [1, 2, 4, 8, 16, 32]
    assert {case.fraction for case in cases(ROWS_LN, 1)} == {"1/8", "1/4", "1/2", "1/16"} - {"1/16"}


def test_text_is_taken_from_all_pieces_in_turn():
    pieces = [list(range(100)), list(range(1000, 1030))]
    assert [window[0] for window in windows(pieces, 10, 45)] == [0, 1000, 10, 1010, 20]
    assert all(len(window) == 11 for window in windows(pieces, 10, 45))


def test_questions_have_one_right_answer():
    text = " ".join(f"w{i}" for i in range(400))
    for question in mask_tasks.questions([text], 20):
        last = question["context"].split()[-1]
        right = [choice.split()[0] == f"w{int(last[1:]) + 1}" for choice in question["choices"]]
        assert right[question["answer"]] and len(question["choices"]) == 4


def test_the_bundled_model_under_a_mask():
    """It loses little with one expert and more with half of them; experts that are masked get nothing. lm-eval asks."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    text = "It was a cold evening in November when the prince came into the room, and all who were there rose. " * 3
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    model = MaskedModel(DEMO_MODEL, 256, num_threads=1)
    none = np.zeros((len(model.config.moe_layers), model.config.num_experts), np.uint8)

    def loss(masked: np.ndarray) -> float:
        model.use_mask(masked)
        return -float(model.logprobs(tokens)[0].mean())

    base, rows = loss(none), model.rows_by_expert
    assert rows.sum() == (len(tokens) - 1) * model.config.experts_per_token * len(model.config.moe_layers)
    half = mask_of("most used", 32, rows, 0)
    assert base < loss(half)
    assert not (model.rows_by_expert - rows)[half == 1].any()
    assert loss(none) == base
    pytest.importorskip("lm_eval")
    harness = mask_tasks.load(3, [text * 5], tokenizer)
    assert harness is not None and 0 <= harness.score(model)["accuracy"] <= 1
    assert mask_tasks.load(0, [text], tokenizer) is None


def test_the_table(capsys, tmp_path: Path):
    found = [
        {"choice": choice, "fraction": fraction, "draw": draw, "num_masked": num, "perplexity": 32.0 + num}
        | {"accuracy": 0.7}
        for choice, draw in ((RANDOM, 0), (RANDOM, 1), ("every n-th", 0))
        for fraction, num in (("1/64", 1), ("1/2", 32))
    ]  # fmt: skip
    result = {
        "model": "m", "settings": asdict(Settings()), "num_experts": 64, "experts_per_token": 8, "num_tokens": 99,
        "base": {"perplexity": 32.0, "accuracy": 0.75}, "cases": found,
    }  # fmt: skip
    mask_report.show(result, tmp_path / "mask.json")
    text = capsys.readouterr().out
    assert "1/64 (1)" in text and "1/2 (32)" in text and "2.000 (worst 2.000)" in text and "1.031" in text
    assert "0.750 without" in text and "every n-th" in text
    assert (tmp_path / "mask.png").is_file() == ("mask.png" in text)
