"""Text that comes in pieces, for readers that are written as if all of it were there.

A reader is a generator: it asks for what it needs by `yield from scan.…`, and yields parts. None means that it waits
for more text.
"""

from collections.abc import Callable, Generator, Sequence

from everserve.gateway.text.reading.parts import Part

Reads = Generator[Part | None, None, None]  # yields parts, or None to wait
Finds = Generator[Part | None, None, str | None]
_BLANKS = " \t\r\n"
_SCALAR_ENDS = ",}]) \t\r\n<"


class Scan:
    """What has come and was not read yet."""

    def __init__(self) -> None:
        self.rest = ""
        self.has_ended = False

    def pass_on(self, marks: Sequence[str], part: Callable[[str], Part], is_trimmed: bool = False) -> Finds:
        """Everything up to the first mark, as parts; returns the mark, which is read too, or None at the end.

        `is_trimmed`: without blanks right before a mark.
        """
        while True:
            found = [(at, -len(mark), mark) for mark in marks if (at := self.rest.find(mark)) >= 0]
            if found:
                at, _, mark = min(found)
                text, self.rest = self.rest[:at], self.rest[at + len(mark) :]
                text = text.rstrip(_BLANKS) if is_trimmed else text
                if text:
                    yield part(text)
                return mark
            num_held = 0 if self.has_ended else max((_overlap(self.rest, mark) for mark in marks), default=0)
            end = len(self.rest) - num_held
            if is_trimmed and not self.has_ended:
                end = len(self.rest[:end].rstrip(_BLANKS))
            if end:
                text, self.rest = self.rest[:end], self.rest[end:]
                yield part(text)
            if self.has_ended:
                return None
            yield None

    def take_until(self, marks: Sequence[str]) -> Generator[Part | None, None, tuple[str, str | None]]:
        """The text up to the first mark, and the mark; at the end all of it, and None."""
        while True:
            found = [(at, -len(mark), mark) for mark in marks if (at := self.rest.find(mark)) >= 0]
            if found and (self.has_ended or not self._could_be_longer(min(found), marks)):
                at, _, mark = min(found)
                text, self.rest = self.rest[:at], self.rest[at + len(mark) :]
                return text, mark
            if self.has_ended:
                text, self.rest = self.rest, ""
                return text, None
            yield None

    def starts_with(self, mark: str) -> Generator[Part | None, None, bool]:
        """Whether this comes next; it is read then."""
        while len(self.rest) < len(mark) and mark.startswith(self.rest) and not self.has_ended:
            yield None
        if self.rest.startswith(mark):
            self.rest = self.rest[len(mark) :]
            return True
        return False

    def skip_blanks(self) -> Generator[Part | None, None, str]:
        """Returns them. Behind them there is something, or the end."""
        skipped = ""
        while True:
            text = self.rest.lstrip(_BLANKS)
            skipped += self.rest[: len(self.rest) - len(text)]
            self.rest = text
            if text or self.has_ended:
                return skipped
            yield None

    def json_value(self, part: Callable[[str], Part]) -> Reads:
        """One value, piece by piece: to the end of an object, a list or a text; other values to what cannot belong to
        them."""
        depth, in_text, is_escaped, is_scalar = 0, False, False, True
        while True:
            for at, character in enumerate(self.rest):
                if in_text:
                    in_text = is_escaped or character != '"'
                    is_escaped = character == "\\" and not is_escaped
                    is_complete = not in_text and depth == 0
                elif character == '"':
                    in_text, is_scalar, is_complete = True, False, False
                elif character in "{[" and (depth or is_scalar):
                    depth, is_scalar, is_complete = depth + 1, False, False
                elif character in "}]" and depth:
                    depth -= 1
                    is_complete = depth == 0
                elif is_scalar and character in _SCALAR_ENDS:
                    text, self.rest = self.rest[:at], self.rest[at:]
                    if text:
                        yield part(text)
                    return
                else:
                    is_complete = False
                if is_complete:
                    text, self.rest = self.rest[: at + 1], self.rest[at + 1 :]
                    yield part(text)
                    return
            if self.rest:
                text, self.rest = self.rest, ""
                yield part(text)
            if self.has_ended:
                return
            yield None

    def take_json(self) -> Generator[Part | None, None, str]:
        """The same in one piece."""
        pieces: list[str] = []

        def keep(text: str) -> Part:
            pieces.append(text)
            return _NOTHING

        for step in self.json_value(keep):
            if step is None:
                yield None
        return "".join(pieces)

    def _could_be_longer(self, found: tuple[int, int, str], marks: Sequence[str]) -> bool:
        """Whether a longer mark may begin where this one does, which has not come entirely."""
        at, _, mark = found
        rest = self.rest[at:]
        return any(len(other) > len(mark) and other.startswith(rest) for other in marks)


class Feed:
    """Runs one reader."""

    def __init__(self, scan: Scan, reads: Reads) -> None:
        self._scan = scan
        self._reads: Reads | None = reads

    def push(self, text: str) -> list[Part]:
        self._scan.rest += text
        return self._run()

    def end(self) -> list[Part]:
        """Nothing more comes."""
        self._scan.has_ended = True
        return self._run()

    def _run(self) -> list[Part]:
        parts: list[Part] = []
        while self._reads is not None:
            try:
                step = next(self._reads)
            except StopIteration:
                self._reads = None
                break
            if step is None:
                break
            parts.append(step)
        return parts


def _overlap(text: str, mark: str) -> int:
    """How long the longest beginning of the mark is with which the text ends."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


class _Nothing(tuple):  # type: ignore[type-arg]
    pass


_NOTHING: Part = _Nothing()  # type: ignore[assignment]
