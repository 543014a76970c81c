"""Names of pieces of shared memory: KIND-OWNER. For people, and for the supervisor, which keeps memory by name without
knowing what is in it.

    cell-2.3            of an incarnation
    log-2.3             likewise
    kv-2.3              likewise, on a device: the blocks of that log, where the KV cache itself outlives its worker
    lane-0.1-2.3        between two incarnations
    bell-2              of an expert worker's rank on a device; rung by attention workers that have sent a request
    weights-2           of a rank, shared by all ranks with the same weights on the same device: it outlives every
                        incarnation of the rank
    weights-state-2     likewise: what is in those weights
"""

from collections.abc import Sequence

from everserve.tables.ids import Incarnation, Rank, WorkerId

ON_HOST = -1  # instead of a device's number
CELL, LOG, KV, LANE, BELL = "cell", "log", "kv", "lane", "bell"
BELL_BYTES = 2 << 20  # as little as there is on a device
_BELL_STRIDE = 128
KV_CACHE = "kv-cache"  # a worker's own memory, which has no name
WEIGHTS, WEIGHTS_STATE = "weights", "weights-state"
WEIGHTS_STATE_BYTES = 4096


def cell_name(seat: WorkerId) -> str:
    return f"{CELL}-{_seat(seat)}"


def log_name(log: WorkerId) -> str:
    return f"{LOG}-{_seat(log)}"


def kv_name(log: WorkerId) -> str:
    return f"{KV}-{_seat(log)}"


def lane_name(attention: WorkerId, expert: WorkerId) -> str:
    return f"{LANE}-{_seat(attention)}-{_seat(expert)}"


def bell_name(rank: Rank) -> str:
    return f"{BELL}-{rank}"


def bell_at(address: int, incarnation: Incarnation) -> int:
    """Where the word of this incarnation is: one that was given up, but still runs, must not take rings of the next."""
    return address + incarnation * _BELL_STRIDE % BELL_BYTES


def weights_name(rank: Rank) -> str:
    return f"{WEIGHTS}-{rank}"


def weights_state_name(rank: Rank) -> str:
    return f"{WEIGHTS_STATE}-{rank}"


def kind_of(name: str) -> str:
    """Of memory with one owner."""
    return name.rsplit("-", 1)[0]


def log_of(name: str) -> WorkerId | None:
    """Whose log this is; None if it is no log."""
    if kind_of(name) != LOG:
        return None
    rank, incarnation = name.rsplit("-", 1)[1].split(".")
    return WorkerId(Rank(int(rank)), Incarnation(int(incarnation)))


def by_kind(names: Sequence[str], fds: Sequence[int]) -> dict[str, int]:
    """The descriptors of a worker's memory, for the worker itself."""
    return {kind_of(name): fd for name, fd in zip(names, fds, strict=True)}


_ADVICE = {
    LANE: "lower --max-num-batched-tokens or --gpu-memory-utilization",
    KV: "lower --gpu-memory-utilization or --kv-cache-memory-bytes, or end what else uses the device",
    KV_CACHE: "lower --kv-cache-memory-bytes",
    LOG: "lower --kv-cache-memory-bytes, or use --kv-log off",
    WEIGHTS: "use fewer --shadow-experts, a smaller model or more devices, or end what else uses the device",
}
_WORDS = {LANE: "a lane", LOG: "the KV log", KV_CACHE: "the KV cache"}


def lack(rank: Rank, kind: str, reason: str) -> str:
    """What to tell the user when a worker cannot have memory that it needs."""
    what = _WORDS.get(kind, f"the {kind}")
    return f"no memory for {what} of worker {rank}: {reason}; {_ADVICE.get(kind, 'free some memory')}"


def _seat(seat: WorkerId) -> str:
    return f"{seat[0]}.{seat[1]}"
