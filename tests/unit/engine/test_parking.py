"""Streams that have to give up their blocks keep their KV in mirrors, and go on with it; least recent ones first."""

import pytest

from everserve.engine.saved import Saved
from everserve.errors import StepAbandoned
from everserve.kvlog.chains import key_of
from everserve.kvlog.log import Log, NoBlocks
from tests.support.in_process_heads import FETCH, HeadWorld
from tests.support.models import model_directory, random_tokens
from tests.support.toy import spec

NUM, LENGTH, MAX_TOKENS = 4, 20, 40
FEW = 9  # blocks of 16 tokens: four streams are admitted, and two fit to their end


@pytest.fixture
def make_world():
    worlds = []

    def make(**kwargs) -> HeadWorld:
        told = {"keeps_kv": True, "seed": 1, **kwargs}
        worlds.append(HeadWorld(model_directory("qwen3-moe", "float32"), 2, **told))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def add_streams(engine) -> None:
    for number in range(NUM):
        engine.add(_spec(number))


def _spec(number: int):
    return spec(f"s{number}", random_tokens(LENGTH, seed=number), max_tokens=MAX_TOKENS)


def expected(world) -> dict[str, list[int]]:
    engine = world.engine_alone(world.decoder(has_heads=True))
    add_streams(engine)
    return run(engine)


def run(engine, streams=None, until=lambda: False) -> dict[str, list[int]]:
    streams = {} if streams is None else streams
    for _ in range(600):
        if not engine.has_work or until():
            return streams
        try:
            outputs = engine.step().outputs
        except StepAbandoned:
            return streams
        for output in outputs:
            streams.setdefault(output.id, []).append(output.token)
        engine.log_step()
        engine.check()
    raise AssertionError("streams starve")


def test_streams_go_on_with_the_kv_that_they_had(make_world):
    world = make_world()
    engine = world.engine(num_blocks=FEW, enable_prefix_caching=False)
    add_streams(engine)
    assert run(engine) == expected(world)
    stats = engine.stats()
    assert stats.num_preemptions >= 2 and stats.num_restored_tokens >= 2 * LENGTH and stats.num_broken_tokens == 0
    assert stats.num_prompt_tokens == NUM * LENGTH, "no prompt is computed twice"
    assert engine.scheduler.parking.pool.num_used == 0


@pytest.mark.parametrize("shadow", ["parity", "off"])
def test_without_a_mirror_it_is_computed_again(make_world, shadow):
    world = make_world(shadow=shadow)
    engine = world.engine(num_blocks=FEW, enable_prefix_caching=False)
    add_streams(engine)
    assert run(engine) == expected(world)
    assert engine.stats().num_preemptions >= 2 and engine.stats().num_restored_tokens == 0


def is_parked(engine) -> bool:
    return any(engine.scheduler.parked(sequence) is not None for sequence in engine.scheduler.waiting)


def test_mirrors_have_what_is_parked_when_all_pools_are_lost(make_world):
    world = make_world()
    engine = world.engine(num_blocks=FEW, enable_prefix_caching=False)
    add_streams(engine)
    streams = run(engine, until=lambda: is_parked(engine))
    for worker in world.workers:
        worker.die()
    for worker in world.workers:
        worker.replace(memory_lost=True)
    assert run(engine, streams) == expected(world)
    assert engine.stats().num_lost_tokens == 0 and engine.stats().num_prompt_tokens == NUM * LENGTH


def test_another_home_restores_what_is_parked(make_world):
    """Its record names the blocks."""
    world = make_world(num_homes=2)
    engine = world.engine(0, num_blocks=FEW, enable_prefix_caching=False)
    add_streams(engine)
    streams = run(engine, until=lambda: is_parked(engine))
    parked = next(s for s in engine.scheduler.waiting if engine.scheduler.parked(s) is not None)
    log = Log(world.homes[0].log_fd, world.log_shape(), NoBlocks())
    record = log.find(key_of(parked.id))
    assert record is not None and record.blocks == engine.scheduler.parked(parked).blocks
    other = world.engine(1)
    other.add(_spec(int(parked.id[1:])).after(streams[parked.id]), Saved.of(log, record, None))
    told = {parked.id: list(streams[parked.id])}
    assert run(other, told)[parked.id] == expected(world)[parked.id]
    assert other.stats().num_restored_tokens == record.num_tokens


@pytest.mark.parametrize("call", [FETCH, 1], ids=["while it is parked", "in the step for which it was parked"])
def test_a_step_is_abandoned(make_world, call):
    """A worker dies: nothing has happened, or the stream has lost its blocks and is parked."""
    world = make_world()
    engine = world.engine(num_blocks=FEW, enable_prefix_caching=False)
    add_streams(engine)
    streams, worker = {}, world.workers[0]
    if call == FETCH:
        worker.fault = lambda asked, batch: asked == FETCH
    else:
        worker.fault = lambda asked, batch: asked == call and bool(engine.scheduler.preempted)
    run(engine, streams, until=lambda: worker.is_dead)
    assert worker.is_dead
    engine.check()
    worker.replace()
    assert run(engine, streams) == expected(world)
    assert engine.stats().num_prompt_tokens == NUM * LENGTH


def test_the_stream_that_has_advanced_least_recently_goes_first(make_world):
    """Not the one admitted last; and never the one admitted first."""
    world = make_world()
    engine = world.engine(enable_prefix_caching=False)
    add_streams(engine)
    run(engine, until=lambda: engine.scheduler._num_steps == 5)
    scheduler = engine.scheduler
    first, second, third, last = scheduler.running
    first.last_step, third.last_step = 0, 1
    assert scheduler._victim(set()) is third
    assert scheduler._victim({third.id}) is last
    assert scheduler._victim({second.id, third.id, last.id}) is first


def test_no_room_to_park(make_world):
    world = make_world()
    engine = world.engine(num_blocks=FEW, enable_prefix_caching=False)
    taken = engine.scheduler.parking.pool.allocate_many(engine.scheduler.parking.pool.num_free - 1)
    engine._undo.commit()
    add_streams(engine)
    streams = {}
    while engine.has_work:
        for output in engine.step().outputs:
            streams.setdefault(output.id, []).append(output.token)
    assert streams == expected(world) and len(taken) > 1
    assert engine.stats().num_restored_tokens == 0 and engine.stats().num_preemptions > 0
