"""A stream that is cut anywhere and resumed elsewhere goes on as if nothing had happened.

The known tokens are given, the rest must come out exactly: tokens, logprobs, stop ids, finish reasons, indices.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everserve.errors import RequestError
from everserve.tables.outputs import Output
from everserve.tables.requests import RequestSpec
from tests.support import guides
from tests.support.examples import examples
from tests.support.toy import make_engine, run_alone, spec

prompts = st.lists(st.integers(0, 96), min_size=1, max_size=30)
params = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(2, 40),
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "seed": st.integers(0, 5),
        "top_k": st.sampled_from([0, 5]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "guided": st.sampled_from([None, None, *guides.GUIDED]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "stop_ids": st.sampled_from([(), (3, 5, 7), tuple(range(0, 60, 2))]),
        "min_tokens": st.sampled_from([0, 2, 6]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "prompt_logprobs": st.sampled_from([None, 1]),
        "logit_bias": st.sampled_from([{}, {11: 2.0, 12: -50.0}]),
    }
)


def run(engine, *requests: RequestSpec) -> dict[str, list[Output]]:
    """All outputs of these requests together."""
    outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
    for request in requests:
        guides.add(engine, request)
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.id].append(output)
        engine.check()
    return outputs


def resumed(request: RequestSpec, known: list[int]) -> RequestSpec:
    return request.after(known)


def without_delays(outputs: list[Output]) -> list[Output]:
    """What was produced; not how long it took, nor what happened to be in the cache."""
    return [msgspec.structs.replace(output, queued_s=0.0, num_cached=0) for output in outputs]


@examples(15)
@given(prompts, params, st.integers(1, 4), st.data())
def test_siblings_cut_anywhere_continue_exactly(prompt, params, num_choices, data):
    """Each of n siblings is cut at an index of its own; all are resumed on one fresh engine, in other company."""
    siblings = [spec(f"s{i}", prompt, **{**params, "seed": params["seed"] + i}) for i in range(num_choices)]
    engine, _ = make_engine(num_blocks=64)
    whole = run(engine, *siblings)
    cuts = {id: data.draw(st.integers(0, len(outputs) - 1), label=id) for id, outputs in whole.items()}
    fresh, _ = make_engine(
        num_blocks=data.draw(st.sampled_from([16, 64])), max_num_batched_tokens=data.draw(st.sampled_from([3, 16]))
    )
    requests = [resumed(s, [output.token for output in whole[s.id][: cuts[s.id]]]) for s in siblings]
    company = spec("company", prompt[: len(prompt) // 2 + 1], max_tokens=9)
    rest = run(fresh, company, *requests)
    for id, outputs in whole.items():
        assert without_delays(rest[id]) == without_delays(outputs[cuts[id] :])
    assert fresh.scheduler.pool.num_used == 0


@examples(8)
@given(prompts, params, st.data())
def test_a_stream_cut_many_times_continues_exactly(prompt, params, data):
    """Every worker that gets it dies after some tokens."""
    request = spec("a", prompt, **params)
    whole = run(make_engine(num_blocks=64)[0], request)["a"]
    produced: list[Output] = []
    while not produced or produced[-1].finish_reason is None:
        engine, _ = make_engine(num_blocks=64)
        guides.add(engine, resumed(request, [output.token for output in produced]))
        lives = data.draw(st.integers(1, 12), label="steps until its worker dies")
        for _ in range(lives):
            if engine.has_work:
                produced += engine.step().outputs
    assert without_delays(produced) == without_delays(whole)


def test_preempted_streams_that_were_resumed():
    engine, _ = make_engine(num_blocks=16)
    specs = [spec(f"r{i}", [i, i + 1, i + 2], max_tokens=40, seed=i, frequency_penalty=0.5) for i in range(5)]
    whole = {request.id: run_alone(request) for request in specs}
    outputs = run(engine, *(resumed(request, whole[request.id][:7]) for request in specs))
    assert engine.stats().num_preemptions > 0, "the pool was meant to be too small"
    for id, tokens in whole.items():
        assert [output.token for output in outputs[id]] == tokens[7:]
        assert [output.index for output in outputs[id]] == list(range(7, 40))


def test_what_is_computed_again_is_counted():
    engine, _ = make_engine(num_blocks=64)
    request = spec("a", list(range(10)), max_tokens=20)
    tokens = run_alone(request)
    run(engine, msgspec.structs.replace(request, id="fresh"))
    assert engine.stats().num_known_tokens == 0
    other, _ = make_engine(num_blocks=64)
    run(other, resumed(request, tokens[:9]))
    assert other.stats().num_known_tokens == 10 + 9 - 1, "the last one may be new"
    assert other.stats().num_generated_tokens == 11


def test_known_tokens_are_found_in_the_prefix_cache():
    engine, _ = make_engine(num_blocks=64)
    request = spec("a", list(range(10)), max_tokens=20)
    tokens = run_alone(request)
    run(engine, resumed(request, tokens[:9]))
    assert engine.stats().prefix_cache_hits == 0
    again = run(engine, resumed(request, tokens[:9]))["a"]
    assert [output.token for output in again] == tokens[9:]
    assert engine.stats().prefix_cache_hits == 16, "four full blocks of prompt and known tokens"
    assert engine.stats().num_known_tokens == 18 + 2


def test_prompt_logprobs_come_once():
    """They were delivered with token 0: a resumed stream neither sends nor computes them."""
    request = spec("a", list(range(10)), max_tokens=6, prompt_logprobs=1, logprobs=1)
    whole = run(make_engine(num_blocks=64)[0], request)["a"]
    assert whole[0].prompt_logprobs is not None
    rest = run(make_engine(num_blocks=64)[0], resumed(request, [whole[0].token]))["a"]
    assert all(output.prompt_logprobs is None for output in rest)
    assert [output.logprobs for output in rest] == [output.logprobs for output in whole[1:]]


@pytest.mark.parametrize(
    ("known", "params", "words"),
    [
        ([1, 2], {"max_tokens": 2}, "of at most 2"),
        ([1], {"max_tokens": 0, "prompt_logprobs": 0}, "of at most 0"),
        ([1, 5, 2], {"stop_ids": (5,)}, "a stop id"),
        ([1, 97], {}, "between 0 and 96"),
        ([-1], {}, "between 0 and 96"),
        ([1] * 61, {"max_tokens": 100}, "prompt and known output have 64 tokens"),
    ],
)
def test_streams_that_cannot_have_come_so_far_are_refused(known, params, words):
    engine, _ = make_engine()
    with pytest.raises(RequestError, match=words):
        engine.add(resumed(spec("a", [1, 2, 3], **params), known))
    assert not engine.has_work


def test_streams_that_could_outgrow_the_pool_are_refused():
    engine, _ = make_engine(num_blocks=4)
    with pytest.raises(RequestError, match="holds 16"):
        engine.add(spec("a", [1, 2, 3], max_tokens=14))
    assert len(run(engine, spec("a", [1, 2, 3], max_tokens=13))["a"]) == 13
