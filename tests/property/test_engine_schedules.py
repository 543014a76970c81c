"""Random schedules against the engine: arrivals, cancellations, abandoned steps, too few blocks.

Whatever happens, every stream equals the one it would be alone, and the tables stay sound after every step.
"""

from hypothesis import given
from hypothesis import strategies as st

from everserve.tables.requests import Flow
from tests.property.engine_streams import EngineStreams
from tests.support import guides
from tests.support.examples import examples
from tests.support.toy import Clairvoyant, make_engine

prompts = st.one_of(
    st.lists(st.integers(0, 96), min_size=1, max_size=40),
    st.integers(1, 40).map(lambda n: list(range(n))),  # shared prefixes of many lengths
)
params = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 20),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 5),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "stop_ids": st.sampled_from([(), (3, 5, 7)]),
        "guided": st.sampled_from([None, None, *guides.GUIDED]),
        "bad_words": st.sampled_from([(), ((4,), (9, 8))]),
        "cache_salt": st.sampled_from([b"", b"", b"a salt"]),
    }
)
flows = st.builds(Flow, st.sampled_from(["a", "b"]), st.integers(0, 3), st.just(1.0))
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, params, flows),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abandon")),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
    ),
    min_size=1,
    max_size=30,
)


@examples(38)
@given(
    events,
    st.sampled_from([16, 18, 24]),
    st.sampled_from([3, 16]),
    st.booleans(),
    st.sampled_from([None, 1, 9]),
    st.one_of(st.none(), st.randoms(use_true_random=False)),
)
def test_every_stream_is_what_it_would_be_alone(events, num_blocks, budget, prefix_caching, visible_keys, rng):
    engine, model = make_engine(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_prefill_while_decoding=max(1, budget // 2),
        enable_prefix_caching=prefix_caching,
        visible_keys=visible_keys,
        drafting=Clairvoyant(rng, visible_keys) if rng is not None else None,
    )
    streams = EngineStreams(engine, model)
    for event in events:
        if event[0] == "add":
            streams.add(*event[1:])
        elif event[0] == "step":
            for _ in range(event[1]):
                streams.step()
        elif event[0] == "abandon" and engine.has_work:
            streams.abandon()
        elif event[0] == "cancel":
            streams.cancel(event[1])
    streams.finish()
