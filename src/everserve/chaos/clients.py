"""The clients: each sends one request after the other, in one of four manners, and compares each answer at once."""

import asyncio
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from everserve.chaos.answers import Answer
from everserve.chaos.compare import Kind, compare, first_difference, marks
from everserve.chaos.continuations import Continuation
from everserve.chaos.findings import Findings
from everserve.chaos.requests import Request
from everserve.chaos.talk import Break, Talk, Trouble
from everserve.chaos.tally import Tally
from everserve.chaos.target import Target

_AFTER_TROUBLE_S = 0.2  # a server that refuses connections is not asked a thousand times a second
_MAX_BREAKS = 3
_MAX_MARKED = 5  # how often an undisturbed request is asked again if its answer is marked
_MAX_AWAY_S = 1.0


class Manner(StrEnum):
    """How a client asks."""

    STREAM = "streamed"
    WHOLE = "in one piece"
    CANCEL = "cancelled"  # the client leaves for good
    RESUME = "broken off and resumed"
    BACKGROUND = "in the background"  # the only one of such a request


_MANNERS = {Manner.STREAM: 45, Manner.WHOLE: 15, Manner.CANCEL: 12, Manner.RESUME: 28}


@dataclass(frozen=True)
class Known:
    """The catalogue and its right answers."""

    requests: Sequence[Request]
    answers: Sequence[Answer]
    can_resume: bool = True  # events have ids


class Clients:
    """All clients of a run."""

    def __init__(self, target: Target, stall_limit_s: float, findings: Findings) -> None:
        self._target = target
        self._stall_limit_s = stall_limit_s
        self._findings = findings
        self.tally = Tally()  # of the storm
        self.on_answer: Callable[[], None] = lambda: None  # of `learn` and `repeat`

    async def learn(self, requests: Sequence[Request], num_clients: int) -> Known:
        """The right answers: every request once, without faults."""
        places = asyncio.Semaphore(num_clients)

        async def ask(request: Request) -> Talk:
            async with places:
                talk = await self._learn(request)
                self.on_answer()
                return talk

        talks = await asyncio.gather(*(ask(request) for request in requests))
        has_ids = not any(talk.num_without_id > 1 for talk in talks)  # the event with the usage may have none
        return Known(requests, [talk.answer for talk in talks], can_resume=has_ids)

    async def repeat(self, known: Known, numbers: Sequence[int], manner: Manner, num_clients: int) -> None:
        """Some requests once more: nothing is disturbed, and the answers must be the same, none of them marked."""
        places = asyncio.Semaphore(num_clients)

        async def ask(number: int) -> None:
            async with places:
                for _ in range(_MAX_MARKED):
                    answer = await self._ask(known, number, manner, random.Random(number), Tally())
                    if not marks(answer):
                        break
                self._find_marks(answer, f"{known.requests[number]}, undisturbed")
                self.on_answer()

        await asyncio.gather(*(ask(number) for number in numbers))

    async def verify(self, found: Sequence[Continuation], num_clients: int) -> None:
        """What followed marked tokens, against runs that begin with the same tokens. Nothing is disturbed."""
        places = asyncio.Semaphore(num_clients)

        async def ask(continuation: Continuation) -> None:
            async with places:
                tokens = (await self._learn(continuation.request)).answer.choices[0].token_ids
                at = first_difference(continuation.tokens, tokens)
                if at is not None:
                    what = f"token {at} of it: expected {tokens[at : at + 4]}, got {continuation.tokens[at : at + 4]}"
                    self._findings.add(Kind.DIVERGENCE, continuation.where, what)
                self.on_answer()

        await asyncio.gather(*(ask(continuation) for continuation in found))

    async def _learn(self, request: Request) -> Talk:
        """Undisturbed, as a client that could resume, but never has to. A machine that is short of CPU time may lose a
        worker without any fault, and mask its experts: such an answer is not the right one."""
        for _ in range(_MAX_MARKED):
            talk = self._talk(request, Manner.RESUME)
            await (talk.background() if request.is_background else talk.stream())
            if not marks(talk.answer):
                break
        self._find_marks(talk.answer, f"{request}, undisturbed")
        return talk

    async def storm(self, known: Known, seed: int, num_clients: int, until: asyncio.Event) -> None:
        """Each client asks again as soon as it has its answer. Returns when all have their last."""

        async def client(number: int) -> None:
            dice = random.Random(f"everserve chaos/client/{seed}/{number}")
            manners = [manner for manner in _MANNERS if manner is not Manner.RESUME or known.can_resume]
            while not until.is_set():
                manner = dice.choices(manners, [_MANNERS[manner] for manner in manners])[0]
                await self._ask(known, dice.randrange(len(known.requests)), manner, dice, self.tally)

        self.tally = Tally()
        await asyncio.gather(*(client(number) for number in range(num_clients)))

    async def _ask(self, known: Known, number: int, manner: Manner, dice: random.Random, tally: Tally) -> Answer:
        """One request and its judgement."""
        request, expected = known.requests[number], known.answers[number]
        if request.is_background:
            manner = Manner.BACKGROUND
        talk = self._talk(request, manner)
        where = f"{request}, {manner}"
        is_complete = manner is not Manner.CANCEL
        try:
            await _perform(talk, manner, expected.num_tokens, dice)
        except Trouble as trouble:
            is_complete = False
            self._findings.add(trouble.kind, where, str(trouble))
        for difference in compare(talk.answer, expected, is_complete):
            self._findings.add(difference.kind, where, str(difference))
        tally.add(manner, talk, where)
        if not is_complete and manner is not Manner.CANCEL:
            await asyncio.sleep(_AFTER_TROUBLE_S)
        return talk.answer

    def _find_marks(self, answer: Answer, where: str) -> None:
        for difference in marks(answer):
            self._findings.add(difference.kind, where, str(difference))

    def _talk(self, request: Request, manner: Manner) -> Talk:
        request_id = f"chaos-{uuid.uuid4().hex}" if manner is Manner.RESUME else None
        return Talk(self._target, request, self._stall_limit_s, request_id)


async def _perform(talk: Talk, manner: Manner, num_events: int, dice: random.Random) -> None:
    if manner is Manner.BACKGROUND:
        await talk.background()
    elif manner is Manner.WHOLE:
        await talk.whole()
    elif manner is Manner.CANCEL:
        await talk.stream([Break(dice.randrange(num_events), is_abrupt=dice.random() < 0.5)], comes_back=False)
    elif manner is Manner.RESUME:
        await talk.stream(draw_breaks(num_events, dice))
        if talk.num_without_id > 1:
            raise Trouble(Kind.ERROR, f"{talk.num_without_id} events had no id")
    else:
        await talk.stream()


def draw_breaks(num_events: int, dice: random.Random) -> list[Break]:
    """Breaks at places drawn from the whole stream, the place before its formal end included."""
    num = min(dice.randint(1, _MAX_BREAKS), num_events)
    places = sorted(dice.sample(range(1, num_events + 1), num))
    return [Break(place, dice.uniform(0, _MAX_AWAY_S), dice.random() < 0.5) for place in places]
