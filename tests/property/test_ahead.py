"""Steps that are launched before the one in front has ended, on random schedules: every stream equals the one that it
would be alone, and the tables stay sound, whatever ends, is cancelled or abandoned while two steps are on their way."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.property.engine_streams import EngineStreams
from tests.property.test_engine_schedules import prompts
from tests.support import guides
from tests.support.examples import examples
from tests.support.toy import Clairvoyant, LaggingForward, make_engine

params = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 24),
        "temperature": st.sampled_from([0.0, 0.0, 1.0]),
        "seed": st.integers(0, 5),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.0, 0.5]),  # this one is not launched ahead
        "stop_ids": st.sampled_from([(), (3, 5, 7), tuple(range(0, 97, 9))]),
        "guided": st.sampled_from([None, None, None, guides.LISTS]),  # nor is this one
    }
)
adds = st.tuples(st.just("add"), prompts, params)
steps = st.tuples(st.just("step"), st.integers(1, 6), st.sampled_from([True, True, False]))
others = st.one_of(
    st.tuples(st.just("abandon")), st.tuples(st.just("forget")), st.tuples(st.just("cancel"), st.integers(0, 10))
)
events = st.builds(
    lambda first, then: [*first, *then],
    st.lists(adds, min_size=1, max_size=4),
    st.lists(st.one_of(adds, steps, steps, others), min_size=1, max_size=25),
)


@examples(60)
@given(events, st.sampled_from([16, 18, 24, 40]), st.sampled_from([3, 16]), st.booleans(), st.integers(0, 99))
def test_every_stream_is_what_it_would_be_alone(events, num_blocks, budget, prefix_caching, seed):
    rng = random.Random(seed)
    made: list[LaggingForward] = []

    def make_forward(model):
        made.append(LaggingForward(model, lambda: laziness[1] or rng.random() < laziness[0]))
        return made[0]

    laziness = [rng.random(), False]  # how often the device computes late; whether it does so now for sure
    visible_keys = rng.choice([None, 9])
    engine, model = make_engine(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_prefill_while_decoding=max(1, budget // 2),
        enable_prefix_caching=prefix_caching,
        visible_keys=visible_keys,
        make_forward=make_forward,
        drafting=Clairvoyant(rng, visible_keys) if rng.random() < 0.5 else None,
    )
    (forward,) = made
    streams = EngineStreams(engine, model)
    for event in events:
        if event[0] == "add":
            streams.add(*event[1:])
        elif event[0] == "step":
            for _ in range(event[1]):
                forward.due_s, forward.is_running = rng.choice([0.0, 1e9]), rng.random() < 0.8
                streams.step(event[2], rng.choice([None, lambda: rng.random() < 0.8]))
        elif event[0] == "abandon" and engine.has_work:
            engine.forget_ahead()  # it may have been computed: the fault would hit the step behind it
            laziness[1] = True
            if engine.has_work and rng.random() < 0.7:
                streams.step()
            if engine.has_work:
                streams.abandon()
            laziness[1] = False
        elif event[0] == "forget":
            engine.forget_ahead()
            engine.check()
        elif event[0] == "cancel":
            streams.cancel(event[1])
    streams.finish()
