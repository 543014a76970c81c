"""The keeper: makes the gateway, and the next one when it has died.

    keeper ──one table of descriptors── gateway ──dies──> keeper: close what is no client's connection ──> next gateway

The keeper has imported everything and loaded the tokenizer, and then does nothing but wait, in one thread. Every
connection that the gateway accepts is in its table, too, so none is closed when the gateway dies; what was received and
what is to be sent is in the ledger. So the next gateway goes on with all of them (takeover.py).

A keeper that dies, or is of an older version, is followed by another one, which gets all connections (succession.py).

A gateway that hangs is ended: one that is stopped, and one whose loop has not run for seconds although it had the time.
Where a process cannot share its descriptors there is no keeper: this process is the gateway, and its end is the end of
all connections. Streams of clients that can come back outlive that, too: they are in the ledger.
"""

import contextlib
import logging
import os
import select
import signal
import socket
from collections.abc import Callable

from everserve.ledger.ledger import Ledger
from everserve.ledger.shared import SharedTable
from everserve.ledger.sockets import is_of_listener, socket_at
from everserve.procs import process
from everserve.procs.shared_descriptors import CLONE_FILES, can_share_descriptors, clone, num_threads
from everserve.wire.channel import Channel

_LOOK_S = 0.1  # between two looks at a gateway that lives
_STOPPED_LOOKS = 3  # in a row: then it is ended
_LEASE_S = 5.0  # for a loop that does not run ...
_LEASE_CPU_S = 2.0  # ... although it has had so much time of a CPU, or waits for something else
_MAX_EARLY_DEATHS = 10  # of gateways in a row that had not begun to serve

log = logging.getLogger(__name__)


class GatewayKeeper:
    """One keeper and its gateways. `live` is a gateway's whole life, and returns its exit status."""

    def __init__(
        self,
        control: Channel,
        ledger: Ledger,
        table: SharedTable,
        listen: socket.socket,
        live: Callable[[], int],
        root_pid: int,
        taken: frozenset[int] = frozenset(),
    ) -> None:
        """`taken`: connections of the keeper before."""
        self._control = control.sock
        self._undelivered = control.undelivered  # the first gateway reads them
        self._ledger = ledger
        self._table = table
        self._listen = listen
        self._live = live
        self._root_pid = root_pid
        self._taken = taken
        self._num_given = ledger.num_given
        self._own: frozenset[int] = frozenset()  # descriptors that are not a gateway's

    @staticmethod
    def is_possible() -> bool:
        if (num := num_threads()) > 1:
            log.warning("a library has started %d threads: connections end if the gateway dies", num - 1)
        elif not can_share_descriptors():
            log.warning("this system does not let processes share descriptors: connections end if the gateway dies")
        else:
            return True
        return False

    def run(self) -> int:
        """Until a gateway ends by itself. Returns its exit status."""
        self._own = process.open_fds() - self._undelivered - self._taken
        num_early = 0
        while True:
            pid = clone(CLONE_FILES)
            if pid == 0:
                self._be_gateway()
            status = self._wait(pid)
            if self._ledger.num_given > self._num_given:
                return 0  # the next keeper goes on
            self._table.serves = False
            self._close_rest()
            had_served = self._ledger.has_served
            if status == 0 or (status > 0 and not had_served) or self._is_alone():  # it has said why
                return status
            num_early = 0 if had_served else num_early + 1
            if num_early >= _MAX_EARLY_DEATHS:
                return 1
            log.warning("the gateway died (%s); the next one goes on", process.how(status))

    def _be_gateway(self) -> None:
        keeper = os.getppid()
        status = os.EX_SOFTWARE
        try:
            # It serves on as root's child if the keeper dies: until there is another one (succession.py).
            signal.signal(signal.SIGUSR1, lambda signum, frame: process.die_with(self._root_pid))
            process.hear_of_end_of(keeper, signal.SIGUSR1)
            status = self._live()
        except BaseException:
            log.exception("the gateway ends")
        finally:
            logging.shutdown()
            os._exit(status)

    def _wait(self, pid: int) -> int:
        """Waits for its end. Returns its status."""
        pidfd, hung = os.pidfd_open(pid), False
        try:
            poll = select.poll()  # which needs no descriptor
            poll.register(pidfd, select.POLLIN)
            watch = _Watch(pid, self._ledger)
            while not poll.poll(1000 * _LOOK_S):
                if why := watch.why_it_hangs():
                    log.warning("the gateway %s: it is killed", why)
                    hung = True
                    os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        finally:
            os.close(pidfd)
        if self._ledger.num_given == self._num_given:
            self._ledger.has_crashed = hung or os.waitstatus_to_exitcode(status) != -signal.SIGKILL
        return os.waitstatus_to_exitcode(status)

    def _is_alone(self) -> bool:
        """The supervisor has gone, or closed its end."""
        try:
            return not self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _close_rest(self) -> None:
        """What the dead gateway had open besides clients' connections. Its peers notice its end by this."""
        for fd in process.open_fds():
            if fd in self._own:
                continue
            sock = socket_at(fd)
            if sock is None:
                with contextlib.suppress(OSError):
                    os.close(fd)
            elif is_of_listener(sock, self._listen):
                sock.detach()
            else:
                sock.close()


class _Watch:
    """Looks at one gateway now and then."""

    def __init__(self, pid: int, ledger: Ledger) -> None:
        self._pid = pid
        self._ledger = ledger
        self._num_stopped = 0
        self._cpu_s = 0.0  # that it had used when its loop last ran

    def why_it_hangs(self) -> str:
        """Nothing, if it does not."""
        state = process.state_of(self._pid)
        self._num_stopped = self._num_stopped + 1 if state == "T" else 0
        if self._num_stopped >= _STOPPED_LOOKS:
            return "is stopped"
        cpu_s = process.cpu_s_of(self._pid)
        if not self._ledger.has_served or self._ledger.pulse_age_s < _LEASE_S:
            self._cpu_s = cpu_s
            return ""
        is_starved = state == "R" and cpu_s - self._cpu_s < _LEASE_CPU_S
        return "" if is_starved else "does not react"
