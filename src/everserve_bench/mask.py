"""What do answers lose while some experts are masked, next to none?

    random       experts drawn for each layer, several times
    every n-th   the same ones in all layers
    most used    in each layer the experts that the same text uses most: the worst loss there can be
    least used   in each layer those that it uses least

ReviveMoE's Table 2 asks this of DeepSeek V3. Here it is the bundled model, on text that it was not trained on:
perplexity, and a multiple-choice task made of the same text that lm-evaluation-harness asks (mask_tasks.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from everserve.model.bundled import DEMO_MODEL
from everserve.progress import Progress
from everserve_bench import mask_report, mask_tasks, report
from everserve_bench.held_out import held_out_texts
from everserve_bench.masked_model import MaskedModel

FRACTIONS = ("1/64", "1/32", "1/16", "1/8", "1/4", "1/2")
RANDOM, EVERY_NTH, MOST_USED, LEAST_USED = "random", "every n-th", "most used", "least used"
CHOICES = (RANDOM, EVERY_NTH, MOST_USED, LEAST_USED)
Mask = NDArray[np.uint8]  # [call][expert], 1: masked


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much text, and how often experts are drawn."""

    num_tokens: int = 16_384
    window: int = 512  # tokens of context, at most
    num_questions: int = 200  # of the task; 0: no task
    num_draws: int = 3
    num_threads: int = 2


@dataclass(frozen=True)
class Case:
    """Some experts that are masked."""

    choice: str
    fraction: str
    draw: int
    num_masked: int  # of each layer
    masked_LN: Mask


def cases(rows_LN: NDArray[np.int64], num_draws: int) -> Iterator[Case]:
    """All masks to try. `rows_LN`: how often each expert is used."""
    num_experts = rows_LN.shape[1]
    for choice in CHOICES:
        for fraction in FRACTIONS:
            num = round(Fraction(fraction) * num_experts)
            for draw in range(num_draws if choice == RANDOM else 1):
                if num:
                    yield Case(choice, fraction, draw, num, mask_of(choice, num, rows_LN, draw))


def mask_of(choice: str, num: int, rows_LN: NDArray[np.int64], draw: int) -> Mask:
    """So many experts of each layer."""
    num_layers, num_experts = rows_LN.shape
    masked_LN = np.zeros(rows_LN.shape, np.uint8)
    by_use_LN = np.argsort(rows_LN, axis=1, kind="stable")
    dice = np.random.default_rng([num, draw])
    for layer in range(num_layers):
        chosen = {
            RANDOM: dice.permutation(num_experts)[:num],
            EVERY_NTH: np.arange(num) * num_experts // num,
            MOST_USED: by_use_LN[layer, num_experts - num :],
            LEAST_USED: by_use_LN[layer, :num],
        }[choice]
        masked_LN[layer, chosen] = 1
    return masked_LN


def windows(pieces: Sequence[Sequence[int]], length: int, num_tokens: int) -> list[list[int]]:
    """Parts of all pieces in turn, each predicting up to `length` tokens, until there are enough tokens."""
    parts = [
        [list(piece[start : start + length + 1]) for start in range(0, len(piece) - length, length)] for piece in pieces
    ]
    found: list[list[int]] = []
    for i in range(max(map(len, parts), default=0)):
        for part in parts:
            if i < len(part) and len(found) * length < num_tokens:
                found.append(part[i])
    return found


def run(settings: Settings, text: Path | None, out: Path | None) -> None:
    """The whole benchmark."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    texts = [text.read_text()] if text is not None else held_out_texts()
    pieces = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in texts]
    asked = windows(pieces, settings.window, settings.num_tokens)
    model = MaskedModel(DEMO_MODEL, settings.window, settings.num_threads)
    harness = mask_tasks.load(settings.num_questions, texts, tokenizer)
    none = np.zeros((len(model.config.moe_layers), model.config.num_experts), np.uint8)
    base = _measure(model, none, asked, harness)
    found = []
    tried = [*cases(model.rows_by_expert, settings.num_draws)]
    with Progress() as progress:
        progress.begin("masks", len(tried))
        for done, case in enumerate(tried):
            figures = _measure(model, case.masked_LN, asked, harness)
            found.append({**_as_json(case), **figures})
            progress.update(done + 1, f"{case.choice}, {case.fraction}: perplexity {figures['perplexity']:.2f}")
        progress.end()
    result = {
        "model": "bundled",
        "settings": asdict(settings),
        "num_experts": model.config.num_experts,
        "experts_per_token": model.config.experts_per_token,
        "num_tokens": sum(len(window) - 1 for window in asked),
        "base": base,
        "cases": found,
    }
    mask_report.show(result, report.write("mask", result, out))


def _measure(
    model: MaskedModel, masked_LN: Mask, asked: list[list[int]], harness: mask_tasks.Harness | None
) -> dict[str, float]:
    model.use_mask(masked_LN)
    total = sum(float(model.logprobs(window)[0].sum()) for window in asked)
    num_tokens = sum(len(window) - 1 for window in asked)
    figures = {"perplexity": float(np.exp(-total / num_tokens))}
    return figures | (harness.score(model) if harness is not None else {})


def _as_json(case: Case) -> dict[str, Any]:
    return {"choice": case.choice, "fraction": case.fraction, "draw": case.draw, "num_masked": case.num_masked}
