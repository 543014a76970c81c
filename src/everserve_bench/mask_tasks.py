"""A multiple-choice task out of held-out text, asked by lm-evaluation-harness: which of four continuations is the right
one? The wrong ones are from other places of the same text."""

import contextlib
import importlib
import io
import json
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from everserve_bench.masked_model import MaskedModel

TASK = "everserve_held_out"
_CONTEXT, _ENDING = 24, 8  # words
_NUM_CHOICES = 4


def load(num_questions: int, texts: Sequence[str], tokenizer: Tokenizer) -> "Harness | None":
    """None without questions, or without the harness: it is not needed to serve."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    if not num_questions:
        return None
    try:
        evaluator: Any = importlib.import_module("lm_eval.evaluator")
    except ImportError:
        print("lm-eval is not installed: no task, only perplexity")
        return None
    return Harness(evaluator, questions(texts, num_questions), tokenizer)


def questions(texts: Sequence[str], num: int, seed: int = 0) -> list[dict[str, Any]]:
    """Context, choices and the number of the right one."""
    dice = random.Random(f"everserve bench mask/{seed}")
    words = [text.split() for text in texts]
    words = [text for text in words if len(text) > _CONTEXT + _ENDING]

    def somewhere() -> tuple[str, str]:
        text = dice.choice(words)
        start = dice.randrange(len(text) - _CONTEXT - _ENDING)
        middle = start + _CONTEXT
        return " ".join(text[start:middle]), " ".join(text[middle : middle + _ENDING])

    found = []
    for _ in range(num):
        context, right = somewhere()
        answer = dice.randrange(_NUM_CHOICES)
        choices = [somewhere()[1] for _ in range(_NUM_CHOICES)]
        choices[answer] = right
        found.append({"context": context, "choices": choices, "answer": answer})
    return found


class Harness:
    """The harness with one task. Its model is ours, whatever is masked at that moment."""

    def __init__(self, evaluator: Any, asked: list[dict[str, Any]], tokenizer: Tokenizer) -> None:
        self._evaluator = evaluator
        self._tokenizer = tokenizer
        self._directory = tempfile.TemporaryDirectory(prefix="everserve-bench-mask-")
        self._data = Path(self._directory.name) / "questions.jsonl"
        self._data.write_text("".join(json.dumps(question) + "\n" for question in asked))
        tasks: Any = importlib.import_module("lm_eval.tasks")
        with contextlib.redirect_stderr(io.StringIO()):  # bars of its own
            self._tasks = tasks.get_task_dict([self._task()], tasks.TaskManager(include_defaults=False))

    def score(self, model: MaskedModel) -> dict[str, float]:
        with contextlib.redirect_stderr(io.StringIO()):
            found = self._evaluator.evaluate(
                lm=_language_model(model, self._tokenizer), task_dict=self._tasks, bootstrap_iters=0
            )
        return {"accuracy": float(found["results"][TASK]["acc,none"])}

    def _task(self) -> dict[str, Any]:
        return {
            "task": TASK,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(self._data)},
                "cache_dir": str(Path(self._directory.name) / "cache"),
            },
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "context",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": " ",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }


def _language_model(model: MaskedModel, tokenizer: Tokenizer) -> Any:
    """What the harness asks for likelihoods. Its base class is known only where it is installed."""
    base: Any = importlib.import_module("lm_eval.api.model").LM

    class Likelihoods(base):  # type: ignore[misc]
        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            return [self._score(*request.args) for request in requests]

        def _score(self, context: str, ending: str) -> tuple[float, bool]:
            num_context = len(tokenizer.encode(context, add_special_tokens=False).ids)
            whole = tokenizer.encode(context + ending, add_special_tokens=False).ids
            logprob_T, is_best_T = model.logprobs(whole)[:, num_context - 1 :]
            return float(logprob_T.sum()), bool(is_best_T.all())

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
            raise NotImplementedError("the task does not ask for it")

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            raise NotImplementedError("the task does not ask for it")

    return Likelihoods()
