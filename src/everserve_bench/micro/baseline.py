"""transformers, measured in a process of its own: `generate` and continuous batching on the same weights and prompts.

`python -m everserve_bench.micro.baseline MODEL` answers one JSON line per JSON line: {"kind", "prompts", "max_tokens"}
in, {"seconds", "arrivals_s"} out, where arrivals are the times of each step since the start.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KINDS = ("generate", "continuous batching")


class Baseline:
    """The measuring process, seen from outside. It sleeps between measurements."""

    def __init__(self, model: Path, dtype: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "everserve_bench.micro.baseline", str(model), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def measure(self, kind: str, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"kind": kind, "prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the transformers baseline died ({kind}, {len(prompts)} prompts)")
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()
    run = {"generate": _generate, "continuous batching": _continuous}
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever libraries print must not be taken for an answer
    for line in sys.stdin:
        task = json.loads(line)
        with torch.inference_mode():
            result = run[task["kind"]](model, task["prompts"], task["max_tokens"])
        answers.write(json.dumps(result) + "\n")
        answers.flush()


def _generate(model: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Static batching: all prompts have the same length, so nothing is lost on padding."""
    import torch  # noqa: PLC0415
    from transformers import StoppingCriteriaList  # noqa: PLC0415

    arrivals: list[float] = []

    def note(input_ids: Any, scores: Any, **_: Any) -> Any:
        arrivals.append(time.perf_counter() - start)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    inputs = torch.tensor(prompts)
    start = time.perf_counter()
    model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([note]),
    )
    return {"seconds": time.perf_counter() - start, "arrivals_s": arrivals}


def _continuous(model: Any, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    from transformers import GenerationConfig  # noqa: PLC0415

    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, generation_config=config, persistent_manager=True, warmup=False)
    seconds = time.perf_counter() - start
    produced = sum(len(output.generated_tokens) for output in outputs.values())
    assert produced == len(prompts) * max_tokens, f"{produced} tokens instead of {len(prompts) * max_tokens}"
    return {"seconds": seconds, "arrivals_s": []}


if __name__ == "__main__":
    main()
