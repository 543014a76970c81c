"""Workers die at random moments, and their streams go on elsewhere with KV from their logs.

A death is a photograph of the log's memory: between steps, between a step and the commits that follow it, or in the
middle of a step, with KV half written. Whatever the photograph shows, also when words of it were changed, every stream
equals the one it would be alone; and if none was, nothing that was in the log is computed again.

The pool lies beside the log ("mirror"), or in it; then a successor takes over the memory as it is.
"""

import itertools
import os
import random
from dataclasses import dataclass
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everserve.kvlog.chains import key_of
from everserve.kvlog.log import Log
from everserve.tables.outputs import Output
from everserve.tables.requests import RequestSpec
from tests.support import guides
from tests.support.examples import examples
from tests.support.toy import VOCAB, Clairvoyant, LoggedToy, StepAbandoned, ToyConfig, make_config, run_alone, spec

HEADER_WORDS = 8
ROOMY = 128  # blocks: enough for everybody, so that nobody takes blocks that a successor's streams still need

# Prompts of one family begin alike.
prompts = st.builds(
    lambda family, length: [(31 * family + i * i) % VOCAB for i in range(length)], st.integers(0, 3), st.integers(1, 40)
)
params = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([1, 5, 12, 20]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 5),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "stop_ids": st.sampled_from([(), (3, 5, 7)]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "cache_salt": st.sampled_from([b"", b"", b"a salt"]),
        "guided": st.sampled_from([None, None, *guides.GUIDED]),
    }
)
adds = st.tuples(st.just("add"), prompts, params)
steps = st.tuples(st.just("step"), st.integers(1, 8), st.booleans())
others = st.one_of(
    st.tuples(st.just("abandon")), st.tuples(st.just("cancel"), st.integers(0, 8)), st.tuples(st.just("forget"))
)
lives = st.builds(
    lambda first, then: [*first, *then],
    st.lists(adds, max_size=4),
    st.lists(st.one_of(adds, steps, steps, others), min_size=1, max_size=10),
)
moments = st.one_of(
    st.sampled_from(["between steps", "before sending", "before committing"]),
    st.integers(0, 6),  # in the middle of a step: how much of it is written
)
damages = st.one_of(
    st.just([]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 2**64 - 1)), min_size=1, max_size=40),
)


@dataclass(frozen=True)
class Death:
    """When a worker dies, what of its last outputs never arrives, and what becomes of its log."""

    moment: str | int
    num_lost: int  # of each stream's last tokens
    damage: list[tuple[float, int]]  # where in the log, what to change there


deaths = st.builds(Death, moments, st.sampled_from([0, 0, 1, 3]), damages)
# what a worker lives to see, who it is, how it dies, and what its successor lives to see before the streams come
rounds = st.lists(st.tuples(lives, st.integers(0, 2), deaths, st.one_of(st.just([]), lives)), min_size=1, max_size=4)
luck = st.one_of(st.none(), st.randoms(use_true_random=False))  # of drafts; None: there are none
configs = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([16, 18, 24, ROOMY]),
        "max_num_seqs": st.sampled_from([2, 6]),
        "max_num_batched_tokens": st.sampled_from([3, 16]),
        "max_prefill_while_decoding": st.sampled_from([2, 16]),
        "max_restored_while_serving": st.sampled_from([4, 10, 2048]),
        "enable_prefix_caching": st.booleans(),
        "visible_keys": st.sampled_from([None, 1, 6, 17]),
    }
).map(lambda overrides: make_config(**overrides))


class Worker(LoggedToy):
    """One incarnation."""

    def __init__(
        self, config: ToyConfig, is_in_place: bool, memory: int | None = None, rng: random.Random | None = None
    ) -> None:
        drafting = Clairvoyant(rng, config.limits.visible_keys) if rng is not None else None
        super().__init__(config, is_in_place, memory, drafting)
        self.logged: dict[str, int] = {}  # how many tokens of each stream must be in the log
        self.promises: dict[str, int] = {}  # how many tokens of a stream need to be computed again at most

    def commit(self, is_checked: bool = True) -> None:
        """`is_checked`: not for nothing, since the writer no longer follows streams then."""
        self.engine.log_step()
        if is_checked:
            self.engine.check()
        assert self.engine.stats().log_lag_tokens == 0
        for sequence in self.engine.scheduler.running:
            record = self.log.find(key_of(sequence.id))
            assert record is not None and record.num_tokens == sequence.num_computed
            assert list(record.blocks) == sequence.blocks[: len(record.blocks)]
        self.logged = {sequence.id: sequence.num_computed for sequence in self.engine.scheduler.running}

    def abandon(self) -> None:
        self.model.fail_next = True
        try:
            self.engine.step()
            raise AssertionError("the fault was not injected")
        except StepAbandoned:
            pass
        for sequence in self.engine.scheduler.waiting:
            self.logged.pop(sequence.id, None)  # its blocks were taken


@dataclass(frozen=True)
class Grave:
    """What a dead worker has left."""

    memory: int
    log: Log
    orphans: list[str]
    logged: dict[str, int]
    is_sound: bool  # the log has all that it should have


class World:
    """Clients, and the workers that serve them."""

    def __init__(self, config: ToyConfig, is_in_place: bool, rng: random.Random | None = None) -> None:
        """`rng`: of drafts; None: there are none."""
        self.config = config
        self.rng = rng
        self.is_in_place = is_in_place
        self.specs: dict[str, RequestSpec] = {}
        self.streams: dict[str, list[int | None]] = {}  # what each client has
        self.given: dict[str, int] = {}  # how many of these its worker was given: they cannot be lost
        self.finished: set[str] = set()
        self.cancelled: set[str] = set()
        self.workers = [Worker(config, is_in_place, rng=rng)]
        self.graves: list[Grave] = []

    def live(self, worker: Worker, life: list[tuple], is_expecting: bool = False) -> None:
        """`is_expecting`: streams of its predecessor are still to come."""
        engine = worker.engine
        for what, *how in life:
            if what == "add":
                request = spec(f"r{len(self.specs)}", how[0], **how[1])
                self.specs[request.id], self.streams[request.id] = request, []
                guides.add(engine, request)
            elif what == "step":
                for _ in range(how[0]):
                    self.step(worker, is_checked=how[1])
            elif what == "abandon" and engine.has_work:
                worker.abandon()
            elif what == "cancel" and engine.cancel(f"r{how[0]}"):
                self.cancelled.add(f"r{how[0]}")
            elif what == "forget" and not is_expecting:
                engine.forget_adopted()
            engine.check()

    def step(self, worker: Worker, is_checked: bool = True) -> None:
        result = worker.engine.step()
        for restored in result.restored:
            assert restored.num_recomputed <= worker.promises.pop(restored.id, inf), "computed again, though logged"
        self.deliver(result.outputs)
        worker.commit(is_checked)

    def deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.id not in self.finished | self.cancelled
            assert output.index == len(self.streams[output.id]), "a gap or a duplicate"
            self.streams[output.id].append(output.token)
            if output.finish_reason is not None:
                self.finished.add(output.id)

    def kill(self, worker: Worker, death: Death) -> Grave:
        self.workers.remove(worker)
        ids, photographs, preempted = worker.engine.stream_ids(), [], []
        if death.moment != "between steps" and worker.engine.has_work:
            worker.model.on_write = lambda: photographs.append(worker.photograph())
            result = worker.engine.step()
            preempted = result.preempted
            if death.moment == "before committing":
                self.deliver(result.outputs)
        photographs.append(worker.photograph())
        in_the_middle = isinstance(death.moment, int) and death.moment < len(photographs)
        memory = photographs.pop(death.moment if in_the_middle else -1)
        for other in photographs:
            os.close(other)
        corrupt(memory, death.damage)
        orphans = [id for id in ids if id not in self.finished]
        for id in orphans:
            del self.streams[id][max(self.given.get(id, 0), len(self.streams[id]) - death.num_lost) :]
        is_sound = not death.damage and not preempted
        grave = Grave(memory, Log(memory, worker.shape), orphans, worker.logged, is_sound)
        self.graves.append(grave)
        worker.close()
        return grave

    def succeed(self, grave: Grave) -> Worker:
        """A new worker takes the seat: with the old memory, or with new memory."""
        memory = grave.memory if self.is_in_place else None
        successor = Worker(self.config, self.is_in_place, memory, self.rng)
        self.workers.append(successor)
        if memory is None:
            os.close(grave.memory)
        return successor

    def inherit(self, grave: Grave) -> None:
        """The dead worker's streams go to whoever is there."""
        for i, id in enumerate(grave.orphans):
            heir = self.workers[i % len(self.workers)]
            saved = heir.find(grave.log, id)
            request = self.specs[id].after(self.streams[id])
            self.given[id] = len(self.streams[id])
            if grave.is_sound and id in grave.logged:
                assert saved is not None and saved.num_tokens >= grave.logged[id]
                if not self.is_in_place or self.config.limits.num_blocks == ROOMY:
                    num_once = len(request.prompt) + len(request.known) - 1 if request.known else 0
                    heir.promises[id] = max(0, num_once - grave.logged[id])
            guides.add(heir.engine, request, saved)
            heir.engine.check()

    def drain(self) -> None:
        for worker in self.workers:
            for i in range(2000):
                if not worker.engine.has_work:
                    break
                self.step(worker, is_checked=i % 7 == 0)
            assert not worker.engine.has_work, "a worker starves"
            assert worker.engine.scheduler.pool.num_used == 0
            worker.engine.forget_adopted()
            worker.engine.check()
            assert worker.log.records() == [], "records of streams that have ended"

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for grave in self.graves:
            grave.log.close()


def corrupt(memory: int, damage: list[tuple[float, int]]) -> None:
    """Change words behind the header, of those that hold something."""
    words = np.frombuffer(os.pread(memory, os.fstat(memory).st_size, 0), np.uint64).copy()
    used = [i for i in np.flatnonzero(words) if i >= HEADER_WORDS]
    for where, change in damage if used else []:
        words[used[int(where * len(used))]] ^= np.uint64(change)
    os.pwrite(memory, words.tobytes(), 0)


@examples(10)
@given(rounds, configs, st.booleans(), st.booleans(), luck)
def test_streams_go_on_from_the_log_wherever_their_worker_died(rounds, config, is_in_place, two, rng):
    world = World(config, is_in_place, rng)
    if two:
        world.workers.append(Worker(config, is_in_place, rng=rng))
    for life, who, death, life_of_successor in rounds:
        victim = world.workers[who % len(world.workers)]
        world.live(victim, life)
        grave = world.kill(victim, death)
        world.live(world.succeed(grave), life_of_successor, is_expecting=True)
        world.inherit(grave)
    world.drain()
    for id, request in world.specs.items():
        alone = run_alone(request, visible_keys=config.limits.visible_keys)
        assert world.streams[id] == (alone[: len(world.streams[id])] if id in world.cancelled else alone)
    world.close()


def test_what_was_brought_for_a_step_that_was_not_scheduled_is_not_used_by_the_next(monkeypatch):
    """On a device the next streams are brought together with the first. Then scheduling fails, and every block that it
    took is free again."""
    world = World(make_config(num_blocks=ROOMY, enable_prefix_caching=False), is_in_place=False)
    adds = [("add", [7 * i + j * j for j in range(9)], {"max_tokens": 12}) for i in range(3)]
    world.live(world.workers[0], [*adds, ("step", 6, True)])
    grave = world.kill(world.workers[0], Death("between steps", 0, []))
    heir = world.succeed(grave)
    world.inherit(grave)
    calls = itertools.count(1)

    def settle() -> None:
        if next(calls) == 2:  # for the second stream
            raise StepAbandoned

    with monkeypatch.context() as patched:
        patched.setattr(heir.journal.writer, "is_on_device", True)
        patched.setattr(heir.journal, "settle", settle)
        with pytest.raises(StepAbandoned):
            heir.engine.step()
    while heir.engine.has_work:
        world.step(heir)
    assert world.streams == {id: run_alone(request) for id, request in world.specs.items()}


@pytest.mark.parametrize("is_in_place", [False, True])
def test_of_a_stream_with_windows_only_these_are_brought(is_in_place):
    world = World(make_config(num_blocks=ROOMY, visible_keys=6), is_in_place)
    add = ("add", [i * i % VOCAB for i in range(9)], {"max_tokens": 50})
    world.live(world.workers[0], [add, ("step", 40, False)])
    grave = world.kill(world.workers[0], Death("between steps", 0, []))
    heir = world.succeed(grave)
    world.inherit(grave)
    (restored,) = heir.engine.step().restored
    heir.engine.check()
    assert restored.num_recomputed == 0 and restored.num_restored < 6 + 2 * 4
    assert heir.engine.scheduler.pool.num_used < 6
    world.close()
