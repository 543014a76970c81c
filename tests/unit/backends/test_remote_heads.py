"""Heads in other processes: what workers refuse, and what becomes of streams when workers die."""

import ctypes
import struct

import numpy as np
import pytest
import torch

from everserve.errors import KvLost, StepAbandoned
from everserve.tables.calls import ShardKind
from everserve.tables.ids import Rank
from tests.support.in_process_heads import BLOCKS_PER_HOME, HeadWorld
from tests.support.models import model_directory, random_tokens
from tests.support.toy import spec
from tests.unit.backends.test_head_degrees import STEPS, Apart, logits, together

KIND = "qwen3-moe"
# Each layer's two heads on different workers, the other way round in the second layer; a third worker has none.
PLACES = {0: [(0, 0), (1, 1)], 1: [(0, 1), (1, 0)]}


@pytest.fixture
def directory():
    return model_directory(KIND, "float32")


@pytest.fixture
def make_world(directory):
    worlds = []

    def make(num_workers=2, **kwargs) -> HeadWorld:
        worlds.append(HeadWorld(directory, num_workers, **{"places": PLACES, **kwargs}))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def at_call(number: int, turn: int = 1):
    """Dies when it is asked for this call for the n-th time."""
    seen = []

    def fault(call, batch) -> bool:
        seen.extend([call] if call == number else [])
        return len(seen) == turn and call == number

    return fault


# a worker dies


@pytest.mark.parametrize("dies_after", [False, True], ids=["before it stores", "after it stored"])
@pytest.mark.parametrize("call", [0, 2], ids=["first layer", "second layer"])
def test_a_worker_dies_in_the_middle_of_a_step_and_its_memory_stays(make_world, directory, call, dies_after):
    world, alone = make_world(), together(directory)
    sequences = Apart(world)
    for step in STEPS[:2]:
        assert torch.equal(logits(sequences, step), logits(alone, step))
    worker = world.workers[1]
    worker.fault, worker.dies_after = at_call(call), dies_after
    for again in (False, True):  # the second time because it is still dead
        with pytest.raises(StepAbandoned) as abandoned:
            logits(sequences, STEPS[2])
        assert not isinstance(abandoned.value, KvLost) and (again or abandoned.value.layer == call)
    worker.replace()
    with pytest.raises(KvLost):
        logits(sequences, STEPS[2])
    assert check_kv(sequences) == {0: 34, 1: 7}, "nothing was damaged"
    for step in STEPS[2:]:
        assert torch.equal(logits(sequences, step), logits(alone, step))


def check_kv(sequences: Apart) -> dict[int, int]:
    """What a home does when another process has the memory of a worker. Rows have no chains here."""
    kv, found = sequences.home.heads.kv, {}
    kv.look()
    for name, num_tokens in sequences._lengths.items():
        found[name] = kv.fetch(sequences._blocks[name], num_tokens, np.zeros(num_tokens, np.uint64))
    kv.settle()
    return found


def run(engine, world=None, events=None, offset=None) -> dict[str, list[int]]:
    """All streams to their end. `events[n]` happens before step n; where a step is abandoned, the dead are replaced.
    `offset`: how many tokens of each stream are known."""
    streams: dict[str, list[int]] = {}
    for number in range(400):
        if events and number in events:
            events[number]()
        if not engine.has_work:
            break
        try:
            result = engine.step()
        except StepAbandoned:
            for worker in world.workers:
                if worker.is_dead:
                    worker.replace()
            engine.check()
            continue
        for output in result.outputs:
            assert output.index == len(streams.setdefault(output.id, [])) + (offset or {}).get(output.id, 0)
            streams[output.id].append(output.token)
        engine.check()
    assert not engine.has_work
    return streams


def add_streams(engine, num: int = 4) -> None:
    for i in range(num):
        length = 5 + 13 * i
        engine.add(spec(f"r{i}", random_tokens(length, seed=i), max_tokens=12, temperature=0.7 * (i % 2), seed=i))


def expected_streams(world) -> dict[str, list[int]]:
    engine = world.engine_alone(world.decoder(has_heads=True))
    add_streams(engine)
    return run(engine)


def test_streams_of_an_engine(make_world):
    world = make_world(3, places=None, seed=7)
    engine = world.engine()
    add_streams(engine)
    assert run(engine, world) == expected_streams(world)
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("has_log", [False, True], ids=["without a log", "with a log"])
@pytest.mark.parametrize("memory_lost", [False, True], ids=["memory kept", "memory lost"])
def test_a_worker_is_replaced_between_steps(make_world, memory_lost, has_log):
    """Without a log nothing certifies what the dead process has left. With one neither the memory that was kept nor
    the mirror of what was lost is computed again."""
    world = make_world(keeps_kv=has_log)

    def replace() -> None:
        world.workers[0].die()
        world.workers[0].replace(memory_lost=memory_lost)

    engine = world.engine()
    add_streams(engine)
    assert run(engine, world, {3: replace, 9: replace}) == expected_streams(world)
    num_running = 4
    assert engine.stats().num_preemptions == (0 if has_log else 2 * num_running)
    assert world.homes[0].suspected == []


def test_lost_memory_is_noticed_in_the_middle_of_a_step(make_world):
    """A worker dies after the first layer, and its successor has nothing: what was stored there is lost too."""
    world = make_world()
    engine, expected = world.engine(), expected_streams(world)
    add_streams(engine)
    worker = world.workers[0]

    def replace_and_lose(call, batch) -> bool:
        if call == 2 and worker.incarnation == 1:
            worker.die()
            worker.replace(memory_lost=True)
        return False

    streams = run(engine, world, {4: lambda: setattr(worker, "fault", replace_and_lose)})
    assert streams == expected and engine.stats().num_preemptions == 4


def test_nothing_is_cached_after_a_loss(make_world):
    world = make_world()
    engine = world.engine()
    prompt = random_tokens(60, seed=3)
    engine.add(spec("first", prompt, max_tokens=4))
    run(engine, world)
    assert engine.scheduler.pool.block_of
    world.workers[1].die()
    world.workers[1].replace(memory_lost=True)
    engine.add(spec("second", prompt, max_tokens=4))
    result = engine.step()
    assert result.kv_lost is not None and not engine.scheduler.pool.block_of and result.outputs == []
    alone = world.engine_alone(world.decoder(has_heads=True))
    alone.add(spec("second", prompt, max_tokens=4))
    assert run(engine, world) == run(alone)


def test_a_head_whose_kv_is_elsewhere_is_computed_again(make_world):
    """Two workers have the weights of every head. When the first of them dies the other takes over, without KV."""
    everything = [(layer, head) for layer in (0, 1) for head in (0, 1)]
    world = make_world(places={0: everything, 1: everything})
    engine, expected = world.engine(), expected_streams(world)
    add_streams(engine)
    streams = run(engine, world, {5: world.workers[0].die})
    assert streams == expected and engine.stats().num_preemptions >= 4


def test_a_head_that_is_not_in_its_slot_any_more(make_world):
    world = make_world()
    sequences = Apart(world)
    logits(sequences, STEPS[0])
    half = world.workers[1].half
    half.clear(1, list(half.held[1]).index(0))
    with pytest.raises(StepAbandoned, match="no place"):
        logits(sequences, STEPS[1])
    assert world.homes[0].suspected == []


def test_homes_do_not_notice_each_other(make_world):
    """One home's requests are refused, another's streams go on."""
    world = make_world(num_homes=2)
    engines = [world.engine(index) for index in (0, 1)]
    for engine in engines:
        add_streams(engine)
    expected = expected_streams(world)
    world.homes[1].heads.kv.at.pools[:] = 12345  # as if it had KV of another pool
    lost = engines[1].step()
    assert lost.kv_lost is not None
    assert run(engines[0], world) == expected and run(engines[1], world) == expected
    assert engines[0].stats().num_preemptions == 0


# what a worker refuses


class Refusals:
    """One home's lane to one worker, and what is written there before the worker looks."""

    def __init__(self, world: HeadWorld) -> None:
        self.world, self.sequences = world, Apart(world)
        logits(self.sequences, STEPS[0])
        self.pool = world.workers[0].half.kv_pool.clone()

    def check(self, tamper) -> None:
        """A request whose page was changed on its way."""
        home, worker = self.world.homes[0], self.world.workers[0]
        lane = home.peers.trusted(worker.rank).lane
        home.before_others = lambda: tamper(lane)
        num_refused = worker.server.num_refused
        with pytest.raises(StepAbandoned):
            logits(self.sequences, STEPS[1])
        assert worker.server.num_refused > num_refused
        assert torch.equal(worker.half.kv_pool, self.pool), "nothing was written"


def write(lane: int, at: int, kind: str, *values: int) -> None:
    data = struct.pack(kind, *values)
    ctypes.memmove(lane + at, data, len(data))


_PAGE_AT, _WORDS_AT = 128, 192  # csrc/lanes/lane.h
NUM_ROWS = 8  # of STEPS[1]
STARTS_AT = _WORDS_AT + 8 * NUM_ROWS
TABLES_AT = STARTS_AT + 4 * 3
TAMPERED = {
    "another page": (_PAGE_AT, "Q", 77),
    "a page that is being written": (_PAGE_AT, "Q", 0),
    "too many rows": (_PAGE_AT + 16, "q", 1 << 40),
    "no rows": (_PAGE_AT + 16, "q", 0),
    "too many sequences": (_PAGE_AT + 24, "q", 1 << 20),
    "negative sequences": (_PAGE_AT + 24, "q", -1),
    "a wide table": (_PAGE_AT + 32, "q", 1 << 31),
    "no table": (_PAGE_AT + 32, "q", 0),
    "a negative position": (_WORDS_AT, "i", -16),
    "a position beyond the table": (_WORDS_AT, "i", 1 << 20),
    "a KV slot of another position": (_WORDS_AT + 4 * NUM_ROWS, "i", 5),
    "rows of no sequence": (STARTS_AT, "i", 1),
    "sequences that go back": (STARTS_AT + 4, "i", 1 << 30),
    "a block of another home": (TABLES_AT, "i", BLOCKS_PER_HOME),
    "a block that no home has": (TABLES_AT, "i", 1 << 24),
    "a negative block": (TABLES_AT, "i", -1),
    "another pool": (_PAGE_AT + 8, "q", 4711),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_page_that_is_wrong_is_refused_and_nothing_is_written(make_world, name):
    world = make_world(num_homes=2)
    Refusals(world).check(lambda lane: write(lane, *TAMPERED[name]))


def test_whole_pages_of_another_home_are_refused(make_world):
    """Consistent in itself, with blocks outside its range: the sequence lies in the other home's blocks."""
    world = make_world(num_homes=2)
    sequences = Apart(world)
    sequences._free = [BLOCKS_PER_HOME + 3]
    with pytest.raises(StepAbandoned):
        logits(sequences, {0: (0, 5)})
    assert {reason for _, reason in world.homes[0].suspected} == {"refused: bad request"}
    assert all(not worker.half.kv_pool.any() for worker in world.workers)


def test_a_request_of_a_step_that_is_over_writes_nothing(make_world):
    """A worker is slow; another dies; the step is abandoned and its blocks belong to another stream when the slow
    worker finds the request."""
    world = make_world()
    slow, dying = world.workers
    sequences, home = Apart(world), world.homes[0]
    first_of_slow, slow.turn = slow.turn, lambda: False
    dying.fault = at_call(0)
    with pytest.raises(StepAbandoned):
        logits(sequences, {0: (0, 9)})
    dying.replace()
    home.heads.kv.forget()
    slow.turn = first_of_slow
    num_refused = slow.server.num_refused
    other = Apart(world)  # the same blocks, for another stream
    alone = together(world.directory)
    assert torch.equal(logits(other, {1: (0, 9)}), logits(alone, {1: (0, 9)}))
    assert slow.server.num_refused == num_refused + 1, "the old request"
    assert torch.equal(logits(other, {1: (9, 12)}), logits(alone, {1: (9, 12)}))
    assert home.peers.num_stale >= 1


def test_heads_and_experts_are_served_by_one_worker(make_world):
    world = make_world(1, places={0: PLACES[0] + PLACES[1]})
    sequences = Apart(world)
    logits(sequences, STEPS[0])
    kinds = [world.calls[call].kind for call, _ in world.workers[0].batches]
    assert kinds == [ShardKind.HEAD, ShardKind.EXPERT] * 2
    rows_of = world.workers[0].server.rows_of
    assert [sum(rows_of[call]) for call in (0, 2)] == [33 * 2, 33 * 2]
    assert world.homes[0].rank == Rank(0)
