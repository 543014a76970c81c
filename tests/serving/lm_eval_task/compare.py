"""Score the tasks of this directory with lm-evaluation-harness.

python compare.py server URL MODEL_NAME OUT.json        through a server's API
python compare.py transformers MODEL_DIR OUT.json       in transformers itself

What transformers gives for the bundled model is in transformers.json: it takes as long as everything else.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

HERE = Path(__file__).parent


def load_task(name: str) -> dict[str, Any]:
    """A task's YAML, with the path of its data made absolute."""
    task = yaml.safe_load((HERE / f"{name}.yaml").read_text())
    files = task["dataset_kwargs"]["data_files"]
    files["test"] = str(HERE / files["test"])
    return task


def evaluate(model: str, model_args: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """Metrics, and the log likelihood of every candidate of every sample."""
    found = simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=[load_task("continuations"), load_task("paragraphs")],
        task_manager=TaskManager(include_defaults=False),  # the harness's own are thousands of files
        batch_size=batch_size,
        bootstrap_iters=0,
        log_samples=True,
        verbosity="ERROR",
    )
    return {
        "metrics": found["results"],
        "samples": {
            name: [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
            for name, samples in found["samples"].items()
        },
    }


def of_server(url: str, name: str) -> dict[str, Any]:
    served = {"model": name, "base_url": f"{url}/v1/completions", "num_concurrent": 2, "max_length": 2048}
    return evaluate("local-completions", served, batch_size=8)


def of_transformers(directory: str) -> dict[str, Any]:
    local = {"pretrained": directory, "dtype": "float32", "device": "cpu", "max_length": 2048}
    return evaluate("hf", local, batch_size=32)


def main(side: str, *arguments: str) -> None:
    *about, out = arguments
    scores = of_server(*about) if side == "server" else of_transformers(*about)
    Path(out).write_text(json.dumps(scores, default=str) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
