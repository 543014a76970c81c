"""What is read in the answers of one request, and the reader of one answer."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from everserve.gateway.text.reading.format import Format, Tool
from everserve.gateway.text.reading.parts import Argued, Called, Part, Said, Thought
from everserve.gateway.text.reading.reasoning import Marks, read_reasoning
from everserve.gateway.text.reading.scan import Feed, Reads, Scan


@dataclass(frozen=True)
class Reading:
    """How all answers of a request are read; None in both: they are text."""

    format: Format | None = None  # of calls of tools
    reasoning: Marks | None = None
    is_inside: bool = False  # the prompt leaves reasoning open
    tools: Mapping[str, Tool] = field(default_factory=dict)
    is_one: bool = False  # only the first call counts
    shows_reasoning: bool = True
    is_named: bool = False  # the client has chosen the tool

    @property
    def marks(self) -> frozenset[str]:
        """Shown to readers, although they may be special tokens."""
        marks = self.format.marks if self.format is not None else ()
        return frozenset((*marks, *(self.reasoning or ())))

    def read(self, scan: Scan) -> Reads:
        if self.reasoning is not None:
            yield from read_reasoning(scan, self.reasoning, self.is_inside)
        if self.format is not None:
            yield from self.format.read(scan, self.tools)
        yield from scan.pass_on([], Said)


class AnswerReader:
    """Reads one answer: what its text so far consists of."""

    def __init__(self, reading: Reading, name: str) -> None:
        """`name`: of the answer, from which the ids of its calls follow."""
        scan = Scan()
        self._reading = reading
        self._feed = Feed(scan, reading.read(scan))
        self._name = name
        self.num_calls = 0  # that count
        self._num_seen = 0

    def push(self, text: str, is_last: bool) -> list[Part]:
        """Parts that are certain now."""
        parts = self._feed.push(text) if text else []
        if is_last:
            parts += self._feed.end()
        return self._wanted(parts)

    def call_id(self, number: int) -> str:
        """The id of the call with this number, counted from 0."""
        reading = self._reading
        length = reading.format.id_length if reading.format is not None else Format.id_length
        digest = hashlib.blake2b(f"{self._name}/{number}".encode(), digest_size=16).hexdigest()
        return digest[:length] if length < Format.id_length else f"call_{digest[:length]}"

    def _wanted(self, parts: list[Part]) -> list[Part]:
        wanted: list[Part] = []
        for part in parts:
            self._num_seen += isinstance(part, Called)
            if isinstance(part, Called | Argued) and self._reading.is_one and self._num_seen > 1:
                continue
            if isinstance(part, Thought) and not self._reading.shows_reasoning:
                continue
            self.num_calls += isinstance(part, Called)
            wanted.append(part)
        return wanted
