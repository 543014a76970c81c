"""Random schedules against the engine: arrivals, cancellations, abandoned steps, too few blocks.

Whatever happens, every stream equals the one it would be alone, and the tables stay sound after every step.
"""

from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.toy import StepAbandoned, make_engine, run_alone, spec

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
    }
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, params),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abandon")),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
    ),
    min_size=1,
    max_size=30,
)


@examples(38)
@given(events, st.sampled_from([16, 18, 24]), st.sampled_from([3, 16]), st.booleans())
def test_every_stream_is_what_it_would_be_alone(events, num_blocks, budget, prefix_caching):
    engine, model = make_engine(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_prefill_while_decoding=max(1, budget // 2),
        enable_prefix_caching=prefix_caching,
    )
    streams: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    specs = {}

    def step() -> None:
        for output in engine.step().outputs:
            assert output.id not in cancelled
            assert output.index == len(streams[output.id]), "a gap or a duplicate"
            streams[output.id].append(output.token)
        engine.check()

    for event in events:
        if event[0] == "add":
            request = spec(f"r{len(specs)}", event[1], **event[2])
            specs[request.id], streams[request.id] = request, []
            engine.add(request)
        elif event[0] == "step":
            for _ in range(event[1]):
                step()
        elif event[0] == "abandon" and engine.has_work:
            abandon(engine, model)
        elif event[0] == "cancel" and engine.cancel(f"r{event[1]}"):
            cancelled.add(f"r{event[1]}")
            engine.check()
    for _ in range(2000):
        if not engine.has_work:
            break
        step()
    assert not engine.has_work, "a worker starves"
    assert engine.scheduler.pool.num_used == 0
    for id, request in specs.items():
        alone = run_alone(request)
        assert streams[id] == (alone[: len(streams[id])] if id in cancelled else alone)


def abandon(engine, model) -> None:
    """A step that fails in its forward pass leaves no trace, not even in the order of the free list; unless it had
    taken blocks that held something, and so overwrote it."""
    before = snapshot(engine)
    model.fail_next = True
    try:
        engine.step()
        raise AssertionError("the fault was not injected")
    except StepAbandoned:
        pass
    after = snapshot(engine)
    has_taken = after[-1].num_preemptions > before[-1].num_preemptions or len(after[-2]) < len(before[-2])
    assert after == before or has_taken
    engine.check()


def snapshot(engine) -> tuple:
    scheduler = engine.scheduler
    pool = scheduler.pool
    sequences = [
        (s.id, s.status, list(s.blocks), s.num_computed, list(s.tokens), s.num_cached)
        for s in [*scheduler.waiting, *scheduler.running]
    ]
    stats = engine.stats()
    return (
        sequences,
        len(scheduler.running),
        pool.free_list(),
        list(pool.refs),
        list(pool.hash_of),
        dict(pool.block_of),
        stats,
    )
