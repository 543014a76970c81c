"""What does the KV log cost while nothing fails, next to no log?

    log off       streams of a dead attention worker are computed again
    mirror        each token's KV is copied into the log, on a CPU while the worker waits for experts, on a GPU while
                  the next step runs
    anchor        the KV pool itself is memory that outlives the worker; only checksums are written

Each variant is compared with "log off" of the same round; variants.py says how.
"""

from typing import Annotated, ClassVar

from everserve_bench import options
from everserve_bench.scenarios.comparison import Comparison, Flags

REFERENCE = "log off"
_2_2 = ("--attention-workers", "2", "--expert-workers", "2")
VARIANTS: Flags = {
    REFERENCE: (*_2_2, "--kv-log", "off"),
    "mirror": (*_2_2, "--kv-log", "mirror"),
    "anchor": (*_2_2, "--kv-log", "anchor"),
}


class Checkpoint(Comparison, frozen=True, kw_only=True):
    """What the KV log costs when nothing fails. Off, mirror and anchor.

    Exit status 1 if variants answered different tokens.
    """

    NAME: ClassVar[str] = "checkpoint"
    REFERENCE: ClassVar[str] = REFERENCE

    streams: Annotated[tuple[int, ...], options.on_device("Concurrent streams; repeatable.", (8,), (64,), min=1)]
    max_tokens: Annotated[int, options.FIXED_TOKENS] = 384
    rounds: Annotated[int, options.on_device("Rounds, each with all variants in random order.", 12, 3, min=1)]

    def variants_told(self) -> Flags:
        return VARIANTS
