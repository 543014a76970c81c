"""A ledger whose writer may die between any two stores."""

import os
from collections.abc import Iterator

from everserve.ledger.layout import Shape
from everserve.ledger.ledger import Ledger

SHAPE = Shape(num_connections=4, num_requests=4, num_pages=12)


class _Words:
    """Memory as words, of which each store is noted."""

    def __init__(self, recorder: "RecordedMemory", kind: str) -> None:
        self._recorder = recorder
        self._words = memoryview(recorder.memory).cast(kind)

    def __getitem__(self, at):
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self._words[at] = value
        size = self._words.itemsize
        self._recorder.stores.append((at * size, bytes(self._recorder.memory[at * size : (at + 1) * size])))


class RecordedMemory:
    """As a memoryview, as far as a ledger uses it. Remembers every store."""

    def __init__(self, memory: bytes) -> None:
        self.memory = bytearray(memory)
        self.stores: list[tuple[int, bytes]] = []  # where, what

    def cast(self, kind: str) -> _Words:
        return _Words(self, kind)

    def __getitem__(self, at: slice) -> memoryview:
        return memoryview(self.memory)[at]

    def __setitem__(self, at: slice, data: bytes) -> None:
        memoryview(self.memory)[at] = data
        self.stores.append((at.start, bytes(data)))


def new_ledger(memory: bytes | None = None) -> tuple[Ledger, RecordedMemory]:
    """Opened by the next gateway."""
    recorded = RecordedMemory(memory if memory is not None else bytes(SHAPE.num_bytes))
    ledger = Ledger(recorded, SHAPE)  # type: ignore[arg-type]
    ledger.open()
    return ledger, recorded


def deaths(before: bytes, stores: list[tuple[int, bytes]], word_bytes: int = 8) -> Iterator[bytes]:
    """The memory at each moment between two stores; a store of many bytes is many."""
    memory = bytearray(before)
    yield bytes(memory)
    for at, data in stores:
        for begin in range(0, len(data), word_bytes):
            part = data[begin : begin + word_bytes]
            memory[at + begin : at + begin + len(part)] = part
            yield bytes(memory)


def mapped_ledger(shape: Shape | None = None) -> Ledger:
    """In real memory, opened by its first gateway."""
    shape = shape or Shape.of(num_connections=512, num_requests=64, num_bytes=64 << 20)
    fd = Ledger.create(shape)
    ledger = Ledger.map(fd)
    os.close(fd)
    ledger.open()
    return ledger
