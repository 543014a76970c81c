"""Processes that use the device, for tests which do not use it themselves: each runs one function."""

import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import pytest

from everserve.procs.mps import Mps
from tests.gpu.needs import HAS_MPS

_spawn = mp.get_context("spawn")


class Actor:
    """A process that runs one function, which talks to the test through a pipe."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_act, args=(function, theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, timeout_s: float = 60.0) -> Any:
        """What it says next; its failure is the test's."""
        assert self.pipe.poll(timeout_s), "it says nothing"
        kind, value = self.pipe.recv()
        assert kind == "said", value
        return value

    def tell(self, value: object) -> None:
        self.pipe.send(value)

    def give(self, fd: int) -> None:
        send_handle(self.pipe, fd, self.process.pid)

    def take(self) -> int:
        assert self.hear() == "descriptor"
        return recv_handle(self.pipe)

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(30)
        assert self.process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        self.pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _act(function: Callable[..., object], pipe: Connection, *arguments: object) -> None:
    try:
        function(pipe, *arguments)
        pipe.send(("said", "done"))
        pipe.poll(60)  # until the test is over
    except (EOFError, BrokenPipeError):
        pass
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


@contextmanager
def actors(*functions: Callable[..., object]) -> Iterator[list[Actor]]:
    cast = [Actor(function) for function in functions]
    try:
        yield cast
    finally:
        for actor in cast:
            actor.end()


def run_alone(function: Callable[..., object]) -> None:
    with actors(function) as (actor,):
        assert actor.hear() == "done"


@contextmanager
def through_mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Actors share the device. Nothing of that is left."""
    if not HAS_MPS:
        pytest.skip("needs nvidia-cuda-mps-control")
    mps = Mps.start()
    try:
        for name, value in mps.environment.items():
            monkeypatch.setenv(name, value)
        yield
    finally:
        mps.stop()
    deadline = time.monotonic() + 10
    while _mps_processes() and time.monotonic() < deadline:  # its parent may be slow to mourn it
        time.sleep(0.01)
    assert not _mps_processes(), "the daemon is still there"


def _mps_processes() -> list[str]:
    names = []
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        try:
            with open(f"/proc/{pid}/comm") as file:  # noqa: PTH123
                names.append(file.read().strip())
        except OSError:
            continue
    return [name for name in names if name.startswith("nvidia-cuda-mps") or name == "es-mps"]
