"""The processes that a supervisor has started, but for workers: a channel to each, and how each ends.

What is sent to one that is not there, or is about to end, is dropped: its successor is told everything. A child is over
when its process has ended and its channel, too: what it said last has been heard then.
"""

import contextlib
import logging
import os
import selectors
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everserve.errors import ProtocolError
from everserve.procs.deferred_close import DeferredClose, Held
from everserve.procs.root_end import RootEnd
from everserve.procs.scarcity import is_scarcity
from everserve.wire.answers import Answers
from everserve.wire.channel import Channel, ChannelClosed, Descriptors
from everserve.wire.messages import Answered, AnyMessage, Failed

KILL_AFTER_S = 3.0  # after Shutdown or the end of its channel, until a process is killed

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Child:
    """One started process and the supervisor's end of its control channel."""

    name: str
    pid: int
    control: Channel
    status: int | None = None  # it has ended so
    is_ready: bool = False
    failure: Failed | None = None
    end_by: float | None = None  # set when its channel has ended: killed if it still runs at this time
    held: Held = field(init=False)

    def __post_init__(self) -> None:
        self.held = Held(self.name)

    @property
    def title(self) -> str:
        """The process's name as it is shown."""
        return self.name

    def signal(self, signum: signal.Signals) -> None:
        """Its pid is its own until its end is known here."""
        if self.status is None:
            os.kill(self.pid, signum)


class Children(Mapping[str, Child]):
    """All of them, by name. `replaceable`: those whose place another one takes; `environment`: what each gets."""

    def __init__(
        self,
        root: RootEnd,
        selector: selectors.BaseSelector,
        replaceable: Sequence[str],
        environment: Callable[[], dict[str, str]],
        on_started: Callable[[Child], None],
    ) -> None:
        self.answers = Answers()
        self.deferred = DeferredClose()
        self._root = root
        self._selector = selector
        self._replaceable = replaceable
        self._environment = environment
        self._on_started = on_started
        self._named: dict[str, Child] = {}

    def __getitem__(self, name: str) -> Child:
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    # -- beginnings ------------------------------------------------------------------------------

    def spawn(
        self,
        name: str,
        fds: Mapping[str, int],
        start: AnyMessage | None = None,
        start_fds: Sequence[int] = (),
        make: Callable[[str, int, Channel], Child] = Child,
        are_packets: bool = False,
    ) -> None:
        """`are_packets`: what the next supervisor reads on must come in packets."""
        ours, theirs = Channel.pair(are_packets=are_packets)
        with theirs:
            try:
                pid = self.start(name, {"--control-fd": theirs.fileno(), **fds})
            except BaseException:
                ours.close()
                raise
        self.add(make(name, pid, Channel(ours, waits_for_room=True)), start, start_fds)

    def start(self, name: str, fds: Mapping[str, int]) -> int:
        """The process alone; its pid."""
        return self._root.start(name, fds, self._environment())

    def add(self, child: Child, start: AnyMessage | None = None, fds: Sequence[int] = ()) -> None:
        if start is not None:
            child.control.send(start, fds)
        self.restore(child)
        self._on_started(child)

    def restore(self, child: Child) -> None:
        """One that the supervisor before has started."""
        self._named[child.name] = child
        self._selector.register(child.control, selectors.EVENT_READ, child)

    # -- words -----------------------------------------------------------------------------------

    def send(self, name: str, message: AnyMessage, fds: Sequence[int] = ()) -> None:
        if isinstance(message, Answered):
            self.answers.note(message)
        child = self._named.get(name)
        if child is not None and child.end_by is None:
            with self._replaced_if_broken(child):
                child.control.send(message, fds)

    def give(self, name: str, message: AnyMessage, fds: list[int]) -> None:
        """Sends as `send`; the descriptors are not ours any more."""
        child = self._named.get(name)
        if child is not None and child.end_by is None:
            with self._replaced_if_broken(child):
                child.control.give(message, fds)
        else:
            for fd in fds:
                os.close(fd)

    def send_all(self, message: AnyMessage) -> None:
        for name in self._named:
            self.send(name, message)

    def sender(self, name: str) -> Callable[..., None]:
        def send(message: AnyMessage, fds: Sequence[int] = ()) -> None:
            self.send(name, message, fds)

        return send

    def receive(self, child: Child, handle: Callable[[Child, AnyMessage, Descriptors], None]) -> None:
        """Handles what it has said, and notes if it will say no more."""
        try:
            for message, fds in child.control.receive_frames():
                handle(child, message, fds)
        except ChannelClosed:
            self._end_channel(child, child.control.close)
        except ProtocolError as error:
            log.warning("the %s is replaced: %s", child.name, error)
            self._give_up(child)

    def flush(self) -> None:
        for child in self._named.values():
            with self._replaced_if_broken(child):
                child.control.flush()

    @property
    def are_held_back(self) -> bool:
        """Something could not be sent, or received, for want of room."""
        return any(child.control.is_held_back for child in self._named.values())

    @property
    def have_no_room(self) -> bool:
        """What cannot be received stays readable."""
        return any(child.control.has_no_room for child in self._named.values())

    # -- ends ------------------------------------------------------------------------------------

    def note_exit(self, pid: int, status: int) -> bool:
        """Whether it was one of these. What becomes of that is decided when its channel has ended, too."""
        child = next((child for child in self._named.values() if child.pid == pid), None)
        if child is None:
            return False
        child.status = status
        self.is_broken(child)  # then its channel would not end
        return True

    def over(self) -> list[tuple[Child, int]]:
        """Those that are over, and how they ended. What takes too long to end is killed."""
        over = []
        for child in self._named.values():
            if child.end_by is not None and child.status is not None:
                over.append((child, child.status))
            elif child.end_by is not None and time.monotonic() >= child.end_by:
                child.signal(signal.SIGKILL)
        return over

    def drop(self, child: Child) -> None:
        """It is over; what it held of devices is closed later."""
        self.deferred.close_later(child.held)
        del self._named[child.name]

    def is_broken(self, child: Child) -> bool:
        """Whether the descriptor of its channel is not that socket any more: other code has closed it by mistake.
        Then the child is killed, and its end is handled as any other. What has that number now is not closed."""
        fd = child.control.fileno()
        if child.end_by is not None or _is_socket(fd):
            return False
        log.warning("the %s is replaced: descriptor %d, which was its channel, is %s", child.name, fd, _file_of(fd))
        self._end_channel(child, child.control.abandon)
        child.signal(signal.SIGKILL)
        return True

    @contextlib.contextmanager
    def _replaced_if_broken(self, child: Child) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.is_broken(child):
                return
            if not is_scarcity(error) or child.name not in self._replaceable:
                raise
            log.warning("the %s is replaced: it cannot be told what it must know: %s", child.name, error)
            self._give_up(child)

    def _give_up(self, child: Child) -> None:
        """Kill it; its end is handled as any other."""
        self._end_channel(child, child.control.close)
        child.signal(signal.SIGKILL)

    def _end_channel(self, child: Child, close: Callable[[], None]) -> None:
        self._selector.unregister(child.control)
        close()
        child.end_by = time.monotonic() + KILL_AFTER_S


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def _file_of(fd: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return "closed"
