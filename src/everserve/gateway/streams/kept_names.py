"""The names of the streams whose clients may come back, for all gateways of this address.

A client may come back to any of them. Each writes the names of what it keeps into its part of the table
(ledger/shared.py), with the time, because a client may begin another stream with a name that it has used before, at
another gateway: the latest is meant. What a gateway that has died had kept stays there until its successor has read it
again.
"""

import hashlib
import time

from everserve.gateway.streams.resumable import Name
from everserve.ledger.shared import SharedTable


class KeptNames:
    """The names that one gateway keeps, beside those of the others."""

    def __init__(self, table: SharedTable) -> None:
        self._table = table
        self._slots = table.kept()  # by digest
        self._left = set(self._slots)  # of the gateway before
        used = set(self._slots.values())
        self._free = [slot for slot in reversed(range(table.num_kept)) if slot not in used]

    def add(self, name: Name) -> None:
        """There may be no room: then its client finds it only here. What is read again is not new."""
        digest = _digest(name)
        if digest in self._left:
            self._left.discard(digest)
            return
        slot = self._slots.get(digest)
        if slot is None and self._free:
            slot = self._slots[digest] = self._free.pop()
        if slot is not None:
            self._table.keep(slot, digest, time.monotonic_ns())

    def drop(self, name: Name) -> None:
        slot = self._slots.pop(_digest(name), None)
        if slot is not None:
            self._table.drop(slot)
            self._free.append(slot)

    def forget_left(self) -> None:
        """All that the gateway before had kept was read again, or cannot be."""
        for digest in self._left:
            slot = self._slots.pop(digest)
            self._table.drop(slot)
            self._free.append(slot)
        self._left.clear()

    def elsewhere(self, name: Name) -> int | None:
        """The gateway that has this stream; None: this one, or none."""
        digest = _digest(name)
        slot = self._slots.get(digest)
        own_ns = self._table.kept_since(slot) if slot is not None else 0
        since_ns, number = max(self._table.find_kept(digest), default=(0, 0))
        return number if since_ns > own_ns else None


def _digest(name: Name) -> bytes:
    return hashlib.blake2b("\0".join(name).encode(), digest_size=16).digest()
