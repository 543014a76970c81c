"""The writer for pools on a device, on random schedules of steps, deaths and damage (tests/property/test_restore.py).

The interpreter is too slow for that: NumPy stands in for the kernels (test_kvlog.py compares these with C). What is
queued on the side is done as late as possible.
"""

import ctypes
import random
from collections.abc import Callable
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everserve.backends.cuda.log import kernels
from everserve.backends.cuda.log import writer as cuda_writer
from everserve.backends.cuda.log.writer import CudaLogWriter
from everserve.kvlog.chains import key_of
from everserve.kvlog.layout import LogShape
from everserve.kvlog.log import Log
from everserve.tables.requests import RequestSpec
from tests.kernels.test_kvlog import words_address
from tests.kernels.test_kvlog_writer import Late
from tests.property import test_masks, test_restore
from tests.support.toy import LaggingForward, LoggedToy, StepAbandoned, ToyConfig, make_config, spec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host's memory is not the device's")

_ODD, _MIX, _SCRAMBLE = (np.uint64(x) for x in (0x9FB21C651E98DF25, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def array_at(address: int, size: int, dtype: type) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * (size * np.dtype(dtype).itemsize)).from_address(address), dtype)


def blocks_at(address: int, num_blocks: int, shape: LogShape) -> np.ndarray:
    """uint64 [blocks, pieces, slots, words]."""
    num_words = num_blocks * shape.block_bytes // 8
    return array_at(address, num_words, np.uint64).reshape(num_blocks, -1, shape.block_size, shape.piece_bytes // 8)


def shift(x: np.ndarray, by: int) -> np.ndarray:
    return x >> np.uint64(by)


def scramble(x: np.ndarray) -> np.ndarray:
    x = (x ^ shift(x, 30)) * _MIX
    x = (x ^ shift(x, 27)) * _SCRAMBLE
    return x ^ shift(x, 31)


def words_for(kv_TQW: np.ndarray, chains_T: np.ndarray) -> np.ndarray:
    numbers = np.arange(1, kv_TQW[0].size + 1, dtype=np.uint64).reshape(kv_TQW.shape[1:])
    x = kv_TQW ^ numbers * _ODD
    x = (x ^ shift(x, 32)) * _MIX
    x ^= (x << np.uint64(25) | shift(x, 39)) ^ (x << np.uint64(47) | shift(x, 17))
    words_T = scramble(x.sum((1, 2), dtype=np.uint64) ^ scramble(chains_T))
    return np.where(words_T == 0, np.uint64(1), words_T)


def log_rows(
    shape: LogShape, pool: int, mirror: int, words: int, count: int, slots: int, chains: int, first: int, end: int
) -> None:
    num_rows = int(array_at(count, 1, np.int32)[0])
    slots_T, chains_T = array_at(slots, num_rows, np.int32)[first:end], array_at(chains, num_rows, np.uint64)[first:end]
    slots_T, chains_T = slots_T[slots_T >= 0], chains_T[slots_T >= 0]
    if len(slots_T):
        blocks_T, offsets_T = np.divmod(slots_T, shape.block_size)
        kv_TQW = blocks_at(pool, shape.num_blocks, shape)[blocks_T, :, offsets_T]
        if mirror:
            blocks_at(mirror, shape.num_blocks, shape)[blocks_T, :, offsets_T] = kv_TQW
        array_at(words, shape.num_blocks * shape.block_size, np.uint64)[slots_T] = words_for(kv_TQW, chains_T)


def bring(
    shape: LogShape, source: int, source_blocks: int, source_words: int, chains: int, num_tokens: int, pool: int,
    mirror: int, words: int, blocks: int, reach: int, right: int,
) -> None:  # fmt: skip
    at_T, offsets_T = np.divmod(np.arange(num_tokens), shape.block_size)
    num_blocks = at_T[-1] + 1
    sources_T = array_at(source_blocks, num_blocks, np.int32)[at_T]
    blocks_T = array_at(blocks, num_blocks, np.int32)[at_T]
    kv_TQW = blocks_at(source, int(sources_T.max()) + 1, shape)[sources_T, :, offsets_T]
    words_T = array_at(source_words, num_tokens, np.uint64)
    right_T = words_T == words_for(kv_TQW, array_at(chains, num_tokens, np.uint64))
    if words:
        near_T = blocks_T < reach
        blocks_at(pool, shape.num_blocks, shape)[blocks_T, :, offsets_T] = kv_TQW
        if mirror:
            blocks_at(mirror, shape.num_blocks, shape)[blocks_T[near_T], :, offsets_T[near_T]] = kv_TQW[near_T]
        kept_T = right_T & near_T
        own_words = array_at(words, shape.num_blocks * shape.block_size, np.uint64)
        own_words[(blocks_T * shape.block_size + offsets_T)[kept_T]] = words_T[kept_T]
    array_at(right, num_tokens, np.int32)[:] = right_T


def check(shape: LogShape, pool: int, blocks: int, words: int, chains: int, num_tokens: int, right: int) -> None:
    bring(shape, pool, blocks, words, chains, num_tokens, pool, 0, 0, blocks, 0, right)


def on_a_device(log: Log) -> Log:
    """Blocks in host memory, which we take for a device's."""
    log.elsewhere = SimpleNamespace(address=log.blocks_address, close=lambda: None)
    return log


def make_writer(toy: LoggedToy) -> CudaLogWriter:
    pool, mirror = toy.model.pool.ctypes.data, None
    if pool == toy.log.blocks_address:
        on_a_device(toy.log)
    else:
        mirror = SimpleNamespace(num_blocks=toy.shape.num_blocks)
    return CudaLogWriter(toy.log, pool, words_address(toy.log), 64, Late(), mirror)


@pytest.fixture
def stand_ins(monkeypatch) -> Callable[[bool], None]:
    def stand_in(is_in_place: bool) -> None:
        for function in (log_rows, bring, check):
            monkeypatch.setattr(kernels, function.__name__, function)
        monkeypatch.setattr(cuda_writer, "_TOKENS_AT_ONCE", 12)
        monkeypatch.setattr(cuda_writer, "_BOUNCE_BYTES", 600)
        monkeypatch.setattr(cuda_writer, "_MIRRORED_AT_ONCE", 3)
        monkeypatch.setattr(LoggedToy, "make_writer", make_writer)
        if is_in_place:  # graves too
            monkeypatch.setattr(test_restore, "Log", lambda fd, shape: on_a_device(Log(fd, shape)))

    return stand_in


def tell(worker: test_restore.Worker) -> None:
    """Log what the last step has computed, while the next one computes, which may be abandoned."""
    worker.engine.log_step()
    certain = worker.engine.scheduler.certain()
    worker.logged = {sequence.id: sequence.num_computed for sequence in certain if sequence.num_computed}


def abandon_late(self: test_restore.Worker) -> None:
    self.model.fail_next = True
    with pytest.raises(StepAbandoned):
        self.engine.step(meanwhile=lambda: tell(self))
    for sequence in self.engine.scheduler.waiting:
        self.logged.pop(sequence.id, None)  # its blocks were taken


def step_late(self: test_restore.World, worker: test_restore.Worker, is_checked: bool = True) -> None:
    """As workers on a device do: what a step has computed is logged while the next one computes."""
    result = worker.engine.step(meanwhile=lambda: tell(worker))
    for restored in result.restored:
        assert restored.num_recomputed <= worker.promises.pop(restored.id, inf), "computed again, though logged"
    self.deliver(result.outputs)
    if not worker.engine.has_work:
        worker.commit(is_checked)


def toy_and_its_stream(is_in_place: bool, **config: int) -> tuple[LoggedToy, RequestSpec]:
    """A worker, and what a client of it has of a stream in the middle of its answer."""
    toy, request = LoggedToy(make_config(num_blocks=64, **config), is_in_place), spec("b", [*range(40)], max_tokens=20)
    toy.engine.add(request)
    known = [output.token for _ in range(6) for output in toy.engine.step(meanwhile=toy.engine.log_step).outputs]
    toy.engine.log_step()
    return toy, request.after(known)


def abandon(toy: LoggedToy) -> None:
    toy.model.fail_next = True
    with pytest.raises(StepAbandoned):
        toy.engine.step(meanwhile=toy.engine.log_step)
    toy.engine.check()


@pytest.mark.parametrize("num_steps", range(7))
def test_a_stream_that_comes_back_in_several_steps_of_which_one_is_abandoned(stand_ins, num_steps):
    """The record must not say what that step had restored: somebody goes, and the next try has other blocks."""
    stand_ins(is_in_place=True)
    old, request = toy_and_its_stream(True, max_restored_while_serving=8)
    left = on_a_device(Log(old.photograph(), old.shape))
    toy = LoggedToy(old.config, True)
    for other in (spec("a", [5, 6, 7], max_tokens=20), spec("c", [9] * 9, max_tokens=20)):
        toy.engine.add(other)
    toy.engine.step(meanwhile=toy.engine.log_step)
    toy.engine.add(request, toy.find(left, "b"))
    for _ in range(num_steps):
        toy.engine.step(meanwhile=toy.engine.log_step)
    abandon(toy)
    toy.engine.cancel("c")
    while toy.engine.has_work:
        toy.engine.step(meanwhile=toy.engine.log_step)
        toy.engine.log_step()
        toy.engine.check()


@pytest.mark.parametrize("is_first_short", [False, True])
def test_streams_with_windows_come_back_together(stand_ins, is_first_short, monkeypatch):
    """What no row of them sees any more is in no block."""
    stand_ins(is_in_place=True)
    monkeypatch.setattr(cuda_writer, "_TOKENS_AT_ONCE", 64)
    old = LoggedToy(make_config(num_blocks=18, visible_keys=6), True)
    requests = [spec(id, [*range(begin, begin + 9)], max_tokens=40) for id, begin in (("a", 0), ("b", 20), ("c", 40))]
    known: dict[str, list[int | None]] = {request.id: [] for request in requests}
    for request in requests[is_first_short:]:
        old.engine.add(request)
    for i in range(24):  # blocks that were passed are others' now
        if is_first_short and i == 23:
            old.engine.add(requests[0])
        for output in old.engine.step(meanwhile=old.engine.log_step).outputs:
            known[output.id].append(output.token)
    old.engine.log_step()
    left = on_a_device(Log(old.photograph(), old.shape))
    toy, copies = LoggedToy(old.config, True), []
    bring = kernels.bring
    monkeypatch.setattr(kernels, "bring", lambda *given: (copies.append(given), bring(*given)))
    for request in requests:
        toy.engine.add(request.after(known[request.id]), toy.find(left, request.id))
    restored = toy.engine.step(meanwhile=toy.engine.log_step).restored
    assert [one.id for one in restored] == ["a", "b", "c"]
    assert all(one.num_restored > 0 and not one.num_recomputed for one in restored)
    assert len(copies) == 1, "one by one"


def test_an_adopted_record_outlives_an_abandoned_step(stand_ins):
    """Whoever comes after us may need it."""
    stand_ins(is_in_place=True)
    old, request = toy_and_its_stream(True)
    toy = LoggedToy(old.config, True, old.photograph())
    num_tokens = toy.log.find(key_of("b")).num_tokens
    toy.engine.add(spec("a", [5, 6, 7], max_tokens=40))
    toy.engine.step(meanwhile=toy.engine.log_step)
    toy.engine.add(request, toy.find(on_a_device(Log(toy.memory, toy.shape)), "b"))
    abandon(toy)
    assert toy.log.find(key_of("b")).num_tokens == num_tokens


KINDS = [pytest.param(False, marks=pytest.mark.long, id="mirror"), pytest.param(True, id="anchor")]


@pytest.mark.parametrize("when", ["after each step", "in the next step", "in the next step, launched ahead"])
@pytest.mark.parametrize("is_in_place", KINDS)
def test_streams_go_on_wherever_their_worker_died(stand_ins, is_in_place, when, monkeypatch):
    stand_ins(is_in_place)
    if when != "after each step":
        monkeypatch.setattr(test_restore.World, "step", step_late)
        monkeypatch.setattr(test_restore.Worker, "abandon", abandon_late)
    if "ahead" in when:
        plain = {"frequency_penalty": 0.0, "prompt_logprobs": None}  # others are not launched ahead
        monkeypatch.setattr(test_restore, "spec", lambda id, prompt, **params: spec(id, prompt, **(params | plain)))
        monkeypatch.setattr(LoggedToy, "make_forward", lambda toy: LaggingForward(toy.model))
    inner = test_restore.test_streams_go_on_from_the_log_wherever_their_worker_died.hypothesis.inner_test

    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(test_restore.rounds, test_restore.configs, st.booleans(), test_restore.luck)
    def run(rounds: list, config: ToyConfig, two: bool, rng: random.Random | None) -> None:
        inner(rounds, config, is_in_place, two, rng)

    run()


@pytest.mark.parametrize("is_ahead", [False, True], ids=["one by one", "launched ahead"])
@pytest.mark.parametrize("is_in_place", KINDS)
def test_masks_come_and_go(stand_ins, is_in_place, is_ahead, monkeypatch):
    """Also while what the last step has computed is not in the log yet (tests/property/test_masks.py)."""
    stand_ins(is_in_place)
    if is_ahead:
        monkeypatch.setattr(LoggedToy, "make_forward", lambda toy: LaggingForward(toy.model))

    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(test_masks.lives, test_masks.configs, st.booleans())
    def run(life: list, config: ToyConfig, is_late: bool) -> None:
        test_masks.check_life(test_masks.World(config, is_in_place, is_late), life)

    run()
