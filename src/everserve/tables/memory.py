"""Memory that is shared between processes: its kind, owners, size and place.

    kind            owners                             what
    cell            a worker                           its life words, pulse, doorbell
    log             an attention worker                the KV log
    kv              an attention worker on a device    the blocks of that log, where the KV cache outlives its worker
    kv-pieces       an expert seat                     the KV of its heads, for all streams (memory/kv_pieces.py)
    kv-mirror       an expert seat, on a device        a copy of that, which is not lost with a device; on a device of
                    a home's                           all heads, for the streams of one home
    kv-parity       an expert seat                     what others' heads are rebuilt from (memory/pieces/parity.py)
    lane            an attention and an expert worker  requests and answers between the two
    bell            an expert seat on a device         rung when a request was sent
    weights         a seat on a device; with           shared by all seats there with the same weights; it
                    --weights memory also an expert    outlives every worker in them
                    seat on CPUs
    weights-state   likewise                           what is in those weights (memory/weights/slot_table.py)
    backup          none                               every expert once, in host memory (--expert-backup host)
    backup-state    none                               what is in the backup

A process that is offered memory gets a descriptor with the name, and opens the memory by the name (memory/local.py). It
must be on the same host.
"""

from enum import StrEnum

import msgspec

from everserve.tables.ids import NO_DEVICE, Incarnation, Rank, WorkerId


class Kind(StrEnum):
    """What a piece of memory is for."""

    CELL = "cell"
    LOG = "log"
    KV = "kv"
    KV_PIECES = "kv-pieces"
    KV_MIRROR = "kv-mirror"
    KV_PARITY = "kv-parity"
    LANE = "lane"
    BELL = "bell"
    WEIGHTS = "weights"
    WEIGHTS_STATE = "weights-state"
    BACKUP = "backup"
    BACKUP_STATE = "backup-state"


class MemoryName(msgspec.Struct, frozen=True, kw_only=True):
    """The name of one piece of memory: all fields together identify it.

    Memory of a seat may be lost, and made again for the next worker there, while others still have what was lost. So it
    has a generation, which no other memory for the same purpose has: the incarnation of the worker that it was made
    for, whose number is never used again.
    """

    kind: Kind
    owners: tuple[WorkerId, ...]
    num_bytes: int
    host: int = 0
    device: int = NO_DEVICE  # it is lost with this device; NO_DEVICE: it survives the loss of any
    gpu: int = NO_DEVICE  # whose memory it is; NO_DEVICE: the host's
    generation: int = 0  # 0: its owners have only one such memory ever; in what a worker needs: any

    @property
    def name(self) -> str:
        """The name for display: "lane-0.1-2.3" is between incarnation 1 of rank 0 and incarnation 3 of rank 2."""
        owners = (f"{o.rank}.{o.incarnation}" if o.incarnation else f"{o.rank}" for o in self.owners)
        return "-".join([self.kind, *owners])

    @property
    def need(self) -> "MemoryName":
        """What it is for, whichever generation it is."""
        return msgspec.structs.replace(self, generation=0) if self.generation else self

    def made_for(self, worker: WorkerId) -> "MemoryName":
        """New memory for this need, of this worker."""
        is_of_seat = any(owner == seat_owner(owner.rank) for owner in self.owners)
        return msgspec.structs.replace(self, generation=worker.incarnation) if is_of_seat else self


def seat_owner(rank: Rank) -> WorkerId:
    """The owner of memory that belongs to a seat and not to one incarnation."""
    return WorkerId(rank, Incarnation(0))
