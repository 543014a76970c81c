"""`python -m everserve.zygote`: the zygote, started by the supervisor, never by hand.

It imports what workers need (imports.py), has no threads when it is done, and forks:

    ForkWorker + descriptors -> fork twice -> the worker, orphaned on purpose, becomes the supervisor's child

or sends the message to a waiting spare (spares.py), which was forked in the same way.

A fork of a process with threads inherits their locks but not the threads; so the zygote has none.
"""

import argparse
import contextlib
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable

from everserve.procs import process
from everserve.wire.channel import RETRY_S, Channel, ChannelClosed
from everserve.wire.messages import ForkWorker, Ready, Shutdown, SpareForked, SparesChanged, StartZygote, WorkerForked
from everserve.zygote import imports
from everserve.zygote.spares import Like, Spare, Spares

_PID = struct.Struct("<i")
_STDERR = 2


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--supervisor-pid", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    args = parser.parse_args()
    process.die_with(args.supervisor_pid)
    process.set_name("es-zygote")
    control = Channel(socket.socket(fileno=args.control_fd))
    process.raise_open_files()
    try:
        start = _prepare(control)
        return Zygote(control, args.supervisor_pid, start).run()
    except ChannelClosed:
        return 0


def _prepare(control: Channel) -> StartZygote:
    """Import everything. What workers will compute on is not known yet when this begins."""
    with imports.no_collections():
        hashing = imports.hash_triton()
        with imports.nothing_to_trace():
            from everserve.worker import boot  # noqa: F401, PLC0415 (imports torch: only after die_with)
            from everserve.zygote.backend import backend_for  # noqa: PLC0415

            backend_for("cpu").prepare()
        start = _receive_start(control)
        if hashing is not None:
            hashing.join()
        backend_for(start.device).prepare()
    threads = imports.num_threads()
    assert threads == 1, f"the zygote has {threads} threads; forking it would be unsafe"
    control.send(Ready())
    return start


def _receive_start(control: Channel) -> StartZygote:
    frame = control.receive_frame()
    assert frame is not None and isinstance(frame.message, StartZygote), frame
    os.environ.update(frame.message.environment)
    for stderr in frame.fds.take():
        os.dup2(stderr, _STDERR)
        os.close(stderr)
    return frame.message


class Zygote:
    """Forks workers on demand and spares in advance."""

    def __init__(self, control: Channel, supervisor_pid: int, start: StartZygote) -> None:
        self._control = control
        self._supervisor_pid = supervisor_pid
        self._spares = Spares(self._fork_spare, process.state_of, _kill)
        self._spares.prepare(start.num_spares, start.like, time.monotonic())
        self._told = SparesChanged(pids=(), num_wanted=0)

    def run(self) -> int:
        """Until Shutdown."""
        while True:
            for message, fds in self._control.receive_frames():  # some may have come with the first message
                if isinstance(message, ForkWorker):
                    self._start_worker(message, fds.take())
                elif isinstance(message, Shutdown):
                    return 0
            self._spares.tend(time.monotonic())
            self._tell()
            self._wait()

    def _wait(self) -> None:
        """Uses poll, because forked workers would inherit an epoll descriptor."""
        with selectors.PollSelector() as selector:
            writes = selectors.EVENT_WRITE if self._control.wants_write else 0
            selector.register(self._control, selectors.EVENT_READ | writes)
            for channel in self._spares.channels:
                selector.register(channel, selectors.EVENT_READ)
            selector.select(self._spares.timeout_s(time.monotonic()))
        self._control.flush()

    def _tell(self) -> None:
        now = SparesChanged(pids=self._spares.ready_pids, num_wanted=self._spares.num_wanted)
        if now != self._told:
            self._told = now
            self._control.send(now)

    def _start_worker(self, message: ForkWorker, fds: list[int]) -> None:
        start = message.start
        self._spares.learn(start, time.monotonic())
        pid = self._spares.become(message, fds, time.monotonic())
        if pid is None:
            pid = self._fork_orphan(lambda: _be_worker(message, fds))
        for fd in fds:
            os.close(fd)
        self._control.send(WorkerForked(rank=start.rank, incarnation=start.incarnation, pid=pid))

    def _fork_spare(self, device: int, like: Like) -> Spare:
        ours, theirs = Channel.pair()
        lifeline, supervisors = Channel.pair()

        def live() -> int:
            ours.close()
            supervisors.close()
            return _be_spare(Channel(theirs), Channel(lifeline), like)

        pid = self._fork_orphan(live)
        self._control.send(SpareForked(pid=pid), fds=[supervisors.fileno()])  # before it has opened its device
        for end in (theirs, lifeline, supervisors):
            end.close()
        return Spare(pid, device, Channel(ours))

    def _fork_orphan(self, live: Callable[[], int]) -> int:
        """Fork a process that forks the orphan and exits, so that the supervisor becomes the orphan's parent. The
        orphan runs `live` and exits. Returns its pid."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            middle = os.getpid()
            orphan = os.fork()
            if orphan == 0:
                os.close(reader)
                os.close(writer)
                for end in (self._control, *self._spares.channels):
                    end.close()  # or a spare would not see end of file when the zygote dies
                _live(live, middle, self._supervisor_pid)
            os.write(writer, _PID.pack(orphan))
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as pipe:
            return int(_PID.unpack(pipe.read(_PID.size))[0])


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# -- in the new process --------------------------------------------------------------------------


def _live(live: Callable[[], int], middle_pid: int, supervisor_pid: int) -> None:
    """Never returns."""
    status = 70
    try:
        while os.getppid() == middle_pid:
            os.sched_yield()  # the process in between is about to exit
        process.die_with(supervisor_pid)
        status = live()
    except BaseException:  # the process boundary: print the traceback and exit
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)


def _be_spare(zygote: Channel, lifeline: Channel, like: Like) -> int:
    """Warm up, then wait for a ForkWorker and answer it; exits if the zygote ends."""
    from everserve.zygote.backend import backend_for  # noqa: PLC0415

    process.set_name("es-spare")
    backend_for(like[0].settings.compute.device).rehearse(like, lifeline)
    while lifeline.wants_write:
        lifeline.wait(RETRY_S)
    lifeline.close()
    zygote.send(Ready())
    try:
        frame = zygote.receive_frame()
    except ChannelClosed:
        return 0
    assert frame is not None and isinstance(frame.message, ForkWorker), frame
    zygote.send(Ready())
    zygote.close()
    return _be_worker(frame.message, frame.fds.take())


def _be_worker(message: ForkWorker, fds: list[int]) -> int:
    from everserve.worker import boot  # noqa: PLC0415
    from everserve.zygote.backend import backend_for  # noqa: PLC0415

    process.set_name(f"es-worker-{message.start.rank}")
    return boot.run(message.start, fds, backend_for(message.start.settings.compute.device))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # taking torch's modules apart would be half a second of work for nothing
