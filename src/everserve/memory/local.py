"""Memory of this host, as a process opens it by its name. Only here, and in channels, a name is a descriptor.

A name is here from its offer to its withdrawal. What uses the memory opens the name when it needs to, and must not read
what it has mapped any more when the name is withdrawn.
"""

import os
from collections.abc import Iterator

from everserve.tables.memory import Kind, MemoryName


class NotOfferedError(LookupError):
    """This memory was not offered to this process, or was withdrawn."""


class LocalMemory:
    """The names that this process can open, in the order in which they came."""

    def __init__(self) -> None:
        self._fds: dict[MemoryName, int] = {}

    def __iter__(self) -> Iterator[MemoryName]:
        return iter([*self._fds])

    def __contains__(self, memory: MemoryName) -> bool:
        return memory in self._fds

    def __len__(self) -> int:
        return len(self._fds)

    def put(self, memory: MemoryName, fd: int) -> None:
        """It can be opened from now on, instead of what had this name. Takes over the descriptor."""
        self.drop(memory)
        self._fds[memory] = fd

    def open(self, memory: MemoryName) -> int:
        """A descriptor of the memory, which is the caller's. Raises NotOfferedError."""
        return os.dup(self.descriptor(memory))

    def take(self, memory: MemoryName) -> int:
        """The descriptor itself, for a caller that maps it for good: the name cannot be opened any more. Raises
        NotOfferedError."""
        fd = self.descriptor(memory)
        del self._fds[memory]
        return fd

    def descriptor(self, memory: MemoryName) -> int:
        """The descriptor that is kept here: to send it, or to map it at once. Raises NotOfferedError."""
        if memory not in self._fds:
            raise NotOfferedError(f"{memory.name} is not offered to this process")
        return self._fds[memory]

    def beside(self, memory: MemoryName, kind: Kind) -> MemoryName | None:
        """The memory of another kind with the same owners, if it is here."""
        return next((other for other in self._fds if (other.kind, other.owners) == (kind, memory.owners)), None)

    def drop(self, memory: MemoryName) -> None:
        """It cannot be opened any more."""
        fd = self._fds.pop(memory, None)
        if fd is not None:
            os.close(fd)

    def drop_all(self) -> None:
        """Nothing can be opened any more."""
        for memory in self:
            self.drop(memory)
