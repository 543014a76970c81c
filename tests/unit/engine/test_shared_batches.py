"""A batch is shared by request and key: a newcomer is not held up by requests with many choices, and all streams stay
what they would be alone."""

from collections import Counter

import pytest

from everserve.errors import StepAbandoned
from everserve.tables.requests import Flow
from tests.support.toy import make_engine, run_alone, spec

MANY, SMALL, OTHER = Flow("", 1), Flow("", 2), Flow("", 3)


class Streams:
    """An engine, and the tokens of its streams."""

    def __init__(self, **config: object) -> None:
        self.engine, self.model = make_engine(**{"num_blocks": 200, "max_num_seqs": 6, **config})
        self.tokens: dict[str, list[int]] = {}
        self.specs = {}

    def add(self, flow: Flow, num: int = 1, max_tokens: int = 30, length: int = 9, **params: object) -> None:
        for _ in range(num):
            prompt = [(7 * len(self.specs) + i) % 97 for i in range(length)]
            request = spec(f"r{len(self.specs)}", prompt, max_tokens=max_tokens, flow=flow, **params)
            self.specs[request.id] = request
            self.engine.add(request)

    def step(self, num: int = 1) -> None:
        for _ in range(num):
            for output in self.engine.step().outputs:
                self.tokens.setdefault(output.id, []).append(output.token)
            self.engine.check()

    def running(self) -> Counter[Flow]:
        return Counter(sequence.flow for sequence in self.engine.scheduler.running)

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()
        for id, request in self.specs.items():
            assert self.tokens[id] == run_alone(request)


def test_a_newcomer_gets_a_place_of_a_request_with_many_choices() -> None:
    streams = Streams()
    streams.add(MANY, num=10)
    streams.step(4)
    assert streams.running() == {MANY: 6}
    streams.add(SMALL, max_tokens=2)
    streams.step()
    assert streams.running()[SMALL] == 1 and "r10" in streams.tokens, "its first token comes in the next step"
    assert streams.engine.stats().num_taken_back == 1
    streams.step(2)
    assert streams.running() == {MANY: 6}, "the place goes back"
    streams.finish()
    assert streams.engine.stats().num_known_tokens == 0


def test_its_later_choices_wait_for_places_that_become_free() -> None:
    """Nothing more is taken back for a request that has a place; but of free places it gets the next."""
    streams = Streams()
    streams.add(MANY, num=10, max_tokens=12)
    streams.step(4)
    streams.add(SMALL, num=5, max_tokens=40)
    streams.step(3)
    assert streams.running() == {MANY: 5, SMALL: 1}
    while streams.running()[MANY] == 5:
        streams.step()
    while len(streams.engine.scheduler.running) < 6:
        streams.step()
    assert streams.running() == {MANY: 3, SMALL: 3}, "of those that are free it gets the next, until it has as many"
    streams.finish()


def test_as_many_requests_as_places_wait_for_each_other() -> None:
    streams = Streams(max_num_seqs=3)
    for number in range(5):
        streams.add(Flow("", number), max_tokens=10)
    streams.step(5)
    assert streams.running() == {Flow("", 0): 1, Flow("", 1): 1, Flow("", 2): 1}
    assert streams.engine.stats().num_preemptions == 0
    streams.finish()


def test_keys_share_by_weight() -> None:
    streams = Streams(max_num_seqs=8)
    for number in range(12):
        streams.add(Flow("light", number), max_tokens=40)
    streams.step(8)
    for number in range(12):
        streams.add(Flow("heavy", number, 3.0), max_tokens=40)
    streams.step(8)
    keys = Counter(flow.key for flow in streams.running().elements())
    assert keys == {"light": 2, "heavy": 6}
    streams.finish()


def test_blocks_are_taken_back_too() -> None:
    """There is a place, but no block."""
    streams = Streams(num_blocks=18, max_num_seqs=8)
    streams.add(MANY, num=4, max_tokens=12)
    streams.step(8)
    assert streams.engine.scheduler.pool.num_free < 5 and streams.running()[MANY] == 4
    streams.add(SMALL, length=20, max_tokens=2)
    streams.step(3)
    assert "r4" in streams.tokens and streams.engine.stats().num_taken_back
    streams.finish()


def test_prompt_scores_of_many_choices_do_not_hold_up_a_prompt() -> None:
    """Such prompts are computed once for each choice. Behind the one that is being computed, the newcomer is next."""
    streams = Streams(max_prefill_while_decoding=4, max_num_batched_tokens=8)
    streams.add(MANY, num=6, length=40, max_tokens=2, prompt_logprobs=1)
    streams.step(2)
    streams.add(SMALL, length=5, max_tokens=3)
    for _ in range(40 // 4 + 2):
        streams.step()
    assert "r6" in streams.tokens and "r2" not in streams.tokens
    streams.finish()


@pytest.mark.parametrize("num_blocks", [200, 30])
def test_a_place_that_was_taken_back_in_an_abandoned_step(num_blocks: int) -> None:
    streams = Streams(num_blocks=num_blocks, max_num_seqs=4)
    streams.add(MANY, num=6, max_tokens=12)
    streams.step(4)
    streams.add(SMALL, max_tokens=4)
    streams.model.fail_next = True
    with pytest.raises(StepAbandoned):
        streams.step()
    streams.engine.check()
    streams.step(2)
    assert streams.running()[SMALL] == 1
    streams.finish()


def test_an_urgent_request_takes_the_place_of_another_one_of_its_key() -> None:
    """Of its own key only, and nothing takes its place."""
    streams = Streams(max_num_seqs=4)
    for number in range(3):
        streams.add(Flow("a", number, priority=number), max_tokens=20)
    streams.add(Flow("b", 3, priority=9), max_tokens=20)
    streams.step(4)
    urgent, late = Flow("a", 4, priority=-1), Flow("a", 5, priority=2)
    streams.add(late, max_tokens=4)
    streams.add(urgent, max_tokens=4)
    streams.step()
    assert streams.running() == {Flow("a", 0): 1, Flow("a", 1, 1.0, 1): 1, Flow("b", 3, 1.0, 9): 1, urgent: 1}
    assert "r5" in streams.tokens, "its first token comes in the next step"
    streams.finish()
    assert list(streams.tokens)[-1] == "r4", "equal priorities do not take places from each other"
