"""Root: the first process of `everserve serve`, parent of all others, and the only one whose death ends the instance.

    root ──clone(CLONE_FILES)──> supervisor           one table of descriptors: what either opens, both have
      ├── gateway, orchestrator, anchor, zygote       root starts what the supervisor asks for
      └── workers, spares                             orphans of the zygote, which root adopts

A supervisor may die at any instruction: what it had open stays open, all processes are root's children and live on, and
root makes the next supervisor, which goes on from a table in shared memory (process_table.py). Root itself knows
nothing of the instance. It does six things:

    starts      what it is asked for, by name and descriptors (launching.py), and the first zygote (early_zygote.py)
    reaps       tells the supervisor which child has ended, and reaps it when the supervisor has recorded that: so no
                pid in the table is ever another process's
    replaces    a supervisor that has died, was stopped, or has said nothing for _SILENT_S
    passes on   signals that ask the instance to end, also to a supervisor that comes after them
    tells       the service manager, which listens to the first process only
    becomes     another version, by exec: pid, children and descriptors stay (upgrading.py)

Imports nothing but the standard library: it comes before everything else, has one thread for good, and is small enough
that the kernel, when memory is short, has nothing to gain from it.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from everserve.procs import early_zygote, process, service_manager
from everserve.procs.launching import launch
from everserve.procs.root_end import MOST_BYTES, RootEnd
from everserve.procs.shared_descriptors import CLONE_FILES, clone
from everserve.procs.signals import SignalPipe

_LOOK_EVERY_S = 1.0
_SILENT_S = 10.0  # a supervisor says something every second ...
_FIRST_WORD_S = 90.0  # ... when it has imported what it needs, which takes a busy host so much longer
_MAX_DEATHS = 10  # of supervisors ...
_DEATHS_WITHIN_S = 10.0  # ... within this time; beyond that the instance fails
_BLOCKED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD})

Live = Callable[[RootEnd], int]


def go_on(to_root: RootEnd) -> int:
    """What a supervisor does when the instance has begun."""
    from everserve.procs import next_supervisor  # noqa: PLC0415 (not in root)

    return next_supervisor.go_on(to_root)


def run(command: Live, successor: Live = go_on, found: dict[str, Any] | None = None) -> int:
    """The exit status of the instance. `command`: the whole command line, in the first supervisor; `successor`: what a
    supervisor does that comes after the instance has begun. `found`: what this process left if it was root."""
    process.adopt_orphans()
    process.raise_open_files()  # the limit is each process's own, also of descriptors that are shared
    root = _Root(command, successor, found or {})
    while (status := root.live_one()) is None:
        pass
    root.end_all()
    return status


class _Root:
    """One supervisor after the other."""

    def __init__(self, command: Live, successor: Live, found: dict[str, Any]) -> None:
        self._command, self._successor = command, successor
        left = frozenset(found.get("own_fds", ()))  # of all that is open the supervisor closes what nothing names
        others = process.open_fds() - left - early_zygote.descriptors() if left else early_zygote.descriptors()
        self._table_fd = found.get("table_fd", -1)
        if self._table_fd == -1:
            self._table_fd = os.memfd_create("process-table")  # not counted with memory that workers have
        self._selector = selectors.DefaultSelector()
        self._signals = SignalPipe(self._selector)
        self._stops: list[int] = found.get("stops", [])  # signals that have asked the instance to end
        self._started: set[int] = set(found.get("started", ()))  # children that root has started, and not reaped
        self._told: int | None = None  # a child that has ended, and the supervisor has not recorded it
        self._deaths_s: deque[float] = deque(maxlen=_MAX_DEATHS)
        self._before: int | None = found.get("before")  # how the supervisor before has ended
        self._next: str | None = None  # the interpreter of the version to become
        self._fallback: str | None = found.get("fallback")  # ... of the one before, until this one has taken over
        self._news: str = found.get("news", "")  # for the next supervisor: what has become of an upgrade
        self._done: int | None = None  # what the supervisor says that the status of the instance is
        self._supervisor = -1
        self._silent_at = 0.0  # when the supervisor has said nothing for too long
        self._pid = os.getpid()  # which the supervisor must know, too
        self._own_fds = process.open_fds() - others

    def live_one(self) -> int | None:
        """The life of one supervisor. The status of the instance, if that has ended with it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._supervisor = self._make_supervisor(theirs, self._own_fds | {ours.fileno(), theirs.fileno()})
        if (early := early_zygote.take()) is not None:  # it is that supervisor's
            self._started.add(early.pid)
        self._selector.register(ours, selectors.EVENT_READ)
        self._silent_at, self._told = time.monotonic() + _FIRST_WORD_S, None
        while (status := self._status()) is None:
            for key, _ in self._selector.select(_LOOK_EVERY_S):
                if key.data is self._signals:
                    self._pass_on(self._signals.read())
            self._read(ours)
            self._tell_exit(ours)
            self._end_if_silent()
        self._read(ours)  # its last words
        self._selector.unregister(ours)
        ours.close()
        theirs.close()
        return self._judge(status)

    # -- the supervisor --------------------------------------------------------------------------

    def _make_supervisor(self, end: socket.socket, own_fds: frozenset[int]) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)  # or it would write what it gets into our pipe
        try:
            pid = clone(CLONE_FILES)
            if pid == 0:
                self._be_supervisor(end, own_fds)
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)

    def _be_supervisor(self, end: socket.socket, own_fds: frozenset[int]) -> None:
        """Never returns: nothing that root has open may be closed on the way out."""
        status = os.EX_SOFTWARE
        try:
            process.die_with(self._pid)
            os.setpgid(0, 0)  # Ctrl-C reaches root alone, which passes it on
            process.die_sooner_than_parent()
            self._signals.leave_to_parent()
            to_root = RootEnd(end, self._table_fd, self._pid, own_fds, tuple(self._stops), self._before, self._news)
            if self._has_begun:
                status = self._successor(to_root)  # which takes signals when it can handle them
            else:
                if self._before is not None:
                    to_root.close_others(frozenset())
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
                status = self._command(to_root)
        except BaseException:  # the process boundary
            traceback.print_exc()
        finally:
            _flush()
            os._exit(status)

    @property
    def _has_begun(self) -> bool:
        """Whether there is an instance: the table has a header (process_table.py)."""
        return any(os.pread(self._table_fd, 16, 0))

    def _status(self) -> int | None:
        """How the supervisor has ended; None while it lives. One that was stopped is ended."""
        found = os.waitid(os.P_PID, self._supervisor, os.WEXITED | os.WSTOPPED | os.WNOHANG)
        if found is None:
            return None
        if found.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED):
            os.kill(self._supervisor, signal.SIGKILL)
            return None
        return _exit_status(found)

    def _end_if_silent(self) -> None:
        if self._has_begun and time.monotonic() > self._silent_at:
            os.kill(self._supervisor, signal.SIGKILL)

    def _judge(self, status: int) -> int | None:
        """The supervisor is dead: is that the end of the instance, and with which status?"""
        if self._done is not None:
            return self._done
        if not self._has_begun and (status >= 0 or self._stops):
            return status if status >= 0 else 128 - status  # what the command says, or as a shell says it
        self._before = status
        if self._next is not None:
            self._become(self._next, fallback=sys.executable, news="upgraded")
        elif self._fallback is not None:
            self._become(self._fallback, fallback=None, news="not upgraded")
        now = time.monotonic()
        if len(self._deaths_s) == _MAX_DEATHS and now - self._deaths_s[0] < _DEATHS_WITHIN_S:
            print(f"everserve: the supervisor died again and again (status {status}); stopping", file=sys.stderr)
            return 1
        self._deaths_s.append(now)
        if not self._has_begun:  # the command begins anew
            self.end_all()
        return None

    def _become(self, python: str, fallback: str | None, news: str) -> None:
        """Go on in this interpreter. The supervisor is dead, so no other process has this table of descriptors. Returns
        if there is no such program; signals wait meanwhile."""
        internal = {self._selector.fileno(), *self._signals.descriptors}
        left = {
            "table_fd": self._table_fd,
            "own_fds": sorted(self._own_fds - internal),
            "stops": self._stops,
            "started": sorted(self._started),
            "before": self._before,
            "fallback": fallback,
            "news": news,
        }
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        for fd in process.open_fds() - internal:
            os.set_inheritable(fd, True)
        try:
            os.execv(python, [python, "-m", "everserve.procs.root", json.dumps(left)])
        except OSError as error:
            self._next, self._news = None, f"not upgraded: {python}: {error.strerror}"
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)

    def _pass_on(self, signums: bytes) -> None:
        for signum in signums:
            if signum != signal.SIGCHLD:
                self._stops.append(signum)
                os.kill(self._supervisor, signum)

    # -- children --------------------------------------------------------------------------------

    def _tell_exit(self, supervisor: socket.socket) -> None:
        """One after the other: as long as a child is not reaped, the kernel may name no other."""
        if self._told is not None:
            return
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is not None and found.si_pid != self._supervisor:
            self._told = found.si_pid
            _send(supervisor, {"exited": found.si_pid, "status": _exit_status(found)})

    def _read(self, supervisor: socket.socket) -> None:
        """All that the supervisor has said."""
        while True:
            try:
                data = supervisor.recv(MOST_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._silent_at = time.monotonic() + _SILENT_S
            self._handle(supervisor, json.loads(data))

    def _handle(self, supervisor: socket.socket, said: dict[str, Any]) -> None:
        match said:
            case {"recorded": pid}:
                if pid == self._told:
                    os.waitpid(pid, 0)
                    self._started.discard(pid)
                    self._told = None
                    self._tell_exit(supervisor)
            case {"start": name, "fds": fds, "environment": environment, "without": without}:
                own = {key: value for key, value in os.environ.items() if key not in without}
                _send(supervisor, self._start(name, fds, own | environment))
            case {"tell": assignments}:
                service_manager.tell(*assignments)
            case {"done": status}:
                self._done = status
            case {"become": python}:
                self._next = python
            case {"has taken over": _}:
                self._fallback, self._news = None, ""

    def _start(self, name: str, fds: dict[str, int], environment: dict[str, str]) -> dict[str, Any]:
        try:
            child = launch(name, fds, environment)
        except OSError as error:
            return {"errno": error.errno, "error": error.strerror}
        self._started.add(child)
        return {"started": child}

    def end_all(self) -> None:
        """What root has started, and is left. The kernel ends the others with root."""
        for pid in self._started:
            os.kill(pid, signal.SIGKILL)
        for pid in self._started:
            os.waitpid(pid, 0)
        self._started.clear()


def _exit_status(found: "os.waitid_result") -> int:
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _send(supervisor: socket.socket, message: dict[str, Any]) -> None:
    """Never blocks: there is one message of each kind at most that was not answered."""
    try:
        supervisor.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
    except BlockingIOError:
        return


def main() -> int:
    """This process was root before, of another version."""
    found = json.loads(sys.argv[1])
    return run(go_on, go_on, found)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


if __name__ == "__main__":
    sys.exit(main())
