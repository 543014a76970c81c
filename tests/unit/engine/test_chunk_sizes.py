"""How much of prompts goes into a step while others decode: the decision, what it is fed with, the engine's part."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everserve.engine.chunk_sizes import ChunkSizes
from everserve.engine.forward import EagerForward
from everserve.plan.chunks import SMALLEST, affordable
from everserve.plan.prefill import TokenCost
from tests.support.toy import make_engine, run_alone, spec

COST = TokenCost(10_000)
MANY = 1 << 20


def test_between_two_sizes_times_are_on_a_line():
    times = {256.0: 0.011, 1024.0: 0.020}
    assert affordable(times, 0.010, 1.5) == pytest.approx(256 + 768 * (0.01425 - 0.011) / 0.009)


def test_beyond_the_largest_size_it_grows_step_by_step():
    assert affordable({256.0: 0.0101}, 0.010, 1.5) == 512.0, "never more than twice what was measured"
    assert affordable({256.0: 0.0125}, 0.010, 1.5) == pytest.approx(256 * 0.425 / 0.25)
    assert affordable({256.0: 0.009}, 0.010, 1.5) == 512.0, "by chance a step with prompts may be faster"


def test_a_size_that_takes_too_long_is_not_chosen_again():
    assert SMALLEST < affordable({512.0: 0.030}, 0.010, 1.5) == pytest.approx(512 * 4.25 / 20)


def test_where_any_prompt_takes_too_long_small_chunks_gain_nothing():
    """One stream reads a quarter of the experts; 64 rows read all of them, and so do 500."""
    times = {SMALLEST: 0.0110, 512.0: 0.0130, 2048.0: 0.0300}
    assert affordable(times, 0.004, 1.5) > 512.0
    assert affordable({512.0: 0.0130}, 0.004, 1.5) < 200, "what the smallest takes has to be measured first"
    assert affordable({}, 0.004, 1.5) == SMALLEST


SECONDS = st.floats(1e-4, 1.0)


@settings(max_examples=60)
@given(
    times=st.dictionaries(st.floats(1.0, 1e4), SECONDS, min_size=1, max_size=6),
    decode_s=SECONDS,
    slowdown=st.floats(1.1, 4.0),
)
def test_what_is_chosen_is_never_known_to_take_too_long(times, decode_s, slowdown):
    size = affordable(times, decode_s, slowdown)
    assert SMALLEST <= size <= max(SMALLEST, 2 * max(times))
    limit = slowdown * max(decode_s, max((s for n, s in times.items() if n <= 1.1 * SMALLEST), default=0.0))
    assert size == SMALLEST or all(s <= limit * (1 + 1e-9) for n, s in times.items() if n <= size * (1 - 1e-9))


class Device:
    """Takes some time for every step: so much with 64 streams or so, for each prompt token more."""

    def __init__(self, decode_s: float = 0.010, token_s: float = 20e-6, base_s: float = 0.0) -> None:
        self.decode_s, self.token_s, self.base_s = decode_s, token_s, base_s

    def run(self, sizes: ChunkSizes, num_decoding: int, num_tokens: int, position: int = 0) -> float:
        cost = COST.of(position, num_tokens) if num_tokens else 0
        seconds = self.decode_s + (self.base_s if num_tokens else 0.0) + self.token_s * cost / COST.constant
        sizes.add(num_decoding, cost, seconds)
        return seconds


def settled(sizes: ChunkSizes, device: Device, num_decoding: int, position: int = 0) -> tuple[int, float]:
    """The size that it comes to, and how long a step with it takes."""
    for _ in range(12):
        device.run(sizes, num_decoding, 0)
    for _ in range(60):
        num_tokens = sizes.limit(num_decoding, position, MANY)
        seconds = device.run(sizes, num_decoding, num_tokens, position)
    return num_tokens, seconds


def test_it_finds_the_size_that_fits():
    num_tokens, seconds = settled(ChunkSizes(1.5, COST), Device(), 64)
    assert 1.38 * 0.010 < seconds <= 1.5 * 0.010 and 180 < num_tokens < 250


def test_a_faster_device_gets_larger_chunks_and_a_slower_one_smaller():
    sizes = ChunkSizes(1.5, COST)
    first = settled(sizes, Device(), 64)[0]
    faster = settled(sizes, Device(token_s=5e-6), 64)[0]
    slower = settled(sizes, Device(token_s=40e-6), 64)
    assert slower[0] < first < faster / 3 and slower[1] <= 1.5 * 0.010


def test_at_the_end_of_a_long_prompt_chunks_are_smaller():
    sizes = ChunkSizes(1.5, COST)
    near = settled(sizes, Device(), 64)[0]
    far, seconds = settled(sizes, Device(), 64, position=30_000)
    assert near / 5 < far < near / 3 and seconds <= 1.5 * 0.010


def test_a_fixed_price_of_any_prompt_is_paid_with_large_chunks():
    num_tokens, seconds = settled(ChunkSizes(1.5, COST), Device(decode_s=0.004, base_s=0.007), 1)
    assert num_tokens > 200 and seconds < 1.5 * 0.0125


def test_one_step_that_was_held_up_changes_nothing():
    sizes = ChunkSizes(1.5, COST)
    before = settled(sizes, Device(), 64)[0]
    sizes.add(64, 0, 3.0)
    sizes.add(64, COST.of(0, before), 3.0)
    assert sizes.limit(64, 0, MANY) == pytest.approx(before, rel=0.05)


def test_before_anything_is_measured_and_without_a_limit():
    sizes = ChunkSizes(1.5, COST)
    assert sizes.limit(3, 0, MANY) == 512 and sizes.limit(3, 0, 100) == 100
    sizes.add(0, COST.of(0, 64), 1.0)  # no stream decoded: no stream waited
    assert sizes.limit(3, 0, MANY) == 512
    unlimited = ChunkSizes(0.0, COST)
    unlimited.add(3, 0, 0.001)
    unlimited.add(3, COST.of(0, 64), 1.0)
    assert unlimited.limit(3, 0, 777) == 777


def test_a_number_of_streams_that_was_not_measured_is_like_the_nearest():
    sizes = ChunkSizes(1.5, COST)
    found = settled(sizes, Device(), 64)[0]
    assert sizes.limit(256, 0, MANY) == sizes.limit(20, 0, MANY) == pytest.approx(found, rel=0.05)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_engine_learns_from_its_steps_and_every_stream_stays_the_same():
    """A step without prompts takes 8 ms here, and every prompt token 20 µs: 180 of them fit into 12 ms, less a bit."""
    clock, chunks = Clock(), []

    def make_forward(model):
        def forward(batch, experts):
            num_prompt = len(batch.tokens_T) - batch.num_seqs
            chunks.extend([num_prompt] if num_prompt else [])
            clock.now += 0.008 + 20e-6 * num_prompt
            return model(batch)

        return EagerForward(forward, torch.device("cpu"))

    room = {"num_blocks": 600, "max_model_len": 2000}
    limits = {"max_num_batched_tokens": 1024, "max_prefill_while_decoding": 1024, "max_prefill_slowdown": 1.5}
    engine, _ = make_engine(**room, **limits, make_forward=make_forward, token_cost=TokenCost(10**6), clock=clock)
    requests = [spec("short", [1, 2, 3], max_tokens=40), spec("long", [j % 97 for j in range(1500)], max_tokens=3)]
    engine.add(requests[0])
    streams: dict[str, list[int]] = {}
    for step in range(60):
        if step == 12:
            engine.add(requests[1])
        for output in engine.step().outputs:
            streams.setdefault(output.id, []).append(output.token)
    assert not engine.has_work
    assert chunks[0] == 2 and chunks[1] > 500 and all(140 < num < 190 for num in chunks[3:-1]), chunks
    for request in requests:
        assert streams[request.id] == run_alone(request, **room)
