"""One stream's KV in a log, for the worker that continues the stream."""

import time
from dataclasses import dataclass, field

from everserve.kvlog.log import Log, Record


@dataclass(frozen=True)
class Saved:
    """What a record promises. Whether it is there, and right, is seen when it is brought back (restoring.py)."""

    log: Log
    num_tokens: int
    blocks: tuple[int, ...]
    is_own: bool  # in the log that we write ourselves: our predecessor's memory

    @classmethod
    def of(cls, log: Log, record: Record, own_log: Log | None) -> "Saved":
        is_own = own_log is not None and log.identity == own_log.identity
        return cls(log, record.num_tokens, record.blocks, is_own)


@dataclass(frozen=True)
class Restored:
    """The result of a restore."""

    id: str
    num_restored: int  # tokens whose KV came from the log
    num_recomputed: int  # tokens that were certainly computed before, and must be computed again
    took_ms: float
    at_s: float = field(default_factory=time.monotonic)  # before the step that goes on with it
