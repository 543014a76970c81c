"""KV that outlives what had it: a worker's memory, a head's place, a home. Real lanes, pools and mirrors."""

import os

import pytest
import torch

from everserve.engine.saved import Saved
from everserve.errors import FetchFailed, StepAbandoned
from everserve.kvlog.chains import chains, key_of
from everserve.kvlog.log import Log, NoBlocks
from everserve.memory.pieces.layout import PAGE
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.worker.logs import KeptLogs
from tests.support.heads import BLOCK_SIZE
from tests.support.in_process_experts import new_memory
from tests.support.in_process_heads import BLOCKS_PER_HOME, FETCH, HeadWorld
from tests.support.logs import offer_log
from tests.support.models import model_directory, random_tokens
from tests.support.toy import spec
from tests.unit.backends.test_remote_heads import PLACES, add_streams, expected_streams, run, write

BESIDE = "everserve.backends.cpu.head_kv._BESIDE_BYTES"
EVERYTHING = [(layer, head) for layer in (0, 1) for head in (0, 1)]


@pytest.fixture
def make_world():
    worlds = []

    def make(num_workers=2, **kwargs) -> HeadWorld:
        told = {"places": PLACES, "keeps_kv": True, **kwargs}
        worlds.append(HeadWorld(model_directory("qwen3-moe", "float32"), num_workers, **told))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def lose(worker) -> None:
    worker.die()
    worker.replace(memory_lost=True)


# the memory of a worker


def test_kv_comes_from_the_mirror(make_world):
    world = make_world()
    engine = world.engine()
    add_streams(engine)
    assert run(engine, world, {3: lambda: lose(world.workers[0]), 9: lambda: lose(world.workers[1])}) == (
        expected_streams(world)
    )
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_lost_tokens) == (0, 0)
    assert stats.num_regained_tokens > 200 and stats.num_regained_bytes > 0


def test_kv_is_rebuilt_from_parity(make_world):
    """One device after the other, and what a returned one keeps is written anew before the next is lost."""
    world = make_world(3, shadow="parity", places={0: EVERYTHING[:1], 1: EVERYTHING[1:3], 2: EVERYTHING[3:]})
    world.regroup()
    engine = world.engine()
    add_streams(engine)

    def lose_one(index: int) -> None:
        lose(world.workers[index])
        world.regroup()

    losses = {step: lambda index=index: lose_one(index) for step, index in ((3, 0), (6, 1), (9, 2))}
    assert run(engine, world, losses) == expected_streams(world)
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_lost_tokens) == (0, 0)
    assert stats.num_regained_tokens > 300 and stats.num_regained_bytes > 0


def test_two_losses_at_once_are_more_than_a_parity_covers(make_world):
    world = make_world(3, shadow="parity", places={0: EVERYTHING[:1], 1: EVERYTHING[1:3], 2: EVERYTHING[3:]})
    world.regroup()
    engine = world.engine()
    add_streams(engine)

    def lose_two() -> None:
        for worker in world.workers[:2]:
            worker.die()
        for worker in world.workers[:2]:
            worker.replace(memory_lost=True)

    assert run(engine, world, {6: lose_two}) == expected_streams(world)
    assert engine.stats().num_lost_tokens > 100


def test_what_the_mirror_does_not_have_yet_is_computed_again(make_world):
    """It is some steps behind."""
    world = make_world()
    engine = world.engine()
    add_streams(engine)
    worker = world.workers[0]

    def lag() -> None:
        worker.shadows_at_once = False

    assert run(engine, world, {4: lag, 8: lambda: lose(worker)}) == expected_streams(world)
    stats = engine.stats()
    assert stats.num_preemptions == 0 and stats.num_lost_tokens == 4 * 4, "four streams, four steps"
    assert stats.num_regained_tokens > 80


def test_without_words_everything_is_computed_again(make_world):
    """The mirror is lost too."""
    world = make_world()
    engine = world.engine()
    add_streams(engine)
    worker = world.workers[0]

    def lose_both() -> None:
        worker.die()
        worker.memory.mirrored()
        worker.replace(memory_lost=True)

    assert run(engine, world, {5: lose_both}) == expected_streams(world)
    stats = engine.stats()
    assert stats.num_preemptions == 4 and stats.num_regained_tokens == 0


def test_a_prefix_that_two_streams_share_stays_shared(make_world):
    world = make_world()
    prompt = random_tokens(40, seed=3)
    engine, alone = world.engine(), world.engine_alone(world.decoder(has_heads=True))
    for one in (engine, alone):
        one.add(spec("first", prompt, max_tokens=20))
    tokens = [output.token for output in engine.step().outputs]
    for one in (engine, alone):
        one.add(spec("second", prompt + tokens, max_tokens=12))
    world.workers[0].shadows_at_once = False  # from the second step on
    streams = run(engine, world, {3: lambda: lose(world.workers[0])}, offset={"first": 1})
    expected = run(alone)
    assert streams == {"first": expected["first"][1:], "second": expected["second"]}


# what a dead worker has left

REGIONS = ["header", "owners", "words", "blocks"]
OF_KV = ["words", "blocks"]  # without the others a successor gives heads the same pieces again, and KV there is right


def damage(worker, region: str) -> None:
    """Every byte of a small region, or some."""
    shape = worker.memory.shape
    ends = dict(zip(REGIONS, (PAGE, shape.words_at, shape.blocks_at, shape.num_bytes), strict=True))
    first = max([0, *(at for at in ends.values() if at < ends[region])])
    worker.damage(0.02 if region in OF_KV else 1.0, seed=1, first=first, end=ends[region])


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("shadow", ["off", "mirror", "parity"])
def test_memory_that_a_dead_worker_has_damaged(make_world, region, shadow):
    """Its successor goes on with it in place. What is wrong there is found before any step uses it."""
    world = make_world(3, shadow=shadow, places={0: EVERYTHING[:1], 1: EVERYTHING[1:3], 2: EVERYTHING[3:]})
    if shadow == "parity":
        world.regroup()
    engine, worker = world.engine(), world.workers[1]
    add_streams(engine)

    def damage_and_replace() -> None:
        worker.die()
        damage(worker, region)
        worker.replace()

    assert run(engine, world, {6: damage_and_replace}) == expected_streams(world)
    stats = engine.stats()
    assert (stats.num_lost_tokens > 20) == (region in OF_KV and shadow == "off"), "found, and computed again"
    assert (stats.num_regained_bytes > 0) == (region in OF_KV and shadow != "off"), "found, and right elsewhere"


def test_memory_that_a_dead_worker_has_left_whole(make_world):
    """Nothing is computed again, and nothing copied."""
    world = make_world(shadow="off")
    engine, worker = world.engine(), world.workers[1]
    add_streams(engine)

    def replace() -> None:
        worker.die()
        worker.replace()

    assert run(engine, world, {6: replace, 9: replace}) == expected_streams(world)
    stats = engine.stats()
    assert (stats.num_lost_tokens, stats.num_regained_bytes, stats.num_preemptions) == (0, 0, 0)
    assert stats.num_regained_tokens > 200, "checked"


@pytest.mark.parametrize("region", [None, *REGIONS])
@pytest.mark.parametrize("shadow", ["off", "mirror"])
@pytest.mark.parametrize("is_idle", [False, True])
def test_a_prefix_that_a_dead_worker_had_cached(make_world, region, shadow, is_idle):
    """It is checked when a prompt begins with it. Until then it is neither used nor given up."""
    world = make_world(shadow=shadow)
    engine, worker = world.engine(), world.workers[0]
    prompt = random_tokens(70, seed=3)

    def ask(name: str) -> None:
        engine.add(spec(name, [*prompt, len(name)], max_tokens=8))

    ask("first")
    streams = run(engine)
    if not is_idle:
        engine.add(spec("other", random_tokens(20, seed=4), max_tokens=30))
        engine.step()
    cached = set(engine.scheduler.pool.block_of.values())
    worker.die()
    if region is not None:
        damage(worker, region)
    worker.replace()
    ask("second one")
    streams |= run(engine, world, offset={} if is_idle else {"other": 1})
    ask("and a third one")
    streams |= run(engine)
    alone = world.engine_alone(world.decoder(has_heads=True))
    for name in ("first", "second one", "and a third one"):
        alone.add(spec(name, [*prompt, len(name)], max_tokens=8))
    assert run(alone).items() <= streams.items()
    stats, kv = engine.stats(), world.homes[0].heads.kv
    assert len(cached) > 3 and not engine.scheduler.pool.doubtful & cached
    assert (kv.num_fetched_bytes > 0) == (region in OF_KV and shadow == "mirror")
    if region in OF_KV and shadow == "off":
        assert 64 <= stats.prefix_cache_hits < 2 * 64 and stats.num_broken_tokens == BLOCK_SIZE
    else:
        assert (stats.prefix_cache_hits, stats.num_broken_tokens) == (2 * 64, 0)


# a head that moves


def test_a_head_takes_its_kv_along(make_world):
    """Both workers have the weights of all heads; the other one is preferred now, and then the first one again."""
    world = make_world(places={0: EVERYTHING, 1: EVERYTHING})
    engine = world.engine()
    add_streams(engine)

    def turn_around() -> None:
        world.workers.reverse()
        world.publish()

    def check() -> None:
        assert not world.homes[0].heads.kv.is_moving

    events = {4: turn_around, 8: check, 9: turn_around}
    assert run(engine, world, events) == expected_streams(world)
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_lost_tokens) == (0, 0) and stats.num_regained_bytes > 0


def test_streams_go_on_while_a_head_takes_its_kv_along(make_world, monkeypatch):
    """Every step has its tokens; then the heads are asked where they are now."""
    monkeypatch.setattr(BESIDE, 1)
    world = make_world(places={0: EVERYTHING, 1: EVERYTHING})
    engine, alone = world.engine(), world.engine_alone(world.decoder(has_heads=True))
    kv, streams = world.homes[0].heads.kv, {}
    for one in (engine, alone):
        one.add(spec("a", random_tokens(200, seed=1), max_tokens=20))
        one.add(spec("b", random_tokens(90, seed=2), max_tokens=20))
    while len(streams) < 2:
        for output in engine.step().outputs:
            streams.setdefault(output.id, []).append(output.token)
    world.workers.reverse()
    world.publish()
    num_moving = 0
    while kv.is_moving:
        result = engine.step()
        assert len(result.outputs) == 2 and result.kv_lost is None
        for output in result.outputs:
            streams[output.id].append(output.token)
        num_moving += 1
    assert num_moving > 3, "a little at a time"
    assert result.regained.num_lost == 0 and set(kv.at.rank_LG.flat) == {world.workers[0].rank}
    while engine.has_work:
        for output in engine.step().outputs:
            streams[output.id].append(output.token)
    assert streams == run(alone)
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("dies", [0, 1], ids=["the new place", "the old place"])
@pytest.mark.parametrize("memory_lost", [False, True])
def test_a_worker_dies_while_kv_is_copied_beside_steps(make_world, monkeypatch, dies, memory_lost):
    monkeypatch.setattr(BESIDE, 1)
    world = make_world(places={0: EVERYTHING, 1: EVERYTHING})
    engine, alone = world.engine(), world.engine_alone(world.decoder(has_heads=True))
    for one in (engine, alone):
        one.add(spec("a", random_tokens(200, seed=1), max_tokens=24))

    def turn_around() -> None:
        world.workers.reverse()
        world.publish()

    def die() -> None:
        assert world.homes[0].heads.kv.is_moving
        world.workers[dies].die()
        world.workers[dies].replace(memory_lost=memory_lost)

    assert run(engine, world, {7: turn_around, 9: die}) == run(alone)
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_lost_tokens) == (0, 0)


@pytest.mark.parametrize("turn", [1, 2, 5])
def test_a_worker_dies_while_it_fetches(make_world, turn):
    world = make_world(3, places={0: [(0, 0), (1, 1)], 1: [(0, 1)], 2: [(1, 0)]})
    engine = world.engine()
    add_streams(engine)
    worker, asked = world.workers[0], []

    def dies(call, batch) -> bool:
        asked.extend([call] if call == FETCH else [])
        return len(asked) == turn

    def lose_twice() -> None:
        lose(worker)
        worker.fault = dies

    assert run(engine, world, {6: lose_twice}) == expected_streams(world)
    stats = engine.stats()
    assert len(asked) >= turn and (stats.num_preemptions, stats.num_lost_tokens) == (0, 0)


def test_streams_wait_while_a_head_has_no_place(make_world):
    world = make_world()
    engine = world.engine()
    add_streams(engine)
    for _ in range(5):
        engine.step()
    num_computed = {s.id: s.num_computed for s in engine.scheduler.running}
    world.workers[1].die()
    for _ in range(3):
        with pytest.raises(StepAbandoned, match="no place"):
            engine.step()
    assert {s.id: s.num_computed for s in engine.scheduler.running} == num_computed
    world.workers[1].replace(memory_lost=True)
    engine.step()
    assert engine.stats().num_lost_tokens == 0


def test_a_head_that_had_no_place_while_its_memory_was_lost_is_not_taken_for_what_it_was(make_world):
    """The new memory is known, because of another head in it, when this one gets its place there."""
    world = make_world(3, places={0: EVERYTHING[:2], 1: EVERYTHING[2:3], 2: EVERYTHING[3:]})
    engine = world.engine()
    add_streams(engine)
    first, second, third = world.workers

    def change(worker, heads, memory_lost: bool = False) -> None:
        worker.die()
        worker.heads = heads
        worker.replace(memory_lost=memory_lost)

    def lose_one_of_two() -> None:
        change(first, EVERYTHING[1:2], memory_lost=True)
        change(second, [])
        change(third, EVERYTHING[2:])  # one is displaced, so the home looks where everything is
        with pytest.raises(StepAbandoned, match="no place"):
            engine.step()
        change(first, EVERYTHING[:2])

    assert run(engine, world, {6: lose_one_of_two}) == expected_streams(world)
    assert engine.stats().num_lost_tokens == 0


# a home


def serve(engine, num_steps: int) -> dict[str, list[int]]:
    streams: dict[str, list[int]] = {}
    for _ in range(num_steps):
        for output in engine.step().outputs:
            streams.setdefault(output.id, []).append(output.token)
        engine.log_step()
    return streams


def take_over(engine, world, streams, own: Log) -> None:
    """What the gateway and a worker do with the streams of a home that is gone."""
    lost = Log(world.homes[0].log_fd, world.log_shape(), world.homes[0].log.elsewhere)
    for i in range(4):
        told = {"max_tokens": 12, "temperature": 0.7 * (i % 2), "seed": i}
        begun = spec(f"r{i}", random_tokens(5 + 13 * i, seed=i), **told)
        known = begun.after(streams[f"r{i}"])
        engine.add(known, Saved.of(lost, lost.find(key_of(f"r{i}")), own))


@pytest.mark.parametrize("device", [False, True], ids=["the home", "the home and a worker, with its memory"])
def test_another_home_goes_on(make_world, device):
    """Its blocks have other numbers: all workers bring the KV over, each for its heads."""
    world = make_world(num_homes=2)
    first, second = world.engine(0), world.engine(1)
    add_streams(first)
    streams = serve(first, 5)
    if device:
        world.workers[0].die()
    take_over(second, world, streams, world.homes[1].log)
    if device:
        with pytest.raises(StepAbandoned):
            second.step()
        world.workers[0].replace(memory_lost=True)
    rest = run(second, offset={id: len(tokens) for id, tokens in streams.items()}, world=world)
    expected = expected_streams(world)
    assert {id: streams[id] + rest[id] for id in expected} == expected
    stats = second.stats()
    assert (stats.num_broken_tokens, stats.num_known_tokens) == (0, 0)
    assert stats.num_restored_tokens == sum(5 + 13 * i for i in range(4)) + sum(map(len, streams.values())) - 4


def test_the_next_home_in_the_seat_uses_blocks_where_they_are(make_world):
    world = make_world()
    first = world.engine(0)
    add_streams(first)
    streams = serve(first, 5)
    bytes_before = world.homes[0].heads.kv.num_fetched_bytes
    second = world.engine(0, log=Log(world.homes[0].log_fd, world.log_shape(), world.homes[0].log.elsewhere))
    take_over(second, world, streams, second._journal.log)
    rest = run(second, offset={id: len(tokens) for id, tokens in streams.items()}, world=world)
    expected = expected_streams(world)
    assert {id: streams[id] + rest[id] for id in expected} == expected
    assert second.stats().num_known_tokens == 0 and world.homes[0].heads.kv.num_fetched_bytes == bytes_before


def test_blocks_of_a_home_whose_process_has_not_ended_yet_are_used_last(make_world):
    """Its successor in the seat has records of its own then, and the same range of blocks."""
    world = make_world()
    first = world.engine(0)
    add_streams(first)
    streams = serve(first, 5)
    held = {block for sequence in first.scheduler.running for block in sequence.blocks}
    shape = world.log_shape()
    second = world.engine(0, log=Log(new_memory(shape.head_bytes), shape, NoBlocks()))
    logs = KeptLogs(lambda fd, _: Log(fd, shape, NoBlocks()), second._journal.log, shares_blocks_with=Rank(0))
    offer_log(logs, WorkerId(Rank(0), Incarnation(1)), os.dup(world.homes[0].log_fd))
    logs.sweep(second)
    assert {*second.scheduler.pool.free_list()[-len(held) :]} == held
    take_over(second, world, streams, second._journal.log)
    rest = run(second, offset={id: len(tokens) for id, tokens in streams.items()}, world=world)
    expected = expected_streams(world)
    assert {id: streams[id] + rest[id] for id in expected} == expected
    assert second.stats().num_known_tokens == 0


# what a worker refuses

_WORDS_AT, NUM_TOKENS = 128, 5  # csrc/lanes/lane.h
CALLS_AT = _WORDS_AT + 8 * NUM_TOKENS
TAMPERED = {
    "too many heads": (8, "q", 1 << 40),
    "negative heads": (8, "q", -1),
    "too many blocks": (16, "q", 1 << 40),
    "fewer blocks than tokens need": (16, "q", 0),
    "too many tokens": (24, "q", 1 << 40),
    "negative tokens": (24, "q", -1),
    "no such call": (CALLS_AT, "i", 99),
    "a call that is not about heads": (CALLS_AT, "i", 1),
    "no such slot": (CALLS_AT + 8, "i", 77),
    "a block that no pool has": (CALLS_AT + 16, "i", 1 << 20),
    "a negative block": (CALLS_AT + 16, "i", -1),
    "into a block of another home": (CALLS_AT + 20, "i", BLOCKS_PER_HOME),
    "into a block that no home has": (CALLS_AT + 20, "i", 1 << 20),
    "into a negative block": (CALLS_AT + 20, "i", -1),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_fetch_that_is_wrong_is_refused_and_nothing_is_written(make_world, name):
    """Two heads, one block of five tokens."""
    world = make_world(num_homes=2)
    engine, home, worker = world.engine(), world.homes[0], world.workers[0]
    engine.add(spec("a", random_tokens(NUM_TOKENS, seed=1), max_tokens=4))
    engine.step()
    (stream,) = engine.scheduler.running
    told = chains(stream.tokens[:NUM_TOKENS])
    at, kind, value = TAMPERED[name]
    lane, fetch_at = home.peers.trusted(worker.rank).lane, world.shape.layout().fetch_at
    before = worker.half.kv_pool.clone()
    home.before_others = lambda: write(lane, fetch_at + at, kind, value)
    with pytest.raises(FetchFailed):
        home.heads.kv.fetch_all(stream.blocks, [3], NUM_TOKENS, told)
    assert worker.server.num_refused == 1 and torch.equal(worker.half.kv_pool, before)
    assert home.heads.kv.fetch_all(stream.blocks, [3], NUM_TOKENS, told) == NUM_TOKENS
