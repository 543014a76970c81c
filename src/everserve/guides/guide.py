"""The guide of one stream.

    step N       ... forward pass ... | choose, with mask N | advance(token N): a thread takes it, and computes ...
    step N + 1   ... forward pass ... | choose, with mask N + 1                                    ... this ^

A step that is abandoned chooses nothing, so it advances no guide: there is nothing to take back. A stream that is
preempted keeps its guide. One that goes on elsewhere gets a new guide there, from its tokens.

    thinking --end of reasoning, chosen or forced--> following the grammar
"""

from array import array
from collections.abc import Iterable
from queue import SimpleQueue
from threading import Event, Thread

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from everserve.errors import RequestError
from everserve.guides.compiling import Compiled, Compiler, check, consume
from everserve.tables.requests import Guided

Mask = NDArray[np.uint32]  # a bit for each id, the lowest first
_WORD_BITS = 32


class MaskThread:
    """Computes masks. The library releases the interpreter's lock while it does."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[tuple[Guide, int] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="masks", daemon=True)
        self._thread.start()

    def advance(self, guide: "Guide", token: int) -> None:
        self._todo.put((guide, token))

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            guide, token = item
            guide.advance_now(token)


class Guide:
    """Which tokens one stream may have next."""

    def __init__(
        self, compiler: Compiler, guided: Guided, known: Iterable[int] = (), thread: MaskThread | None = None
    ) -> None:
        """`known`: output that the stream has already. `thread`: None to compute masks at once. A RequestError if the
        grammar cannot be compiled, or does not allow what is known."""
        self._guided = guided
        self._thread = thread
        self._size = compiler.vocabulary.size
        self._num_taken = self._num_thoughts = 0
        self._is_thinking = guided.thinking is not None and guided.thinking.start_id is None
        self._follower = _Follower(compiler, guided) if guided.grammar is not None else None
        self._words: Mask = np.zeros(-(-self._size // _WORD_BITS), np.uint32)
        self._error: RequestError | None = None
        self._is_ready = Event()
        for token in known:
            self._take(token)
        self._compute()
        self.check()

    def advance(self, token: int) -> None:
        """The stream has this token: the next mask is wanted soon."""
        self._is_ready.clear()
        if self._thread is not None:
            self._thread.advance(self, token)
        else:
            self.advance_now(token)

    def mask(self) -> Mask:
        """Valid until the next `advance`. Empty if the grammar can be followed no further, and `why_empty` says why."""
        self._is_ready.wait()
        return self._words

    @property
    def why_empty(self) -> str:
        return (
            str(self._error) if self._error is not None else "its grammar allows no token that its other fields allow"
        )

    def check(self) -> None:
        """Raise why it can be followed no further, if that is so."""
        self._is_ready.wait()
        if self._error is not None:
            raise self._error

    def advance_now(self, token: int) -> None:
        """Take a token, in this thread. What goes wrong is the stream's error, and told when its mask is asked for."""
        self._take(token)
        self._compute()

    def _take(self, token: int) -> None:
        thinking = self._guided.thinking
        self._num_taken += 1
        if thinking is not None and self._num_taken == 1 and token == thinking.start_id:
            self._is_thinking = True
        elif self._is_thinking and thinking is not None:
            self._num_thoughts += 1
            self._is_thinking = token != thinking.end_id
        elif self._follower is not None:
            self._follower.take(token)

    def _compute(self) -> None:
        try:
            if self._error is None:
                self._fill()
        except RequestError as error:
            self._error = error
            self._words[:] = 0
        self._is_ready.set()

    def _fill(self) -> None:
        thinking = self._guided.thinking
        if not self._is_thinking and self._follower is not None:
            self._words[:] = self._follower.mask()
            if thinking is not None and thinking.start_id is not None and self._num_taken == 0:
                _allow(self._words, thinking.start_id)
        elif self._is_thinking and thinking is not None and self._num_thoughts == thinking.max_tokens:
            self._words[:] = 0
            _allow(self._words, thinking.end_id)
        else:  # anything; but what follows a grammar must not end before that
            self._words[:] = 0xFFFFFFFF
            self._words[-1] &= _tail(self._size)
            for id in self._guided.end_ids if self._follower is not None else ():
                _forbid(self._words, id)


class _Follower:
    """Follows a grammar."""

    def __init__(self, compiler: Compiler, guided: Guided) -> None:
        assert guided.grammar is not None
        self._compiled: Compiled = compiler.compile(guided.grammar)
        vocabulary = compiler.vocabulary
        self._size, self._end, self._end_ids = vocabulary.size, vocabulary.end, guided.end_ids
        self._tokens = array("i")
        self._num_consumed = 0
        self._matcher = self._compiled.begin()
        self._words = np.zeros(-(-max(vocabulary.tokenizer.vocab_size, self._size) // _WORD_BITS), np.uint32)

    def take(self, token: int) -> None:
        self._tokens.append(token)

    def mask(self) -> Mask:
        """After all tokens so far.

        Guides of one grammar share what they have found out about it, and the limits on that: if one reaches a limit,
        it is tried once more alone. So it is the same wherever the stream runs, and beside whichever others."""
        try:
            self._consume(self._tokens[self._num_consumed :])
        except RequestError:
            self._matcher = self._compiled.begin_alone()
            self._consume(self._tokens)
        self._num_consumed = len(self._tokens)
        words = self._words
        may_end = bool(words[self._end // _WORD_BITS] >> self._end % _WORD_BITS & 1)
        _forbid(words, self._end)
        mask = words[: -(-self._size // _WORD_BITS)]
        mask[-1] &= _tail(self._size)
        for id in self._end_ids:
            (_allow if may_end else _forbid)(mask, id)
        return mask

    def _consume(self, tokens: "array[int]") -> None:
        matcher: LLMatcher = self._matcher
        consume(matcher, tokens)
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        check(matcher)


def is_allowed(mask: Mask, size: int) -> NDArray[np.bool_]:
    """One value for each of the first `size` ids."""
    return np.unpackbits(mask.view(np.uint8), count=size, bitorder="little").view(np.bool_)


def _allow(words: Mask, id: int) -> None:
    words[id // _WORD_BITS] |= np.uint32(1 << id % _WORD_BITS)


def _forbid(words: Mask, id: int) -> None:
    words[id // _WORD_BITS] &= np.uint32(0xFFFFFFFF ^ 1 << id % _WORD_BITS)


def _tail(size: int) -> np.uint32:
    """The bits of the last word that mean a token."""
    return np.uint32((1 << (size % _WORD_BITS or _WORD_BITS)) - 1)
