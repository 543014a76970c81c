"""The same decode by transformers' continuous batching: run by decode.py in a process of its own."""

import json
import sys
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

_WARM_TOKENS = 8


def measure(ask: dict[str, Any]) -> dict[str, Any]:
    """Median time between two tokens of a stream when all of them decode."""
    config = AutoConfig.from_pretrained(ask["model"])
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    step_ms: dict[str, float] = {}
    error = None
    for batch in ask["batches"]:
        try:
            step_ms[str(batch)] = _decode(model, batch, ask) * 1e3
        except Exception as problem:  # what it cannot do is a result too
            error = f"{batch} streams: {type(problem).__name__}: {problem}"[:300]
    return {"step_ms": step_ms, "error": error}


def _decode(model: Any, batch: int, ask: dict[str, Any]) -> float:
    vocab_size, context = model.config.vocab_size, ask["context"]
    prompts = [[(7919 * i + 31 * j) % vocab_size for j in range(context)] for i in range(batch)]
    num_tokens = ask["num_tokens"][str(batch)]
    generation = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1)
    with torch.no_grad():
        outputs = model.generate_batch(prompts, generation_config=generation, record_timestamps=True)
    stamps = [output.timestamps for output in outputs.values()]
    # All of them decode from when the last one has begun until the first one ends.
    first, last = max(times[_WARM_TOKENS] for times in stamps), min(times[-1] for times in stamps)
    gaps = [b - a for times in stamps for a, b in pairwise(times) if first <= a and b <= last]
    if not gaps:
        raise RuntimeError("the first stream ended before the last one began")
    found: float = median(gaps)
    return found


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
