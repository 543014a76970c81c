"""What does the KV log cost while nothing fails, next to no log and to pausing for checkpoints?

    log off       streams of a dead attention worker are computed again
    mirror        the default: each token's KV goes into the log while the worker waits for experts
    anchor        the KV pool itself is memory that outlives the worker; only checksums are written
    pause every N the training-style way: every N steps everything stands still until all KV in use has been copied

Each variant is compared with "log off" of the same round; variants.py says how.
"""

import gc
from dataclasses import asdict, dataclass
from pathlib import Path

from everserve.bench import overhead_report, report, variants

REFERENCE = "log off"
PAUSE_EVERY = 8
_2_2 = ("--attention-workers", "2", "--expert-workers", "2")
VARIANTS: dict[str, tuple[str, ...]] = {
    REFERENCE: (*_2_2, "--kv-log", "off"),
    "mirror": (*_2_2, "--kv-log", "mirror"),
    "anchor": (*_2_2, "--kv-log", "anchor"),
    f"pause every {PAUSE_EVERY}": (*_2_2, "--pause-checkpoint-every", str(PAUSE_EVERY)),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; all of it goes into the JSON."""

    streams: tuple[int, ...]
    max_tokens: int
    rounds: int
    prompt: int


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether all variants answered the same tokens."""
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    found = variants.compare(
        "checkpoint",
        VARIANTS,
        REFERENCE,
        streams=settings.streams,
        max_tokens=settings.max_tokens,
        rounds=settings.rounds,
        num_prompt=settings.prompt,
    )
    result = {
        "model": "bundled model",
        "settings": asdict(settings),
        "flags": {name: " ".join(flags) for name, flags in VARIANTS.items()},
        "idle_cores": found.idle_cores,
        "num_different": found.num_different,
        "num_repeated": found.num_repeated,
        **overhead_report.summarize(found.samples, REFERENCE),
    }
    overhead_report.show(result, report.write("checkpoint", result, out), REFERENCE)
    return found.num_different == 0
