"""How fast one engine computes prompts, and how far from what the machine allows. In a process of its own.

Two limits, measured in the same run: arithmetic, by a large matrix product of torch in the weights' type (float32 on a
CPU, whose kernels widen weights in registers), and reading every weight once per step. How many tokens a step has
decides which of them is the tighter one.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from msgspec import structs

from everserve.engine.engine import Engine
from everserve.errors import EverserveError
from everserve.model.config import ModelConfig
from everserve.plan import steps
from everserve.plan.steps import StepWork
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens
from everserve_bench import prefill_beside
from everserve_bench.degree_plan import Parts, divided
from everserve_bench.prefill_beside import LOADS

_PRODUCT = {"cpu": 1536, "cuda": 8192}  # of a matrix
_NUM_PRODUCTS = 6
_PROFILED_PROMPT = 512  # tokens
_CPU_STEP_TOKENS = 512


@dataclass(frozen=True)
class Built:
    """What is measured. The steps of `first` are the largest."""

    first: Engine
    model: ModelConfig
    weight_bytes: Callable[[int], float]  # that a step of so many tokens must read

    def engine(self, step_tokens: int, chunk: int | None = None, slowdown: float = 0.0) -> Engine:
        """One with the same weights whose steps have at most so many tokens; while streams decode, `chunk` of prompts,
        or as many as take `slowdown` times as long."""
        given = structs.replace(
            self.first.config,
            max_num_batched_tokens=step_tokens,
            max_prefill_while_decoding=chunk or step_tokens,
            max_prefill_slowdown=slowdown,
        )
        return self.first.alike(given)


def measure_apart(
    model: str,
    device: str,
    points: list[tuple[int, int]],
    repeats: int,
    step_tokens: tuple[int, ...] = (),
    profiled: bool = False,
    beside: bool = False,
) -> dict[str, Any]:
    """`points`: tokens of each prompt, and how many prompts at once. `profiled`: where the time of a full step goes.
    `beside`: prompts beside decoding streams too."""
    ask: dict[str, Any] = {"model": model, "device": device, "points": points, "repeats": repeats}
    ask |= {"profiled": profiled, "beside": beside}
    ask["step_tokens"] = step_tokens or (default_step_tokens(model, device),)
    command = [sys.executable, "-m", "everserve_bench.prefill_engine", json.dumps(ask)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise EverserveError(f"the engine alone ended with status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def default_step_tokens(model: str, device: str) -> int:
    """What the steps of a server with one worker have at most."""
    return _CPU_STEP_TOKENS if device == "cpu" else steps.step_tokens(ModelConfig.from_directory(model))


def measure(ask: dict[str, Any]) -> dict[str, Any]:
    device, points = ask["device"], [(num_prompt, batch) for num_prompt, batch in ask["points"]]
    limits = Limits(_arithmetic(device), _bandwidth(device))
    most_tokens, beside = max(ask["step_tokens"]), LOADS[device] if ask["beside"] else None
    longest, most = max(point[0] for point in points) + 1, max(point[1] for point in points)
    if beside:
        longest, most = max(longest, beside.max_len), max(most, beside.num_decoding + beside.num_prompts)
    built = _build(ask["model"], device, longest, most, most_tokens)
    rows, profiles = [], []
    for step_tokens in ask["step_tokens"]:
        engine = built.engine(step_tokens)
        rows += [_measure_point(built, engine, limits, *point, ask["repeats"]) for point in points]
        if ask["profiled"]:
            profiles.append({"step_tokens": step_tokens, **_profile(engine, step_tokens)})
    return {
        "flops": limits.flops,
        "bandwidth": limits.bandwidth,
        "weight_bytes": built.weight_bytes(most_tokens),
        "rows": rows,
        "profiles": profiles,
        "beside": prefill_beside.measure(built.engine, most_tokens, beside) if beside else [],
    }


class Limits(NamedTuple):
    """What the machine can do in a second."""

    flops: float
    bandwidth: float


def _measure_point(
    built: Built, engine: Engine, limits: Limits, num_prompt: int, batch: int, repeats: int
) -> dict[str, Any]:
    seconds, num_steps = _prefill(engine, num_prompt, batch, repeats)
    work = StepWork.of(built.model, num_sharing=1)
    weight_bytes = built.weight_bytes(num_prompt * batch // num_steps)
    return row(
        num_prompt=num_prompt,
        batch=batch,
        step_tokens=engine.config.max_num_batched_tokens,
        num_steps=num_steps,
        seconds=seconds,
        arithmetic_s=batch * work.cost(0, num_prompt) / limits.flops,
        reading_s=num_steps * weight_bytes / limits.bandwidth,
    )


def row(
    *,
    num_prompt: int,
    batch: int,
    step_tokens: int,
    num_steps: int,
    seconds: float,
    arithmetic_s: float,
    reading_s: float,
) -> dict[str, Any]:
    """One line of the result: how fast, and what each limit alone would allow."""
    num_tokens = num_prompt * batch
    return {
        "prompt": num_prompt,
        "batch": batch,
        "step_tokens": step_tokens,
        "tokens_per_s": num_tokens / seconds,
        "steps": num_steps,
        "arithmetic_tokens_per_s": num_tokens / arithmetic_s,
        "reading_tokens_per_s": num_tokens / reading_s,
        "share": max(arithmetic_s, reading_s) / seconds,
    }


def _prefill(engine: Engine, num_prompt: int, batch: int, repeats: int) -> tuple[float, int]:
    """Seconds from the first step to the last first token, and the steps. The first time warms up."""
    times: list[float] = []
    for repeat in range(repeats + 1):
        _add(engine, num_prompt, batch, repeat)
        began, num_steps = time.perf_counter(), 0
        while engine.has_work:
            engine.step()
            num_steps += 1
        times.append(time.perf_counter() - began)
    return median(times[1:]), num_steps


def _add(engine: Engine, num_prompt: int, batch: int, repeat: int) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for i in range(batch):
        seed = 7919 * i + 104729 * repeat + num_prompt
        prompt = [1 + (seed + 31 * j) % (engine.limits.vocab_size - 1) for j in range(num_prompt)]
        engine.add(RequestSpec(id=f"{repeat}-{i}", prompt=as_tokens(prompt), params=params))


def _profile(engine: Engine, step_tokens: int) -> dict[str, Any]:
    """Where the time of one full step goes."""
    from everserve_bench.micro.kernel_times import kernel_times  # noqa: PLC0415 (torch.profiler: only when it is asked for)

    num_prompt = min(_PROFILED_PROMPT, step_tokens, engine.limits.max_model_len - 1)
    for repeat in range(2):  # a step with the profiler, and one without
        _add(engine, num_prompt, min(step_tokens // num_prompt, engine.config.max_num_seqs), repeat)
    times = kernel_times(engine.step)
    while engine.has_work:
        engine.step()
    return times


def _arithmetic(device: str) -> float:
    """Operations per second. Of random numbers: a GPU is faster with others, because it needs less power."""
    size, dtype = _PRODUCT[device], torch.float32 if device == "cpu" else torch.bfloat16
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    left, right = (torch.randn((size, size), dtype=dtype, device=device) for _ in range(2))
    times: list[float] = []
    for _ in range(_NUM_PRODUCTS):
        began = time.perf_counter()
        left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 2.0 * size**3 / min(times)


def _bandwidth(device: str) -> float:
    """Bytes read per second."""
    if device == "cuda":
        from everserve_bench.micro.decode import copy_bandwidth  # noqa: PLC0415 (only where there is a GPU)

        return copy_bandwidth()
    from everserve_bench.micro.roofline import read_bandwidth  # noqa: PLC0415 (torch's threads are all in use until here)

    return read_bandwidth(256 << 20)


def _build(model: str, device: str, longest: int, most: int, step_tokens: int) -> Built:
    """With everything in one process: for so many streams of so many tokens, and steps of so many."""
    if device == "cuda":
        return _build_on_gpu(model, longest, most, step_tokens)
    from everserve_bench.micro.restore_cpu import CpuWorkers  # noqa: PLC0415

    workers = CpuWorkers(model, longest, num_streams=most, num_threads=len(os.sched_getaffinity(0)))
    item_bytes = 4 if workers.model.dtype == "float32" else 2
    whole = Parts.of(divided(workers.model), item_bytes, 0).whole
    return Built(workers.build("off", step_tokens).engine, workers.model, lambda num: whole)


def _build_on_gpu(model: str, longest: int, most: int, step_tokens: int) -> Built:
    from everserve_bench.device_shapes import floor_bytes  # noqa: PLC0415
    from everserve_bench.micro.decode import build  # noqa: PLC0415 (only where there is a GPU)

    first, config = build(model, most, longest, max_batched=step_tokens)
    return Built(first, config, lambda num: floor_bytes(config, num, 0))


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
