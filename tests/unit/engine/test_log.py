"""Streams and their log, on the toy model: what is committed when, and what comes back from where."""

import ctypes
from collections.abc import Callable, Iterator

import pytest

from everserve.engine.engine import StepResult
from everserve.kvlog.chains import key_of
from everserve.kvlog.log import Log
from everserve.tables.requests import RequestSpec
from tests.support.toy import LoggedToy, StepAbandoned, make_config, make_engine, run_alone, spec

Make = Callable[..., LoggedToy]


@pytest.fixture
def make() -> Iterator[Make]:
    """Logged engines, closed after the test."""
    made: list[LoggedToy] = []

    def make(is_in_place: bool = False, memory: int | None = None, **overrides: object) -> LoggedToy:
        made.append(LoggedToy(make_config(**{"num_blocks": 64, **overrides}), is_in_place, memory))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for toy in made:
        toy.close()


@pytest.fixture(params=["mirror", "in place"])
def succeed(request: pytest.FixtureRequest, make: Make) -> Callable[..., tuple[LoggedToy, Log]]:
    """A worker dies: who comes after it, and the log to restore from."""

    def succeed(old: LoggedToy, **overrides: object) -> tuple[LoggedToy, Log]:
        memory = old.photograph()
        if request.param == "in place":
            return (new := make(True, memory, **overrides)), new.log
        left = make(memory=memory)
        return make(**overrides), left.log

    return succeed


def step(toy: LoggedToy, streams: dict[str, list[int]] | None = None) -> StepResult:
    """As a worker does it."""
    result = toy.engine.step()
    for output in result.outputs:
        if streams is not None and output.token is not None:
            streams.setdefault(output.id, []).append(output.token)
    toy.engine.log_step()
    toy.engine.check()
    return result


def drain(toy: LoggedToy, streams: dict[str, list[int]]) -> None:
    for _ in range(1000):
        if not toy.engine.has_work:
            return
        step(toy, streams)
    raise AssertionError("a worker starves")


def resumed(request: RequestSpec, streams: dict[str, list[int]]) -> RequestSpec:
    return request.after(streams.get(request.id, []))


def take_over(toy: LoggedToy, log: Log, request: RequestSpec, streams: dict[str, list[int]]) -> None:
    toy.engine.add(resumed(request, streams), toy.find(log, request.id))


# -- restoring -----------------------------------------------------------------------------------


def test_only_what_nobody_has_computed_is_computed(make, succeed):
    old, streams = make(), {}
    request = spec("a", list(range(30)), max_tokens=20)
    old.engine.add(request)
    for _ in range(8):
        step(old, streams)
    assert len(streams["a"]) == 7
    new, log = succeed(old)
    take_over(new, log, request, streams)
    (restored,) = step(new, streams).restored
    assert (restored.id, restored.num_restored, restored.num_recomputed) == ("a", 36, 0)
    stats = new.engine.stats()
    assert (stats.num_restored_tokens, stats.num_broken_tokens, stats.num_known_tokens) == (36, 0, 0)
    assert len(streams["a"]) == 8, "and it goes on in the same step"
    drain(new, streams)
    assert streams["a"] == run_alone(request)


def test_a_stream_in_the_middle_of_its_prompt(make, succeed):
    old, streams = make(max_num_batched_tokens=9), {}
    request = spec("a", list(range(40)), max_tokens=5)
    old.engine.add(request)
    for _ in range(3):
        step(old, streams)
    assert not streams
    new, log = succeed(old)
    take_over(new, log, request, streams)
    drain(new, streams)
    assert new.engine.stats().num_restored_tokens == 27
    assert new.engine.stats().num_prompt_tokens == 13
    assert streams["a"] == run_alone(request)


def test_prompt_logprobs_need_the_prompt_computed(make, succeed):
    old, streams = make(max_num_batched_tokens=9), {}
    request = spec("a", list(range(40)), max_tokens=5, prompt_logprobs=0)
    old.engine.add(request)
    step(old, streams)
    new, log = succeed(old)
    take_over(new, log, request, streams)
    assert not new.engine.waits_for(log)
    outputs = []
    while new.engine.has_work:
        outputs += step(new, streams).outputs
    assert len(outputs[0].prompt_logprobs) == 40
    assert new.engine.stats().num_restored_tokens == 0
    assert streams["a"] == run_alone(request)


def test_a_stream_with_prompt_logprobs_that_were_delivered(make, succeed):
    old, streams = make(), {}
    request = spec("a", list(range(10)), max_tokens=5, prompt_logprobs=0)
    old.engine.add(request)
    step(old, streams)
    new, log = succeed(old)
    take_over(new, log, request, streams)
    drain(new, streams)
    assert new.engine.stats().num_restored_tokens == 10
    assert streams["a"] == run_alone(request)


def test_siblings_bring_their_prompt_back_once(make, succeed):
    old, streams = make(), {}
    requests = [spec(f"r{i}", list(range(33)), max_tokens=9, seed=i) for i in range(3)]
    for request in requests:
        old.engine.add(request)
    for _ in range(7):
        step(old, streams)
    assert all(len(streams[request.id]) > 1 for request in requests)
    new, log = succeed(old)
    for request in requests:
        take_over(new, log, request, streams)
    restored = step(new, streams).restored
    assert [found.num_recomputed for found in restored] == [0, 0, 0]
    computed = [33 + len(streams[request.id]) - 2 for request in requests]
    assert [found.num_restored for found in restored] == [computed[0], computed[1] - 32, computed[2] - 32]
    drain(new, streams)
    assert streams == {request.id: run_alone(request) for request in requests}


@pytest.mark.parametrize("num_steps", [0, 4, 20])
def test_what_came_back_is_found_by_others_a_little_later(make, succeed, num_steps):
    """When the stream has filled its next block, or has ended: to hash it takes longer than to bring it."""
    old, streams = make(), {}
    request, other = spec("a", list(range(30)), max_tokens=20), spec("b", list(range(30)), max_tokens=3)
    old.engine.add(request)
    step(old, streams)
    step(old, streams)
    new, log = succeed(old)
    take_over(new, log, request, streams)
    step(new, streams)
    for _ in range(num_steps):
        step(new, streams)
    new.engine.add(other)
    drain(new, streams)
    assert new.engine.stats().prefix_cache_hits == (28 if num_steps else 0)
    assert streams == {one.id: run_alone(one) for one in (request, other)}


@pytest.mark.parametrize("num_prompt", [28, 29, 30])
def test_what_came_back_and_was_overwritten_is_never_found(make, num_prompt):
    """Its blocks are taken in a step that is abandoned, before others could find them."""
    old, new, streams = make(), make(num_blocks=16), {}
    request, other = spec("a", list(range(num_prompt)), max_tokens=9), spec("b", list(range(num_prompt)), max_tokens=3)
    growing = [spec(f"x{i}", [50 + i] * 5, max_tokens=5) for i in range(4)]
    old.engine.add(request)
    for _ in range(2):
        step(old, streams)
    for one in growing:
        new.engine.add(one)
    for _ in range(3):
        step(new, streams)
    take_over(new, old.log, request, streams)
    assert len(step(new, streams).restored) == 1
    new.model.fail_next = True
    with pytest.raises(StepAbandoned):
        new.engine.step()
    new.engine.check()
    assert [sequence.id for sequence in new.engine.scheduler.waiting] == ["a"], "it had to give up its blocks"
    for one in growing:
        new.engine.cancel(one.id)
    new.engine.add(other)
    drain(new, streams)
    assert streams["a"] == run_alone(request) and streams["b"] == run_alone(other)


def test_the_log_knows_more_than_the_client(make, succeed):
    """Tokens were sent and never arrived: they are sampled again, and are the same."""
    old, streams = make(), {}
    request = spec("a", list(range(10)), max_tokens=20)
    old.engine.add(request)
    for _ in range(9):
        step(old, streams)
    del streams["a"][4:]
    new, log = succeed(old)
    take_over(new, log, request, streams)
    drain(new, streams)
    assert new.engine.stats().num_restored_tokens == 10 + 4 - 1
    assert streams["a"] == run_alone(request)


def test_restoring_is_undone_with_its_step(make, succeed):
    old, streams = make(), {}
    request = spec("a", list(range(30)), max_tokens=20)
    old.engine.add(request)
    for _ in range(5):
        step(old, streams)
    new, log = succeed(old)
    before = tables(new)
    take_over(new, log, request, streams)
    for _ in range(3):
        new.model.fail_next = True
        with pytest.raises(StepAbandoned):
            new.engine.step()
        new.engine.check()
        assert tables(new) == before
        assert new.engine.waits_for(log) and new.engine.stats().num_restored_tokens == 0
    assert step(new, streams).restored[0].num_recomputed == 0
    assert not new.engine.waits_for(log)
    drain(new, streams)
    assert streams["a"] == run_alone(request)


def tables(toy: LoggedToy) -> tuple:
    pool, journal = toy.engine.scheduler.pool, toy.journal
    blocks = pool.free_list(), list(pool.refs), list(pool.hash_of), dict(pool.block_of)
    return *blocks, set(journal.free), journal.adopted.keys(), {record.key for record in toy.log.records()}


def test_damage_costs_what_lies_behind_it(make, succeed):
    old, streams = make(), {}
    request = spec("a", list(range(30)), max_tokens=20)
    old.engine.add(request)
    for _ in range(8):
        step(old, streams)
    new, log = succeed(old)
    saved = new.find(log, "a")
    block_bytes = new.shape.block_bytes
    log.blocks[saved.blocks[5] * block_bytes + block_bytes // 2 + 2 * 8] ^= 1  # second layer, third slot
    take_over(new, log, request, streams)
    (restored,) = step(new, streams).restored
    assert (restored.num_restored, restored.num_recomputed) == (22, 14)
    assert new.engine.stats().num_broken_tokens == 14
    drain(new, streams)
    assert new.engine.stats().num_known_tokens == 14
    assert streams["a"] == run_alone(request)


def test_a_log_that_was_closed_meanwhile(make):
    old, new, streams = make(), make(), {}
    request = spec("a", list(range(30)), max_tokens=20)
    old.engine.add(request)
    for _ in range(8):
        step(old, streams)
    left = Log(old.memory, old.shape)
    take_over(new, left, request, streams)
    left.close()
    drain(new, streams)
    assert streams["a"] == run_alone(request)


def test_others_do_not_wait_long_while_a_stream_is_restored(make):
    old, streams = make(), {}
    request = spec("long", list(range(40)), max_tokens=20)
    old.engine.add(request)
    for _ in range(10):
        step(old, streams)
    new = make(max_restored_while_serving=8)
    new.engine.add(spec("other", [1, 2, 3], max_tokens=30))
    step(new, streams)
    take_over(new, old.log, request, streams)
    news = []
    while not (result := step(new, streams)).restored:
        news.append((new.engine.stats().num_restored_tokens, [output.id for output in result.outputs]))
    assert news == [(num, ["other"]) for num in (8, 16, 24, 32, 40)]
    assert (result.restored[0].num_restored, result.restored[0].num_recomputed) == (47, 0)
    assert [output.id for output in result.outputs] == ["other", "long"]
    drain(new, streams)
    assert streams["long"] == run_alone(request)


def test_who_has_its_prompt_in_a_log_does_not_wait_for_others_to_compute_it(make):
    old, streams = make(), {}
    request = spec("lost", list(range(40)), max_tokens=20)
    old.engine.add(request)
    for _ in range(10):
        step(old, streams)
    new = make(max_num_batched_tokens=64)
    new.engine.add(spec("new", list(range(41)), max_tokens=4))
    take_over(new, old.log, request, streams)
    result = step(new, streams)
    assert [restored.id for restored in result.restored] == ["lost"]
    assert {output.id for output in result.outputs} == {"new", "lost"}


def test_nothing_is_restored_from_a_log_without_a_log_of_ones_own(make):
    old, streams = make(), {}
    request = spec("a", list(range(10)), max_tokens=6)
    old.engine.add(request)
    step(old, streams)
    engine, _ = make_engine(num_blocks=64)
    engine.add(resumed(request, streams), old.find(old.log, "a"))
    while engine.has_work:
        streams["a"] += [output.token for output in engine.step().outputs]
        engine.log_step()
    assert streams["a"] == run_alone(request)


def test_a_mirror_that_is_its_own_source(make):
    """Nobody does this; it must not hurt."""
    toy, streams = make(), {}
    request = spec("a", list(range(30)), max_tokens=20)
    toy.engine.add(request)
    for _ in range(8):
        step(toy, streams)
    saved = toy.find(toy.log, "a")
    toy.engine.cancel("a")
    toy.engine.add(resumed(request, streams), saved)
    drain(toy, streams)
    assert streams["a"] == run_alone(request)


# -- in place ------------------------------------------------------------------------------------


def test_blocks_stay_where_they_are(make):
    old, streams = make(True), {}
    request = spec("a", list(range(30)), max_tokens=20)
    old.engine.add(request)
    for _ in range(8):
        step(old, streams)
    blocks = old.find(old.log, "a").blocks
    new = make(True, old.photograph())
    assert new.engine.scheduler.pool.free_list()[-len(blocks) :] == list(reversed(blocks))
    take_over(new, new.log, request, streams)
    step(new, streams)
    assert new.engine.scheduler.running[0].blocks[: len(blocks)] == list(blocks)


def test_blocks_that_others_took_first(make):
    """The stream waits for a seat; meanwhile another one needs the blocks."""
    old, streams = make(True, num_blocks=16, max_num_seqs=1), {}
    lost = spec("lost", list(range(30)), max_tokens=20)
    old.engine.add(lost)
    for _ in range(8):
        step(old, streams)
    new = make(True, old.photograph(), num_blocks=16, max_num_seqs=1)
    other = spec("other", list(range(50, 90)), max_tokens=20)
    new.engine.add(other)
    take_over(new, new.log, lost, streams)
    drain(new, streams)
    stats = new.engine.stats()
    assert 0 < stats.num_restored_tokens < 36 and stats.num_restored_tokens + stats.num_broken_tokens == 36
    assert streams == {"lost": run_alone(lost), "other": run_alone(other)}


def test_equal_streams_do_not_write_into_each_others_blocks(make):
    """Two records name one block that is half full, both rightly: only the first stream may go on in it."""
    old, streams = make(True, enable_prefix_caching=False), {}
    request = spec("a", list(range(10)), max_tokens=8, temperature=0.0)
    old.engine.add(request)
    step(old, streams)
    twin = spec("b", list(range(10)), max_tokens=8, temperature=1.0, seed=3)
    record = old.log.find(key_of("a"))
    old.journal.writer.commit(old.journal.free[-1], key_of("b"), record.num_tokens, record.blocks, 0)
    new = make(True, old.photograph(), enable_prefix_caching=False)
    take_over(new, new.log, request, streams)
    take_over(new, new.log, twin, streams)
    drain(new, streams)
    assert streams == {"a": run_alone(request), "b": run_alone(twin)}


def test_a_block_that_is_in_the_prefix_cache_by_now_is_not_written_into(make):
    """The record of "b" names a block of "a" that is full by now; what "b" shares with it is less."""
    old, streams = make(True), {}
    request = spec("a", list(range(10)), max_tokens=8, temperature=0.0)
    old.engine.add(request)
    step(old, streams)
    record = old.log.find(key_of("a"))
    old.journal.writer.commit(old.journal.free[-1], key_of("b"), record.num_tokens, record.blocks, 0)
    new = make(True, old.photograph())
    take_over(new, new.log, request, streams)
    drain(new, streams)
    twin = spec("b", list(range(10)), max_tokens=8, temperature=1.0, seed=3)
    take_over(new, new.log, twin, streams)
    drain(new, streams)
    later = spec("later", [*range(10), *streams["a"]], max_tokens=4)
    new.engine.add(later)
    drain(new, streams)
    assert streams == {"a": run_alone(request), "b": run_alone(twin), "later": run_alone(later)}


def test_a_stream_keeps_its_place_in_the_log(make):
    old, streams = make(True), {}
    requests = [spec(f"r{i}", [i] * 9, max_tokens=20) for i in range(4)]
    for request in requests:
        old.engine.add(request)
    for _ in range(5):
        step(old, streams)
    places = {request.id: old.log.find(key_of(request.id)).index for request in requests}
    new = make(True, old.photograph())
    take_over(new, new.log, requests[2], streams)
    new.engine.add(spec("new", [50] * 9, max_tokens=20))
    step(new, streams)
    assert {request.id: new.log.find(key_of(request.id)).index for request in requests} == places
    assert new.log.find(key_of("r2")).num_tokens == new.engine.scheduler.running[0].num_computed
    assert new.log.find(key_of("new")).index not in places.values()
    new.engine.forget_adopted()
    new.engine.check()
    assert {record.key for record in new.log.records()} == {key_of("r2"), key_of("new")}


def test_adopted_records_of_streams_that_wait_here_are_kept(make):
    old, streams = make(True), {}
    request = spec("a", list(range(30)), max_tokens=20)
    old.engine.add(request)
    step(old, streams)
    new = make(True, old.photograph())
    take_over(new, new.log, request, streams)
    new.engine.forget_adopted()
    assert new.log.find(key_of("a")) is not None
    new.engine.cancel("a")
    assert new.log.records() == []
    new.engine.check()


def test_when_places_run_out_the_oldest_adopted_record_goes_first(make):
    memory, ids = None, []
    for life in range(3):
        toy = make(True, memory, max_num_seqs=2)
        for i in range(2):
            ids.append(f"life {life} stream {i}")
            toy.engine.add(spec(ids[-1], [life, i, 5], max_tokens=20))
            step(toy)
        memory = toy.photograph()
    last = make(True, memory, max_num_seqs=2)
    assert [record.key for record in last.journal.adopted.values()] == [key_of(id) for id in ids[-4:]]


# -- committing ----------------------------------------------------------------------------------


def test_records_follow_the_outputs(make):
    toy = make()
    toy.engine.add(spec("a", list(range(10)), max_tokens=3))
    toy.engine.step()
    assert toy.log.records() == [] and toy.engine.stats().log_lag_tokens == 10
    toy.engine.log_step()
    (record,) = toy.log.records()
    assert (record.key, record.num_tokens) == (key_of("a"), 10) and toy.engine.stats().log_lag_tokens == 0
    step(toy)
    toy.engine.step()
    toy.engine.check()
    assert not toy.engine.has_work
    assert toy.log.records()[0].num_tokens == 12, "its last token is not sent yet: somebody may have to go on"
    toy.engine.log_step()
    toy.engine.check()
    assert toy.log.records() == []


def followed(toy: LoggedToy) -> dict[str, tuple[int, list[int]]]:
    """What the log says of running streams, without asking the journal; and that the writer goes on by itself."""
    assert toy.journal._followed is not None
    records = {s.id: toy.log.find(key_of(s.id)) for s in toy.engine.scheduler.running}
    return {id: (record.num_tokens, list(record.blocks)) for id, record in records.items()}


def test_streams_that_decode_are_followed(make):
    toy, streams = make(), {}
    specs = [spec(f"r{i}", list(range(i, i + 5 + i)), max_tokens=20) for i in range(3)]
    for request in specs:
        toy.engine.add(request)
    for i in range(12):
        result = toy.engine.step()
        toy.engine.log_step()
        for output in result.outputs:
            streams.setdefault(output.id, []).append(output.token)
        if i >= 4:
            running = toy.engine.scheduler.running
            assert followed(toy) == {s.id: (s.num_computed, s.blocks) for s in running}
            assert toy.engine.stats().log_lag_tokens == 0
    toy.engine.check()
    drain(toy, streams)
    assert streams == {request.id: run_alone(request) for request in specs}


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_something_is_asked_in_the_middle_of_a_step(make, succeed, is_abandoned):
    """Of a stream that is followed: the step goes on as any other one."""
    toy, streams = make(), {}
    request = spec("a", list(range(9)), max_tokens=30)
    toy.engine.add(request)
    for i in range(20):
        if i % 4 == 3:
            assert followed(toy)["a"][0] == 9 + i - 1
            toy.model.on_write = lambda: toy.journal.entries
        if i % 8 == 7 and is_abandoned:
            toy.model.fail_next = True
            with pytest.raises(StepAbandoned):
                toy.engine.step()
            toy.engine.check()
        toy.engine.step(meanwhile=toy.engine.log_step)
        toy.engine.log_step()
        toy.model.on_write = lambda: None
    toy.engine.check()
    new, log = succeed(toy)
    take_over(new, log, request, {"a": run_alone(request)[:20]})
    assert step(new, streams).restored[0].num_recomputed == 0
    drain(new, streams)
    assert streams["a"] == run_alone(request)[20:]


@pytest.mark.parametrize("number", [-1, 64, 2**31 - 1, 5])
def test_a_list_that_somebody_else_has_written_into(make, number):
    """While the writer follows a stream. What is not certain any more is promised no more; the stream goes on."""
    toy, streams = make(), {}
    request = spec("a", list(range(9)), max_tokens=40)
    toy.engine.add(request)
    for i in range(1000):
        if not toy.engine.has_work:
            break
        for output in toy.engine.step().outputs:
            streams.setdefault("a", []).append(output.token)
        toy.engine.log_step()
        if i == 20:
            assert followed(toy)["a"][0] == 29
            layout = toy.log.layout
            num_listed = layout.max_blocks * layout.num_records
            lists = (ctypes.c_int32 * num_listed).from_address(layout.base + layout.lists_at)
            lists[:] = [number] * num_listed
            assert toy.journal.entries["a"].num_committed == 29, "the journal asks how far it has come"
    assert streams["a"] == run_alone(request)


def test_cancelled_streams_are_forgotten_at_once(make):
    toy = make()
    toy.engine.add(spec("a", list(range(10)), max_tokens=9))
    step(toy)
    toy.engine.cancel("a")
    toy.engine.check()
    assert toy.log.records() == []
    toy.engine.add(spec("a", [5, 6], max_tokens=9))  # the same name, but not the same stream
    step(toy)
    assert toy.log.records()[0].num_tokens == 2


def test_preempted_streams_have_no_record(make):
    toy, streams = make(num_blocks=16), {}
    specs = [spec(f"r{i}", [i, i + 1, i + 2], max_tokens=40, seed=i) for i in range(5)]
    for request in specs:
        toy.engine.add(request)
    num_preempted = 0
    while toy.engine.has_work:
        for sequence in step(toy, streams).preempted:
            num_preempted += 1
            assert toy.log.find(key_of(sequence.id)) is None
    assert num_preempted
    assert streams == {request.id: run_alone(request) for request in specs}


def test_a_prefix_that_was_found_is_in_the_record(make):
    toy, streams = make(), {}
    first, second = spec("first", list(range(20)), max_tokens=9), spec("second", list(range(21)), max_tokens=9)
    toy.engine.add(first)
    step(toy, streams)
    step(toy, streams)
    toy.engine.add(second)
    step(toy, streams)
    left, right = toy.log.find(key_of("first")), toy.log.find(key_of("second"))
    assert left.blocks[:5] == right.blocks[:5] and right.num_tokens == 21


def test_what_a_stream_starts_with_is_committed_before_its_first_step_is_done(make):
    """It was restored, and its worker dies in the very next moment: it is in that worker's log."""
    old, new, streams = make(), make(), {}
    request = spec("a", list(range(30)), max_tokens=20)
    old.engine.add(request)
    for _ in range(8):
        step(old, streams)
    take_over(new, old.log, request, streams)
    found = []
    new.model.on_write = lambda: found.append(new.log.find(key_of("a")).num_tokens)
    step(new, streams)
    assert set(found) == {36}


def test_a_record_never_says_more_than_what_is_in_the_log(make):
    """Should a cached block be missing in the log, commits end there."""
    toy, streams = make(), {}
    toy.engine.add(spec("first", list(range(20)), max_tokens=1))
    drain(toy, streams)
    second = spec("second", list(range(21)), max_tokens=5)
    toy.engine.add(second)
    third = next(iter(toy.engine.scheduler.pool.block_of.values())) + 2
    toy.journal.note_logged(third, 1)
    toy.engine.step()
    toy.engine.log_step()
    assert toy.log.find(key_of("second")).num_tokens == 9
    assert toy.engine.stats().log_lag_tokens == 21 - 9
    toy.journal.note_logged(third, 4)
    step(toy, streams)
    assert toy.engine.stats().log_lag_tokens == 0


def test_streams_by_name(make):
    toy = make(max_num_seqs=1)
    for id in ("a", "b"):
        toy.engine.add(spec(id, [1, 2]))
    step(toy)
    assert toy.engine.stream_ids() == ["a", "b"]


def test_a_loop_that_never_commits(make):
    """Records follow when streams start; nothing is ever wrong, and places do not run out."""
    toy, streams = make(max_num_seqs=2), {}
    specs = [spec(f"r{i}", list(range(i, i + 9)), max_tokens=4) for i in range(9)]
    for request in specs:
        toy.engine.add(request)
    for i in range(1000):
        if not toy.engine.has_work:
            break
        if i % 3 == 1:
            toy.model.fail_next = True
            with pytest.raises(StepAbandoned):
                toy.engine.step()
        else:
            for output in toy.engine.step().outputs:
                streams.setdefault(output.id, []).append(output.token)
        toy.engine.check()
    assert streams == {request.id: run_alone(request) for request in specs}


def test_a_newer_stream_makes_way_for_one_that_comes_back_in_parts(make):
    """The pool is full, nobody else is scheduled, and the newest needs a block: it waits, and the older one goes on."""
    old, streams = make(), {}
    request, other = spec("a", list(range(40)), max_tokens=6), spec("b", [7, 8, 9], max_tokens=30)
    old.engine.add(request)
    for _ in range(4):
        step(old, streams)
    new = make(num_blocks=12, max_restored_while_serving=4, enable_prefix_caching=False)
    new.engine.add(spec("d", [1, 2], max_tokens=30))
    step(new)
    take_over(new, old.log, request, streams)  # while another one decodes: a block in each step
    new.engine.add(other)
    step(new, streams)
    step(new, streams)
    new.engine.cancel("d")
    drain(new, streams)
    assert new.engine.stats().num_preemptions > 0
    assert streams["a"] == run_alone(request) and streams["b"] == run_alone(other)


def test_salts_keep_kv_apart(make, succeed):
    """In the cache of a worker, and where a log brings it back: only streams with the same salt find it."""
    old = make()
    prompt = list(range(40))
    first, streams = spec("first", prompt, max_tokens=6, cache_salt=b"one"), {}
    old.engine.add(first)
    step(old, streams)
    step(old, streams)
    new, left = succeed(old)
    take_over(new, left, first, streams)
    drain(new, streams)
    assert streams["first"] == run_alone(first)
    assert new.engine.stats().num_known_tokens < 4, "it was brought back"
    found = {}
    for id, salt in (("other", b"two"), ("none", b""), ("same", b"one"), ("other again", b"two")):
        request = spec(id, prompt, max_tokens=2, cache_salt=salt)
        new.engine.add(request)
        while new.engine.has_work:
            for output in new.engine.step().outputs:
                found[id] = found.get(id, output.num_cached)
                streams.setdefault(id, []).append(output.token)
        assert streams[id] == run_alone(request)
    assert found["other"] == found["none"] == 0 and found["same"] == found["other again"] > 30
