"""One answer beside the expected one, and the catalogue that answers are for."""

import copy
import json

import msgspec
import pytest

from everserve.chaos.answers import Answer, Choice, Usage
from everserve.chaos.compare import Kind, classify, compare, first_difference, marks
from everserve.chaos.continuations import can_ask, continuations
from everserve.chaos.requests import CHATS, COMPLETIONS, RESPONSES, Request, make_catalogue
from everserve.gateway.api.responses.request import ResponsesRequest
from everserve.gateway.http.requests import ChatRequest, CompletionRequest

TOKENS = [5, 6, 7, 7, 8]


def answer(tokens=TOKENS, **changes) -> Answer:
    text = "".join(f"<{token}>" for token in tokens)
    choice = Choice(token_ids=list(tokens), text=text, finish_reason="length")
    for name, value in changes.items():
        setattr(choice, name, value)
    return Answer([choice], Usage(3, len(tokens), 3 + len(tokens)))


# -- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "kind", "index"),
    [
        ([5, 6, 7, 7], Kind.GAP, 4),  # the last is missing
        ([], Kind.GAP, 0),
        ([6, 7, 7, 8], Kind.GAP, 0),  # the first
        ([5, 6, 7, 8], Kind.GAP, 3),  # one of two equal ones
        ([5, 8], Kind.GAP, 1),  # several
        ([5, 5, 6, 7, 7, 8], Kind.DUPLICATE, 1),
        ([5, 6, 7, 7, 7, 8], Kind.DUPLICATE, 4),
        ([5, 6, 5, 6, 7, 7, 8], Kind.DUPLICATE, 2),  # a stretch
        ([5, 6, 7, 7, 8, 8], Kind.DUPLICATE, 5),
        ([5, 6, 7, 7, 8, 9], Kind.DIVERGENCE, 5),  # one more that nobody knows
        ([5, 6, 9, 7, 8], Kind.DIVERGENCE, 2),
        ([5, 6, 9, 9, 9], Kind.DIVERGENCE, 2),
        ([5, 6, 7, 8, 7], Kind.DIVERGENCE, 3),  # in another order
    ],
)
def test_what_is_wrong_with_tokens(tokens, kind, index):
    (found,) = compare(answer(tokens), answer())
    assert (found.kind, found.index) == (kind, index)


def test_what_is_right():
    assert compare(answer(), answer()) == []
    assert first_difference(TOKENS, TOKENS) is None


@pytest.mark.parametrize("num", range(len(TOKENS) + 1))
def test_a_cancelled_answer_is_a_beginning(num):
    part = answer(TOKENS[:num], finish_reason=None)
    part.usage = None
    assert compare(part, answer(), is_complete=False) == []
    if num < len(TOKENS):
        assert [found.kind for found in compare(part, answer())] == [Kind.GAP]


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [([5, 7], Kind.GAP), ([5, 6, 6, 7], Kind.DUPLICATE), ([5, 9], Kind.DIVERGENCE), ([9], Kind.DIVERGENCE)],
)
def test_what_is_wrong_with_a_cancelled_answer(tokens, kind):
    assert [found.kind for found in compare(answer(tokens), answer(), is_complete=False)] == [kind]
    at = first_difference(tokens, TOKENS)
    assert at is not None and classify(tokens, TOKENS, at, is_complete=False) == kind


def test_each_choice_is_compared():
    expected = Answer([answer().choices[0], answer([1, 2, 3]).choices[0]])
    got = copy.deepcopy(expected)
    got.choices[1].token_ids[1] = 9
    (found,) = compare(got, expected)
    assert (found.kind, found.choice, found.index) == (Kind.DIVERGENCE, 1, 1)
    assert "[2, 3]" in str(found) and "[9, 3]" in str(found)


# -- everything else -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{"finish_reason": "stop"}, {"finish_reason": None}, {"stop_reason": "x"}, {"text": "<5><6>"}]
)
def test_the_ending_counts(changes):
    assert [found.kind for found in compare(answer(**changes), answer())] == [Kind.ENDING]


def test_the_usage_counts():
    other = answer()
    other.usage = Usage(3, 4, 7)
    assert [found.kind for found in compare(other, answer())] == [Kind.ENDING]
    other.usage = None
    assert [found.kind for found in compare(other, answer())] == [Kind.ENDING]


def scored(logprobs, tops) -> Answer:
    return answer([5, 6], logprobs=logprobs, top_logprobs=tops)


def test_logprobs_count():
    right = scored([-1.0, -2.0], [{"a": -1.0}, {"b": -0.5, "c": -2.0}])
    assert compare(copy.deepcopy(right), right) == []
    close = scored([-1.00005, -2.0], [{"a": -1.00005}, {"b": -0.5, "c": -2.0}])
    assert compare(close, right) == []
    for wrong in (
        scored([-1.0, -2.001], [{"a": -1.0}, {"b": -0.5, "c": -2.0}]),
        scored([-1.0, -2.0], [{"a": -1.0}, {"b": -0.6, "c": -2.0}]),
        scored([-1.0, -2.0], [{"a": -1.0}, {"b": -0.5, "d": -2.0}]),
        scored([-1.0], [{"a": -1.0}]),
    ):
        (found,) = compare(wrong, right)
        assert (found.kind, found.index) == (Kind.LOGPROBS, 1)


# -- putting answers together --------------------------------------------------------------------


def test_events_and_one_piece_come_to_the_same():
    def part(index, tokens, text, **more):
        logprobs = {"token_logprobs": [-1.0] * len(tokens), "top_logprobs": [{"x": -1.0}] * len(tokens)}
        return {"index": index, "token_ids": tokens, "text": text, "logprobs": logprobs, **more}

    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 4,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    streamed, whole = Answer.empty(2), Answer.empty(2)
    for data in (
        {"choices": [part(0, [1], "a", finish_reason=None)]},
        {"choices": [part(1, [3], "", finish_reason=None)]},
        {"choices": [part(1, [4], "cd", finish_reason="stop", stop_reason="d")]},
        {"choices": [part(0, [2], "b", finish_reason="length")]},
        {"choices": [], "usage": usage},
    ):
        streamed.add(data)
    last = [part(0, [1, 2], "ab", finish_reason="length"), part(1, [3, 4], "cd", finish_reason="stop", stop_reason="d")]
    whole.add({"choices": last, "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 0}}})
    assert streamed == whole and streamed.num_tokens == 4
    assert compare(streamed, whole) == []


# -- the catalogue -------------------------------------------------------------------------------


def test_the_catalogue_follows_from_the_seed():
    assert make_catalogue(1, "m", range(100), 4096) == make_catalogue(1, "m", range(100), 4096)
    assert make_catalogue(1, "m", range(100), 4096) != make_catalogue(2, "m", range(100), 4096)


@pytest.mark.parametrize("max_model_len", [64, 4096])
def test_the_catalogue_is_servable_and_mixed(max_model_len):
    catalogue = make_catalogue(5, "m", range(100), max_model_len, calls_tools=True)
    others = [request for request in catalogue if request.path != COMPLETIONS]
    assert [request.number for request in catalogue] == list(range(len(catalogue)))
    for request in others:
        kind = ChatRequest if request.path == CHATS else ResponsesRequest
        msgspec.json.decode(json.dumps(request.body), type=kind)
        assert "seed" in request.body and request.is_background == (request.path == RESPONSES)
    assert {request.path for request in others} == {CHATS, RESPONSES}
    assert not any(request.path == CHATS for request in make_catalogue(5, "m", range(100), max_model_len))
    bodies = [request.body for request in catalogue if request.path == COMPLETIONS]
    for body in bodies:
        msgspec.json.decode(json.dumps(body), type=CompletionRequest)
        assert body["max_tokens"] >= 1 and len(body["prompt"]) + body["max_tokens"] <= max_model_len
        assert body["temperature"] == 0 or "seed" in body, "without a seed there is no right answer"
    for name in ("n", "logprobs", "stop", "frequency_penalty", "seed"):
        assert 0 < sum(name in body for body in bodies) < len(bodies)
    assert min(body["max_tokens"] for body in bodies) == 1
    starts = [tuple(body["prompt"][:16]) for body in bodies]
    assert len(set(starts)) < len(starts), "some share a prefix"
    if max_model_len == 4096:
        assert max(len(body["prompt"]) for body in bodies) > 700
        assert max(body["max_tokens"] for body in bodies) > 200


# -- masks ---------------------------------------------------------------------------------------


def test_only_what_comes_before_a_mask_is_compared_with_the_expected_answer():
    wrong_after = answer([5, 6, 1, 2], masked=[(2, 4)], finish_reason="stop", text="?")
    wrong_after.usage = Usage(3, 4, 7)
    assert compare(wrong_after, answer()) == []
    wrong_before = answer([5, 9, 1, 2], masked=[(2, 4)])
    (found,) = compare(wrong_before, answer())
    assert (found.kind, found.index) == (Kind.DIVERGENCE, 1)
    assert compare(answer([1, 2], masked=[(0, 2)]), answer()) == []
    other_numbers = scored([-1.0, -9.0], [{"a": -1.0}, {}])
    right = scored([-1.0, -2.0], [{"a": -1.0}, {"b": -0.5}])
    other_numbers.choices[0].masked = [(1, 2)]
    assert compare(other_numbers, right) == []
    other_numbers.choices[0].masked = []
    assert [found.kind for found in compare(other_numbers, right)] == [Kind.LOGPROBS]


def test_undisturbed_no_token_may_be_marked():
    assert marks(answer()) == []
    (found,) = marks(answer(masked=[(1, 3)]))
    assert (found.kind, found.choice, found.index) == (Kind.MASKED, 0, 1)


def test_marks_of_events_and_of_whole_answers_are_the_same():
    streamed, whole = Choice(), Choice()
    for i, is_masked in enumerate([False, True, True, False, True, False]):
        marks = {"degraded": {"masked_ranges": [[i, i + 1]]}} if is_masked else {}
        streamed.add({"token_ids": [i], "text": "x", **marks})
    whole.add({"token_ids": [*range(6)], "text": "x" * 6, "degraded": {"masked_ranges": [[1, 3], [4, 5]]}})
    assert streamed == whole and whole.masked == [(1, 3), (4, 5)] and whole.num_masked == 3
    assert whole.exact_again == [(3, 4), (5, 6)]
    assert Choice(token_ids=[1, 2], masked=[(0, 2)]).exact_again == []


def test_a_continuation_is_asked_for_with_the_tokens_before_it():
    body = {
        "model": "m",
        "prompt": [7, 8],
        "max_tokens": 9,
        "temperature": 0.0,
        "ignore_eos": True,
        "n": 1,
        "stop": ["x"],
    }
    request = Request(3, body)
    (found,) = continuations(request, answer([1, 2, 3, 4], masked=[(1, 2)]), "here")
    assert found.tokens == (3, 4) and "token 2" in found.where
    assert found.request.body == {
        "model": "m", "prompt": [7, 8, 1, 2], "max_tokens": 2, "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    assert can_ask(request)
    assert not can_ask(Request(0, body | {"temperature": 0.7})) and not can_ask(
        Request(0, body | {"presence_penalty": 1})
    )
