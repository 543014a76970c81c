"""`python -m everserve.zygote`: the zygote, started by the supervisor, never by hand.

It imports what workers need (imports.py), has no threads when it is done, and forks:

    ForkWorker + descriptors -> fork twice -> the worker, orphaned on purpose, becomes root's child

or sends the message to a waiting spare (spares.py), which was forked in the same way.

A fork of a process with threads inherits their locks but not the threads; so the zygote has none.

A fork may fail because there is no process or descriptor to be had (procs/scarcity.py). The zygote keeps the order,
with its descriptors, and tries again.
"""

import argparse
import contextlib
import errno
import logging
import os
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Collection

from everserve.procs import logs, process
from everserve.procs.scarcity import Retry, told_as_temporary
from everserve.wire.channel import RETRY_S, Channel, ChannelClosed
from everserve.wire.messages import ForkWorker, Ready, Shutdown, SpareForked, SparesChanged, StartZygote, WorkerForked
from everserve.zygote import imports
from everserve.zygote.spares import Like, Spare, Spares

log = logging.getLogger(__name__)

_PID = struct.Struct("<i")
_STDERR = 2


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root-pid", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    args = parser.parse_args()
    process.die_with(args.root_pid)
    process.die_sooner_than_parent()
    process.set_name("es-zygote")
    logs.configure("zygote")
    control = Channel(socket.socket(fileno=args.control_fd))
    process.raise_open_files()
    try:
        with told_as_temporary(control):
            start = _prepare(control)
            return Zygote(control, args.root_pid, start).run()
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
    logs.configure("zygote")
    for stderr in frame.fds.take():
        os.dup2(stderr, _STDERR)
        os.close(stderr)
    return frame.message


class Zygote:
    """Forks workers on demand and spares in advance."""

    def __init__(self, control: Channel, root_pid: int, start: StartZygote) -> None:
        self._control = control
        self._root_pid = root_pid
        self._spares = Spares(self._fork_spare, process.state_of, process.kill)
        self._spares.prepare(start.num_spares, start.like, time.monotonic())
        self._told = SparesChanged(pids=(), num_wanted=0)
        self._orders: deque[tuple[ForkWorker, list[int]]] = deque()  # workers that have still to be forked
        self._retry = Retry(log)

    def run(self) -> int:
        """Until Shutdown."""
        while True:
            for message, fds in self._control.receive_frames():  # some may have come with the first message
                if isinstance(message, ForkWorker):
                    self._orders.append((message, fds.take()))
                    self._fork_ordered()
                elif isinstance(message, Shutdown):
                    return 0
            self._fork_ordered()
            self._tell()
            self._wait()

    def _fork_ordered(self) -> None:
        """Workers, then spares."""
        self._retry.tend(time.monotonic())
        if not self._retry.is_due(time.monotonic()):
            return
        what = "fork a spare"
        try:
            while self._orders:
                what = f"fork worker {self._orders[0][0].start.rank}"
                self._start_worker(*self._orders[0])
            what = "fork a spare"
            self._spares.tend(time.monotonic())
        except OSError as error:
            self._retry.fail(what, error, time.monotonic())

    def _timeout_s(self) -> float | None:
        now = time.monotonic()
        spares_s, retry_s = self._spares.timeout_s(now), self._retry.timeout_s(now)
        if retry_s is None:
            return spares_s
        return retry_s if self._orders or spares_s is None else max(spares_s, retry_s)

    def _wait(self) -> None:
        """Uses poll, because forked workers would inherit an epoll descriptor."""
        with selectors.PollSelector() as selector:
            writes = selectors.EVENT_WRITE if self._control.wants_write else 0
            selector.register(self._control, selectors.EVENT_READ | writes)
            for channel in self._spares.channels:
                selector.register(channel, selectors.EVENT_READ)
            selector.select(self._timeout_s())
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
            pid = self._fork_orphan(lambda: _be_worker(message, fds), keep=fds)
        self._orders.popleft()
        for fd in fds:
            os.close(fd)
        self._control.send(WorkerForked(rank=start.rank, incarnation=start.incarnation, pid=pid))

    def _fork_spare(self, device: int, like: Like) -> Spare:
        with contextlib.ExitStack() as made:
            ours, theirs = map(made.enter_context, Channel.pair())
            lifeline, supervisors = map(made.enter_context, Channel.pair(are_packets=True))

            def live() -> int:
                ours.close()
                supervisors.close()
                return _be_spare(Channel(theirs), Channel(lifeline), like)

            pid = self._fork_orphan(live)
            self._control.give(SpareForked(pid=pid), [supervisors.detach()])  # before it has opened its device
            return Spare(pid, device, Channel(socket.socket(fileno=ours.detach())))

    def _fork_orphan(self, live: Callable[[], int], keep: Collection[int] = ()) -> int:
        """Fork a process that forks the orphan and exits, so that root becomes the orphan's parent. The
        orphan runs `live` and exits. Returns its pid. OSError if either fork fails: then there is no new process."""
        reader, writer = os.pipe()
        try:
            child = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
        if child == 0:
            middle = os.getpid()
            try:
                orphan = os.fork()
            except OSError as error:
                os._exit(error.errno or errno.EAGAIN)  # it must not go on as a second zygote
            if orphan == 0:
                os.close(reader)
                os.close(writer)
                for end in (self._control, *self._spares.channels):
                    end.close()  # or a spare would not see end of file when the zygote dies
                for fd in {fd for _, fds in self._orders for fd in fds}.difference(keep):
                    os.close(fd)  # nor would other workers
                _live(live, middle, self._root_pid)
            os.write(writer, _PID.pack(orphan))
            os._exit(0)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as pipe:
            pid = pipe.read(_PID.size)
        if code := max(0, os.waitstatus_to_exitcode(status)):
            raise OSError(code, os.strerror(code))
        return int(_PID.unpack(pid)[0])


# -- in the new process --------------------------------------------------------------------------


def _live(live: Callable[[], int], middle_pid: int, root_pid: int) -> None:
    """Never returns."""
    status = 70
    try:
        while os.getppid() == middle_pid:
            os.sched_yield()  # the process in between is about to exit
        process.die_with(root_pid)
        process.die_sooner_than_parent()
        status = live()
    except BaseException:  # the process boundary
        log.critical("this process ends", exc_info=True)
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)


def _be_spare(zygote: Channel, lifeline: Channel, like: Like) -> int:
    """Warm up, then wait for a ForkWorker and answer it; exits if the zygote ends."""
    from everserve.zygote.backend import backend_for  # noqa: PLC0415

    process.set_name("es-spare")
    logs.configure("spare")
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
    logs.configure(f"worker-{message.start.rank}")
    return boot.run(message.start, fds, backend_for(message.start.settings.compute.device))


if __name__ == "__main__":
    try:
        status = main()
    except SystemExit as end:
        status = int(end.code or 0)
    sys.stderr.flush()
    os._exit(status)  # taking torch's modules apart would be half a second of work for nothing
