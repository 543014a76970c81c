"""What do the protections cost when nothing fails, and what does splitting the model over processes cost?

Each variant is compared with 2+2 (attention + expert workers) of the same round; variants.py says how.
"""

import gc
from dataclasses import asdict, dataclass
from pathlib import Path

from everserve.bench import overhead_report, report, variants
from everserve.bench.overhead_report import ALL_OFF, REFERENCE
from everserve.errors import ConfigError

_2_2 = ("--attention-workers", "2", "--expert-workers", "2")
_NO_DETECTION, _NO_SHADOWS, _FIXED_ROUTES = ("--detect-ms", "0"), ("--shadow-experts", "0"), ("--fixed-routes",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "one process, 1 thread": ("--threads", "1"),
    "1+1": ("--attention-workers", "1", "--expert-workers", "1"),
    REFERENCE: _2_2,
    "2+2, no detection": (*_2_2, *_NO_DETECTION),
    "2+2, no shadows": (*_2_2, *_NO_SHADOWS),
    "2+2, fixed routes": (*_2_2, *_FIXED_ROUTES),
    ALL_OFF: (*_2_2, *_NO_DETECTION, *_NO_SHADOWS, *_FIXED_ROUTES),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    streams: tuple[int, ...]
    max_tokens: int
    rounds: int
    variants: tuple[str, ...]


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether all variants answered the same tokens."""
    _check(settings)
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    found = variants.compare(
        "overhead",
        {name: VARIANTS[name] for name in settings.variants},
        REFERENCE,
        streams=settings.streams,
        max_tokens=settings.max_tokens,
        rounds=settings.rounds,
    )
    result = {
        "model": "bundled model",
        "settings": asdict(settings) | {"prompt": variants.NUM_PROMPT},
        "flags": {name: " ".join(VARIANTS[name]) for name in settings.variants},
        "idle_cores": found.idle_cores,
        "num_different": found.num_different,
        "num_repeated": found.num_repeated,
        **overhead_report.summarize(found.samples),
    }
    overhead_report.show(result, report.write("overhead", result, out))
    return found.num_different == 0


def _check(settings: Settings) -> None:
    unknown = [name for name in settings.variants if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"--variant {unknown[0]!r}: choose from {', '.join(map(repr, VARIANTS))}")
    if REFERENCE not in settings.variants:
        raise ConfigError(f"--variant: {REFERENCE!r} must be among them, the others are compared with it")
