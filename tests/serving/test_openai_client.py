"""The real `openai` package against the real server."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.support.cluster import get, metric, wait_until

PROMPT = "It was a bright morning, and"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def client(server) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models(client: openai.OpenAI, server) -> None:
    (model,) = client.models.list().data
    assert model.id == server.model
    assert client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion(client: openai.OpenAI, server) -> None:
    answer = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.object == "text_completion" and answer.model == server.model
    assert answer.choices[0].text and answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat(client: openai.OpenAI, server) -> None:
    answer = client.chat.completions.create(model=server.model, messages=MESSAGES, max_completion_tokens=12)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content is not None
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    whole = client.chat.completions.create(model=server.model, messages=MESSAGES, max_tokens=8, temperature=0)
    same = client.chat.completions.create(model=server.model, messages=parts, max_tokens=8, temperature=0)
    assert same.choices[0].message.content == whole.choices[0].message.content


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, server) -> None:
    asked: Any = {"model": server.model, "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(prompt=PROMPT, **asked)
    with client.completions.create(
        prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **asked
    ) as stream:
        *events, last = list(stream)
    assert len(events) == 24  # one event per token
    assert "".join(event.choices[0].text for event in events) == whole.choices[0].text
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 24


def test_a_chat_stream(client: openai.OpenAI, server) -> None:
    asked: Any = {"model": server.model, "max_tokens": 16, "temperature": 0, "messages": MESSAGES}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.create(stream=True, **asked) as stream:
        events = list(stream)
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.choices[0].message.content
    with client.chat.completions.stream(**asked) as accumulated:  # the package's own helper
        deltas = [event.delta for event in accumulated if event.type == "content.delta"]
    assert "".join(deltas) == whole.choices[0].message.content


HARMLESS: Any = {
    "metadata": {"session": "7"},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "prompt_cache_key": "team-a",
    "response_format": {"type": "text"},
    "safety_identifier": "f00d",
    "reasoning_effort": "low",
    "service_tier": "auto",
    "store": False,
    "tool_choice": "none",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "user": "somebody",
    "verbosity": "medium",
}


def test_fields_that_change_nothing_are_accepted(client: openai.OpenAI, server) -> None:
    asked: Any = {"model": server.model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    plain = client.chat.completions.create(**asked)
    same = client.chat.completions.create(**asked, **HARMLESS)
    assert same.choices[0].message.content == plain.choices[0].message.content
    options: Any = {"include_usage": True, "include_obfuscation": False}
    with client.chat.completions.create(**asked, **HARMLESS, stream=True, stream_options=options) as stream:
        deltas = [choice.delta.content or "" for event in stream for choice in event.choices]
    assert "".join(deltas) == plain.choices[0].message.content


def test_a_conversation_as_agents_replay_it(client: openai.OpenAI, server) -> None:
    asked: Any = {"model": server.model, "max_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(messages=MESSAGES, **asked).choices[0].message
    without_text: Any = {"role": "assistant", "content": None, "refusal": None, "tool_calls": []}
    cached: Any = {
        "role": "user",
        "content": [{"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}}],
    }
    plain: Any = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "assistant", "content": ""}]
    replayed: Any = [cached, answer.model_dump(), without_text]
    expected = client.chat.completions.create(messages=[*plain, *MESSAGES], **asked)
    same = client.chat.completions.create(messages=[*replayed, cached], **asked, **HARMLESS)
    assert same.choices[0].message.content == expected.choices[0].message.content
    assert same.usage is not None and expected.usage is not None
    assert same.usage.prompt_tokens == expected.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=[*MESSAGES, without_text | {"role": "user"}], **asked)  # type: ignore[call-overload]
    assert caught.value.param == "messages[1].content"


def test_a_long_prompt_is_cut(client: openai.OpenAI, server) -> None:
    """The answer is the one that the last tokens alone would get; -1 leaves room for it."""
    asked: Any = {"model": server.model, "max_tokens": 8, "temperature": 0}
    long = "word " * 20_000 + PROMPT
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": long}, timeout=None).json()["tokens"]
    for kept, num_kept in ((20, 20), (-1, 4096 - 8)):
        cut = client.completions.create(prompt=long, **asked, extra_body={"truncate_prompt_tokens": kept})
        expected = client.completions.create(prompt=tokens[-num_kept:], **asked)
        assert cut.choices[0].text == expected.choices[0].text
        assert cut.usage is not None and cut.usage.prompt_tokens == num_kept
    message: Any = {"role": "user", "content": long}
    chat = client.chat.completions.create(messages=[message], **asked, extra_body={"truncate_prompt_tokens": 20})
    assert chat.usage is not None and chat.usage.prompt_tokens == 20


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("store", {"store": True}),
        ("service_tier", {"service_tier": "priority"}),
        ("stream_options", {"stream": True, "stream_options": {"include_obfuscation": True}}),
    ],
)
def test_what_would_be_ignored_wrongly_is_refused(client: openai.OpenAI, server, param: str, fields: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="is not supported by this server") as caught:
        client.chat.completions.create(model=server.model, messages=MESSAGES, max_tokens=1, **fields)
    assert (caught.value.param or "").split(".")[0] == param


def test_a_seed_decides(client: openai.OpenAI, server) -> None:
    def sample(seed: int, n: int = 1) -> list[str]:
        answer = client.completions.create(
            model=server.model, prompt=PROMPT, max_tokens=16, temperature=1.0, seed=seed, n=n
        )
        return [choice.text for choice in answer.choices]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    three = sample(1, n=3)
    assert three[0] == sample(1)[0] and len(set(three)) > 1


def test_prompts_in_all_their_forms(client: openai.OpenAI, server) -> None:
    def texts(prompt: Any) -> list[str]:
        answer = client.completions.create(model=server.model, prompt=prompt, max_tokens=6, temperature=0)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": PROMPT}, timeout=None).json()["tokens"]
    (expected,) = texts(PROMPT)
    assert texts([PROMPT, "The"])[0] == expected
    assert texts(tokens) == [expected]
    assert texts([tokens, tokens]) == [expected, expected]


def test_logprobs_of_a_completion_with_echo(client: openai.OpenAI, server) -> None:
    answer = client.completions.create(
        model=server.model, prompt=PROMPT, max_tokens=4, temperature=0, logprobs=3, echo=True
    )
    choice, usage = answer.choices[0], answer.usage
    logprobs = choice.logprobs
    assert logprobs is not None and usage is not None and choice.text.startswith(PROMPT)
    assert logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.text_offset
    lengths = {len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.top_logprobs)}
    assert lengths == {usage.total_tokens}
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert "".join(logprobs.tokens) == choice.text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    generated = range(usage.prompt_tokens, usage.total_tokens)
    for i in generated:  # greedy: the chosen token is the best one
        assert logprobs.token_logprobs[i] == max(logprobs.top_logprobs[i].values())
    only_prompt = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=0, logprobs=0, echo=True)
    assert only_prompt.choices[0].text == PROMPT
    scores = only_prompt.choices[0].logprobs
    assert scores is not None and scores.token_logprobs is not None
    assert scores.token_logprobs[1:] == pytest.approx(logprobs.token_logprobs[1 : usage.prompt_tokens], abs=1e-3)


def test_what_vllm_adds(client: openai.OpenAI, server) -> None:
    """Prompt logprobs are those of an echo; bad words do not come; the best choice is the likeliest of those made."""
    asked: Any = {"model": server.model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    echoed = client.completions.create(**asked, logprobs=2, echo=True, extra_body={"prompt_logprobs": 2}).choices[0]
    scores: Any = getattr(echoed, "prompt_logprobs")  # noqa: B009 (a field that the package does not know)
    assert echoed.logprobs is not None and echoed.logprobs.token_logprobs is not None
    own = [next(iter(entry.values())) for entry in scores[1:]]
    assert scores[0] is None and [entry["logprob"] for entry in own] == echoed.logprobs.token_logprobs[1 : len(scores)]
    assert [entry["decoded_token"] for entry in own] == (echoed.logprobs.tokens or [])[1 : len(scores)]

    text = client.completions.create(**asked).choices[0].text
    word = text.split()[1]
    other = client.completions.create(**asked, extra_body={"bad_words": [word]}).choices[0].text
    assert word in text.split() and word not in other.split() and other.startswith(text.split()[0], 1)

    sampled: Any = {**asked, "temperature": 1, "seed": 3, "logprobs": 0}

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    made = sorted(client.completions.create(**sampled, n=4).choices, key=mean, reverse=True)
    best = client.completions.create(**sampled, n=2, best_of=4).choices
    assert [choice.text for choice in best] == [choice.text for choice in made[:2]]


def test_logprobs_of_a_chat(client: openai.OpenAI, server) -> None:
    asked: Any = {"model": server.model, "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for entry in logprobs.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 2
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert entry.bytes is not None and bytes(entry.bytes).decode(errors="replace") == entry.token


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, server, stream: bool) -> None:
    asked: Any = {"model": server.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    text = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[9:13]  # across token boundaries, most likely
    extra = {"ignore_eos": True}
    if stream:
        with client.completions.create(**asked, stop=[stop, "☃"], stream=True, extra_body=extra) as events:
            choices = [event.choices[0] for event in events]
    else:
        choices = client.completions.create(**asked, stop=[stop, "☃"], extra_body=extra).choices
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"
    assert choices[-1].stop_reason == stop  # type: ignore[union-attr]
    kept = client.completions.create(**asked, stop=stop, extra_body={**extra, "include_stop_str_in_output": True})
    assert kept.choices[0].text == text[: text.index(stop) + len(stop)]


def test_logit_bias_and_stop_tokens(client: openai.OpenAI, server) -> None:
    (token,) = httpx.post(f"{server.url}/tokenize", json={"prompt": " the"}, timeout=None).json()["tokens"][:1]
    forced = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=3, logit_bias={str(token): 100})
    word = httpx.post(f"{server.url}/detokenize", json={"tokens": [token]}, timeout=None).json()["prompt"]
    assert forced.choices[0].text == word * 3
    asked: Any = {"model": server.model, "prompt": PROMPT, "max_tokens": 9, "logit_bias": {str(token): 100}}
    extra = {"stop_token_ids": [token], "return_token_ids": True}
    choice: Any = client.completions.create(**asked, extra_body=extra).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", token)
    assert choice.token_ids == [token]
    later: Any = client.completions.create(**asked, extra_body={**extra, "min_tokens": 3}).choices[0]
    assert len(later.token_ids) == 4 and later.token_ids[-1] == token and token not in later.token_ids[:3]


def test_errors_are_those_of_the_package(client: openai.OpenAI, server) -> None:
    for asked in (
        {"temperature": 3},
        {"max_tokens": 10**6},
        {"prompt": "word " * 20_000},
        {"extra_body": {"tools": []}},
        {"extra_body": {"no_such_field": 1}},
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{"model": server.model, "prompt": PROMPT, **asked})  # type: ignore[call-overload]
        assert caught.value.type == "invalid_request_error" and caught.value.status_code == 400
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with (
        pytest.raises(openai.BadRequestError),
        client.completions.create(model=server.model, prompt="word " * 20_000, stream=True),
    ):
        pass


def test_request_ids(client: openai.OpenAI, server) -> None:
    answer = client.completions.create(
        model=server.model, prompt=PROMPT, max_tokens=1, extra_headers={"X-Request-Id": "my-own-id"}
    )
    assert answer._request_id == "my-own-id" and answer.id == "cmpl-my-own-id"


def test_a_client_that_leaves_stops_the_work(client: openai.OpenAI, server) -> None:
    asked: Any = {"model": server.model, "prompt": PROMPT, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(**asked, n=2, stream=True)
    for _ in range(4):
        next(stream)
    assert httpx.get(f"{server.url}/load", timeout=None).json() == {"server_load": 1}
    generated = metric(server, "vllm:generation_tokens_total")
    stream.close()
    wait_until(lambda: get(server, "/load").json() == {"server_load": 0})
    wait_until(lambda: metric(server, "vllm:num_requests_running") == 0)
    assert metric(server, "vllm:generation_tokens_total") - generated < 1000


def test_many_clients_at_once(server) -> None:
    """Each gets its own stream, complete, and the same as alone."""

    async def run() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(seed: int) -> str:
                stream = await client.completions.create(
                    model=server.model, prompt=PROMPT, max_tokens=20, seed=seed, stream=True
                )
                return "".join([event.choices[0].text async for event in stream])

            alone = await one(3)
            return alone, await asyncio.gather(*(one(seed % 4) for seed in range(12)))

    alone, texts = asyncio.run(run())
    assert len(texts) == 12 and all(texts)
    assert texts[3] == texts[7] == texts[11] == alone
