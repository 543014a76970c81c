"""Sizes of memory that every backend knows, and what to tell the user when there is no memory."""

from everserve.tables.ids import Incarnation, Rank
from everserve.tables.memory import Kind

BELL_BYTES = 2 << 20  # as little as there is on a device
_BELL_STRIDE = 128
KV_CACHE = "kv-cache"  # a worker's own memory, which is never handed over
WEIGHTS_STATE_BYTES = 4096


def bell_at(address: int, incarnation: Incarnation) -> int:
    """Where the word of this incarnation is: one that was given up, but still runs, must not take rings of the next."""
    return address + incarnation * _BELL_STRIDE % BELL_BYTES


_ADVICE = {
    Kind.LANE: "lower --max-num-batched-tokens or --gpu-memory-utilization",
    Kind.KV: "lower --gpu-memory-utilization or --kv-cache-memory-bytes, or end what else uses the device",
    Kind.KV_PIECES: "lower --kv-cache-memory-bytes",
    Kind.KV_MIRROR: "lower --kv-cache-memory-bytes, or use --kv-shadow parity or off",
    Kind.KV_PARITY: "lower --kv-cache-memory-bytes, or use --kv-shadow off",
    KV_CACHE: "lower --kv-cache-memory-bytes",
    Kind.LOG: "lower --kv-cache-memory-bytes, or use --kv-log off",
    Kind.BACKUP: "use --expert-backup off",
    Kind.WEIGHTS: "use fewer --shadow-experts, a smaller model or more devices, or end what else uses the device",
}
_WORDS = {Kind.LANE: "a lane", Kind.LOG: "the KV log", KV_CACHE: "the KV cache"}


def lack(rank: Rank, kind: str, reason: str) -> str:
    """What to tell the user when a worker cannot have memory that it needs."""
    what = _WORDS.get(kind, f"the {kind}")
    return f"no memory for {what} of worker {rank}: {reason}; {_ADVICE.get(kind, 'free some memory')}"
