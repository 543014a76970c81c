"""Chains of pages: bytes at growing positions, written at the end and dropped at the beginning.

    the owner's word --> page [at, next] --> page [at, next] --> ...      `at`: the position of its first byte

A page is complete before it is linked, and unlinked before it is used again, each by storing one word. So the chain
that a dead writer leaves is whole at every instruction. Which pages are free is not written down: those of no chain.
"""

from collections import deque
from collections.abc import Iterator

from everserve.ledger.layout import DATA_BYTES, PAGE_BYTES, PAGE_HEAD_BYTES, WORD


class LedgerFull(Exception):
    """No page is free."""


class BrokenChain(ValueError):
    """This is not what a writer leaves."""


class Pages:
    """All pages, and which of them are free."""

    def __init__(self, memory: memoryview, at: int, num_pages: int) -> None:
        self.bytes = memory
        self.words = memory.cast("Q")
        self._at = at
        self._num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the last one is taken first, so that few are ever touched

    @property
    def num_free(self) -> int:
        return len(self._free)

    def data_at(self, page: int) -> int:
        """Where in the memory its data begins."""
        return self._at + page * PAGE_BYTES + PAGE_HEAD_BYTES

    def take(self, position: int) -> int:
        """A page for the bytes from this position on."""
        if not self._free:
            raise LedgerFull
        page = self._free.pop()
        word = self._word(page)
        self.words[word], self.words[word + 1] = position, 0
        return page

    def give_back(self, page: int) -> None:
        self._free.append(page)

    def link(self, page: int, next: int) -> None:
        self.words[self._word(page) + 1] = next + 1

    def unlink_behind(self, page: int) -> None:
        self.words[self._word(page) + 1] = 0

    def head(self, page: int) -> tuple[int, int]:
        """The position of its first byte, and a reference to the next page."""
        if not 0 <= page < self._num_pages:
            raise BrokenChain(f"there is no page {page}")
        word = self._word(page)
        return self.words[word], self.words[word + 1]

    def keep(self, used: set[int]) -> None:
        """Only these are not free."""
        self._free = [page for page in range(self._num_pages - 1, -1, -1) if page not in used]

    def _word(self, page: int) -> int:
        return (self._at + page * PAGE_BYTES) // WORD


class Chain:
    """One chain. `end` is where its writer has got to; that is not written down here."""

    __slots__ = ("_data", "_pages", "_tail_at", "_tail_byte", "_where", "begin", "end", "pages")

    def __init__(self, pages: Pages, where: int, position: int = 0) -> None:
        self._pages = pages
        self._data = pages.bytes
        self._where = where  # the word that refers to the first page
        self.pages: deque[int] = deque()
        self.begin = self.end = position  # `begin`: of the first page, once there is one
        self._tail_at = self._tail_byte = 0  # of the last page: its position, and where its data is

    @classmethod
    def left_at(cls, pages: Pages, where: int, taken: set[int]) -> "Chain":
        """The chain that a dead writer has left; its `end` must be set. Raises BrokenChain."""
        chain = cls(pages, where)
        reference = pages.words[where]
        while reference:
            page = reference - 1
            at, reference = pages.head(page)
            if page in taken or (chain.pages and at != chain._tail_at + DATA_BYTES):
                raise BrokenChain(f"page {page} does not belong here")
            taken.add(page)
            if not chain.pages:
                chain.begin = at
            chain._add(page, at)
        chain.end = chain.begin
        return chain

    def resume(self, end: int) -> None:
        """The writer had got to here. Raises BrokenChain."""
        if self.pages and not self.begin <= end <= self._tail_at + DATA_BYTES:
            raise BrokenChain(f"its end {end} is not in it")
        self.end = end
        self._cut()

    @property
    def room(self) -> int:
        """Room in the last page."""
        return self._tail_at + DATA_BYTES - self.end if self.pages else 0

    @property
    def end_byte(self) -> int:
        """Where in the memory that room begins."""
        return self._tail_byte + self.end - self._tail_at

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """All of it, or none: raises LedgerFull."""
        size, end = len(data), self.end
        if self.pages and end + size <= self._tail_at + DATA_BYTES:
            at = self._tail_byte + end - self._tail_at
            self._data[at : at + size] = data
            self.end = end + size
            return
        rest = memoryview(data)
        try:
            while rest:
                at, room = self._place(end)
                part = rest[:room]
                self._data[at : at + len(part)] = part
                end += len(part)
                rest = rest[room:]
        except LedgerFull:
            self._cut()
            raise
        self.end = end

    def reserve(self) -> memoryview:
        """Where the next bytes go, as many as fit: for a kernel that writes them itself. Raises LedgerFull."""
        at, room = self._place(self.end)
        return self._data[at : at + room]

    def advance(self, num_bytes: int) -> None:
        """So many were written into what was reserved."""
        self.end += num_bytes

    def view(self, position: int) -> memoryview:
        """The bytes from here on, as far as they lie together."""
        index = (position - self.begin) // DATA_BYTES
        at = self.begin + index * DATA_BYTES
        end = min(self.end, at + DATA_BYTES)
        byte = self._pages.data_at(self.pages[index])
        return self._data[byte + position - at : byte + end - at]

    def views(self, position: int, end: int) -> Iterator[memoryview]:
        """All bytes from one position to another."""
        while position < end:
            part = self.view(position)[: end - position]
            position += len(part)
            yield part

    def read(self, position: int, end: int) -> bytes:
        return b"".join(self.views(position, end))

    def drop(self, position: int) -> None:
        """What is before it is not needed any more."""
        while self.pages and self.begin + DATA_BYTES <= position:
            self._drop_first()

    def clear(self) -> None:
        """Nothing of it is needed."""
        while self.pages:
            self._drop_first()
        self.begin = self.end

    def _cut(self) -> None:
        """Pages that begin behind the end go back: their writer has died, or there was no room for the rest."""
        while len(self.pages) > 1 and self.end < self._tail_at:
            page = self.pages.pop()
            self._pages.unlink_behind(self.pages[-1])
            self._pages.give_back(page)
            self._tail_at -= DATA_BYTES
            self._tail_byte = self._pages.data_at(self.pages[-1])

    def _drop_first(self) -> None:
        page = self.pages.popleft()
        self._pages.words[self._where] = self.pages[0] + 1 if self.pages else 0
        self._pages.give_back(page)
        self.begin += DATA_BYTES

    def _place(self, end: int) -> tuple[int, int]:
        """Where the free part of the last page is, when it is written up to `end`, and its size; of a new one if it is
        full."""
        if not self.pages or end == self._tail_at + DATA_BYTES:
            page = self._pages.take(end)
            if self.pages:
                self._pages.link(self.pages[-1], page)
            else:
                self._pages.words[self._where] = page + 1
                self.begin = end
            self._add(page, end)
        used = end - self._tail_at
        return self._tail_byte + used, DATA_BYTES - used

    def _add(self, page: int, at: int) -> None:
        self.pages.append(page)
        self._tail_at, self._tail_byte = at, self._pages.data_at(page)
