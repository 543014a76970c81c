"""`everserve bench decode`: how fast one process decodes on a GPU, and how far from what its memory allows.

The floor is the bytes that a step must read, over the bandwidth of a large copy measured in the same run. Beside it,
transformers' continuous batching, in a process of its own, on the same shape with random weights. Steps are launched
one by one, and ahead, as a server does by itself (engine/ahead.py). With `--served` also the time between two tokens of
a client, through HTTP.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from everserve.backends.cuda.lanes.local_experts import LocalCudaExperts
from everserve.config.compute import ComputeConfig
from everserve.config.engine import EngineConfig
from everserve.config.kvlog import LogConfig
from everserve.config.model import ModelSource
from everserve.engine.engine import Engine
from everserve.errors import ConfigError, EverserveError
from everserve.memory.device import Driver
from everserve.memory.names import WEIGHTS_STATE_BYTES
from everserve.tables.ids import Incarnation, Rank, Role
from everserve.tables.memory import Kind
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens
from everserve.wire.messages import StartWorker, WorkerSettings
from everserve_bench import report
from everserve_bench.device_shapes import floor_bytes, write_shape
from everserve_bench.micro import decode_report, served_decode

_BLOCK_SIZE = 64
_BATCHED_TOKENS = 1024
_WARM_STEPS = 8


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    # With how many layers. All 32 of Mixtral would fit; transformers would take minutes.
    shapes: tuple[tuple[str, int | None], ...] = (("mixtral", 16), ("qwen3", None))
    batches: tuple[int, ...] = (1, 16, 64, 128, 256)
    context: int = 512
    steps: int = 32
    has_baseline: bool = True
    is_served: bool = False  # measure it through HTTP too
    launch_ahead: bool = True  # measure steps that are launched ahead too


def run(settings: Settings, out: Path | None) -> None:
    if not torch.cuda.is_available():
        raise ConfigError("bench decode needs an NVIDIA GPU")
    bandwidth = copy_bandwidth()
    results: list[dict[str, Any]] = []
    for shape, num_layers in settings.shapes:
        with tempfile.TemporaryDirectory() as directory:
            model = write_shape(Path(directory), shape, num_layers)
            ours = _in_process("decode", str(model), settings)
            if "error" in ours:
                raise EverserveError(ours["error"])
            ahead = _in_process("decode", str(model), settings, True) if settings.launch_ahead else {}
            theirs = _in_process("decode_baseline", str(model), settings) if settings.has_baseline else {}
            served = _served(str(model), ours, settings) if settings.is_served else {}
            rows = [_row(shape, ours, theirs, batch, bandwidth) for batch in settings.batches]
            results += [row | _other_ways(ahead, served, str(row["batch"])) for row in rows]
        result = {"settings": asdict(settings), "bandwidth": bandwidth, "rows": results}
        path = report.write("decode", result, out)  # a run that is cut short leaves what it has
    decode_report.show(result, path)


def _served(model: str, ours: dict[str, Any], settings: Settings) -> dict[str, float]:
    """Milliseconds between tokens by number of streams."""
    return served_decode.measure(model, ours["vocab_size"], settings.batches, settings.context, settings.steps)


def _other_ways(ahead: dict[str, Any], served: dict[str, float], batch: str) -> dict[str, float | None]:
    return {"ahead_step_ms": ahead.get("step_ms", {}).get(batch), "served_ahead_ms": served.get(batch)}


def _row(shape: str, ours: dict[str, Any], theirs: dict[str, Any], batch: int, bandwidth: float) -> dict[str, Any]:
    step_ms = ours["step_ms"][str(batch)]
    floor_ms = ours["floor_bytes"][str(batch)] / bandwidth * 1e3
    return {
        "shape": shape,
        "num_layers": ours["num_layers"],
        "batch": batch,
        "step_ms": step_ms,
        "tokens_per_s": batch / step_ms * 1e3,
        "floor_ms": floor_ms,
        "share_of_floor": floor_ms / step_ms,
        "baseline_ms": theirs.get("step_ms", {}).get(str(batch)),
        "baseline_error": theirs.get("error"),
    }


def _in_process(module: str, model: str, settings: Settings, launch_ahead: bool = False) -> dict[str, Any]:
    """In a process of its own: its memory is free afterwards."""
    context, steps = settings.context, settings.steps
    ask: dict[str, Any] = {"model": model, "batches": settings.batches, "context": context, "steps": steps}
    ask["launch_ahead"] = launch_ahead
    ask["num_tokens"] = {batch: num_tokens(batch, context, steps) for batch in settings.batches}
    command = [sys.executable, "-m", f"{__package__}.{module}", json.dumps(ask)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"error": f"{module} ended with status {done.returncode}", "step_ms": {}}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    del source, target
    torch.cuda.empty_cache()
    return float(2 * 2 * (1 << 30) / median(times[2:]))


# -- the process that is measured ----------------------------------------------------------------


def measure(ask: dict[str, Any]) -> dict[str, Any]:
    """Median time of a step of the engine, everything included, for each number of streams."""
    most_tokens = num_tokens(max(ask["batches"]), ask["context"], ask["steps"])
    most_len = ask["context"] + most_tokens
    engine, model = build(ask["model"], max(ask["batches"]), most_len, ask["launch_ahead"])
    step_ms: dict[str, float] = {}
    floors: dict[str, int] = {}
    for batch in ask["batches"]:
        step_s, mean_context = _decode(engine, batch, ask["context"], ask["steps"])
        step_ms[str(batch)] = step_s * 1e3
        floors[str(batch)] = floor_bytes(model, batch, round(mean_context))
    return {
        "step_ms": step_ms,
        "floor_bytes": floors,
        "num_layers": model.num_layers,
        "vocab_size": model.vocab_size,
    }


def num_tokens(batch: int, context: int, steps: int) -> int:
    """How long each stream must be so that the first one has not ended when the last one, whose prompt was computed
    after all others, has been measured."""
    num_prefill_steps = -(-2 * batch * context // _BATCHED_TOKENS)  # twice: rows that decode take some of each step
    return steps + 2 * _WARM_STEPS + num_prefill_steps


def _decode(engine: Engine, batch: int, context: int, steps: int) -> tuple[float, float]:
    """Median time of a step in seconds, and the mean context of all streams meanwhile."""
    vocab_size = engine.limits.vocab_size
    params = SamplingParams(max_tokens=num_tokens(batch, context, steps), temperature=0.0)
    for i in range(batch):
        prompt = [(7919 * i + 31 * j) % vocab_size for j in range(context)]
        engine.add(RequestSpec(id=f"{batch}-{i}", prompt=as_tokens(prompt), params=params))
    while engine.scheduler.waiting or any(sequence.num_output < _WARM_STEPS for sequence in engine.scheduler.running):
        engine.step()
    times: list[float] = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    running = engine.scheduler.running
    assert len(running) == batch, f"{batch - len(running)} of {batch} streams have ended before the last measured step"
    mean_context = context + sum(sequence.num_output for sequence in running) / batch - steps / 2
    engine.cancel_all()
    engine.forget_ahead()
    return median(times), mean_context


def build(
    model: str,
    max_num_seqs: int,
    max_model_len: int,
    launch_ahead: bool = False,
    max_batched: int = _BATCHED_TOKENS,
) -> tuple[Engine, Any]:
    """A worker's engine with both roles, without the worker."""
    from everserve.backends.cuda.build import (  # noqa: PLC0415 (only in the process that is measured)
        SeatWeights,
        build_decoder,
        build_forward,
        engine_limits,
        make_pool,
        make_recorder,
    )
    from everserve.backends.cuda.device import open_device  # noqa: PLC0415
    from everserve.worker.loading import Loading  # noqa: PLC0415

    max_model_len = -(-max_model_len // _BLOCK_SIZE) * _BLOCK_SIZE
    start = _start(model, max_num_seqs, max_model_len, launch_ahead, max_batched)
    device = open_device(start, Loading(start))
    weights = SeatWeights(device, _memory(device.driver, SeatWeights.plan_of(device).num_bytes))
    decoder = build_decoder(device, weights)
    config = device.model
    experts = LocalCudaExperts(device.ops, weights.arena(), config.call_layers, config.max_shards)
    forward = build_forward(device, decoder, make_pool(device, decoder), experts, make_recorder(device))
    return Engine(start.settings.engine, engine_limits(device), device.ops, forward), config


def _memory(driver: Driver, num_bytes: int) -> dict[Kind, int]:
    state_fd = os.memfd_create("weights-state")
    os.ftruncate(state_fd, WEIGHTS_STATE_BYTES)
    return {Kind.WEIGHTS: driver.create(num_bytes), Kind.WEIGHTS_STATE: state_fd}


def _start(model: str, max_num_seqs: int, max_model_len: int, launch_ahead: bool, max_batched: int) -> StartWorker:
    settings = WorkerSettings(
        model=ModelSource(directory=model, dtype="bfloat16", load_format="dummy"),
        engine=EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_batched,
            max_prefill_while_decoding=max_batched,
            max_prefill_slowdown=0.0,
            block_size=_BLOCK_SIZE,
            kv_cache_bytes=1 << 60,  # all that the streams can use
            enable_prefix_caching=False,
            launch_ahead=launch_ahead,
        ),
        log=LogConfig(mode="off"),
        compute=ComputeConfig(device="cuda", batch_invariant=True),
    )
    return StartWorker(
        rank=Rank(0),
        incarnation=Incarnation(1),
        roles=(Role.ATTENTION, Role.EXPERT),
        settings=settings,
        num_workers=1,
        slots=None,
        detect_ms=0.0,
        device=0,
        gpu=0,
    )


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
