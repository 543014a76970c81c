"""Questions to another process, each answered by one message that names it."""

import asyncio
import uuid
from collections.abc import Callable
from typing import Generic, TypeVar

from everserve.errors import OverloadedError

_ANSWER_S = 10.0  # whoever takes longer is in trouble
_T = TypeVar("_T")


class Unanswered(OverloadedError):
    """Nobody is there who could act on this, or whoever is does not answer (HTTP 503: later, perhaps)."""


class Questions(Generic[_T]):
    """Those that wait for an answer of one kind."""

    def __init__(self, whom: str) -> None:
        self._whom = whom
        self._open: dict[str, asyncio.Future[_T]] = {}

    async def ask(self, send: Callable[[str], None]) -> _T:
        """`send` sends the question with this id; returns the answer, or raises Unanswered."""
        id = uuid.uuid4().hex
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._open[id] = answer
        try:
            send(id)
            return await asyncio.wait_for(answer, _ANSWER_S)
        except TimeoutError:
            raise Unanswered(f"The {self._whom} did not answer.") from None
        finally:
            del self._open[id]

    def answer(self, id: str, message: _T) -> None:
        """Nothing happens if nobody waits for it any more."""
        waiting = self._open.get(id)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def give_up(self) -> None:
        """Whoever was asked is gone."""
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(Unanswered(f"The {self._whom} died before it had answered."))
