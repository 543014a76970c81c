"""A worker's end of its channel to the orchestrator, which may die and be replaced at any time.

orchestrator dies  -> the channel ends; the worker continues to serve, and drops its messages to the orchestrator
supervisor         -> sends OrchestratorAttached + a new channel, through the lifeline
worker             -> reads the rest of the old channel, then sends Report to the new orchestrator

A gateway, likewise: TokensAttached + a new channel, which the attention worker's loop takes between two steps.

A worker exits when its lifeline ends: the supervisor does not know this process. (A zygote that dies
during a fork may leave a worker that was not announced to the supervisor.)
"""

import logging
import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType

from everserve.errors import ProtocolError
from everserve.procs.device_descriptors import entrust
from everserve.wire.channel import Channel, ChannelClosed, Descriptors
from everserve.wire.messages import AnyMessage, Hang, OrchestratorAttached, Report, TokensAttached

log = logging.getLogger(__name__)

Handle = Callable[[AnyMessage, Descriptors], None]


class ControlEnd:
    """One file descriptor to select on, which stays the same when the orchestrator is replaced. `make_report` makes the
    Report for a new orchestrator; None while the worker still starts."""

    def __init__(self, channel: Channel, lifeline: Channel) -> None:
        self.make_report: Callable[[], Report] | None = None
        self.num_dropped = 0  # frames that were not one of our messages
        self.is_cut = False  # the lifeline has ended
        self.new_gateways: dict[int, Channel] = {}  # by number: those that have come since the loop last looked
        self._channel: Channel | None = channel
        self._lifeline = lifeline
        self._epoll = select.epoll()
        self._epoll.register(channel, select.EPOLLIN)
        self._epoll.register(lifeline, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def send(self, message: AnyMessage) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def flush(self) -> None:
        if self._channel is not None:
            self._channel.flush()
        self._lifeline.flush()

    def leave_behind(self) -> None:
        """Send copies of the device descriptors, which must outlive this process (procs/device_descriptors.py)."""
        entrust(self._lifeline)

    def read(self, handle: Handle) -> None:
        """Handle all messages that have arrived."""
        self._read_channel(handle)
        if self.make_report is not None:
            self._read_lifeline(handle)

    def _read_channel(self, handle: Handle) -> None:
        if self._channel is None:
            return
        try:
            for message, fds in self._channel.receive_frames():
                if isinstance(message, Hang):
                    log.warning("an injected fault: this thread hangs")
                    threading.Event().wait()  # no thread sets it
                handle(message, fds)
            self.num_dropped = max(self.num_dropped, self._channel.num_dropped)
        except (ChannelClosed, ProtocolError):  # end of file, or a corrupt stream: the channel is unusable
            log.warning("the channel to the orchestrator ended; still serving")
            self._close_channel()

    def _read_lifeline(self, handle: Handle) -> None:
        try:
            for message, fds in self._lifeline.receive_frames():
                if isinstance(message, OrchestratorAttached):
                    (fd,) = fds.take()
                    self._replace(Channel.of_fd(fd), handle)
                elif isinstance(message, TokensAttached):
                    (fd,) = fds.take()
                    if (older := self.new_gateways.pop(message.gateway, None)) is not None:
                        older.close()
                    self.new_gateways[message.gateway] = Channel.of_fd(fd)
        except ChannelClosed:
            self.is_cut = True

    def _replace(self, channel: Channel, handle: Handle) -> None:
        while self._channel is not None:  # its sender is dead, so end of file will come
            self._read_channel(handle)
        self._channel = channel
        self._epoll.register(channel, select.EPOLLIN)
        assert self.make_report is not None
        channel.send(self.make_report())

    def _close_channel(self) -> None:
        assert self._channel is not None
        self._epoll.unregister(self._channel)
        self._channel.close()
        self._channel = None


class LeaveRequest:
    """Whether this worker was asked to leave, by SIGTERM or by the orchestrator. Readable (for select) from then on.
    The signal handler only sets a flag; the loop checks it between two steps."""

    def __init__(self) -> None:
        self.was_asked = False
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        signal.signal(signal.SIGTERM, self._on_signal)

    def fileno(self) -> int:
        return self._event_fd

    def ask(self) -> None:
        self.was_asked = True
        os.eventfd_write(self._event_fd, 1)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.ask()
