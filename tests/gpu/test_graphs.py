"""Graphs that are joined: fewer launches, the same results in the same order; they may still be launched one by one."""

import torch

from everserve.backends.cuda.recorder import Recorder
from everserve.memory.device import Driver
from tests.gpu.needs import DEVICE

pytestmark = DEVICE


def test_joined_graphs_do_what_they_do_one_by_one() -> None:
    """Also with a wait for a word in the middle, as where experts are waited for."""
    driver, recorder = Driver(), Recorder(torch.cuda.Stream())
    x, y, word = torch.zeros(3, 1 << 20, dtype=torch.int32, device="cuda")
    y.copy_(x.add_(1).mul_(2)).zero_()  # kernels are loaded before anything is recorded
    with recorder.record() as chain:
        x.add_(1)
        recorder.cut(lambda: y.copy_(x))
        driver.wait_all_geq(recorder.stream.cuda_stream, [word.data_ptr()], 0)
        x.mul_(2)
        recorder.cut(lambda: y.copy_(x))
        x.add_(1)
    assert chain.rest is not None and (len(chain.graphs), len(chain.asides)) == (3, 2)

    def after(first: int) -> int:
        x.fill_(5)
        torch.cuda.synchronize()
        with torch.cuda.stream(recorder.stream):
            chain.launch(first)
        torch.cuda.synchronize()
        assert x.min() == x.max() and not y.any(), "nothing aside"
        return int(x[0])

    assert [after(first) for first in (0, 1, 2, 0)] == [13, 11, 6, 13]
    y.fill_(0)
    x.fill_(5)
    with torch.cuda.stream(recorder.stream):
        assert chain.rehearse() == 2
    torch.cuda.synchronize()
    assert x[0] == ((5 + 1) * 2 + 1 + 1) * 2 + 1 and y[0] == (5 + 1) * 2
