"""One request that generates: its journal, from which its answer can be written again, byte for byte.

A journal is a row of words of four bytes:

    0 .. 2^30 - 1       a token of the choice at hand
    2^30 + choice       the next tokens are of this choice
    2^31 + size         a note: so many bytes follow, and as many more as make whole words

What notes say is the gateway's business; the first one says how the request began. An entry counts when the journal's
length has grown past it.
"""

from collections.abc import Iterable, Iterator

from everserve.ledger.layout import DATA_BYTES, R_LENGTH, R_PAGE, R_READER, R_RENDERED, R_STATE, WORD
from everserve.ledger.pages import BrokenChain, Chain, Pages

USED, KEPT = 1, 2  # KEPT: it outlives its connection
_WORD = 4
_CHOICE, _NOTE = 1 << 30, 1 << 31
_LOW = (1 << 32) - 1
Entry = tuple[int, int] | bytes  # the choice and its token; or a note


class Request:
    """Its slot."""

    def __init__(self, pages: Pages, index: int, at: int) -> None:
        self.index = index
        self._pages = pages
        self._words = pages.words
        self._tokens = pages.bytes.cast("I")
        self.word = at // WORD
        self._journal: Chain
        self._choice = -1  # that is at hand, at the end
        self._length = 0
        self._next = self._stop = 0  # words of the last page: the next one that is free, and the first behind the page

    @property
    def reference(self) -> int:
        """The request as a commit names it."""
        return self.index + 1

    @property
    def state(self) -> int:
        return self._words[self.word + R_STATE]

    @state.setter
    def state(self, state: int) -> None:
        self._words[self.word + R_STATE] = state

    @property
    def reader(self) -> int:
        """The cookie of the connection that reads its answer."""
        return self._words[self.word + R_READER]

    @reader.setter
    def reader(self, cookie: int) -> None:
        self._words[self.word + R_READER] = cookie

    @property
    def rendered(self) -> tuple[int, int]:
        """How far its answer was ever given to a connection: events, and how much of the journal they were made of."""
        word = self._words[self.word + R_RENDERED]
        return word & _LOW, word >> 32

    @rendered.setter
    def rendered(self, rendered: tuple[int, int]) -> None:
        num_events, journal = rendered
        self._words[self.word + R_RENDERED] = journal << 32 | num_events

    @property
    def pages(self) -> Iterable[int]:
        """The journal's."""
        return self._journal.pages

    @property
    def length(self) -> int:
        """The length of the journal, in bytes."""
        return self._length

    @property
    def next_word(self) -> int:
        """The word of the memory that the next entry is in, and ..."""
        return self._next

    @property
    def room(self) -> int:
        """... how many of them the page has."""
        return self._stop - self._next

    def is_at(self, choice: int) -> bool:
        """Whether the next token can be of this choice without saying so."""
        return self._choice == choice

    def go_on_at(self, length: int) -> None:
        """Tokens up to this length were written in the same page, past this object."""
        self._next += (length - self._length) // _WORD
        self._length = length

    def begin(self, first: bytes, state: int) -> None:
        """A new request, with the note that says how it began. Raises LedgerFull, and is free again."""
        for i in range(R_STATE, R_RENDERED + 1):
            self._words[self.word + i] = 0
        self._journal = Chain(self._pages, self.word + R_PAGE)
        self._choice, self._length, self._next, self._stop = -1, 0, 0, 0
        try:
            self.note(first)
        except BaseException:
            self._journal.clear()
            raise
        self.state = state  # last: now the slot is used

    def end(self) -> None:
        """Nothing of it is needed any more."""
        self.forget()
        self._journal.clear()

    def forget(self) -> None:
        """The slot is free; what the journal is does not matter."""
        self.state = 0

    def token(self, choice: int, token: int) -> None:
        """One more of this choice."""
        if choice != self._choice:
            self._put(_CHOICE + choice)
            self._choice = choice
        at = self._next
        if at == self._stop:
            self._grow()
            at = self._next
        self._tokens[at] = token
        self._next = at + 1
        self._length += _WORD
        self._words[self.word + R_LENGTH] = self._length

    def note(self, note: bytes) -> None:
        chain, padding = self._journal, -len(note) % _WORD
        chain.end = self._length
        chain.append(b"".join(((_NOTE + len(note)).to_bytes(_WORD, "little"), note, bytes(padding))))
        self._length = chain.end
        self._find_room()
        self._words[self.word + R_LENGTH] = self._length

    def entries(self, begin: int = 0, choice: int = -1) -> Iterator[tuple[int, Entry]]:
        """Each with the position behind it, up to the end that there is when it is asked for. `choice` is the one at
        hand at `begin`."""
        position, chain = begin, self._journal
        chain.end = max(chain.end, self._length)
        words = memoryview(b"").cast("I")
        at = 0
        while position < self._length:
            if at == len(words):
                chain.end = self._length
                words, at = chain.view(position).cast("I"), 0
            word = words[at]
            at, position = at + 1, position + _WORD
            if word < _CHOICE:
                yield position, (choice, word)
            elif word < _NOTE:
                choice = word - _CHOICE
            else:
                size = word - _NOTE
                chain.end = self._length
                note = chain.read(position, position + size)
                position += size + -size % _WORD
                words, at = words[:0], 0
                yield position, note

    def recover(self, taken: set[int]) -> None:
        """What a dead gateway has left. Raises BrokenChain."""
        self._journal = Chain.left_at(self._pages, self.word + R_PAGE, taken)
        self._length = self._words[self.word + R_LENGTH]
        if not self._journal.pages or self._length % _WORD:
            raise BrokenChain("a journal without a beginning")
        self._journal.resume(self._length)
        self._choice = -1  # the next token says whose it is
        self._find_room()

    def _put(self, word: int) -> None:
        if self._next == self._stop:
            self._grow()
        self._tokens[self._next] = word
        self._next += 1
        self._length += _WORD

    def _grow(self) -> None:
        self._journal.end = self._length
        self._journal.reserve()
        self._find_room()

    def _find_room(self) -> None:
        chain = self._journal
        page, used = chain.pages[-1], self._length - chain.begin - (len(chain.pages) - 1) * DATA_BYTES
        data = self._pages.data_at(page)
        self._next, self._stop = (data + used) // _WORD, (data + DATA_BYTES) // _WORD
