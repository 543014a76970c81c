"""The stage of the restore benchmark with a GPU's logs: the toy model, the writer's kernels interpreted."""

import os
from types import SimpleNamespace

import pytest
import torch

from everserve.backends.cuda.log import kernels
from everserve.kvlog.log import Log
from everserve.worker.logs import KeptLogs
from everserve_bench.micro.restore_stage import Stage, Way, Worker
from tests.kernels.test_kvlog_writer import DeviceMemory, DeviceToy, MirrorToy
from tests.support.toy import VOCAB, LoggedToy, make_engine

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host's memory is not the device's")
LIMITS = {"max_num_seqs": 1, "enable_prefix_caching": False}
WAYS = {
    "anchor": Way("anchor", 16),
    "mirror": Way("mirror", 16),
    "parallel": Way("off", 64),
    "sequential": Way("off", 1),
}


class ToyWorkers:
    """`Workers`. Where a descriptor would lead to device memory, the log's own does."""

    row_item_bytes = 2
    model = SimpleNamespace(vocab_size=VOCAB, moe_layers=(0, 1), experts_per_token=2, hidden_size=8)

    def __init__(self) -> None:
        self.shape = DeviceToy(**LIMITS).shape
        self.elsewhere: dict[int, DeviceMemory] = {}

    def build(self, kv_log: str, max_batched: int) -> Worker:
        limits = {**LIMITS, "max_num_batched_tokens": max_batched, "max_prefill_while_decoding": max_batched}
        if kv_log == "off":
            return Worker(make_engine(num_blocks=64, **limits)[0], KeptLogs(None, None))
        toy: LoggedToy = DeviceToy(**limits) if kv_log == "anchor" else MirrorToy(64, **limits)
        if isinstance(toy, DeviceToy):
            self.elsewhere[os.fstat(toy.memory).st_ino] = toy.elsewhere
        return Worker(toy.engine, KeptLogs(self.open_log, toy.log), toy.memory)

    def open_log(self, fd: int, kv_fd: int | None) -> Log:
        return Log(fd, self.shape, self.elsewhere.get(os.fstat(fd).st_ino))


@pytest.mark.long
def test_all_ways_give_the_same_next_token(monkeypatch):
    monkeypatch.setattr(kernels, "NUM_PROGRAMS", 3)
    stage = Stage(ToyWorkers(), WAYS)
    tokens = set()
    for seed, point in enumerate((40, 41, 60)):
        with stage.lost(point, seed) as spec:
            samples = [stage.restore(spec, way, 1) for way in WAYS]
        assert {sample.token for sample in samples} == {samples[0].token}
        tokens.add(samples[0].token)
    assert len(tokens) > 1
