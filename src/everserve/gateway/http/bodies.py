"""How much work a JSON body is to decode: its *weight*, known before it is decoded.

Decoding takes time for each value rather than for each byte: 32 MiB of text take 30 ms, ten million numbers a second, a
million keys of an object 0.6 s. All that time the interpreter's lock is held. So a body is weighed as it arrives:

    Weight          counts bytes that can begin a value, part by part. An upper bound: texts have commas, too
    exact_weight    counts them outside of texts, in slices; needed only where the upper bound is above the limit
"""

import re
from collections.abc import Iterator

MAX_BODY_WEIGHT = 1 << 20  # a million numbers; 65,536 texts or keys; 131,072 lists or objects
LIGHT_BODY_WEIGHT = 1 << 14
LIGHT_BODY_BYTES = 1 << 18

_PER_TEXT = 16
_PER_BRACKET = 8
_SLICE_BYTES = 1 << 16  # a slice is so many bytes, or so much weight
_SLICE_WEIGHT = 1 << 13
_OUTSIDE = re.compile(rb'[^"]*')
_TEXT = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_QUOTE = ord('"')


class Weight:
    """An upper bound of the weight of what has arrived so far."""

    def __init__(self) -> None:
        self.at_most = 0

    def add(self, part: bytes) -> None:
        """Counts quotes: in a text they are escaped, so every text has one quote at least that is not."""
        num_quotes = part.count(b'"') - part.count(b'\\"')
        self.at_most += _PER_TEXT * max(num_quotes, 0) + _outside_weight(part)


def exact_weight(body: bytes | bytearray) -> Iterator[int]:
    """The weight up to here, slice by slice; the last is that of the whole body. Ends early above the limit."""
    weight, at, is_in_text = 0, 0, False
    while at < len(body) and weight <= MAX_BODY_WEIGHT:
        end, full = min(at + _SLICE_BYTES, len(body)), weight + _SLICE_WEIGHT
        while at < end and weight < full:
            found = (_TEXT if is_in_text else _OUTSIDE).match(body, at, end)
            assert found is not None, "both match the empty text"
            if not is_in_text:
                weight += _outside_weight(found.group())
            at = found.end()
            if at < len(body) and body[at] == _QUOTE:
                weight += 0 if is_in_text else _PER_TEXT
                is_in_text = not is_in_text
                at += 1
            elif at < end:  # a backslash; its character is in the next slice
                at += 2
        yield weight


def _outside_weight(part: bytes | bytearray) -> int:
    return part.count(b",") + _PER_BRACKET * (part.count(b"[") + part.count(b"{"))
