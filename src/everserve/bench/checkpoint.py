"""What does the KV log cost while nothing fails, next to no log?

    log off       streams of a dead attention worker are computed again
    mirror        each token's KV is copied into the log, on a CPU while the worker waits for experts, on a GPU while
                  the next step runs
    anchor        the KV pool itself is memory that outlives the worker; only checksums are written

Each variant is compared with "log off" of the same round; variants.py says how.
"""

import gc
from pathlib import Path

from everserve.bench import overhead_report, report, variants
from everserve.bench.on_gpu import is_for_gpu
from everserve.bench.variants import Settings

REFERENCE = "log off"
_2_2 = ("--attention-workers", "2", "--expert-workers", "2")
VARIANTS: dict[str, tuple[str, ...]] = {
    REFERENCE: (*_2_2, "--kv-log", "off"),
    "mirror": (*_2_2, "--kv-log", "mirror"),
    "anchor": (*_2_2, "--kv-log", "anchor"),
}


def run(settings: Settings, out: Path | None) -> bool:
    """The whole benchmark. Returns whether all variants answered the same tokens."""
    is_gpu = is_for_gpu(settings.shape)
    gc.collect()
    gc.freeze()  # this process measures arrival times: no long collections in between
    for found in variants.compare("checkpoint", VARIANTS, REFERENCE, settings, at_once=not is_gpu):
        result = overhead_report.result_of(found, VARIANTS, settings, REFERENCE)
        report.keep("checkpoint", result, out)
    overhead_report.show(result, report.write("checkpoint", result, out), REFERENCE)
    return found.num_different == 0
