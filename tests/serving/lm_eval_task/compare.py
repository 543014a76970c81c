"""Score one model twice with lm-evaluation-harness: through a server's API, and in transformers itself.

python compare.py URL MODEL_NAME MODEL_DIR OUT.json
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


def main(url: str, name: str, directory: str, out: str) -> None:
    served = {"model": name, "base_url": f"{url}/v1/completions", "num_concurrent": 2, "max_length": 2048}
    local = {"pretrained": directory, "dtype": "float32", "device": "cpu", "max_length": 2048}
    results = {
        "server": evaluate("local-completions", served, batch_size=8),
        "transformers": evaluate("hf", local, batch_size=32),
    }
    Path(out).write_text(json.dumps(results, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
