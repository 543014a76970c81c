"""What do the protections cost when nothing fails, and what does splitting the model over processes cost?

Each variant is compared with 2+2 (attention + expert workers) of the same round, and its time between tokens with one
process too; variants.py says how.

On a GPU all variants but those without a log have one: the pool itself, in memory that outlives its worker.

Slots for what others left in memory (`--map-experts`) exist only where workers do not hold all experts. So 2+2 with
them is to be compared with 2+2 without shadows, on CPUs with experts in memory.
"""

import gc
from dataclasses import dataclass
from pathlib import Path

from everserve.bench import overhead_report, report, variants
from everserve.bench.on_gpu import is_for_gpu
from everserve.bench.overhead_report import ALL_OFF, ONE_PROCESS, REFERENCE
from everserve.errors import ConfigError


def _split(num: int) -> tuple[str, ...]:
    return "--attention-workers", str(num), "--expert-workers", str(num)


_NO_DETECTION, _NO_SHADOWS = ("--detect-ms", "0"), ("--shadow-experts", "0")
_IN_MEMORY, _MAPPED = ("--weights", "memory", "--map-experts", "off"), ("--map-experts", "on")
_NO_LOG, _GPU_LOG, _NO_SPARES = ("--kv-log", "off"), ("--kv-log", "anchor"), ("--spares", "0")
VARIANTS: dict[str, tuple[str, ...]] = {
    ONE_PROCESS: (),
    "one process, 1 thread": ("--threads", "1"),
    "1+1": _split(1),
    REFERENCE: _split(2),
    "2+2, no detection": (*_split(2), *_NO_DETECTION),
    "2+2, no shadows": (*_split(2), *_NO_SHADOWS),
    "in memory, no shadows": (*_split(2), *_NO_SHADOWS, *_IN_MEMORY),
    "in memory, no shadows, mapped slots": (*_split(2), *_NO_SHADOWS, *_IN_MEMORY[:2], *_MAPPED),
    "2+2, no log": (*_split(2), *_NO_LOG),
    ALL_OFF: (*_split(2), *_NO_DETECTION, *_NO_SHADOWS, *_NO_LOG),
}
GPU_VARIANTS: dict[str, tuple[str, ...]] = {
    ONE_PROCESS: _GPU_LOG,
    "1+1": (*_split(1), *_GPU_LOG),
    REFERENCE: (*_split(2), *_GPU_LOG),
    "4+4": (*_split(4), *_GPU_LOG),
    "8+8": (*_split(8), *_GPU_LOG),
    "2+2, no detection": (*_split(2), *_GPU_LOG, *_NO_DETECTION),
    "2+2, no shadows": (*_split(2), *_GPU_LOG, *_NO_SHADOWS),
    "no shadows, mapped slots": (*_split(2), *_GPU_LOG, *_NO_SHADOWS, *_MAPPED),
    "2+2, no log": (*_split(2), *_NO_LOG),
    ALL_OFF: (*_split(2), *_NO_DETECTION, *_NO_SHADOWS, *_NO_LOG, *_NO_SPARES),
}


@dataclass(frozen=True, kw_only=True)
class Settings(variants.Settings):
    """What is measured; all of it goes into the JSON."""

    variants: tuple[str, ...]


def variants_of(shape: str) -> dict[str, tuple[str, ...]]:
    return GPU_VARIANTS if is_for_gpu(shape) else VARIANTS


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether all variants answered the same tokens."""
    flags = _chosen(settings)
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    for found in variants.compare("overhead", flags, REFERENCE, settings, at_once=not is_for_gpu(settings.shape)):
        result = overhead_report.result_of(found, flags, settings)
        report.keep("overhead", result, out)
    overhead_report.show(result, report.write("overhead", result, out))
    return found.num_different == 0


def _chosen(settings: Settings) -> dict[str, tuple[str, ...]]:
    known = variants_of(settings.shape)
    unknown = [name for name in settings.variants if name not in known]
    if unknown:
        raise ConfigError(f"--variant {unknown[0]!r}: choose from {', '.join(map(repr, known))}")
    if REFERENCE not in settings.variants:
        raise ConfigError(f"--variant: {REFERENCE!r} must be among them: all variants are compared with it")
    return {name: known[name] for name in settings.variants}
