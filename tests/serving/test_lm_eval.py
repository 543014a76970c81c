"""lm-evaluation-harness gets the same scores from the server as from transformers on the same weights.

That covers `echo` with logprobs, lists of token-id prompts, `/tokenizer_info` and `/tokenize` (the harness takes its
tokenizer from the server), and the numbers of the model itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everserve.model.bundled import DEMO_MODEL

HERE = Path(__file__).parent / "lm_eval_task"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def evaluate(directory: Path, *arguments: str) -> Any:
    """What the harness itself finds, in a process of its own."""
    out = directory / "scores.json"
    finished = subprocess.run(
        [sys.executable, str(HERE / "compare.py"), *arguments, str(out)],
        env={**os.environ, **OFFLINE, "HF_HOME": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        check=False,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def scores(start_server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with start_server("--dtype", "float32") as server:
        ours = evaluate(tmp_path_factory.mktemp("lm_eval"), "server", server.url, server.model)
    return {"server": ours, "transformers": json.loads((HERE / "transformers.json").read_text())}


@pytest.mark.long
def test_transformers_still_finds_what_is_kept(scores: Any, tmp_path: Path) -> None:
    now, kept = evaluate(tmp_path, "transformers", str(DEMO_MODEL)), scores["transformers"]
    assert set(now["samples"]) == set(kept["samples"])
    for task, samples in now["samples"].items():
        assert log_likelihoods(samples) == pytest.approx(log_likelihoods(kept["samples"][task]), rel=1e-4, abs=1e-4)


def log_likelihoods(samples: Any) -> list[float]:
    """Every number in the nested lists of a task's responses; booleans are lm-eval's `is greedy`."""
    if isinstance(samples, list):
        return [number for sample in samples for number in log_likelihoods(sample)]
    return [float(samples)] if samples not in (True, False, "True", "False") else []


@pytest.mark.parametrize("metric", ["acc,none", "acc_norm,none"])
def test_accuracies_are_equal(scores: Any, metric: str) -> None:
    ours, theirs = (scores[side]["metrics"]["everserve_continuations"][metric] for side in ("server", "transformers"))
    assert ours == theirs


def test_perplexities_are_equal(scores: Any) -> None:
    ours, theirs = (
        scores[side]["metrics"]["everserve_paragraphs"]["byte_perplexity,none"] for side in ("server", "transformers")
    )
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("task", ["everserve_continuations", "everserve_paragraphs"])
def test_every_log_likelihood_is_equal(scores: Any, task: str) -> None:
    ours, theirs = (log_likelihoods(scores[side]["samples"][task]) for side in ("server", "transformers"))
    assert len(ours) == len(theirs) >= 6
    assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-3)
