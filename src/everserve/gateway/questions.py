"""What operators ask of another process: each `Ask` is answered by one `Answered` that names it."""

import asyncio
import uuid
from collections.abc import Callable

from everserve.errors import OverloadedError
from everserve.wire.messages import Answered, Ask
from everserve.wire.operators import AnyRequest

_ANSWER_S = 10.0


class Unanswered(OverloadedError):
    """The process that would have to act on this is gone or does not answer (HTTP 503: a later try may work)."""


class Questions:
    """The open questions to one process."""

    def __init__(self, process: str, send: Callable[[Ask], None]) -> None:
        self._process = process
        self._send = send
        self._open: dict[str, asyncio.Future[Answered]] = {}

    async def ask(self, request: AnyRequest, id: str = "", within_s: float = _ANSWER_S) -> Answered:
        """The answer, or raises Unanswered. `id`: of this question, if it may have been asked by an earlier gateway;
        then nothing is done twice."""
        id = id or uuid.uuid4().hex
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._open[id] = answer
        try:
            self._send(Ask(id=id, request=request))
            return await asyncio.wait_for(answer, within_s)
        except TimeoutError:
            raise Unanswered(f"The {self._process} did not answer.") from None
        finally:
            del self._open[id]

    def on_answer(self, answered: Answered) -> None:
        """Ignored if the question was given up before."""
        waiting = self._open.get(answered.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answered)

    def give_up(self) -> None:
        """The process that was asked is gone: every open question fails."""
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(Unanswered(f"The {self._process} died before it had answered."))
