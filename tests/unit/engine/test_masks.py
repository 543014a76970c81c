"""Masks in an engine: what is given up and computed again, what is shared, what a log certifies; on the toy model, and
on a real one with experts that are left out."""

import msgspec
import numpy as np
import pytest

from everserve.engine.engine import Engine
from everserve.kvlog.chains import key_of
from everserve.tables.outputs import Output
from everserve.tables.requests import Masked, RequestSpec
from tests.support.toy import LoggedToy, make_config, make_engine, mask, run_alone, spec
from tests.unit.backends.test_batch_invariance import make_engine as make_real_engine
from tests.unit.backends.test_batch_invariance import random_specs

PROMPT = [*range(10)]


def steps(engine: Engine, num: int) -> list[Output]:
    outputs: list[Output] = []
    for _ in range(num):
        outputs += engine.step().outputs
        engine.log_step()
        engine.check()
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [output.token for output in outputs if output.token is not None]


def marks(outputs: list[Output]) -> list[Masked | None]:
    return [output.masked for output in outputs]


def given(request: RequestSpec, known: list[int]) -> list[int]:
    """An exact run that begins with these tokens."""
    return run_alone(request.after(known))


# -- one stream ----------------------------------------------------------------------------------


def test_a_mask_comes_and_goes():
    engine, _ = make_engine()
    request = spec("a", PROMPT, max_tokens=12, temperature=1.0)
    engine.add(request)
    before = steps(engine, 3)
    engine.use_mask(*mask(1))
    under = steps(engine, 4)
    engine.use_mask(0)
    assert engine.stats().num_unmasked_tokens == 4, "back to the block in which the mask began: 12 of 16 are kept"
    after = steps(engine, 20)
    exact = run_alone(request)
    assert tokens(before) == exact[:3] and tokens(under) != exact[3:7]
    assert marks(before) == [None] * 3 and marks(under) == [Masked(12, 1)] * 4 and marks(after) == [None] * 5
    assert tokens(after) == given(request, tokens(before + under)), "given what was delivered, and at its own indices"
    assert engine.stats().num_masked_tokens == 4 and not engine.has_work


def test_a_mask_between_two_steps_leaves_no_trace():
    engine, _ = make_engine()
    request = spec("a", PROMPT)
    engine.add(request)
    outputs = steps(engine, 2)
    engine.use_mask(*mask(1))
    engine.use_mask(0)
    engine.check()
    outputs += steps(engine, 10)
    assert tokens(outputs) == run_alone(request) and marks(outputs) == [None] * 8
    assert engine.stats().num_unmasked_tokens == 0


def test_from_one_mask_to_another_nothing_is_computed_again():
    engine, _ = make_engine()
    request = spec("a", PROMPT, max_tokens=9)
    engine.add(request)
    outputs = steps(engine, 2)
    for mask_id in (1, 2, 5):
        engine.use_mask(*mask(mask_id))
        (output,) = steps(engine, 1)
        assert output.masked == Masked(11, 1), "it began under the first one"
        outputs.append(output)
    assert engine.stats().num_unmasked_tokens == 0
    engine.use_mask(0)
    assert tokens(steps(engine, 10)) == given(request, tokens(outputs))


def test_prompt_logprobs_that_no_client_has_yet_are_made_again():
    engine, _ = make_engine(max_num_batched_tokens=4)
    request = spec("a", PROMPT, max_tokens=1, prompt_logprobs=1)
    engine.add(request)
    steps(engine, 1)
    engine.use_mask(*mask(1))
    steps(engine, 1)
    engine.use_mask(0)
    (output,) = steps(engine, 2)
    alone, _ = make_engine(max_num_batched_tokens=64)
    alone.add(request)
    (expected,) = alone.step().outputs
    assert output.prompt_logprobs == expected.prompt_logprobs and output.token == expected.token


# -- prefix cache --------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then", "num_shared"), [(1, 1, 8), (1, 2, 0), (1, 0, 0), (0, 1, 8), (0, 0, 8)])
def test_blocks_are_shared_under_the_same_mask(first: int, then: int, num_shared: int):
    """Exact ones with all experts."""
    engine, _ = make_engine()
    engine.use_mask(*mask(first))
    engine.add(spec("a", PROMPT, max_tokens=1))
    steps(engine, 1)
    engine.use_mask(*mask(then))
    request = spec("b", PROMPT, max_tokens=3)
    engine.add(request)
    outputs = steps(engine, 3)
    assert engine.stats().prefix_cache_hits == num_shared
    if not then:
        assert tokens(outputs) == run_alone(request)
    elif first == then:
        assert marks(outputs) == [Masked(0, then)] * 3
    else:
        assert marks(outputs) == [Masked(num_shared, then)] * 3


# -- logs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heir_mask", "label", "num_restored", "num_broken"),
    [
        (1, Masked(12, 1), 16, 0),  # under the same mask, and told: all of it
        (2, Masked(12, 1), 16, 0),  # under another one: neither is exact
        (1, None, 12, 4),  # not told: what is exact
        (0, Masked(12, 1), 12, 0),  # told that the rest is of no use
        (0, None, 12, 4),
        (1, Masked(12, 7), 12, 4),  # another mask than that of the log
        (1, Masked(8, 1), 8, 8),  # another position
    ],
)
def test_what_a_log_certifies(heir_mask: int, label: Masked | None, num_restored: int, num_broken: int):
    config = make_config(num_blocks=64)
    old, new = LoggedToy(config, False), LoggedToy(config, False)
    request = spec("a", PROMPT, max_tokens=12)
    old.engine.add(request)
    outputs = steps(old.engine, 3)
    old.engine.use_mask(*mask(1))
    outputs += steps(old.engine, 4)
    new.engine.use_mask(*mask(heir_mask))
    resumed = request.after(tokens(outputs), label)
    new.engine.add(resumed, new.find(old.log, "a"))
    (restored,) = new.engine.step().restored
    assert (restored.num_restored, new.engine.stats().num_broken_tokens) == (num_restored, num_broken)
    new.engine.log_step()
    new.engine.check()
    new.engine.use_mask(0)
    new.engine.check()
    new.close()
    old.close()


def test_a_mask_that_begins_right_behind_what_was_restored_is_in_the_log_of_the_heir():
    """The log has exactly what is exact, and the next token is computed under the mask: its chain begins with the mask,
    although the chain of the restored tokens is known and ends there. Else the heir of the heir takes it for exact."""
    config = make_config(num_blocks=64)
    old, heir, last = (LoggedToy(config, False) for _ in range(3))
    request = spec("a", PROMPT, max_tokens=12, temperature=1.0)
    old.engine.add(request)
    outputs = steps(old.engine, 3)
    left = LoggedToy(config, False, old.photograph())  # it dies before it has committed anything under the mask
    old.engine.use_mask(*mask(1))
    outputs += steps(old.engine, 4)
    heir.engine.use_mask(*mask(1))
    resumed = request.after(tokens(outputs), Masked(12, 1))
    heir.engine.add(resumed, heir.find(left.log, "a"))
    result = heir.engine.step()
    assert [restored.num_restored for restored in result.restored] == [12], "up to where the mask begins"
    heir.engine.log_step()
    outputs += result.outputs + steps(heir.engine, 2)
    record = heir.log.find(key_of("a"))
    assert record is not None and record.num_tokens > 12, "what followed is in the log too"
    last.engine.add(request.after(tokens(outputs)), last.find(heir.log, "a"))
    result = last.engine.step()
    assert [restored.num_restored for restored in result.restored] == [12], "what was computed under the mask is not"
    assert tokens(result.outputs + steps(last.engine, 10)) == given(request, tokens(outputs))
    for toy in (old, left, heir, last):
        toy.close()


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_lift_does_not_cost_the_log_what_is_exact(is_in_place: bool):
    """A worker that dies right after a mask was lifted: the record says what is left, before anything is computed."""
    config = make_config(num_blocks=64)
    old = LoggedToy(config, is_in_place)
    request = spec("a", PROMPT, max_tokens=12)
    old.engine.add(request)
    outputs = steps(old.engine, 3)
    old.engine.use_mask(*mask(1))
    outputs += steps(old.engine, 4)
    old.engine.use_mask(0)
    memory = old.photograph()
    left = LoggedToy(config, is_in_place, memory)
    new = left if is_in_place else LoggedToy(config, False)
    new.engine.add(request.after(tokens(outputs)), new.find(left.log, "a"))
    (restored,) = new.engine.step().restored
    assert restored.num_restored == 12
    for toy in {id(toy): toy for toy in (old, left, new)}.values():
        toy.close()


# -- a real model --------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", ["native", "reference"])
def test_experts_are_left_out_of_a_real_model(ops: str, monkeypatch: pytest.MonkeyPatch):
    """Streams that begin exactly, go on under a mask, and are exact again, bit for bit, logprobs included."""
    engine = make_real_engine("qwen3-moe", ops, monkeypatch)
    masked_LN = np.zeros((2, 8), np.uint8)
    masked_LN[0, [1, 4]] = masked_LN[1, :6] = 1  # the second layer has fewer left than a token wants
    requests = [
        msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, max_tokens=14))
        for request in random_specs(3, 160, seed=4)
    ]
    for request in requests:
        engine.add(request)
    outputs = steps(engine, 9)
    engine.use_mask(1, masked_LN.tobytes())
    outputs += steps(engine, 4)
    engine.use_mask(0)
    while engine.has_work:
        outputs += steps(engine, 1)
    exact = make_real_engine("qwen3-moe", ops, monkeypatch)
    for request in requests:
        found = [output for output in outputs if output.id == request.id]
        masked = [i for i, output in enumerate(found) if output.masked is not None]
        for start, end in ((0, masked[0]), (masked[-1] + 1, len(found))):
            exact.add(request.after(tokens(found[:start])))
            expected: list[Output] = []
            while len(expected) < end - start:
                expected += exact.step().outputs
            assert end > start
            assert [(o.token, o.logprobs) for o in found[start:end]] == [(o.token, o.logprobs) for o in expected]
            exact.cancel(request.id)
        again = _masked_scores(exact, request, masked_LN)
        exact.use_mask(0)
        assert again != _masked_scores(exact, request, np.zeros_like(masked_LN)), "the mask makes a difference"


def _masked_scores(engine: Engine, request: RequestSpec, masked_LN: np.ndarray) -> list:
    engine.use_mask(9, masked_LN.tobytes())
    engine.add(request)
    found = [output.logprobs for _ in range(5) for output in engine.step().outputs]
    engine.cancel(request.id)
    engine.use_mask(0)
    return found
