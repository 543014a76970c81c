"""Answers to operators' questions, remembered for a while.

A gateway that dies before it has an answer leaves its successor to ask the same again, under the same id. What was
asked for is not done twice: the answer is repeated, or comes when it is there.
"""

from collections import OrderedDict

from everserve.wire.messages import Answered

_MOST = 256


class Answers:
    """The latest ones, by question."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, Answered | None] = OrderedDict()

    def is_new(self, id: str) -> bool:
        """Whether this was not asked before. From now on it was."""
        if id in self._answers:
            return False
        self._answers[id] = None
        while len(self._answers) > _MOST:
            self._answers.popitem(last=False)
        return True

    def note(self, answered: Answered) -> None:
        if answered.id in self._answers:
            self._answers[answered.id] = answered

    def find(self, id: str) -> Answered | None:
        """None: it is not there yet."""
        return self._answers.get(id)
