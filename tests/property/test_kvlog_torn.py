"""Whatever is left of a log when its writer dies: what is restored is right, and what was committed can be restored.

First every thinkable death, by mixing the memory before and after an operation word by word (which is more than any
order of stores could leave behind); then real ones, by SIGKILL.
"""

import ctypes
import mmap
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everserve.kvlog.chains import key_of
from everserve.kvlog.log import Log
from everserve.memory.owned import create_memory
from everserve.tables.ids import Incarnation, Rank, WorkerId
from everserve.worker.logs import KeptLogs
from tests.support.examples import examples
from tests.support.logs import SHAPE, Heir, Owner, Stream, new_log, offer_log, withdraw_log
from tests.support.toy import spec

NAMES = "abc"  # few, so that something becomes of them
STEP, LOOP, ABANDON, COMMIT, END, FORGET = "step", "step and commits", "abandon", "commit", "end", "forget"
MAX_TOKENS = SHAPE.max_blocks * SHAPE.block_size

names = st.sampled_from(NAMES)
few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=6)  # so few that streams often begin alike
rows = st.dictionaries(names, few_tokens, min_size=1, max_size=3)
gaps = st.sets(st.integers(0, SHAPE.num_layers - 1))
operations = st.one_of(
    st.tuples(st.just(STEP), rows, gaps),
    st.tuples(st.just(LOOP), rows, gaps),
    st.tuples(st.just(ABANDON), rows, gaps),
    st.tuples(st.just(COMMIT), names),
    st.tuples(st.just(END), names),
    st.tuples(st.just(FORGET), names),
)


class Life:
    """An attention worker, as far as it got. `others` are the tokens of streams that it does not have any more."""

    def __init__(self, log: Log, in_log: bool) -> None:
        self.owner = Owner(log, in_log)
        self.others: list[tuple[str, list[int]]] = []

    def do(self, kind: str, *args) -> None:
        owner = self.owner
        if kind in (STEP, LOOP):
            new_tokens = self.possible(args[0])
            owner.step(new_tokens, gaps=args[1])
            for name in new_tokens if kind == LOOP else ():
                owner.commit(name)
        elif kind == ABANDON:
            new_tokens = self.possible(args[0])
            before = {name: list(owner.streams[name].blocks) for name in new_tokens}
            owner.compute(range(SHAPE.num_layers - 1), *owner.begin(new_tokens), gaps=args[1])
            owner.writer.abandon()
            for name, blocks in before.items():
                owner.free += owner.streams[name].blocks[len(blocks) :]
                owner.streams[name].blocks[len(blocks) :] = []
        elif args[0] in owner.streams:
            stream = owner.streams[args[0]]
            if kind == COMMIT:
                owner.commit(args[0])
            else:
                self.others.append((args[0], list(stream.tokens)))
                owner.end(args[0]) if kind == END else owner.forget(args[0])

    def possible(self, new_tokens: dict[str, list[int]]) -> dict[str, list[int]]:
        """Streams begin as they are named, and wait when there is no room."""
        owner, num_free, fit = self.owner, len(self.owner.free), {}
        for name, tokens in new_tokens.items():
            stream = owner.streams.setdefault(name, Stream(NAMES.index(name)))
            num_tokens = min(len(tokens), MAX_TOKENS - len(stream.tokens))
            num_needed = -(-(len(stream.tokens) + num_tokens) // SHAPE.block_size) - len(stream.blocks)
            if num_needed <= num_free:
                num_free -= num_needed
                fit[name] = tokens[:num_tokens]
        return fit

    def promises(self) -> dict[str, tuple[list[int], int]]:
        """Of each stream: its tokens, and how many of them must be found."""
        return {name: (list(s.tokens), s.num_committed) for name, s in self.owner.streams.items()}


def image_of(log: Log) -> np.ndarray:
    """The memory, as words."""
    return np.frombuffer(ctypes.string_at(log.layout.base, log.shape.num_bytes), np.uint64)


def log_of(image: np.ndarray) -> Log:
    fd = create_memory("log", SHAPE.num_bytes)
    os.pwrite(fd, image.tobytes(), 0)
    log = Log(fd, SHAPE)
    os.close(fd)
    assert log.was_there
    return log


@pytest.mark.parametrize("in_log", [False, True], ids=["beside the pool", "in the log"])
@examples(25)
@given(st.lists(operations, max_size=20), operations, st.integers(0, 2**32 - 1), st.sampled_from([0.03, 0.5, 0.97]))
def test_death_in_the_middle_of_an_operation(in_log, lived, last, seed, share):
    log, heir = new_log(), Heir(new_log(), in_log)
    life = Life(log, in_log)
    for operation in lived:
        life.do(*operation)
    before, promised = image_of(log), life.promises()
    life.do(*last)
    after = image_of(log)
    is_new = np.random.default_rng(seed).random(len(before)) < share
    with_tokens = {name: list(stream.tokens) for name, stream in life.owner.streams.items()}
    for image in (before, after, np.where(is_new, after, before)):
        torn = log_of(image)
        for name, (tokens, num_promised) in promised.items():
            num_found = heir.restore(torn, name, with_tokens.get(name, tokens))
            assert num_found >= num_promised or last == (END, name)
        for name, tokens in life.others:
            heir.restore(torn, name, tokens)
        torn.close()
    for name, stream in life.owner.streams.items():
        assert heir.restore(log, name, stream.tokens) >= stream.num_committed
    if last[0] == END and last[1] in promised:
        assert log.find(key_of(last[1])) is None
    log.close()
    heir.log.close()


SOURCE = WorkerId(Rank(1), Incarnation(1))


class Reader:
    """Another worker, which keeps a log from the beginning. It may look at it early, and again and again."""

    def __init__(self, image: np.ndarray) -> None:
        fd = create_memory("log", SHAPE.num_bytes)
        os.pwrite(fd, image.tobytes(), 0)
        self.heir = Heir(new_log(), in_log=False)
        self.kept = KeptLogs(lambda fd, _: Log(fd, SHAPE), self.heir.log, shares_blocks_with=SOURCE.rank)
        offer_log(self.kept, SOURCE, fd)
        self.engine = SimpleNamespace(waits_for=lambda log: False, spare=list)

    def restore(self, name: str, tokens: list[int]) -> int:
        saved = self.kept.find(spec(name, tokens), SOURCE)
        return self.heir.restore(saved.log, name, tokens) if saved is not None else 0

    def close(self) -> None:
        withdraw_log(self.kept, SOURCE, self.engine)
        self.kept.sweep(self.engine)
        self.heir.log.close()


@pytest.mark.parametrize("unit", [1, 8], ids=["bytes", "words"])
@examples(25)
@given(st.lists(operations, min_size=1, max_size=15), st.data())
def test_rubbish_anywhere(unit, lived, data):
    """Not even what no writer would leave behind is taken for KV, nor does it stop a reader: any bytes of the log,
    overwritten, those of its header too."""
    log = new_log()
    life = Life(log, in_log=False)
    for operation in lived:
        life.do(*operation)
    whole = image_of(log)
    image = whole.copy()
    parts = image.view(np.uint8 if unit == 1 else np.uint64)
    most, line = 2 ** (8 * unit) - 1, 64 // unit
    rubbish = st.one_of(st.integers(0, most), st.sampled_from([0, 1, most, *map(int, parts[line : 25 * line])]))
    places = st.one_of(*(st.integers(0, end - 1) for end in (len(parts), 25 * line, line)))
    for place, value in data.draw(st.lists(st.tuples(places, rubbish), min_size=1, max_size=30)):
        parts[place] = value
    reader = Reader(image)
    reader.kept.sweep(reader.engine)
    streams = [(name, stream.tokens) for name, stream in life.owner.streams.items()]
    for name, tokens in [*life.others, *streams]:
        reader.restore(name, tokens)
    if (image[:5] != whole[:5]).any() and image[0] != 0:
        assert reader.kept.num_unreadable == 1
    reader.close()
    log.close()


# real deaths

LARGE = replace(SHAPE, num_blocks=48, block_size=16, num_layers=4, num_planes=4, piece_bytes=128, max_blocks=8)
_GENERATION = 1 << 32


def name_of(index: int, generation: int) -> str:
    return f"{index}:{generation}"


def tokens_of(index: int, generation: int, num_tokens: int) -> list[int]:
    return [(7 * generation + index + i * i) % 50 for i in range(num_tokens)]


def live(log: Log, in_log: bool, told: np.ndarray, seed: int, on_commit: Callable[[], None]) -> None:
    """Compute streams for ever. told[index] is the generation of the stream in that record, and how many of its tokens
    are committed: one word, written after the commit and before the record is cleared."""
    owner, rng = Owner(log, in_log), random.Random(seed)
    generations = [int(word) // _GENERATION for word in told]
    rng.shuffle(owner.free)

    def start(index: int) -> None:
        generations[index] += 1
        told[index] = generations[index] * _GENERATION
        owner.streams[name_of(index, generations[index])] = Stream(index)

    for index in range(LARGE.num_records):
        start(index)
    while True:
        new_tokens: dict[str, list[int]] = {}
        for name, stream in list(owner.streams.items()):
            num_tokens = len(stream.tokens) + rng.choice([1, 1, 1, 40])
            if num_tokens > LARGE.max_blocks * LARGE.block_size:
                start(stream.index)
                owner.end(name)
            else:
                new_tokens[name] = tokens_of(stream.index, generations[stream.index], num_tokens)[len(stream.tokens) :]
        owner.step(new_tokens, gaps=rng.sample(range(LARGE.num_layers), 2))
        for name in new_tokens:
            owner.commit(name)
            stream = owner.streams[name]
            told[stream.index] = generations[stream.index] * _GENERATION + stream.num_committed
        on_commit()


def check(heir: Heir, log: Log, told: np.ndarray, is_dead: bool) -> None:
    for index in range(LARGE.num_records):
        generation, num_committed = divmod(int(told[index]), _GENERATION)
        tokens = tokens_of(index, generation, LARGE.max_blocks * LARGE.block_size)
        num_found = heir.restore(log, name_of(index, generation), tokens)
        assert num_found >= num_committed or not is_dead, f"{num_found} of {num_committed} tokens are left"


@pytest.mark.parametrize("in_log", [False, True], ids=["beside the pool", "in the log"])
def test_sigkill(in_log):
    """One worker after the other on the same log; each is read while it lives, killed, and read again."""
    log, heir = new_log(LARGE), Heir(new_log(LARGE), in_log)
    told = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)[: LARGE.num_records]
    rng = random.Random(in_log)
    for round in range(25):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                live(log, in_log, told, round, lambda writing=writing: os.write(writing, b"."))
            finally:
                os._exit(1)
        os.close(writing)
        try:
            for _ in range(rng.randint(1, 12)):
                assert os.read(reading, 1) == b".", "it lives and commits"
            for _ in range(rng.choice([0, 0, 1, 2])):
                check(heir, log, told, is_dead=False)
        finally:
            os.kill(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL
            os.close(reading)
        check(heir, log, told, is_dead=True)
    assert log.records(), "somebody got somewhere"
