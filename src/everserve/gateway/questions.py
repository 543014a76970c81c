"""Questions to another process, each answered by one message that names it."""

import asyncio
import uuid
from collections.abc import Callable
from typing import Generic, TypeVar

from everserve.errors import OverloadedError

_ANSWER_S = 10.0
_T = TypeVar("_T")


class Unanswered(OverloadedError):
    """The process that would have to act on this is gone or does not answer (HTTP 503: a later try may work)."""


class Questions(Generic[_T]):
    """The open questions of one kind to one process."""

    def __init__(self, process: str) -> None:
        self._process = process
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
            raise Unanswered(f"The {self._process} did not answer.") from None
        finally:
            del self._open[id]

    def answer(self, id: str, message: _T) -> None:
        """Ignored if the question was given up before."""
        waiting = self._open.get(id)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def give_up(self) -> None:
        """The process that was asked is gone: every open question fails."""
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(Unanswered(f"The {self._process} died before it had answered."))
