"""Prompts beside streams that decode, in one engine: how long these wait, and how fast prompts are computed.

    fixed       512 prompt tokens in every step
    measured    as many as let a step take 1.5 times as long as one without (engine/chunk_sizes.py)

The same streams and the same prompts, twice: in the first pass the engine learns how long its steps take.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from everserve.engine.engine import Engine
from everserve.tables.requests import RequestSpec, SamplingParams, as_tokens

VARIANTS: Mapping[str, Mapping[str, Any]] = {"fixed": {"chunk": 512}, "measured": {"slowdown": 1.5}}
_WARM_STEPS, _STEPS = 8, 64


class MakeEngine(Protocol):
    """`chunk`, `slowdown`: how much of prompts a step computes while streams decode."""

    def __call__(self, step_tokens: int, chunk: int | None = None, slowdown: float = 0.0) -> Engine: ...


@dataclass(frozen=True)
class Load:
    """Streams that decode, and prompts that come at once. `output`: more than there will be steps."""

    num_decoding: int
    context: int
    output: int
    num_prompt: int
    num_prompts: int

    @property
    def max_len(self) -> int:
        return max(self.context + self.output, self.num_prompt + 1)


LOADS = {"cpu": Load(4, 16, 300, 256, 2), "cuda": Load(32, 256, 2048, 2048, 8)}


def measure(
    make: MakeEngine, step_tokens: int, load: Load, clock: Callable[[], float] = time.perf_counter
) -> list[dict[str, Any]]:
    """A row for each variant."""
    rows = []
    for name, given in VARIANTS.items():
        engine = make(step_tokens, **given)
        _add(engine, "decoding", load.context, load.num_decoding, load.output)
        while any(sequence.num_output < _WARM_STEPS for sequence in _all(engine)):
            engine.step()
        pure = [_timed(engine, clock) for _ in range(_STEPS)]
        _with_prompts(engine, clock, load)
        mixed = _with_prompts(engine, clock, load)
        assert len(_all(engine)) == load.num_decoding, "streams have ended before the prompts"
        engine.cancel_all()
        engine.forget_ahead()
        rows.append(row(name, load, pure, mixed))
    return rows


def row(name: str, load: Load, pure_s: list[float], mixed_s: list[float]) -> dict[str, Any]:
    """`pure_s`, `mixed_s`: of each step without prompts, and with."""
    num_tokens = load.num_prompt * load.num_prompts
    return {
        "variant": name,
        "num_decoding": load.num_decoding,
        "num_prompt": load.num_prompt,
        "num_prompts": load.num_prompts,
        "pure_ms": [_ms(pure_s, 0.5), _ms(pure_s, 0.99)],
        "mixed_ms": [_ms(mixed_s, 0.5), _ms(mixed_s, 0.99)],
        "tokens_per_step": num_tokens / len(mixed_s),
        "prompt_tokens_per_s": num_tokens / sum(mixed_s),
        "slowdown": _ms(mixed_s, 0.99) / _ms(pure_s, 0.99),
    }


def _with_prompts(engine: Engine, clock: Callable[[], float], load: Load) -> list[float]:
    """Seconds of each step until all prompts are computed."""
    _add(engine, "prompt", load.num_prompt, load.num_prompts, 1)
    times: list[float] = []
    while len(_all(engine)) > load.num_decoding:
        times.append(_timed(engine, clock))
    return times


def _timed(engine: Engine, clock: Callable[[], float]) -> float:
    began = clock()
    engine.step()
    return clock() - began


def _all(engine: Engine) -> list[Any]:
    return [*engine.scheduler.running, *engine.scheduler.waiting]


def _add(engine: Engine, name: str, num_prompt: int, num: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    for i in range(num):
        prompt = [1 + (7919 * i + 31 * j + num_prompt) % (engine.limits.vocab_size - 1) for j in range(num_prompt)]
        engine.add(RequestSpec(id=f"{name}-{i}", prompt=as_tokens(prompt), params=params))


def _ms(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return 1e3 * ordered[math.ceil(share * len(ordered)) - 1]
