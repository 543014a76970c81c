"""KV of divided heads on a device: words beside every token, heads that move with their KV, homes whose streams go on
from records. Memory is the host's, kernels are interpreted."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everserve.backends.cuda.lanes import head_kv
from everserve.backends.cuda.log import head_fetcher, head_kernels, head_mirror
from everserve.errors import FetchFailed, StepAbandoned
from everserve.kvlog.chains import chains
from everserve.kvlog.log import Log, NoBlocks
from everserve.tables.ids import Rank
from everserve.tables.memory import Kind
from everserve.tables.requests import RequestSpec
from tests.kernels.toy_head_pools import BLOCK_SIZE, BLOCKS_PER_HOME, FIRST_WORKER, HEADS, HeadPoolWorld, Home
from tests.support.examples import examples
from tests.support.toy import run_alone, spec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host's memory is not the device's")
WORKERS = [Rank(FIRST_WORKER + i) for i in range(3)]


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Programs without a row cost time too; and no other process answers meanwhile."""
    monkeypatch.setattr(head_kernels, "NUM_PROGRAMS", 2)
    monkeypatch.setattr(head_kv, "ANSWER_WITHIN_S", 0.0)


def step(home: Home, streams: dict[str, list[int]]) -> None:
    for output in home.engine.step(meanwhile=home.engine.log_step).outputs:
        assert output.index == len(streams.setdefault(output.id, [])), "a gap or a duplicate"
        streams[output.id].append(output.token)


def finish(home: Home, streams: dict[str, list[int]]) -> None:
    while home.engine.has_work:
        step(home, streams)
    home.engine.log_step()
    home.engine.check()


class Running:
    """A home with streams that have come some way."""

    def __init__(self, **world: int) -> None:
        self.world = HeadPoolWorld(**world)
        self.home = self.world.homes[0]
        self.specs = [spec("a", [*range(11)], max_tokens=12), spec("b", [*range(30, 35)], max_tokens=10, seed=3)]
        self.streams: dict[str, list[int]] = {}
        for request in self.specs:
            self.home.engine.add(request)
        for _ in range(3):
            step(self.home, self.streams)

    def check(self, home: Home | None = None) -> None:
        finish(home or self.home, self.streams)
        assert self.streams == {request.id: run_alone(request) for request in self.specs}

    def resume(self, home: Home, log: Log) -> None:
        for request in self.specs:
            known: RequestSpec = request.after(self.streams[request.id])
            home.engine.add(known, home.saved(log, request.id))

    @property
    def num_tokens(self) -> int:
        """That are computed."""
        return sum(sequence.num_computed for sequence in self.home.engine.scheduler.running)


def test_heads_that_move_bring_their_kv():
    running = Running()
    before, world = running.num_tokens, running.world
    for head in HEADS:
        world.move(head, WORKERS[(WORKERS.index(world.routes[head][0]) + 1) % 3])
    step(running.home, running.streams)
    stats = running.home.engine.stats()
    assert (stats.num_lost_tokens, stats.num_regained_tokens) == (0, before)
    assert stats.num_regained_bytes == before * len(HEADS) * 16
    running.check()


def test_out_of_the_memory_of_a_worker_that_has_died():
    running = Running()
    world, dead = running.world, running.world.routes[HEADS[0]][0]
    world.die(dead)
    with pytest.raises(StepAbandoned):
        running.home.engine.step()
    others = [rank for rank in WORKERS if rank != dead]
    for head in HEADS:
        if world.routes[head] == [dead]:
            world.move(head, others[0])
    step(running.home, running.streams)
    assert running.home.engine.stats().num_lost_tokens == 0
    world.revive(dead)
    world.move(HEADS[0], dead)  # back to where an older part of its KV is
    running.check()
    assert running.home.engine.stats().num_lost_tokens == 0


@pytest.mark.parametrize("loses_all", [False, True])
def test_what_a_lost_device_had_is_computed_again(loses_all):
    running = Running()
    world, before = running.world, running.num_tokens
    for rank in {world.routes[head][0] for head in (HEADS if loses_all else HEADS[:1])}:
        world.die(rank, memory_lost=True)
        world.revive(rank)
    step(running.home, running.streams)  # finds that out
    assert running.home.engine.stats().num_lost_tokens == before
    running.check()


@pytest.mark.parametrize("has_mirrors", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_what_a_dead_worker_has_left_is_checked_before_it_is_used(has_mirrors, share):
    """Its successor goes on with it in place."""
    running = Running(has_mirrors=has_mirrors)
    world, home, before = running.world, running.home, running.num_tokens
    rank = world.routes[HEADS[0]][0]
    home.engine.log_step()
    home.fetcher.side.wait()
    world.die(rank)
    with pytest.raises(StepAbandoned):
        home.engine.step()
    world.seats[rank].damage(share, seed=1)
    world.revive(rank)
    for _ in range(2):  # the first one finds that it is another process
        step(home, running.streams)
    stats = home.engine.stats()
    assert (stats.num_lost_tokens > 0) == (share > 0 and not has_mirrors)
    assert (stats.num_regained_bytes > 0) == (share > 0 and has_mirrors)
    assert stats.num_regained_tokens + stats.num_lost_tokens >= before
    running.check()


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_cached_prefix_that_a_dead_worker_has_left_is_checked_before_it_is_used(share):
    world = HeadPoolWorld()
    home, streams = world.homes[0], {}
    prompt = [*range(17)]
    specs = [spec(name, [*prompt, number], max_tokens=5) for number, name in enumerate("abc")]
    home.engine.add(specs[0])
    finish(home, streams)
    rank = world.routes[HEADS[0]][0]
    world.die(rank)
    world.seats[rank].damage(share, seed=1)
    world.revive(rank)
    for request in specs[1:]:
        home.engine.add(request)
        finish(home, streams)
    assert streams == {request.id: run_alone(request) for request in specs}
    stats = home.engine.stats()
    if share:
        assert stats.prefix_cache_hits < 2 * 16 and stats.num_broken_tokens == BLOCK_SIZE
    else:
        assert (stats.prefix_cache_hits, stats.num_broken_tokens) == (2 * 16, 0)


def test_a_piece_that_another_head_gets_costs_nothing_else():
    """The identity of all KV of a worker is another one then: what is there is looked at, and is right."""
    running = Running()
    world, rank = running.world, running.world.routes[HEADS[0]][0]
    seat = world.seats[rank]
    pool = seat.table.pool
    seat.table.in_use = {head for head in HEADS if world.routes[head] == [rank]}
    for number in range(1 + len(HEADS) - len(seat.table.in_use)):
        seat.load((7, number))
        seat.table.in_use.discard((7, number))
    assert seat.table.pool != pool
    running.home.num_changes += 1
    running.check()
    stats = running.home.engine.stats()
    assert stats.num_lost_tokens == 0 and stats.num_regained_tokens > 0


@pytest.mark.parametrize("moves", [False, True], ids=["in its seat", "elsewhere"])
def test_streams_of_a_home_that_dies_go_on_from_its_records(moves):
    running = Running()
    world = running.world
    running.home.engine.log_step()
    world.restart(0)
    home = world.homes[int(moves)]
    before = running.num_tokens
    running.resume(home, Log(running.home.log_fd, world.log_shape, NoBlocks()))
    step(home, running.streams)
    stats = home.engine.stats()
    assert stats.num_broken_tokens == 0
    assert stats.num_restored_tokens + stats.prefix_cache_hits == before, "nothing is computed again"
    running.check(home)


def test_a_home_with_other_places_finds_what_it_needs():
    """Heads have moved, and the dead home had not noticed: its last tokens are where they were before."""
    running = Running()
    world = running.world
    running.home.engine.log_step()
    for head in HEADS[:2]:
        world.seats[WORKERS[2]].load(head)
        world.routes[head] = [WORKERS[2]]
    world.restart(0)
    home = world.homes[1]
    home.follow()
    running.resume(home, Log(running.home.log_fd, world.log_shape, NoBlocks()))
    step(home, running.streams)
    assert home.engine.stats().num_restored_tokens == running.num_tokens
    running.check(home)


@pytest.mark.parametrize("what", ["keys", "word", "of another head"])
def test_what_does_not_fit_shortens_what_is_believed(what):
    running = Running()
    world, home, head = running.world, running.home, HEADS[1]
    seat = world.seats[world.routes[head][0]]
    sequence = next(s for s in home.engine.scheduler.running if s.id == "a")
    num_tokens, block, piece = sequence.num_computed, sequence.blocks[1], seat.table.find(head)
    home.fetcher.side.wait()
    if what == "keys":
        seat.pool[block, piece, 0, 2] ^= 1
    elif what == "word":
        at = seat.mapping.address + world.plan.words_at + ((block * world.plan.num_pieces + piece) * BLOCK_SIZE + 2) * 8
        world.driver.write(at, bytes(8))
    else:
        seat.table.complete(piece, (7, 7))
    chains_T = chains(sequence.tokens[:num_tokens])
    ranks_H = np.array([world.routes[one][0] for one in HEADS], np.int32)
    if what == "of another head":
        with pytest.raises(FetchFailed):
            home.fetcher.aim(range(len(HEADS)), ranks_H)
        return
    home.fetcher.aim(range(len(HEADS)), ranks_H)
    assert home.fetcher.fetch(sequence.blocks, sequence.blocks, num_tokens, chains_T) == BLOCK_SIZE + 2
    other = chains([1, *sequence.tokens[1:num_tokens]])
    assert home.fetcher.fetch(sequence.blocks, sequence.blocks, num_tokens, other) == 0


def test_in_several_parts_and_launches(monkeypatch):
    monkeypatch.setattr(head_fetcher, "_TOKENS_AT_ONCE", 2 * BLOCK_SIZE)
    monkeypatch.setattr(head_fetcher, "_LAUNCH_BYTES", 1)
    running = Running()
    for head in HEADS:
        running.world.move(head, WORKERS[(WORKERS.index(running.world.routes[head][0]) + 1) % 3])
    step(running.home, running.streams)
    assert running.home.engine.stats().num_lost_tokens == 0
    running.check()


class TestLateRequests:
    """A worker that is not trusted any more has been asked in a step that was abandoned. It wakes up, is trusted again,
    and stores what it was asked for, in the slots of the latest page."""

    def setup_method(self) -> None:
        self.running = running = Running()
        world, head = running.world, HEADS[0]
        self.seat = seat = world.seats[world.routes[head][0]]
        world.move(head, next(rank for rank in WORKERS if rank != seat.rank))
        step(running.home, running.streams)
        slots = np.array([s.blocks[-1] * BLOCK_SIZE for s in running.home.engine.scheduler.running])
        seat.late[running.home.rank] = lambda: seat.store(head, slots, np.array([1, 1]))
        world.move(head, seat.rank)

    def test_nothing_is_fetched_to_it_before(self) -> None:
        running = self.running
        with pytest.raises(StepAbandoned, match="not ready"):
            running.home.engine.step()
        self.seat.late.pop(running.home.rank)()
        running.check()
        assert running.home.engine.stats().num_lost_tokens == 0

    def test_one_that_never_answers_is_asked_again(self) -> None:
        running = self.running
        for _ in range(20):
            with pytest.raises(StepAbandoned, match="not ready"):
                running.home.engine.step()
        running.check()
        assert running.home.engine.stats().num_lost_tokens > 0


def test_a_home_without_the_memory_of_a_seat_computes_again():
    running = Running()
    world, head = running.world, HEADS[0]
    target = next(rank for rank in WORKERS if rank != world.routes[head][0])
    running.home.pools.withdraw(target, Kind.KV_PIECES)
    world.move(head, target)
    step(running.home, running.streams)
    assert running.home.engine.stats().num_lost_tokens > 0
    running.check()
    running.home.pools.offer(target, Kind.KV_PIECES, os.dup(world.seats[target].fd))
    running.home.pools.withdraw(target, Kind.KV_PIECES)
    running.home.pools.sweep()
    assert running.home.pools.pool_of(target) == 0


def test_blocks_of_homes_are_apart():
    running = Running()
    blocks = {block for s in running.home.engine.scheduler.running for block in s.blocks}
    assert max(blocks) < BLOCKS_PER_HOME
    other = running.world.homes[1]
    other.engine.add(spec("c", [1, 2, 3], max_tokens=3))
    step(other, {})
    assert all(block >= BLOCKS_PER_HOME for s in other.engine.scheduler.running for block in s.blocks)


# -- mirrors ---------------------------------------------------------------------------------------


def lose_all(world: HeadPoolWorld) -> None:
    for rank in WORKERS:
        world.die(rank, memory_lost=True)
        world.revive(rank)


def test_from_its_mirror_a_home_has_what_lost_devices_had():
    running = Running(has_mirrors=True)
    before = running.num_tokens
    running.home.engine.log_step()
    lose_all(running.world)
    step(running.home, running.streams)
    stats = running.home.engine.stats()
    assert (stats.num_lost_tokens, stats.num_regained_tokens) == (0, before)
    running.home.engine.log_step()
    lose_all(running.world)  # once more: what was fetched, and what was computed since, is in the mirror too
    running.check()
    assert running.home.engine.stats().num_lost_tokens == 0


@pytest.mark.parametrize("bounce_bytes", [1, 1 << 20])
def test_from_the_mirror_of_a_home_that_was_lost_with_its_device(monkeypatch, bounce_bytes):
    """Its streams go on at another one, whose mirror has them from then on."""
    monkeypatch.setattr(head_mirror, "_BOUNCE_BYTES", bounce_bytes)
    running = Running(has_mirrors=True)
    world, home = running.world, running.world.homes[1]
    running.home.engine.log_step()
    lose_all(world)
    before = running.num_tokens
    running.resume(home, Log(running.home.log_fd, world.log_shape, NoBlocks()))
    step(home, running.streams)
    assert home.engine.stats().num_restored_tokens == before
    home.engine.log_step()
    lose_all(world)
    running.check(home)
    assert home.engine.stats().num_lost_tokens == 0


def test_the_next_home_in_a_seat_goes_on_with_its_mirror():
    running = Running(has_mirrors=True)
    running.home.engine.log_step()
    lose_all(running.world)
    running.world.restart(0)
    home, before = running.world.homes[0], running.num_tokens
    running.resume(home, Log(running.home.log_fd, running.world.log_shape, NoBlocks()))
    step(home, running.streams)
    stats = home.engine.stats()
    assert stats.num_restored_tokens + stats.prefix_cache_hits == before
    running.check(home)


def test_what_is_out_of_reach_of_the_device_is_computed_again():
    running = Running(has_mirrors=True)
    running.home.fetcher.mirrors.own.num_reached = 1
    lose_all(running.world)
    step(running.home, running.streams)
    stats = running.home.engine.stats()
    assert stats.num_lost_tokens > 0 and stats.num_regained_tokens <= BLOCK_SIZE
    running.check()


@pytest.mark.parametrize("is_swept", [False, True])
def test_what_the_side_has_not_copied_yet_is_computed_again(is_swept):
    """The last step's: one token of each stream. It is not taken for what is in the new memory."""
    running = Running(has_mirrors=True)
    lose_all(running.world)
    if is_swept:
        running.home.pools.sweep()
    step(running.home, running.streams)
    assert running.home.engine.stats().num_lost_tokens == len(running.specs)
    running.check()


# -- heads without a place ---------------------------------------------------------------------------


class TestHeadsWithoutAPlace:
    """A head had no place when what the home had of it was lost. The home has looked at the new pool before, because
    of other heads, when this one gets its place there again."""

    def setup_method(self) -> None:
        self.running = running = Running(has_mirrors=True)
        self.world, self.rank = running.world, WORKERS[0]
        for head in HEADS:
            self.world.move(head, self.rank if head != HEADS[2] else WORKERS[1])
        step(running.home, running.streams)
        running.home.engine.log_step()
        self.world.take_away(HEADS[0])

    def look(self) -> None:
        self.world.move(HEADS[2], WORKERS[2])  # this one is displaced
        with pytest.raises(StepAbandoned):
            self.running.home.engine.step()

    def check(self) -> None:
        self.world.move(HEADS[0], self.rank)
        self.running.check()
        assert self.running.home.engine.stats().num_lost_tokens == 0

    def test_its_device_returns_with_other_heads_first(self) -> None:
        self.world.die(self.rank, memory_lost=True)
        self.world.revive(self.rank)
        self.look()
        self.check()

    def test_it_is_loaded_again_before_routes_say_so(self) -> None:
        """Its piece had been given to another one, which has stored KV of its own there."""
        seat = self.world.seats[self.rank]
        for number in range(len(HEADS) - len(seat.table.in_use)):
            seat.load((7, number))
            seat.pool[:, seat.table.find((7, number))] = -1
            seat.table.in_use.discard((7, number))
        assert seat.table.find(HEADS[0]) is None
        seat.load(HEADS[0])
        self.look()
        self.check()


# -- random schedules ------------------------------------------------------------------------------

requests = st.tuples(st.integers(1, 14), st.integers(0, 2), st.integers(1, 8))
homes, ranks = st.integers(0, 1), st.sampled_from(WORKERS)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), homes, requests),
        st.tuples(st.just("steps"), homes, st.integers(1, 3)),
        st.tuples(st.just("move"), st.sampled_from(HEADS), ranks),
        st.tuples(st.just("take_away"), st.sampled_from(HEADS)),
        st.tuples(st.just("die"), ranks, st.sampled_from(["whole", "damaged", "lost"]), st.integers(-1, 1)),
        st.tuples(st.just("end"), homes, st.booleans()),
    ),
    min_size=3,
    max_size=12,
)


class Schedule:
    """Two homes and their streams. A worker that dies does so when it is asked in a certain layer, or at once (-1), and
    is back, with its memory, damaged or not, or without, when a step was abandoned."""

    def __init__(self, seed: int, has_mirrors: bool, num_pieces: int) -> None:
        self.world = HeadPoolWorld(seed=seed, has_mirrors=has_mirrors, num_pieces=num_pieces)
        self.world.before_call = self._before_call
        self.requests: dict[str, RequestSpec] = {}
        self.streams: dict[str, list[int]] = {}
        self.dies: dict[Rank, tuple[str, int]] = {}
        self.damaged: set[Rank] = set()

    def add(self, home: int, request: tuple[int, int, int]) -> None:
        length, seed, max_tokens = request
        id = f"r{len(self.requests)}"
        self.requests[id] = spec(id, [(seed + 3 * i) % 90 for i in range(length)], max_tokens=max_tokens, seed=seed)
        self.streams[id] = []
        self.world.homes[home].engine.add(self.requests[id])

    def die(self, rank: Rank, memory: str, layer: int) -> None:
        if layer < 0:
            self._die(rank, memory)
        else:
            self.dies[rank] = memory, layer

    def _die(self, rank: Rank, memory: str) -> None:
        self.world.die(rank, memory_lost=memory == "lost")
        if memory == "damaged":
            self.damaged.add(rank)

    def _before_call(self, home: Home, seat, layer: int) -> bool:
        memory, at = self.dies.get(seat.rank, ("whole", -1))
        if layer != at:
            return False
        del self.dies[seat.rank]
        self._die(seat.rank, memory)
        return True

    def _revive(self) -> None:
        for rank in WORKERS:
            if rank in self.damaged and not self.world.seats[rank].is_up:
                self.world.seats[rank].damage(0.05, seed=rank)
            self.world.revive(rank)
        self.damaged.clear()

    def move(self, head: tuple[int, int], rank: Rank) -> None:
        if self.world.seats[rank].is_up and self.world.has_room(head, rank):
            self.world.move(head, rank)

    def take_away(self, head: tuple[int, int]) -> None:
        self.world.take_away(head)

    def _give_places(self) -> None:
        for head in [head for head, places in self.world.routes.items() if not places]:
            self.world.move(head, next(rank for rank in WORKERS if self.world.has_room(head, rank)))

    def end(self, home: int, moves: bool) -> None:
        dead = self.world.restart(home)
        goes_on = self.world.homes[1 - home if moves else home]
        log = Log(dead.log_fd, self.world.log_shape, NoBlocks())
        for id in dead.engine.stream_ids():
            known = self.requests[id].after(self.streams[id])
            goes_on.engine.add(known, goes_on.saved(log, id))

    def steps(self, home: int, number: int) -> None:
        running = self.world.homes[home]
        for _ in range(number):
            running.pools.sweep()
            try:
                if running.engine.has_work:
                    step(running, self.streams)
            except StepAbandoned:
                running.engine.log_step()
                self._revive()
            running.engine.check()

    def finish(self) -> None:
        for _ in range(200):
            self._give_places()
            for home in (0, 1):
                self.steps(home, 1)
            if not any(home.engine.has_work for home in self.world.homes):
                return
        raise AssertionError("a home starves")


@pytest.mark.timeout(1200)  # for `make test-long`
@examples(8)
@given(events, st.integers(0, 3), st.booleans(), st.integers(3, len(HEADS)))
def test_every_stream_is_what_it_would_be_alone(events, seed, has_mirrors, num_pieces):
    schedule = Schedule(seed, has_mirrors, num_pieces)
    for name, *rest in events:
        getattr(schedule, name)(*rest)
    schedule.finish()
    assert schedule.streams == {id: run_alone(request) for id, request in schedule.requests.items()}
