"""The engine's doors, on the toy model: limits, cancellation, preemption, prefix sharing, prompt logprobs."""

import pytest
import torch

from everserve.engine.forward import EagerForward
from everserve.errors import RequestError
from tests.support.toy import VOCAB, StepAbandoned, logits_after, make_engine, run_alone, spec


def drain(engine) -> dict[str, list]:
    outputs: dict[str, list] = {}
    for _ in range(1000):
        if not engine.has_work:
            break
        for output in engine.step().outputs:
            outputs.setdefault(output.id, []).append(output)
        engine.check()
    assert not engine.has_work
    return outputs


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "no tokens"), (list(range(64)), "at most 63"), ([97], "between 0 and 96"), ([-1], "between 0 and 96")],
)
def test_impossible_requests_are_refused(prompt, words):
    engine, _ = make_engine()
    with pytest.raises(RequestError, match=words):
        engine.add(spec("a", prompt))
    assert not engine.has_work


def test_an_id_runs_once():
    engine, _ = make_engine()
    engine.add(spec("a", [1]))
    with pytest.raises(RequestError, match="already"):
        engine.add(spec("a", [1]))
    drain(engine)
    engine.add(spec("a", [1]))  # ended: free again
    drain(engine)


def test_finish_reasons():
    engine, _ = make_engine()
    stream = run_alone(spec("x", [1, 2], max_tokens=6, temperature=0.0))
    engine.add(spec("length", [1, 2], max_tokens=6, temperature=0.0))
    engine.add(spec("stop", [1, 2], max_tokens=6, temperature=0.0, stop_ids=(stream[2],)))
    engine.add(spec("model", list(range(60)), max_tokens=50))
    outputs = drain(engine)
    assert [o.token for o in outputs["length"]] == stream
    assert outputs["length"][-1].finish_reason == "length"
    stop_at = stream.index(stream[2])
    assert [o.token for o in outputs["stop"]] == stream[: stop_at + 1]
    assert (outputs["stop"][-1].finish_reason, outputs["stop"][-1].stop_id) == ("stop", stream[2])
    assert len(outputs["model"]) == 4, "prompt and output together are at most max_model_len"


def test_cancel_at_any_time_gives_everything_back():
    engine, _ = make_engine()
    for steps in range(6):
        engine.add(spec("a", list(range(30)), max_tokens=30))
        for _ in range(steps):
            engine.step()
        assert engine.cancel("a")
        assert not engine.cancel("a")
        engine.check()
        assert engine.scheduler.pool.num_used == 0


def test_cancel_all():
    engine, _ = make_engine(max_num_seqs=2)
    for i in range(4):
        engine.add(spec(f"r{i}", list(range(10)), max_tokens=9))
    engine.step()
    engine.cancel_all()
    engine.check()
    assert not engine.has_work and engine.scheduler.pool.num_used == 0


def test_preempted_streams_continue_as_if_nothing_had_happened():
    engine, _ = make_engine(num_blocks=16)
    specs = [spec(f"r{i}", [i, i + 1, i + 2], max_tokens=40, seed=i) for i in range(5)]
    for request in specs:
        engine.add(request)
    outputs = drain(engine)
    assert engine.stats().num_preemptions > 0, "the pool was meant to be too small"
    for request in specs:
        assert [o.token for o in outputs[request.id]] == run_alone(request)


def test_blocks_in_front_of_all_windows_are_given_back():
    """Three streams of 56 tokens in 64 slots, each of which keeps its window and a block more."""
    engine, _ = make_engine(num_blocks=16, visible_keys=6, enable_prefix_caching=False)
    specs = [spec(f"s{i}", [i, 2, 3], max_tokens=53, temperature=1.0, seed=i) for i in range(3)]
    for request in specs:
        engine.add(request)
    most, outputs = 0, {request.id: [] for request in specs}
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.id].append(output.token)
        most = max(most, engine.scheduler.pool.num_used)
        engine.check()
    assert most <= 3 * 4 and engine.scheduler.num_preemptions == 0
    assert outputs == {request.id: run_alone(request, visible_keys=6) for request in specs}


def test_siblings_compute_their_common_prompt_once():
    engine, _ = make_engine(num_blocks=64)
    for i in range(4):
        engine.add(spec(f"r{i}", list(range(33)), max_tokens=4, seed=i))
    outputs = drain(engine)
    assert engine.stats().num_prompt_tokens == 33 + 3 * 1, "32 of 33 tokens are in full blocks"
    assert sorted(o[0].num_cached for o in outputs.values()) == [0, 32, 32, 32]


def test_decoding_streams_advance_while_a_long_prompt_is_computed():
    engine, _ = make_engine(num_blocks=64, max_num_batched_tokens=8)
    engine.add(spec("short", [1], max_tokens=20))
    engine.step()
    engine.add(spec("long", list(range(60)), max_tokens=1))
    ids = [[o.id for o in engine.step().outputs] for _ in range(8)]
    assert all("short" in step for step in ids), "chunked prefill shares the budget, it does not take it"


def test_prompts_get_little_while_others_decode_and_much_when_nobody_does():
    engine, _ = make_engine(num_blocks=64, max_num_batched_tokens=32, max_prefill_while_decoding=4)
    engine.add(spec("long", list(range(60)), max_tokens=1))
    engine.step()
    assert engine.stats().num_prompt_tokens == 32
    engine.add(spec("short", [1], max_tokens=3))
    engine.cancel("long")
    engine.step()
    engine.add(spec("longer", list(range(60, 0, -1)), max_tokens=1))
    before = engine.stats().num_prompt_tokens
    engine.step()
    assert engine.stats().num_prompt_tokens == before + 4, "a stream decodes in this step"
    engine.step()
    engine.step()
    assert engine.stats().num_prompt_tokens == before + 4 + 4 + 32, "nobody decodes any more"


def abandon(engine, model):
    model.fail_next = True
    with pytest.raises(StepAbandoned):
        engine.step()
    engine.check()


def test_an_abandoned_step_that_had_taken_blocks_of_another_stream():
    """The forward pass has written into them before it failed: the other stream must not be continued on them."""
    engine, model = make_engine(num_blocks=6, block_size=4, max_model_len=24, enable_prefix_caching=False)
    specs = [spec("old", list(range(7)), max_tokens=12), spec("new", list(range(50, 57)), max_tokens=12)]
    for request in specs:
        engine.add(request)
    outputs = {request.id: [] for request in specs}
    abandoned_preemption = False
    while engine.has_work:
        before = engine.stats().num_preemptions
        if not abandoned_preemption:
            abandon(engine, model)
            abandoned_preemption = engine.stats().num_preemptions > before
        for output in engine.step().outputs:
            outputs[output.id].append(output.token)
    assert abandoned_preemption, "no step with a preemption was abandoned"
    assert outputs == {request.id: run_alone(request) for request in specs}


def test_an_abandoned_step_that_had_taken_blocks_of_a_cached_prefix():
    engine, model = make_engine(num_blocks=6, block_size=4, max_model_len=24)
    first = spec("first", list(range(16)), max_tokens=1)
    engine.add(first)
    drain(engine)
    assert len(engine.scheduler.pool.block_of) == 4
    engine.add(spec("other", list(range(60, 75)), max_tokens=1))  # needs four of the six blocks
    abandon(engine, model)
    engine.cancel("other")
    again = spec("again", [*range(16), 1], max_tokens=4)
    engine.add(again)
    assert [output.token for output in drain(engine)["again"]] == run_alone(again)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("budget", [5, 64])
def test_prompt_logprobs(budget, max_tokens):
    engine, _ = make_engine(num_blocks=64, max_num_batched_tokens=budget)
    prompt = [5, 9, 2, 44, 3, 3, 17, 8, 60]
    for id in ("first", "again"):  # the second must not be spoilt by the prefix cache
        engine.add(spec(id, prompt, max_tokens=max_tokens, prompt_logprobs=2, temperature=0.0))
        outputs = drain(engine)[id]
        found = outputs[0].prompt_logprobs
        assert found[0] is None and len(found) == len(prompt)
        for i in range(1, len(prompt)):
            expected = torch.log_softmax(logits_after(prompt[:i]), -1)
            assert found[i].logprob == pytest.approx(expected[prompt[i]].item(), abs=1e-5)
            assert list(found[i].top_ids) == expected.topk(2).indices.tolist()
        assert [o.token for o in outputs if o.token is not None] == run_alone(
            spec("x", prompt, max_tokens=max_tokens, temperature=0.0)
        )
        assert all(o.prompt_logprobs is None for o in outputs[1:])


def test_a_step_has_no_more_logits_of_prompts_than_one_chunk():
    most = 5
    engine, _ = make_engine(num_blocks=64, max_num_batched_tokens=64, max_logits_bytes=most * 4 * VOCAB)
    schedule, wanted = engine.scheduler.schedule, []

    def noting():
        chunks = schedule()
        wanted.append(sum(chunk.num_tokens for chunk in chunks if chunk.sequence.wants_prompt_logprobs))
        return chunks

    engine.scheduler.schedule = noting
    specs = [spec(f"s{i}", [*range(i, i + 9)], max_tokens=3, prompt_logprobs=1 if i < 3 else None) for i in range(4)]
    for one in specs:
        engine.add(one)
    outputs = drain(engine)
    assert max(wanted) == most and sum(wanted) == 3 * 9
    for one in specs:
        assert [output.token for output in outputs[one.id]] == run_alone(one)
    assert [len(outputs[f"s{i}"][0].prompt_logprobs) for i in range(3)] == [9, 9, 9]


def test_how_long_a_stream_waited():
    engine, _ = make_engine(max_num_seqs=1)
    now = 100.0
    engine._clock = lambda: now
    engine.add(spec("first", [1], max_tokens=3))
    engine.add(spec("second", [2], max_tokens=1))
    waited = {}
    while engine.has_work:
        now += 1.0
        waited |= {o.id: o.queued_s for o in engine.step().outputs if o.index == 0}
    assert waited == {"first": 1.0, "second": 4.0}


def test_a_broken_model_fails_its_streams_and_nobody_hangs():
    engine, _ = make_engine()
    engine._forward = EagerForward(
        lambda batch, experts: torch.full((len(batch.logits_rows_L), VOCAB), torch.nan), torch.device("cpu")
    )
    engine.add(spec("a", [1, 2, 3]))
    result = engine.step()
    assert [id for id, *_ in result.failed] == ["a"] and result.outputs == []
    assert not engine.has_work
    engine.check()


def test_times_of_steps_are_counted_with_their_work_unless_they_are_abandoned():
    engine, model = make_engine()
    begun, ended = [], []
    engine.times.on_begin, engine.times.on_end = (lambda size, now: begun.append(size)), ended.append
    engine.add(spec("a", [1, 2, 3], max_tokens=2))
    abandon(engine, model)
    assert engine.times.take() is None and (len(begun), len(ended)) == (1, 0)
    while engine.has_work:
        engine.step()
    work = engine.times.take()
    assert work is not None and work.seconds > 0
    assert work.units == (2, 3 + 1, 1 + 2 + 3 + 4), "steps, rows, and the keys that they attend to"
    assert begun[1:] == [6, 4] and len(ended) == 2
    assert engine.times.take() is None


def test_what_prompts_say_instead_of_tokens():
    """In chunks, beside streams that decode, with a common prefix in the cache and over an abandoned step: each prompt
    has one output, of its last row."""
    engine, model = make_engine(max_num_seqs=4, max_num_batched_tokens=8, max_prefill_while_decoding=8)
    prompts = {"long": list(range(1, 30)), "again": list(range(1, 30)), "short": [5], "other": [*range(1, 9), 50, 51]}
    engine.add(spec("beside", [3, 4], max_tokens=12))
    for id, prompt in prompts.items():
        engine.add(spec(id, prompt, max_tokens=0, pooled=True))
    abandon(engine, model)
    outputs = drain(engine)
    assert [output.token for output in outputs.pop("beside")] == run_alone(spec("beside", [3, 4], max_tokens=12))
    for id, prompt in prompts.items():
        (output,) = outputs[id]
        assert output.token is None and output.finish_reason is not None
        assert output.pooled == logits_after(prompt).numpy().tobytes()
    assert outputs["again"][0].num_cached > 0
