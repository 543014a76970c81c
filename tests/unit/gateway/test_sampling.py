"""Requests become SamplingParams: defaults, limits, seeds."""

import json
from pathlib import Path
from typing import Any

import pytest

from everserve.errors import ModelError, RequestError
from everserve.gateway.http.requests import ChatRequest, CompletionRequest, StreamOptions, UserInput
from everserve.gateway.text.sampling import (
    MAX_PROMPT_SCORES,
    GenerationDefaults,
    Limits,
    SeedSource,
    check_combinations,
    check_prompt_size,
    choice_seed,
    read_defaults,
    sampling_params,
)
from everserve.tables.requests import SamplingParams

LIMITS = Limits(max_total_tokens=100, vocab_size=50, max_logprobs=5)
PLAIN = GenerationDefaults(eos_ids=(7,))
MESSAGES = [UserInput(content="hi")]


def completion(num_prompt: int = 10, defaults: GenerationDefaults = PLAIN, **fields: Any) -> SamplingParams:
    request = CompletionRequest(prompt="x", **fields)
    check_combinations(request)
    return sampling_params(request, num_prompt, LIMITS, defaults)


def chat(num_prompt: int = 10, defaults: GenerationDefaults = PLAIN, **fields: Any) -> SamplingParams:
    request = ChatRequest(messages=MESSAGES, **fields)
    check_combinations(request)
    return sampling_params(request, num_prompt, LIMITS, defaults)


def test_default_lengths() -> None:
    assert completion().max_tokens == 16
    assert completion(num_prompt=95).max_tokens == 5
    assert chat().max_tokens == 90
    assert chat(defaults=GenerationDefaults(eos_ids=(), max_new_tokens=30)).max_tokens == 30


def test_two_names_for_one_limit() -> None:
    assert chat(max_tokens=3).max_tokens == chat(max_completion_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=3).max_tokens == 3
    with pytest.raises(RequestError, match="two names"):
        chat(max_tokens=3, max_completion_tokens=4)


def test_too_long_a_prompt_is_told_the_numbers() -> None:
    with pytest.raises(RequestError, match=r"maximum context length is 100 tokens.*100 input tokens") as caught:
        completion(num_prompt=100)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match=r"100 tokens.*250 input tokens") as caught:
        chat(num_prompt=250)
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match=r"too large: 91.*\(91 > 100 - 10\)"):
        completion(max_tokens=91)
    assert completion(max_tokens=90).max_tokens == 90


def test_nothing_but_the_prompt() -> None:
    params = completion(num_prompt=100, max_tokens=0, echo=True)
    assert (params.max_tokens, params.prompt_logprobs, params.logprobs) == (0, 0, None)
    with pytest.raises(RequestError, match="echo"):
        completion(max_tokens=0)


def test_logprobs() -> None:
    assert completion(logprobs=3).logprobs == 3
    assert completion(logprobs=3).prompt_logprobs is None
    assert completion(logprobs=3, echo=True).prompt_logprobs == 3
    assert completion(prompt_logprobs=0).prompt_logprobs == 0
    assert completion(logprobs=3, echo=True, prompt_logprobs=1).prompt_logprobs == 3
    assert chat(logprobs=True, top_logprobs=1, prompt_logprobs=5).prompt_logprobs == 5
    with pytest.raises(RequestError, match="at most 5"):
        completion(prompt_logprobs=6)
    with pytest.raises(RequestError, match="prompt_logprobs") as caught:
        check_prompt_size(CompletionRequest(prompt="x", prompt_logprobs=5), MAX_PROMPT_SCORES // 6 + 1, 0)
    assert caught.value.param == "prompt_logprobs"
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).logprobs == 4
    with pytest.raises(RequestError, match="at most 5"):
        completion(logprobs=6)
    with pytest.raises(RequestError, match="together"):
        chat(top_logprobs=2)


def test_stop_ids() -> None:
    assert completion(stop_token_ids=[3]).stop_ids == (3, 7)
    assert completion(stop_token_ids=[3], ignore_eos=True).stop_ids == (3,)
    with pytest.raises(RequestError, match="out of vocabulary"):
        completion(stop_token_ids=[50])
    with pytest.raises(RequestError, match="At most"):
        sampling_params(
            CompletionRequest(prompt="x", stop_token_ids=list(range(8, 72))),
            1,
            Limits(max_total_tokens=100, vocab_size=100, max_logprobs=5),
            PLAIN,
        )


def test_logit_bias_names_existing_tokens() -> None:
    assert completion(logit_bias={3: 1.5}).logit_bias == {3: 1.5}
    with pytest.raises(RequestError, match="Token id 50"):
        completion(logit_bias={50: 1})


def test_combinations() -> None:
    completion(n=2, best_of=2)
    assert completion(n=2, best_of=3).logprobs == 0, "the best are known by them"
    assert completion(best_of=3, logprobs=2).logprobs == 2
    for fields in ({"best_of": 2, "stream": True}, {"n": 3, "best_of": 2}):
        with pytest.raises(RequestError, match="best_of"):
            completion(**fields)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        completion(prompt_logprobs=1, stream=True)
    with pytest.raises(RequestError, match="min_tokens"):
        completion(min_tokens=17)
    with pytest.raises(RequestError, match="stream"):
        completion(stream_options=StreamOptions())


def test_a_tiny_temperature_is_greedy() -> None:
    assert completion(temperature=1e-9).temperature == 0
    assert completion(top_k=-1).top_k == 0


def test_the_model_s_own_defaults(tmp_path: Path) -> None:
    config = {"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 40}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    defaults = read_defaults(str(tmp_path), tokenizer_eos_id=3)
    assert defaults.eos_ids == (1, 2, 3)
    params = completion(defaults=defaults)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.9, 20, 0.0)
    assert completion(defaults=defaults, temperature=0, top_k=0).temperature == 0
    assert chat(defaults=defaults).max_tokens == 40


def test_without_a_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert read_defaults(str(tmp_path), None) == GenerationDefaults(eos_ids=(5,))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_defaults(str(tmp_path), None)
    (tmp_path / "generation_config.json").write_text('{"top_p": "high"}')
    with pytest.raises(ModelError, match="top_p"):
        read_defaults(str(tmp_path), None)


def test_seeds() -> None:
    given = SeedSource(None)
    assert given.for_request(CompletionRequest(prompt="x", seed=5)) == 5
    assert 0 <= given.for_request(CompletionRequest(prompt="x", seed=-1)) < 2**63
    without = CompletionRequest(prompt="x")
    assert given.for_request(without) != given.for_request(without)
    first, second = SeedSource(9), SeedSource(9)
    assert [first.for_request(without) for _ in range(3)] == [second.for_request(without) for _ in range(3)]


def test_choices_have_seeds_of_their_own() -> None:
    seeds = [choice_seed(5, i) for i in range(100)]
    assert seeds[0] == 5 and len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [choice_seed(5, i) for i in range(100)]
