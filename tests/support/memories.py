"""Pieces of memory by their names."""

from everserve.tables.ids import NO_DEVICE, Incarnation, Rank, WorkerId
from everserve.tables.memory import Kind, MemoryName


def memory(name: str, num_bytes: int = 4096, gpu: int = NO_DEVICE) -> MemoryName:
    """ "log-2.3", "weights-2", "lane-0.1-2.3" """
    kind, *owners = name.rsplit("-", 2 if name.startswith(Kind.LANE) else 1)
    ids = (owner.split(".") if "." in owner else (owner, "0") for owner in owners)
    of = tuple(WorkerId(Rank(int(rank)), Incarnation(int(incarnation))) for rank, incarnation in ids)
    return MemoryName(kind=Kind(kind), owners=of, num_bytes=num_bytes, gpu=gpu)
