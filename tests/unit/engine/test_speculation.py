"""Drafts: streams are the same with them, whatever they are; and they are there when they pay."""

import random

import msgspec
import pytest
import torch

from everserve.config.speculation import Speculation
from everserve.engine.engine import Engine
from everserve.engine.foresight import Foresight
from everserve.engine.forward import EagerForward
from everserve.engine.ngrams import continuation
from everserve.engine.speculation import RowCosts, Speculator
from everserve.model.batch import StepBatch
from everserve.plan.drafts import least_chance, shares
from everserve.seam.experts import Experts
from everserve.tables.outputs import Output
from everserve.tables.requests import RequestSpec, as_tokens
from tests.support import guides
from tests.support.toy import Clairvoyant, ToyModel, make_config, make_engine, spec


class Certain(Clairvoyant):
    """Always the same drafts."""

    def __init__(self, drafts: tuple[int, ...]) -> None:
        super().__init__(random.Random(0))
        self._always = drafts

    def drafts(self, sequences):
        return [self._always for _ in sequences]


GIVEN = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3, "top_k": 5},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    {"temperature": 1.0, "guided": guides.LISTS, "logprobs": 2},
    {"temperature": 0.0, "guided": guides.THOUGHTS},
    {"temperature": 1.0, "bad_words": ((4,), (9, 8)), "logit_bias": {11: 3.0, 12: -9.0}, "logprobs": 0},
    {"temperature": 1.0, "stop_ids": tuple(range(0, 97, 7)), "min_tokens": 4},
)


def outputs_of(engine: Engine, requests: list[RequestSpec]) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
    for request in requests:
        guides.add(engine, request)
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.id].append(msgspec.structs.replace(output, queued_s=0.0))
        engine.check()
    return outputs


@pytest.mark.parametrize("visible_keys", [None, 5])
def test_outputs_are_the_same_with_drafts(visible_keys):
    requests = [spec(f"r{i}", [5 * i + j for j in range(9)], max_tokens=24, **told) for i, told in enumerate(GIVEN)]
    roomy = {"num_blocks": 96, "visible_keys": visible_keys, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    drafting = Clairvoyant(random.Random(1), visible_keys)
    with_drafts, _ = make_engine(**roomy, drafting=drafting)
    without, _ = make_engine(**roomy)
    assert outputs_of(with_drafts, requests) == outputs_of(without, requests)
    assert drafting.num_accepted > 20 and drafting.num_rejected > 20
    stats = with_drafts.stats()
    assert stats.num_accepted_tokens == drafting.num_accepted
    assert stats.num_draft_tokens == drafting.num_accepted + drafting.num_rejected
    assert 0 < stats.num_drafts < stats.num_draft_tokens
    assert stats.num_steps < without.stats().num_steps


def test_a_stream_that_cannot_go_on_has_the_tokens_before():
    """It is the third token that has no successor; the drafts reach that far."""
    tokens = [5, 6, 7]
    banned = tuple((tokens[-1], other) for other in range(97))
    bias = {token: 99.0 - 9 * i for i, token in enumerate(tokens)}
    words = {"bad_words": (*banned, *((5, 5), (6, 5), (6, 6))), "logit_bias": bias, "temperature": 0.0}
    told = {}
    for drafts in (False, True):
        engine, _ = make_engine(drafting=Certain(tuple(tokens[1:])) if drafts else None)
        engine.add(spec("r", [1, 2, 3], **words))
        outputs, failed, num_steps = [], [], 0
        while engine.has_work:
            result = engine.step()
            outputs += [(output.index, output.token) for output in result.outputs]
            failed += result.failed
            num_steps += 1
            engine.check()
        assert [token for _, token in outputs] == tokens and failed[0].is_dead_end
        told[drafts] = outputs, failed, num_steps
    assert told[True][:2] == told[False][:2] and told[True][2] < told[False][2]


def test_what_repeats_itself_takes_fewer_steps():
    """A step takes 3 ms and one more for each row."""
    now_s = [0.0]

    def make_forward(model: ToyModel) -> EagerForward:
        def compute(batch: StepBatch, experts: Experts) -> torch.Tensor:
            now_s[0] += 1e-3 * (3 + batch.num_tokens)
            return model(batch)

        return EagerForward(compute, torch.device("cpu"))

    request = spec("r", [1, 2, 3], max_tokens=50, temperature=0.0, logit_bias={7: 99.0})
    drafting = Speculator(*make_config(speculation=Speculation(num_speculative_tokens=6)), free_rows=3.0)
    engine, _ = make_engine(clock=lambda: now_s[0], drafting=drafting, make_forward=make_forward)
    assert [output.token for output in outputs_of(engine, [request])["r"]] == [7] * 50
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 25 and stats.num_steps < 25


def test_a_continuation_is_that_of_the_longest_and_latest_place():
    def after(*tokens: int, num: int = 3, shortest: int = 2, longest: int = 3) -> tuple[int, ...]:
        return continuation(as_tokens(tokens), num, shortest, longest)

    assert after(1, 2, 3, 4, 5, 1, 2) == (3, 4, 5)
    assert after(9, 1, 2, 3, 4, 8, 1, 2, 7, 7, 9, 1, 2) == (3, 4, 8), "the longest"
    assert after(1, 2, 3, 4, 1, 2, 5, 6, 1, 2) == (5, 6, 1), "the latest of those"
    assert after(4, 4, 4, 4, num=6) == (4,) * 6, "it comes round again"
    assert after(1, 2, 1, 2, num=5) == (1, 2, 1, 2, 1)
    assert after(1, 2, 3, 4, 2) == () and after(1, 2, 3, 4, 2, shortest=1) == (3, 4, 2)
    assert after(1) == () and after(1, 1) == ()


def test_drafts_go_where_they_pay():
    assert shares([0.99], [8], 3.0, 100) == [8]
    assert shares([0.1], [8], 1.0, 100) == [0], "a row that is often wrong"
    assert shares([0.9] * 64, [8] * 64, 3.0, 100) == [0] * 64, "rows cost as much as they give"
    assert sum(shares([0.9] * 64, [8] * 64, 1000.0, 100)) == 100, "rows are nearly free"
    assert shares([0.95, 0.3], [4, 4], 20.0, 100)[0] == 4
    assert sum(shares([0.99, 0.0], [8, 8], 6.0, 100)) == 2, "a stream without drafts waits a quarter longer at most"
    for num_streams in (1, 5, 64):
        least = least_chance(num_streams, 7.0)
        assert not any(shares([least * 0.999] * num_streams, [4] * num_streams, 7.0, 100))
        assert least >= 1 or any(shares([min(1.0, least * 1.01)] * num_streams, [4] * num_streams, 7.0, 100))


def test_what_rows_cost_is_measured():
    """A step takes 10 ms with one row, and a row 2 ms: it has four others before it."""
    costs = RowCosts(first_guess=3.0)
    assert costs.fixed_rows(1) is None
    for _ in range(3):
        costs.note(1, 0, 0.010)
    assert costs.fixed_rows(1) == pytest.approx(3.0), "a guess"
    costs.note(1, 1, 1.0)
    assert costs.fixed_rows(1) == pytest.approx(3.0), "one step that was held up says nothing"
    for _ in range(31):
        costs.note(1, 8, 0.026)
    assert costs.fixed_rows(64) is None
    for _ in range(3):
        costs.note(64, 0, 0.150)
    assert costs.fixed_rows(1) == pytest.approx(4.0)
    assert costs.fixed_rows(64) == pytest.approx(3.0), "rows may cost something else beside others"
    for _ in range(32):
        costs.note(1, 8, 0.026)
    assert costs.fixed_rows(1) is None, "it is time for a step without drafts"
    costs.note(1, 0, 0.010)
    assert costs.fixed_rows(1) is not None
    for _ in range(512):
        costs.note(64, 0, 0.150)
    assert costs.fixed_rows(1) == pytest.approx(3.0), "what is old is forgotten"


def test_guesses_say_when_drafts_would_fit():
    foresight, tokens = Foresight(), as_tokens([1, 2, 3])
    for _ in range(20):
        foresight.guess((7, 8), len(tokens))
        foresight.look_back(tokens)
        tokens.extend([9, 9])
        foresight.look_back(tokens)
    assert foresight.chance < 0.15
    for _ in range(20):
        foresight.guess((7, 8), len(tokens))
        tokens.extend([7, 8])
        foresight.look_back(tokens)
    assert foresight.chance > 0.8
    searches = 0
    for _ in range(100):
        if foresight.should_search():
            searches += 1
            foresight.note_search(has_found=False)
    assert 10 <= searches <= 20, "ever more rarely"
