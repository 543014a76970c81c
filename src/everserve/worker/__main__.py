"""`python -m everserve.worker`: the zygote, started by the supervisor, never by hand.

It imports what workers need, starts no thread, and forks:

    ForkWorker + descriptors -> fork twice -> the worker, orphaned on purpose, becomes the supervisor's child

A fork of a process with threads inherits their locks but not the threads; that is why there are none here.
"""

import argparse
import gc
import logging
import os
import socket
import struct
import sys
import traceback
from pathlib import Path

from everserve.runtime import process
from everserve.runtime.channel import Channel, ChannelClosed
from everserve.runtime.messages import ForkWorker, Ready, Shutdown, WorkerForked
from everserve.tables.ids import Role

_PID = struct.Struct("<i")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--supervisor-pid", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    args = parser.parse_args()
    process.die_with(args.supervisor_pid)
    process.set_name("es-zygote")
    control = Channel(socket.socket(fileno=args.control_fd))

    from everserve.worker import boot  # noqa: PLC0415 (torch takes a second: be the supervisor's child first)

    boot.prepare()
    threads = len(list(Path("/proc/self/task").iterdir())) if Path("/proc/self/task").exists() else 1
    assert threads == 1, f"the zygote has {threads} threads; forking it would be unsafe"
    gc.collect()
    gc.freeze()  # keep the pages of what was imported shared between all workers
    control.send(Ready())
    try:
        return serve(control, args.supervisor_pid)
    except ChannelClosed:
        return 0


def serve(control: Channel, supervisor_pid: int) -> int:
    """Fork on demand, until told to stop."""
    while True:
        message = control.receive()
        if isinstance(message, ForkWorker):
            num_fds = 3 + (Role.ATTENTION in message.start.roles) + len(message.start.memory)
            fds = [control.take_fd() for _ in range(num_fds)]
            pid = fork_orphan(message, fds, control, supervisor_pid)
            for fd in fds:
                os.close(fd)
            start = message.start
            control.send(WorkerForked(rank=start.rank, incarnation=start.incarnation, pid=pid))
        elif isinstance(message, Shutdown):
            return 0


def fork_orphan(message: ForkWorker, fds: list[int], control: Channel, supervisor_pid: int) -> int:
    """Fork a process that forks the worker and ends, so that the worker's parent is the supervisor. Returns its pid."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        middle = os.getpid()
        worker = os.fork()
        if worker == 0:
            os.close(reader)
            os.close(writer)
            control.close()
            _become(message, fds, middle, supervisor_pid)
        os.write(writer, _PID.pack(worker))
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        return int(_PID.unpack(pipe.read(_PID.size))[0])


def _become(message: ForkWorker, fds: list[int], middle_pid: int, supervisor_pid: int) -> None:
    """Never returns: the worker's whole life."""
    status = 70
    try:
        while os.getppid() == middle_pid:
            os.sched_yield()  # it is about to end
        process.die_with(supervisor_pid)
        process.set_name(f"es-worker-{message.start.rank}")
        from everserve.worker import boot  # noqa: PLC0415

        status = boot.run(message.start, fds)
    except BaseException:  # the process boundary: say what happened, and die
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
