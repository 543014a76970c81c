"""How fast one engine computes prompts, and how far from what the machine allows. In a process of its own.

Two limits, measured in the same run: arithmetic, by a large matrix product of torch in the weights' type (float32 on a
CPU, whose kernels widen weights in registers), and reading every weight once per step.
"""

import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch

from everserve.bench.degree_plan import Parts, divided
from everserve.engine.engine import Engine
from everserve.errors import EverserveError
from everserve.plan.steps import StepWork
from everserve.tables.requests import RequestSpec, SamplingParams

_PRODUCT = {"cpu": 1536, "cuda": 8192}  # of a matrix
_BATCHED_TOKENS = 512  # of a step, on a CPU


def measure_apart(model: str, device: str, points: list[tuple[int, int]], repeats: int) -> dict[str, Any]:
    """`points`: tokens of each prompt, and how many prompts at once."""
    ask = {"model": model, "device": device, "points": points, "repeats": repeats}
    command = [sys.executable, "-m", "everserve.bench.prefill_engine", json.dumps(ask)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise EverserveError(f"the engine alone ended with status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(ask: dict[str, Any]) -> dict[str, Any]:
    device, points = ask["device"], [tuple(point) for point in ask["points"]]
    flops, bandwidth = _arithmetic(device), _bandwidth(device)
    engine, model, item_bytes = _build(ask["model"], device, points)
    work, weight_bytes = StepWork.of(model, num_sharing=1), Parts.of(divided(model), item_bytes, 0).whole
    rows = []
    for num_prompt, batch in points:
        seconds, num_steps = _prefill(engine, num_prompt, batch, ask["repeats"])
        num_tokens = num_prompt * batch
        arithmetic_s = batch * work.cost(0, num_prompt) / flops
        reading_s = num_steps * weight_bytes / bandwidth
        rows.append(
            {
                "prompt": num_prompt,
                "batch": batch,
                "tokens_per_s": num_tokens / seconds,
                "steps": num_steps,
                "arithmetic_tokens_per_s": num_tokens / arithmetic_s,
                "reading_tokens_per_s": num_tokens / reading_s,
                "share": max(arithmetic_s, reading_s) / seconds,
            }
        )
    return {"flops": flops, "bandwidth": bandwidth, "weight_bytes": weight_bytes, "rows": rows}


def _prefill(engine: Engine, num_prompt: int, batch: int, repeats: int) -> tuple[float, int]:
    """Seconds from the first step to the last first token, and the steps. The first time warms up."""
    times: list[float] = []
    for repeat in range(repeats + 1):
        for i in range(batch):
            seed = 7919 * i + 104729 * repeat + num_prompt
            prompt = [1 + (seed + 31 * j) % (engine.limits.vocab_size - 1) for j in range(num_prompt)]
            engine.add(RequestSpec(id=f"{repeat}-{i}", prompt=prompt, params=SamplingParams(max_tokens=1)))
        began, num_steps = time.perf_counter(), 0
        while engine.has_work:
            engine.step()
            num_steps += 1
        times.append(time.perf_counter() - began)
    return median(times[1:]), num_steps


def _arithmetic(device: str) -> float:
    """Operations per second."""
    size, dtype = _PRODUCT[device], torch.float32 if device == "cpu" else torch.bfloat16
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    left, right = (torch.ones((size, size), dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best


def _bandwidth(device: str) -> float:
    """Bytes read per second."""
    if device == "cuda":
        from everserve.bench.decode import copy_bandwidth  # noqa: PLC0415 (only where there is a GPU)

        return copy_bandwidth()
    from everserve.bench.roofline import read_bandwidth  # noqa: PLC0415 (torch's threads are all in use until here)

    return read_bandwidth(256 << 20)


def _build(model: str, device: str, points: list[tuple[int, ...]]) -> tuple[Engine, Any, int]:
    """An engine with everything, its model, and bytes of a weight."""
    longest, most = max(point[0] for point in points) + 1, max(point[1] for point in points)
    if device == "cuda":
        from everserve.bench.decode import build  # noqa: PLC0415 (only where there is a GPU)

        engine, config = build(model, most, longest)
        return engine, config, 2
    from everserve.bench.restore_cpu import CpuWorkers  # noqa: PLC0415

    workers = CpuWorkers(model, longest, num_streams=most, num_threads=len(os.sched_getaffinity(0)))
    engine = workers.build("off", _BATCHED_TOKENS).engine
    return engine, workers.model, 4 if workers.model.dtype == "float32" else 2


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
