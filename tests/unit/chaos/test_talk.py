"""One request to its end: what the client notices, against a server that makes every mistake once."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from everserve.chaos.answers import Answer, Choice, Usage
from everserve.chaos.clients import Clients, Manner, draw_breaks
from everserve.chaos.compare import Kind, compare
from everserve.chaos.findings import Findings
from everserve.chaos.requests import Request
from everserve.chaos.talk import Break, Talk, Trouble
from everserve.chaos.target import Target
from tests.support.chaos_toy import DONE, Asked, event, head, json_answer, serving, token_event, usage_event

REQUEST = Request(0, {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0.0})
TOKENS = [10, 11, 12, 13, 14]
EVENTS = [token_event(token, i, finish_reason="length" if i == 4 else None) for i, token in enumerate(TOKENS)]
ENDING = [usage_event(3, 5, 5), DONE]


def from_pieces(*pieces: bytes):
    async def respond(asked: Asked) -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return respond


def run(respond, work, stall_limit_s: float = 30.0):
    """`work(talk)` against a server that responds like that; returns the talk."""

    async def main() -> Talk:
        async with serving(respond) as url:
            talk = Talk(Target(url, "secret"), REQUEST, stall_limit_s, request_id="one")
            await work(talk)
            return talk

    return asyncio.run(main())


def trouble(respond, work=lambda talk: talk.stream(), stall_limit_s: float = 30.0) -> Trouble:
    with pytest.raises(Trouble) as caught:
        run(respond, work, stall_limit_s)
    return caught.value


def test_a_stream():
    asked = []

    async def respond(request: Asked) -> AsyncIterator[bytes]:
        asked.append(request)
        yield head()
        for piece in (*EVENTS, *ENDING):
            yield piece

    talk = run(respond, lambda talk: talk.stream())
    (choice,) = talk.answer.choices
    assert (choice.token_ids, choice.finish_reason) == (TOKENS, "length")
    assert talk.answer.usage == Usage(3, 5, 8)
    assert talk.first_s is not None and len(talk.gaps_s) == 5 and talk.num_resumes == talk.num_without_id == 0
    (request,) = asked
    assert (request.method, request.path) == ("POST", "/v1/completions")
    assert request.body == REQUEST.body | {"stream": True, "stream_options": {"include_usage": True}}
    assert request.headers["x-request-id"] == "one" and request.headers["authorization"] == "Bearer secret"
    assert "last-event-id" not in request.headers


def test_a_stream_in_chunks_that_cut_lines():
    data = b"".join([*EVENTS, *ENDING])
    chunks = [data[i : i + 7] for i in range(0, len(data), 7)]
    encoded = [f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in chunks]
    start = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    talk = run(from_pieces(start, *encoded, b"0\r\n\r\n"), lambda talk: talk.stream())
    assert talk.answer.choices[0].token_ids == TOKENS
    caught = trouble(from_pieces(start, *encoded[:5], encoded[5][:4]))
    assert caught.kind == Kind.ERROR and "ended before the stream did" in str(caught)


def test_an_answer_in_one_piece():
    choice = {"index": 0, "text": "x", "token_ids": TOKENS, "finish_reason": "length"}
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    talk = run(from_pieces(json_answer({"choices": [choice], "usage": usage})), lambda talk: talk.whole())
    assert talk.answer.choices[0].token_ids == TOKENS and talk.answer.usage == Usage(3, 5, 8)


# -- resuming ------------------------------------------------------------------------------------


class Resumable:
    """Streams that can be taken up again; `mistake` shifts where the second connection begins."""

    def __init__(self, mistake: int = 0) -> None:
        self.seen: list[str | None] = []
        self._mistake = mistake

    async def __call__(self, asked: Asked) -> AsyncIterator[bytes]:
        last = asked.headers.get("last-event-id")
        self.seen.append(last)
        assert asked.headers["x-request-id"] == "one"
        yield head()
        begin = 0 if last is None else int(last) + 1 + self._mistake
        for piece in [*EVENTS, *ENDING][begin:]:
            yield piece


BREAKS = [Break(1), Break(3, 0.01, is_abrupt=True), Break(5)]


def test_a_stream_that_breaks_and_is_resumed():
    server = Resumable()
    talk = run(server, lambda talk: talk.stream(BREAKS))
    assert server.seen == [None, "0", "2", "4"]
    assert talk.answer.choices[0].token_ids == TOKENS and talk.answer.usage == Usage(3, 5, 8)
    assert talk.num_resumes == 3 and talk.num_events == 6


def test_a_break_behind_the_end_is_none():
    talk = run(Resumable(), lambda talk: talk.stream([Break(100)]))
    assert talk.num_resumes == 0 and talk.answer.choices[0].token_ids == TOKENS


@pytest.mark.parametrize(("mistake", "kind"), [(1, Kind.GAP), (-1, Kind.DUPLICATE)])
def test_a_stream_that_is_resumed_in_the_wrong_place(mistake, kind):
    assert trouble(Resumable(mistake), lambda talk: talk.stream(BREAKS)).kind == kind


def test_a_client_that_leaves_for_good():
    talk = run(Resumable(), lambda talk: talk.stream([Break(2)], comes_back=False))
    assert talk.answer.choices[0].token_ids == TOKENS[:2] and talk.num_resumes == 0
    talk = run(Resumable(), lambda talk: talk.stream([Break(0, is_abrupt=True)], comes_back=False))
    assert talk.answer.num_tokens == 0


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([EVENTS[0], EVENTS[2]], Kind.GAP),
        ([EVENTS[0], EVENTS[1], EVENTS[1]], Kind.DUPLICATE),
        ([EVENTS[0], event({"error": {"message": "no"}}, 1)], Kind.ERROR),
        ([EVENTS[0], token_event(11, index=7)], Kind.ERROR),  # a choice that nobody asked for
        ([EVENTS[0], b"data: {]\n\n"], Kind.ERROR),
        ([EVENTS[0], b"id: x\n" + token_event(11)], Kind.ERROR),
        ([*EVENTS, ENDING[0]], Kind.ERROR),  # it ends without saying so
        ([], Kind.ERROR),
    ],
)
def test_mistakes_of_streams(pieces, kind):
    assert trouble(from_pieces(head(), *pieces)).kind == kind


@pytest.mark.parametrize("work", [lambda talk: talk.stream(), lambda talk: talk.whole()])
def test_mistakes_of_answers(work):
    refused = trouble(from_pieces(json_answer({"error": {"message": "busy"}}, 503)), work)
    assert refused.kind == Kind.ERROR and "503" in str(refused) and "busy" in str(refused)
    assert trouble(from_pieces(), work).kind == Kind.ERROR


@pytest.mark.parametrize("pieces", [[], [head()], [head(), EVENTS[0]]])
def test_a_server_that_falls_silent(pieces):
    async def respond(asked: Asked) -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
        await asyncio.sleep(60)

    assert trouble(respond, stall_limit_s=0.1).kind == Kind.HANG
    assert trouble(respond, lambda talk: talk.whole(), stall_limit_s=0.02).kind == Kind.HANG


def test_nobody_is_there():
    async def main() -> None:
        await Talk(Target("http://127.0.0.1:9"), REQUEST, 1.0).stream()

    with pytest.raises(Trouble, match="broke"):
        asyncio.run(main())


# -- clients -------------------------------------------------------------------------------------


def judge(respond, manner: Manner, num: int = 1) -> list[str]:
    """The kinds of the findings after so many requests whose right answer is TOKENS."""

    async def main() -> list[str]:
        async with serving(Answering()) as url:
            findings = Findings()
            known = await Clients(Target(url), 30.0, findings).learn([REQUEST], 1)
            assert known.can_resume and not findings.all
        async with serving(respond) as url:
            await Clients(Target(url), 30.0, findings).repeat(known, [0] * num, manner, num)
            return [finding.kind for finding in findings.all]

    return asyncio.run(main())


class Answering:
    """Answers the request in any manner, rightly; `change` may do something to the events first."""

    def __init__(self, change=lambda events: events) -> None:
        self._events = change([*EVENTS])

    async def __call__(self, asked: Asked) -> AsyncIterator[bytes]:
        if asked.body.get("stream"):
            yield head()
            begin = int(asked.headers.get("last-event-id", -1)) + 1
            for piece in [*self._events, *ENDING][begin:]:
                yield piece
                await asyncio.sleep(0)
            return
        choice = {"index": 0, "text": "".join(f"<{t}>" for t in TOKENS), "token_ids": TOKENS, "finish_reason": "length"}
        usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        yield json_answer({"choices": [choice], "usage": usage})


@pytest.mark.parametrize("manner", [manner for manner in Manner if manner is not Manner.BACKGROUND])
def test_a_right_server_is_right_in_every_manner(manner):
    assert judge(Answering(), manner, num=10) == []


def changed(events: list[bytes]) -> list[bytes]:
    return [*events[:2], token_event(99, 2), *events[3:]]


@pytest.mark.parametrize("manner", [Manner.STREAM, Manner.RESUME])
def test_one_changed_token_is_found(manner):
    assert judge(Answering(changed), manner) == [Kind.DIVERGENCE]


def marked(events: list[bytes]) -> list[bytes]:
    """The right token, but marked."""
    choice = {"index": 0, "text": f"<{TOKENS[2]}>", "token_ids": [TOKENS[2]], "finish_reason": None}
    return [*events[:2], event({"choices": [choice | {"degraded": {"masked_ranges": [[2, 3]]}}]}, 2), *events[3:]]


def test_a_marked_token_without_a_fault_is_found():
    assert judge(Answering(marked), Manner.STREAM) == [Kind.MASKED]


def test_an_answer_that_is_marked_is_not_learnt():
    answers = [Answering(marked), Answering(marked), Answering()]

    async def respond(asked: Asked) -> AsyncIterator[bytes]:
        async for piece in answers.pop(0)(asked):
            yield piece

    async def learn() -> list[str]:
        async with serving(respond) as url:
            findings = Findings()
            known = await Clients(Target(url), 30.0, findings).learn([REQUEST], 1)
            assert known.answers[0].choices[0].masked == [] and not answers
            return [finding.kind for finding in findings.all]

    assert asyncio.run(learn()) == []


def test_events_without_ids_cannot_be_resumed():
    def without(events: list[bytes]) -> list[bytes]:
        return [token_event(token) for token in TOKENS]

    assert Kind.ERROR in judge(Answering(without), Manner.RESUME)


def test_the_storm_ends_when_told_and_counts():
    async def main() -> tuple[Clients, Findings]:
        async with serving(Answering()) as url:
            findings = Findings()
            clients = Clients(Target(url), 5.0, findings)
            known = await clients.learn([REQUEST], 1)
            until = asyncio.Event()
            storm = asyncio.ensure_future(clients.storm(known, 1, 3, until))
            while clients.tally.num_streams < 30 or not clients.tally.num_resumes:
                await asyncio.sleep(0.001)
            until.set()
            await storm
            return clients, findings

    clients, findings = asyncio.run(main())
    assert findings.all == []
    assert clients.tally.num_tokens > 0 and set(clients.tally.manners) <= set(Manner)
    assert clients.tally.longest and clients.tally.longest == sorted(clients.tally.longest, reverse=True)


def test_breaks_follow_from_the_dice():
    for num_events in (1, 2, 50):
        for seed in range(30):
            places = [at.after_events for at in draw_breaks(num_events, random.Random(seed))]
            assert places == sorted(set(places)) and places[0] >= 1 and places[-1] <= num_events


@pytest.mark.parametrize(("said", "found"), [("so it is", []), ("so it was", [Kind.ENDING])])
def test_a_response_in_the_background_is_looked_at_until_it_ends(said: str, found: list[Kind]) -> None:
    usage = {"input_tokens": 2, "output_tokens": 3, "total_tokens": 5}
    asked: list[tuple[str, str]] = []

    async def respond(request: Asked) -> AsyncIterator[bytes]:
        asked.append((request.method, request.path))
        status = "in_progress" if len(asked) < 3 else "completed"
        item = {"type": "message", "content": [{"type": "output_text", "text": said}]}
        yield json_answer({"id": "resp_1", "status": status, "output": [item], "usage": usage})

    request = Request(0, {"model": "m", "input": "x", "background": True, "max_output_tokens": 3}, "/v1/responses")

    async def main() -> Talk:
        async with serving(respond) as url:
            talk = Talk(Target(url, "secret"), request, 30.0)
            await talk.background()
            return talk

    talk = asyncio.run(main())
    assert asked == [("POST", "/v1/responses"), *[("GET", "/v1/responses/resp_1")] * 2]
    expected = Answer([Choice(text="so it is", finish_reason="completed")], Usage(2, 3, 5))
    assert [difference.kind for difference in compare(talk.answer, expected)] == found


def test_calls_of_tools_are_compared_by_what_they_say() -> None:
    """Whole, and in parts; ids of calls differ from request to request."""
    whole, parts = Answer.empty(1), Answer.empty(1)
    call = {"id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    whole.add({"choices": [{"index": 0, "message": {"content": "So. ", "tool_calls": [call]}, "token_ids": [1, 2]}]})
    for delta, tokens in (
        ({"role": "assistant", "content": ""}, []),
        ({"content": "So. "}, [1]),
        ({"tool_calls": [{"index": 0, "id": "call_2", "function": {"name": "weather", "arguments": ""}}]}, []),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Rome"}'}}]}, [2]),
    ):
        parts.add({"choices": [{"index": 0, "delta": delta, "token_ids": tokens}]})
    assert whole == parts and compare(parts, whole) == []
