"""Stop strings: find them in text that arrives in pieces, and hold back what might become one.

One Knuth-Morris-Pratt automaton per stop string, so the cost per character does not depend on how long the stop
strings are. The state of an automaton is the length of the longest beginning of its stop string that the text so far
ends with: a hit when that is the whole string, otherwise exactly what must be held back.
"""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, prepared once and shared by its choices."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        unique = tuple(dict.fromkeys(stops))
        self.automata = [(stop, _failure_table(stop)) for stop in unique]
        self.first_characters = frozenset(stop[0] for stop in unique)


class StopMatcher:
    """One choice's text on its way to the client."""

    def __init__(self, stops: StopStrings, include_in_output: bool) -> None:
        self.hit: str | None = None  # the stop string that ended the text
        self._stops = stops
        self._include = include_in_output
        self._states = [0] * len(stops.automata)
        self._held = ""

    def push(self, text: str, armed: bool = True) -> str:
        """Text that may go out now. `armed=False` (before min_tokens): a match must not end in this piece."""
        assert self.hit is None, "text after the end"
        if not self._held and self._stops.first_characters.isdisjoint(text):
            return text
        whole = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            hit = self._advance(character, armed)
            if hit is not None:
                self.hit = hit
                self._held = ""
                return whole[: position if self._include else position - len(hit)]
        end = len(whole) - max(self._states)
        self._held = whole[end:]
        return whole[:end]

    def flush(self) -> str:
        """The text that was held back and is no stop string: nothing follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str, armed: bool) -> str | None:
        """Feed one character; the stop string that ends here, if any (the longest, if several do)."""
        hit: str | None = None
        for i, (stop, failure) in enumerate(self._stops.automata):
            state = self._states[i]
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                if armed and (hit is None or len(stop) > len(hit)):
                    hit = stop
                state = failure[state - 1]
            self._states[i] = state
        return hit


def _failure_table(pattern: str) -> list[int]:
    """Gives, for each beginning of the pattern, the length of its longest proper border."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table
