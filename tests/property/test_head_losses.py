"""Random schedules against engines whose heads are in other processes: arrivals, cancellations, too few blocks, and
workers that die anywhere in a step or while they fetch KV, and come back with their memory, damaged or not, or without
it; heads that
move from one worker to another; mirrors and parities that lag behind, and groups that change; homes that die, and whose
streams go on at the other one.

Whatever happens, every stream equals the one it would be in one process, and the tables stay sound after every step.
"""

import random
from functools import cache

from hypothesis import example, given
from hypothesis import strategies as st

from everserve.engine.saved import Saved
from everserve.errors import StepAbandoned
from everserve.kvlog.chains import key_of
from everserve.kvlog.log import Log, NoBlocks
from tests.support.examples import examples
from tests.support.in_process_heads import BLOCKS_PER_HOME, HeadWorld
from tests.support.models import model_directory, random_tokens
from tests.support.toy import Clairvoyant, spec

NUM_WORKERS = 3
FEW_BLOCKS = 10  # so that streams have to make room for each other, and are parked
requests = st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(1, 10), st.sampled_from([0.0, 0.8]))
memories = st.sampled_from(["whole", "damaged", "lost"])
deaths = st.tuples(st.just("die"), st.integers(0, NUM_WORKERS - 1), st.integers(-1, 3), st.booleans(), memories)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 1), requests),
        st.tuples(st.just("step"), st.integers(0, 1), st.integers(1, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 1), st.integers(0, 5)),
        deaths,
        st.tuples(st.just("move"), st.integers(0, 1)),
        st.tuples(st.just("lag"), st.integers(0, NUM_WORKERS - 1), st.booleans()),
        st.tuples(st.just("end"), st.integers(0, 1), st.booleans()),
        st.tuples(st.just("regroup"), st.just(0)),
    ),
    min_size=2,
    max_size=20,
)


@cache
def alone() -> tuple:
    world = HeadWorld(model_directory("qwen3-moe", "float32"), 1)
    decoders = world.decoder(), world.decoder(has_heads=True)
    world.close()
    return (world, *decoders)


@cache
def expected(request: tuple) -> list[int]:
    world, _, decoder = alone()
    engine, tokens = world.engine_alone(decoder), []
    engine.add(_spec("alone", request))
    while engine.has_work:
        tokens += [output.token for output in engine.step().outputs]
    return tokens


def _spec(id: str, request: tuple):
    length, seed, max_tokens, temperature = request
    return spec(id, random_tokens(length, seed=seed), max_tokens=max_tokens, temperature=temperature, seed=seed)


class Schedule:
    """Two homes and their streams."""

    def __init__(self, seed: int, shadow: str | None, drafts: bool) -> None:
        keeps_kv = shadow is not None
        told = {"num_homes": 2, "seed": seed, "keeps_kv": keeps_kv, "shadow": shadow, "has_copies": keeps_kv}
        self.world = HeadWorld(model_directory("qwen3-moe", "float32"), NUM_WORKERS, **told)
        self.keeps_kv, self.num_blocks = keeps_kv, BLOCKS_PER_HOME if seed % 2 else FEW_BLOCKS
        self.world.regroup()
        rng = random.Random(seed)
        self.drafting = Clairvoyant(rng, alone=lambda spec: expected(self.requests[spec.id])) if drafts else None
        self.engines = [self._engine(i) for i in (0, 1)]
        self.requests: dict[str, tuple] = {}
        self.streams: dict[str, list[int]] = {}
        self.cancelled: set[str] = set()
        self.memories: dict[int, str] = {}  # of those that die: what becomes of it

    def _engine(self, home: int, log: Log | None = None):
        told = {"num_blocks": self.num_blocks, "max_num_batched_tokens": 20, "max_num_seqs": 5}
        return self.world.engine(home, alone()[1], log, drafting=self.drafting, **told)

    def move(self, home: int) -> None:
        """Routes prefer other places for all heads that have more than one."""
        self.world.workers.reverse()
        self.memories = {NUM_WORKERS - 1 - index: memory for index, memory in self.memories.items()}
        self.world.publish()

    def lag(self, index: int, does: bool) -> None:
        self.world.workers[index].shadows_at_once = not does

    def regroup(self, home: int) -> None:
        """At any time, also while what the last groups cover is needed: that costs time, and no token."""
        self.world.regroup()

    def end(self, home: int, moves: bool) -> None:
        """A home dies. Its streams go on at the other one, or at its successor."""
        if not self.keeps_kv:
            return
        ended, world = self.engines[home], self.world
        lost = Log(world.homes[home].log_fd, world.log_shape(), NoBlocks())
        world.restart(home)
        self.engines[home] = self._engine(home, Log(world.homes[home].log_fd, world.log_shape(), NoBlocks()))
        goes_on = self.engines[1 - home if moves else home]
        for id in ended.stream_ids():
            known = _spec(id, self.requests[id]).after(self.streams[id])
            record = lost.find(key_of(id))
            own = goes_on._journal.log
            goes_on.add(known, Saved.of(lost, record, own) if record is not None else None)

    def add(self, home: int, request: tuple) -> None:
        id = f"{home}-{sum(id.startswith(str(home)) for id in self.requests)}"
        self.requests[id], self.streams[id] = request, []
        self.engines[home].add(_spec(id, request))

    def cancel(self, home: int, number: int) -> None:
        found = [engine.cancel(f"{home}-{number}") for engine in self.engines]
        if any(found):
            self.cancelled.add(f"{home}-{number}")

    def die(self, index: int, call: int, after: bool, memory: str) -> None:
        """When it is asked for this call, before or after it has computed."""
        worker = self.world.workers[index]
        worker.fault, worker.dies_after = lambda asked, batch: asked == call, after
        self.memories[index] = memory

    def step(self, home: int) -> None:
        engine = self.engines[home]
        try:
            outputs = engine.step().outputs if engine.has_work else []
        except StepAbandoned:
            outputs = []
            for index, worker in enumerate(self.world.workers):
                if worker.is_dead:
                    memory = self.memories.pop(index, "whole")
                    if memory == "damaged":
                        worker.damage(0.05, seed=index)
                    worker.replace(memory_lost=memory == "lost")
        for output in outputs:
            assert output.id not in self.cancelled
            assert output.index == len(self.streams[output.id]), "a gap or a duplicate"
            self.streams[output.id].append(output.token)
        engine.log_step()
        engine.check()

    def finish(self) -> None:
        for _ in range(600):
            for home in (0, 1):
                self.step(home)
            if not any(engine.has_work for engine in self.engines):
                return
        raise AssertionError("a worker starves")


DAMAGED: list[tuple] = [
    *(
        ("add", home, request)
        for home, request in ((0, (60, 1, 10, 0.8)), (1, (50, 2, 10, 0.0)), (0, (30, 3, 10, 0.0)))
    ),
    *(("step", home, 3) for home in (0, 0, 1)),
    ("die", 2, 2, False, "damaged"),
]


@examples(10)
@example(DAMAGED, 2, None, False)
@example(DAMAGED, 3, "mirror", True)
@example(DAMAGED, 1, "parity", False)
@given(events, st.integers(0, 3), st.sampled_from([None, "mirror", "parity"]), st.booleans())
def test_every_stream_is_what_it_would_be_alone(events, seed, shadow, drafts):
    schedule = Schedule(seed, shadow, drafts)
    try:
        for name, home, *rest in events:
            if name == "step":
                for _ in range(rest[0]):
                    schedule.step(home)
            elif name == "die":
                schedule.die(home, *rest)
            else:
                getattr(schedule, name)(home, *rest)
        schedule.finish()
        for id, request in schedule.requests.items():
            stream = schedule.streams[id]
            assert stream == (expected(request)[: len(stream)] if id in schedule.cancelled else expected(request))
        assert all(engine.scheduler.pool.num_used == 0 for engine in schedule.engines)
        symptoms = {symptom for home in schedule.world.homes for _, symptom in home.suspected}
        assert symptoms <= {"died"}
    finally:
        schedule.world.close()
