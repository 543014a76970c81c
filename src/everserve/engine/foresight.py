"""Foresight: how well drafts of one stream have fitted lately.

It is learned from drafts that were computed, and from *guesses*: drafts that were not, and are compared with what came.
So it costs nothing to find out when drafts begin to fit, or cease to.
"""

from everserve.tables.requests import Tokens

_FORGET = 0.9  # of what was seen, with each look at drafts
_LONGEST_WAIT = 16  # steps between two searches that find nothing


class Foresight:
    """`chance`: that the next draft is right, if those before it are."""

    __slots__ = ("_guess", "_guessed_at", "_num_right", "_num_tried", "_wait", "_waits", "chance")

    def __init__(self) -> None:
        self.chance = 0.5
        self._num_right, self._num_tried = 1.0, 2.0
        self._guess: tuple[int, ...] = ()
        self._guessed_at = 0  # tokens
        self._wait = self._waits = 0

    def learn(self, num_right: int, num_drafts: int) -> None:
        """So many drafts were right before the first that was not."""
        self._num_right = _FORGET * self._num_right + num_right
        self._num_tried = _FORGET * self._num_tried + min(num_right + 1, num_drafts)
        self.chance = (self._num_right + 1) / (self._num_tried + 2)

    def guess(self, drafts: tuple[int, ...], num_tokens: int) -> None:
        """Compare these with what comes after so many tokens."""
        self._guess, self._guessed_at = drafts, num_tokens

    def look_back(self, tokens: Tokens) -> None:
        """What has become of the last guess, if all of it could have come."""
        if self._guess and len(tokens) >= self._guessed_at + len(self._guess):
            came = tokens[self._guessed_at : self._guessed_at + len(self._guess)]
            self.learn(num_equal(self._guess, came), len(self._guess))
            self._guess = ()

    def should_search(self) -> bool:
        """Asked in each step. Not in every one after searches that found nothing."""
        self._wait -= self._wait > 0
        return not self._wait

    def note_search(self, has_found: bool) -> None:
        self._waits = 0 if has_found else min(self._waits + 1, _LONGEST_WAIT)
        self._wait = self._waits


def num_equal(drafts: tuple[int, ...], came: Tokens) -> int:
    """How many are equal before the first that is not."""
    pairs = enumerate(zip(drafts, came, strict=False))
    return next((i for i, (draft, token) in pairs if draft != token), min(len(drafts), len(came)))
